"""Moves of state: which rank holds which rows, which ranks want them, and the transfer.

Every rank derives the same list of parcels from a `RowMap`. Holders send directly, one after the other, in
pieces of bounded size (`comm.wire`). Checkpoints and DCP share `CutState` alone: each rank reads the rows
that it wants.

Note [State of cut parameters]
    Each owner of a piece keeps state for its rows. Entries of the piece's shape are rows of a whole entry,
    which has the parameter's shape. All other entries (a step count) are equal on every owner, as the probe
    has shown.
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import Parameter

from zero_optim.comm.agreement import failing_together
from zero_optim.comm.collectives import RankGroup
from zero_optim.comm.encoding import Nested, Place, decode, encode, map_tensors, new_memory
from zero_optim.comm.wire import copied_to_cpu, recv_encoded, send_value
from zero_optim.errors import StateMismatchError
from zero_optim.plan.pieces import Piece, Pieces, piece_of
from zero_optim.plan.strides import dense_strides, strides_of_rows

_VALUES = "values"


@dataclass(frozen=True, slots=True)
class CutState:
    """The layout of one cut parameter's state on its owners; ``shaped`` entries surely have its shape."""

    shape: tuple[int, ...]
    pieces: Pieces
    shaped: frozenset[str]

    def piece_of(self, rank: int) -> Piece:
        """Return the piece of an owner."""
        return next(piece for piece in self.pieces if piece.owner == rank)

    def shape_of(self, piece: Piece) -> tuple[int, ...]:
        """Return the shape of a piece."""
        return (piece.stop - piece.start, *self.shape[1:])

    def is_cut(self, name: object, shape: tuple[int, ...], piece: Piece | None = None) -> bool:
        """Whether an entry is cut by rows; ``shape`` is that of the whole, or of the piece's entry."""
        wanted = self.shape if piece is None else self.shape_of(piece)
        # A step count of shape (1,) beside a piece of one element is none of its rows.
        return tuple(shape) == wanted and (name in self.shaped or max(shape) > 1)

    def cut_entries(self, entries: Nested, piece: Piece) -> dict[str, Tensor]:
        """List a piece's entries that are cut; TypeError if they cannot be joined."""
        rows = {}
        for name, value in entries.items() if isinstance(entries, dict) else ():
            if isinstance(value, Tensor) and self.is_cut(name, value.shape, piece):
                if type(value) not in (Tensor, Parameter) or value.layout != torch.strided:
                    raise TypeError(
                        f"'{name}' of a cut parameter is a {type(value).__name__} of layout {value.layout}, "
                        "whose rows cannot be joined: build the optimizer with cuts=False"
                    )
                rows[name] = value
        return rows

    def picked(self, entries: Nested, piece: Piece, start: int, stop: int) -> Nested:
        """Select rows ``[start, stop)`` of a piece's state: views of them, and all uncut entries."""
        rows = self.cut_entries(entries, piece)
        if not rows:
            return entries
        entries = copy(entries)
        for name, value in rows.items():
            entries[name] = value.detach()[start - piece.start : stop - piece.start]
        return entries


class Joined:
    """Whole entries of cut parameters, by index, in CPU memory, where rows are received at their place."""

    def __init__(self, cuts: Mapping[int, CutState]) -> None:
        self.cuts = cuts
        self._whole: dict[tuple[int, str], Tensor] = {}
        self._num_rows: Counter[tuple[int, str]] = Counter()
        self._apart: list[tuple[Tensor, Tensor]] = []

    def places_of(self, owner: int) -> Place:
        """Return the allocator with which `wire.recv_encoded` receives an owner's state."""

        def place(
            path: tuple[Any, ...], dtype: torch.dtype, shape: tuple[int, ...], strides: tuple[int, ...]
        ) -> Tensor:
            cut = self.cuts.get(path[0]) if len(path) == 2 else None
            if cut is not None and cut.is_cut(path[1], shape, cut.piece_of(owner)):
                return self._place(path[0], path[1], owner, dtype, strides)
            return new_memory(path, dtype, shape, strides)

        return place

    def _place(
        self, index: int, name: str, owner: int, dtype: torch.dtype, strides: tuple[int, ...]
    ) -> Tensor:
        cut, key = self.cuts[index], (index, name)
        piece = cut.piece_of(owner)
        num_rows = piece.stop - piece.start
        if key not in self._whole:
            form = strides_of_rows(strides, num_rows, cut.shape)
            self._whole[key] = torch.empty_strided(cut.shape, form, dtype=dtype, device="cpu")
        rows = self._whole[key][piece.start : piece.stop]
        if rows.dtype == dtype:
            self._num_rows[key] += num_rows
            if rows.stride() == tuple(strides) == dense_strides(rows):
                return rows
        # Rows are not one run of memory.
        apart = torch.empty_strided(rows.shape, strides, dtype=dtype, device="cpu")
        self._apart.append((rows, apart))
        return apart

    def copied(self, state: Mapping[Any, Any], rank: int) -> dict[Any, Any]:
        """Copy this rank's state, by index; rows go to their place in the whole."""
        copies: dict[Any, Any] = {}
        for key, entries in state.items():
            cut = self.cuts.get(key)
            rows = {} if cut is None else cut.cut_entries(entries, cut.piece_of(rank))
            rest = entries
            if rows:
                rest = copy(entries)
                rest.update(dict.fromkeys(rows))  # in the same order
            copies[key] = map_tensors(rest, copied_to_cpu)
            for name, value in rows.items():
                place = self._place(key, name, rank, value.dtype, dense_strides(value))
                copies[key][name] = place.copy_(value.detach())
        return copies

    def merge(self, parts: list[dict[Any, Any]]) -> dict[Any, Any]:
        """Merge the owners' parts, in the order of ranks; StateMismatchError if their entries differ."""
        for rows, apart in self._apart:
            rows.copy_(apart)
        merged: dict[Any, Any] = {}
        for key, value in (item for part in parts for item in part.items()):
            merged.setdefault(key, value)
        for (index, name), whole in self._whole.items():
            wanted, got = self.cuts[index].shape[0], self._num_rows[index, name]
            if got != wanted or name not in merged[index]:
                raise StateMismatchError(
                    f"parameter {index} is cut, and its owners keep '{name}' for {got} of its {wanted} rows: "
                    "expected the same entries, of one dtype, on all of them"
                )
            merged[index][name] = whole
        return merged


