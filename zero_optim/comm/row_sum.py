"""Sums of rows: of a bucket on every rank, which has a row for each, rank r receives the sum of all rows r.

An all-to-all, and additions in the order of ranks, so bits do not depend on the backend and rows may have any
lengths. With two gloo ranks it takes a third of a reduce-scatter's time over loopback.

Note [Sums of slices]
    An owner of most rows would hold them W - 1 times. So where an owner would receive more than the bucket,
    each rank sums an equal slice of it, and a second all-to-all brings the sums to their owners. Whatever is
    whole, there are at most two collectives, and a rank receives at most the bucket and its own row.

Note [Sums of 16 bits]
    W additions in sequence lose small terms: of equal gradients, 0.03 at 64 ranks, 0.63 at 1,024. So bf16 and
    fp16 are added in float32 and rounded once; for two ranks the bits are the same without.

Note [One launch for all ranks]
    What comes by one collective lies in one tensor. A bag of embeddings is summed in the order of its
    indices, in float32, in one launch however many ranks there are. An embedding is a window of a row; the
    last one reaches into what lies behind. With a padding index PyTorch avoids a kernel for CPUs that rounds
    bf16 otherwise. Proven on a CPU for 1,024 ranks, read in PyTorch's code for CUDA; elsewhere, and of other
    dtypes, ranks are added one by one. A sum of negative zeros alone is +0 in a bag.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import lru_cache

import torch
from torch import Tensor
from torch.nn.functional import embedding_bag

from zero_optim.comm.collectives import RankGroup
from zero_optim.comm.sending import Lanes, Levels, exchange, next_tag, start_all_to_all
from zero_optim.compat.streams import Stream, current_stream, is_asynchronous
from zero_optim.flow.pending import AfterEvent, Pending
from zero_optim.plan.slices import UNIT, Slices, stripes_of

_ADDED_AT_ONCE = 2**20  # elements that are added in float32
_WIDTH = 1024  # elements of the widest window, and of what lies behind all rows
_IN_BAGS = {torch.float32, torch.bfloat16, torch.float16}

Bring = Callable[[Tensor], Pending[Tensor]]  # takes the sum of a slice, and has that of a row


class ReceiveBuffer:
    """Memory for what comes, kept from one sum to the next where that saves time: not beside streams."""

    def __init__(self) -> None:
        self._memory: Tensor | None = None

    def of(self, numel: int, like: Tensor) -> Tensor:
        """Return uninitialized memory, which the next call may return too."""
        if is_asynchronous(like.device):  # whose allocator keeps memory, for each stream
            return like.new_empty(numel)
        nbytes = numel * like.element_size()
        if self._memory is None or self._memory.numel() < nbytes:
            self._memory = torch.empty(nbytes, dtype=torch.uint8, device=like.device)
        return self._memory[:nbytes].view(like.dtype)


def start_row_sum(group: RankGroup, lanes: Lanes, flat: Tensor, rows: Slices) -> Pending[Tensor]:
    """Start `start_in_stages`; the first wait is for all stages."""
    first, bring = start_in_stages(group, lanes, flat, rows)
    return first if bring is None else Pending([first], lambda sums: bring(sums[0]).wait())


def start_in_stages(
    group: RankGroup,
    lanes: Lanes,
    flat: Tensor,
    rows: Slices,
    received: ReceiveBuffer | None = None,
    about: str = "",
) -> tuple[Pending[Tensor], Bring | None]:
    """Start a sum of rows; all ranks start sums, and wait for them, in one order.

    ``flat``: the rows, which must not change until the wait. The value is the sum of this rank's row, or what
    the second function takes, once: Note [Sums of slices].
    ``received``: of no other sum that somebody has still to wait for.
    """
    group, own = group.during("reduce"), rows.row(flat)
    lanes = [replace(lanes[0], phase=group.phase), *lanes[1:]]  # it counts for whoever sums
    if group.size == 1:  # nothing is sent, and no handle orders the stream that waits behind this one
        return Pending([AfterEvent(flat.device)], lambda _: own, [flat]), None
    memory = lanes[0].shared_memory(flat.device)
    if memory is not None:
        summed = torch.empty_like(own)
        addends = torch.split(flat[: rows.total], list(rows.rows))
        with lanes[0].begin_work(about) as work:
            work.take(call := memory.sum_rows(addends, summed, _add))
        group.phase.sent(call.nbytes)
        return Pending([work], lambda _: summed, [flat, summed]), None
    if (levels := group.levels(flat.device)) is not None:
        return _start_by_hosts(group, levels, flat, rows, about), None
    parts, tag = (rows.rows, 0) if rows.is_direct else (rows.parts, next_tag(lanes[0]))
    rank, length, stays = group.rank, parts[group.rank], lanes[0].transport(flat.device).sends_pairs
    lengths = [length] * group.size
    if stays:  # this rank's own part
        lengths[rank] = 0
    came = (received or ReceiveBuffer()).of(sum(lengths) + _WIDTH, flat)
    sent = exchange(lanes, flat[: rows.total], parts, came[:-_WIDTH], lengths, about=about)

    def add(_: object) -> Tensor:
        if not stays:
            return _add_at_once(came, group.size)
        arrivals = list(torch.split(came[:-_WIDTH], lengths))
        arrivals[rank] = torch.split(flat[: rows.total], list(parts))[rank]
        return _add(arrivals, rank, flat.new_empty(length))

    def bring(part: Tensor) -> Pending[Tensor]:
        row, (in_rows, in_slices) = torch.empty_like(own), rows.splits
        work = exchange(lanes, part, in_rows, row, in_slices, tag, about)
        return Pending([work], lambda _: row, [part, row])

    return Pending([sent], add, [flat, came]), None if rows.is_direct else bring


def _start_by_hosts(
    group: RankGroup, levels: Levels, flat: Tensor, rows: Slices, about: str
) -> Pending[Tensor]:
    """Start a sum of rows, inside hosts first: Note [Two levels] in `sending`."""
    inside, across, stripes = levels.inside, levels.across, stripes_of(rows, levels.inside.size)
    nbytes, (in_rows, in_slices) = 0, stripes.splits
    with levels.starting(group, about, flat) as work:
        part = stripes.packed(flat)
        for ranks, lengths in zip((inside, across), stripes.sent, strict=True):
            length = lengths[ranks.rank]
            came = part.new_empty(ranks.size * length + _WIDTH)
            start_all_to_all(ranks, part, lengths, came[:-_WIDTH], [length] * ranks.size).wait()
            total = _add_at_once(came, ranks.size)
            nbytes += part.nbytes - total.nbytes
            part = total
        if not stripes.is_direct:
            total = flat.new_empty(sum(in_slices))
            start_all_to_all(group, part[: sum(in_rows)], in_rows, total, in_slices).wait()
            nbytes += part.element_size() * (sum(in_rows) - in_rows[group.rank])
    group.phase.sent(nbytes, stripes.num_collectives)
    return Pending([work], lambda _: total, [flat, total])


def _add(arrivals: Sequence[Tensor], rank: int, total: Tensor) -> Tensor:
    """Add two rows or more in the order of ranks; ``total`` may be this rank's row. Returns it."""
    lower, own = arrivals[:rank], arrivals[rank]
    if len(arrivals) > 2 and own.is_floating_point() and own.element_size() < 4:
        for at in range(0, own.numel(), _ADDED_AT_ONCE):  # Note [Sums of 16 bits]
            wide = arrivals[0][at : at + _ADDED_AT_ONCE].float()
            for row in arrivals[1:]:
                wide += row[at : at + _ADDED_AT_ONCE]
            total[at : at + _ADDED_AT_ONCE] = wide
        return total
    for row in lower[1:]:
        lower[0].add_(row)
    first, *others = *lower[:1], *arrivals[rank + 1 :]
    torch.add(own, first, out=total)  # a + b has the bits of b + a
    for row in others:
        total += row
    return total


