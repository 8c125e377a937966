"""Training with parameters sharded, compared with PyTorch's FSDP2: time, bytes sent, peak memory.

The GPT of `models.py`, each block a unit, AdamW(fused), one thread a rank; or a smaller GPT and Muon.
Contenders take turns in one run. *Resharded* units are freed after the forward pass and gathered again in the
backward pass. *Kept* ones stay whole from the forward to the backward pass. The ideal are 3 (W-1)/W times the
parameters' bytes from each rank where units are resharded, and 2 (W-1)/W times where they are kept; on the
wire, of hosts with `--per-host` ranks each, W is their number.

Peak memory is that of new processes: how much higher resident memory gets than before the model was built,
while it is wrapped, and while it is trained.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from harness import (
    MIB,
    arguments,
    launch,
    medians,
    peak_growth,
    record,
    resident_nbytes,
    show,
    time_interleaved,
)
from link import Link, add_options, linked, rate_of, where
from models import Gpt, Workload, workload
from recipes import ALONE, CONSECUTIVE, OPTIONS, Contender, compute_alone, training
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.optim import AdamW, Muon

from zero_optim import ZeroRedundancyOptimizer, return_freed_memory
from zero_optim.ddp import FullyShardedDataParallel

SENT = "sent_bytes/total"


class Wrapped(NamedTuple):
    """A model whose parameters are sharded."""

    model: torch.nn.Module
    optimizer: torch.optim.Optimizer


class Matrices(Gpt):
    """A GPT of 0.9 M parameters, each a matrix, for Muon."""

    def __init__(self) -> None:
        super().__init__(layers=4, width=128, vocab=256, heads=4)
        for module in self.modules():
            for name, param in list(module.named_parameters(recurse=False)):
                if param.ndim < 2:
                    module.register_parameter(name, None)


def optimizer_of(model: Gpt) -> dict[str, Any]:
    """Give the class of the optimizer, and its options."""
    if isinstance(model, Matrices):
        return {"optimizer_class": Muon, "lr": 1e-3}
    return {"optimizer_class": AdamW, **OPTIONS}


def fsdp2(model: Gpt, *, reshards: bool = True, mesh: DeviceMesh | None = None) -> Wrapped:
    mesh = mesh or init_device_mesh("cpu", (dist.get_world_size(),))
    for block in model.blocks:
        fully_shard(block, mesh=mesh, reshard_after_forward=reshards)
    fully_shard(model, mesh=mesh)
    options = optimizer_of(model)
    return Wrapped(model, options.pop("optimizer_class")(model.parameters(), **options))


def ours(model: Gpt, *, reshards: bool) -> Wrapped:
    wrapped = FullyShardedDataParallel(model, units=[*model.blocks], reshard_after_forward=reshards)
    optimizer = ZeroRedundancyOptimizer(wrapped.parameters(), **optimizer_of(model))
    return Wrapped(wrapped, optimizer)


MODES = ("resharded", "kept")
KINDS: dict[str, Callable[[Gpt], Wrapped]] = {
    "FSDP2, resharded": partial(fsdp2, reshards=True),
    "ours, resharded": partial(ours, reshards=True),
    "FSDP2, kept": partial(fsdp2, reshards=False),
    "ours, kept": partial(ours, reshards=False),
}


def made(kind: str, *, muon: bool = False) -> tuple[Workload, Wrapped]:
    """Build the GPT and wrap it."""
    if muon:
        torch.manual_seed(0)
        model = Matrices()
        work = Workload(model, lambda g: torch.randint(256, (1, 64), generator=g), lambda out: out)
        return work, KINDS[kind](model)
    work = workload("gpt")
    assert isinstance(work.model, Gpt)
    return work, KINDS[kind](work.model)


def chosen(modes: Sequence[str]) -> list[str]:
    """Name the kinds of some modes."""
    return [kind for kind in KINDS if kind.endswith(tuple(modes))]


# ---------------------------------------------------------------------- time and bytes


def time_worker(modes: Sequence[str], rounds: int, muon: bool, link: Link | None) -> dict[str, Any]:
    """Time all contenders, then count the bytes of a turn of each; runs on each rank."""
    contenders = {} if muon else {ALONE: compute_alone("gpt")}
    for kind in chosen(modes):
        work, wrapped = made(kind, muon=muon)
        contenders[kind] = training(work, wrapped.model, wrapped.optimizer)
    times = medians(
        time_interleaved({kind: each.turn for kind, each in contenders.items()}, rounds, warmup=2)
    )
    return {
        "seconds": {kind: seconds / CONSECUTIVE for kind, seconds in times.items()},
        "nbytes": {kind: nbytes_sent(contenders[kind], link) for kind in chosen(modes)},
        "param_nbytes": contenders[chosen(modes)[0]].nbytes,
    }


def nbytes_sent(contender: Contender, link: Link | None) -> dict[str, float]:
    """Count what this rank sends in an iteration, by our counters and by its interface's; all ranks call."""
    contender.metrics()
    dist.barrier()  # nothing of the turn before is under way
    before = 0 if link is None else link.nbytes_sent()
    contender.turn()
    dist.barrier()
    wire = {} if link is None else {"wire": (link.nbytes_sent() - before) / (1 + CONSECUTIVE)}
    told = contender.metrics()
    return wire | ({"metrics": told[SENT] / CONSECUTIVE} if SENT in told else {})


