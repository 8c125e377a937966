"""Storages of gradients: where those of a bucket lie while they come, and what is handed out."""

from collections.abc import Callable, Sequence
from operator import attrgetter, is_
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

from zero_optim.compat import private
from zero_optim.plan.strides import consecutive_views

if TYPE_CHECKING:
    from zero_optim.ddp.reducer.assignment import ReducedParams, ReducerOptions

_grad_of = attrgetter("grad")  # of many, faster than in a comprehension


class BucketGradients:
    """The parameters of a bucket, each in a slot, and their gradients as autograd leaves them.

    Where gradients go to owners, `begin` puts those of earlier passes aside, and new ones leave by `pop`.
    """

    def __init__(self, indices: Sequence[int], reduced: "ReducedParams", options: "ReducerOptions") -> None:
        self.indices = list(indices)
        self.params = params = [reduced.params[index] for index in indices]
        self.names = [reduced.names[index] for index in indices]
        self.is_sparse = reduced.is_sparse(indices[0])  # a sparse gradient is alone
        self.dtype = options.dtype_of(params[0]) or params[0].dtype  # of what is summed
        self.earlier: dict[int, Tensor] = {}  # by slot, gradients that were put aside
        self.reduced: dict[int, Tensor] = {}  # by slot, sums for this rank, until they are handed out
        self._misfits: list[int] = []
        self._taken: set[int] = set()  # slots of gradients that left
        self._is_open = False  # gradients leave: they are of the pass that was begun

    def gradient(self, slot: int) -> Tensor | None:
        """Return a parameter's gradient; note and drop one of the wrong layout."""
        param = self.params[slot]
        if param.grad is not None and param.grad.is_sparse != self.is_sparse:
            self._misfits.append(slot)
            param.grad = None
        return param.grad

    def has_gradient(self, slot: int) -> bool:
        """Whether a parameter has a gradient or had one; hooks are called for undefined ones too."""
        return slot in self._taken or self.params[slot].grad is not None

    def pop_misfits(self) -> list[int]:
        """Return the slots of gradients of the wrong layout that were dropped, once."""
        misfits, self._misfits = self._misfits, []
        return misfits

    def begin(self, unreduced: Sequence[bool]) -> None:
        """Begin a pass: put gradients aside, or autograd adds to them; not ``unreduced`` ones, by index."""
        self.end()
        self._is_open = True
        for slot, (index, param) in enumerate(zip(self.indices, self.params, strict=True)):
            if param.grad is not None and not unreduced[index]:
                self.earlier[slot], param.grad = param.grad, None

    def pop(self, slot: int) -> Tensor | None:
        """Return a parameter's gradient, which leaves it; None if the pass broke off: it is not of that."""
        if not self._is_open:
            return None
        grad = self.gradient(slot)
        self.params[slot].grad = None
        if grad is not None:
            self._taken.add(slot)
        return grad

    def end(self) -> tuple[dict[int, Tensor], dict[int, Tensor]]:
        """End the pass; return the gradients that were put aside and the sums, by slot."""
        ended = self.earlier, self.reduced
        self.earlier, self.reduced, self._taken, self._is_open = {}, {}, set(), False
        return ended

    def give_back(self, *, drops: bool) -> bool:
        """Put earlier gradients back, and ``drops`` the others; return False if the pass had ended."""
        was_open, (earlier, _) = self._is_open, self.end()
        for slot, param in enumerate(self.params if was_open else ()):
            if drops or slot in earlier:
                param.grad = earlier.get(slot)
        return was_open


class GradientStorage(Protocol):
    """Where the gradients of a bucket lie while they come; it hands out what they are reduced to."""

    views: Sequence[Tensor]  # each parameter's place in the flat tensor, if that is whole and dense
    as_views: bool  # gradients become these views
    can_carry_failure_word: bool  # Note [Two ways to tell of a failure] in `report`

    @property
    def flat(self) -> Tensor:
        """What is summed: 1-D, or one sparse gradient; empty where rows are made in each pass."""

    def take(self, slots: Sequence[int], divisor: float) -> None:
        """Copy gradients in, divided, or zeros where there is none."""

    def free(self) -> None:
        """Drop what is needed in a pass alone: its reduction has started, or it is over."""

    def give(self, result: Tensor, skipped: Sequence[bool]) -> None:
        """Make the result the parameters' gradients, except for skipped ones, by index."""


