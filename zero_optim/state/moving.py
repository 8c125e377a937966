"""Moves of state: which rank holds which rows, which ranks want them, and the transfer.

State is a dict: a parameter's entries under its index, global entries under other keys. Every rank derives
the same list of parcels from a `RowMap`. Holders send directly, one after the other, in pieces of bounded
size (`comm.wire`). Checkpoints and DCP share `CutState` alone: each rank reads the rows that it wants.

Note [State of cut parameters]
    Each owner of a piece keeps state for its rows. Entries of the piece's shape are rows of a whole entry,
    which has the parameter's shape. All other entries (a step count) are equal on every owner, as the probe
    has shown.
"""

from collections.abc import Callable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.nn import Parameter

from zero_optim.comm.agreement import failing_together
from zero_optim.comm.collectives import RankGroup
from zero_optim.comm.encoding import Nested, decode, encode, map_tensors
from zero_optim.comm.wire import copied_to_cpu, recv_encoded, send_value
from zero_optim.errors import StateMismatchError
from zero_optim.plan.pieces import Piece, Pieces, piece_of
from zero_optim.plan.strides import dense_strides, strides_of_rows

IndexedState: TypeAlias = Mapping[Any, Nested]  # by parameter index, and global entries
Moves: TypeAlias = tuple[tuple[int, int, int], ...]  # rows [start, stop) of parameters, by index


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

    def form_of(self, rows: Tensor) -> Tensor:
        """Return a tensor without memory that has the strides of the whole entry of which these are rows."""
        strides = strides_of_rows(dense_strides(rows), len(rows), self.shape)
        return torch.empty_strided(self.shape, strides, dtype=rows.dtype, device="meta")

    def joined(self, about: str, parts: Mapping[int, Nested]) -> Nested:
        """Join the owners' parts, whose rows are taken out, in new CPU memory; uncut entries are the first's.

        StateMismatchError, with what it is ``about``, unless all owners have the same entries.
        """
        rows: dict[str, list[tuple[Piece, Tensor]]] = {}
        for owner, entries in parts.items():
            piece = self.piece_of(owner)
            for name, value in self.cut_entries(entries, piece).items():
                rows.setdefault(name, []).append((piece, value))
                entries[name] = None  # so that its memory is free once it is copied
        whole = map_tensors(next(iter(parts.values())), copied_to_cpu)
        for name in list(rows):
            found = rows.pop(name)
            form = self.form_of(found[0][1])
            got = sum(len(value) for _, value in found if value.dtype == form.dtype)
            if got != self.shape[0]:
                raise StateMismatchError(
                    f"{about} is cut, and its owners keep '{name}' for {got} of its {self.shape[0]} rows: "
                    "expected the same entries, of one dtype, on all of them"
                )
            whole[name] = torch.empty_like(form, device="cpu")
            for piece, value in found:
                whole[name][piece.start : piece.stop].copy_(value.detach())
        return whole


@dataclass(frozen=True)
class RowMap:
    """Each parameter's pieces by holder, and by ranks that want them; ``shaped`` entries of cut ones."""

    shapes: Sequence[tuple[int, ...]]
    shaped: Mapping[int, frozenset[str]]
    held: Sequence[Pieces]
    wanted: Sequence[Pieces]

    def parcels(self) -> dict[tuple[int, Moves], list[int]]:
        """List all messages by holder and rows, with the ranks that take them, maybe the holder itself.

        A rank gets one at most from each other rank.
        """
        moves: dict[tuple[int, int], list[tuple[int, int, int]]] = {}
        for index, (held, wanted) in enumerate(zip(self.held, self.wanted, strict=True)):
            for holder, first, last in held:
                for rank, first_wanted, last_wanted in wanted:
                    start, stop = max(first, first_wanted), min(last, last_wanted)
                    if start < stop or index not in self.shaped:  # which may have no rows at all
                        moves.setdefault((holder, rank), []).append((index, start, stop))
        takers: dict[tuple[int, Moves], list[int]] = {}
        for (holder, rank), some in sorted(moves.items()):
            takers.setdefault((holder, tuple(some)), []).append(rank)
        return takers

    def message(self, holder: int, moves: Moves, state: IndexedState) -> dict[Any, Nested]:
        """Collect rows of a holder's state, and its global entries."""
        message = {key: value for key, value in state.items() if not isinstance(key, int)}
        for index, start, stop in (each for each in moves if each[0] in state):
            entries = state[index]
            if index in self.shaped and isinstance(entries, dict):
                cut = CutState(self.shapes[index], self.held[index], self.shaped[index])
                piece, entries = cut.piece_of(holder), copy(entries)
                for name, value in cut.cut_entries(entries, piece).items():
                    entries[name] = value.detach()[start - piece.start : stop - piece.start]
            message[index] = entries
        return message

    def joined(self, rank: int, messages: Mapping[int, dict[Any, Nested]]) -> dict[Any, Nested]:
        """Join the messages that a rank has got, by holder; they lose their rows of cut parameters."""
        state: dict[Any, Nested] = {}
        for holder in sorted(messages):
            state.update((key, value) for key, value in messages[holder].items() if key not in state)
        for index in sorted(state.keys() & self.shaped.keys()):
            own = piece_of(self.wanted[index], rank)
            assert own is not None  # nobody sends what is not wanted
            holders = [(h, max(a, own.start), min(b, own.stop)) for h, a, b in self.held[index]]
            pieces = [Piece(h, a - own.start, b - own.start) for h, a, b in holders if a < b]
            shape = (own.stop - own.start, *self.shapes[index][1:])
            cut = CutState(shape, tuple(pieces), self.shaped[index])
            parts = {h: messages[h].pop(index) for h in sorted(messages) if index in messages[h]}
            state[index] = cut.joined(f"parameter {index}", parts)
        indices = sorted(key for key in state if isinstance(key, int))
        return {**{index: state.pop(index) for index in indices}, **state}


def move(
    group: RankGroup,
    rows: RowMap,
    state: IndexedState,
    *,
    copy_with: Callable[[Tensor], Tensor] | None = None,
    about: str = "optimizer state",
) -> dict[Any, Nested]:
    """Bring state to the ranks that want it, in new CPU memory; all ranks call.

    A sender needs memory for one more piece of 16 MiB, a receiver for one more entry of a cut parameter.
    ``copy_with`` copies uncut state that stays.
    """
    group = group.during("state")
    parcels, rank = rows.parcels(), group.rank
    with failing_together(group):
        mine = {moves: rows.message(rank, moves, state) for holder, moves in parcels if holder == rank}
        leaving = [moves for moves in mine if parcels[rank, moves] != [rank]]
        encoded = {moves: encode(mine[moves], about) for moves in leaving}
    messages, received = dict[int, dict[Any, Nested]](), {}
    for (holder, moves), takers in parcels.items():
        if holder != rank and rank in takers:
            received[holder] = recv_encoded(group, holder)
        elif holder == rank and moves in encoded:
            send_value(group, [each for each in takers if each != rank], *encoded[moves])
        if holder == rank and rank in takers:
            messages[rank] = mine[moves]
    with failing_together(group):  # only now, as a rank that raises receives nothing more
        messages.update({holder: decode(part, iter(tensors)) for holder, (part, tensors) in received.items()})
        received.clear()  # `messages` alone keeps the tensors
        stays = messages.get(rank, {})
        uncut = {key: value for key, value in stays.items() if key not in rows.shaped}
        stays.update(uncut if copy_with is None else map_tensors(uncut, copy_with))
        return rows.joined(rank, messages)


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
