"""A bucket: gradients that are reduced together, in one flat tensor."""

from collections.abc import Iterable, Sequence
from operator import attrgetter, is_
from typing import TYPE_CHECKING

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


class ReducerBucket:
    """Gradients in one flat tensor, whole on every rank; a sparse one is alone, and is that tensor."""

    def __init__(
        self,
        indices: Sequence[int],
        reduced: "ReducedParams",
        options: "ReducerOptions",
        number: int = 0,  # in the order of reduction
        *,
        is_last: bool = True,
        schedule: Schedule = ZERO1,  # the row of the table by which the engine runs it
    ) -> None:
        self.indices, self._reduced, self._options = list(indices), reduced, options
        self.number, self.is_last, self.schedule = number, is_last, schedule
        self.params = params = [reduced.params[index] for index in indices]
        self.label = bucket_text(number, [reduced.names[index] for index in indices])
        self.is_sparse = is_sparse = reduced.is_sparse(indices[0])
        self.dtype = dtype = options.dtype_of(params[0]) or params[0].dtype
        self.as_views = options.gradient_as_bucket_view and not is_sparse and dtype == params[0].dtype
        self.pending: list[int] = []  # slots of gradients that have come and were not copied yet
        self.batch_length = len(params)  # how many small gradients are copied at a time
        self.large_slots: frozenset[int] = frozenset()
        if not (options.batched_grad_copy or is_sparse):
            nbytes = [param.nbytes for param in params]
            self.large_slots = frozenset(slot for slot, size in enumerate(nbytes) if size >= LARGE_NBYTES)
            small = [size for size in nbytes if size < LARGE_NBYTES]
            self.batch_length = max(1, BATCH_NBYTES * len(small) // max(1, sum(small)))
        self._misfits: list[int] = []
        self.views: list[Tensor] = []  # each parameter's place in the flat tensor; none if sparse
        self.flat = _no_gradient(params[0], dtype) if is_sparse else self._allocate(dtype)
        self.can_carry_failure_word = not is_sparse and self.flat.numel() > 0  # see `write_failure_word`

    def _allocate(self, dtype: torch.dtype) -> Tensor:
        numel = sum(param.numel() for param in self.params)
        flat = self.params[0].new_zeros(numel, dtype=dtype, requires_grad=False)
        self.views = consecutive_views(flat, self.params)
        return flat

    def shadow(self) -> "ReducerBucket":
        """Return a bucket of zeros, for a pass without gradients of this rank."""
        place = self._reduced, self._options, self.number
        return ReducerBucket(self.indices, *place, is_last=self.is_last, schedule=self.schedule)

    @property
    def nbytes(self) -> int:
        """Size of all gradients, dense, in bytes."""
        return sum(param.numel() for param in self.params) * self.dtype.itemsize

    def write_failure_word(self) -> None:
        """Make the first element NaN, and so the sum of all ranks: Note [Two ways to tell of a failure]."""
        self.flat[:1].fill_(float("nan"))

    def has_gradient(self, slot: int) -> bool:
        """Whether a parameter has a gradient; hooks are called for undefined ones too."""
        return self.params[slot].grad is not None

    def is_inside(self, slot: int) -> bool:
        """Whether a parameter's gradient is its view of this bucket."""
        return self.as_views and self.params[slot].grad is self.views[slot]

    def adopt(self) -> None:
        """Make existing gradients views of this bucket, with ``as_views``."""
        for param, view in zip(self.params, self.views, strict=True) if self.as_views else ():
            if type(param.grad) is Tensor and not param.grad.is_sparse:  # no partial one
                param.grad = view.copy_(param.grad)

    # ------------------------------------------------------------------ gradients come

    def take_pending(self, divisor: float) -> None:
        """Copy gradients that have come since, divided."""
        slots, self.pending = self.pending, []
        self.take(slots, divisor)

    def pop_misfits(self) -> list[int]:
        """Return the slots of gradients of the wrong layout that were dropped, once."""
        misfits, self._misfits = self._misfits, []
        return misfits

    def record_use(self, slots: Iterable[int]) -> None:
        """Keep gradients of other streams until the current stream has read them."""
        grads = [self.params[slot].grad for slot in slots]
        streams.record_use(*[grad for grad in grads if grad is not None])

    def take(self, slots: Sequence[int], divisor: float) -> None:
        """Copy gradients in, divided, or zeros where there is none."""
        if len(slots) < 2:
            for slot in slots:
                self.take_one(slot, divisor)
            return
        views = list(map(self.views.__getitem__, slots))
        params = list(map(self.params.__getitem__, slots))
        grads = list(map(_grad_of, params))
        if any(map(is_, grads, views)) or not _copied(views, grads):
            for slot in slots:
                self.take_one(slot, divisor)
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
            if self._options.batched_grad_copy:
                part.div_(divisor)
            else:
                part.mul_(1 / divisor)
        else:
            private.foreach_mul_([self.views[slot] for slot in slots], 1 / divisor)

    def take_one(self, slot: int, divisor: float) -> None:
        """Copy one gradient in, divided, or zeros if there is none."""
        grad = self._take_gradient(slot)
        if self.is_sparse:
            dtype = self.dtype
            self.flat = _no_gradient(self.params[0], dtype) if grad is None else grad.to(dtype) / divisor
            return
        view = self.views[slot]
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
            self.params[slot].grad = view

    def _take_gradient(self, slot: int) -> Tensor | None:
        """Return a parameter's gradient; note and drop one of the wrong layout."""
        param = self.params[slot]
        if param.grad is not None and param.grad.is_sparse != self.is_sparse:
            self._misfits.append(slot)
            param.grad = None
        return param.grad

    # ------------------------------------------------------------------ results go

    def give_back(self, *, drops: bool) -> None:
        """Put gradients of earlier passes back; ``drops`` the others. Does nothing here."""

    def give(self, result: Tensor, skipped: Sequence[bool]) -> None:
        """Make the result the parameters' gradients, except for skipped ones, by index."""
        if self.is_sparse:
            if not skipped[self.indices[0]]:
                self.params[0].grad = result.to(self.params[0].dtype)
            return
        views = self.views
        if result is not self.flat and self.as_views:
            self.flat.copy_(result.reshape(-1))
        elif result is not self.flat:
            views = consecutive_views(result.reshape(-1), self.params)
        grads = list(map(_grad_of, self.params))
        if self.as_views and all(map(is_, grads, views)):
            return
        if not self.as_views and not any(skipped) and _copied(grads, views):
            return
        targets, sources = [], []
        for index, param, grad, view in zip(self.indices, self.params, grads, views, strict=True):
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


def _no_gradient(param: Tensor, dtype: torch.dtype) -> Tensor:
    indices = torch.empty(1, 0, dtype=torch.int64, device=param.device)
    values = param.new_empty(0, *param.shape[1:], dtype=dtype)
    return torch.sparse_coo_tensor(indices, values, param.shape, check_invariants=False)


def _copied(targets: Sequence[Tensor | None], sources: Sequence[Tensor | None]) -> bool:
    """Copy each to each, unless one is missing or sparse; some may be copied then."""
    try:
        private.foreach_copy_(targets, sources)
    except (TypeError, RuntimeError):
        return False
    return True


class GradBucket:
    """The argument of a comm hook: the methods of ``torch.distributed.GradBucket``."""

    __slots__ = ("_bucket", "_buffer", "all_used", "is_divided")

    def __init__(self, bucket: ReducerBucket, *, all_used: bool = False, is_divided: bool = False) -> None:
        self._bucket = bucket
        self._buffer = bucket.flat
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
        if self._bucket.is_sparse:
            return [self._buffer]
        if self._buffer is self._bucket.flat:
            return list(self._bucket.views)
        if self._buffer.numel() != self._bucket.flat.numel():
            raise RuntimeError(
                f"the buffer of bucket {self.index()} was replaced by one of {self._buffer.numel()} "
                f"elements: it cannot be viewed as gradients of {self._bucket.flat.numel()} elements"
            )
        return consecutive_views(self._buffer, self._bucket.params)

    def parameters(self) -> list[Tensor]:
        """The parameters of these gradients, in the same order."""
        return list(self._bucket.params)

    def is_last(self) -> bool:
        """Whether this is the last bucket of the backward pass."""
        return self._bucket.is_last
