"""Moves of state: which rank holds which rows, which ranks want them, and the transfer.

Consolidating, loading, rebinding and going back to mirrors are such moves. Every rank derives the same list
of parcels from a `RowMap`. Holders send directly, one after the other, in pieces of bounded size
(`comm.wire`).

The caller may move a parameter with its state: if a rank died during a gather, only the owner surely has the
new value.
"""

from collections.abc import Callable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

from torch import Tensor

from zero_optim.comm.agreement import failing_together
from zero_optim.comm.collectives import RankGroup
from zero_optim.comm.encoding import Nested, Skeleton, decode, encode, map_tensors
from zero_optim.comm.wire import recv_encoded, send_value
from zero_optim.plan.pieces import Piece, Pieces
from zero_optim.state.cut_state import CutState, Joined

_VALUES = "values"
_Encoded = tuple[Skeleton, list[Tensor]]


@dataclass(frozen=True, slots=True, eq=False)
class Held:
    """A holder's state and rows by parameter index, and global entries.

    ``values`` are the rows themselves if ``is_live``, else copies.
    """

    state: Mapping[int, Any]
    values: Mapping[int, Tensor] = field(default_factory=dict)
    everywhere: Mapping[Any, Any] = field(default_factory=dict)
    is_live: bool = True


class Move(NamedTuple):
    """Rows ``[start, stop)`` of a parameter, by index, that go from a holder to a rank."""

    param: int
    start: int
    stop: int


class Parcel(NamedTuple):
    """A message of a holder, and the ranks that take it, maybe itself too."""

    holder: int
    moves: tuple[Move, ...]
    takers: list[int]


@dataclass(frozen=True)
class RowMap:
    """The holders of each parameter's rows, and the ranks that want them.

    Attributes:
        shapes: of the parameters.
        shaped: by index of a parameter that is cut on either side, names of entries with its shape.
        held: each parameter's pieces, by holder.
        wanted: each parameter's pieces, by rank; several ranks may want the same rows.
        hosts: the rank that sends for each holder; it may host several.
    """

    shapes: Sequence[tuple[int, ...]]
    shaped: Mapping[int, frozenset[str]]
    held: Sequence[Pieces]
    wanted: Sequence[Pieces]
    hosts: Sequence[int]

    @cached_property
    def parcels(self) -> list[Parcel]:
        """All parcels, also those that stay on their rank."""
        moves: dict[tuple[int, int], list[Move]] = {}
        for index, (held, wanted) in enumerate(zip(self.held, self.wanted, strict=True)):
            for holder, first, last in held:
                for rank, start, stop in wanted:
                    move = Move(index, max(first, start), min(last, stop))
                    if move.start < move.stop or index not in self.shaped:  # which may have no rows at all
                        moves.setdefault((holder, rank), []).append(move)
        takers: dict[tuple[int, tuple[Move, ...]], list[int]] = {}
        for (holder, rank), some in sorted(moves.items()):
            takers.setdefault((holder, tuple(some)), []).append(rank)
        return [Parcel(holder, some, ranks) for (holder, some), ranks in takers.items()]

    def message(self, parcel: Parcel, held: Held) -> dict[Any, Nested]:
        """Collect a parcel: entries under the parameter's index, its own rows under ``~index``."""
        message: dict[Any, Nested] = dict(held.everywhere)
        for index, start, stop in parcel.moves:
            entries: Nested = held.state.get(index)
            values = held.values.get(index)
            if index in self.shaped:
                cut = CutState(self.shapes[index], self.held[index], self.shaped[index])
                piece = cut.piece_of(parcel.holder)
                rows = slice(start - piece.start, stop - piece.start)
                picked = cut.cut_entries(entries, piece)
                if picked:
                    entries = copy(entries)
                    entries.update({name: value.detach()[rows] for name, value in picked.items()})
                values = None if values is None else values[rows]
            if entries is not None:
                message[index] = entries
            if values is not None:
                message[~index] = {_VALUES: values}
        return message

    def joined_on(self, rank: int) -> dict[int, CutState]:
        """Return how a rank joins the holders' rows of cut parameters."""
        own = {
            index: piece for index, some in enumerate(self.wanted) for piece in some if piece.owner == rank
        }
        pieces: dict[int, list[Piece]] = {}
        for holder, moves, takers in self.parcels:
            for index, start, stop in moves if rank in takers else ():
                if index in self.shaped:
                    at = own[index].start
                    pieces.setdefault(index, []).append(Piece(holder, start - at, stop - at))
        parts = {}
        for index, some in pieces.items():
            shape = (own[index].stop - own[index].start, *self.shapes[index][1:])
            parts[index] = CutState(shape, tuple(some), self.shaped[index])
            parts[~index] = CutState(shape, tuple(some), frozenset({_VALUES}))
        return parts


