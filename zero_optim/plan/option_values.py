"""Group options as plain values, which ranks compare at each step.

Numbers within a relative 1e-6 are equal, as machines compute rates a little differently. Of accelerator
tensors, large or trained ones, and other objects only the type counts.
"""

import hashlib
import json
import math
import numbers
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from operator import is_
from typing import Any, TypeAlias

import torch
from torch import Tensor

from zero_optim.compat.streams import is_asynchronous
from zero_optim.plan.groups import PARAM_KEYS, ParamGroup

Plain: TypeAlias = Any  # None, a float, a text, or a list or dict of such
OptionKey: TypeAlias = tuple[int, str]  # number of the group, name of the option

CLOSE = 1e-6  # numbers count as equal if they differ by no more than that, relative to the larger one
_READ_NUMEL = 16  # of larger tensors and containers only the size counts
_DEPTH = 4
_DIGITS = 6  # of a number in a digest: what differs less seldom has another digest
_STABLE = frozenset([bool, int, float, complex, str, type(None)])
_STABLE_OR_TUPLE = _STABLE | {tuple}
DIGEST_NBYTES = 8


def plain(value: object, depth: int = 0) -> Plain:  # noqa: PLR0911 - one line a kind
    """Convert an option to a plain value without waiting; ``depth`` counts nested containers."""
    if value is None or isinstance(value, str):
        return value
    if isinstance(value, numbers.Real):
        try:
            return float(value) + 0.0  # there is one zero
        except OverflowError:
            return str(value)
        except (TypeError, ValueError, RuntimeError):  # other ranks wait: nothing may raise here
            return _kind_of(value)
    if isinstance(value, Tensor):
        return _plain_tensor(value)
    if isinstance(value, list | tuple) and len(value) <= _READ_NUMEL and depth < _DEPTH:
        return [plain(item, depth + 1) for item in value]
    if isinstance(value, Mapping) and len(value) <= _READ_NUMEL and depth < _DEPTH:
        return {str(key): plain(item, depth + 1) for key, item in value.items()}
    if isinstance(value, complex | bytes | torch.dtype):
        return str(value)
    size = f" of {len(value)}" if isinstance(value, list | tuple | Mapping) else ""
    return f"{_kind_of(value)}{size}"


def _kind_of(value: object) -> str:
    return f"a {type(value).__qualname__}"


def _plain_tensor(value: Tensor) -> Plain:
    is_read = type(value) is Tensor and value.layout is torch.strided and not value.requires_grad
    is_here = value.device.type == "cpu" and not is_asynchronous(value.device)
    if is_read and is_here and value.numel() <= _READ_NUMEL:
        return plain(value.tolist())
    return f"{_kind_of(value)} of {tuple(value.shape)}"


def changeable(options: Mapping[str, object]) -> dict[str, Plain]:
    """Return the options that can change in place (tensors, lists) as plain values."""
    return {
        name: plain(value)
        for name, value in options.items()
        if type(value) not in _STABLE_OR_TUPLE and name not in PARAM_KEYS
    }


def are_close(one: Plain, other: Plain) -> bool:
    """Whether two plain values count as equal."""
    if isinstance(one, float) and isinstance(other, float):
        return math.isclose(one, other, rel_tol=CLOSE) or (math.isnan(one) and math.isnan(other))
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(map(are_close, one, other))
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(are_close(one[key], other[key]) for key in one)
    return bool(one == other)


def text_of(value: Plain) -> str:
    """Format a plain value for a message."""
    if isinstance(value, float) and value.is_integer() and abs(value) < 2**53:
        return str(int(value))
    if isinstance(value, list):
        return f"[{', '.join(map(text_of, value))}]"
    return repr(value)


