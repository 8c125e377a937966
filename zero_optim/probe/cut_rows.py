"""Probes whether ranks may share the rows of parameters. No communication.

Note [Rows that are cut]
    Classes of torchao and bitsandbytes keep state in blocks of 256 elements, from 4,096 on, so a plan's very
    cuts are tried, in as many steps as rounded state needs to reach the parameter. A smaller weight stands
    for a large one: its pieces are shorter by multiples of `_BLOCK`, with at least `_ENOUGH` elements unless
    the real one has fewer. `why_not_cut` shows larger blocks.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import Parameter

from zero_optim.comm.encoding import inner_tensors
from zero_optim.plan.plan import ALIGNMENT_NBYTES
from zero_optim.probe.comparison import difference
from zero_optim.probe.feeds import LARGE, STEPS_OF_LARGE, Feed, Shape, rows_apart
from zero_optim.probe.probe import trial_of
from zero_optim.probe.subject import OptimizerUnderTest, remembered
from zero_optim.probe.trials import Cut, TrialRecord, Variant, anywhere, first_record, isolated, recorded

_BLOCK = 256  # elements; a multiple of what classes take for a block
_LEAST_BLOCK = 16  # where rows are long and no multiple of anything, and so would be too many
_ENOUGH = 2 * 4096  # elements; from fewer on classes work in blocks
_SMALL = 2**18  # parameters with so many elements are tried as they are: some 10 ms
_NUM_STEPS = 3
# Many vectors of any processor; cut, no piece fills one.
_SHORT = (63, 7)
# Numbers that scripts often change between runs.
_OFTEN_CHANGED = frozenset({"lr", "weight_decay"})


class CutRows(NamedTuple):
    """A parameter's cuts: the dtype that steps it, its shape, and the end row of each piece but the last."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    ends: tuple[int, ...]


@remembered
def why_not_cut(subject: OptimizerUnderTest, dtype: torch.dtype = torch.float32) -> str | None:
    """Return why ranks cannot share the rows of parameters; None if they can. Takes 5 to 40 ms; cached.

    Rows stepped as parameters, and their state, must have the bits of the whole, also with other numbers. On
    accelerators ``dtype`` is float32: kernels compute elements alike wherever a tensor ends, as ``make gpu``
    tests.
    """
    if dtype.itemsize < (8 if dtype.is_complex else 4):  # too few elements show it for a trial to rely on
        return f"{dtype} on the CPU: kernels round otherwise at the end of a vector than in the middle of one"
    answer = trial_of(subject)
    traits = answer.traits
    if answer.subject is None or answer.feed is None or not traits.separable:
        return traits.untried or traits.coupling
    # A fused kernel may treat a vector's end differently, but no plan cuts there.
    if traits.shape_use is not None and (answer.feed.sparse or not answer.subject.is_fused):
        return traits.shape_use
    feed = replace(answer.feed, dtype=dtype)
    with isolated():
        trial = recorded(answer.subject, feed.with_rows())
        if trial is None:
            return f"parameters of {dtype} could not be tried"
        return _why_rows_differ(trial, feed) or _why_rows_differ_awake(answer.subject, feed)


def _by_rows(index: int, value: Tensor) -> Sequence[Tensor]:
    """Cut between rows, as a plan does; the second parameter in three pieces."""
    step = rows_apart(value)
    sizes = [step, step, len(value) - 2 * step] if index == 1 else [step, len(value) - step]
    return torch.split(value, sizes)


def _below_vectors(_: int, value: Tensor) -> Sequence[Tensor]:
    """Cut between rows into pieces below two vectors of 64 bytes."""
    row_nbytes = value.element_size() * value.numel() // len(value)
    return torch.split(value, max(1, (2 * ALIGNMENT_NBYTES - 1) // row_nbytes))


def _why_rows_differ(trial: TrialRecord, feed: Feed, cut_long: Cut = _by_rows) -> str | None:
    """Cut parameters between rows, as a plan does, into pieces that fill no vector, and compare."""
    subject = trial.subject
    short = _SHORT if len(feed.shapes[0]) > 1 else (math.prod(_SHORT),)
    tried = [(trial.feed, cut_long), (feed.of_one(LARGE, num_steps=STEPS_OF_LARGE), cut_long)]
    if not subject.is_fused:
        tried.append((feed.of_one(short), _below_vectors))
    for each, cut in tried:
        whole = trial if each is trial.feed else recorded(subject, each)
        if whole is None:
            return f"parameters of shape {each.shapes[0]} and {each.dtype} could not be tried"
        reason = _why_not_joined(whole, Variant("cut between rows", cut=cut))
        if reason is not None:
            return reason
    return None


def _why_rows_differ_awake(subject: OptimizerUnderTest, feed: Feed) -> str | None:
    """Repeat with other numbers: all that the class accepts, or else the usual ones."""
    for names in (None, _OFTEN_CHANGED):
        awake = subject.awake(feed.shapes[0], names)
        if awake is None:
            return None
        other, changes = awake
        trial = recorded(other, feed.with_rows())
        if trial is not None and trial.finite:
            # Cut anywhere for kernels that are not fused: more elements change their place in a vector.
            reason = _why_rows_differ(trial, feed, _by_rows if other.is_fused else anywhere)
            return None if reason is None else f"{reason}, with {changes}"
    return None


def _why_not_joined(whole: TrialRecord, variant: Variant) -> str | None:
    """Return why pieces differ from the whole, or why their state cannot be joined."""
    if whole.run.global_state():
        return "it keeps state that belongs to no parameter"
    for index, (leaf,) in whole.run.leaves.items():
        (state,) = whole.run.state_of(index)
        for entry in state.values() if isinstance(state, Mapping) else ():
            inside = [entry] if isinstance(entry, Tensor) else inner_tensors(entry)
            if any(tensor.layout is not torch.strided for tensor in inside):
                return "its state is sparse then"
            if not isinstance(entry, Tensor) and inside:
                return "it keeps tensors in lists or dicts of its state, whose rows would not be joined"
            if type(entry) not in (Tensor, Parameter) and getattr(entry, "shape", None) == leaf.shape:
                return f"it keeps a {type(entry).__name__} in its state, whose rows would not be joined"
    return difference(whole, variant)


def why_rows_not_cut(subject: OptimizerUnderTest, cut: CutRows) -> str | None:
    """Return why ranks cannot share a plan's very rows: Note [Rows that are cut]; cached."""
    for shape, sizes in like_rows(cut.shape, cut.ends):
        reason = _try_rows(subject, cut.dtype, shape, sizes)
        if reason is not None:
            return f"with rows of {cut.shape} cut at {', '.join(map(str, cut.ends))}: {reason}"
    return None


def like_rows(shape: Shape, ends: Sequence[int]) -> list[tuple[Shape, tuple[int, ...]]]:
    """Return stand-ins for a parameter's pieces, each beside its neighbours: shapes, and rows of each."""
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
def _try_rows(
    subject: OptimizerUnderTest, dtype: torch.dtype, shape: Shape, sizes: tuple[int, ...]
) -> str | None:
    feed = Feed((shape,), num_steps=_NUM_STEPS, dtype=dtype, huge=1.0).of_one(shape)
    with isolated():
        trial = first_record(subject, feed)
        if not isinstance(trial, TrialRecord):
            return "it could not be tried"
        if not trial.moved:
            return f"no element changed in {_NUM_STEPS} steps"
        variant = Variant("cut between rows", cut=lambda _, value: torch.split(value, list(sizes)))
        return difference(trial, variant)
