"""State of DTensor parameters as DTensors: what FSDP2's own checkpoints save, reshard and load.

Note [Which entries are DTensors]
    Each plain tensor in the state of a DTensor parameter that has a dimension is one too, on the parameter's
    mesh. Of the parameter's shape it is placed as the parameter; any other (a factored moment, a whole
    preconditioner) is cut by rows. So no rank holds more than its share. Tensors without a dimension (a step
    count) and other values are equal on all ranks. All ranks ask for the state, and load it, together.
"""

from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from zero_optim.comm.agreement import agree, failing_together
from zero_optim.comm.encoding import map_tensors
from zero_optim.comm.wire import copied
from zero_optim.dtensor.moves import Form, RowMoves
from zero_optim.dtensor.placement import as_dtensor, local_rows, placed_alike, shape_here
from zero_optim.plan.pieces import piece_of
from zero_optim.state.core import Core
from zero_optim.state.moving import sent_by

_Kind: TypeAlias = tuple[torch.dtype, torch.device]


class _Moved:
    """Tensors of several dtypes that move between owners and holders, in the order of `add`."""

    def __init__(self, core: Core) -> None:
        self._group = core.group
        self._forms: dict[_Kind, list[Form]] = {}
        self._values: dict[_Kind, list[Tensor | None]] = {}

    def add(self, form: Form, dtype: torch.dtype, device: torch.device, value: Tensor | None) -> None:
        """Add one, with this rank's whole tensor, rows, or None."""
        self._forms.setdefault((dtype, device), []).append(form)
        self._values.setdefault((dtype, device), []).append(value)

    def to_holders(self) -> dict[_Kind, Iterator[Tensor]]:
        """Return the rows of each that this rank holds; all ranks call."""
        rank, size, rows = self._group.rank, self._group.size, {}
        for kind, forms in self._forms.items():
            dtype, device = kind
            shapes = [shape_here(form.shape, form.dim, rank, size) for form in forms]
            into = [torch.empty(shape, dtype=dtype, device=device) for shape in shapes]
            own = {number: value for number, value in enumerate(self._values[kind]) if value is not None}
            RowMoves(self._group, forms, *kind).start_to_holders(own, into).wait()
            rows[kind] = iter(into)
        return rows

    def to_owners(self) -> dict[_Kind, Iterator[Tensor | None]]:
        """Return each that this rank owns, else None; all ranks call."""
        wholes = {}
        for kind, forms in self._forms.items():
            _, (own,) = RowMoves(self._group, forms, *kind).start_to_owners(b"", self._values[kind]).wait()
            wholes[kind] = iter([own.get(number) for number in range(len(forms))])
        return wholes


def _is_mark(tensor: Tensor) -> bool:
    return type(tensor) is Tensor and tensor.layout is torch.strided and tensor.dim() > 0


def _mark(tensor: Tensor, shape: tuple[int, ...] | None = None) -> Tensor:
    """Return a tensor without elements that tells shape and dtype to other ranks."""
    return torch.empty((0, *(tensor.shape if shape is None else shape)), dtype=tensor.dtype, device="cpu")


def _described(core: Core, own: Mapping[Any, Any]) -> tuple[dict[Any, Any], list[Tensor]]:
    """Return what this rank tells of the state, with marks for tensors that move, and these tensors."""
    rank, mine, moving = core.group.rank, dict[Any, Any](), list[Tensor]()
    cuts = core.cut_states()

    def mark(tensor: Tensor) -> Tensor:
        if type(tensor) not in (Tensor, torch.nn.Parameter) or not _is_mark(tensor.detach()):
            return tensor
        moving.append(tensor.detach())
        return _mark(tensor)

    for index, (param, pieces) in enumerate(zip(core.params, core.piece_list(), strict=True)):
        if param not in own or pieces[0].owner != rank:
            continue
        if param not in core.inputs.held:
            mine[index] = own[param]
            continue
        piece = piece_of(pieces, rank)
        assert piece is not None
        rows = cuts[param].cut_entries(own[param], piece) if param in cuts else {}
        mine[index] = {
            name: _mark(value, tuple(param.shape)) if name in rows else map_tensors(value, mark)
            for name, value in own[param].items()
        }
    if rank == 0:
        mine.update((key, value) for key, value in own.items() if not isinstance(key, Tensor))
    return mine, moving


