"""Values of a fully sharded model: `unsharded`, and state dicts, whole on some ranks or of own rows."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from zero_optim.comm.agreement import agree, failing_together, raise_together
from zero_optim.ddp.full.in_use import UnitsInUse, units_of
from zero_optim.errors import StateMismatchError
from zero_optim.shard.registration import is_registered
from zero_optim.shard.rows.row_values import left_freed


def units_in(module: object, hint: str) -> UnitsInUse:
    """Return the units of a module of a fully sharded model; TypeError or ValueError if none. All call."""
    if not isinstance(module, nn.Module):
        name = type(module).__name__
        raise_together(TypeError(f"expected a fully sharded model, or a module of one, got {name}"))
    units = units_of(module)
    if units is None:
        if any(map(is_registered, module.parameters())):
            hint = (
                "this {name} lies inside a unit of a fully sharded model, which is made whole as one: give "
                "the module that is the unit, or one around it"
            )
        raise_together(ValueError(hint.format(name=type(module).__name__)))  # the others wait
    return units


@contextmanager
def unsharded(module: nn.Module, *, writes: bool = True) -> Iterator[None]:
    """Make the parameters of a module whole for the time of a ``with``; all ranks enter and leave it.

    Communicates: one broadcast for each owner, unit and dtype. Inside, parameters can be read, and written
    under ``torch.no_grad()``. When it ends, each owner takes over what was written on its own rank to its
    rows; what other ranks wrote there is dropped.

    Args:
        module: of a fully sharded model, or the wrapper itself.
        writes: False spares the owners the copy, where nothing was written.

    Raises:
        TypeError: on every rank: it is no module on any.
        ValueError: likewise: no module in it is fully sharded.
    """
    hint = "no parameter of this {name} is sharded: wrap the model in FullyShardedDataParallel first"
    units = units_in(module, hint)
    params = set[Tensor](module.parameters())
    chosen = [unit for unit in units.units if not params.isdisjoint(unit.params)]
    with units.on_request(chosen, as_kept=False) as request, units.pinned(chosen):
        request.mark(written=writes)
        yield


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
    units = units_in(model, "this {name} is not fully sharded: take its state_dict()")
    group = units.gathers.group
    with failing_together(group):
        if not ranks or not set(ranks) <= set(range(group.size)):
            raise ValueError(f"expected ranks from 0 to {group.size - 1}, got {ranks!r}")
    agree(group, [f"ranks={sorted(set(ranks))}"], "the arguments of full_state_dict()")
    is_asked = group.rank in ranks
    # The wrapper is an instance of this class too.
    inner = model.module if isinstance(model, nn.parallel.DistributedDataParallel) else model
    names, state = _freed_state(inner, units)
    copies: dict[Tensor, Tensor] = {}
    for unit in units.units:
        with units.on_request([unit], as_kept=True) as request:
            if is_asked:
                copies.update((param, _copied(value)) for param, value in request.values.items())
    if not is_asked:
        return None
    for name, value in state.items():
        if isinstance(value, Tensor):
            state[name] = copies[names[name]] if name in names else _copied(value)
    return state


def load_local_state_dict(module: nn.Module, units: UnitsInUse, state: Mapping[str, Any]) -> None:
    """See `FullyShardedDataParallel.load_local_state_dict`."""
    with failing_together(units.gathers.group):
        own, params = local_state(module, units)
        _check(state, own)
    with failing_together(units.gathers.group), left_freed(units.buckets):
        rest = {name: value for name, value in state.items() if name not in params}
        module.load_state_dict(rest, strict=False)
    values = {param: state[name] for name, param in params.items()}
    for bucket in units.buckets:
        bucket.values.load(values)


def _freed_state(module: nn.Module, units: UnitsInUse) -> tuple[dict[str, Tensor], dict[str, Any]]:
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


def local_state(module: nn.Module, units: UnitsInUse) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Return what this rank has of the state dict, and which entries of it are rows of which parameters."""
    units.check_unpinned()
    own = {
        param: (first, rows) for bucket in units.buckets for param, first, rows in bucket.values.row.places()
    }
    names, whole = _freed_state(module, units)
    state, params = dict[str, Any](), dict[str, Tensor]()
    for name, value in whole.items():
        param = names.get(name)
        if param is None:
            state[name] = value
        elif param in own:
            first, rows = own[param]
            key = name if rows.shape == param.shape else f"{name}[{first}:{first + len(rows)}]"
            state[key], params[key] = rows.detach(), param
    return state, params


def _check(state: object, own: Mapping[str, Any]) -> None:
    if not isinstance(state, Mapping):
        raise StateMismatchError(f"expected what local_state_dict() returned, got {type(state).__name__}")
    here, there = ({n: v.shape if isinstance(v, Tensor) else "" for n, v in e.items()} for e in (own, state))
    wrong = [name for name in {**own, **state} if here.get(name) != there.get(name)]
    if wrong:
        raise StateMismatchError(
            f"the dict differs from what this rank has, in {', '.join(wrong)}, by name or shape. For other "
            "ranks, units or classes save and load with zero_optim.checkpoint"
        )
