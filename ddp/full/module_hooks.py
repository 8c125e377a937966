"""The modules of units, with hooks that make these whole; `unsharded` does on request."""

from collections.abc import Iterator
from contextlib import contextmanager

from torch import Tensor, nn

from zero_optim.comm.agreement import raise_together
from zero_optim.ddp.full.choice import UnitChoice
from zero_optim.ddp.full.in_use import UnitsInUse
from zero_optim.ddp.full.state_hooks import hook_states
from zero_optim.shard.registration import is_registered


def hook_up(choice: UnitChoice, units: UnitsInUse) -> None:
    """Register the hooks of all modules that are units, or have parameters in one."""
    in_units = {param for unit in units.units for param in unit.params}
    number_of = {module: number for number, module in enumerate(choice.modules)}
    hooked = list[tuple[nn.Module, int]]()
    for module in units.model.modules():
        used = {choice.unit_of[param] for param in module.parameters(recurse=False) if param in in_units}
        numbers = {number_of[module]} if module in number_of else used & {0}
        for number in numbers:  # one at most
            units.unit_of[module] = units.units[number]
            units.watch(module, ends=True)
        hooked += ((module, number) for number in sorted(used | numbers))
    hook_states(units, hooked)


def units_of(model: nn.Module) -> UnitsInUse | None:
    """Return the units of a model, or of one that a module is in; None if there are none."""
    return next(filter(None, map(UnitsInUse.on, model.modules())), None)


def units_at(module: nn.Module) -> UnitsInUse | None:
    """Return the units of a module that was itself wrapped or sharded in place, or None."""
    units = UnitsInUse.on(module)
    return units if units is not None and units.model is module else None


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
