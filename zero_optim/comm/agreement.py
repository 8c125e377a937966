"""Ranks agree before they begin, and fail together.

`agree` compares what ranks are about to do and raises on every rank, naming the first difference.
`failing_together` runs a piece of work that may raise on some ranks only, such as the check of an
argument, and makes it raise on all: a rank that fails alone leaves the others waiting in their next
collective. `gather_together` does that within a collective that is made anyway, and `SharedCall` for
a function that somebody else calls.
"""

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from zero_optim.comm.collectives import RankGroup, ranks_text
from zero_optim.errors import (
    CheckpointError,
    NotConsolidatedError,
    RankMismatchError,
    RemoteRankError,
    StateMismatchError,
)

# Exceptions that can be made from a message alone, so that every rank raises the same class.
_KINDS = (
    ValueError,
    TypeError,
    RuntimeError,
    NotImplementedError,
    NotConsolidatedError,
    RankMismatchError,
    StateMismatchError,
    CheckpointError,
)


def agree(group: RankGroup, items: Sequence[str], what: str, hints: Mapping[str, str] | None = None) -> None:
    """Check that every rank holds the same items. All ranks call; one small collective if so.

    Args:
        group: the ranks that must agree.
        items: descriptions, one a line of the message; their order counts.
        what: what the items describe, for the message.
        hints: by the first word of the item that differs, what to do about it.

    Raises:
        RankMismatchError: on every rank, with the first item that differs and who holds what.
    """
    digest = hashlib.sha256("\n".join(items).encode()).digest()
    if len(set(group.all_gather_fixed(digest))) > 1:
        everyone = [
            json.loads(payload) for payload in group.all_gather_bytes(json.dumps(list(items)).encode())
        ]
        raise RankMismatchError(f"ranks disagree about {what}: {_first_difference(everyone, hints or {})}")


def _first_difference(everyone: list[list[str]], hints: Mapping[str, str]) -> str:
    """Say what each rank holds at the first place where they differ, and what to do about it."""
    for index in range(max(map(len, everyone))):
        held: dict[str, list[int]] = {}
        for rank, items in enumerate(everyone):
            held.setdefault(items[index] if index < len(items) else "nothing more", []).append(rank)
        if len(held) > 1:
            told = "; ".join(f"{ranks_text(ranks)} has {item}" for item, ranks in held.items())
            hint = next((hints[word] for item in held if (word := item.partition(" ")[0]) in hints), None)
            return told if hint is None else f"{told}. {hint}"
    raise AssertionError("digests differ and items do not")


@contextmanager
def failing_together(group: RankGroup) -> Iterator[None]:
    """Run the body, then exchange whether it raised; if it did anywhere, raise everywhere.

    All ranks enter and leave. The rank that failed raises its own exception; the others one of
    the same class where that is a common one, with the failing rank in the message. The body must
    not communicate, or only in ways in which all ranks fail alike.
    """
    mine: Exception | None = None
    try:
        yield
    except Exception as error:  # noqa: BLE001 - held, told to the others, raised again below
        mine = error
    flags = group.all_gather_fixed(b"\0" if mine is None else b"\1")
    if not any(flag != b"\0" for flag in flags):
        return
    _raise_any(mine, group.all_gather_bytes(b"" if mine is None else _told(mine)))


def gather_together(group: RankGroup, work: Callable[[], bytes]) -> list[bytes]:
    """Give every rank what the work gives on each, by rank; if it raised anywhere, raise everywhere.

    All ranks call. No more is communicated than to gather the bytes.
    """
    mine: Exception | None = None
    try:
        payload = b"\0" + work()
    except Exception as error:  # noqa: BLE001 - held, told to the others, raised again below
        mine, payload = error, b"\1" + _told(error)
    payloads = group.all_gather_bytes(payload)
    _raise_any(mine, [payload[1:] if payload[:1] == b"\1" else b"" for payload in payloads])
    return [payload[1:] for payload in payloads]


class SharedCall:
    """A function that every rank calls, when somebody else's code does so; the first call fails together.

    Args:
        group: the ranks.
        function: called without arguments.
    """

    def __init__(self, group: RankGroup, function: Callable[[], Any]) -> None:
        self._group = group
        self._function = function
        self._has_told = False

    def __call__(self) -> Any:  # noqa: ANN401 - whatever the function gives
        """Call it; the first time tell the other ranks whether it raised."""
        if self._has_told:
            return self._function()
        self._has_told = True
        with failing_together(self._group):
            return self._function()

    def settle(self) -> None:
        """Hear of the other ranks' calls, if there was none here."""
        if not self._has_told:
            self._has_told = True
            with failing_together(self._group):
                pass


def _told(error: Exception) -> bytes:
    return json.dumps([type(error).__name__, str(error)]).encode()


def _raise_any(mine: Exception | None, payloads: Sequence[bytes]) -> None:
    """Raise this rank's error, or else the first one that another rank tells of."""
    if mine is not None:
        raise mine
    for rank, payload in enumerate(payloads):
        if payload:
            raise _rebuild(rank, *json.loads(payload))


def _rebuild(rank: int, name: str, message: str) -> Exception:
    """Make an exception of the class another rank raised, or the nearest thing to it."""
    known: dict[str, type[Exception]] = {kind.__name__: kind for kind in _KINDS}
    if name in known:
        return known[name](f"rank {rank}: {message}")
    return RemoteRankError(f"rank {rank} failed with {name}: {message}")
