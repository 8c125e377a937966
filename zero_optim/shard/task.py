"""The callbacks of one call of `Engine.on`: the engine decides when, a task how."""

from collections import deque
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from zero_optim.flow.pending import Pending
from zero_optim.health.stamp import Header
from zero_optim.shard.bucket import Bucket, Values


class Task:
    """How each operation is done that a row may have at a moment."""

    failure: BaseException | None = None  # of this rank; raised when the others have heard of it
    header: Header | None = None  # goes with the next gather
    awaited: deque[Pending[None]] | None = None  # gathers that this call itself waits for, in order
    span: AbstractContextManager[object] = nullcontext()  # measures gathers and waits

    def reduce(self, bucket: Any) -> None:  # noqa: ANN401 - a bucket of gradients
        """Start the reduction of a bucket of gradients."""
        raise NotImplementedError

    def step(self, buckets: Sequence[Bucket[Values]]) -> None:
        """Step what this rank owns in some buckets; keeps what fails in `failure`."""
        raise NotImplementedError

    def to_gather(self, buckets: Sequence[Bucket[Values]]) -> Sequence[Bucket[Values]]:
        """Choose those that are gathered."""
        return buckets

    def gather(self, bucket: Bucket[Any]) -> Pending[None]:
        """Start the gather of a bucket."""
        raise NotImplementedError

    def start_awaited(self, bucket: Bucket[Any], at_once: int) -> None:
        """Start a gather that this call waits for, beside so many others that take memory."""
        if self.awaited is None:
            self.awaited = deque()
        while bucket.values.nbytes_to_gather and len(self.awaited) >= at_once:
            self.awaited.popleft().wait()
        self.awaited.append(self.gather(bucket))

    def take_header(self) -> Header | None:
        """Return the header for the first gather, None for later ones."""
        header, self.header = self.header, None
        return header

    def arrived(self, buckets: Sequence[Any]) -> None:
        """Look at what has come with the rows that somebody waited for."""

    def end(self) -> None:
        """Compare what ranks have done, after the last operation."""

    def clean_up(self, error: BaseException, buckets: Sequence[Any]) -> None:
        """Clean up after an operation on some buckets that raised."""
