"""Draw docs/memory.png: bytes that a rank of 8 holds between steps, of a model with 7 B parameters.

Run from the checkout: ``python docs/make_memory_picture.py``. The library's planner chooses the owners;
nothing is trained. The figures are those of the fullest rank, without activations: bfloat16 parameters and
gradients, float32 master copies, float32 state of the class.
"""

import math
from itertools import chain
from pathlib import Path

import torch

from zero_optim.plan.plan import make_plan

WORLD_SIZE, BUCKET_NBYTES = 8, 32 * 2**20
STAGES = ("DDP", "stage 1", "stage 2", "stage 3")
PARTS = {"parameters": 2, "gradients": 2, "master copies": 4, "state": 4}  # bytes an element
SHARDED_FROM = {"parameters": 3, "gradients": 2, "master copies": 1, "state": 1}  # stage
COLOURS = ("#4477aa", "#66ccee", "#228833", "#ddaa33")


def llama(layers: int = 32, width: int = 4096, inner: int = 11008, vocab: int = 32000) -> list[list[int]]:
    """List the shapes of Llama 2 7B: matrices of the blocks first, then embedding, head and norms."""
    block = [[width, width]] * 4 + [[inner, width], [inner, width], [width, inner]]
    return block * layers + [[vocab, width]] * 2 + [[width]] * (2 * layers + 1)


def owned(shapes: list[list[int]], is_cut: list[bool]) -> list[list[int]]:
    """Return the elements of each parameter that each rank owns."""
    params = [torch.empty(shape, dtype=torch.bfloat16, device="meta") for shape in shapes]
    numels = [param.numel() for param in params]
    plan = make_plan([params], [numels], [0] * WORLD_SIZE, BUCKET_NBYTES, bears_cuts=is_cut)
    held = [[0] * len(params) for _ in range(WORLD_SIZE)]
    for index, pieces in enumerate(plan.pieces):
        of_row = numels[index] // pieces[-1].stop
        for piece in pieces:
            held[piece.owner][index] += (piece.stop - piece.start) * of_row
    return held


def figures() -> dict[str, dict[str, dict[str, float]]]:
    """Return GB (10^9 bytes) by optimizer, stage and part; Muon keeps one moment of the blocks' matrices."""
    shapes = llama()
    numels = [math.prod(shape) for shape in shapes]
    in_blocks = [len(shape) == 2 and 32000 not in shape for shape in shapes]
    result: dict[str, dict[str, dict[str, float]]] = {}
    for title, is_muon in (("AdamW", [False] * len(shapes)), ("Muon in blocks, AdamW elsewhere", in_blocks)):
        moments = [1 if muon else 2 for muon in is_muon]
        rows = owned(shapes, [not muon for muon in is_muon])
        result[title] = {}
        for stage, name in enumerate(STAGES):
            result[title][name] = {}
            for part, nbytes in PARTS.items():
                holders = rows if stage >= SHARDED_FROM[part] else [numels]
                times = moments if part == "state" else [1] * len(shapes)
                most = max(sum(n * k for n, k in zip(held, times, strict=True)) for held in holders)
                result[title][name][part] = most * nbytes / 1e9
    return result


def draw(path: Path) -> None:
    """Draw the bars of both optimizers into a PNG file."""
    from matplotlib.figure import Figure  # without pyplot it needs no display

    found = figures()
    figure = Figure(figsize=(7.6, 3.6), layout="constrained")
    axes = figure.subplots(1, len(found), sharey=True)
    for axis, (title, stages) in zip(axes, found.items(), strict=True):
        bottoms = [0.0] * len(stages)
        for part, colour in zip(PARTS, COLOURS, strict=True):
            heights = [stage[part] for stage in stages.values()]
            axis.bar(list(stages), heights, 0.7, bottoms, label=part, color=colour)
            bottoms = [low + high for low, high in zip(bottoms, heights, strict=True)]
        for place, total in enumerate(bottoms):
            axis.text(place, total + 1.5, f"{total:.0f}", ha="center", fontsize=13, fontweight="bold")
        axis.axhline(80, color="grey", linestyle=":", linewidth=1)
        axis.text(3.4, 81.5, "a GPU of 80 GB", ha="right", color="dimgrey")
        axis.set_title(title, fontsize=12)
        axis.set_ylim(0, 120)
        axis.spines[["top", "right"]].set_visible(False)
    axes[0].set_ylabel("GB on each of 8 ranks", fontsize=11)
    handles, labels = axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=len(PARTS), frameon=False, fontsize=11)
    figure.savefig(path, dpi=160)


if __name__ == "__main__":
    draw(Path(__file__).with_name("memory.png"))
    for title, stages in figures().items():
        totals = chain.from_iterable((name, f"{sum(parts.values()):.1f}") for name, parts in stages.items())
        print(title, *totals)  # noqa: T201
