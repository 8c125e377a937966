"""Write benchmarks/README.md from the newest records in results/: ``python benchmarks/make_readme.py``.

The docstring of a function that makes a table is the text above the table.
"""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

HERE, MIB = Path(__file__).parent, 2**20
PAGE = HERE / "README.md"
Record = dict[str, Any]
ZERO = "torch DDP + ZeRO"
PLACES: dict[str, Record] = {  # of the ranks: which runs
    "one machine, W=2": {"rate": None, "ranks": 2},
    "one machine, W=4": {"rate": None, "ranks": 4},
    "links, W=2": {"rate": "1gbit", "ranks": 2, "per_host": 1},
    "links, W=4": {"rate": "1gbit", "ranks": 4, "per_host": 1},
    "two hosts of two": {"rate": "1gbit", "ranks": 4, "per_host": 2},
    "Muon, W=2": {"rate": None, "ranks": 2, "muon": True},
}
HEAD = """# Benchmarks

Made by `python benchmarks/make_readme.py` from the newest records in `results/`. Do not edit.

Each script prints a table and appends a record to `results/NAME.json`. `--dry` writes no record, `--help`
lists the options. The scripts need the package and `rich`, and start their own ranks: gloo over loopback, one
thread a rank. `--link` connects ranks by emulated links of 1 Gbit/s, and needs root. `make bench` runs all
but `conformance.py`, which writes [conformance.md](../docs/conformance.md).

Contenders take turns in one run. Times are medians of the slowest rank. Compare ratios within one run, not
times of two runs. A ratio between 0.9 and 1.1 counts as equal. W is the number of ranks; four ranks share two
cores. "ZeRO" is `torch.distributed.optim.ZeroRedundancyOptimizer`. "View" is its
`parameters_as_bucket_view=True`, or DDP's `gradient_as_bucket_view=True`. The GPT has 13.8 M parameters.

Machine: {machine}. `calls.py`, `mesh.py` and `watchdog.py` have no record yet.
`make_picture.py` draws this:

![times of an iteration, ours and PyTorch's, over links and on one machine](iterations.png)
"""
Rows = Iterator[list[str]]


def records_of(name: str) -> list[Record]:
    records: list[Record] = json.loads((HERE / "results" / f"{name}.json").read_text())
    return records


def newest(name: str, used: list[Record]) -> Any:  # noqa: ANN401  # what a benchmark has recorded
    used.append(records_of(name)[-1])
    return used[-1]["results"]


def newest_run(name: str, place: str, used: list[Record]) -> Record:
    """Return the newest run of the GPT at a place, or nothing."""
    defaults = {"model": "gpt", "muon": False, "per_host": 1, "rate": ""}
    for record in reversed(records_of(name)):
        for run in record["results"]["runs"]:
            has: Record = defaults | run
            wanted = {"model": "gpt", "muon": False} | PLACES[place]
            if "seconds" in run and all(has[key] == value for key, value in wanted.items()):
                used.append(record)
                return has
    return {}


def step(used: list[Record]) -> Rows:
    """`optimizer.step()`, with gradients set before."""
    runs: dict[str, list[Record]] = {}
    for run in newest("step", used):
        runs.setdefault(run["workload"], []).append(run["median_ms"])
    yield ["workload", "ZeRO, ms: W=2", "W=4", "ours / ZeRO: W=2", "W=4", "ours / view: W=2", "W=4"]
    for workload, pair in runs.items():
        others = ("torch ZeRO", "torch ZeRO, bucket view")
        ratios = [f"{times['zero_optim'] / times[other]:.2f}" for other in others for times in pair]
        yield [workload, *(f"{times['torch ZeRO']:.3g}" for times in pair), *ratios]


def reducer(used: list[Record]) -> Rows:
    """Forward, backward and reduction of our DDP, divided by PyTorch's DDP; growth of resident memory."""
    results = newest("reducer", used)
    runs: dict[str, list[Record]] = {}
    for run in results["runs"]:
        title = run["model"] + (", view" if run["gradient_as_bucket_view"] else "")
        runs.setdefault(title, []).append(run)
    yield ["model", "W=2", "W=4", "MiB at W=4: PyTorch's", "ours"]
    for title, pair in runs.items():
        peaks = [f"{pair[-1]['peak_nbytes'][who] / MIB:.0f}" for who in ("torch", "ours")]
        yield [title, *(f"{run['ratio']:.2f}" for run in pair), *peaks]
    yield ["geometric mean", f"{results['geometric_mean']:.2f}"]


