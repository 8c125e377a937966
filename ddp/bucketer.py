"""`ReduceScatterBucketer`: collects small reduce-scatters, and sends them together.

The interface is FairScale's. Reductions of gradients do not use it: their buckets are collections already.
Inputs stay the caller's, so they are not summed in place. With NCCL it sends on its own process group.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor

from zero_optim.comm.collectives import RankGroup
from zero_optim.comm.lanes import Lease, lanes_beside
from zero_optim.comm.row_sum import start_row_sum
from zero_optim.compat.streams import (
    Event,
    Stream,
    current_stream,
    record_use,
    recorded_event,
    wait_for_event,
)
from zero_optim.flow.flow import Flow
from zero_optim.flow.pending import Pending
from zero_optim.plan.slices import Slices

Callback: TypeAlias = Callable[[Tensor], None]


@dataclass(slots=True, eq=False)
class _Bucket:
    """Collected inputs, each with a chunk for every rank."""

    ranks: RankGroup
    lease: Lease
    inputs: list[list[Tensor]] = field(default_factory=list)
    calls: list[tuple[torch.Size, Callback | None]] = field(default_factory=list)  # with this rank's shape
    nbytes: int = 0
    # The last event of each stream on which a call came.
    ready: dict[Stream | None, Event | None] = field(default_factory=dict)

    def add(self, chunks: Sequence[Tensor], nbytes: int, callback: Callback | None) -> None:
        self.inputs.append([chunk.detach().reshape(-1) for chunk in chunks])
        device = chunks[0].device
        self.ready[current_stream(device)] = recorded_event(device)
        self.calls.append((chunks[self.ranks.rank].shape, callback))
        self.nbytes += nbytes

    def start_sum(self) -> Pending[Tensor]:
        """Start the sum; inputs are dropped."""
        device, rows = self.inputs[0][0].device, list(zip(*self.inputs, strict=True))
        lengths = tuple(sum(chunk.numel() for chunk in row) for row in rows)
        for event in self.ready.values():
            wait_for_event(device, event)
        chunks, self.inputs = list(chain.from_iterable(rows)), []
        packed = torch.cat(chunks)
        record_use(*chunks)  # perhaps made on other streams, and dropped before this one is here
        return start_row_sum(self.ranks, self.lease.groups, packed, Slices(self.ranks.rank, lengths))


class ReduceScatterBucketer:
    """Sum tensors over ranks so that each rank gets its own chunk; small ones are sent together.

    Every rank makes the same calls, in the same order. Sums are made in the order of ranks, bf16 and fp16 in
    float32 with one rounding, so their bits do not depend on what is sent together. Inputs of one group,
    dtype and device share a bucket of ``bucket_cap_mb`` MiB over all chunks; at 0 or less nothing collects.
    """

    def __init__(self, bucket_cap_mb: float = 25.0) -> None:
        if type(bucket_cap_mb) not in (int, float) or not bucket_cap_mb < float("inf"):
            raise TypeError(f"expected bucket_cap_mb to be a finite number of MiB, got {bucket_cap_mb!r}")
        self._cap_nbytes = int(max(0.0, bucket_cap_mb) * 2**20)
        self._ranks: dict[tuple[dist.ProcessGroup | None, torch.device], tuple[RankGroup, Lease]] = {}
        self._buckets: dict[tuple[dist.ProcessGroup | None, torch.dtype, torch.device], _Bucket] = {}
        self._sent = Flow(2)  # more would hide no more of the network's time, and each one holds a bucket
        self._calls_back = True

    @torch.no_grad()
    def reduce_scatter_async(
        self,
        input_list: Sequence[Tensor],
        group: dist.ProcessGroup | None = None,
        callback_fn: Callback | None = None,
    ) -> None:
        """Sum each chunk over all ranks, and give rank r the sum of chunk r. All ranks of the group call.

        An input that no longer fits into the bucket sends the bucket first. An input larger than a bucket is
        sent at once. The first call with a group makes process groups beside it.

        Args:
            input_list: a chunk for each rank of the group, by rank, of one dtype and device. Chunks may
                differ in shape from each other, but not from rank to rank. Do not change them before the
                callback is called.
            group: the ranks; None for the default group.
            callback_fn: called once with this rank's sum, which it may keep, in the shape of its chunk, by a
                later call of a method here, in the order of sends. On an accelerator the current stream has
                the sum then.

        Raises:
            ValueError: there is not one chunk for each rank.
            TypeError: chunks differ in dtype or device, or are sparse.
        """
        _check(input_list, dist.get_world_size(group))
        device = input_list[0].device
        kind = group, input_list[0].dtype, device
        size = sum(chunk.numel() * chunk.itemsize for chunk in input_list)
        goes_at_once = size > self._cap_nbytes or self._cap_nbytes <= 0
        bucket = None if goes_at_once else self._buckets.get(kind)
        if bucket is not None and bucket.nbytes + size > self._cap_nbytes:
            self._send(self._buckets.pop(kind))
            bucket = None
        if bucket is None:
            if (group, device) not in self._ranks:
                ranks = RankGroup.of(group, device)
                self._ranks[group, device] = ranks, lanes_beside(ranks)
            bucket = _Bucket(*self._ranks[group, device])
        bucket.add(input_list, size, callback_fn)
        if goes_at_once:
            self._send(bucket)
        else:
            self._buckets[kind] = bucket

    @torch.no_grad()
    def flush(self) -> None:
        """Send what has collected, wait for everything sent, and call all callbacks. All ranks call."""
        buckets, self._buckets = self._buckets, {}
        for bucket in buckets.values():
            self._send(bucket)
        while self._sent:
            self._sent.finish_first()

    def teardown(self) -> None:
        """Drop inputs and process groups; wait for earlier sends. Sends and calls back nothing."""
        self._buckets = {}
        self._calls_back = False
        try:
            self._sent.wait()
        finally:
            self._calls_back = True
        self._ranks = {}

    def _send(self, bucket: _Bucket) -> None:
        def answer(totals: Sequence[Tensor]) -> None:
            parts = torch.split(totals[0], [shape.numel() for shape, _ in bucket.calls])
            for (shape, callback), part in zip(bucket.calls, parts, strict=True):
                if callback is not None and self._calls_back:
                    callback(part.view(shape))

        self._sent.start(lambda: Pending([bucket.start_sum()], answer))


def _check(chunks: Sequence[Tensor], size: int) -> None:
    if len(chunks) != size:
        raise ValueError(f"expected a chunk for each of {size} ranks, got {len(chunks)}")
    if any(chunk.layout != torch.strided for chunk in chunks):
        raise TypeError("expected dense chunks, got a sparse one: make it dense first")
    kinds = {f"{chunk.dtype} on {chunk.device}" for chunk in chunks}
    if len(kinds) > 1:
        raise TypeError(f"expected chunks of one dtype and device, got {' and '.join(sorted(kinds))}")
