"""What each rank writes to a checkpoint, and reads of the model: what it owns, and its part of the rest."""

from collections.abc import Iterable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, field
from typing import Any
from zlib import crc32

import torch
from torch import Tensor

from zero_optim.checkpoint.data import Box, bytes_of, rows_box, whole
from zero_optim.checkpoint.manifest import dtype_name
from zero_optim.checkpoint.objects import Members, Names, Objects, names_of, random_state, unwrapped
from zero_optim.checkpoint.reader import Rows
from zero_optim.checkpoint.values import Json, key_of, pack
from zero_optim.comm.wire import all_copied_to_cpu
from zero_optim.optimizer import ZeroRedundancyOptimizer
from zero_optim.plan.groups import options_of
from zero_optim.plan.partition import assign_owners
from zero_optim.plan.pieces import Piece, Pieces, is_whole, num_rows, piece_of, whole_piece
from zero_optim.plan.strides import dense_strides, kept_dtype, strides_of_rows
from zero_optim.state.cut_state import CutState

MODEL, OPTIMIZER, STATE, EVERYWHERE, RANDOM, EXTRA = (
    "model", "optimizer", "optimizer/state", "optimizer/everywhere", "random", "extra",
)  # fmt: skip


@dataclass(slots=True)
class RankContent:
    """What one rank writes: packed values and tensors by key, and of tensors that are rows their box."""

    values: dict[str, Json] = field(default_factory=dict)
    tensors: dict[str, Tensor] = field(default_factory=dict)
    boxes: dict[str, Box] = field(default_factory=dict)

    def add(self, key: str, value: object) -> None:
        """Add a nested value with its tensors."""
        self.values[key], tensors = pack(key, value)
        self.tensors.update(tensors)

    def add_rows(self, key: str, rows: Tensor, shape: Sequence[int], piece: Piece) -> None:
        """Add the rows of a tensor that this rank owns."""
        self.tensors[key] = rows
        self.boxes[key] = rows_box(key, rows.dtype, shape, piece.start, piece.stop)

    def add_cut(self, key: str, entries: object, cut: CutState, rank: int) -> None:
        """Add this rank's rows of a parameter's state; the first owner also adds all that is not rows."""
        piece = cut.piece_of(rank)
        rows = cut.cut_entries(entries, piece)
        if cut.pieces[0] == piece:
            value = entries
            if isinstance(entries, dict):
                value = copy(entries)
                value.update({name: _whole_like(tensor, cut) for name, tensor in rows.items()})
            self.add(key, value)
        for name, tensor in rows.items():
            self.add_rows(f"{key}/{key_of(name)}", tensor, cut.shape, piece)

    def packed_groups(self, groups: Iterable[tuple[list[str], Mapping[str, Any]]]) -> list[Json]:
        """Pack the names and options of parameter groups, and add the options' tensors."""
        packed = []
        for number, (names, options) in enumerate(groups):
            key = key_of(OPTIMIZER, "options", str(number))
            self.add(key, options)
            packed.append({"names": names, "options": self.values.pop(key)})
        return packed

    def all_boxes(self) -> list[Box]:
        """List the boxes of all tensors."""
        return [self.boxes.get(key) or whole(key, t.dtype, t.shape) for key, t in self.tensors.items()]

    def bytes_of(self, box: Box) -> memoryview:
        """View the bytes of what is written as a box."""
        return bytes_of(self.tensors[box.key])

    def staged(self) -> "RankContent":
        """Copy the tensors into CPU memory, so that training may change them; see `all_copied_to_cpu`."""
        copies = all_copied_to_cpu(list(self.tensors.values()))
        return RankContent(self.values, dict(zip(self.tensors, copies, strict=True)), self.boxes)


def _whole_like(rows: Tensor, cut: CutState) -> Tensor:
    """Make a tensor without memory in the form of the whole that some rows belong to."""
    strides = strides_of_rows(dense_strides(rows), rows.shape[0], cut.shape)
    return torch.empty_strided(cut.shape, strides, dtype=rows.dtype, device="meta")


# ---------------------------------------------------------------------- tensors of the model


@dataclass(frozen=True, slots=True, eq=False)
class Place:
    """A tensor of the model, its key in the checkpoint, and the ranks that write or read it or its rows.

    Attributes:
        pieces: which rank writes and reads which rows; of several that have all the first writes.
        stepped: the optimizer steps it, and gathers it from its owners.
        apart, stride: of a freed tensor: the rows of this rank, and the stride of the whole.
    """

    key: str
    tensor: Tensor
    pieces: Pieces
    stepped: bool
    apart: Tensor | None
    stride: tuple[int, ...] | None

    def rows(self, rank: int) -> Rows:
        """Return the rows of a rank that has some; None for all."""
        piece = piece_of(self.pieces, rank)
        return None if piece is None or is_whole(piece, self.tensor.shape) else (piece.start, piece.stop)

    def memory(self, rank: int) -> Tensor | None:
        """Return this rank's rows, to write or to load into; None if it has none."""
        if piece_of(self.pieces, rank) is None:
            return None
        if self.apart is not None:
            return self.apart
        rows = self.rows(rank)
        return self.tensor if rows is None else self.tensor.detach()[slice(*rows)]


