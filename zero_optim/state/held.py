"""State of DTensor parameters as DTensors: what FSDP2's own checkpoints save, reshard and load.

Note [Which entries are DTensors]
    Each plain tensor in the state of a DTensor parameter that has a dimension is one too, on the parameter's
    mesh. Of the parameter's shape it is placed as the parameter; any other (a factored moment, a whole
    preconditioner) is cut by rows. So no rank holds more than its share. Tensors without a dimension (a step
    count) and other values are equal on all ranks. All ranks ask for the state, and load it, together.
"""

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from zero_optim.comm.agreement import agree, failing_together
from zero_optim.comm.encoding import map_tensors, tensors_of
from zero_optim.comm.wire import copied
from zero_optim.dtensor.moves import Form, RowMoves
from zero_optim.dtensor.placement import as_dtensor, is_dtensor, local_rows, placed_alike, shape_here
from zero_optim.plan.pieces import piece_of
from zero_optim.state.core import Core
from zero_optim.state.moving import sent_by


def _is_dense(tensor: Tensor) -> bool:
    return type(tensor) in (Tensor, Parameter) and tensor.layout is torch.strided and tensor.dim() > 0


def _mark(tensor: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Return a tensor without elements that tells shape and dtype to other ranks."""
    return torch.empty((0, *shape), dtype=tensor.dtype, device="cpu")


def _form(core: Core, index: int, shape: tuple[int, ...]) -> Form:
    param = core.params[index]
    dim = core.inputs.held[param].dim if shape == tuple(param.shape) else 0
    return Form(shape, dim, core.sharding.pieces[param][0].owner)


def _described(core: Core, own: Mapping[Any, Any]) -> tuple[dict[Any, Any], list[Tensor]]:
    """Return what this rank tells of the state, with marks for tensors that move, and these tensors."""
    rank, mine, moving = core.group.rank, dict[Any, Any](), list[Tensor]()
    cuts = core.cut_states()

    def mark(tensor: Tensor) -> Tensor:
        if not _is_dense(tensor):
            return tensor
        moving.append(tensor.detach())
        return _mark(tensor, tuple(tensor.shape))

    for index, (param, pieces) in enumerate(zip(core.params, core.piece_list(), strict=True)):
        if param not in own or pieces[0].owner != rank:
            continue
        mine[index] = own[param]
        if param in core.inputs.held:
            rows = cuts[param].cut_entries(own[param], pieces[0]) if param in cuts else {}
            mine[index] = {
                name: _mark(value, tuple(param.shape)) if name in rows else map_tensors(value, mark)
                for name, value in own[param].items()
            }
    if rank == 0:
        mine.update((key, value) for key, value in own.items() if not isinstance(key, Tensor))
    return mine, moving


def whole_state(core: Core) -> dict[Any, Any]:
    """Return the state of all parameters, of DTensors as DTensors; all ranks call. Communicates."""
    group, params = core.group.during("state"), core.params
    with failing_together(group):
        core.owned.local.states.check_dicts()
        own = core.own_state()
        odd = [name for param in core.inputs.held for name in own.get(param, ()) if type(name) is not str]
        if odd:
            raise TypeError(
                f"the state of a parameter has an entry {odd[0]!r}, and torch.distributed.checkpoint needs "
                "strings as names: save and load it with zero_optim.checkpoint"
            )
        mine, moving = _described(core, own)
    parts = [sent_by(group, rank, mine, "optimizer state") for rank in range(group.size)]
    merged: dict[Any, Any] = {key: value for part in parts for key, value in part.items()}
    state = {params[key]: merged.pop(key) for key in sorted(key for key in merged if isinstance(key, int))}
    cuts, whole = core.cut_states(), iter(moving)

    def move(index: int, mark: Tensor) -> Tensor:
        if not _is_dense(mark):
            return mark
        param, form = params[index], _form(core, index, tuple(mark.shape)[1:])
        shape = shape_here(form.shape, form.dim, group.rank, group.size)
        rows = torch.empty(shape, dtype=mark.dtype, device=param.device)
        value = {0: next(whole)} if form.owner == group.rank else {}
        RowMoves(group, [form], mark.dtype, param.device).start_to_holders(value, [rows]).wait()
        return as_dtensor(rows, param, form.shape)

    for index, param in enumerate(params):
        for name, value in state.get(param, {}).items() if param in core.inputs.held else ():
            is_mark = isinstance(value, Tensor) and _is_dense(value)
            if is_mark and param in cuts and cuts[param].is_cut(name, tuple(value.shape)[1:]):
                rows = torch.empty((0, *param.shape[1:]), dtype=value.dtype, device=param.device)
                rows = own[param][name].detach() if param in own else rows
                state[param][name] = as_dtensor(rows, param, param.shape)
            else:
                state[param][name] = map_tensors(value, partial(move, index))
    core.owned.leaves.held.note_state(state)
    return {**state, **merged}


def own_part(core: Core, state: Mapping[int, Any]) -> dict[Tensor, Any]:
    """Return this rank's part of a whole state with DTensors, by parameter; all ranks call. Communicates."""
    group, params, cuts = core.group.during("state"), core.params, core.cut_states()
    own = dict[Tensor, Any]()

    def take(index: int, tensor: Tensor) -> Tensor:
        param = params[index]
        if not is_dtensor(tensor):
            return copied(tensor)
        if param not in core.inputs.held or not placed_alike(tensor, param):
            return tensor.full_tensor()
        moves = RowMoves(group, [_form(core, index, tuple(tensor.shape))], tensor.dtype, param.device)
        _, (whole,) = moves.start_to_owners(b"", [local_rows(tensor)]).wait()
        return whole.get(0, tensor)

    described = [
        f"{index}: {t.dtype} {tuple(t.shape)}{f', {t.placements}' if is_dtensor(t) else ''}"
        for index in sorted(state)
        for t in tensors_of(state[index])
    ]
    agree(group, described, "the tensors of the state dict")
    for index in sorted(state):
        param, entries = params[index], dict(state[index])
        here = piece_of(core.sharding.pieces[param], group.rank)
        start, stop = (0, 0) if here is None else here[1:]
        for name, value in entries.items():
            if param in cuts and isinstance(value, Tensor) and cuts[param].is_cut(name, tuple(value.shape)):
                whole = is_dtensor(value) and not placed_alike(value, param)
                plain = value.full_tensor() if whole and is_dtensor(value) else value
                is_here = is_dtensor(plain)
                entries[name] = (local_rows(plain) if is_here else plain.detach()[start:stop]).clone()
            else:
                entries[name] = map_tensors(value, partial(take, index))
        if here is not None:
            own[param] = entries
    return own
