"""Compares trials of an optimizer class bit for bit, and describes differences.

Note [Idle entries]
    A class may write down what it has: the elements of a group, a step count, a cache. Then trials end with
    other entries, though parameters are equal. Such an entry is idle if the first trial gives the same bits
    when it gets the entry of the other before every step; a number also when it is beyond any size. Such a
    class is tried for more steps, and saved and resumed in parts. Ranks do not compare idle entries of
    groups, and save those of rank 0.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from zero_optim.comm.encoding import flattened
from zero_optim.compat.autograd import wraps_tensors
from zero_optim.plan.groups import PARAM_KEYS
from zero_optim.probe.subject import from_hashable, to_hashable
from zero_optim.probe.trials import TrialRecord, TrialRun, Variant, first_line_of

_ABSENT = object()


@dataclass(frozen=True, slots=True)
class Entry:
    """An entry of a group, or of the state of parameter ``number``, that differs at the end of two trials."""

    in_state: bool
    number: int
    keys: tuple[Any, ...]
    mine: Any
    other: Any

    @property
    def is_one_number(self) -> bool:
        """Whether it is the same number, in two types."""
        return _number(self.mine) == _number(self.other) is not None

    def write(self, run: TrialRun, enlarges: bool) -> None:
        """Give a run the other trial's value or type; if it ``enlarges``, a number beyond any."""
        held = run.state_of(self.number)[0] if self.in_state else run.optimizer.param_groups[self.number]
        for key in self.keys[:-1]:
            held = held.get(key, {})
        key, value = self.keys[-1], self.mine if self.other is _ABSENT else self.other
        if not held or (self.is_one_number and key not in held):
            return  # before the first step
        if self.is_one_number:
            now, is_tensor = held[key], isinstance(value, Tensor)
            held[key] = torch.as_tensor(now, dtype=value.dtype) if is_tensor else type(value)(now)
        elif enlarges and _number(value) is not None:
            held[key] = (value + 1) * 2**20
        elif self.other is _ABSENT:
            held.pop(key, None)
        else:
            held[key] = from_hashable(to_hashable(value))


def difference(record: TrialRecord, variant: Variant, *, with_state: bool = True) -> str | None:
    """Repeat a trial with its recorded gradients; return what differs but idle entries, or None."""
    try:
        run = record.begin(variant)
        entries = []
        differs = _first_difference(record, run)
        if differs is None:
            entries = _different_entries(record, run, with_state=with_state and variant.cut is None)
            differs = state_difference(record, run, entries) if with_state else None
        if differs is None and entries:
            differs = _try_entries(record, entries)
    except Exception as error:  # noqa: BLE001 - the first trial did not raise, so this is a difference
        return f"{variant.how}, it raises {first_line_of(error)}"
    return None if differs is None else f"{variant.how}, {differs}"


def _first_difference(
    record: TrialRecord, run: TrialRun, entries: Sequence[Entry] = (), *, enlarges: bool = False
) -> str | None:
    """Compare parameters after each step; write these entries before it."""
    for step, gradients in enumerate(record.gradients):
        for entry in entries:
            entry.write(run, enlarges)
        run.step(step, {index: gradients[index] for index in run.leaves})
        for index in run.leaves:
            got, expected = run.bits(index), record.values[step + 1][index]
            if got != expected:
                dtype, both = record.feed.dtype_of(index), map(bytearray, (got, expected))
                a, b = (torch.frombuffer(bits, dtype=dtype).double().numpy() for bits in both)
                with np.errstate(all="ignore"):
                    apart = np.nanmax(np.abs(a - b) / np.maximum(np.abs(b), 1e-30), initial=0.0)
                return (
                    f"the parameter of shape {record.feed.shape(index)} differed after step {step + 1}, "
                    f"by {apart:.1e} of its value at most"
                )
    return None


def state_difference(record: TrialRecord, run: TrialRun, entries: Sequence[Entry] = ()) -> str | None:
    """Compare each parameter's final state but for these entries, and global state."""
    left_out = {(entry.number, entry.keys) for entry in entries if entry.in_state}
    for index in run.leaves:
        (whole,) = record.run.leaves[index]
        mine, pieces = record.run.state_of(index)[0], run.state_of(index)
        if same(mine, *pieces, shape=whole.shape):
            continue
        if len(pieces) > 1 or {(index, keys) for keys, *_ in _apart(mine, pieces[0])} - left_out:
            return f"the state of the parameter of shape {record.feed.shape(index)} differed"
    if same(record.run.global_state(), run.global_state()):
        return None
    return "the state that belongs to no parameter differed"


def _different_entries(record: TrialRecord, run: TrialRun, *, with_state: bool) -> list[Entry]:
    entries = []
    both = zip(record.run.optimizer.param_groups, run.optimizer.param_groups, strict=True)
    for number, (mine, other) in enumerate(both):
        for key in sorted((mine.keys() | other.keys()) - PARAM_KEYS, key=str):
            held = mine.get(key, _ABSENT), other.get(key, _ABSENT)
            if not same(*held):
                entries.append(Entry(False, number, (key,), *held))
    for index in run.leaves if with_state else ():
        for keys, *values in _apart(record.run.state_of(index)[0], run.state_of(index)[0]):
            if all(value is _ABSENT or _number(value) is not None for value in values):
                entries.append(Entry(True, index, keys, *values))
    return entries


def _try_entries(record: TrialRecord, entries: Sequence[Entry]) -> str | None:
    """Return which of the entries has an influence, perhaps, or None: Note [Idle entries]."""
    for enlarges in (False, True):
        again = record.begin()
        differs = _first_difference(record, again, entries, enlarges=enlarges)
        if differs is not None or state_difference(record, again, entries) is not None:
            if entries[0].in_state:
                return f"the state of the parameter of shape {record.feed.shape(entries[0].number)} differed"
            return f"the group's entry '{entries[0].keys[0]}' differed"
    for entry in entries:
        if not entry.in_state:
            (record.retyped if entry.is_one_number else record.idle).add(entry.keys[0])
    return None


def _apart(mine: object, other: object, keys: tuple[Any, ...] = ()) -> Iterator[tuple[Any, Any, Any]]:
    if isinstance(mine, dict) and isinstance(other, dict):
        for key in [*mine, *(key for key in other if key not in mine)]:
            yield from _apart(mine.get(key, _ABSENT), other.get(key, _ABSENT), (*keys, key))
    elif not same(mine, other):
        yield keys, mine, other


def _number(value: object) -> float | None:
    if isinstance(value, Tensor) and value.dim() == 0 and not wraps_tensors(value):
        return value.item()
    return value if isinstance(value, int | float) else None


def same(whole: Any, *pieces: Any, shape: torch.Size | None = None) -> bool:  # noqa: ANN401
    """Compare a value bit for bit with others; several tensors of this ``shape`` are pieces of ``whole``."""
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
    plain = (bool, int, float, complex, str, bytes, set, frozenset, type(None))
    return bool(a == b) if isinstance(a, plain) or isinstance(b, plain) else type(a) is type(b)


def _same_tensors(a: Tensor, b: Tensor) -> bool:
    if wraps_tensors(a) or wraps_tensors(b):
        return type(a) is type(b) and a.shape == b.shape and same(_inside(a), _inside(b))
    return to_hashable(a.to_dense() if a.is_sparse else a) == to_hashable(b.to_dense() if b.is_sparse else b)


def _inside(tensor: Tensor) -> list[object]:
    attributes, context = flattened(tensor)
    return [context, {name: getattr(tensor, name) for name in attributes}]