def _add_at_once(came: Tensor, world: int) -> Tensor:
    """Add rows as `_add`, in as many launches for any number: Note [One launch for all ranks].

    ``came``: the rows, and `_WIDTH` elements.
    """
    length = (came.numel() - _WIDTH) // world
    if world < 3 or not length or came.dtype not in _IN_BAGS or came.device.type not in ("cpu", "cuda"):
        rows = came[: world * length].view(world, length).unbind()
        return _add(rows, 0, came.new_empty(length))
    width = min(_WIDTH, max(UNIT, 1 << (length // 4).bit_length()))
    step = math.gcd(length, width)
    windows = came.as_strided((world * length // step + 1, width), (step, 1))
    indices, firsts = _bags(world, length, width, came.device, current_stream(came.device))
    bags = embedding_bag(indices, windows, firsts, mode="sum", padding_idx=len(windows) - 1)
    return bags.view(-1)[:length]


@lru_cache(64)  # an index for each window of the bucket; of a stream, as others do not wait for it
def _bags(world: int, length: int, width: int, device: torch.device, _: Stream) -> tuple[Tensor, Tensor]:
    """Return the numbers of windows, and the first ones of bags: bag b has the b-th window of each row."""
    in_row = torch.arange(0, length, width, device=device)
    starts = in_row[:, None] + length * torch.arange(world, device=device)
    return starts.view(-1) // math.gcd(length, width), torch.arange(0, starts.numel(), world, device=device)
