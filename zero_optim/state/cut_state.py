"""The state of cut parameters: which entries are cut, and how rows are picked and joined. No communication.

Each owner of a piece keeps state for its rows. Entries of the piece's shape are rows of a whole entry, which
has the parameter's shape. All other entries (a step count) are equal on every owner: only classes with proof
of that have cut parameters.
"""

from collections import Counter
from collections.abc import Mapping
from copy import copy
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from zero_optim.comm.encoding import Nested, Place, map_tensors, new_memory
from zero_optim.comm.wire import copied_to_cpu
from zero_optim.errors import StateMismatchError
from zero_optim.plan.pieces import Piece, Pieces, piece_of
from zero_optim.plan.strides import dense_strides, strides_of_rows


@dataclass(frozen=True, slots=True)
class CutState:
    """The layout of one cut parameter's state on its owners.

    ``shaped`` names entries that surely have the parameter's shape. Others may have it too, with some
    options.
    """

    shape: tuple[int, ...]
    pieces: Pieces
    shaped: frozenset[str]

    def piece_of(self, rank: int) -> Piece:
        """Return the piece of an owner."""
        piece = piece_of(self.pieces, rank)
        assert piece is not None  # it owns one
        return piece

    def shape_of(self, piece: Piece) -> tuple[int, ...]:
        """Return the shape of a piece."""
        return (piece.stop - piece.start, *self.shape[1:])

    def is_cut(self, name: object, shape: tuple[int, ...], piece: Piece | None = None) -> bool:
        """Whether an entry is cut by rows; ``shape`` is that of the whole, or of the piece's entry."""
        wanted = self.shape if piece is None else self.shape_of(piece)
        # A step count of shape (1,) beside a piece of one element is none of its rows.
        return tuple(shape) == wanted and (name in self.shaped or max(shape) > 1)

    def rows(self, entries: Nested, piece: Piece) -> Nested:
        """Select a piece's part of whole state: views of its rows, and all uncut entries."""
        if not isinstance(entries, dict):
            return entries
        picked = copy(entries)
        for name, value in entries.items():
            if isinstance(value, Tensor) and self.is_cut(name, value.shape):
                picked[name] = value.detach()[piece.start : piece.stop]
        return picked

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


class Joined:
    """Whole entries of cut parameters, by index, in CPU memory.

    Rows are received at their place in the whole, without further memory.
    """

    def __init__(self, cuts: Mapping[int, CutState]) -> None:
        self._cuts = cuts
        self._whole: dict[tuple[int, str], Tensor] = {}
        self._num_rows: Counter[tuple[int, str]] = Counter()
        self._apart: list[tuple[Tensor, Tensor]] = []

    def has(self, key: object) -> bool:
        """Whether a key is that of a cut parameter."""
        return key in self._cuts

    def places_of(self, owner: int) -> Place:
        """Return the allocator with which `wire.recv_encoded` receives an owner's state."""

        def place(
            path: tuple[Any, ...], dtype: torch.dtype, shape: tuple[int, ...], strides: tuple[int, ...]
        ) -> Tensor:
            cut = self._cuts.get(path[0]) if len(path) == 2 else None
            if cut is not None and cut.is_cut(path[1], shape, cut.piece_of(owner)):
                return self._place(path[0], path[1], owner, (dtype, strides))
            return new_memory(path, dtype, shape, strides)

        return place

    def _place(self, index: int, name: str, owner: int, form: tuple[torch.dtype, tuple[int, ...]]) -> Tensor:
        (dtype, strides), cut, key = form, self._cuts[index], (index, name)
        piece = cut.piece_of(owner)
        num_rows = piece.stop - piece.start
        if key not in self._whole:
            whole = torch.empty_strided(cut.shape, strides_of_rows(strides, num_rows, cut.shape), dtype=dtype)
            self._whole[key] = whole
        rows = self._whole[key][piece.start : piece.stop]
        if rows.dtype == dtype:
            self._num_rows[key] += num_rows
            if rows.stride() == tuple(strides) == dense_strides(rows):
                return rows
        apart = torch.empty_strided(
            rows.shape, strides, dtype=dtype
        )  # with rows that are not one run of memory
        self._apart.append((rows, apart))
        return apart

    def copied(self, state: Mapping[Any, Any], rank: int) -> dict[Any, Any]:
        """Copy this rank's state, by index; rows go to their place in the whole."""
        made: dict[Any, Any] = {}
        for key, entries in state.items():
            rows: dict[str, Tensor] = {}
            if key in self._cuts:
                cut = self._cuts[key]
                rows = cut.cut_entries(entries, cut.piece_of(rank))
            if not rows:
                made[key] = map_tensors(entries, copied_to_cpu)
                continue
            made[key] = map_tensors(_without(entries, rows), copied_to_cpu)
            for name, value in rows.items():
                place = self._place(key, name, rank, (value.dtype, dense_strides(value)))
                made[key][name] = place.copy_(value.detach())
        return made

    def merge(self, parts: list[dict[Any, Any]]) -> dict[Any, Any]:
        """Merge the owners' parts, by index, in the order of ranks; the first of equal entries counts.

        StateMismatchError if the owners of a parameter's pieces keep different entries.
        """
        for rows, apart in self._apart:
            rows.copy_(apart)
        merged: dict[Any, Any] = {}
        for key, value in (item for part in parts for item in part.items()):
            merged.setdefault(key, value)
        for (index, name), whole in self._whole.items():
            wanted, got = self._cuts[index].shape[0], self._num_rows[index, name]
            if got != wanted or name not in merged[index]:
                raise StateMismatchError(
                    f"parameter {index} is cut, and its owners keep '{name}' for {got} of its {wanted} rows: "
                    "expected the same entries, of one dtype, on all of them"
                )
            merged[index][name] = whole
        return merged


def _without(entries: dict[Any, Any], names: Mapping[str, Tensor]) -> dict[Any, Any]:
    """Copy a dict with None for some entries, in the same order."""
    changed = copy(entries)
    changed.update(dict.fromkeys(names))
    return changed
