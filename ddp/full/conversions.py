"""A fully sharded model is converted and moved before it is wrapped: behind that ``to()`` and its kin raise.

Note [How conversions are seen]
    ``to()``, ``half()`` and ``cuda()`` call ``_apply`` of a module, which calls that of its children: PyTorch
    has no hook for it. So the modules of units have an attribute of this name, which calls the class's own
    method with a function that leaves parameters of units alone. What the function does to a parameter is
    tried on a small tensor of its dtype and device, since a freed one would take the memory of a whole one.
    A function that changes nothing passes: frameworks move a model to where it is.
"""

from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from zero_optim.compat.engine import eager
from zero_optim.plan.memory import kept_dtype
from zero_optim.shard.uncopied import Uncopied

Function = Callable[[Tensor], Tensor]
_SHAPES = ((1,), (1, 2, 2, 2), (1, 2, 2, 2, 2))  # memory formats are of 4 and 5 dimensions


def refuse_conversions(model: nn.Module, units: Collection[Tensor]) -> None:
    """Have conversions of a model raise, and of modules that have parameters of units themselves.

    Args:
        model: the module that is sharded.
        units: the parameters of its units; those that leave it later are converted as usual.
    """
    for module in model.modules():
        if module is model or any(param in units for param in module.parameters(recurse=False)):
            vars(module)["_apply"] = _Apply(module, units)


def _check_unchanged(name: str, param: Tensor, function: Function) -> None:
    for shape in _SHAPES:
        ones = torch.ones(shape, dtype=kept_dtype(param), device=param.device)
        with torch.no_grad():
            applied = function(ones)
        if applied is not ones:
            made = f"become {applied.dtype} on {applied.device}"
            if (applied.dtype, applied.device, applied.stride()) == (ones.dtype, ones.device, ones.stride()):
                made = "get other values or other memory: write to it inside zero_optim.ddp.unsharded(module)"
            raise RuntimeError(
                f"a fully sharded model cannot be converted or moved, as owners keep its parameters: {name} "
                f"is {ones.dtype} on {ones.device} there, and was to {made}. Convert and move the model "
                "before it is wrapped, on all ranks alike; or save full_state_dict(model), build the model "
                "anew, convert it, wrap it, and load that"
            )


@dataclass(frozen=True, slots=True, eq=False)
class _ButUnits:
    """A function for all tensors of modules but the parameters of units."""

    function: Function
    units: Collection[Tensor]

    def __call__(self, tensor: Tensor) -> Tensor:
        return tensor if tensor in self.units else self.function(tensor)


@dataclass(frozen=True, slots=True, eq=False)
class _Apply(Uncopied):
    """What stands in the place of a module's ``_apply``; see Note [How conversions are seen]."""

    module: nn.Module
    units: Collection[Tensor]

    @eager
    def __call__(self, fn: Function, *args: Any, **kwargs: Any) -> nn.Module:  # noqa: ANN401 - a class's own
        """Convert what is not sharded, if the function leaves alone what is."""
        untyped: Any = type(self.module)
        if not isinstance(fn, _ButUnits):  # else a module around this one has looked
            if (
                torch.__future__.get_swap_module_params_on_conversion()
                or torch.__future__.get_overwrite_module_params_on_conversion()
            ):
                raise RuntimeError(
                    "with set_swap_module_params_on_conversion(True) or "
                    "set_overwrite_module_params_on_conversion(True) of torch.__future__ PyTorch takes the "
                    "hooks off parameters that it converts or moves, or puts others in their place, even if "
                    "nothing changes: do that before wrapping"
                )
            forms: dict[object, tuple[str, Tensor]] = {}
            for name, param in self.module.named_parameters():
                if param in self.units:
                    forms.setdefault((kept_dtype(param), param.device), (name, param))
            for name, tensor in forms.values():
                _check_unchanged(name, tensor, fn)
            fn = _ButUnits(fn, self.units)
        untyped._apply(self.module, fn, *args, **kwargs)
        return self.module
