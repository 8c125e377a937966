"""Transfers of several messages: between two ranks, between all pairs, gathers of slices, in two levels.

Note [gloo and CUDA]
    gloo's collectives copy CUDA tensors to the host; its `isend` and `irecv` take the pointer for host
    memory. So gloo exchanges CUDA tensors by an all-to-all; `send` and `recv` go through the CPU.

Note [Two ranks of many]
    For a single send NCCL makes a communicator of two ranks, of some hundred MiB, which stays. Sends started
    as one use the group's communicator, which all ranks make in the group's first call: that must be no send.

Note [Two levels]
    Of H hosts with L ranks each, an all-to-all of all ranks sends an element L times over a host's card, and
    a ring up to twice. So sums go inside a host, then across, in the order of `SeveralHosts`, which does so
    on gloo; gathers go back. A card sends (H-1)/H of a bucket for each. All stages follow each other on one
    extra stream: nobody waits between them, and no two of their communicators are in use at once. Through
    sockets gloo has no stream, and each wait would hold up the backward pass: there all ranks send to all.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache, partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from zero_optim.comm.collectives import RankGroup
from zero_optim.comm.unended import SMALL, Paired
from zero_optim.comm.works import Work
from zero_optim.compat.autograd import start_as_one
from zero_optim.compat.streams import HostCopy, StreamBeside
from zero_optim.flow.pending import AfterEvent, Waitable
from zero_optim.plan.slices import Slices, stripes_of

Lanes = Sequence[RankGroup]
Row = tuple[int, Tensor]  # 1-D, contiguous, and who sends it, or to whom it goes
_PARTS = 2**30  # tags of parts
_OF_HEADS = _PARTS + 1  # the tag of heads


class Levels(NamedTuple):
    """Groups of some ranks of a group: those of this host, and those of this rank's number on all hosts."""

    inside: RankGroup
    across: RankGroup
    stream: StreamBeside

    @contextmanager
    def starting(self, group: RankGroup, about: str, flat: Tensor) -> Iterator[Work]:
        """Start collectives of a bucket on the extra stream, as one work of all ranks: Note [Two levels]."""
        with group.begin_work(about, flat.device) as work, self.stream.behind(flat.device):
            yield work
            work.take(AfterEvent(flat.device))


def exchange(
    lanes: Lanes,
    sent: Tensor,
    sizes: Sequence[int],  # what each rank gets of it
    received: Tensor,
    came: Sequence[int],  # what comes of each rank
    tag: int = 0,
    about: str = "",
) -> Waitable:
    """Start an all-to-all of parts of one 1-D tensor, which must not change until the wait; all ranks call.

    Where sends go in pairs this rank's own part may stay where it is, with a length of 0 in ``came``, and
    exchanges with different tags may start in any order. ``lanes``: groups of the same ranks, one a sender,
    as one gloo group is not reliably full duplex.
    """
    lane, device, size, rank = lanes[0], sent.device, sent.element_size(), lanes[0].rank
    with lane.begin_work(about, device) as work:
        if lane.transport(device).sends_pairs:
            parts, arrivals = torch.split(sent, list(sizes)), torch.split(received, list(came))
            if came[rank]:
                arrivals[rank].copy_(parts[rank])
            others = [other for other in range(lane.size) if other != rank]
            sends, receives = ([(other, of[other]) for other in others] for of in (parts, arrivals))
            handle: Waitable = _start_paired(lanes, sends, receives, tag)
        else:
            handle = start_all_to_all(lane, sent, sizes, received, came)
        work.take(handle)
    lane.phase.sent(size * (sum(sizes) - sizes[rank]))
    return work


def start_all_to_all(
    group: RankGroup, sent: Tensor, sizes: Sequence[int], received: Tensor, came: Sequence[int]
) -> dist.Work:
    """Start an all-to-all in one call, for a `Work` of the caller; arguments as of `exchange`."""
    there, back = (_in_bytes(tuple(lengths), sent.element_size()) for lengths in (sizes, came))
    into, parcel = received.view(torch.uint8), sent.view(torch.uint8)  # no backend knows every dtype
    started: dist.Work | None = dist.all_to_all_single(
        into, parcel, back, there, group=group.process_group, async_op=True
    )
    assert started is not None  # async_op=True on a member always returns a handle
    return started


@lru_cache(2**10)  # some of each bucket, with a number a rank
def _in_bytes(lengths: tuple[int, ...], size: int) -> list[int]:
    in_bytes = {length: length * size for length in lengths}  # nearly all are equal: one object for these
    return [in_bytes[length] for length in lengths]


def gather_heads(lanes: Lanes, heads: Tensor, about: str) -> list[Waitable]:
    """Start to gather a short row of each rank by sends where an all-gather is slower, else nothing.

    So it is on gloo through sockets: 20 to 50 us on two ranks, where an all-gather takes 130.
    """
    group, device = lanes[0], heads.device
    if group.shared_memory(device) is not None or not group.transport(device).waits_on_host:
        return []
    return [spread_rows(lanes, list(enumerate(heads.unbind())), _OF_HEADS, about)]