def overlap(used: list[Record]) -> Rows:
    """An iteration of the GPT with AdamW(fused), divided by PyTorch's DDP + ZeRO at its best settings.

    *Lazy* is `gather_lazily`, *gradients sharded* is `ShardedDataParallel`.
    """
    places = [place for place in PLACES if "Muon" not in place]
    runs = [newest_run("overlap", place, used)["seconds"] for place in places]
    yield ["recipe", *places]
    yield ["PyTorch's, ms", *(f"{1000 * seconds[ZERO]:.0f}" for seconds in runs)]
    for recipe in runs[0]:
        if recipe != ZERO and "sockets" not in recipe and "to owners" not in recipe:  # of former versions
            ratios = [f"{run[recipe] / run[ZERO]:.2f}" if recipe in run else "" for run in runs]
            yield [recipe.replace(ZERO, "PyTorch's"), *ratios]


def fully_sharded(used: list[Record]) -> Rows:
    """An iteration with parameters sharded, divided by FSDP2; each block of the GPT is a unit.

    Muon trains a smaller GPT. The last columns are the peak growth of resident memory in training, W=2.
    """
    runs = {place: run for place in PLACES if (run := newest_run("fully_sharded", place, used))}
    measured = [record for record in records_of("fully_sharded") if "--rounds 0" in record["command"]]
    used.append(measured[-1])
    peaks = measured[-1]["results"]["runs"][0]["peak_nbytes"]
    yield ["units", *runs, "MiB: FSDP2", "ours"]
    for mode in ("resharded", "kept"):
        pairs = [[run["seconds"].get(f"{who}, {mode}") for who in ("FSDP2", "ours")] for run in runs.values()]
        ratios = [f"{own / other:.2f}" if other else "" for other, own in pairs]
        memory_of = [f"{peaks[f'{who}, {mode}']['training'] / MIB:.0f}" for who in ("FSDP2", "ours")]
        yield [mode, *ratios, *memory_of]


def fsdp2_owners(used: list[Record]) -> Rows:
    """`optimizer.step()` on DTensors of FSDP2, divided by the faster of what others do.

    They are: each rank gathers and steps all matrices, and PyTorch's class on the DTensors.
    """
    runs: dict[str, list[Record]] = {}
    for run in newest("fsdp2_owners", used):
        runs.setdefault(run["workload"], []).append(run["median_ms"])
    yield ["workload", "all gather, ms: W=2", "W=4", "DTensors, ms: W=2", "W=4", "ours / faster: W=2", "W=4"]
    for workload, pair in runs.items():
        columns = ("all gather", "DTensors")
        times = [f"{ms[each]:.3g}" if each in ms else "" for each in columns for ms in pair]
        ratios = [f"{ms['owners'] / min(ms[each] for each in columns if each in ms):.2f}" for ms in pair]
        yield [workload, *(times), *ratios]


def memory(used: list[Record]) -> Rows:
    """MiB on the rank that needs most, for gradients at the peak: AdamW on the GPT."""
    results = newest("memory", used)
    yield ["", *(f"W={run['ranks']}" for run in results["sharded"])]
    yield ["state, unsharded", *[f"{results['unsharded']['state'] / MIB:.0f}"] * len(results["sharded"])]
    yield ["state", *(f"{max(run['state_nbytes']) / MIB:.0f}" for run in results["sharded"])]
    for key in results["gradients"][0]["peak_nbytes"]:
        peaks = [f"{run['peak_nbytes'][key] / MIB:.0f}" for run in results["gradients"]]
        yield [f"gradients: {key.replace('torch', 'PyTorch')}", *peaks]


def muon(used: list[Record]) -> Rows:
    """Muon on two ranks, with matrices spread by elements (`numel`) or by work (`matmul`)."""
    yield ["matrices", "cost", "work, max / mean", "step, ms", "unsharded, ms"]
    for run in newest("muon", used):
        times = [f"{run[key]:.0f}" for key in ("step_ms", "unsharded_ms")]
        yield [run["workload"], run["cost"], f"{run['work_max_over_mean']:.2f}", *times]


