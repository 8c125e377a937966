"""Compares trials of an optimizer class bit for bit, and describes differences."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from zero_optim.comm.encoding import flattened
from zero_optim.compat.engine import wraps_tensors
from zero_optim.probe.subject import from_hashable, to_hashable
from zero_optim.probe.trials import TrialRecord, TrialRun, Variant, first_line_of


def difference(record: TrialRecord, variant: Variant, *, with_state: bool = True) -> str | None:
    """Repeat a trial with its recorded gradients; return what differs, or None."""
    try:
        run = record.begin(variant)
        differs = _first_difference(record, run)
        if differs is None and with_state:
            differs = state_difference(record, run)
        if differs is None:
            differs = _group_difference(record, run)
    except Exception as error:  # noqa: BLE001 - the first trial did not raise, so this is a difference
        return f"{variant.how}, it raises {first_line_of(error)}"
    return None if differs is None else f"{variant.how}, {differs}"


def _first_difference(
    record: TrialRecord, run: TrialRun, entries: Sequence[tuple[int, str, object]] = ()
) -> str | None:
    """Compare parameters after each step; set these entries of groups before it."""
    for step, gradients in enumerate(record.gradients):
        for number, key, value in entries:
            run.optimizer.param_groups[number][key] = from_hashable(value)
        run.step(step, {index: gradients[index] for index in run.leaves})
        for index in run.leaves:
            got, expected = run.bits(index), record.values[step + 1][index]
            if got != expected:
                a, b = (
                    torch.frombuffer(bytearray(bits), dtype=record.feed.dtype).double().numpy()
                    for bits in (got, expected)
                )
                with np.errstate(all="ignore"):
                    apart = np.nanmax(np.abs(a - b) / np.maximum(np.abs(b), 1e-30), initial=0.0)
                return (
                    f"the parameter of shape {record.feed.shape(index)} differed after step {step + 1}, "
                    f"by {apart:.1e} of its value at most"
                )
    return None


def state_difference(record: TrialRecord, run: TrialRun) -> str | None:
    """Compare each parameter's final state, and global state."""
    for index in run.leaves:
        (whole,) = record.run.leaves[index]
        if not same(record.run.state_of(index)[0], *run.state_of(index), shape=whole.shape):
            return f"the state of the parameter of shape {record.feed.shape(index)} differed"
    if same(record.run.global_state(), run.global_state()):
        return None
    return "the state that belongs to no parameter differed"


def _group_difference(record: TrialRecord, run: TrialRun) -> str | None:
    """Compare final group entries, except caches such as RAdam's buffer.

    An entry is a cache if results are equal with this trial's entry before every step.
    """
    both = zip(record.run.optimizer.param_groups, run.optimizer.param_groups, strict=True)
    entries = [
        (number, key, to_hashable(other.get(key)))
        for number, (mine, other) in enumerate(both)
        for key in sorted((mine.keys() | other.keys()) - {"params"}, key=str)
        if not same(mine.get(key), other.get(key))
    ]
    if not entries:
        return None
    again = record.begin()
    if _first_difference(record, again, entries) is None and state_difference(record, again) is None:
        return None
    return f"the group's entry '{entries[0][1]}' differed"


def same(whole: Any, *pieces: Any, shape: torch.Size | None = None) -> bool:  # noqa: ANN401
    """Compare a value with one or several others bit for bit; skip objects of other kinds.

    Of several, tensors of this ``shape`` are the pieces of ``whole``; other values are equal in all of them.
    """
    if isinstance(whole, Tensor):
        is_cut = len(pieces) > 1 and whole.shape == shape
        if is_cut and wraps_tensors(whole):
            return False  # nobody knows which part of what it holds belongs to a row
        if is_cut and all(isinstance(piece, Tensor) for piece in pieces):
            return _same_tensors(whole.reshape(-1), torch.cat([piece.reshape(-1) for piece in pieces]))
        return all(isinstance(piece, Tensor) and _same_tensors(whole, piece) for piece in pieces)
    if isinstance(whole, Mapping):
        return all(isinstance(piece, Mapping) and piece.keys() == whole.keys() for piece in pieces) and all(
            same(value, *(piece[key] for piece in pieces), shape=shape) for key, value in whole.items()
        )
    if isinstance(whole, list | tuple):
        return all(isinstance(piece, list | tuple) and len(piece) == len(whole) for piece in pieces) and all(
            same(value, *others, shape=shape) for value, *others in zip(whole, *pieces, strict=True)
        )
    return all(_same_values(whole, piece) for piece in pieces)


def _same_values(a: object, b: object) -> bool:
    if isinstance(b, Tensor):
        return False
    if isinstance(a, np.ndarray) and isinstance(b, np.ndarray):
        return a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()
    if isinstance(a, float) and isinstance(b, float):
        return a == b or (a != a and b != b)  # noqa: PLR0124 - NaN
    plain = (bool, int, float, complex, str, bytes, type(None))
    return bool(a == b) if isinstance(a, plain) or isinstance(b, plain) else type(a) is type(b)


def _same_tensors(a: Tensor, b: Tensor) -> bool:
    """Compare values, dtype and shape bit for bit; tensor subclasses by their inner tensors."""
    if wraps_tensors(a) or wraps_tensors(b):
        return type(a) is type(b) and a.shape == b.shape and same(_inside(a), _inside(b))
    return to_hashable(a.to_dense() if a.is_sparse else a) == to_hashable(b.to_dense() if b.is_sparse else b)


def _inside(tensor: Tensor) -> list[object]:
    attributes, context = flattened(tensor)
    return [context, {name: getattr(tensor, name) for name in attributes}]
