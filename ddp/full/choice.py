"""Which modules of a model are units, and which parameter belongs to which. Does not communicate.

A unit has its own parameters, and those below it that are in no unit further down. The outermost module is
always one; it has number 0.
"""

from collections.abc import Callable, Container, Iterable
from dataclasses import dataclass
from typing import Literal

from torch import Tensor, nn

Kind = type[nn.Module]
Units = (
    Literal["auto"]
    | nn.ModuleList
    | nn.ModuleDict
    | Kind
    | Iterable[nn.Module | Kind]
    | Callable[[nn.Module], bool]
)

# With "auto" a unit has at least this part of the model's bytes, unless it is the outermost one.
AUTO_PART = 1 / 32
# But of a module with more than this many such parts in smaller modules, those are units that have at least
# such a part of a part: a model of 64 equal layers would be one unit.
AUTO_MOST = 4


@dataclass(frozen=True, slots=True, eq=False)
class UnitChoice:
    """The units of a model."""

    modules: tuple[nn.Module, ...]  # by number, the outermost one first
    names: tuple[str, ...]  # of these in the model; "" for the outermost
    unit_of: dict[Tensor, int]  # the number of each parameter's unit

    def units_at(self, module: nn.Module, params: Container[Tensor]) -> tuple[int | None, list[int]]:
        """Return the unit that calls of a module need, and all those that it has parameters of."""
        numbers = {self.unit_of[param] for param in module.parameters(recurse=False) if param in params}
        called = self.modules.index(module) if module in self.modules else 0 if 0 in numbers else None
        return called, sorted(numbers if called is None else numbers | {called})


def choose_units(model: nn.Module, units: Units) -> UnitChoice:
    """Choose the units of a model; TypeError or ValueError if one is no module of it, or is never called."""
    name_of = {module: name for name, module in model.named_modules()}
    read_by = _read_by_others(model)
    if units == "auto":
        unit_modules = _by_size(model, read_by)
    elif isinstance(units, type):
        unit_modules = _listed([units], name_of)
    elif callable(units) and not isinstance(units, nn.Module):
        unit_modules = {module for module in name_of if units(module)}
    elif isinstance(units, nn.ModuleDict):
        unit_modules = set(units.values())
    elif isinstance(units, Iterable):  # ModuleList and Sequential too
        given: object = units  # a text is an iterable too
        unit_modules = _listed([given] if isinstance(given, str) else units, name_of)
    elif isinstance(units, nn.Module):
        raise TypeError(f"expected units to be modules, got one, {type(units).__name__}: put it in a list")
    else:
        raise TypeError(
            'expected units to be "auto", modules of the model, or a function that returns whether a module '
            f"is a unit, got {units!r}"
        )
    for module in unit_modules:
        if module not in name_of:
            raise ValueError(f"units has a {type(module).__name__} that is no module of the model")
        if not _has_forward(module) and module is not model:
            raise ValueError(
                f"{name_of[module]} is a {type(module).__name__}, which is never called itself: give the "
                "modules in it as units"
            )
        if module in read_by:
            raise ValueError(
                f"{name_of[module]} is never called itself: the {type(read_by[module]).__name__} around it "
                "reads its parameters. Give that one as a unit"
            )
    modules = tuple(module for module in name_of if module is model or module in unit_modules)
    names = tuple(name_of[module] for module in modules)
    return UnitChoice(modules, names, _assigned(model, modules))


def _listed(units: Iterable[object], model: Iterable[nn.Module]) -> set[nn.Module]:
    modules, unit_modules = [*model], set[nn.Module]()
    for unit in units:
        if isinstance(unit, nn.Module):
            unit_modules.add(unit)
        elif isinstance(unit, type):
            of_kind = [module for module in modules if isinstance(module, unit)]
            if not of_kind:
                raise ValueError(f"no module of the model is a {unit.__name__}, which was given as a unit")
            unit_modules.update(of_kind)
        else:
            raise TypeError(
                f"expected units to be modules, got {type(unit).__name__} {unit!r}: give modules of the "
                "model, or the class itself in the place of its name"
            )
    return unit_modules


def _has_forward(module: nn.Module) -> bool:
    unimplemented = getattr(nn.modules.module, "_forward_unimplemented", None)
    return type(module).forward is not unimplemented


def _read_by_others(model: nn.Module) -> dict[nn.Module, nn.Module]:
    """Map modules to the one that reads their parameters without calling them, as attention does."""
    attentions = [module for module in model.modules() if isinstance(module, nn.MultiheadAttention)]
    return {inner: outer for outer in attentions for inner in outer.modules() if inner is not outer}


def _by_size(model: nn.Module, read_by: Container[nn.Module]) -> set[nn.Module]:
    least = AUTO_PART * sum(param.nbytes for param in model.parameters())
    unit_modules: set[nn.Module] = set()
    seen: set[Tensor] = set()

    def may_be_one(module: nn.Module) -> bool:
        return module is not model and _has_forward(module) and module not in read_by

    def visit(module: nn.Module) -> int:
        """Choose units in and below a module; return the bytes that are in none."""
        own = [param for param in module.parameters(recurse=False) if param not in seen]
        seen.update(own)
        parts = {child: visit(child) for child in module.children()}
        nbytes = sum(param.nbytes for param in own) + sum(parts.values())
        if nbytes > AUTO_MOST * least:  # of many small layers each is one
            alone = [each for each, part in parts.items() if part >= least * AUTO_PART and may_be_one(each)]
            unit_modules.update(alone)
            nbytes -= sum(map(parts.__getitem__, alone))
        if nbytes >= least and nbytes and may_be_one(module):
            unit_modules.add(module)
            return 0
        return nbytes

    visit(model)
    return unit_modules


def _assigned(model: nn.Module, modules: tuple[nn.Module, ...]) -> dict[Tensor, int]:
    """Give each parameter the innermost unit around all modules that have it."""
    number_of = {module: number for number, module in enumerate(modules)}
    around: dict[Tensor, tuple[int, ...]] = {}

    def visit(module: nn.Module, outer: tuple[int, ...]) -> None:
        path = (*outer, number_of[module]) if module in number_of else outer
        for param in module.parameters(recurse=False):
            path_before = around.get(param, path)
            common = [one for one, other in zip(path_before, path, strict=False) if one == other]
            around[param] = tuple(common)
        for child in module.children():
            visit(child, path)

    visit(model, ())
    return {param: around[param][-1] for param in model.parameters()}