def consolidate(used: list[Record]) -> Rows:
    """`consolidate_state_dict(to=0)`, and the growth of resident memory on other ranks, in MiB."""
    yield ["elements", "W", "ZeRO, s", "ours", "ours / ZeRO", "MiB: ZeRO", "ours"]
    for run in newest("consolidate", used):
        other, own = (run["seconds"][who] for who in ("torch ZeRO", "zero_optim"))
        growth = [f"{max(run[who]['others_growth_mib']):.0f}" for who in ("torch ZeRO", "zero_optim")]
        times = [f"{other:.2f}", f"{own:.3f}", f"{own / other:.3f}"]
        yield [f"{run['millions']} M", str(run["ranks"]), *times, *growth]


def checkpoint(used: list[Record]) -> Rows:
    """Seconds to save and load 24 M parameters with AdamW, flushed to the disk.

    *One file* is `consolidate_state_dict` with `torch.save`, not flushed.
    """
    keys = ["save", "load", "save_async, stall", "save_async, whole", "one file, save", "one file, load"]
    yield ["W", *keys, "bytes read / own"]
    for run in newest("checkpoint", used):
        read = max(rank["read_nbytes"] / rank["own_nbytes"] for rank in run["by_rank"])
        yield [
            str(run["ranks"]),
            *(f"{run['by_rank'][0]['seconds'][key]:.3f}" for key in keys),
            f"{read:.3f}",
        ]


def partition(used: list[Record]) -> Rows:
    """CPU seconds to plan 100,000 parameters, and a million, over 16,384 ranks, in one process."""
    results = newest("partition", used)
    yield ["sizes", "plan", "with tensors", "a million", "load, max / mean", "max / lower bound"]
    for name, run in results["sizes"].items():
        times = [run["cpu_seconds"]["plan (sum)"], run["cpu_seconds"]["make_plan"]]
        figures = [*times, results["many"][name]["plan (sum)"], run["max_over_mean_load"]]
        yield [name, *(f"{figure:.2f}" for figure in (*figures, run["max_over_lower_bound"]))]


def scale(used: list[Record]) -> Rows:
    """A rank's step over PyTorch's fake group, which sends nothing: Llama of 7 G parameters, and GPT-2.

    Models are narrower, and sizes in bytes smaller by as much, so plans are those of the full models.
    Launches are operators that would start a kernel or a copy, divided by those of training without ranks.
    CPU: on 8 ranks, and on 1,024. Built in: CPU seconds. Received: bytes of a reduction that live at once, in
    buckets of the largest size. Where counts on 1,024 ranks are missing, other columns are those on 8.
    """
    results = newest("scale", used)
    sizes = ("8", "64", "1024", "16384")
    yield [
        "",
        *(f"collectives, W={int(size):,}" for size in sizes),
        "launches",
        "CPU, ms",
        "built in, s",
        "received",
    ]
    for model, run in results.items():
        ranks: dict[str, Any] = run["ranks"]
        last = next(size for size in ("1024", "64", "8") if size in ranks)
        for name, of in ranks[last].items():
            counts = [f"{ranks[size][name]['collectives']:,}" if size in ranks else "" for size in sizes]
            times = f"{ranks['8'][name]['cpu_ms']:.0f} to {of['cpu_ms']:.0f}"
            received = f"{of['received_nbytes'] / of['largest_nbytes']:.1f}" if "buckets" in of else ""
            figures = [f"{of['launches'] / ranks[last]['plain']['launches']:.2f}", times]
            yield [f"{model}, {name}", *counts, *figures, f"{of['construction_cpu_s']:.2f}", received]


def section(rows_of: Callable[[list[Record]], Rows]) -> str:
    used: list[Record] = []
    head, *rows = [f"| {' | '.join(row)} |" for row in rows_of(used)]
    commands = {record["command"].partition("/")[2]: record["date"][:10] for record in used}
    sources = "; ".join(f"`{command}`, {date}" for command, date in commands.items())
    text = " ".join((rows_of.__doc__ or "").split())
    lines = [head, "|" + "---|" * (head.count("|") - 1), *rows]
    return f"## {rows_of.__name__}.py\n\n{text} {sources}.\n\n" + "\n".join(lines) + "\n"


def page() -> str:
    """Return the page that belongs to the records."""
    has = records_of("step")[-1]["machine"]
    machine = f"{has['cores']} CPU cores ({has['architecture']}, {has['system']}), Python {has['python']}"
    tables = [step, reducer, overlap, fully_sharded, fsdp2_owners, memory, muon, consolidate, checkpoint]
    tables += [partition, scale]
    parts = [HEAD.format(machine=f"{machine}, PyTorch {has['torch']}"), *map(section, tables)]
    return "\n".join(parts)


if __name__ == "__main__":
    PAGE.write_text(page())
