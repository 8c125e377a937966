"""Time `opt.step()`, compared with PyTorch's ZeroRedundancyOptimizer and the unsharded optimizer.

Gradients are set once, each timing starts after a barrier, and the slowest rank counts. The unsharded
optimizer runs on every rank, as under DDP, and does not communicate.
"""

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from harness import Shape, arguments, gpt_shapes, launch, make_params, medians, record, show, time_interleaved
from link import add_options, linked, rate_of
from torch.distributed.optim import ZeroRedundancyOptimizer as TorchZero
from torch.optim import Optimizer

from zero_optim import ZeroRedundancyOptimizer

UNSHARDED, TORCH, TORCH_VIEW, OURS, OURS_PACKED = (
    "unsharded",
    "torch ZeRO",
    "torch ZeRO, bucket view",
    "zero_optim",
    "zero_optim, packed",
)


@dataclass(frozen=True)
class Workload:
    """Parameters and an optimizer, with a number of rounds that take some seconds."""

    title: str
    shapes: list[Shape]
    optimizer_class: type[Optimizer]
    options: dict[str, Any]
    rounds: int


def tiny_shapes(count: int = 600, largest: int = 64) -> list[Shape]:
    """Draw the shapes of matrices of at most 64x64."""
    generator = random.Random(0)
    return [(generator.randint(1, largest), generator.randint(1, largest)) for _ in range(count)]


def workloads() -> dict[str, Workload]:
    """Return the workloads by name."""
    even: list[Shape] = [(2000,)] * 200
    fused = {"lr": 1e-4, "fused": True}
    return {
        "even": Workload("200 x 2000, SGD", even, torch.optim.SGD, {"lr": 1e-4}, 100),
        "gpt": Workload("GPT 13.8 M, AdamW(fused)", gpt_shapes(), torch.optim.AdamW, fused, 20),
        "tiny": Workload("600 ≤ 64x64, AdamW", tiny_shapes(), torch.optim.AdamW, {"lr": 1e-4}, 40),
        "tiny-fused": Workload("600 ≤ 64x64, AdamW(fused)", tiny_shapes(), torch.optim.AdamW, fused, 40),
    }


def measure(name: str, rounds: int) -> dict[str, list[float]]:
    """Time every contender on one workload; runs on each rank."""
    work = workloads()[name]

    def step_of(build: Callable[..., Optimizer], **more: Any) -> Callable[[], object]:  # noqa: ANN401
        return build(make_params(work.shapes), **more, **work.options).step

    sharded = {"optimizer_class": work.optimizer_class}
    contenders = {
        UNSHARDED: step_of(work.optimizer_class),
        TORCH: step_of(TorchZero, **sharded),
        TORCH_VIEW: step_of(TorchZero, parameters_as_bucket_view=True, **sharded),
        OURS: step_of(ZeroRedundancyOptimizer, **sharded),
        OURS_PACKED: step_of(ZeroRedundancyOptimizer, parameters_as_bucket_view=False, **sharded),
    }
    return time_interleaved(contenders, rounds, warmup=3)


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--workloads", nargs="+", choices=list(workloads()), default=list(workloads()))
    parser.add_argument("--effort", type=float, default=1.0, help="factor on the number of rounds")
    add_options(parser)  # a link connects two ranks
    options = parser.parse_args()
    rate = rate_of(options)
    results: list[dict[str, Any]] = []
    rows: list[list[str]] = []
    with linked(rate) as link:
        for name in options.workloads:
            work = workloads()[name]
            for world_size in [2] if rate else options.ranks:
                rounds = max(3, round(work.rounds * options.effort))
                found = medians(launch(world_size, measure, name, rounds, link=link)[0])
                results.append(
                    {
                        "workload": work.title,
                        "ranks": world_size,
                        "link": rate,
                        "rounds": rounds,
                        "median_ms": {contender: seconds * 1e3 for contender, seconds in found.items()},
                    }
                )
                rows.append([work.title, str(world_size), *(f"{s * 1e3:.2f}" for s in found.values())])
                rows[-1] += [f"{found[OURS] / found[other]:.2f}" for other in (TORCH, TORCH_VIEW, UNSHARDED)]
    where = f", over a link of {rate}" if rate else ""
    columns = ["unsharded", "torch", "torch view", "ours", "packed"]
    columns += ["ours/torch", "ours/view", "ours/unsh."]
    show(
        f"step(): median ms of the slowest rank{where}; ratios below 1: zero_optim is faster",
        ["workload", "W", *columns],
        rows,
    )
    record("step", results, dry=options.dry)


if __name__ == "__main__":
    main()
