"""The state dict of a fully sharded model as this rank has it: its own rows, with their place."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from zero_optim.comm.agreement import failing_together
from zero_optim.ddp.full.unit_state import asked_of, freed_state, module_and_units
from zero_optim.ddp.full.units import UnitsInUse
from zero_optim.errors import StateMismatchError
from zero_optim.shard.units import UnitBucket

ROWS, WHOLE = "rows", "whole"


@dataclass(frozen=True, slots=True, eq=False)
class _Own:
    """Rows of a parameter that this rank owns."""

    first: int
    shape: tuple[int, ...]
    values: Tensor

    @property
    def place(self) -> tuple[int, int, tuple[int, ...]]:
        """The first row, the number of rows, and the shape of the whole."""
        return self.first, self.values.shape[0] if self.shape else 1, self.shape


def sharded_state_dict(model: nn.Module) -> dict[str, Any]:
    """Return what this rank has of the state dict of a fully sharded model; does not communicate.

    ``torch.save`` writes it, and ``torch.load`` reads it with ``weights_only=True``.

    Args:
        model: the wrapper, or its module; names are those of the module.

    Returns:
        Under "rows", by the name of each parameter of which this rank owns rows: ``first``, the number of the
        first of them, ``shape``, that of the whole parameter, and ``values``, the rows, in the dtype that
        owners keep. Under "whole" what every rank has: buffers, extra state, parameters that are not sharded.
        The tensors share the model's memory, as those of ``state_dict()`` do: clone what is to stay as it is.

    Raises:
        ValueError: the model is not fully sharded.
        RuntimeError: parameters are whole for somebody to read or write.
    """
    module, units = module_and_units(model)
    units.supply.check_unpinned()
    own, names, rest = _own_rows(units), *_named(module, units)
    rows = {name: own[param] for name, param in names.items() if param in own}
    told = {n: {"first": each.first, "shape": each.shape, "values": each.values} for n, each in rows.items()}
    return {ROWS: told, WHOLE: rest}


def load_sharded_state_dict(model: nn.Module, state: Mapping[str, Any]) -> None:
    """Load what `sharded_state_dict` returned on this rank, also in another run; all ranks call.

    The ranks must own the same rows: the same model, units, class and number of ranks. Otherwise, and for the
    optimizer's state, use `zero_optim.checkpoint`. Only errors are communicated. One bucket at a time is
    there in addition.

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
    module, units = asked_of(model)
    with failing_together(units.group):
        units.supply.check_unpinned()
        own, names, rest = _own_rows(units), *_named(module, units)
        wanted = {name: own[param].place for name, param in names.items() if param in own}
        found = _checked(state, wanted, rest)
    with failing_together(units.group), units.supply.left_freed():
        module.load_state_dict(state[WHOLE], strict=False)
    values = {names[name]: each for name, each in found.items()}
    for unit in units.units:
        for bucket in unit.buckets:
            _load_bucket(bucket, values)


def _own_rows(units: UnitsInUse) -> dict[Tensor, _Own]:
    """List the parameters of which this rank owns rows."""
    found = {}
    for bucket in (bucket for unit in units.units for bucket in unit.buckets):
        kept = dict(bucket.kept())
        mine = (row.extents for row in bucket.layout.rows if row.owner == units.group.rank)
        for extent in (extent for extents in mine for extent in extents):
            param = bucket.params[extent.param]
            shape = tuple(param.shape)
            first = extent.start // max(1, param.shape[1:].numel()) if shape else 0
            found[param] = _Own(first, shape, kept[param].detach())
    return found


def _named(module: nn.Module, units: UnitsInUse) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Give the parameters of units by name, and the rest of the state dict; does not communicate."""
    names, state = freed_state(module, units)
    return names, {name: value for name, value in state.items() if name not in names}


def _checked(
    state: object,
    wanted: Mapping[str, tuple[int, int, tuple[int, ...]]],
    rest: Mapping[str, Any],
) -> dict[str, _Own]:
    """Check that a dict has what this rank owns; gives the rows by name."""
    if not isinstance(state, Mapping) or {*state} != {ROWS, WHOLE}:
        raise StateMismatchError("expected a dict that sharded_state_dict() returned on this rank")
    rows = {
        name: _Own(told["first"], tuple(told["shape"]), told["values"]) for name, told in state[ROWS].items()
    }
    places = {name: each.place for name, each in rows.items()}
    wrong = [name for name in {**places, **wanted} if places.get(name) != wanted.get(name)]
    wrong += [name for name in {**state[WHOLE], **rest} if not _alike(name, state[WHOLE], rest)]
    if wrong:
        name = wrong[0]
        raise StateMismatchError(
            f"the dict does not have what this rank owns of {', '.join(wrong)}. Of {name} it has "
            f"{places.get(name)}, and this rank {wanted.get(name)} (first row, number of rows, shape of the "
            "whole). For other ranks, units or classes save and load with zero_optim.checkpoint"
        )
    return rows


def _alike(name: str, some: Mapping[str, Any], others: Mapping[str, Any]) -> bool:
    one, other = (entries.get(name) for entries in (some, others))
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return one.shape == other.shape
    return name in some and name in others and isinstance(one, Tensor) == isinstance(other, Tensor)


@torch.no_grad()
def _load_bucket(bucket: UnitBucket, found: Mapping[Tensor, _Own]) -> None:
    flat = bucket.flat_as_kept()
    for param, view in zip(bucket.params, bucket.views(flat), strict=True):
        own = found.get(param)
        if own is not None:
            first, num_rows, shape = own.place
            (view[first : first + num_rows] if shape else view).copy_(own.values)
    bucket.take_over(flat)
