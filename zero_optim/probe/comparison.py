"""Compares trials of an optimizer class bit for bit, and describes differences."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor

from zero_optim.comm.encoding import flattened
from zero_optim.compat.engine import wraps_tensors
from zero_optim.probe.acceptance import first_line_of
from zero_optim.probe.subject import OptimizerUnderTest, from_hashable, to_hashable
from zero_optim.probe.trials import TrialRecord, TrialRun, start, step_whole

StepRun: TypeAlias = Callable[[TrialRun, int, Mapping[int, Tensor | None]], None]


def difference(
    subject: OptimizerUnderTest,
    record: TrialRecord,
    how: str,
    begin: Callable[[], TrialRun],
    step_run: StepRun = step_whole,
    *,
    with_state: bool = True,
) -> str | None:
    """Repeat a trial with its recorded gradients; return what differs, or None."""
    try:
        run = begin()
        differs = _first_difference(record, run, step_run)
        if differs is None and with_state:
            differs = state_difference(record, run)
        if differs is None:
            differs = _group_difference(subject, record, run)
    except Exception as error:  # noqa: BLE001 - the first trial did not raise, so this is a difference
        return f"{how}, it raises {first_line_of(error)}"
    return None if differs is None else f"{how}, {differs}"


def _first_difference(record: TrialRecord, run: TrialRun, step_run: StepRun) -> str | None:
    for step, gradients in enumerate(record.gradients):
        step_run(run, step, {index: gradients[index] for index in run.leaves})
        for index in run.leaves:
            got, expected = run.bits(index), record.values[step + 1][index]
            if got != expected:
                shape, apart = record.feed.shape(index), _how_much(got, expected, record.feed.dtype)
                return f"the parameter of shape {shape} differed after step {step + 1}, {apart}"
    return None


def _how_much(got: bytes, expected: bytes, dtype: torch.dtype) -> str:
    a, b = (torch.frombuffer(bytearray(bits), dtype=dtype).double().numpy() for bits in (got, expected))
    with np.errstate(all="ignore"):
        apart = float(np.nanmax(np.abs(a - b) / np.maximum(np.abs(b), 1e-30), initial=0.0))
    return f"by {apart:.1e} of its value at most"


def state_difference(record: TrialRecord, run: TrialRun) -> str | None:
    """Compare each parameter's final state, and global state."""
    for index in run.leaves:
        (whole,) = record.run.leaves[index]
        if not same_pieces(record.run.state_of(index)[0], run.state_of(index), whole.shape):
            return f"the state of the parameter of shape {record.feed.shape(index)} differed"
    if same(record.run.global_state(), run.global_state()):
        return None
    return "the state that belongs to no parameter differed"


def _group_difference(subject: OptimizerUnderTest, record: TrialRecord, run: TrialRun) -> str | None:
    """Compare final group entries, except caches such as RAdam's buffer.

    An entry is a cache if results are equal with this trial's entry before every step.
    """
    differing = []
    both = zip(record.run.optimizer.param_groups, run.optimizer.param_groups, strict=True)
    for number, (mine, other) in enumerate(both):
        keys = sorted((mine.keys() | other.keys()) - {"params"}, key=str)
        differing += [
            (number, key, other.get(key)) for key in keys if not same(mine.get(key), other.get(key))
        ]
    if not differing:
        return None
    entries = [(number, key, to_hashable(value)) for number, key, value in differing]

    def step_run(again: TrialRun, step: int, gradients: Mapping[int, Tensor | None]) -> None:
        for number, key, value in entries:
            again.optimizer.param_groups[number][key] = from_hashable(value)
        step_whole(again, step, gradients)

    again = start(subject, record.feed, record.starts)
    if _first_difference(record, again, step_run) is None and state_difference(record, again) is None:
        return None
    return f"the group's entry '{differing[0][1]}' differed"


def same(a: object, b: object) -> bool:
    """Compare values bit for bit; skip objects of other kinds."""
    if isinstance(a, Tensor) or isinstance(b, Tensor):
        return isinstance(a, Tensor) and isinstance(b, Tensor) and same_tensors(a, b)
    if isinstance(a, Mapping) and isinstance(b, Mapping):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple) and isinstance(b, list | tuple):
        return len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, np.ndarray) and isinstance(b, np.ndarray):
        return a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()
    if isinstance(a, float) and isinstance(b, float):
        return a == b or (a != a and b != b)  # noqa: PLR0124 - NaN
    plain = (bool, int, float, complex, str, bytes, type(None))
    return bool(a == b) if isinstance(a, plain) or isinstance(b, plain) else type(a) is type(b)


def same_tensors(a: Tensor, b: Tensor) -> bool:
    """Compare values, dtype and shape bit for bit; tensor subclasses by their inner tensors."""
    if wraps_tensors(a) or wraps_tensors(b):
        return type(a) is type(b) and a.shape == b.shape and same(_inside(a), _inside(b))
    return to_hashable(a.to_dense() if a.is_sparse else a) == to_hashable(b.to_dense() if b.is_sparse else b)


def _inside(tensor: Tensor) -> list[object]:
    attributes, context = flattened(tensor)
    return [context, {name: getattr(tensor, name) for name in attributes}]


def same_pieces(whole: object, pieces: Sequence[Any], shape: torch.Size) -> bool:
    """Compare a parameter's state with its pieces': only entries of its shape are cut."""
    if len(pieces) == 1:
        return same(whole, pieces[0])
    if isinstance(whole, Tensor) and whole.shape == shape:
        if wraps_tensors(whole) or not all(isinstance(piece, Tensor) for piece in pieces):
            return False  # nobody knows which part of what it holds belongs to a row
        return same_tensors(whole.reshape(-1), torch.cat([piece.reshape(-1) for piece in pieces]))
    if isinstance(whole, Mapping):
        alike = all(isinstance(piece, Mapping) and piece.keys() == whole.keys() for piece in pieces)
        return alike and all(
            same_pieces(value, [piece[key] for piece in pieces], shape) for key, value in whole.items()
        )
    if isinstance(whole, list | tuple):
        alike = all(isinstance(piece, list | tuple) and len(piece) == len(whole) for piece in pieces)
        return alike and all(map(same_pieces, whole, zip(*pieces, strict=True), [shape] * len(whole)))
    return all(same(whole, piece) for piece in pieces)
