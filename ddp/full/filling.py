"""How the units of a model get their values, module by module, so that no rank ever needs a second copy.

Note [Filled module by module]
    The buckets of units begin without memory. A *portion* is a unit, or in the outermost unit a module with
    parameters, with all below it that belongs to the same unit. When it has its values, the ranks take those
    of rank 0, each copies its rows, and the portion's memory is released. Where all values are there, the
    portion with the largest parameter comes last: its owner has it twice while it is copied. A module is
    initialized after those below it, as constructors do, so the same seed gives the bits of a whole model.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import Parameter
from torch.nn.parameter import is_lazy

from zero_optim.comm.agreement import failing_together
from zero_optim.comm.collectives import RankGroup
from zero_optim.ddp.first_values import take_values_of_first
from zero_optim.ddp.full.choice import UnitChoice
from zero_optim.plan.strides import STRIDES_WHEN_WHOLE, dense_strides, kept_dtype
from zero_optim.shard.bucket import Bucket
from zero_optim.shard.places import shown_when_freed
from zero_optim.shard.rows.row_values import RowValues

Init = Callable[[nn.Module], object]


def own_tensors(module: nn.Module) -> Iterator[tuple[dict[str, Any], str, Tensor]]:
    """List a module's own parameters and buffers, each with the dict that has it and its name."""
    for slots in (module._parameters, module._buffers):
        for name, tensor in slots.items():
            if tensor is not None:
                yield slots, name, tensor


def has_meta(model: nn.Module) -> bool:
    """Whether a parameter or a buffer of a model is on the meta device."""
    return any(tensor.is_meta for module in model.modules() for _, _, tensor in own_tensors(module))


def check_init(model: nn.Module, init: Init | None) -> None:
    """Refuse a model on the meta device that nobody can initialize, or a useless ``init``."""
    if init is not None and not callable(init):
        raise TypeError(f"expected init to be a function of a module, got {init!r}")
    if init is not None and not has_meta(model):
        raise ValueError("init is for models on the meta device, and nothing in this one is: leave it out")
    for name, module in model.named_modules():
        if any(tensor.is_meta for _, _, tensor in own_tensors(module)) and init is None:
            _reset_of(module, name)


def _reset_of(module: nn.Module, name: str) -> Callable[[], object]:
    reset = getattr(module, "reset_parameters", None) or getattr(module, "_reset_parameters", None)
    if not callable(reset):
        raise ValueError(  # noqa: TRY004 - the model is wrong, not the type of an argument
            f"{name or 'the outermost module'}, a {type(module).__name__}, is on the meta device and has no "
            "reset_parameters(): give init=, a function that initializes the parameters and buffers of the "
            "module that it is given"
        )
    callback: Callable[[], object] = reset
    return callback


def leave_meta(model: nn.Module, device: torch.device) -> dict[Tensor, Tensor]:
    """Replace parameters on the meta device, also shared ones, by freed ones; return the new by the old."""
    new: dict[Tensor, Tensor] = {}
    for module in model.modules():
        for slots, name, tensor in own_tensors(module):
            if isinstance(tensor, Parameter) and tensor.is_meta and not is_lazy(tensor):
                if tensor not in new:
                    shown = shown_when_freed(tensor.shape, tensor.dtype, device)
                    new[tensor] = Parameter(shown, requires_grad=tensor.requires_grad)
                    vars(new[tensor]).update(vars(tensor))
                    setattr(new[tensor], STRIDES_WHEN_WHOLE, dense_strides(tensor))
                slots[name] = new[tensor]
    return new


def back_to_meta(model: nn.Module, replaced: Mapping[Tensor, Tensor]) -> None:
    """Undo `leave_meta`, which returned the parameters that were `replaced`."""
    former = {new: old for old, new in replaced.items()}
    for module in model.modules():
        for slots, name, tensor in own_tensors(module):
            slots[name] = former.get(tensor, tensor)