@dataclass(frozen=True, slots=True, eq=False)
class StateShard:
    """A rank's state and rows by parameter index, and global entries."""

    state: Mapping[int, Any]
    values: Mapping[int, Tensor] = field(default_factory=dict)
    everywhere: Mapping[Any, Any] = field(default_factory=dict)


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
    """Each parameter's pieces by holder, and by ranks that want them; ``shaped`` entries of cut ones."""

    shapes: Sequence[tuple[int, ...]]
    shaped: Mapping[int, frozenset[str]]
    held: Sequence[Pieces]
    wanted: Sequence[Pieces]

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

    def message(self, parcel: Parcel, held: StateShard) -> dict[Any, Nested]:
        """Collect a parcel: entries under the parameter's index, its own rows under ``~index``."""
        message: dict[Any, Nested] = dict(held.everywhere)
        for index, start, stop in parcel.moves:
            entries, values = held.state.get(index), held.values.get(index)
            if index in self.shaped:
                cut = CutState(self.shapes[index], self.held[index], self.shaped[index])
                piece = cut.piece_of(parcel.holder)
                entries = cut.picked(entries, piece, start, stop)
                values = None if values is None else values[start - piece.start : stop - piece.start]
            if entries is not None:
                message[index] = entries
            if values is not None:
                message[~index] = {_VALUES: values}
        return message

    def joined_on(self, rank: int) -> Joined:
        """Return what joins the holders' rows of cut parameters on a rank."""
        own = {index: piece for index, some in enumerate(self.wanted) if (piece := piece_of(some, rank))}
        pieces: dict[int, list[Piece]] = {}
        for holder, moves, takers in self.parcels:
            for index, start, stop in moves if rank in takers else ():
                if index in self.shaped:
                    at = own[index].start
                    pieces.setdefault(index, []).append(Piece(holder, start - at, stop - at))
        cuts = {}
        for index, some in pieces.items():
            shape = (own[index].stop - own[index].start, *self.shapes[index][1:])
            cuts[index] = CutState(shape, tuple(some), self.shaped[index])
            cuts[~index] = CutState(shape, tuple(some), frozenset({_VALUES}))
        return Joined(cuts)


def move(
    group: RankGroup,
    rows: RowMap,
    held: StateShard,
    *,
    copy_with: Callable[[Tensor], Tensor] | None = None,
    about: str = "optimizer state",
) -> StateShard:
    """Bring state to the ranks that want it, in new CPU memory; all ranks call.

    A sender needs memory for one more piece of 16 MiB. ``copy_with`` copies uncut state that stays.
    """
    group = group.during("state")
    joined = rows.joined_on(group.rank)
    with failing_together(group):
        mine = {
            number: rows.message(parcel, held)
            for number, parcel in enumerate(rows.parcels)
            if parcel.holder == group.rank
        }
        leaving = [number for number in mine if rows.parcels[number].takers != [group.rank]]
        encoded = {number: encode(mine[number], about) for number in leaving}
    stays, received = dict[Any, Nested](), {}
    for number, (holder, _, takers) in enumerate(rows.parcels):
        if number in encoded:
            send_value(group, [rank for rank in takers if rank != group.rank], *encoded[number])
        if group.rank in takers and number in mine:
            stays = mine[number]  # the one parcel of this rank to itself
        elif group.rank in takers:
            received[holder] = recv_encoded(group, holder, joined.places_of(holder))
    with failing_together(group):  # only now, as a rank that raises receives nothing more
        parts = {holder: decode(skeleton, iter(tensors)) for holder, (skeleton, tensors) in received.items()}
        if stays:
            cut = {key: value for key, value in stays.items() if key in joined.cuts}
            # Whole rows are where they belong.
            rest = {key: v for key, v in stays.items() if key not in cut and not _is_values(key)}
            whole = rest if copy_with is None else map_tensors(rest, copy_with)
            parts[group.rank] = {**whole, **joined.copied(cut, group.rank)}
        merged = joined.merge([parts[holder] for holder in sorted(parts)])
    values = {~key: merged.pop(key)[_VALUES] for key in list(merged) if _is_values(key)}
    state = {key: merged.pop(key) for key in sorted(key for key in merged if isinstance(key, int))}
    return StateShard(state, values, merged)


def _is_values(key: object) -> bool:
    return isinstance(key, int) and key < 0


def sent_by(group: RankGroup, source: int, value: Nested, about: str) -> Nested:
    """Return one rank's value on every rank; ``about`` names it in messages; all ranks call."""
    group = group.during("state")
    with failing_together(group):
        message = encode(value, about) if group.rank == source else None
    if message is None:
        message = recv_encoded(group, source)
    else:
        send_value(group, [rank for rank in range(group.size) if rank != source], *message)
    with failing_together(group):  # only now, as a rank that raises receives nothing more
        return decode(message[0], iter(message[1]))
