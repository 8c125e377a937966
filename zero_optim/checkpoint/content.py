"""What each rank writes to a checkpoint, and reads of the model."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, field
from typing import Any, NamedTuple
from zlib import crc32

from torch import Tensor

from zero_optim.checkpoint.data import Box, Rows, box_of, bytes_of
from zero_optim.checkpoint.objects import Members, Objects, names_of, random_state, unwrapped
from zero_optim.checkpoint.values import Json, key_of, pack, unpack
from zero_optim.comm.collectives import RankGroup
from zero_optim.comm.encoding import dtype_name
from zero_optim.comm.wire import all_copied_to_cpu
from zero_optim.plan.groups import options_of
from zero_optim.plan.partition import RankLoads
from zero_optim.plan.pieces import Piece, Pieces, is_whole, num_rows, piece_of, whole_piece
from zero_optim.plan.strides import kept_dtype
from zero_optim.state.moving import CutState

MODEL, OPTIMIZER, STATE, EVERYWHERE, RANDOM, EXTRA = (
    "model", "optimizer", "optimizer/state", "optimizer/everywhere", "random", "extra",
)  # fmt: skip


@dataclass(slots=True)
class RankContent:
    """What one rank writes, by key: packed values, tensors, maybe `lazy`, and boxes of rows among them."""

    values: dict[str, Json] = field(default_factory=dict)
    tensors: dict[str, Tensor] = field(default_factory=dict)
    boxes: dict[str, Box] = field(default_factory=dict)

    def add(self, key: str, value: object) -> None:
        """Add a nested value with its tensors."""
        self.values[key], tensors = pack(key, value)
        self.tensors.update(tensors)

    def add_rows(self, key: str, rows: Tensor, shape: Sequence[int], start: int) -> None:
        """Add the rows from ``start`` of a tensor of a shape."""
        self.tensors[key] = rows
        self.boxes[key] = Box(key, rows.dtype, tuple(shape), (start, start + rows.shape[0]))

    def add_cut(self, key: str, entries: object, cut: CutState, rank: int) -> None:
        """Add this rank's rows of a parameter's state; the first owner also adds all that is not rows."""
        piece = cut.piece_of(rank)
        rows = cut.cut_entries(entries, piece)
        if cut.pieces[0] == piece:
            value = entries
            if isinstance(entries, dict):  # the whole has no memory here, only its form
                value = copy(entries)
                value.update((name, cut.form_of(tensor)) for name, tensor in rows.items())
            self.add(key, value)
        for name, tensor in rows.items():
            self.add_rows(f"{key}/{key_of(name)}", tensor, cut.shape, piece.start)

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
        return [self.boxes.get(key) or box_of(key, t) for key, t in self.tensors.items()]

    def bytes_of(self, box: Box) -> memoryview:
        """View the bytes of what is written as a box."""
        return bytes_of(self.tensors[box.key])

    def staged(self) -> "RankContent":
        """Copy the tensors into CPU memory, so that training may change them; see `all_copied_to_cpu`."""
        copies = all_copied_to_cpu(list(self.tensors.values()))
        return RankContent(self.values, dict(zip(self.tensors, copies, strict=True)), self.boxes)


class Place(NamedTuple):
    """A tensor of the model, its key in the checkpoint, and this rank's part in it."""

    key: str
    tensor: Tensor
    first: int  # the rank that writes it, if several have all of it, and that reads what nobody steps
    stepped: bool  # by the optimizer, which gathers it from its owners
    rows: Rows  # those of this rank; None for all or none
    memory: Tensor | None  # this rank's rows
    stride: tuple[int, ...] | None  # of the whole, if the tensor is freed


def places_of(tensors: Mapping[str, Tensor], objects: Objects, group: RankGroup) -> list[Place]:
    """Choose which rank writes or reads which rows of each tensor of a model; equal on every rank."""
    params = objects.optimizer.pieces() if objects.optimizer is not None else {}
    of_memory = {param.data_ptr(): (param, pieces) for param, pieces in params.items() if param.numel()}
    of_memory.pop(0, None)  # of DTensors
    held = [each for each in objects.held.values() if each.stands_in.numel()]
    of_memory.update((each.stands_in.data_ptr(), (each.stands_in, each.pieces)) for each in held)
    chosen, loads = dict[str, Pieces](), [0.0] * group.size
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
    ranks = RankLoads(loads).assign([tensors[key].nbytes for key in rest])
    others = {key: whole_piece(rank, tensors[key].shape) for key, rank in zip(rest, ranks, strict=True)}
    places = []
    with objects.left_freed() as freed:
        for key, tensor in tensors.items():
            pieces, unit = chosen.get(key) or others[key], freed.get(tensor.data_ptr())
            own, rows, memory = piece_of(pieces, group.rank), None, None
            if own is not None:
                rows = None if is_whole(own, tensor.shape) else (own.start, own.stop)
                memory = tensor if rows is None else tensor.detach()[slice(*rows)]
                memory = memory if unit is None else unit.rows
            stride = None if unit is None else unit.stride
            places.append(Place(key, tensor, pieces[0].owner, key in chosen, rows, memory, stride))
    return places


