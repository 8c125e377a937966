"""Plan 100,000 parameters over 16,384 ranks, and a million: time of each part, balance; balance of models.

One process, one thread, only arithmetic. Target: the whole plan in less than a second. The table shows CPU
seconds. The record also has wall seconds, which are longer when the machine does other work.

The last table is about models: how much the fullest rank of each bucket owns, added up over the buckets, and
the fullest rank of the whole model; both divided by the mean. Ranks wait for the first in every gather.
"""

import random
import time
from collections.abc import Callable, Sequence
from statistics import median
from typing import Any

import torch
from harness import Shape, arguments, gpt_shapes, record, show
from torch import Tensor

from zero_optim.plan.cuts import Planned, choose_rows
from zero_optim.plan.layout import whole
from zero_optim.plan.partition import RankLoads, assign_buckets
from zero_optim.plan.plan import Plan, make_plan

CAP_NBYTES = 32 * 2**20
ELEMENT_NBYTES = 4
ROW_NBYTES = 2**20
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
    owners = RankLoads([0] * num_ranks).assign(numels)
    owned = clock()
    buckets = assign_buckets(
        [0] * len(numels), [n * ELEMENT_NBYTES for n in numels], CAP_NBYTES, range(len(numels))[::-1]
    )
    bucketed = clock()
    for bucket in buckets:
        whole([numels[i] for i in bucket], [owners[i] for i in bucket], ALIGNMENT)
    laid_out = clock()
    make_plan([params], [numels], [0] * num_ranks, CAP_NBYTES)
    planned = clock()
    parts = [owned - start, bucketed - owned, laid_out - bucketed, laid_out - start, planned - laid_out]
    return dict(zip(PARTS, parts, strict=True))


def balance(numels: Sequence[int], num_ranks: int) -> tuple[float, float]:
    """Return the largest load of a rank, divided by the mean and by a lower bound for every assignment.

    The bound: of the ``k * num_ranks + 1`` largest items, some rank has ``k + 1``, each at least as large as
    the smallest of them.
    """
    ranks = RankLoads([0] * num_ranks)
    ranks.assign(numels)
    fullest = ranks.fullest()
    mean = sum(numels) / num_ranks
    smallest = sorted(numels, reverse=True)[::num_ranks]
    crowded = max(number * numel for number, numel in enumerate(smallest, start=1))
    return fullest / mean, fullest / max(mean, crowded)


def time_even(numels: Sequence[int], num_ranks: int) -> dict[str, float]:
    """Time a plan that is even in every bucket, from plain numbers, in CPU seconds. All may be cut."""
    start = time.process_time()
    buckets = assign_buckets(
        [0] * len(numels), [n * ELEMENT_NBYTES for n in numels], CAP_NBYTES, range(len(numels))[::-1]
    )
    bucketed = time.process_time()
    steps = [ALIGNMENT] * len(numels)
    costs, alignments = numels, [ALIGNMENT] * len(buckets)
    nbytes, trains = [ELEMENT_NBYTES] * len(numels), [True] * len(buckets)
    groups = [range(len(numels))]
    planned = Planned(numels, nbytes, costs, steps, groups, buckets, alignments, trains, ROW_NBYTES)
    layouts = choose_rows(planned, [0] * num_ranks)
    end = time.process_time()
    loads = [0] * num_ranks
    for row in (row for layout in layouts for row in layout.rows):
        loads[row.owner] += sum(extent.stop - extent.start for extent in row.extents)
    return {
        "buckets": bucketed - start,
        "rows": end - bucketed,
        "plan (sum)": end - start,
        "rows of all buckets": sum(len(layout.rows) for layout in layouts),
        "max_over_mean_load": max(loads) * num_ranks / sum(loads),
    }


# ---------------------------------------------------------------------- models


def gpt2_shapes() -> list[Shape]:
    """List the shapes of GPT-2 with 124 M elements; its head is its embedding."""
    return gpt_shapes(12, 768, 50257, 1024)[:-1]


