"""The whole state dict of a fully sharded model, on some ranks, with one unit whole at a time."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from zero_optim.comm.agreement import agree, failing_together, raise_together
from zero_optim.ddp.data_parallel import DistributedDataParallel
from zero_optim.ddp.full.unit_hooks import check_module, refuse_inner, units_of
from zero_optim.ddp.full.units import UnitsInUse
from zero_optim.ddp.full.wide_state import wide_units


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
        RankMismatchError: likewise, ranks were given others.
    """
    module, units = asked_of(model)
    group = units.group
    with failing_together(group):
        if not ranks or not set(ranks) <= set(range(group.size)):
            raise ValueError(f"expected ranks from 0 to {group.size - 1}, got {ranks!r}")
    agree(group, [f"ranks={sorted(set(ranks))}"], "the arguments of full_state_dict()")
    is_asked = group.rank in ranks
    names, state = freed_state(module, units)
    copies: dict[Tensor, Tensor] = {}
    wide = wide_units(units)
    for unit in units.units:
        if unit.number in wide:
            with wide[unit.number].values() as values:
                copies.update((param, _copied(value)) for param, value in values.items() if is_asked)
            continue
        with units.whole([unit.number], writes=False):
            if is_asked:
                copies.update((param, _copied(param)) for param in unit.params)
    if not is_asked:
        return None
    for name, value in state.items():
        if isinstance(value, Tensor):
            state[name] = copies[names[name]] if name in names else _copied(value)
    return state


def asked_of(model: nn.Module) -> tuple[nn.Module, UnitsInUse]:
    """Do as `module_and_units`; all ranks call, and it communicates if it raises: the others wait."""
    try:
        return module_and_units(model)
    except (TypeError, ValueError) as error:
        raise_together(error)


def module_and_units(model: nn.Module) -> tuple[nn.Module, UnitsInUse]:
    """Find the module of a fully sharded model, and its units.

    Args:
        model: the wrapper, or its module.

    Raises:
        TypeError: it is no module.
        ValueError: it is not fully sharded.
    """
    check_module(model)
    module = model.module if isinstance(model, DistributedDataParallel) else model
    units = units_of(module)
    if units is None:
        refuse_inner(module)
        raise ValueError(f"this {type(module).__name__} is not fully sharded: take its state_dict()")
    return module, units


def freed_state(module: nn.Module, units: UnitsInUse) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Take the state dict without communication; gives the parameters of units by name, and all of it."""
    with units.supply.left_freed():
        state = dict(module.state_dict())
    params = {param.data_ptr(): param for unit in units.units for param in unit.params if param.numel()}
    names = {}
    for name, value in state.items():
        if isinstance(value, Tensor) and value.data_ptr() in params:
            names[name] = params[value.data_ptr()]
    return names, state


def _copied(tensor: Tensor) -> Tensor:
    return tensor.detach().to(torch.device("cpu"), copy=True)