def whole_state(core: Core) -> dict[Any, Any]:
    """Return the state of all parameters, of DTensors as DTensors; all ranks call. Communicates."""
    group = core.group.during("state")
    with failing_together(group):
        core.owned.local.check_dicts()
        own = core.own_state()
        mine, moving = _described(core, own)
    parts = [sent_by(group, rank, mine, "optimizer state") for rank in range(group.size)]
    merged: dict[Any, Any] = {key: value for part in parts for key, value in part.items()}
    params, pieces, cuts = core.params, core.piece_list(), core.cut_states()
    whole, moved = iter(moving), _Moved(core)

    def is_here(index: int, name: str, value: object) -> bool:
        cut = cuts.get(params[index])
        return cut is not None and isinstance(value, Tensor) and cut.is_cut(name, tuple(value.shape)[1:])

    def add(index: int, mark: Tensor) -> Tensor:
        if _is_mark(mark):
            param, owner, shape = params[index], pieces[index][0].owner, tuple(mark.shape)[1:]
            dim = core.inputs.held[param].dim if shape == tuple(param.shape) else 0
            value = next(whole) if owner == group.rank else None
            moved.add(Form(shape, dim, owner), mark.dtype, param.device, value)
        return mark

    def take(index: int, mark: Tensor) -> Tensor:
        if not _is_mark(mark):
            return mark
        param = params[index]
        return as_dtensor(next(rows[mark.dtype, param.device]), param, tuple(mark.shape)[1:])

    held = [index for index, param in enumerate(params) if param in core.inputs.held and index in merged]
    for index in held:
        for name, value in merged[index].items():
            if not is_here(index, name, value):
                map_tensors(value, partial(add, index))
    rows = moved.to_holders()
    for index in held:
        param = params[index]
        for name, value in merged[index].items():
            if is_here(index, name, value):
                empty = torch.empty((0, *param.shape[1:]), dtype=value.dtype, device=param.device)
                mine_here = own[param][name].detach() if param in own else empty
                merged[index][name] = as_dtensor(mine_here, param, param.shape)
            else:
                merged[index][name] = map_tensors(value, partial(take, index))
    state = {params[key]: merged.pop(key) for key in sorted(key for key in merged if isinstance(key, int))}
    return {**state, **merged}


def holds_dtensors(state: Mapping[Any, Any]) -> bool:
    """Whether there are DTensors in a state."""
    found: list[bool] = []

    def look(tensor: Tensor) -> Tensor:
        found.append(isinstance(tensor, DTensor))
        return tensor

    map_tensors(dict(state), look)
    return any(found)


def own_part(core: Core, state: Mapping[int, Any]) -> dict[Tensor, Any]:
    """Return this rank's part of a whole state with DTensors, by parameter; all ranks call. Communicates."""
    group, params, pieces, cuts = (
        core.group.during("state"),
        core.params,
        core.piece_list(),
        core.cut_states(),
    )
    described, moved = list[str](), _Moved(core)

    def describe(index: int, tensor: Tensor) -> Tensor:
        placed = f", {tensor.placements}" if isinstance(tensor, DTensor) else ""
        described.append(f"{index}: {tensor.dtype} {tuple(tensor.shape)}{placed}")
        return tensor

    def add(index: int, tensor: Tensor) -> Tensor:
        if _is_alike(core, index, tensor):
            dim = core.inputs.held[params[index]].dim if tensor.shape == params[index].shape else 0
            form = Form(tuple(tensor.shape), dim, pieces[index][0].owner)
            moved.add(form, tensor.dtype, tensor.device, local_rows(tensor))
        return tensor

    def take(index: int, tensor: Tensor) -> Tensor:
        if _is_alike(core, index, tensor):
            value = next(wholes[tensor.dtype, tensor.device])
            return tensor if value is None else value
        return tensor.full_tensor() if isinstance(tensor, DTensor) else copied(tensor)

    for index in sorted(state):
        map_tensors(state[index], partial(describe, index))
    agree(group, described, "the tensors of the state dict")
    rest: dict[int, Any] = {}
    own: dict[Tensor, Any] = {}
    for index in sorted(state):
        param, entries = params[index], state[index]
        if param in cuts and isinstance(entries, dict):
            here = piece_of(pieces[index], group.rank)
            cut = [n for n, v in entries.items() if isinstance(v, Tensor) and cuts[param].is_cut(n, v.shape)]
            start, stop = (0, 0) if here is None else here[1:]
            own[param] = {
                name: (
                    local_rows(entries[name])
                    if _is_alike(core, index, entries[name])
                    else _plain(entries[name])[start:stop]
                ).clone()
                for name in cut
            }
            entries = {name: value for name, value in entries.items() if name not in cut}
        rest[index] = entries
        map_tensors(entries, partial(add, index))
    wholes = moved.to_owners()
    for index, entries in rest.items():
        part, param = map_tensors(entries, partial(take, index)), params[index]
        own[param] = {**own.get(param, {}), **part} if isinstance(part, dict) else part
    return {param: entries for param, entries in own.items() if core.sharding.piece_here(param) is not None}


def _plain(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor.detach()


def _is_alike(core: Core, index: int, tensor: Tensor) -> bool:
    """Whether a tensor is cut and placed as `as_dtensor` makes it for a parameter."""
    param = core.params[index]
    return param in core.inputs.held and placed_alike(tensor, param)
