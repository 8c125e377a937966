"""Time `opt.step()` on parameters of FSDP2: owners, compared with what else there is.

*Owners*: ours; rows go to an owner, which steps the whole matrix, and back. *All gather*: each rank gathers
every gradient and steps every matrix, as frameworks do. *DTensors*: PyTorch's class on the DTensors. For
AdamW, whose rows are stepped where they lie: the plain class on the DTensors, and ours. Gradients are set
once, each timing starts after a barrier, and the slowest rank counts.
"""

from collections.abc import Callable
from typing import Any

import torch
from harness import arguments, launch, medians, record, show, time_interleaved
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

from zero_optim import ZeroRedundancyOptimizer

OURS, GATHERED, DTENSORS = "owners", "all gather", "DTensors"
WORKLOADS: dict[str, tuple[str, int, int, int]] = {  # class, matrices, their size, rounds
    "muon-256": ("Muon", 16, 256, 12),
    "muon-512": ("Muon", 8, 512, 6),
    "adamw-256": ("AdamW", 60, 256, 40),
}


def sharded(count: int, size: int) -> list[Any]:
    """Make matrices with gradients that FSDP2 has sharded."""
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Linear(size, size, bias=False) for _ in range(count)])
    fully_shard(model)
    params: list[Any] = list(model.parameters())
    for param in params:
        param.grad = distribute_tensor(torch.randn(size, size), param.device_mesh, param.placements)
    return params


def gather_and_step(params: list[Any], build: Callable[..., Any]) -> Callable[[], object]:
    """Return a step in which each rank steps everything."""
    whole: list[Tensor] = [param.full_tensor().detach().clone() for param in params]
    plain = build(whole)

    def step() -> None:
        for param, leaf in zip(params, whole, strict=True):
            leaf.grad = param.grad.full_tensor()
        plain.step()
        with torch.no_grad():
            for param, leaf in zip(params, whole, strict=True):
                here: DTensor = param
                rows = leaf.chunk(here.device_mesh.size())
                here.to_local().copy_(rows[here.device_mesh.get_local_rank()])

    return step


def measure(name: str, rounds: int) -> dict[str, list[float]]:
    """Time every contender on one workload; runs on each rank."""
    kind, count, size, _ = WORKLOADS[name]
    optimizer_class: Any = getattr(torch.optim, kind)
    options: dict[str, Any] = {"lr": 1e-3}
    contenders: dict[str, Callable[[], object]] = {
        OURS: ZeroRedundancyOptimizer(
            sharded(count, size), optimizer_class, cost="matmul" if kind == "Muon" else "numel", **options
        ).step,
        DTENSORS: optimizer_class(sharded(count, size), **options).step,
    }
    if kind == "Muon":
        contenders[GATHERED] = gather_and_step(
            sharded(count, size), lambda params: optimizer_class(params, **options)
        )
    return time_interleaved(contenders, rounds, warmup=2)


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--workloads", nargs="+", choices=list(WORKLOADS), default=list(WORKLOADS))
    parser.add_argument("--effort", type=float, default=1.0, help="factor on the number of rounds")
    options = parser.parse_args()
    results: list[dict[str, Any]] = []
    rows: list[list[str]] = []
    for name in options.workloads:
        kind, count, size, rounds = WORKLOADS[name]
        for world_size in options.ranks:
            rounds_here = max(3, round(rounds * options.effort))
            found = medians(launch(world_size, measure, name, rounds_here)[0])
            title = f"{count} x {size}x{size}, {kind}"
            ms = {contender: seconds * 1e3 for contender, seconds in found.items()}
            results.append({"workload": title, "ranks": world_size, "rounds": rounds_here, "median_ms": ms})
            best = min(value for contender, value in ms.items() if contender != OURS)
            shown = [f"{ms[each]:.1f}" if each in ms else "" for each in (OURS, GATHERED, DTENSORS)]
            rows.append([title, str(world_size), *shown, f"{ms[OURS] / best:.2f}"])
    show(
        "step() on parameters of FSDP2: median ms of the slowest rank",
        ["workload", "W", OURS, GATHERED, DTENSORS, "ours/best"],
        rows,
    )
    record("fsdp2_owners", results, dry=options.dry)


if __name__ == "__main__":
    main()
