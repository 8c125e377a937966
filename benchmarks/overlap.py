"""Iterations of training recipes, compared with PyTorch's DDP and ZeRO at their best settings.

AdamW(fused), one thread a rank; contenders take turns in one run. "compute alone" is forward, backward and
the step of a rank's share, without communication. The time of an iteration beyond it is exposed
communication, and whatever else the recipe does. Beside it stands how long communication held callers up by
`metrics()`.

Where threads that send share cores with those that compute, exposed communication is more than waits, which
`metrics()` counts. The rest is told apart, both beyond what they are in "compute alone": *queued* is how long
the rank's thread was ready to run and had no core, as Linux counts it; *computed* is how much longer it ran.
That is what a recipe does besides, and time that the system takes from the thread to move packets, or that
colder caches cost.

The bound is compute alone, then all bytes at the rate of the link: 2 (H-1)/H times the parameters' bytes
from each of H hosts, which have one rank each, or as many as `--per-host` says. Bytes on the wire are those
that a host's interface has sent, with headers and acknowledgements.
"""

from collections.abc import Callable
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from harness import arguments, launch, medians, record, show, time_interleaved
from link import Link, add_options, linked, rate_of, where
from recipes import ALONE, COMPUTED, CONSECUTIVE, QUEUED, TORCH, Contender, chosen

EXPOSED, SENT = "exposed_seconds/total", "sent_bytes/total"


def worker(name: str, every: bool, sockets: bool, rounds: int, link: Link | None) -> dict[str, Any]:
    """Time all recipes, and read the counters; runs on each rank, and gives figures of all ranks."""
    contenders = {kind: make(name) for kind, make in chosen(every=every, sockets=sockets).items()}
    told: dict[str, list[dict[str, float]]] = {kind: [] for kind in contenders}
    times = time_interleaved(
        {kind: _noting(each, told[kind]) for kind, each in contenders.items()}, rounds, warmup=2
    )
    figures = {kind: _medians(rows[-rounds:]) for kind, rows in told.items()}
    wire = {kind: _nbytes_on_wire(each, link) for kind, each in contenders.items() if link is not None}
    return {
        "seconds": {kind: seconds / CONSECUTIVE for kind, seconds in medians(times).items()},
        "metrics": {kind: rows for kind, row in figures.items() if (rows := _means(row))},
        "wire_nbytes": {kind: _of_ranks(nbytes / (1 + CONSECUTIVE)) for kind, nbytes in wire.items()},
        "param_nbytes": contenders[ALONE].nbytes,
    }


def _noting(contender: Contender, told: list[dict[str, float]]) -> Callable[[], float]:
    """Keep the metrics of each turn; to read them is part of the turn, as in training."""

    def turn() -> float:
        seconds = contender.turn()
        told.append(contender.metrics())
        return seconds

    return turn


def _medians(rows: list[dict[str, float]]) -> dict[str, float]:
    """Give the median over turns of each metric, of one iteration."""
    return {key: median(row[key] for row in rows) / CONSECUTIVE for key in rows[0]}


def _means(figures: dict[str, float]) -> dict[str, float]:
    """Give the mean of each metric over all ranks; all ranks call."""
    if not figures:
        return {}
    totals = torch.tensor(list(figures.values()), dtype=torch.float64)
    dist.all_reduce(totals)
    return dict(zip(figures, (totals / dist.get_world_size()).tolist(), strict=True))


def _nbytes_on_wire(contender: Contender, link: Link) -> int:
    """Count what this rank's interface sends in one turn; all ranks call."""
    dist.barrier()  # nothing of the turn before is under way
    before = link.nbytes_sent()
    contender.turn()
    dist.barrier()
    return link.nbytes_sent() - before


def _of_ranks(value: float) -> list[float]:
    """Give the values of all ranks, by rank."""
    mine = torch.tensor([value], dtype=torch.float64)
    values = [torch.zeros_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(values, mine)
    return torch.cat(values).tolist()


def measure(
    name: str, ranks: int, rounds: int, recipes: tuple[bool, bool], rate: str | None, per_host: int
) -> dict[str, Any]:
    hosts = ranks // per_host
    with linked(rate, hosts, per_host) as link:
        run: dict[str, Any] = launch(ranks, worker, name, *recipes, rounds, link, link=link)[0]
    of_rank, of_host = (2 * (size - 1) / size * run["param_nbytes"] for size in (ranks, hosts))
    run |= {"model": name, "ranks": ranks, "rate": rate, "per_host": per_host}
    run |= {"ideal_nbytes": of_rank, "ideal_of_host": of_host}
    if link is not None:
        run["bound_seconds"] = run["seconds"][ALONE] + of_host / link.nbytes_per_second
    return run


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--rounds", type=int, default=20, metavar="N", help="timed turns (20)")
    parser.add_argument("--models", nargs="+", default=["gpt"], help="gpt, tiny, resnet (gpt)")
    parser.add_argument("--ranks", nargs="+", type=int, default=[2], help="numbers of ranks (2)")
    parser.add_argument("--every", action="store_true", help="more recipes, such as zero_step everywhere")
    parser.add_argument(
        "--sockets", action="store_true", help="ours also where ranks of a host share no memory"
    )
    parser.add_argument(
        "--per-host", type=int, default=1, metavar="L", help="ranks on each host of a link (1)"
    )
    add_options(parser)
    options = parser.parse_args()
    rate = rate_of(options)
    cases = [(name, ranks) for name in options.models for ranks in options.ranks]
    recipes = options.every, options.sockets
    runs = [measure(name, ranks, options.rounds, recipes, rate, options.per_host) for name, ranks in cases]
    for run in runs:
        tell(run)
    record("overlap", {"rate": rate, "runs": runs}, dry=options.dry)


def tell(run: dict[str, Any]) -> None:
    """Print one run: times, ratios, exposed communication, bytes."""
    times, ideal, bound = run["seconds"], run["ideal_nbytes"], run.get("bound_seconds")
    rows = []
    for kind, seconds in times.items():
        metrics, wire = run["metrics"][kind], run["wire_nbytes"].get(kind)
        is_ours = EXPOSED in metrics
        queued, computed = (metrics[each] - run["metrics"][ALONE][each] for each in (QUEUED, COMPUTED))
        rows.append(
            [
                kind,
                f"{seconds * 1e3:.1f}",
                f"{seconds / times[TORCH]:.3f}",
                "" if bound is None else f"{seconds / bound:.3f}",
                f"{(seconds - times[ALONE]) * 1e3:.1f}",
                f"{metrics[EXPOSED] * 1e3:.1f}" if is_ours else "",
                f"{queued * 1e3:.1f}",
                f"{computed * 1e3:.1f}",
                f"{metrics[SENT] / ideal:.4f}" if is_ours and ideal else "",
                "" if wire is None else f"{sum(wire) / len(wire) / run['ideal_of_host']:.4f}",
                "" if wire is None else f"{max(wire) / run['ideal_of_host']:.4f}",
            ]
        )
    columns = ["iteration", "ms", "/ torch's", "/ bound", "exposed, ms", "metrics(), ms"]
    columns += ["queued, ms", "computed, ms"]
    bytes_sent = ("metrics() sent / ideal", "wire / ideal", "fullest host's")
    on_hosts = f", {run['per_host']} on a host" if run["per_host"] > 1 else ""
    show(
        f"{run['model']}, {run['ranks']} ranks{on_hosts} over {where(run['rate'])}",
        [*columns, *bytes_sent],
        rows,
    )


if __name__ == "__main__":
    main()
