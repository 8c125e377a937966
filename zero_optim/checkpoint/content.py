"""What each rank writes to a checkpoint: the state and parameters that it owns, and its part of the rest."""

import random
from collections.abc import Mapping, Sequence
from copy import copy
from dataclasses import dataclass, field
from typing import Any
from zlib import crc32

import numpy as np
import torch
from torch import Tensor

from zero_optim.checkpoint.data import bytes_of
from zero_optim.checkpoint.names import Names, Objects, names_of, unwrapped
from zero_optim.checkpoint.safetensors import Box, rows_box, whole
from zero_optim.checkpoint.values import Json, key_of, pack
from zero_optim.comm.collectives import RankGroup
from zero_optim.comm.wire import all_copied_to_cpu
from zero_optim.optimizer import ZeroRedundancyOptimizer
from zero_optim.plan.groups import options_of
from zero_optim.plan.memory import dense_strides, strides_of_rows
from zero_optim.plan.partition import assign_owners
from zero_optim.plan.pieces import Piece, Pieces, is_whole, num_rows, piece_of, whole_piece
from zero_optim.state.cut_state import CutState

MODEL, OPTIMIZER, STATE, EVERYWHERE, RANDOM, EXTRA = (
    "model", "optimizer", "optimizer/state", "optimizer/everywhere", "random", "extra",
)  # fmt: skip


@dataclass(slots=True)
class RankContent:
    """What one rank writes.

    Attributes:
        values: packed, by key.
        tensors: by key.
        boxes: of the tensors that are rows of a whole, where they belong in it.
    """

    values: dict[str, Json] = field(default_factory=dict)
    tensors: dict[str, Tensor] = field(default_factory=dict)
    boxes: dict[str, Box] = field(default_factory=dict)

    def add(self, key: str, value: object) -> None:
        """Add a nested value with its tensors."""
        self.values[key], tensors = pack(key, value, key)
        self.tensors.update(tensors)

    def add_rows(self, key: str, rows: Tensor, shape: Sequence[int], piece: Piece) -> None:
        """Add the rows of a tensor that this rank owns."""
        self.tensors[key] = rows
        self.boxes[key] = rows_box(key, rows.dtype, shape, piece.start, piece.stop)

    def add_cut(self, key: str, entries: object, cut: CutState, rank: int) -> None:
        """Add the state beside this rank's piece of a parameter: its rows of the whole state.

        What says how the state is put together, and what is not cut, is written by the first owner only.
        """
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

    def all_boxes(self) -> list[Box]:
        """List the boxes of all tensors."""
        return [self.boxes.get(key) or whole(key, t.dtype, t.shape) for key, t in self.tensors.items()]

    def staged(self) -> "RankContent":
        """Copy the tensors into CPU memory, so that training may change them; see `all_copied_to_cpu`."""
        copies = all_copied_to_cpu(list(self.tensors.values()))
        return RankContent(self.values, dict(zip(self.tensors, copies, strict=True)), self.boxes)


def _whole_like(rows: Tensor, cut: CutState) -> Tensor:
    """Make a tensor without memory in the form of the whole that some rows belong to."""
    strides = strides_of_rows(dense_strides(rows), rows.shape[0], cut.shape)
    return torch.empty_strided(cut.shape, strides, dtype=rows.dtype, device="meta")


def collect(group: RankGroup, objects: Objects, extra: object) -> tuple[RankContent, list[str]]:
    """List what this rank writes. Does not communicate.

    Of tensors it reads only those that all ranks share, for their checksums; the CPU waits for these.

    Returns:
        The content, and descriptions of what must be equal on every rank.
    """
    part, shared = RankContent(), RankContent()
    about: list[str] = []
    if objects.model is not None:
        about = _add_model(part, group, objects)
    if objects.optimizer is not None:
        names = names_of(objects.optimizer, objects.model)
        _add_optimizer(part, shared, objects.optimizer, names, group.rank)
    for name, value in objects.others.items():
        shared.add(name, value.state_dict())
    shared.add(EXTRA, extra)
    part.add(key_of(RANDOM, str(objects.everyone(group).rank)), random_state(objects.device))
    if group.rank == 0:
        part.values.update(shared.values)
        part.tensors.update(shared.tensors)
    return part, [*about, *_described(shared)]


def _described(shared: RankContent) -> list[str]:
    """Describe what must be equal on every rank, without state that a rank has for itself."""
    values = [f"{key}: {value}" for key, value in shared.values.items() if key != EVERYWHERE]
    sums = [
        f"{key}: tensor with checksum {crc32(bytes_of(tensor))}"
        for key, tensor in shared.tensors.items()
        if not key.startswith(EVERYWHERE)
    ]
    return values + sums