def move(
    group: RankGroup,
    rows: RowMap,
    held: Mapping[int, Held],
    *,
    copy_with: Callable[[Tensor], Tensor] | None = None,
    about: str = "optimizer state",
    advance: Callable[[int], object] = int,
) -> Held:
    """Bring state to the ranks that want it; all ranks call. Returns this rank's part.

    Received state is in new CPU memory. A sender needs memory for one more piece of 16 MiB. In an NCCL-only
    group state goes from device to device, over a communicator for each pair of ranks.

    Args:
        group: the ranks.
        rows: the map, equal on every rank, but for rows that stay where they are.
        held: this rank's state, by holder.
        copy_with: copies uncut state that stays on a rank; None leaves it as it is.
        about: names the state in messages.
        advance: called with the bytes of each received piece.

    Raises:
        TypeError: on every rank, if some state cannot be sent without pickle, or holds a tensor subclass that
            a receiver has not imported, or is cut and no plain tensor.
        StateMismatchError: on every rank, if the holders of a parameter keep different entries.
    """
    group = group.during("state")
    joined = Joined(rows.joined_on(group.rank))
    stays, received = _exchange(group, rows, held, joined, about, advance)
    with failing_together(group):  # only now, as a rank that raises receives nothing more
        parts = {holder: decode(skeleton, iter(tensors)) for holder, (skeleton, tensors) in received.items()}
        for holder, message in stays.items():
            cut = {key: value for key, value in message.items() if joined.has(key)}
            drops = held[holder].is_live  # the rows are where they belong
            rest = {k: v for k, v in message.items() if k not in cut and not (drops and _is_values(k))}
            whole = rest if copy_with is None else map_tensors(rest, copy_with)
            parts[holder] = {**whole, **joined.copied(cut, holder)}
        merged = joined.merge([parts[holder] for holder in sorted(parts)])
    values = {~key: merged.pop(key)[_VALUES] for key in list(merged) if _is_values(key)}
    state = {key: merged.pop(key) for key in sorted(key for key in merged if isinstance(key, int))}
    return Held(state, values, merged, is_live=False)


def _exchange(
    group: RankGroup,
    rows: RowMap,
    held: Mapping[int, Held],
    joined: Joined,
    about: str,
    advance: Callable[[int], object],
) -> tuple[dict[int, Any], dict[int, _Encoded]]:
    """Send and receive all parcels; returns those that stay, and those received, by holder."""
    with failing_together(group):
        mine = {
            number: rows.message(parcel, held[parcel.holder])
            for number, parcel in enumerate(rows.parcels)
            if rows.hosts[parcel.holder] == group.rank
        }
        leaving = [number for number in mine if rows.parcels[number].takers != [group.rank]]
        encoded = {number: encode(mine[number], about) for number in leaving}
    stays, received = {}, {}
    for number, (holder, _, takers) in enumerate(rows.parcels):
        host = rows.hosts[holder]
        if number in encoded:
            send_value(group, [rank for rank in takers if rank != group.rank], *encoded[number])
        if group.rank in takers and host == group.rank:
            stays[holder] = mine[number]
        elif group.rank in takers:
            received[holder] = recv_encoded(group, host, advance, joined.places_of(holder))
    return stays, received


def _is_values(key: object) -> bool:
    return isinstance(key, int) and key < 0


def told_by(group: RankGroup, source: int, value: Nested, about: str) -> Nested:
    """Return one rank's value on every rank; ``about`` names it in messages; all ranks call."""
    group = group.during("state")
    others = [rank for rank in range(group.size) if rank != source]
    with failing_together(group):
        message = encode(value, about) if group.rank == source else None
    if message is None:
        message = recv_encoded(group, source)
    else:
        send_value(group, others, *message)
    with failing_together(group):  # only now, as a rank that raises receives nothing more
        return decode(message[0], iter(message[1]))
    raise AssertionError("it fails on every rank, or on none")
