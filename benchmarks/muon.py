"""Muon on a GPT's matrices: load and step time when owners are balanced by size or by work.

Newton-Schulz iterations cost far more for a square matrix than for a long one with as many elements. So ranks
with equal numbers of elements can have unequal work. *Own step* is the step of the class itself on each rank,
which the balance changes; *step* also contains the gathers.
"""

import time
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from harness import arguments, launch, make_params, medians, record, show, time_interleaved

from zero_optim import ZeroRedundancyOptimizer
from zero_optim.plan.costs import matmul_cost

# Square and long matrices in turns, with equally many elements, so that owners chosen by size alternate too.
LAYERS = [(128, 128), (16, 1024)] * 8
# The matrices of a GPT, nearly all of similar shape.
GPT = [(384, 128), (128, 128), (512, 128), (128, 512)] * 4


def measure(shapes: list[tuple[int, int]], rounds: int) -> dict[str, Any]:
    """Time both cost functions in turns; runs on each rank."""
    sharded = {
        cost: ZeroRedundancyOptimizer(make_params(shapes), torch.optim.Muon, lr=0.01, cost=cost)
        for cost in ("numel", "matmul")
    }
    unsharded = torch.optim.Muon(make_params(shapes), lr=0.01)
    steps = {"unsharded": unsharded.step, **{cost: o.step for cost, o in sharded.items()}}
    result: dict[str, Any] = {"step": medians(time_interleaved(steps, rounds, warmup=2))}
    for cost, optimizer in sharded.items():
        own = optimizer.owned_parameters()
        alone = torch.optim.Muon([p.detach().clone().requires_grad_() for p in own], lr=0.01)
        for group in alone.param_groups:
            for p in group["params"]:
                p.grad = torch.randn_like(p)
        result[cost] = {
            "work": sum(map(matmul_cost, own)),
            "numel": sum(p.numel() for p in own),
            "own_step": _time_alone(alone, rounds),
        }
    return result


def _time_alone(optimizer: torch.optim.Optimizer, rounds: int) -> float:
    """Median seconds of a step; all ranks run at the same time, as in training."""
    times = []
    for _ in range(rounds):
        dist.barrier()
        start = time.perf_counter()
        optimizer.step()
        times.append(time.perf_counter() - start)
    return median(times)


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    options = parser.parse_args()
    results, rows = [], []
    for name, shapes in (("square and long", LAYERS), ("GPT", GPT)):
        for world_size in options.ranks:
            ranks = launch(world_size, measure, shapes, options.rounds)
            for cost in ("numel", "matmul"):
                work = [rank[cost]["work"] for rank in ranks]
                own = [rank[cost]["own_step"] for rank in ranks]
                figures = {
                    "workload": name,
                    "ranks": world_size,
                    "cost": cost,
                    "work_max_over_mean": max(work) * world_size / sum(work),
                    "own_step_ms": [1000 * seconds for seconds in own],
                    "step_ms": 1000 * ranks[0]["step"][cost],
                    "unsharded_ms": 1000 * ranks[0]["step"]["unsharded"],
                }
                results.append(figures)
                slowest = 1000 * max(own)
                rows.append(
                    [
                        f"{name}, W={world_size}, cost={cost}",
                        f"{figures['work_max_over_mean']:.3f}",
                        f"{slowest:.1f}",
                        f"{figures['step_ms']:.1f}",
                        f"{figures['unsharded_ms']:.1f}",
                    ]
                )
    columns = ["", "work, max/mean", "slowest own step, ms", "step, ms", "unsharded, ms"]
    show("Muon, owners balanced by size (numel) and by work (matmul)", columns, rows)
    record("muon", results, dry=options.dry)


if __name__ == "__main__":
    main()