def gather_slices(
    group: RankGroup,
    flat: Tensor,
    rows: Slices,
    about: str = "",
    heads: tuple[Tensor, Tensor] | None = None,  # as of `broadcast_rows`
    own: Tensor | None = None,  # this rank's row, if it is not in ``flat``
) -> list[Waitable]:
    """Start to bring the rows of a flat tensor, in place, to all ranks.

    One all-gather of the slices, behind an all-to-all from rows to slices if these differ. Note [Two levels].
    """
    own = rows.row(flat) if own is None else own
    if (levels := group.levels(flat.device)) is not None:
        headers = [] if heads is None else group.gather_slices([heads], about)
        return [*headers, _gather_by_hosts(group, levels, flat, rows, own, about)]
    mine, before = own, list[Waitable]()
    if not rows.is_even:
        mine, (in_rows, in_slices) = flat.new_empty(rows.slice), rows.splits
        before = [exchange([group], own, in_slices, mine[: sum(in_rows)], in_rows, about=about)]
        if group.transport(flat.device).late_on is None:  # else a stream runs both in this order
            before.pop().wait()
    slices = [] if heads is None else [heads]
    slices.append((flat.view(torch.uint8), mine.view(torch.uint8)))
    return [*before, *group.gather_slices(slices, about)]


def _gather_by_hosts(
    group: RankGroup, levels: Levels, flat: Tensor, rows: Slices, row: Tensor, about: str
) -> Waitable:
    """Start a gather of rows in place, across hosts first: Note [Two levels]."""
    inside, across, stripes = levels.inside, levels.across, stripes_of(rows, levels.inside.size)
    (in_rows, in_slices), device = stripes.splits, flat.device
    with levels.starting(group, about, flat) as work:
        whole = flat.new_empty(inside.size * sum(stripes.lengths))
        stripe = whole.view(inside.size, sum(stripes.lengths))[inside.rank]
        by_host = torch.split(stripe, stripes.lengths)
        mine = by_host[across.rank]
        if stripes.is_direct:
            mine[: in_slices[group.rank]].copy_(row)
        else:
            start_all_to_all(group, row, in_slices, mine[: sum(in_rows)], in_rows).wait()
        octets, own, every = (each.view(torch.uint8) for each in (stripe, mine, whole))
        is_even, filled = len({*stripes.lengths}) == 1, [each for each in enumerate(by_host) if len(each[1])]
        for call in across.start(device, *(([(octets, own)], ()) if is_even else ((), filled))):
            call.wait()
        for call in inside.start(device, [(every, octets)], ()):
            call.wait()
        stripes.unpack(whole, flat)
    nbytes = flat.element_size() * (sum(in_slices) - in_slices[group.rank])
    nbytes += (across.size - 1) * own.nbytes + (inside.size - 1) * octets.nbytes
    group.phase.sent(nbytes, stripes.num_collectives)
    return work


def next_tag(lane: RankGroup) -> int:
    """Return a tag for an exchange that another thread may start later; all ranks call in one order."""
    return 1 + next(lane.works.tags) % _PARTS


def spread_rows(lanes: Lanes, rows: Sequence[Row], tag: int, about: str) -> Waitable:
    """Start to send owners' rows in pairs; those with other tags, perhaps of other lengths, never meet."""
    group = lanes[0]
    others = [rank for rank in range(group.size) if rank != group.rank]
    sends = [(rank, row) for owner, row in rows if owner == group.rank for rank in others]
    receives = [(owner, row) for owner, row in rows if owner != group.rank]
    with group.begin_work(about, rows[0][1].device) as work:
        work.take(_start_paired(lanes, sends, receives, tag))
    group.phase.sent(sum(row.nbytes for _, row in sends), 1 if tag == _OF_HEADS else len(rows))
    return work


def send(group: RankGroup, tensor: Tensor, *to: int) -> None:
    """Send a contiguous tensor to ranks that call `recv`; waits until they have read it."""
    staged = tensor.to(group.device)
    with group.begin_work("", staged.device) as work:
        sends = [partial(_start, dist.isend, group, staged, group_dst=rank) for rank in to]
        handles = start_as_one(group.process_group, staged.device, sends)
        on_host = group.transport(staged.device).waits_on_host
        work.take(*([Paired(handles)] if on_host else handles))
    group.phase.sent(staged.nbytes * len(handles), len(handles))
    work.wait()


def recv(group: RankGroup, tensor: Tensor, source: int) -> None:
    """Receive into a contiguous tensor from ``source``; on an accelerator the stream waits."""
    staged = tensor if tensor.device == group.device else torch.empty_like(tensor, device=group.device)
    with group.phase, group.begin_work():
        receive = partial(_start, dist.irecv, group, staged, group_src=source)
        for work in start_as_one(group.process_group, staged.device, [receive]):
            work.wait()
    if staged is not tensor:
        tensor.copy_(group.read(HostCopy(staged)) if tensor.device.type == "cpu" else staged)


def _start_paired(lanes: Lanes, sends: Iterable[Row], receives: Iterable[Row], tag: int) -> Paired:
    """Start sends and receives, on the lanes of the senders; they count as one collective."""
    group, sends = lanes[0], list(sends)
    for lane in lanes[: group.size]:
        lane.works.apart -= 1
    lane = lanes[group.rank % len(lanes)]
    sent = [_start(dist.isend, lane, tensor, tag, group_dst=rank) for rank, tensor in sends]
    arrivals = [
        _start(dist.irecv, lanes[rank % len(lanes)], tensor, tag, group_src=rank) for rank, tensor in receives
    ]
    return Paired(sent, arrivals, is_small=all(tensor.nbytes <= SMALL for _, tensor in sends))


def _start(call: Callable[..., Any], group: RankGroup, tensor: Tensor, tag: int = 0, **peer: int) -> Any:  # noqa: ANN401
    group.works.apart += 1
    return call(tensor, group=group.process_group, tag=tag, **peer)
