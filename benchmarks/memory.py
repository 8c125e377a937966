"""Memory of optimizer state and of gradients on each rank: AdamW on a GPT of 13.8 M parameters.

State bytes are those of the storages of the state tensors. Growth is that of resident memory in the first
step, in which AdamW makes its state.

Gradient memory is how much higher resident memory gets, from the moment the model is wrapped, than where each
gradient is dropped as soon as it is there. So buckets count, and what is received from other ranks. Inputs
are short, as the memory of activations is free again when the last gradients come.
"""

import ctypes
from collections.abc import Callable
from functools import partial
from statistics import mean
from typing import Any

import torch
import torch.distributed as dist
from harness import (
    MIB,
    arguments,
    gpt_shapes,
    launch,
    make_params,
    peak_growth,
    record,
    resident_nbytes,
    show,
    state_nbytes,
)
from models import workload
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as TorchDdp

from zero_optim import ZeroRedundancyOptimizer
from zero_optim.ddp import DistributedDataParallel, ShardedDataParallel

SHARDED, UNSHARDED = "zero_optim", "unsharded"
BUCKET_CAP_MB = 8.0  # of the optimizer, whose buckets sharded gradients have; there are several


def measure(kind: str) -> dict[str, int]:
    """Make the state with one step and measure it in bytes; runs on each rank."""
    build: Any = torch.optim.AdamW
    if kind == SHARDED:
        build = partial(ZeroRedundancyOptimizer, optimizer_class=torch.optim.AdamW)
    build(make_params([(2, 2)] * 8), fused=True).step()  # loads the code, opens the connections
    optimizer = build(make_params(gpt_shapes()), fused=True)
    before = resident_nbytes()
    optimizer.step()
    return {"state": state_nbytes(optimizer.state), "growth": resident_nbytes() - before}


# ---------------------------------------------------------------------- gradients

Wrap = Callable[[nn.Module, ZeroRedundancyOptimizer], nn.Module]


def dropping(model: nn.Module, _: ZeroRedundancyOptimizer) -> nn.Module:
    """Drop each gradient as soon as it is there."""

    def drop(param: Tensor) -> None:
        param.grad = None

    for param in model.parameters():
        param.register_post_accumulate_grad_hook(drop)  # type: ignore[no-untyped-call]
    return model


DROPPED, SHARDED_GRADIENTS = "dropped", "ours, gradients sharded"
WRAPPERS: dict[str, Wrap] = {
    DROPPED: dropping,
    "not wrapped": lambda model, _: model,
    "torch DDP": lambda model, _: TorchDdp(model),
    "torch DDP, view": lambda model, _: TorchDdp(model, gradient_as_bucket_view=True),
    "ours": lambda model, _: DistributedDataParallel(model),
    "ours, view": lambda model, _: DistributedDataParallel(model, gradient_as_bucket_view=True),
    # Models are equal already. Copying them from rank 0 would take more memory than the gradients.
    SHARDED_GRADIENTS: lambda model, optimizer: ShardedDataParallel(model, optimizer, init_sync=False),
}


def gradient_peaks_here() -> dict[str, int]:
    """Measure all kinds, one after the other; runs on each rank.

    New processes for each would take longer to start than all that is measured.
    """
    # What is freed leaves resident memory at once. By itself glibc would keep more and more of it.
    ctypes.CDLL(None).mallopt(-3, 2**16)  # M_MMAP_THRESHOLD
    return {kind: gradient_peak(kind) for kind in WRAPPERS}


def gradient_peak(kind: str) -> int:
    """Train without stepping, so that there is no state, and give the growth in bytes; runs on each rank."""
    work = workload("gpt")
    optimizer = ZeroRedundancyOptimizer(
        work.model.parameters(), torch.optim.AdamW, fused=True, bucket_cap_mb=BUCKET_CAP_MB
    )
    batch = torch.randint(4096, (1, 4), generator=torch.Generator().manual_seed(dist.get_rank()))
    work.loss(work.model(batch)).backward()  # type: ignore[no-untyped-call] # loads the code
    optimizer.zero_grad()
    dist.barrier()

    def train() -> None:
        model = WRAPPERS[kind](work.model, optimizer)
        for _ in range(4):  # the buckets are made anew in the second
            work.loss(model(batch)).backward()  # type: ignore[no-untyped-call]
            optimizer.zero_grad()

    return peak_growth(train)


def gradient_peaks(ranks: int) -> dict[str, Any]:
    by_rank = launch(ranks, gradient_peaks_here)
    peaks = {kind: max(of_rank[kind] for of_rank in by_rank) for kind in WRAPPERS}
    # Where gradients are dropped, the largest one was there all the same.
    others = peaks.pop(DROPPED) - max(param.nbytes for param in workload("gpt").model.parameters())
    return {"ranks": ranks, "peak_nbytes": {kind: peak - others for kind, peak in peaks.items()}}


def tell_gradients(runs: list[dict[str, Any]], whole: int) -> None:
    rows = [
        [
            f"W={run['ranks']}, {kind}",
            f"{peak / MIB:.0f}",
            f"{peak / whole:.2f}",
            f"{1 / run['ranks']:.2f}",
            f"{(peak - whole / run['ranks']) / MIB / BUCKET_CAP_MB:.2f}" if kind == SHARDED_GRADIENTS else "",
        ]
        for run in runs
        for kind, peak in run["peak_nbytes"].items()
    ]
    columns = (
        "",
        "peak, MiB",
        "/ gradients",
        "1 / W",
        f"(peak - gradients / W), buckets of {BUCKET_CAP_MB:g} MiB",
    )
    show(f"gradient memory of the rank that needs most; gradients are {whole / MIB:.1f} MiB", columns, rows)


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2, 4, 8])
    options = parser.parse_args()
    gradients = [gradient_peaks(ranks) for ranks in options.ranks if ranks > 1]
    tell_gradients(gradients, sum(param.nbytes for param in workload("gpt").model.parameters()))
    (unsharded,) = launch(1, measure, UNSHARDED)
    state, rows = [], []
    for world_size in options.ranks:
        ranks = launch(world_size, measure, SHARDED)
        held = [rank["state"] for rank in ranks]
        state.append(
            {
                "ranks": world_size,
                "state_nbytes": held,
                "first_step_growth_nbytes": [rank["growth"] for rank in ranks],
                "max_over_mean": max(held) / mean(held),
                "sum_over_unsharded": sum(held) / unsharded["state"],
                "max_over_unsharded": max(held) / unsharded["state"],
            }
        )
        rows.append(
            [
                f"W={world_size}",
                "  ".join(f"{nbytes / MIB:.2f}" for nbytes in held),
                f"{unsharded['state'] / MIB:.2f}",
                f"{max(held) / unsharded['state']:.4f}",
                f"{sum(held) / unsharded['state']:.4f}",
                f"{max(held) / mean(held):.4f}",
                "  ".join(f"{rank['growth'] / MIB:.0f}" for rank in ranks),
            ]
        )
    columns = ["", "state by rank, MiB", "unsharded", "fullest/unsharded", "sum/unsharded", "max/mean"]
    show("AdamW state, GPT of 13.8 M parameters", [*columns, "RSS growth in first step, MiB"], rows)
    results = {"unsharded": unsharded, "sharded": state, "gradients": gradients}
    record("memory", results, dry=options.dry)


if __name__ == "__main__":
    main()
