"""Conversions of a fully sharded model before its first forward pass: `to()`, `half()`, `double()`, `cuda()`.

Note [Converted when it is used]
    A plan depends on dtypes and devices: which parameters share a bucket, where rows begin, what is cut. So
    a conversion asks for another plan, and other owners. That communicates, and ``to()`` must not. So a
    conversion is only noted: parameters show their new dtype and device at once, and buffers, and parameters
    that are not sharded, are converted at once.

    When the model or its optimizer is used next, the ranks compare what every parameter is by now, and raise
    together if they differ. Then the optimizer (or what stands in for it) plans anew, the former buckets are
    gathered one after the other, as their owners keep them, and the function that PyTorch's ``to()`` gives is
    called with the whole values: one call for each conversion, in order. So the bits are those of a model
    that was converted before, and a rank never needs more than its rows, twice, and one bucket.

    All of that is possible until the first forward pass. From then on there may be graphs, gradients and
    state of the former form, and to compare would cost each step a collective.

Note [How conversions are seen]
    ``to()`` and its kin call ``_apply`` of a module, which calls that of its children: PyTorch has no hook
    for it. So the modules of units have an attribute of this name, which calls the class's own method with a
    function that leaves parameters of units alone. What the function does to a parameter is tried on a small
    tensor of its dtype, device and order of dimensions, since on a freed one it would take the memory of a
    whole one.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from zero_optim.compat.engine import eager
from zero_optim.plan.memory import DTYPE_AS_KEPT, dense_strides, kept_dtype
from zero_optim.shard.claims import UnitsClaim
from zero_optim.shard.freed import shown_when_freed
from zero_optim.shard.uncopied import Uncopied

Function = Callable[[Tensor], Tensor]
_MOST_DIMS_TRIED = 5  # memory formats are of 4 and 5

_TOO_LATE = (
    "a fully sharded model can be converted or moved until its first forward pass, and {reason}. Convert it "
    "before that; or save full_state_dict(model), build the model anew, convert it, wrap it, and load that"
)


@dataclass(frozen=True, slots=True)
class Target:
    """What a conversion makes of a parameter, as owners keep it."""

    dtype: torch.dtype
    device: torch.device


class Conversions(Uncopied):
    """What the parameters of a fully sharded model are to become; see Note [Converted when it is used].

    Nothing here communicates.

    Args:
        model: the module that is sharded.
        claim: its units.
        compute_dtype: gives the dtype in which what is kept in another one is computed with.
        check: called with the name of a parameter, the dtype in which owners would keep it, and its device;
            raises ValueError if that does not go with what the wrapper was given.
        why_not: says why the optimizer allows none any more; None if it does.
        cast_rest: casts what is not sharded as the wrapper was told to, whenever it was converted.
        on_use: has the model take the form that it was converted to; all ranks call it.

    Attributes:
        on_use: as given.
        are_over: the first forward pass has begun.
        pending: for each parameter the functions that are to be called with its values, in order.
    """

    def __init__(
        self,
        model: nn.Module,
        claim: UnitsClaim,
        compute_dtype: Callable[[torch.dtype], torch.dtype],
        check: Callable[[str, torch.dtype, torch.device], None],
        why_not: Callable[[], str | None],
        cast_rest: Callable[[], None],
        on_use: Callable[[], None],
    ) -> None:
        self.on_use = on_use
        self.are_over = False
        self.pending: dict[Tensor, list[Function]] = {}
        self._model = model
        self._claim = claim
        self._compute_dtype = compute_dtype
        self._check = check
        self._why_not = why_not
        self._cast_rest = cast_rest

    def hook_up(self) -> None:
        """See conversions of the model, and of modules that have parameters of units themselves."""
        for module in self._model.modules():
            has_own = not self._claim.units.keys().isdisjoint(module.parameters(recurse=False))
            if has_own or module is self._model:
                vars(module)["_apply"] = _Apply(self, module)

    def targets(self, module: nn.Module, function: Function) -> dict[Tensor, Target]:
        """Find out what a function would make of the parameters of units in a module; those that it changes.

        Raises:
            RuntimeError: it is too late for that, or it is no conversion.
            ValueError: the wrapper was given something that does not go with it.
        """
        if (
            torch.__future__.get_swap_module_params_on_conversion()
            or torch.__future__.get_overwrite_module_params_on_conversion()
        ):
            raise RuntimeError(
                "with set_swap_module_params_on_conversion(True) or "
                "set_overwrite_module_params_on_conversion(True) of torch.__future__ PyTorch takes the hooks "
                "off parameters that it converts or moves, or puts others in their place, even if nothing "
                "changes: do that before wrapping"
            )
        tried: dict[object, Target | None] = {}
        found: dict[Tensor, Target] = {}
        for name, param in module.named_parameters():
            if param not in self._claim.units:
                continue
            form = _Form.of(param)
            if form not in tried:
                tried[form] = form.tried_with(function)
            target = tried[form]
            if target is not None:
                self._check(name, target.dtype, target.device)
                found[param] = target
        if found:
            self._check_possible()
        return found

    def _check_possible(self) -> None:
        reason = self._why_not()
        if self.are_over:
            reason = "that has begun"
        elif any(param.grad is not None for param in self._claim.units):
            reason = "there are gradients: call zero_grad() first"
        if reason is not None:
            raise RuntimeError(_TOO_LATE.format(reason=reason))
        for bucket in (bucket for of_unit in self._claim.buckets for bucket in of_unit):
            bucket.check_unpinned()

    def note(self, function: Function, targets: Mapping[Tensor, Target]) -> None:
        """Take note of a conversion; parameters show what they are to become."""
        for param, (dtype, device) in ((param, (t.dtype, t.device)) for param, t in targets.items()):
            self.pending.setdefault(param, []).append(function)
            used = self._compute_dtype(dtype)
            vars(param).pop(DTYPE_AS_KEPT, None)
            if used != dtype:
                setattr(param, DTYPE_AS_KEPT, dtype)
            param.data = shown_when_freed(param.shape, used, device)
        if targets:
            self._cast_rest()

    def describe(self) -> Iterator[str]:
        """Describe what every parameter and buffer is by now, for ranks to compare."""
        for name, param in self._model.named_parameters():
            used = "" if param.dtype == kept_dtype(param) else f", used as {param.dtype}"
            yield f"parameter {name}: {kept_dtype(param)} on {param.device.type}{used}"
        for name, buffer in self._model.named_buffers():
            yield f"buffer {name}: {buffer.dtype} on {buffer.device.type}"

    def compute_dtypes(self) -> dict[Tensor, torch.dtype]:
        """List the parameters of units that are computed with in another dtype than they are kept in."""
        return {param: param.dtype for param in self._claim.units if kept_dtype(param) != param.dtype}

    @torch.no_grad()
    def converted(self, param: Tensor, value: Tensor) -> Tensor:
        """Convert the whole values of a parameter."""
        value = value.detach()
        for function in self.pending.get(param, ()):
            value = function(value)
        return value

    def check_none(self) -> None:
        """Refuse what does not communicate while something is pending.

        Raises:
            RuntimeError: something is.
        """
        if self.pending:
            raise RuntimeError(
                "the model was converted or moved, and its owners have yet to do so, together: call this "
                "after `with unsharded(model): pass`, or after the first forward pass, on all ranks"
            )


@dataclass(frozen=True, slots=True)
class _Form:
    """All of a parameter that a conversion may depend on."""

    dtype: torch.dtype
    device: torch.device
    order: tuple[int, ...]  # its dimensions, the outermost in memory first

    @classmethod
    def of(cls, param: Tensor) -> "_Form":
        strides = dense_strides(param)
        dims = range(len(strides)) if len(strides) <= _MOST_DIMS_TRIED else ()
        order = tuple(sorted(dims, key=lambda dim: (-strides[dim], dim)))
        return cls(kept_dtype(param), param.device, order)

    def tried_with(self, function: Function) -> Target | None:
        """Call a function with a small tensor of this form; None if it changes nothing.

        Raises:
            RuntimeError: it does something else than to convert or move.
        """
        size = [2] * len(self.order)
        ones = torch.ones(size, dtype=self.dtype, device=self.device)
        probe = ones.permute([self.order.index(dim) for dim in range(len(size))])
        with torch.no_grad():
            applied = function(probe)
        if applied is probe:
            return None
        if applied.is_meta or applied.stride() != probe.stride():
            what = "moved to the meta device" if applied.is_meta else "given another memory format"
            raise RuntimeError(
                f"the parameters of a fully sharded model cannot be {what}: owners keep them. Do that before "
                "wrapping"
            )
        is_alike = (applied.dtype, applied.device) == (probe.dtype, probe.device)
        if is_alike or not torch.equal(applied.to(probe), probe):
            raise RuntimeError(
                "a fully sharded model can be given other dtypes and another device, but this would give its "
                "parameters other values or other memory: do that before wrapping, or write to them inside "
                "zero_optim.ddp.unsharded(module)"
            )
        return Target(applied.dtype, applied.device)


@dataclass(frozen=True, slots=True, eq=False)
class _ButUnits:
    """A function for all tensors of modules but the parameters of units."""

    function: Function
    left: frozenset[Tensor]

    def __call__(self, tensor: Tensor) -> Tensor:
        return tensor if tensor in self.left else self.function(tensor)


@dataclass(frozen=True, slots=True, eq=False)
class _Apply(Uncopied):
    """What stands in the place of a module's ``_apply``; see Note [How conversions are seen].

    Args:
        conversions: of the model.
        module: the module.
    """

    conversions: Conversions
    module: nn.Module

    @eager
    def __call__(self, fn: Function, *args: Any, **kwargs: Any) -> nn.Module:  # noqa: ANN401 - a class's own
        """Convert what is not sharded, and note what is."""
        untyped: Any = type(self.module)
        if isinstance(fn, _ButUnits):  # a module around this one has seen to it
            untyped._apply(self.module, fn, *args, **kwargs)
            return self.module
        targets = self.conversions.targets(self.module, fn)
        untyped._apply(self.module, _ButUnits(fn, self._left()), *args, **kwargs)
        self.conversions.note(fn, targets)
        return self.module

    def _left(self) -> frozenset[Tensor]:
        units = self.conversions._claim.units
        return frozenset(param for param in self.module.parameters() if param in units)