def _add_model(part: RankContent, group: RankGroup, objects: Objects) -> list[str]:
    """Add what this rank writes of the model. Returns descriptions that must be equal on all ranks."""
    packed = RankContent()
    packed.add(MODEL, objects.model_state())
    writers = tensor_pieces(packed.tensors, objects.optimizer, group.size)
    with objects.left_freed() as kept:
        apart = {key: kept[t.data_ptr()] for key, t in packed.tensors.items() if t.data_ptr() in kept}
    if group.rank == 0:
        part.values.update(packed.values)
        _set_strides(packed.values[MODEL], {key: rows.stride for key, rows in apart.items()})
    for key, tensor in packed.tensors.items():
        piece, rows = piece_of(writers[key], group.rank), apart[key].rows if key in apart else None
        if piece is not None and not is_whole(piece, tensor.shape):
            own = tensor.detach()[piece.start : piece.stop] if rows is None else rows
            part.add_rows(key, own, tensor.shape, piece)
        elif piece == writers[key][0]:
            part.tensors[key] = tensor if rows is None else rows
    model: Any = objects.model
    tensors = [
        f"{key}: {str(t.dtype).removeprefix('torch.')} {tuple(t.shape)}" for key, t in packed.tensors.items()
    ]
    return [f"a model of class {type(unwrapped(model)).__qualname__}", *tensors]


def _set_strides(packed: Json, strides: Mapping[str, tuple[int, ...]]) -> None:
    """Give freed parameters the strides that they have when they are whole."""
    for _, (kind, body) in packed[1]:
        if kind == "tensor" and body[0] in strides:
            body[1] = list(strides[body[0]])


def tensor_pieces(
    tensors: Mapping[str, Tensor], optimizer: ZeroRedundancyOptimizer | None, num_ranks: int
) -> dict[str, Pieces]:
    """Choose which rank writes or reads which rows of each tensor of a model.

    Those are the owners of a parameter. What has no owner gets any rank. A view of a cut parameter in another
    form has other rows: there each owner has all of them.

    Returns:
        The same on every rank.
    """
    params = optimizer.pieces() if optimizer is not None else {}
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
    return {**chosen, **others}


def _add_optimizer(
    part: RankContent, shared: RankContent, optimizer: ZeroRedundancyOptimizer, names: Names, rank: int
) -> None:
    groups = []
    for number, (group, members) in enumerate(zip(optimizer.param_groups, names.groups, strict=True)):
        key = key_of(OPTIMIZER, "options", str(number))
        shared.add(key, options_of(group))
        groups.append({"names": members, "options": shared.values.pop(key)})
    shared.values[OPTIMIZER] = {
        "named": names.named,
        "groups": groups,
        "params": {
            name: [str(optimizer.kept_dtype(p)).removeprefix("torch."), list(p.shape)]
            for name, p in names.param.items()
        },
    }
    name_of, everywhere, cuts = names.name, {}, optimizer.cut_states()
    for key, value in optimizer.owned_state().items():
        if key in cuts:
            part.add_cut(f"{STATE}/{key_of(name_of[key])}", value, cuts[key], rank)
        elif isinstance(key, Tensor):
            part.add(f"{STATE}/{key_of(name_of[key])}", value)
        else:
            everywhere[key] = value
    shared.add(EVERYWHERE, everywhere)


def random_state(device: torch.device | None) -> dict[str, Any]:
    """Copy this process's random states: Python's, numpy's, PyTorch's of the CPU and of one CUDA device.

    Args:
        device: of the parameters; None, or a device that is not CUDA, stands for the current CUDA device.
    """
    kind, internal, gauss = random.getstate()
    state: dict[str, Any] = {
        "python": (kind, torch.tensor(internal), gauss),
        "numpy": np.random.get_state(),
        "torch": torch.get_rng_state(),
    }
    if torch.cuda.is_available() and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        state["cuda"] = torch.cuda.get_rng_state(_cuda(device))
    return state


def set_random_state(state: Mapping[str, Any], device: torch.device | None) -> None:
    """Restore the random states that `random_state` copied, for the same device or another one."""
    kind, internal, gauss = state["python"]
    random.setstate((kind, tuple(internal.tolist()), gauss))
    np.random.set_state(state["numpy"])
    torch.set_rng_state(state["torch"])
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"], _cuda(device))


def _cuda(device: torch.device | None) -> torch.device:
    return device if device is not None and device.type == "cuda" else torch.device("cuda")
