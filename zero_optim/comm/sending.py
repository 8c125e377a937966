"""Messages between two ranks, and exchanges between all pairs.

Note [gloo and CUDA]
    gloo's collectives copy CUDA tensors to the host; its `isend` and `irecv` take the pointer for host
    memory. So gloo exchanges CUDA tensors by an all-to-all of one tensor of bytes; `send` and `recv` go
    through the CPU.

Note [Two ranks of many]
    For a single send NCCL makes a communicator of two ranks, of some hundred MiB, which stays. Sends started
    as one use the group's communicator, which all ranks make in the group's first call: that must be no send.
"""

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from itertools import zip_longest

import torch
import torch.distributed as dist
from torch import Tensor

from zero_optim.comm.collectives import RankGroup
from zero_optim.comm.unended import SMALL, Paired
from zero_optim.compat.autograd import coalesced, coalesces
from zero_optim.compat.streams import HostCopy, recorded_event
from zero_optim.flow.pending import AfterEvent, Pending, Waitable

Lanes = Sequence[RankGroup]
Row = tuple[int, Tensor]  # 1-D, contiguous, and who sends it
_PARTS = 2**30  # tags of parts
_OF_HEADS = _PARTS + 1  # the tag of heads


def exchange(
    group: RankGroup,
    pieces: Sequence[Tensor],
    lanes: Lanes,
    about: str = "",
    received: Sequence[Tensor] | None = None,
) -> Pending[list[Tensor]]:
    """Start sending one piece to each rank; the value is the received pieces, by rank. All ranks call.

    ``pieces``: 1-D, contiguous, one dtype, the own one is not copied, and none may change until the wait.
    ``received``: memory for them, without which pieces for one receiver have equal lengths.
    ``lanes``: groups of the same ranks, one a sender, as one gloo group is not reliably full duplex.
    """
    mine = pieces[group.rank]
    into = [torch.empty_like(mine) for _ in pieces] if received is None else list(received)
    into[group.rank] = mine
    if group.size == 1:  # nothing is sent, and no handle orders the stream that waits behind this one
        made = AfterEvent(mine.device, recorded_event(mine.device))
        return Pending([made], lambda _: into, into)
    lane = replace(lanes[0], phase=group.phase)  # it counts for whoever exchanges
    memory = lane.one_host(mine.device)
    work = lane.begin_work(about, mine.device)
    how = lane.transport(mine.device).exchanges
    handle: Waitable
    with work.starting():
        if memory is not None:
            handle = memory.exchange(pieces, into)
        elif how == "pairs":
            _count_as_one(group, lanes)
            others = [rank for rank in range(group.size) if rank != group.rank]
            sends, receives = ([(rank, of_rank[rank]) for rank in others] for of_rank in (pieces, into))
            handle = _start_paired(group, sends, receives, lanes)
        else:
            handle, into = _all_to_all(pieces, into, lane, as_bytes=how == "bytes")
    group.phase.sent(sum(piece.nbytes for rank, piece in enumerate(pieces) if rank != group.rank))
    return Pending([work.take(handle)], lambda _: into, (*pieces, *into))


def _all_to_all(
    pieces: Sequence[Tensor], received: list[Tensor], lane: RankGroup, *, as_bytes: bool
) -> tuple[dist.Work, list[Tensor]]:
    own, rank, process_group = pieces[lane.rank], lane.rank, lane.process_group
    sent, into = ([*of[:rank], own[:0], *of[rank + 1 :]] for of in (pieces, received))
    if as_bytes:  # Note [gloo and CUDA]
        packed = torch.cat(sent).view(torch.uint8)
        arrivals = torch.empty(sum(part.nbytes for part in into), dtype=torch.uint8, device=own.device)
        there, back = ([part.nbytes for part in parts] for parts in (sent, into))
        work = dist.all_to_all_single(arrivals, packed, back, there, group=process_group, async_op=True)
        arrived = torch.split(arrivals.view(own.dtype), [part.numel() for part in into])
        received = [*arrived[:rank], own, *arrived[rank + 1 :]]
    else:
        work = dist.all_to_all(into, sent, group=process_group, async_op=True)
    assert isinstance(work, dist.Work)  # async_op=True on a member always returns a handle
    return work, received


def start_parts(
    group: RankGroup, parts: Sequence[Sequence[Tensor]], lanes: Lanes, about: str = ""
) -> tuple[Waitable, Callable[[Tensor], Pending[list[Tensor]]]]:
    """Start sending parts to each rank; returns that handle, and what receives the next parts."""
    lane, device = replace(lanes[0], phase=group.phase), parts[group.rank][0].device
    work = lane.begin_work(about, device)
    tag = 1 + next(lane.works.tags) % _PARTS  # as parts of another exchange may be received in between
    _count_as_one(group, lanes)
    rounds = (list(enumerate(some)) for some in zip_longest(*parts))
    sends = [
        (rank, part) for some in rounds for rank, part in some if rank != group.rank and part is not None
    ]
    with work.starting():
        work.take(_start_paired(group, sends, (), lanes, tag))
    group.phase.sent(sum(part.nbytes for _, part in sends))

    def receive(own: Tensor) -> Pending[list[Tensor]]:
        into = [own if rank == group.rank else torch.empty_like(own) for rank in range(group.size)]
        others = ((rank, part) for rank, part in enumerate(into) if rank != group.rank)
        coming = lane.begin_work(about, device)
        with coming.starting():
            coming.take(_start_paired(group, (), others, lanes, tag))
        return Pending([coming], lambda _: into)

    return work, receive


