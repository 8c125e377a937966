"""Gradients that no backward pass has reduced: each rank would step its own.

Note [Unreduced gradients]
    A reducer knows which gradients it did not reduce; a parameter that no reducer has is reduced by nobody.
    The user may average those by hand, so ``step()`` compares them between ranks.

Note [Gradients that nobody averaged]
    PyTorch's DDP does not say which gradients it reduced. So each step reads an element of the next two (some
    5 µs), and the stamp's digest tells whether ranks read the same; on an accelerator, in the next step.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from itertools import count
from typing import TYPE_CHECKING, TypeAlias
from weakref import WeakKeyDictionary, WeakSet

import torch
from torch import Tensor

from zero_optim.comm.agreement import agree
from zero_optim.comm.collectives import RankGroup
from zero_optim.comm.wire import memory_of
from zero_optim.compat.streams import HostCopy, is_asynchronous
from zero_optim.health.stamps import Sampled
from zero_optim.plan.groups import ParamGroup, names_text, params_of, short_names
from zero_optim.shard.order import digests

if TYPE_CHECKING:
    from zero_optim.ddp.reducer.reducer import Reducer

NOT_REDUCED = (
    "did not require a gradient when the model was wrapped, and now does: its gradient would not be reduced, "
    "and each rank would train it for itself. Wrap the model while all that will be trained requires a "
    "gradient, with find_unused_parameters=True, and freeze behind that; or wrap it anew"
)
_NOT_WRAPPED = (
    "is in the optimizer, and in no data-parallel wrapper that reduces its gradient: wrap the module that "
    "has it too, for example model and loss as one module"
)
_NOT_SYNCED = (
    "has a gradient of a backward pass that was not reduced: the pass ran under no_sync(), with "
    "require_backward_grad_sync=False, or through the inner module instead of the wrapper. Run the last "
    "backward pass before step() through the wrapper and outside of no_sync(), also where the last window "
    "of an accumulation is not full"
)
_NUM_READ = 2  # elements a step
_STRIDE = 2654435761  # spreads the places of elements; a prime


class FrozenParams:
    """The names and parameters that one living wrapper does not reduce, as they were frozen."""

    def __init__(self, pairs: Sequence[tuple[str, Tensor]]) -> None:
        self._pairs = pairs
        if pairs:
            _FROZEN.add(self)

    def unfrozen(self) -> list[tuple[str, Tensor]]:
        """Return those that require a gradient now."""
        return [(name, param) for name, param in self._pairs if param.requires_grad]


_FROZEN: WeakSet[FrozenParams] = WeakSet()
# Of a parameter whose gradient no pass has reduced: its name, if a wrapper knows one, and the reason.
Unreduced: TypeAlias = tuple[str | None, str]
_REDUCERS: WeakKeyDictionary["Reducer", int] = WeakKeyDictionary()  # numbered
_numbers = count()


def add_reducer(reducer: "Reducer") -> None:
    """Ask a living reducer about gradients from now on."""
    _REDUCERS[reducer] = next(_numbers)


def remove_reducer(reducer: "Reducer") -> None:
    """Forget a reducer, whose hooks are gone."""
    _REDUCERS.pop(reducer, None)


def reducers_with(params: Collection[Tensor]) -> "list[Reducer]":
    """Return the living reducers that have any of the parameters."""
    return [reducer for reducer in list(_REDUCERS) if any(param in params for param in reducer.params)]


class UnreducedParams:
    """Finds the unreduced parameters of one optimizer. No communication."""

    def __init__(self) -> None:
        self._known: tuple[int, ...] = ()  # the reducers for which the parameters without one are known
        self._outside: list[Tensor] = []
        self.are_known = False  # whether a reducer has any of the parameters: then `among` tells of all

    def among(self, params: Collection[Tensor]) -> dict[Tensor, Unreduced]:
        """Return those of ``params`` that train, with the reasons."""
        unreduced: dict[Tensor, Unreduced] = {}
        reducers, known = list(_REDUCERS), (*_REDUCERS.values(), len(params))
        if known != self._known:
            reduced = {param for reducer in reducers for param in reducer.params}
            self._known, self._outside = known, [param for param in params if param not in reduced]
            self.are_known = len(self._outside) < len(params)
        for param in self._outside if self.are_known else ():
            if param.requires_grad:
                unreduced[param] = None, _NOT_WRAPPED
        for reducer in reducers if self.are_known else ():
            if True in reducer.unreduced:
                unreduced.update(_not_synced(reducers, params))
                break
        for frozen in list(_FROZEN):
            unreduced.update(
                (param, (name, NOT_REDUCED)) for name, param in frozen.unfrozen() if param in params
            )
        return unreduced


def _not_synced(reducers: "Sequence[Reducer]", params: Collection[Tensor]) -> dict[Tensor, Unreduced]:
    """Find the parameters with a gradient of an unreduced pass, unless a second reducer has reduced it."""
    unreduced, reduced = dict[Tensor, Unreduced](), set[Tensor]()
    for reducer in reducers:
        for name, param, is_unreduced in zip(reducer.names, reducer.params, reducer.unreduced, strict=True):
            if not is_unreduced:
                reduced.add(param)
            elif param in params and param.grad is not None:
                unreduced[param] = name, _NOT_SYNCED
    return {param: reason for param, reason in unreduced.items() if param not in reduced}


def compare_unreduced(
    group: RankGroup, unreduced: Mapping[Tensor, Unreduced], names: Mapping[Tensor, str], *, in_join: bool
) -> None:
    """Compare unreduced gradients, a collective a reason; all ranks call. RankMismatchError if unequal."""
    by_reason: dict[str, dict[str, Tensor | None]] = {}
    for param, (name, reason) in unreduced.items():
        by_reason.setdefault(reason, {})[names[param] if name is None else name] = param.grad
    for reason, grads in by_reason.items():
        if in_join:
            for name, grad in grads.items():
                if grad is not None:
                    raise RuntimeError(f"{name} {reason}")
            continue
        _, *others = grads
        more = f". The same holds for {names_text(others)}" if others else ""
        hint = f"It {reason}; or average its gradient on every rank before step(){more}"
        values = iter(
            digests([memory_of(grad.to_dense().contiguous()) for grad in grads.values() if grad is not None])
        )
        items = [
            f"gradient of {name}: {'none' if grad is None else next(values).hex()}"
            for name, grad in grads.items()
        ]
        agree(group, items, "gradients that no backward pass has reduced", {"gradient": hint})


class GradientSamples:
    """Reads elements of gradients, of others in each step, and of the same on every rank."""

    def __init__(self) -> None:
        self._number = 0  # of steps
        self._named: list[tuple[str, Tensor]] = []
        self._copies: list[tuple[str, HostCopy]] = []  # of the last step, on an accelerator

    def take(
        self, groups: Sequence[ParamGroup], num_params: int, read: Callable[[HostCopy], Tensor]
    ) -> Sampled:
        """Return elements of some gradients by parameter; ``read`` waits for those of the last step."""
        if len(self._named) != num_params:
            self._named = list(zip(short_names(groups), params_of(groups), strict=True))
        earlier, self._copies = self._copies, []
        sampled: Sampled = {name: str(read(copy).item()) for name, copy in earlier}
        number, self._number = self._number, self._number + 1
        for index in {(number * _NUM_READ + place) % len(self._named) for place in range(_NUM_READ)}:
            name, param = self._named[index]
            grad = param.grad
            if type(grad) is not Tensor or grad.layout is not torch.strided or not grad.numel():
                sampled[name] = None  # no gradient, a part of one, or a sparse one
                continue
            element = grad.detach()[tuple(number * _STRIDE % size for size in grad.shape)]
            if is_asynchronous(grad.device):
                self._copies.append((name, HostCopy(element)))
            else:
                sampled[name] = str(element.item())
        return sampled
