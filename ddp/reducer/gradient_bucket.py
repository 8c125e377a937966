"""A bucket: gradients that are reduced together. What kind of tensor they lie in is its storage's matter."""

from collections.abc import Callable, Iterable, Sequence
from operator import attrgetter, is_
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

from zero_optim.compat import private, streams
from zero_optim.flow.schedule import ZERO1, Schedule
from zero_optim.plan.groups import bucket_text
from zero_optim.plan.strides import consecutive_views

if TYPE_CHECKING:
    from zero_optim.ddp.reducer.assignment import ReducedParams, ReducerOptions

# Small gradients are copied in batches of about this many bytes: few calls, and each while it still lies in
# the cache. Where they become views of the bucket, the memory they leave is that of the next ones. A large
# one is copied when it comes: copying and dividing it in one go saves more than a call.
BATCH_NBYTES = 2**18
LARGE_NBYTES = 2**15

_grad_of = attrgetter("grad")  # of many, faster than in a comprehension


class Members:
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
        """Put gradients aside: autograd would add to them. ``unreduced``: by index, which ones stay."""
        self.earlier, self._taken, self._is_open = {}, set(), True
        for slot, (index, param) in enumerate(zip(self.indices, self.params, strict=True)):
            if param.grad is not None and not unreduced[index]:
                self.earlier[slot], param.grad = param.grad, None

    def put_aside(self, slot: int, gradient: Tensor) -> None:
        """Put a gradient aside in the place of an earlier one."""
        self.earlier[slot] = gradient

    def pop(self, slot: int) -> Tensor | None:
        """Return a parameter's gradient, which leaves it; None if the pass broke off: it is of another."""
        if not self._is_open:
            return None
        param = self.params[slot]
        grad = param.grad
        if grad is not None and grad.is_sparse != self.is_sparse:
            grad = self.gradient(slot)  # which drops it
        param.grad = None
        if grad is not None:
            self._taken.add(slot)
        return grad

    def end(self) -> dict[int, Tensor]:
        """Return the gradients that were put aside; none leaves any more."""
        earlier, self.earlier, self._taken, self._is_open = self.earlier, {}, set(), False
        return earlier

    def give_back(self, *, drops: bool) -> None:
        """Put earlier gradients back, unless that was done; ``drops`` the others."""
        if not self._is_open:
            return
        earlier = self.end()
        for slot, param in enumerate(self.params):
            if drops or slot in earlier:
                param.grad = earlier.get(slot)


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

    def __init__(self, members: Members, *, as_views: bool, adopt: bool, divides: bool) -> None:
        self._members, params = members, members.params
        self._divides = divides  # many at once, where they are multiplied by the inverse otherwise
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
        grad, view = self._members.params[slot].grad, self.views[slot]
        if grad is not None and grad.is_sparse:
            grad = self._members.gradient(slot)  # which drops it
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
        members: Members,
        gradient_of: Callable[[int], Tensor | None],  # `Members.gradient` or `Members.pop`
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
        (param,), earlier = self._members.params, self._members.end().get(0)
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


class ReducerBucket:
    """Gradients of one dtype, in a storage. Their reduction starts with that of no others."""

    def __init__(
        self,
        members: Members,
        storage: GradientStorage,
        number: int = 0,  # in the order of reduction
        *,
        copies_at_once: bool = False,  # all gradients, whatever their size
        is_last: bool = True,
        schedule: Schedule = ZERO1,  # the row of the table by which the engine runs it
    ) -> None:
        self.members, self.storage = members, storage
        self.indices, self.params = members.indices, members.params
        self.number, self.is_last, self.schedule = number, is_last, schedule
        self.label = bucket_text(number, members.names)
        self.batch_length = len(self.params)  # how many small gradients are copied at a time
        self.large_slots: frozenset[int] = frozenset()
        if not (copies_at_once or members.is_sparse):
            nbytes = [param.nbytes for param in self.params]
            self.large_slots = frozenset(slot for slot, size in enumerate(nbytes) if size >= LARGE_NBYTES)
            small = [size for size in nbytes if size < LARGE_NBYTES]
            self.batch_length = max(1, BATCH_NBYTES * len(small) // max(1, sum(small)))

    @property
    def nbytes(self) -> int:
        """Size of all gradients, dense, in bytes."""
        return sum(param.numel() for param in self.params) * self.members.dtype.itemsize

    def record_use(self, slots: Iterable[int]) -> None:
        """Keep gradients of other streams until the current stream has read them."""
        grads = [self.params[slot].grad for slot in slots]
        streams.record_use(*[grad for grad in grads if grad is not None])

    def free(self) -> None:
        """Let go of memory, as a row of the table says; the engine calls."""
        self.storage.free()


class GradBucket:
    """The argument of a comm hook: the methods of ``torch.distributed.GradBucket``."""

    __slots__ = ("_bucket", "_buffer", "all_used", "is_divided")

    def __init__(self, bucket: ReducerBucket, *, all_used: bool = False, is_divided: bool = False) -> None:
        self._bucket = bucket
        self._buffer = bucket.storage.flat
        self.all_used = all_used  # for our own hooks: some rank has used each parameter
        self.is_divided = is_divided  # likewise: gradients are divided by the number of ranks

    def index(self) -> int:
        """Place in the order of reduction."""
        return self._bucket.number

    def buffer(self) -> Tensor:
        """All gradients in one tensor: 1-D, or one sparse gradient. Not divided by the number of ranks."""
        return self._buffer

    def set_buffer(self, tensor: Tensor) -> None:
        """Replace the buffer, for example by a copy in a narrower dtype."""
        self._buffer = tensor

    def gradients(self) -> list[Tensor]:
        """Views of the buffer, one per parameter; RuntimeError if the buffer set has another length."""
        if self._bucket.members.is_sparse:
            return [self._buffer]
        storage = self._bucket.storage
        if self._buffer is storage.flat:
            return list(storage.views)
        if self._buffer.numel() != storage.flat.numel():
            raise RuntimeError(
                f"the buffer of bucket {self.index()} was replaced by one of {self._buffer.numel()} "
                f"elements: it cannot be viewed as gradients of {storage.flat.numel()} elements"
            )
        return consecutive_views(self._buffer, self._bucket.params)

    def parameters(self) -> list[Tensor]:
        """The parameters of these gradients, in the same order."""
        return list(self._bucket.params)

    def is_last(self) -> bool:
        """Whether this is the last bucket of the backward pass."""
        return self._bucket.is_last
