"""Group options as plain values, which ranks compare at each step; numbers within 1e-6 are equal."""

import hashlib
import math
import numbers
from collections.abc import Collection, Mapping, Sequence
from operator import is_
from typing import Any, TypeAlias

import torch
from torch import Tensor

from zero_optim.compat.streams import is_asynchronous
from zero_optim.plan.groups import PARAM_KEYS, ParamGroup, options_of

Plain: TypeAlias = Any  # None, a float, a text, or a list or dict of such
OptionKey: TypeAlias = tuple[int, str]  # number of the group, name of the option

CLOSE = 1e-6  # numbers count as equal if they differ by no more than that, relative to the larger one
_READ_NUMEL = 16  # of larger tensors and containers only the size counts
_DEPTH = 4
_ABSENT = "nothing"
_DIGITS = 6  # of a number in a digest: what differs less seldom has another digest
_STABLE = frozenset([bool, int, float, complex, str, type(None)])
DIGEST_NBYTES = 8


def plain(value: object, depth: int = 0) -> Plain:  # noqa: PLR0911 - one line a kind
    """Convert an option to a plain value, without waiting; ``depth``: of containers."""
    if value is None or isinstance(value, str):
        return value
    if type(value) is float or type(value) is bool:  # most of them: the next test is slow
        return float(value) + 0.0
    if isinstance(value, numbers.Real):
        try:
            return float(value) + 0.0  # there is one zero
        except OverflowError:
            return str(value)
        except (TypeError, ValueError, RuntimeError):  # other ranks wait: nothing may raise here
            return _kind_of(value)
    if isinstance(value, Tensor):
        is_read = type(value) is Tensor and value.layout is torch.strided and not value.requires_grad
        is_here = value.device.type == "cpu" and not is_asynchronous(value.device)
        if is_read and is_here and value.numel() <= _READ_NUMEL:
            return plain(value.tolist())
        return f"{_kind_of(value)} of {tuple(value.shape)}"
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


def changeable(options: Mapping[str, object]) -> dict[str, Plain]:
    """Return options that can change in place (tensors, lists) as plain values."""
    found = {}
    for name, value in options.items():
        if type(value) not in _STABLE and name not in PARAM_KEYS and not _is_stable(value):
            found[name] = plain(value)
    return found


def are_close(one: Plain, other: Plain) -> bool:
    """Whether two plain values count as equal."""
    if isinstance(one, float) and isinstance(other, float):
        return math.isclose(one, other, rel_tol=CLOSE) or (math.isnan(one) and math.isnan(other))
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(map(are_close, one, other))
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(are_close(one[key], other[key]) for key in one)
    return bool(one == other)


def text_of(value: Plain, digits: int | None = None) -> str:
    """Format a plain value, for a message or with its numbers rounded."""
    if isinstance(value, float):
        if digits is not None:
            return format(value, f".{digits}g")
        return str(int(value)) if value.is_integer() and abs(value) < 2**53 else repr(value)
    if isinstance(value, list):
        return f"[{', '.join(text_of(item, digits) for item in value)}]"
    if isinstance(value, dict):
        return f"{{{', '.join(f'{key!r}: {text_of(item, digits)}' for key, item in sorted(value.items()))}}}"
    return repr(value)


class OptionValues:
    """All groups' options at the last step as plain values, and their digest; a change makes a new list."""

    def __init__(self) -> None:
        self.by_group: list[dict[str, Plain]] = []
        self.digest = bytes(DIGEST_NBYTES)
        self._left_out: frozenset[OptionKey] = frozenset()
        self._options: list[ParamGroup] = []  # with the same values, if none can change in place

    def follow(self, groups: Sequence[ParamGroup], left_out: Collection[OptionKey]) -> None:
        """Store all groups' options; the digest ignores ``left_out`` ones."""
        if self._left_out == left_out and len(groups) == len(self._options) != 0:
            for group, former in zip(groups, self._options, strict=True):
                values = map(former.__getitem__, group)
                if group.keys() != former.keys() or not all(map(is_, group.values(), values)):
                    break
            else:  # the keys and the very values that were seen last
                return
        self._left_out = frozenset(left_out)
        options = list(map(options_of, groups))
        is_stable = all(_is_stable(value) for group in options for value in group.values())
        self._options = list(map(dict, groups)) if is_stable else []
        self.by_group = [{str(key): plain(value) for key, value in group.items()} for group in options]
        texts = (
            "\0".join(
                "" if (number, name) in left_out else f"{name}={text_of(group[name], _DIGITS)}"
                for name in sorted(group)
            )
            for number, group in enumerate(self.by_group)
        )
        self.digest = hashlib.blake2b("\1".join(texts).encode(), digest_size=DIGEST_NBYTES).digest()


def _is_stable(value: object) -> bool:
    kind = type(value)
    return kind in _STABLE or (kind is tuple and _STABLE.issuperset(map(type, value)))  # type: ignore[call-overload]


def differing(everyone: Sequence[Sequence[Mapping[str, Plain]]]) -> list[OptionKey]:
    """List the options that differ between ranks; ``everyone``: each rank's options by group."""
    keys = [(number, name) for groups in everyone for number, group in enumerate(groups) for name in group]
    return [key for key in dict.fromkeys(keys) if len(held_by(everyone, key)) > 1]


def held_by(
    everyone: Sequence[Sequence[Mapping[str, Plain]]], key: OptionKey
) -> list[tuple[Plain, list[int]]]:
    """List an option's values with their ranks, most ranks first."""
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
