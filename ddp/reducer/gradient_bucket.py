"""A bucket: gradients that are reduced together, in a storage that says where they lie."""

from collections.abc import Iterable

from torch import Tensor

from zero_optim.compat import streams
from zero_optim.ddp.reducer.gradient_storage import BucketGradients, GradientStorage
from zero_optim.flow.schedule import ZERO1, Schedule
from zero_optim.plan.groups import bucket_text
from zero_optim.plan.strides import consecutive_views

# Small gradients are copied in batches of about this many bytes: few calls, and each while it still lies in
# the cache. Where they become views of the bucket, the memory they leave is that of the next ones. A large
# one is copied when it comes: copying and dividing it in one go saves more than a call.
BATCH_NBYTES = 2**18
LARGE_NBYTES = 2**15


class ReducerBucket:
    """Gradients of one dtype that are reduced together. Does not communicate."""

    def __init__(
        self,
        members: BucketGradients,
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