# ---------------------------------------------------------------------- memory


def memory_worker(kind: str) -> dict[str, int]:
    """Measure the peak growth of resident memory in bytes; runs on each rank."""
    return_freed_memory()
    batch = torch.randint(8, (1, 8), generator=torch.Generator().manual_seed(dist.get_rank()))
    small = KINDS[kind](Gpt(2, 12, 8))  # loads the code, opens the connections
    small.model(batch).backward()
    small.optimizer.step()
    dist.barrier()
    before = resident_nbytes()
    found: list[tuple[Workload, Wrapped]] = []
    wrapping = peak_growth(lambda: found.append(made(kind)))
    kept = resident_nbytes() - before
    ((_, (model, optimizer)),) = found

    def train() -> None:
        for _ in range(4):
            model(batch).backward()
            optimizer.step()
            optimizer.zero_grad()

    return {"wrapping": wrapping, "kept": kept, "training": kept + peak_growth(train)}


def peaks(modes: Sequence[str], ranks: int) -> dict[str, dict[str, int]]:
    """Measure each kind in new processes; the rank that needs most counts."""
    found = {}
    for kind in chosen(modes):
        of_ranks = launch(ranks, memory_worker, kind)
        found[kind] = {name: max(rank[name] for rank in of_ranks) for name in of_ranks[0]}
    return found


# ---------------------------------------------------------------------- all of it


def measure(
    modes: Sequence[str],
    ranks: int,
    per_host: int,
    rounds: int,
    rate: str | None,
    *,
    muon: bool,
    with_memory: bool,
) -> dict[str, Any]:
    run: dict[str, Any] = {"ranks": ranks, "per_host": per_host, "rate": rate, "muon": muon}
    if rounds:
        with linked(rate, ranks // per_host, per_host) as link:
            of_ranks = launch(ranks, time_worker, modes, rounds, muon, link, link=link)
        run |= of_ranks[0] | {"nbytes": [rank["nbytes"] for rank in of_ranks]}
    return run | ({"peak_nbytes": peaks(modes, ranks)} if with_memory else {})


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument(
        "--rounds", type=int, default=10, metavar="N", help="timed turns; 0: memory alone (10)"
    )
    parser.add_argument(
        "--modes", nargs="+", choices=MODES, default=MODES, help="which units to measure (both)"
    )
    parser.add_argument("--ranks", nargs="+", type=int, default=[2], help="numbers of ranks (2)")
    parser.add_argument("--no-memory", action="store_true", help="leave out peak memory")
    parser.add_argument("--muon", action="store_true", help="Muon, on a small GPT of matrices")
    parser.add_argument(
        "--per-host", type=int, default=1, metavar="N", help="ranks of a host, with --link (1)"
    )
    add_options(parser)
    options = parser.parse_args()
    rate = rate_of(options)
    with_memory = not (options.link or options.no_memory or options.muon)  # a link changes nothing about it
    runs = [
        measure(
            options.modes,
            ranks,
            options.per_host,
            options.rounds,
            rate,
            muon=options.muon,
            with_memory=with_memory,
        )
        for ranks in options.ranks
    ]
    for run in runs:
        tell(run)
    record("fully_sharded", {"runs": runs}, dry=options.dry)


def tell(run: dict[str, Any]) -> None:
    """Print the tables of one run."""
    if "seconds" in run:
        columns = ("iteration", "ms", "/ FSDP2's", "metrics() sent / ideal", "wire / ideal", "fullest host's")
        what = "Muon, a GPT of matrices" if run["muon"] else "AdamW, GPT"
        on_hosts = f", {run['per_host']} on a host" if run["per_host"] > 1 else ""
        title = f"{what}, {run['ranks']} ranks{on_hosts} over {where(run['rate'])}: an iteration"
        show(title, columns, [_row(run, kind) for kind in run["seconds"]])
    if "peak_nbytes" in run:
        rows = [
            [kind, *(f"{nbytes / MIB:.0f}" for nbytes in peak.values())]
            for kind, peak in run["peak_nbytes"].items()
        ]
        title = f"GPT, {run['ranks']} ranks: growth of resident memory, of the rank that needs most"
        show(title, ("", "peak, wrapping, MiB", "then, MiB", "peak, training, MiB"), rows)


def _row(run: dict[str, Any], kind: str) -> list[str]:
    times, size, hosts = run["seconds"], run["ranks"], run["ranks"] // run["per_host"]
    if kind == ALONE:
        return [kind, f"{times[kind] * 1e3:.1f}", "", "", "", ""]
    each = (2 if "kept" in kind else 3) * run["param_nbytes"]
    ideal = {"metrics": each * (size - 1) / size, "wire": each * (hosts - 1) / hosts}  # of a rank, of a host
    sent: dict[str, list[float]] = {}
    for of_rank in run["nbytes"]:
        for name, nbytes in of_rank[kind].items():
            sent.setdefault(name, []).append(nbytes / ideal[name])
    means = {name: f"{sum(parts) / size:.4f}" for name, parts in sent.items()}
    fullest = f"{max(sent['wire']):.4f}" if "wire" in sent else ""
    ratio = times[kind] / times[kind.replace("ours", "FSDP2")]
    shown = means.get("metrics", ""), means.get("wire", ""), fullest
    return [kind, f"{times[kind] * 1e3:.1f}", f"{ratio:.3f}", *shown]


if __name__ == "__main__":
    main()
