"""State that moves: who holds which rows now, who shall, and one function that brings them there.

Consolidating, loading, rebinding and going back to mirrors are this move with other ends. Every rank works
out the same list of parcels from a `RowMap`. Holders send directly, one after the other, in pieces of bounded
size (`comm.wire`); rows of a parameter that several hold are received where they belong.

With the state goes the parameter itself, where the caller wants it: where a rank died in the middle of a
gather, its owner alone is sure to have the new value.
"""

from collections.abc import Callable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

from torch import Tensor

from zero_optim.comm.agreement import failing_together
from zero_optim.comm.collectives import RankGroup
from zero_optim.comm.encoding import Nested, decode, encode, map_tensors
from zero_optim.comm.wire import recv_encoded, send_value
from zero_optim.plan.pieces import Piece, Pieces
from zero_optim.state.cut_state import CutState, Joined

_VALUES = "values"


@dataclass(frozen=True, slots=True, eq=False)
class Held:
    """What a holder has.

    Attributes:
        state: entries, by index of the parameter.
        values: the rows of the parameters themselves, by index; may be empty.
        everywhere: global entries.
        is_live: `values` are the very rows, and no copies.
    """

    state: Mapping[int, Any]
    values: Mapping[int, Tensor] = field(default_factory=dict)
    everywhere: Mapping[Any, Any] = field(default_factory=dict)
    is_live: bool = True


class Move(NamedTuple):
    """Rows ``[start, stop)`` of a parameter, by its index, that go from a holder to a rank."""

    param: int
    start: int
    stop: int


@dataclass(frozen=True)
class RowMap:
    """Who holds which rows of each parameter, and who shall.

    Attributes:
        shapes: of the parameters.
        shaped: by index, for each of which somebody has or wants some rows only, names of entries that surely
            have its shape.
        held: for each, its pieces by holder.
        wanted: for each, its pieces by rank; several ranks may want the same rows.
        hosts: for each holder the rank that sends for it. A rank may be host to several, each of which may
            have rows of one parameter.
    """

    shapes: Sequence[tuple[int, ...]]
    shaped: Mapping[int, frozenset[str]]
    held: Sequence[Pieces]
    wanted: Sequence[Pieces]
    hosts: Sequence[int]

    @cached_property
    def parcels(self) -> list[tuple[int, tuple[Move, ...], list[int]]]:
        """List what each holder sends, and the ranks that take it; what stays is in it too."""
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
        return [(holder, some, ranks) for (holder, some), ranks in takers.items()]

    def message(self, holder: int, moves: Sequence[Move], held: Held) -> dict[Any, Nested]:
        """Collect one parcel: entries under the parameter's index, its own rows under ``~index``."""
        message: dict[Any, Nested] = dict(held.everywhere)
        for index, start, stop in moves:
            entries: Nested = held.state.get(index)
            values = held.values.get(index)
            if index in self.shaped:
                cut = CutState(self.shapes[index], self.held[index], self.shaped[index])
                piece = cut.piece_of(holder)
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
        """Tell how what a rank wants of split parameters is put together from what the holders send."""
        own = {
            index: piece for index, some in enumerate(self.wanted) for piece in some if piece.owner == rank
        }
        found: dict[int, list[Piece]] = {}
        for holder, moves, ranks in self.parcels:
            for index, start, stop in moves if rank in ranks else ():
                if index in self.shaped:
                    at = own[index].start
                    found.setdefault(index, []).append(Piece(holder, start - at, stop - at))
        parts = {}
        for index, pieces in found.items():
            shape = (own[index].stop - own[index].start, *self.shapes[index][1:])
            parts[index] = CutState(shape, tuple(pieces), self.shaped[index])
            parts[~index] = CutState(shape, tuple(pieces), frozenset({_VALUES}))
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
    """Bring state to the ranks that want it; all ranks call. Returns what this rank has now.

    What is received is in CPU memory that nothing else uses. While a rank sends, it needs memory for one more
    piece of 16 MiB. State on an accelerator is sent from the CPU where the group has a backend for it; in a
    group of NCCL alone it goes from device to device, and each pair of ranks makes a communicator for that.

    Args:
        group: the ranks.
        rows: who holds what, and who shall; equal on every rank, but for rows that stay where they are.
        held: what the holders have whose host this rank is.
        copy_with: copies what stays on a rank and is not split; None leaves that as it is.
        about: what it is, for messages.
        advance: called with the number of bytes of each piece that has come.

    Raises:
        TypeError: on every rank, if some state cannot be sent without pickle, or holds a tensor subclass that
            a receiver has not imported, or is no plain tensor although it is cut.
        StateMismatchError: on every rank, if the holders of a parameter keep different entries.
    """
    group = group.during("state")
    rank, hosts = group.rank, rows.hosts
    with failing_together(group):
        mine = {
            number: rows.message(holder, moves, held[holder])
            for number, (holder, moves, _) in enumerate(rows.parcels)
            if hosts[holder] == rank
        }
        encoded = {
            number: encode(message, about)
            for number, message in mine.items()
            if rows.parcels[number][2] != [rank]
        }
    joined = Joined(rows.joined_on(rank))
    received, stays = {}, {}
    for number, (holder, _, ranks) in enumerate(rows.parcels):
        if hosts[holder] == rank:
            if number in encoded:
                send_value(group, [to for to in ranks if to != rank], *encoded[number])
            if rank in ranks:
                stays[holder] = mine[number]
        elif rank in ranks:
            received[holder] = recv_encoded(group, hosts[holder], advance, joined.places_of(holder))
    with failing_together(group):  # only now, as a rank that raises receives nothing more
        parts = {holder: decode(skeleton, iter(tensors)) for holder, (skeleton, tensors) in received.items()}
        for holder, message in stays.items():
            cut = {key: value for key, value in message.items() if joined.has(key)}
            whole = {key: value for key, value in message.items() if key not in cut}
            if held[holder].is_live:
                whole = {key: value for key, value in whole.items() if not _is_values(key)}
            if copy_with is not None:
                whole = map_tensors(whole, copy_with)
            parts[holder] = {**whole, **joined.copied(cut, holder)}
        merged = joined.merge([parts[holder] for holder in sorted(parts)])
    values = {~key: merged.pop(key)[_VALUES] for key in list(merged) if _is_values(key)}
    state = {key: merged.pop(key) for key in sorted(key for key in merged if isinstance(key, int))}
    return Held(state, values, merged, is_live=False)


def _is_values(key: object) -> bool:
    return isinstance(key, int) and key < 0


def told_by(group: RankGroup, source: int, value: Nested, about: str) -> Nested:
    """Give every rank what one of them has; all ranks call.

    Args:
        group: the ranks.
        source: the rank that has it.
        value: on that rank; left as it is.
        about: what it is, for messages.
    """
    group = group.during("state")
    messages = []
    with failing_together(group):
        if group.rank == source:
            messages.append(encode(value, about))
    for message in messages:
        send_value(group, [rank for rank in range(group.size) if rank != source], *message)
    if not messages:
        messages.append(recv_encoded(group, source))
    with failing_together(group):  # only now, as a rank that raises receives nothing more
        ((skeleton, tensors),) = messages
        return decode(skeleton, iter(tensors))
    raise AssertionError("it fails on every rank, or on none")