def llama_shapes() -> list[Shape]:
    """List the shapes of a model with 8 G elements: 32 layers, grouped-query attention, an untied head."""
    width, inner, vocab = 4096, 14336, 128256
    layer: list[Shape] = [(width, width), (1024, width), (1024, width), (width, width)]
    layer += [(inner, width), (inner, width), (width, inner), (width,), (width,)]
    return [(vocab, width), *layer * 32, (width,), (vocab, width)]


MODELS: dict[str, tuple[list[Shape], torch.dtype, tuple[int, ...]]] = {
    "GPT, 13.8 M": (gpt_shapes(), torch.float32, (2, 4, 8)),
    "GPT-2, 124 M": (gpt2_shapes(), torch.float32, (8, 32)),
    "8 G, bfloat16": (llama_shapes(), torch.bfloat16, (64,)),
    "600 tiny": ([(64, 64), (64,)] * 300, torch.float32, (2, 8)),
}
# Owners for the whole model only, as before; owners for each bucket; the same with cuts.
WAYS: dict[str, bool | None] = {"before": None, "by bucket": False, "with cuts": True}


def evenness(plan: Plan, num_ranks: int) -> dict[str, float]:
    """Return max / mean of elements: summed over the fullest rank of each bucket, and of the whole model."""
    total, fullest = 0, 0
    loads = [0] * num_ranks
    for bucket in plan.buckets:
        rows = [sum(extent.stop - extent.start for extent in row.extents) for row in bucket.layout.rows]
        fullest += max(rows)
        total += sum(rows)
        for row, numel in zip(bucket.layout.rows, rows, strict=True):
            loads[row.owner] += numel
    return {"in buckets": fullest * num_ranks / total, "whole model": max(loads) * num_ranks / total}


def compare_models() -> tuple[dict[str, Any], list[list[str]]]:
    """Plan every model in every way. Returns the figures, and the rows of a table."""
    results: dict[str, Any] = {}
    rows: list[list[str]] = []
    for name, (shapes, dtype, sizes) in MODELS.items():
        params = [torch.empty(shape, dtype=dtype, device="meta") for shape in shapes]
        costs = [[param.numel() for param in params]]
        for num_ranks in sizes:
            found: dict[str, Any] = {}
            for way, bears in WAYS.items():
                flags = None if bears is None else [bears] * len(params)
                plan = make_plan([params], costs, [0] * num_ranks, CAP_NBYTES, bears_cuts=flags)
                found[way] = evenness(plan, num_ranks)
                found[way]["rows"] = sum(len(bucket.layout.rows) for bucket in plan.buckets)
            results[f"{name}, W={num_ranks}"] = found
            cells = [f"{found[way][where]:.3f}" for way in WAYS for where in ("in buckets", "whole model")]
            rows.append([name, str(num_ranks), *cells])
    return results, rows


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--params", type=int, default=100_000)
    parser.add_argument("--ranks", type=int, default=16_384)
    parser.add_argument("--many", type=int, default=1_000_000, help="parameters of the largest plans")
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
    many = {draw.__name__: time_even(draw(options.many), options.ranks) for draw in sizes}
    columns = ["buckets", "rows", "plan (sum)", "max_over_mean_load", "rows of all buckets"]
    show(
        f"{options.many:,} parameters over {options.ranks:,} ranks, even in every bucket, CPU seconds",
        ["sizes", *columns],
        [[name, *(f"{found[part]:,.4g}" for part in columns)] for name, found in many.items()],
    )
    models, lines = compare_models()
    columns = [f"{way}, {where}" for way in WAYS for where in ("buckets", "model")]
    show("max / mean of what a rank owns", ["model", "W", *columns], lines)
    met = all(result["cpu_seconds"]["plan (sum)"] < TARGET_SECONDS for result in results.values())
    print(f"every plan (sum of parts) takes less than {TARGET_SECONDS:g} s: {'yes' if met else 'NO'}")
    figures = {"params": options.params, "ranks": options.ranks, "sizes": results}
    record("partition", {**figures, "many": many, "models": models}, dry=options.dry)


if __name__ == "__main__":
    main()
