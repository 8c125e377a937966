"""Plan 100,000 parameters over 16,384 ranks: time of each part, and balance.

One process, one thread, only arithmetic. Target: the whole plan in less than a second. The table shows CPU
seconds. The record also has wall seconds, which are longer when the machine does other work.
"""

import random
import time
from collections.abc import Callable, Sequence
from statistics import median
from typing import Any

import torch
from harness import arguments, record, show
from torch import Tensor

from zero_optim.plan.buckets import assign_buckets
from zero_optim.plan.layout import whole
from zero_optim.plan.partition import assign_owners, rank_loads
from zero_optim.plan.plan import make_plan

CAP_NBYTES = 32 * 2**20
ELEMENT_NBYTES = 4
ALIGNMENT = 16  # elements: 64 bytes
PARTS = ["owners", "buckets", "layouts", "plan (sum)", "make_plan"]
TARGET_SECONDS = 1.0


def uniform(num_params: int) -> list[int]:
    """Draw sizes evenly up to 1 M elements: hard to balance, few large enough to fill a rank alone."""
    generator = random.Random(0)
    return [generator.randint(1, 10**6) for _ in range(num_params)]


def transformer(num_params: int, width: int = 256) -> list[int]:
    """Return the sizes of a very deep transformer: twelve a layer, few different sizes, many tiny."""
    matrices = [3 * width * width, width * width, 4 * width * width, 4 * width * width]
    layer = [*matrices, 3 * width, width, 4 * width, width, *[width] * 4]
    return [layer[index % len(layer)] for index in range(num_params)]


def tiny(num_params: int) -> list[int]:
    """Draw sizes so small that a bucket holds very many parameters."""
    return [64 + index % 7 for index in range(num_params)]


def time_parts(
    clock: Callable[[], float], numels: Sequence[int], params: list[Tensor], num_ranks: int
) -> dict[str, float]:
    """Time the parts of one plan in seconds, then `make_plan`, which makes the whole plan from tensors."""
    start = clock()
    (owners,) = assign_owners([numels], num_ranks)
    owned = clock()
    buckets = assign_buckets([0] * len(numels), [n * ELEMENT_NBYTES for n in numels], CAP_NBYTES)
    bucketed = clock()
    for bucket in buckets:
        whole([numels[i] for i in bucket], [owners[i] for i in bucket], ALIGNMENT)
    laid_out = clock()
    make_plan([params], [numels], num_ranks, CAP_NBYTES)
    planned = clock()
    parts = [owned - start, bucketed - owned, laid_out - bucketed, laid_out - start, planned - laid_out]
    return dict(zip(PARTS, parts, strict=True))


def balance(numels: Sequence[int], num_ranks: int) -> tuple[float, float]:
    """Return the largest load of a rank, divided by the mean and by a lower bound for every assignment.

    The bound: of the ``k * num_ranks + 1`` largest items, some rank has ``k + 1``, each at least as large as
    the smallest of them.
    """
    loads = rank_loads(numels, assign_owners([numels], num_ranks)[0], num_ranks)
    mean = sum(numels) / num_ranks
    smallest = sorted(numels, reverse=True)[::num_ranks]
    crowded = max(number * numel for number, numel in enumerate(smallest, start=1))
    return max(loads) / mean, max(loads) / max(mean, crowded)


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--params", type=int, default=100_000)
    parser.add_argument("--ranks", type=int, default=16_384)
    parser.add_argument("--repeats", type=int, default=5)
    options = parser.parse_args()
    sizes: list[Callable[[int], list[int]]] = [uniform, transformer, tiny]
    results: dict[str, Any] = {}
    rows: list[list[str]] = []
    for draw in sizes:
        numels = draw(options.params)
        params = [torch.empty(numel, device="meta") for numel in numels]
        found = {}
        for kind, clock in (("cpu", time.process_time), ("wall", time.perf_counter)):
            runs = [time_parts(clock, numels, params, options.ranks) for _ in range(options.repeats)]
            found[kind] = {part: median(run[part] for run in runs) for part in PARTS}
        seconds = found["cpu"]
        over_mean, over_bound = balance(numels, options.ranks)
        results[draw.__name__] = {
            "cpu_seconds": seconds,
            "wall_seconds": found["wall"],
            "max_over_mean_load": over_mean,
            "max_over_lower_bound": over_bound,
        }
        rows.append([draw.__name__, *(f"{seconds[part]:.3f}" for part in PARTS)])
        rows[-1] += [f"{over_mean:.4f}", f"{over_bound:.4f}"]
    title = f"{options.params:,} parameters over {options.ranks:,} ranks, median CPU seconds"
    show(title, ["sizes", *PARTS, "max/mean load", "max/lower bound"], rows)
    met = all(result["cpu_seconds"]["plan (sum)"] < TARGET_SECONDS for result in results.values())
    print(f"every plan (sum of parts) takes less than {TARGET_SECONDS:g} s: {'yes' if met else 'NO'}")
    record("partition", {"params": options.params, "ranks": options.ranks, "sizes": results}, dry=options.dry)


if __name__ == "__main__":
    main()