@dataclass(slots=True, eq=False)
class _KnownGroup:
    """One group's options at the last step.

    ``stable`` values cannot change as long as they are the same object. A change makes a new ``told``.
    """

    keys: list[Any]
    values: list[object]
    stable: list[bool]
    told: dict[str, Plain]
    is_stable: bool
    text: bytes = b""
    _texts: dict[str, str] = field(default_factory=dict)  # of what counts, by name, in the order of names

    @classmethod
    def of(cls, number: int, group: ParamGroup, left_out: Collection[OptionKey]) -> "_KnownGroup":
        """Read a group; ``left_out`` options do not count for the digest."""
        stable = [_is_stable(*pair) for pair in group.items()]
        told = {str(key): plain(value) for key, value in group.items() if key not in PARAM_KEYS}
        known = cls(list(group), list(group.values()), stable, told, all(stable))
        counted = sorted(name for name in told if (number, name) not in left_out)
        known._texts = {name: _text_of_option(name, told[name]) for name in counted}
        known._write()
        return known

    def follow(self, group: ParamGroup) -> bool:
        """Store the values of a group with equal keys; return whether any object changed."""
        values = self.values
        if self.is_stable and all(map(is_, group.values(), values)):  # most groups, in most steps
            return False
        told, is_stable, stable = self.told, True, self.stable
        for place, (key, value) in enumerate(group.items()):
            if key in PARAM_KEYS or (stable[place] and values[place] is value):
                continue
            stable[place] = _is_stable(key, value)
            is_stable = is_stable and stable[place]
            name, now = str(key), plain(value)
            if told is self.told:
                told = told.copy()
            told[name] = now
            if name in self._texts:
                self._texts[name] = _text_of_option(name, now)
        self.values, self.told, self.is_stable = list(group.values()), told, is_stable
        self._write()
        return True

    def _write(self) -> None:
        self.text = "\0".join(self._texts.values()).encode()


class OptionValues:
    """All groups' options at the last step as plain values, and their digest; cheap if unchanged.

    A change makes a new ``by_group`` list.
    """

    def __init__(self) -> None:
        self.by_group: list[dict[str, Plain]] = []
        self.digest = bytes(DIGEST_NBYTES)
        self._groups: list[_KnownGroup] = []
        self._left_out: frozenset[OptionKey] = frozenset()

    def follow(self, groups: Sequence[ParamGroup], left_out: Collection[OptionKey]) -> None:
        """Store all groups' options; ``left_out`` ones do not count for the digest."""
        known = self._groups
        is_known = len(groups) == len(known) and self._left_out == left_out
        if is_known and all(list(group) == before.keys for group, before in zip(groups, known, strict=True)):
            changes = [before.follow(group) for group, before in zip(groups, known, strict=True)]
            if not any(changes):
                return
        else:
            self._groups = [_KnownGroup.of(number, group, left_out) for number, group in enumerate(groups)]
            self._left_out = frozenset(left_out)
        self.by_group = [group.told for group in self._groups]
        told = b"\1".join([group.text for group in self._groups])
        self.digest = hashlib.blake2b(told, digest_size=DIGEST_NBYTES).digest()


def _is_stable(name: object, value: object) -> bool:
    """Whether a value cannot change as long as it is the same object, or is a list of parameters."""
    kind = type(value)
    if kind in _STABLE or name in PARAM_KEYS:
        return True
    return kind is tuple and all(type(item) in _STABLE for item in value)  # type: ignore[attr-defined]


def _text_of_option(name: str, value: Plain) -> str:
    """Encode an option for the digest; close numbers mostly have one text."""
    if type(value) is float:  # schedulers change many of them in each step
        return f"{name}={value:.{_DIGITS}g}"
    return f"{name}:{json.dumps(_rounded(value))}"


def _rounded(value: Plain) -> Plain:
    if isinstance(value, float):
        return format(value, f".{_DIGITS}g")
    if isinstance(value, list):
        return [_rounded(item) for item in value]
    if isinstance(value, dict):
        return {key: _rounded(item) for key, item in sorted(value.items())}
    return [value]  # a text is no number


_ABSENT = "nothing"


def differing(everyone: Sequence[Sequence[Mapping[str, Plain]]]) -> list[OptionKey]:
    """List the options that differ between ranks; ``everyone`` holds each rank's options by group."""
    keys = [(number, name) for groups in everyone for number, group in enumerate(groups) for name in group]
    return [key for key in dict.fromkeys(keys) if len(held_by(everyone, key)) > 1]


def held_by(
    everyone: Sequence[Sequence[Mapping[str, Plain]]], key: OptionKey
) -> list[tuple[Plain, list[int]]]:
    """List an option's values with their ranks, most ranks first; see `differing`."""
    number, name = key
    held: list[tuple[Plain, list[int]]] = []
    for rank, groups in enumerate(everyone):
        value = groups[number].get(name, _ABSENT) if number < len(groups) else _ABSENT
        ranks = next((ranks for known, ranks in held if are_close(known, value)), None)
        if ranks is None:
            held.append((value, [rank]))
        else:
            ranks.append(rank)
    return sorted(held, key=lambda pair: -len(pair[1]))