def _new_values(tensor: Tensor, device: torch.device) -> Tensor:
    """Make NaN, or zeros, in the dtype that owners keep: random numbers differ in another dtype."""
    new = torch.empty_strided(tensor.shape, dense_strides(tensor), dtype=kept_dtype(tensor), device=device)
    return new.fill_(float("nan")) if new.is_floating_point() or new.is_complex() else new.zero_()


@dataclass(eq=False)
class UnitFiller:
    """Fills the empty buckets of a model's units: Note [Filled module by module]."""

    group: RankGroup
    choice: UnitChoice
    buckets: Sequence[Bucket[RowValues]]
    unfilled: set[Tensor]  # parameters without values
    init: Init | None  # gives these; None for the modules' own ``reset_parameters()``
    former: dict[Tensor, Bucket[Any]]  # buckets that parameters leave
    syncs: bool  # every rank takes rank 0's values

    def __post_init__(self) -> None:
        self._inner = set(self.choice.modules[1:])
        self._names = {module: name for name, module in self.choice.modules[0].named_modules()}
        self._bucket_of = {param: bucket for bucket in self.buckets for param in bucket.params}
        self._seen_params: set[Tensor] = set()
        self._seen: set[nn.Module] = set()
        self._waiting: list[list[Tensor]] | None = None  # portions that have their values; None: none waits

    def fill(self) -> None:
        """Fill all of them, and free the parameters; all ranks call, and it communicates."""
        model = self.choice.modules[0]
        if not self.unfilled and not has_meta(model):
            self._waiting = []
        self._visit(model, None)
        portions = self._waiting or ()
        for portion in sorted(portions, key=lambda each: max((param.nbytes for param in each), default=0)):
            self._close(portion)  # equal ones in the order of modules
        for bucket in set(self._bucket_of.values()):
            bucket.values.release()

    def _visit(self, module: nn.Module, outer: list[Tensor] | None) -> None:
        """Fill a module behind those below it; `outer` is the portion of the unit around it."""
        if module in self._seen:
            return
        self._seen.add(module)
        own = [param for param in module._parameters.values() if param is not None]
        begins = module in self._inner or (outer is None and bool(own))
        portion = list[Tensor]() if begins else outer
        for child in module.children():
            self._visit(child, portion)
        has_new = any(param in self.unfilled and param not in self._seen_params for param in own)
        if has_new or any(tensor.is_meta for _, _, tensor in own_tensors(module)):
            with failing_together(self.group):
                self._initialize(module, own)
        for param in own:
            if param in self._bucket_of and param not in self._seen_params and portion is not None:
                portion.append(param)
            self._seen_params.add(param)
        if begins and portion is not None and self._waiting is not None:
            self._waiting.append(portion)
        elif begins and portion is not None:
            self._close(portion)

    def _close(self, portion: list[Tensor]) -> None:
        if self.syncs:
            take_values_of_first(self.group, portion)
        for param in portion:
            self._bucket_of[param].values.take_in(param)
            if param in self.former:
                self.former.pop(param).values.give_back(param)

    @torch.no_grad()
    def _initialize(self, module: nn.Module, own: Sequence[Tensor]) -> None:
        """Give first values. A parameter that another module has initialized gets other memory meanwhile."""
        new = {param for param in own if param in self.unfilled}
        device = next(iter(new or own or self._bucket_of)).device
        before = {param: param.data for param in new if param in self._seen_params}
        for param in new:
            param.data = _new_values(param, device)
        for slots, name, tensor in own_tensors(module):
            if tensor.is_meta:
                slots[name] = _new_values(tensor, device)
                new.add(slots[name])
        name = self._names[module]
        if self.init is None:
            _reset_of(module, name)()
        else:
            self.init(module)
        for _, own_name, tensor in own_tensors(module):
            bears_nan = tensor.is_floating_point() or tensor.is_complex()
            if tensor in new and bears_nan and tensor.numel() and tensor.isnan().all():
                what = "its reset_parameters()" if self.init is None else "init"
                raise ValueError(
                    f"{name}{'.' if name else ''}{own_name} has no values after {what} of its module, a "
                    f"{type(module).__name__}: give an init= that sets it"
                )
        for param, values in before.items():
            param.data = values
