"""Ranks agree before they begin, and fail together.

A rank that fails alone leaves the others waiting in their next collective. Every room that communicates uses:

- `agree`: compares what ranks are about to do; if it differs, raises on every rank and names the difference;
- `said_by_all`: whether all ranks say yes;
- `failing_together`: runs work that may raise on some ranks only, and then raises on all;
- `SharedCall`: the same, for a function that other code calls.
"""

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from zero_optim.comm.collectives import RankGroup
from zero_optim.comm.frames import ranks_text
from zero_optim.errors import (
    CheckpointError,
    NotConsolidatedError,
    RankMismatchError,
    RemoteRankError,
    StateMismatchError,
    heard_of,
    message_of,
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
    """Check that every rank has the same items. All ranks call; one small collective if they agree.

    Args:
        group: the ranks that must agree.
        items: descriptions; their order counts.
        what: what the items describe, for the message.
        hints: what to do about a difference, by the first word of the item that differs.

    Raises:
        RankMismatchError: on every rank, with the first item that differs and which rank has what.
    """
    digest = hashlib.sha256("\n".join(items).encode()).digest()
    if len(set(group.all_gather_fixed(digest))) > 1:
        everyone = [
            json.loads(payload) for payload in group.all_gather_bytes(json.dumps(list(items)).encode())
        ]
        raise RankMismatchError(
            f"ranks disagree about {what}: {_first_difference(group, everyone, hints or {})}"
        )


def said_by_all(group: RankGroup, answers: Sequence[bool]) -> list[bool]:
    """Combine the answers to some questions: yes where every rank says yes.

    All ranks call, with as many answers; one small collective, or none if nothing was asked.
    """
    everyone = group.all_gather_fixed(bytes(answers))
    return [all(said) for said in zip(*everyone, strict=True)]


def _first_difference(group: RankGroup, everyone: list[list[str]], hints: Mapping[str, str]) -> str:
    """Say what each rank has at the first place where they differ, and what to do about it."""
    for index in range(max(map(len, everyone))):
        held: dict[str, list[int]] = {}
        for rank, items in zip(group.numbers, everyone, strict=True):
            held.setdefault(items[index] if index < len(items) else "nothing more", []).append(rank)
        if len(held) > 1:
            difference = "; ".join(f"{ranks_text(ranks)} has {item}" for item, ranks in held.items())
            hint = next((hints[word] for item in held if (word := item.partition(" ")[0]) in hints), None)
            return difference if hint is None else f"{difference}. {hint}"
    raise AssertionError("digests differ and items do not")


@contextmanager
def failing_together(group: RankGroup) -> Iterator[None]:
    """Run the body, then exchange whether it raised; if it raised on any rank, raise on all.

    All ranks enter and leave; one small collective, and two more if a rank failed. The rank that failed
    raises its own exception. The others raise one of the same class if it is in `_KINDS`, else
    `RemoteRankError`, with the failing rank in the message. The body must not communicate, unless all ranks
    then fail alike.
    """
    mine: Exception | None = None
    try:
        yield
    except Exception as error:  # noqa: BLE001 - kept, sent to the others, raised again below
        mine = error
    try:
        flags = group.all_gather_fixed(b"\0" if mine is None else b"\1")
    except (RemoteRankError, RankMismatchError) as unanswered:
        if mine is None:
            raise
        raise mine from unanswered  # it tells more, and may be why nobody answered: a device of no use
    if not any(flag != b"\0" for flag in flags):
        return
    _raise_any(mine, group, group.all_gather_bytes(b"" if mine is None else encoded(mine)))


class SharedCall:
    """A function that other code calls, on every rank; the first call fails together.

    Args:
        group: the ranks.
        function: called without arguments.
    """

    def __init__(self, group: RankGroup, function: Callable[[], Any]) -> None:
        self._group = group
        self._function = function
        self._is_settled = False

    def __call__(self) -> Any:  # noqa: ANN401 - whatever the function returns
        """Call the function; the first time exchange with the other ranks whether it raised."""
        if self._is_settled:
            return self._function()
        self._is_settled = True
        with failing_together(self._group):
            return self._function()

    def settle(self) -> None:
        """Take part in the other ranks' exchange, if there was no call here."""
        if not self._is_settled:
            self._is_settled = True
            with failing_together(self._group):
                pass


def failure_of_others(group: RankGroup, mine: bytes) -> Exception | None:
    """Make the exception to be raised where ranks know that one of them failed; all ranks call.

    Communicates.

    Args:
        group: the ranks.
        mine: what failed here, as `encoded` gives it; empty if nothing did.

    Returns:
        What a rank raises that did not fail itself, as by `failing_together`; None on one that did.
    """
    payloads = group.all_gather_bytes(mine)
    failed = [(rank, payload) for rank, payload in zip(group.numbers, payloads, strict=True) if payload]
    if mine or not failed:
        return None
    rank, payload = failed[0]
    return _rebuild(rank, *json.loads(payload))


def encoded(error: BaseException, more: str = "") -> bytes:
    """Give what other ranks are told of an exception, and more; nothing in it keeps the exception."""
    return json.dumps([type(error).__name__, message_of(error) + more]).encode()


def _raise_any(mine: Exception | None, group: RankGroup, payloads: Sequence[bytes]) -> None:
    """Raise this rank's error, or else the first one that another rank sent."""
    if mine is not None:
        raise mine
    for rank, payload in zip(group.numbers, payloads, strict=True):
        if payload:
            raise _rebuild(rank, *json.loads(payload))


def _rebuild(rank: int, name: str, message: str) -> Exception:
    """Make an exception of the class that another rank raised, else a `RemoteRankError`."""
    known: dict[str, type[Exception]] = {kind.__name__: kind for kind in _KINDS}
    if name in known:
        return heard_of(known[name](f"rank {rank}: {message}"))
    return RemoteRankError(f"rank {rank} failed with {name}: {message}")