def places_of(tensors: Mapping[str, Tensor], objects: Objects, num_ranks: int) -> list[Place]:
    """Choose which rank writes or reads which rows of each tensor of a model; equal on every rank.

    Owners have their rows of a parameter, but all of a view of it in another form. What has no owner gets any
    rank.
    """
    params = objects.optimizer.pieces() if objects.optimizer is not None else {}
    of_memory = {param.data_ptr(): (param, pieces) for param, pieces in params.items() if param.numel()}
    chosen: dict[str, Pieces] = {}
    loads = [0.0] * num_ranks
    for key, tensor in tensors.items():
        if tensor.data_ptr() not in of_memory:
            continue
        param, pieces = of_memory[tensor.data_ptr()]
        is_param = (tensor.shape, tensor.stride()) == (param.shape, param.stride())
        everything = num_rows(tensor.shape)
        chosen[key] = pieces if is_param else tuple(Piece(p.owner, 0, everything) for p in pieces)
        for piece in chosen[key]:
            loads[piece.owner] += tensor.nbytes * (piece.stop - piece.start) / max(1, chosen[key][-1].stop)
    rest = [key for key in tensors if key not in chosen]
    (ranks,) = assign_owners([[tensors[key].nbytes for key in rest]], num_ranks, loads)
    others = {key: whole_piece(rank, tensors[key].shape) for key, rank in zip(rest, ranks, strict=True)}
    pieces_of, places = {**chosen, **others}, []
    with objects.left_freed() as kept:
        for key, tensor in tensors.items():
            unit = kept.get(tensor.data_ptr())
            apart, stride = (None, None) if unit is None else (unit.rows, unit.stride)
            places.append(Place(key, tensor, pieces_of[key], key in chosen, apart, stride))
    return places


def model_parts(values: Mapping[str, Json]) -> dict[str, Json]:
    """Return the packed values of the model's state dict, by name; empty without a model."""
    _, pairs = values.get(MODEL, ["dict", []])
    return dict(pairs)


# ---------------------------------------------------------------------- all that a rank writes


def collect(members: Members, objects: Objects, extra: object) -> tuple[RankContent, list[str]]:
    """List what this rank writes, and describe what must be equal on every rank. No communication.

    Of tensors it reads only those that all ranks share, for their checksums; the CPU waits for these.
    """
    group, part, shared = members.group, RankContent(), RankContent()
    alike: list[str] = []
    if objects.model is not None:
        alike = _add_model(part, objects, group.rank, group.size)
    if objects.optimizer is not None:
        names = names_of(objects.optimizer, objects.model)
        _add_optimizer(part, shared, objects.optimizer, names, group.rank)
    for name, value in objects.others.items():
        shared.add(name, value.state_dict())
    shared.add(EXTRA, extra)
    part.add(key_of(RANDOM, str(members.everyone.rank)), random_state(objects.device))
    if group.rank == 0:
        part.values.update(shared.values)
        part.tensors.update(shared.tensors)
    # State that belongs to no parameter is each rank's own.
    alike += [f"{key}: {value}" for key, value in shared.values.items() if key != EVERYWHERE]
    alike += [
        f"{key}: tensor with checksum {crc32(bytes_of(tensor))}"
        for key, tensor in shared.tensors.items()
        if not key.startswith(EVERYWHERE)
    ]
    return part, alike


def _add_model(part: RankContent, objects: Objects, rank: int, num_ranks: int) -> list[str]:
    """Add what this rank writes of the model, and describe the model."""
    packed = RankContent()
    packed.add(MODEL, objects.model_state())
    places = places_of(packed.tensors, objects, num_ranks)
    if rank == 0:
        part.values.update(packed.values)
        strides = {place.key: place.stride for place in places if place.stride is not None}
        for _, (kind, body) in packed.values[MODEL][1]:
            if kind == "tensor" and body[0] in strides:
                body[1] = list(strides[body[0]])
    for place in places:
        rows, piece = place.memory(rank), piece_of(place.pieces, rank)
        if rows is not None and piece is not None:
            if place.rows(rank) is not None:
                part.add_rows(place.key, rows, place.tensor.shape, piece)
            elif piece == place.pieces[0]:
                part.tensors[place.key] = rows
    model: Any = objects.model
    tensors = [f"{key}: {dtype_name(t.dtype)} {tuple(t.shape)}" for key, t in packed.tensors.items()]
    return [f"a model of class {type(unwrapped(model)).__qualname__}", *tensors]


def _add_optimizer(
    part: RankContent, shared: RankContent, optimizer: ZeroRedundancyOptimizer, names: Names, rank: int
) -> None:
    options = [options_of(group) for group in optimizer.param_groups]
    params = {name: [dtype_name(kept_dtype(p)), list(p.shape)] for name, p in names.param.items()}
    groups = shared.packed_groups(zip(names.groups, options, strict=True))
    shared.values[OPTIMIZER] = {"named": names.named, "groups": groups, "params": params}
    name_of, everywhere, cuts = names.name, {}, optimizer.core.cut_states()
    for key, value in optimizer.owned_state().items():
        if key in cuts:
            part.add_cut(f"{STATE}/{key_of(name_of[key])}", value, cuts[key], rank)
        elif isinstance(key, Tensor):
            part.add(f"{STATE}/{key_of(name_of[key])}", value)
        else:
            everywhere[key] = value
    shared.add(EVERYWHERE, everywhere)
