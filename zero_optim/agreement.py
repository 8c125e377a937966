"""Ranks agree before they begin, and fail together.

Two tools. `agree` compares what ranks are about to do and raises on every rank, naming the first
difference. `failing_together` runs a piece of work that may raise on some ranks only, such as the
check of an argument, and makes it raise on all: a rank that fails alone leaves the others waiting
in their next collective.
"""

import hashlib
import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from zero_optim.collectives import RankGroup, ranks_text
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


def agree(group: RankGroup, items: Sequence[str], what: str) -> None:
    """Check that every rank holds the same items. All ranks call; one small collective if so.

    Args:
        group: the ranks that must agree.
        items: descriptions, one a line of the message; their order counts.
        what: what the items describe, for the message.

    Raises:
        RankMismatchError: on every rank, with the first item that differs and who holds what.
    """
    digest = hashlib.sha256("\n".join(items).encode()).digest()
    if len(set(group.all_gather_fixed(digest))) > 1:
        everyone = [
            json.loads(payload) for payload in group.all_gather_bytes(json.dumps(list(items)).encode())
        ]
        raise RankMismatchError(f"ranks disagree about {what}: {_first_difference(everyone)}")


def _first_difference(everyone: list[list[str]]) -> str:
    """Say what each rank holds at the first place where they differ."""
    for index in range(max(map(len, everyone))):
        held: dict[str, list[int]] = {}
        for rank, items in enumerate(everyone):
            held.setdefault(items[index] if index < len(items) else "nothing more", []).append(rank)
        if len(held) > 1:
            return "; ".join(f"{ranks_text(ranks)} has {item}" for item, ranks in held.items())
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
    told = json.dumps([type(mine).__name__, str(mine)]).encode() if mine is not None else b""
    payloads = group.all_gather_bytes(told)
    if mine is not None:
        raise mine
    rank = next(rank for rank, payload in enumerate(payloads) if payload)
    raise _rebuild(rank, *json.loads(payloads[rank]))


def _rebuild(rank: int, name: str, message: str) -> Exception:
    """Make an exception of the class another rank raised, or the nearest thing to it."""
    known: dict[str, type[Exception]] = {kind.__name__: kind for kind in _KINDS}
    if name in known:
        return known[name](f"rank {rank}: {message}")
    return RemoteRankError(f"rank {rank} failed with {name}: {message}")