def spread_rows(
    lanes: Lanes, heads: Sequence[Row], rows: Sequence[Row], tag: int, about: str = ""
) -> list[Waitable]:
    """As `RankGroup.broadcast_rows`, among several ranks on gloo, behind a head of each, all of one length.

    The first work brings the heads. Rows whose tags differ, perhaps in length, never meet: that work leaves
    them out, or no later one ends.
    """
    group, device = lanes[0], (*rows, *heads)[0][1].device
    memory = group.shared_memory(device)
    if memory is None:
        return [_spread(lanes, *each, about) for each in ((heads, _OF_HEADS), (rows, tag)) if each[0]]
    work = group.begin_work(about, device)
    with work.starting():
        call = memory.spread_rows([*heads, *rows], tag)
    group.phase.sent(call.nbytes, len(heads) + len(rows))
    return [work.take(call)]


def _spread(lanes: Lanes, rows: Sequence[Row], tag: int, about: str) -> Waitable:
    group = lanes[0]
    work = group.begin_work(about, rows[0][1].device)
    others = [rank for rank in range(group.size) if rank != group.rank]
    sends = [(rank, row) for owner, row in rows if owner == group.rank for rank in others]
    receives = [(owner, row) for owner, row in rows if owner != group.rank]
    _count_as_one(group, lanes)
    with work.starting():
        work.take(_start_paired(group, sends, receives, lanes, tag))
    group.phase.sent(sum(row.nbytes for _, row in sends), len(rows))
    return work


def send(group: RankGroup, tensor: Tensor, *to: int) -> None:
    """Send a contiguous tensor to ranks that call `recv`; waits until they have read it."""
    staged = tensor.to(group.device)
    work = group.begin_work("", staged.device)
    with work.starting(), _at_once(group, staged.device) as started:
        each = _started([_isend(group, staged, rank) for rank in to])
    handles = started or each
    group.phase.sent(staged.nbytes * len(handles), len(handles))
    on_host = group.transport(staged.device).waits_on_host
    work.take(*([Paired(handles)] if on_host else handles)).wait()


def recv(group: RankGroup, tensor: Tensor, source: int) -> None:
    """Receive into a contiguous tensor from ``source``; on an accelerator the stream waits."""
    staged = tensor if tensor.device == group.device else torch.empty_like(tensor, device=group.device)
    with group.phase.held_up(), group.begin_work().waiting():
        with _at_once(group, staged.device) as started:
            each = _started([_irecv(group, staged, source)])
        for work in started or each:
            work.wait()
    if staged is not tensor:
        tensor.copy_(group.read(HostCopy(staged)) if tensor.device.type == "cpu" else staged)


def _start_paired(
    group: RankGroup,
    sends: Iterable[tuple[int, Tensor]],
    receives: Iterable[tuple[int, Tensor]],
    lanes: Lanes,
    tag: int = 0,
) -> Paired:
    """Start sends and receives, on the lanes of the senders."""
    lane, sends = lanes[group.rank % len(lanes)], list(sends)
    sent = _started([_isend(lane, tensor, rank, tag) for rank, tensor in sends])
    arrivals = _started([_irecv(lanes[rank % len(lanes)], tensor, rank, tag) for rank, tensor in receives])
    return Paired(sent, arrivals, is_small=all(tensor.nbytes <= SMALL for _, tensor in sends))


def _count_as_one(group: RankGroup, lanes: Lanes) -> None:
    for lane in lanes[: group.size]:
        lane.works.apart -= 1


def _at_once(group: RankGroup, device: torch.device) -> AbstractContextManager[list[dist.Work]]:
    if coalesces(group.process_group, device):
        return coalesced(group.process_group, device)
    return nullcontext([])


def _isend(group: RankGroup, tensor: Tensor, to: int, tag: int = 0) -> dist.Work | None:
    group.works.apart += 1
    return dist.isend(tensor, group=group.process_group, tag=tag, group_dst=to)


def _irecv(group: RankGroup, tensor: Tensor, source: int, tag: int = 0) -> dist.Work | None:
    group.works.apart += 1
    return dist.irecv(tensor, group=group.process_group, tag=tag, group_src=source)


def _started(works: Iterable[dist.Work | None]) -> list[dist.Work]:
    return [work for work in works if work is not None]
