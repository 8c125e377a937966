"""Bytes of optimizer state on each rank: AdamW on a GPT of 13.8 M parameters, sharded and unsharded.

Bytes are those of the storages of the state tensors. Growth is that of resident memory in the first step, in
which AdamW makes its state.
"""

from functools import partial
from statistics import mean
from typing import Any

import torch
from harness import (
    MIB,
    arguments,
    gpt_shapes,
    launch,
    make_params,
    record,
    resident_nbytes,
    show,
    state_nbytes,
)

from zero_optim import ZeroRedundancyOptimizer

SHARDED, UNSHARDED = "zero_optim", "unsharded"


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


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2, 4])
    options = parser.parse_args()
    (unsharded,) = launch(1, measure, UNSHARDED)
    results, rows = [], []
    for world_size in options.ranks:
        ranks = launch(world_size, measure, SHARDED)
        held = [rank["state"] for rank in ranks]
        results.append(
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
    record("memory", {"unsharded": unsharded, "sharded": results}, dry=options.dry)


if __name__ == "__main__":
    main()
