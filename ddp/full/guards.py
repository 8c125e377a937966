"""Conversions of a model, and new parameters in the place of its own, raise: owners would not see them.

Note [How conversions are seen]
    ``to()``, ``half()`` and ``cuda()`` call ``_apply`` of a module, then of its children. Modules of units
    have an attribute of this name, which leaves parameters of units alone. The conversion passes if a small
    tensor of a parameter's dtype and device stays as it is.

Note [Parameters in the place of others]
    Parameters that ``weight_norm`` and ``parametrize`` make after wrapping begin with NaN, and no owner steps
    them. So each training pass compares modules' parameters, in 0.1 µs each. Those that have gone, with
    nothing in their place, are unused. Other names, as pruning gives, are taken from `unsharded` only.
"""

import sys
from collections.abc import Callable, Collection
from dataclasses import dataclass
from functools import cache, partial
from operator import is_
from types import TracebackType
from typing import Any

import torch
from torch import Tensor, nn

from zero_optim.compat import private
from zero_optim.compat.autograd import eager
from zero_optim.plan.groups import names_text
from zero_optim.plan.strides import kept_dtype
from zero_optim.shard.rows.row_values import Uncopied

Function = Callable[[Tensor], Tensor]
_SHAPES = ((1,), (1, 2, 2, 2), (1, 2, 2, 2, 2))  # memory formats are of 4 and 5 dimensions


@cache
def explain_writes() -> None:
    """Let uncaught errors of writes to freed parameters say what to do."""
    show_before = sys.excepthook  # PyTorch raises before any code of ours runs; a class would slow down reads

    def show(kind: type[BaseException], error: BaseException, frames: TracebackType | None) -> None:
        if isinstance(error, RuntimeError) and "of the written-to tensor refers to a single" in str(error):
            error.args = (f"{error} Write to sharded weights inside zero_optim.ddp.unsharded(module)",)
        show_before(kind, error, frames)

    sys.excepthook = show


def refuse_conversions(model: nn.Module, units: Collection[Tensor]) -> None:
    """Have conversions of a model raise, and of its modules with own parameters of units."""
    for module in model.modules():
        if module is model or any(param in units for param in module.parameters(recurse=False)):
            vars(module)["_apply"] = _Apply(module, units)


def _but_units(function: Function, units: Collection[Tensor], tensor: Tensor) -> Tensor:
    return tensor if tensor in units else function(tensor)


@dataclass(frozen=True, slots=True, eq=False)
class _Apply(Uncopied):
    """Stands for a module's ``_apply``: Note [How conversions are seen]."""

    module: nn.Module
    units: Collection[Tensor]

    @eager
    def __call__(self, fn: Function, *args: Any, **kwargs: Any) -> nn.Module:  # noqa: ANN401 - a class's own
        if getattr(fn, "func", None) is not _but_units:  # else a module around this one has looked
            self._check(fn)
            fn = partial(_but_units, fn, self.units)
        untyped: Any = type(self.module)
        untyped._apply(self.module, fn, *args, **kwargs)
        return self.module

    def _check(self, function: Function) -> None:
        future = torch.__future__
        if (
            future.get_swap_module_params_on_conversion()
            or future.get_overwrite_module_params_on_conversion()
        ):
            raise RuntimeError(
                "with set_swap_module_params_on_conversion(True) or "
                "set_overwrite_module_params_on_conversion(True) of torch.__future__ PyTorch takes the "
                "hooks off parameters that it converts or moves, or puts others in their place, even if "
                "nothing changes: do that before wrapping"
            )
        names: dict[tuple[torch.dtype, torch.device], str] = {}  # of the first parameter of a form
        for name, param in self.module.named_parameters():
            if param in self.units:
                names.setdefault((kept_dtype(param), param.device), name)
        for (dtype, device), name in names.items():
            for shape in _SHAPES:
                ones = torch.ones(shape, dtype=dtype, device=device)
                with torch.no_grad():
                    applied = function(ones)
                if applied is ones:
                    continue
                what = f"become {applied.dtype} on {applied.device}"
                if (applied.dtype, applied.device, applied.stride()) == (dtype, device, ones.stride()):
                    what = "get other values or other memory: write to it inside "
                    what += "zero_optim.ddp.unsharded(module)"
                raise RuntimeError(
                    f"a fully sharded model cannot be converted or moved: {name} is {dtype} on {device} on "
                    f"its owners, and was to {what}. Convert and move the model before it is wrapped, on all "
                    "ranks; or save full_state_dict(model), build a new model, convert it, wrap it, and load "
                    "that"
                )


