"""State dicts of a fully sharded model: whole on some ranks, or of each rank its own rows."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from zero_optim.comm.agreement import agree, failing_together
from zero_optim.ddp.full.in_use import UnitsInUse
from zero_optim.ddp.full.module_hooks import units_in, units_in_together
from zero_optim.ddp.full.state_hooks import values_of
from zero_optim.ddp.fully_sharded import FullyShardedDataParallel
from zero_optim.errors import StateMismatchError
from zero_optim.shard.row_bucket import left_freed

ROWS, WHOLE = "rows", "whole"
_HINT = "this {name} is not fully sharded: take its state_dict()"


def full_state_dict(model: nn.Module, *, ranks: Sequence[int] = (0,)) -> dict[str, Any] | None:
    """Collect the state dict of a fully sharded model on some ranks; all ranks call.

    Communicates as a forward pass: each unit is gathered by itself, copied where it is asked for, and freed.
    So other ranks need the memory of the largest unit alone.

    Args:
        model: the wrapper, or its module; names are those of the module.
        ranks: the group ranks that get it; the same on every rank.

    Returns:
        The state dict, whose tensors are copies in CPU memory; None on other ranks.

    Raises:
        TypeError: on every rank: the model is no module on any.
        ValueError: likewise: the model is not fully sharded, or ``ranks`` are none of the group.
        RankMismatchError: likewise: ``ranks`` differ.
    """
    units = units_in_together(model, _HINT)
    group = units.group
    with failing_together(group):
        if not ranks or not set(ranks) <= set(range(group.size)):
            raise ValueError(f"expected ranks from 0 to {group.size - 1}, got {ranks!r}")
    agree(group, [f"ranks={sorted(set(ranks))}"], "the arguments of full_state_dict()")
    is_asked = group.rank in ranks
    names, state = _freed_state(_inner(model), units)
    copies: dict[Tensor, Tensor] = {}
    for unit in units.units:
        with values_of(units, unit) as values:
            if is_asked:
                copies.update((param, _copied(value)) for param, value in values.items())
    if not is_asked:
        return None
    for name, value in state.items():
        if isinstance(value, Tensor):
            state[name] = copies[names[name]] if name in names else _copied(value)
    return state


def sharded_state_dict(model: nn.Module) -> dict[str, Any]:
    """Return what this rank has of the state dict of a fully sharded model; does not communicate.

    ``torch.save`` writes it, and ``torch.load`` reads it with ``weights_only=True``.

    Args:
        model: the wrapper, or its module; names are those of the module.

    Returns:
        Under "rows", by the name of each parameter of which this rank owns rows: ``first``, the number of the
        first of them, ``shape``, that of the whole parameter, and ``values``, the rows, in the dtype that
        owners keep. Under "whole" what every rank has: buffers, extra state, parameters that are not sharded.
        The tensors share the model's memory, as those of ``state_dict()`` do.

    Raises:
        ValueError: the model is not fully sharded.
        RuntimeError: parameters are whole for somebody to read or write.
    """
    units = units_in(model, _HINT)
    units.check_unpinned()
    _, rows, rest = _own_state(_inner(model), units)
    return {ROWS: rows, WHOLE: rest}


def load_sharded_state_dict(model: nn.Module, state: Mapping[str, Any]) -> None:
    """Load what `sharded_state_dict` returned on this rank, also in another run; all ranks call.

    The ranks must own the same rows: the same model, units, class and number of ranks. Otherwise, and for the
    optimizer's state, use `zero_optim.checkpoint`. Only errors are communicated.

    Args:
        model: the wrapper, or its module.
        state: the dict of this rank.

    Raises:
        TypeError: on every rank: the model is no module on any.
        ValueError: likewise: the model is not fully sharded.
        StateMismatchError: the dict has other names, rows or shapes. This and what follows raises on every
            rank, and no parameter has changed.
        RuntimeError: parameters are whole for somebody to read or write.
        Exception: a module refuses its extra state; buffers have changed then.
    """
    units = units_in_together(model, _HINT)
    module, group = _inner(model), units.group
    with failing_together(group):
        units.check_unpinned()
        params, rows, rest = _own_state(module, units)
        _check(state, rows, rest)
    with failing_together(group), left_freed(units.buckets):
        module.load_state_dict(state[WHOLE], strict=False)
    values = {params[name]: entry["values"] for name, entry in state[ROWS].items()}
    for bucket in units.buckets:
        bucket.load(values)


def _inner(model: nn.Module) -> nn.Module:
    return model.module if isinstance(model, FullyShardedDataParallel) else model


def _freed_state(module: nn.Module, units: UnitsInUse) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Return the parameters of units by name, and the state dict; no communication."""
    with left_freed(units.buckets):
        state = dict(module.state_dict())
    params = {param.data_ptr(): param for unit in units.units for param in unit.params if param.numel()}
    names = {}
    for name, value in state.items():
        if isinstance(value, Tensor) and value.data_ptr() in params:
            names[name] = params[value.data_ptr()]
    return names, state


def _copied(tensor: Tensor) -> Tensor:
    return tensor.detach().to(torch.device("cpu"), copy=True)


def _own_state(
    module: nn.Module, units: UnitsInUse
) -> tuple[dict[str, Tensor], dict[str, dict[str, Any]], dict[str, Any]]:
    """Return by name: the parameters of units, this rank's rows of them, what every rank has."""
    own: dict[Tensor, dict[str, Any]] = {}
    for bucket in units.buckets:
        for index, first, rows in bucket.places():
            param = bucket.params[index]
            own[param] = {"first": first, "shape": tuple(param.shape), "values": rows.detach()}
    params, state = _freed_state(module, units)
    rest = {name: value for name, value in state.items() if name not in params}
    return params, {name: own[param] for name, param in params.items() if param in own}, rest


def _place(entry: Mapping[str, Any]) -> tuple[int, int, tuple[int, ...]]:
    first, shape, values = entry["first"], tuple(entry["shape"]), entry["values"]
    return first, values.shape[0] if shape else 1, shape


def _check(state: object, own: Mapping[str, Mapping[str, Any]], rest: Mapping[str, Any]) -> None:
    if not isinstance(state, Mapping) or {*state} != {ROWS, WHOLE}:
        raise StateMismatchError("expected a dict that sharded_state_dict() returned on this rank")
    places, ours = ({name: _place(entry) for name, entry in each.items()} for each in (state[ROWS], own))
    wrong = [name for name in {**places, **ours} if places.get(name) != ours.get(name)]
    wrong += [name for name in {**state[WHOLE], **rest} if not _alike(name, state[WHOLE], rest)]
    if wrong:
        name = wrong[0]
        raise StateMismatchError(
            f"the dict does not have what this rank owns of {', '.join(wrong)}. Of {name} it has "
            f"{places.get(name)}, and this rank {ours.get(name)} (first row, number of rows, shape of the "
            "whole). For other ranks, units or classes save and load with zero_optim.checkpoint"
        )


def _alike(name: str, some: Mapping[str, Any], others: Mapping[str, Any]) -> bool:
    one, other = some.get(name), others.get(name)
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return one.shape == other.shape
    return name in some and name in others and isinstance(one, Tensor) == isinstance(other, Tensor)