def model_parts(values: Mapping[str, Json]) -> dict[str, Json]:
    """Return the packed values of the model's state dict, by name; empty without a model."""
    _, pairs = values.get(MODEL, ["dict", []])
    return dict(pairs)


def model_of(values: Mapping[str, Json], get: Callable[..., Tensor]) -> dict[str, Any]:
    """Unpack the model's state dict."""
    return {name: unpack(part, get) for name, part in model_parts(values).items()}


def collect(members: Members, objects: Objects, extra: object) -> tuple[RankContent, list[str]]:
    """List what this rank writes, and describe what must be equal on every rank. No communication."""
    group, part = members.group, RankContent()
    alike = [] if objects.model is None else _add_model(part, objects, group)
    shared, own = _add_optimizer(part, objects, group.rank)
    for name, value in objects.others.items():
        shared.add(name, value.state_dict())
    shared.add(EXTRA, extra)
    part.add(key_of(RANDOM, str(members.everyone.rank)), random_state(objects.device))
    for content in (shared, own) if group.rank == 0 else ():
        part.values.update(content.values)
        part.tensors.update(content.tensors)
    alike += [f"{key}: {value}" for key, value in shared.values.items()]
    checksums = {key: crc32(bytes_of(tensor)) for key, tensor in shared.tensors.items()}
    alike += [f"{key}: tensor with checksum {checksum}" for key, checksum in checksums.items()]
    return part, alike


def _add_model(part: RankContent, objects: Objects, group: RankGroup) -> list[str]:
    packed = RankContent()
    packed.add(MODEL, objects.model_state())
    places = places_of(packed.tensors, objects, group)
    if group.rank == 0:
        part.values.update(packed.values)
        strides = {place.key: place.stride for place in places if place.stride is not None}
        for _, (kind, body) in packed.values[MODEL][1]:
            if kind == "tensor" and body[0] in strides:
                body[1] = list(strides[body[0]])
    for place in places:
        if place.memory is not None and place.rows is not None:
            part.add_rows(place.key, place.memory, place.tensor.shape, place.rows[0])
        elif place.memory is not None and place.first == group.rank:
            part.tensors[place.key] = place.memory
    model: Any = objects.model
    tensors = [f"{key}: {dtype_name(t.dtype)} {tuple(t.shape)}" for key, t in packed.tensors.items()]
    return [f"a model of class {type(unwrapped(model)).__qualname__}", *tensors]


def _add_optimizer(part: RankContent, objects: Objects, rank: int) -> tuple[RankContent, RankContent]:
    """Add this rank's state; return what is equal on every rank, and what the first alone writes."""
    shared, own, optimizer = RankContent(), RankContent(), objects.optimizer
    if optimizer is None:
        return shared, own
    names, local = names_of(optimizer, objects.model), optimizer.core.owned.local
    local.states.check_dicts()
    params = {name: [dtype_name(kept_dtype(p)), list(p.shape)] for name, p in names.param.items()}
    both = (shared, local.compared(optimizer.param_groups)), (own, optimizer.param_groups)
    for content, groups in both:
        packed = content.packed_groups(zip(names.groups, map(options_of, groups), strict=True))
        content.values[OPTIMIZER] = {"named": names.named, "groups": packed, "params": params}
    name_of, state, cuts = names.name, optimizer.owned_state(), optimizer.core.cut_states()
    own.add(EVERYWHERE, {key: state.pop(key) for key in list(state) if not isinstance(key, Tensor)})
    for param, value in state.items():
        key = f"{STATE}/{key_of(name_of[param])}"
        if param in cuts:
            part.add_cut(key, value, cuts[param], rank)
        else:
            part.add(key, value)
    return shared, own