def refuse_shared_memory(model: nn.Module, params: Collection[Tensor]) -> None:
    """Raise ValueError if another parameter or a buffer has the memory of one that will be freed."""
    named = [*model.named_parameters(), *model.named_buffers()]
    freed = {_storage(tensor): name for name, tensor in named if tensor in params and tensor.numel()}
    for name, tensor in named:
        if tensor not in params and tensor.numel() and _storage(tensor) in freed and not tensor.is_meta:
            raise ValueError(
                f"{name} has the memory of the parameter {freed[_storage(tensor)]}, which each rank would "
                "free between uses: give it memory of its own (tensor.clone()), or make both one "
                "parameter, as head.weight = tokens.weight does"
            )


def _storage(tensor: Tensor) -> object:
    return private.cdata(tensor.untyped_storage())


class UnitMembers:
    """The parameters and children of each module of a model, as a training pass saw them last."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._known = set(model.parameters())
        self._note()

    def _note(self) -> None:
        self._of_modules: list[tuple[str, nn.Module, dict[str, Tensor | None], list[int]]] = [
            (name, module, dict(module._parameters), list(map(id, module._modules.values())))
            for name, module in self._model.named_modules()
        ]

    def check(self) -> None:
        """Raise RuntimeError if new parameters are in the place of old ones, or these have other names."""
        for _, module, before, children in self._of_modules:
            now = module._parameters
            if (
                len(now) != len(before)
                or not all(map(is_, now.values(), before.values()))
                or list(map(id, module._modules.values())) != children
            ):
                self._compare()
                self._note()
                return

    def accept_names(self, whole: set[Tensor]) -> None:
        """Take the present names in modules whose parameters are all ``whole``, as in `unsharded`."""
        for _, module, before, _ in self._of_modules:
            now = module._parameters
            if {*now.values()} == {*before.values()} and whole.issuperset(
                each for each in before.values() if each is not None
            ):
                before.clear()
                before.update(now)

    def _compare(self) -> None:
        now = {param: name for name, param in self._model.named_parameters()}
        gone = [
            (name, param)
            for name, _, before, _ in self._of_modules
            for param in before.values()
            if param is not None and param not in now
        ]
        new = [name for param, name in now.items() if param not in self._known]
        trains = any(param.requires_grad for param in now if param in self._known)
        if new and (gone or not trains):
            where = names_text([name or "the outermost module" for name in dict.fromkeys(dict(gone))])
            shapes = names_text([str(tuple(param.shape)) for _, param in gone])
            what = f"a parameter of {where} of shape {shapes} of a fully sharded model has gone, and "
            raise RuntimeError(
                f"{what if gone else 'all parameters of a fully sharded model are frozen by now, and '}"
                f"{names_text(new)} came in its place, as by weight_norm(), parametrize or an assignment. No "
                "rank keeps or steps it. Do that before the model is wrapped"
            )
        for name, module, before, _ in self._of_modules:
            own = module._parameters
            for short, param in before.items():
                if param is not None and param is not own.get(short) and id(param) in map(id, own.values()):
                    raise RuntimeError(
                        f"{f'{name}.{short}'.lstrip('.')} of a fully sharded model was renamed, as pruning "
                        "does, while it showed NaN. Do it before the model is wrapped, or inside "
                        "zero_optim.ddp.unsharded(model)"
                    )