class FlatGradients:
    """Dense gradients in one flat tensor, whole on every rank."""

    def __init__(self, members: BucketGradients, *, as_views: bool, adopt: bool, divides: bool) -> None:
        self._members, params = members, members.params
        self._divides = divides  # neighbours, which are multiplied by the inverse otherwise
        self.as_views = as_views and members.dtype == params[0].dtype
        numel = sum(param.numel() for param in params)
        self.flat = params[0].new_zeros(numel, dtype=members.dtype, requires_grad=False)
        self.views: Sequence[Tensor] = consecutive_views(self.flat, params)
        self.can_carry_failure_word = numel > 0
        for param, view in zip(params, self.views, strict=True) if adopt and self.as_views else ():
            if type(param.grad) is Tensor and not param.grad.is_sparse:  # no partial one
                param.grad = view.copy_(param.grad)

    def take(self, slots: Sequence[int], divisor: float) -> None:
        """Copy gradients in, divided, or zeros where there is none."""
        if len(slots) < 2:
            for slot in slots:
                self._take_one(slot, divisor)
            return
        views = list(map(self.views.__getitem__, slots))
        params = list(map(self._members.params.__getitem__, slots))
        grads = list(map(_grad_of, params))
        if any(map(is_, grads, views)) or not _copied(views, grads):
            for slot in slots:
                self._take_one(slot, divisor)
            return
        if divisor != 1:
            self._divide(slots, divisor)
        if self.as_views:
            for param, view in zip(params, views, strict=True):
                param.grad = view

    def _divide(self, slots: Sequence[int], divisor: float) -> None:
        """Divide, or multiply by the inverse, exactly where PyTorch's reducer does."""
        low, high = min(slots), max(slots)
        if high - low + 1 == len(slots):  # neighbours, in whatever order they came
            start = self.views[low].storage_offset()
            stop = self.views[high].storage_offset() + self.views[high].numel()
            part = self.flat[start:stop]
            if self._divides:
                part.div_(divisor)
            else:
                part.mul_(1 / divisor)
        else:
            private.foreach_mul_([self.views[slot] for slot in slots], 1 / divisor)

    def _take_one(self, slot: int, divisor: float) -> None:
        """Copy one gradient in, divided, or zeros if there is none."""
        grad, view = self._members.gradient(slot), self.views[slot]
        # As PyTorch's reducer does, see `_divide`.
        if grad is None:
            view.zero_()
            return
        if grad is view:
            if divisor != 1:
                view.div_(divisor)
            return
        if divisor == 1:
            view.copy_(grad)
        elif grad.dtype != view.dtype:  # rounded before it is divided, as where many are copied at once
            view.copy_(grad).mul_(1 / divisor)
        else:
            torch.mul(grad, 1 / divisor, out=view)
        if self.as_views:
            self._members.params[slot].grad = view

    def free(self) -> None:
        """Keep the tensor, for the next pass."""

    def give(self, result: Tensor, skipped: Sequence[bool]) -> None:
        """Make the result the parameters' gradients, except for skipped ones, by index."""
        params, views = self._members.params, self.views
        if result is not self.flat and self.as_views:
            self.flat.copy_(result.reshape(-1))
        elif result is not self.flat:
            views = consecutive_views(result.reshape(-1), params)
        grads = list(map(_grad_of, params))
        if self.as_views and all(map(is_, grads, views)):
            return
        if not self.as_views and not any(skipped) and _copied(grads, views):
            return
        targets, sources = [], []
        for index, param, grad, view in zip(self._members.indices, params, grads, views, strict=True):
            if skipped[index] or grad is view:
                continue
            if self.as_views:
                param.grad = view
            elif grad is None:
                param.grad = torch.empty_like(param, requires_grad=False).copy_(view)
            else:
                targets.append(grad)
                sources.append(view)
        if targets:
            private.foreach_copy_(targets, sources)


class SparseGradients:
    """The sparse gradient of one parameter, of which every rank gets the sum."""

    as_views = can_carry_failure_word = False
    views: Sequence[Tensor] = ()

    def __init__(
        self,
        members: BucketGradients,
        gradient_of: Callable[[int], Tensor | None],  # `BucketGradients.gradient` or `BucketGradients.pop`
        shown: Callable[[Tensor, Tensor | None, Tensor], Tensor],  # of parameter, earlier gradient and sum
    ) -> None:
        self._members, self._gradient_of, self._shown = members, gradient_of, shown
        self._own: Tensor | None = None  # of this rank, divided

    @property
    def flat(self) -> Tensor:
        """The gradient; one without elements where there is none."""
        if self._own is not None:
            return self._own
        (param,), dtype = self._members.params, self._members.dtype
        indices = torch.empty(1, 0, dtype=torch.int64, device=param.device)
        values = param.new_empty(0, *param.shape[1:], dtype=dtype)
        return torch.sparse_coo_tensor(indices, values, param.shape, check_invariants=False)

    def take(self, slots: Sequence[int], divisor: float) -> None:
        """Keep the gradient, divided, if there is one."""
        for slot in slots:
            grad = self._gradient_of(slot)
            self._own = None if grad is None else grad.to(self._members.dtype) / divisor

    def free(self) -> None:
        """Drop the gradient."""
        self._own = None

    def give(self, result: Tensor, skipped: Sequence[bool]) -> None:
        """Show the sum as the parameter's gradient, unless it is skipped."""
        (param,), earlier = self._members.params, self._members.end()[0].get(0)
        if not skipped[self._members.indices[0]]:
            param.grad = self._shown(param, earlier, result)
        elif earlier is not None:
            param.grad = earlier


def _copied(targets: Sequence[Tensor | None], sources: Sequence[Tensor | None]) -> bool:
    """Copy each to each, unless one is missing or sparse; some may be copied then."""
    try:
        private.foreach_copy_(targets, sources)
    except (TypeError, RuntimeError):
        return False
    return True
