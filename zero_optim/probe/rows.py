"""Probes whether ranks may share the rows that a plan cuts. No communication.

Note [Rows that are cut]
    Classes of torchao and bitsandbytes keep state in blocks of 256 elements, from 4,096 on, so whether they
    bear a cut depends on the parameter and the row. So a plan's very cuts are tried, in as many steps as
    rounded state needs to reach the parameter. A smaller weight stands for a large one: its pieces are
    shorter by multiples of `_BLOCK`, with at least `_ENOUGH` elements unless the real one has fewer.
    `why_not_cut` of `probe` shows larger blocks.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim import Optimizer

from zero_optim.probe.comparison import difference
from zero_optim.probe.subject import OptimizerUnderTest, remembered
from zero_optim.probe.trials import Feed, Shape, isolated, recorded, start

_BLOCK = 256  # elements; a multiple of what classes take for a block
_LEAST_BLOCK = 16  # where rows are long and no multiple of anything, and so would be too many
_ENOUGH = 2 * 4096  # elements; from fewer on classes work in blocks
_SMALL = 2**18  # parameters with so many elements are tried as they are: some 10 ms
_NUM_STEPS = 3


class CutRows(NamedTuple):
    """The cuts of a parameter."""

    dtype: torch.dtype  # of what is stepped, see `zero_optim.probe.probe.why_not_cut`
    shape: tuple[int, ...]  # of the parameter
    ends: tuple[int, ...]  # the row at which each piece ends, but for the last; nothing is cut if it is empty


def why_rows_not_cut(
    optimizer_class: Callable[..., Optimizer],
    options: Mapping[str, Any],
    group: Mapping[str, Any],
    cut: CutRows,
) -> str | None:
    """Return why ranks cannot share rows of a parameter; None if they can. See Note [Rows that are cut].

    For cuts that `zero_optim.probe.probe.why_not_cut` allows. Takes some ms for each kind of pieces, 10 ms
    for parameters of 2^18 elements; cached. ``group``: the options of the parameter's group.
    """
    subject = OptimizerUnderTest.of(optimizer_class, options, [group])
    for shape, sizes in like_rows(cut.shape, cut.ends):
        reason = _try(subject, cut.dtype, shape, sizes)
        if reason is not None:
            return f"with rows of {cut.shape} cut at {', '.join(map(str, cut.ends))}: {reason}"
    return None


def like_rows(shape: Shape, ends: Sequence[int]) -> list[tuple[Shape, tuple[int, ...]]]:
    """Return stand-ins for a parameter's pieces: shapes, and the rows of each piece.

    A small parameter stands for itself. Each piece of a large one is tried between its neighbours.
    """
    bounds = (0, *ends, shape[0])
    if math.prod(shape) <= _SMALL:
        return [(tuple(shape), tuple(stop - start for start, stop in pairwise(bounds)))]
    inner = tuple(size if size < 2 * _BLOCK else _BLOCK + size % _BLOCK for size in shape[1:])
    in_row = math.prod(inner)
    block, enough = _BLOCK, -(-_ENOUGH // in_row)
    while block > _LEAST_BLOCK and math.lcm(block, in_row) > _SMALL:
        block //= 2
    step = block // math.gcd(block, in_row)
    stand_ins: dict[tuple[Shape, tuple[int, ...]], None] = {}
    for begin, stop in pairwise(bounds):
        rows = [count for count in (begin, stop - begin, shape[0] - stop) if count]
        sizes = tuple(min(count, enough + (count - enough) % step) for count in rows)
        stand_ins[(sum(sizes), *inner), sizes] = None
    return list(stand_ins)


@remembered
def _try(subject: OptimizerUnderTest, dtype: torch.dtype, shape: Shape, sizes: tuple[int, ...]) -> str | None:
    feed = Feed(
        (shape,), gaps=False, num_groups=1, num_in_group=1, num_steps=_NUM_STEPS, dtype=dtype, huge=1.0
    )
    with isolated():
        for candidate in (subject, subject.without_switches()):  # the CPU may lack them
            made = recorded(candidate, feed)
            if made is not None:
                break
        if made is None:
            return "it could not be tried"
        if not made.moved:
            return f"no element changed in {_NUM_STEPS} steps"

        def cut(_: int, value: Tensor) -> list[Tensor]:
            return list(torch.split(value, list(sizes)))

        begin = partial(start, candidate, feed, made.starts, cut=cut)
        return difference(candidate, made, "cut between rows", begin)
