"""Time and memory of `consolidate_state_dict(to=0)`, compared with PyTorch's ZeroRedundancyOptimizer.

Contenders take turns in one run. Plain sends of the same bytes show the least possible time. Memory is the
peak growth of resident memory, which the kernel counts. It is measured in new processes for each contender,
after a consolidation of a few bytes has loaded the code. Targets: a tenth of PyTorch's time, and 64 MiB on
ranks that keep nothing.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from harness import (
    MIB,
    arguments,
    launch,
    make_params,
    medians,
    peak_growth,
    record,
    show,
    state_nbytes,
    time_interleaved,
)
from torch.distributed.optim import ZeroRedundancyOptimizer as TorchZero

from zero_optim import ZeroRedundancyOptimizer

OURS, TORCH, SENDS = "zero_optim", "torch ZeRO", "plain sends"
BUILDERS: dict[str, Callable[..., Any]] = {OURS: ZeroRedundancyOptimizer, TORCH: TorchZero}
CASES = [(24, 4), (16, 2)]  # (millions of parameters, ranks)
TARGET_RATIO, TARGET_MIB = 0.1, 64


def stepped(contender: str, millions: int) -> Any:  # noqa: ANN401
    """Build Adam over matrices of a million elements each, and step it once to make its state."""
    params = make_params([(1000, 1000)] * millions)
    optimizer = BUILDERS[contender](params, optimizer_class=torch.optim.Adam, lr=1e-4)
    optimizer.step()
    for param in params:
        param.grad = None
    return optimizer


def plain_sends(millions: int) -> Callable[[], None]:
    """Send an equal part of Adam's state from each rank to rank 0, as one flat tensor."""
    rank, size = dist.get_rank(), dist.get_world_size()
    flat = torch.zeros(2 * millions * 10**6 // size)

    def run() -> None:
        if rank == 0:
            for source in range(1, size):
                dist.recv(flat, source)
        else:
            dist.send(flat, 0)

    return run


def measure_time(millions: int, rounds: int) -> dict[str, list[float]]:
    """Time the contenders in turns; runs on each rank."""
    contenders: dict[str, Callable[[], object]] = {SENDS: plain_sends(millions)}
    for name in BUILDERS:
        optimizer = stepped(name, millions)
        contenders[name] = partial(optimizer.consolidate_state_dict, to=0)
    return time_interleaved(contenders, rounds, warmup=1)


def measure_memory(contender: str, millions: int) -> dict[str, int]:
    """Measure one consolidation in bytes; runs on each rank."""
    tiny = BUILDERS[contender](make_params([(2, 2)] * 8), optimizer_class=torch.optim.Adam)
    tiny.step()
    tiny.consolidate_state_dict(to=0)
    optimizer = stepped(contender, millions)
    dist.barrier()
    growth = peak_growth(partial(optimizer.consolidate_state_dict, to=0))
    kept = state_nbytes(optimizer.state_dict()["state"]) if dist.get_rank() == 0 else 0
    return {"growth": growth, "kept": kept}


def measure_case(millions: int, world_size: int, rounds: int) -> dict[str, Any]:
    """Run one case: one launch for times, and one for the memory of each contender."""
    seconds = medians(launch(world_size, measure_time, millions, rounds)[0])
    case: dict[str, Any] = {"millions": millions, "ranks": world_size, "rounds": rounds, "seconds": seconds}
    for contender in BUILDERS:
        target, *others = launch(world_size, measure_memory, contender, millions)
        case[contender] = {
            "others_growth_mib": [round(other["growth"] / MIB, 1) for other in others],
            "target_growth_mib": round(target["growth"] / MIB, 1),
            "result_mib": round(target["kept"] / MIB, 1),
            "target_beyond_result_mib": round((target["growth"] - target["kept"]) / MIB, 1),
        }
    return case


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    results = [measure_case(millions, ranks, options.rounds) for millions, ranks in CASES]
    rows = []
    for case in results:
        for name, seconds in case["seconds"].items():
            memory = case.get(name)
            rows.append([f"{case['millions']} M, W={case['ranks']}, {name}", f"{seconds:.3f}"])
            rows[-1].append(f"{seconds / case['seconds'][TORCH]:.3f}")
            if memory:
                rows[-1] += [
                    " ".join(f"{mib:.1f}" for mib in memory["others_growth_mib"]),
                    memory["result_mib"],
                    memory["target_beyond_result_mib"],
                ]
    columns = ["case", "seconds", "/ torch", "others grow, MiB", "result, MiB", "target beyond it, MiB"]
    show("consolidate_state_dict(to=0), Adam: median of the slowest rank, and peak memory", columns, rows)
    fast = all(case["seconds"][OURS] <= TARGET_RATIO * case["seconds"][TORCH] for case in results)
    lean = all(max(case[OURS]["others_growth_mib"]) <= TARGET_MIB for case in results)
    print(f"at most {TARGET_RATIO:g} of torch's time: {'yes' if fast else 'NO'}")
    print(f"at most {TARGET_MIB} MiB on ranks that keep nothing: {'yes' if lean else 'NO'}")
    record("consolidate", results, dry=options.dry)


if __name__ == "__main__":
    main()
