"""Sums of rows: of W rows on every rank, rank r receives the sum of all rows r.

A reduce-scatter by pairwise exchange and additions in the order of ranks, so bits do not depend on the
backend and lengths may differ. With two gloo ranks it takes a third of a reduce-scatter's time over loopback.

Note [Sums of 16 bits]
    W additions in sequence lose small terms: of equal gradients, 0.03 at 64 ranks, 0.63 at 1,024. So bf16 and
    fp16 are added in float32 and rounded once; for two ranks the bits are the same without.

Note [Parts of long rows]
    An owner of most rows would hold them W - 1 times. So a row of more than twice the mean length is sent in
    parts, two at a time. gloo receives parts while the caller waits; other backends exchange them when
    the sum starts, on a second stream, so collectives have one order.
"""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import zip_longest

import torch
from torch import Tensor

from zero_optim.comm.collectives import RankGroup
from zero_optim.comm.sending import Lanes, exchange, start_parts
from zero_optim.compat.streams import StreamBeside
from zero_optim.flow.pending import Pending

LEAST_PART_NBYTES = 2**16
_ADDED_AT_ONCE = 2**20  # elements that are added in float32


def num_parts(lengths: Sequence[int], itemsize: int) -> list[int]:
    """Return each row's number of parts, from lengths in elements: Note [Parts of long rows]."""
    others, total = len(lengths) - 1, sum(lengths)
    return [
        1
        if others * length <= total
        else max(1, min(-(-2 * others * length // total), length * itemsize // LEAST_PART_NBYTES))
        for length in lengths
    ]


def _parts(row: Tensor, count: int) -> list[Tensor]:
    length = row.numel()
    return [row[length * at // count : length * (at + 1) // count] for at in range(count)]


def start_row_sum(
    group: RankGroup,
    lanes: Lanes,
    rows: Sequence[Tensor],
    *,
    in_place: bool = False,
    about: str = "",
) -> Pending[Tensor]:
    """Start a sum of rows; all ranks start sums, and wait for them, in one order.

    ``rows``: by receiving rank; they must not change until the wait. The value is the sum of this rank's row,
    with ``in_place`` in that row.
    """
    group, rank, own = group.during("reduce"), group.rank, rows[group.rank]
    total = own if in_place else torch.empty_like(own)
    sending = replace(lanes[0], phase=group.phase)
    memory = sending.shared_memory(own.device) if group.size > 1 else None
    if memory is not None:
        work = sending.begin_work(about, own.device)
        with work.starting():
            call = memory.sum_rows(rows, total, _add)
        sending.phase.sent(call.nbytes)
        return Pending([work.take(call)], lambda _: total, [total])
    counts = num_parts([row.numel() for row in rows], own.element_size())
    if max(counts) == 1:  # as on every rank
        sent = exchange(group, rows, lanes, about)
        return Pending([sent], lambda arrivals: _add(arrivals[0], rank, total), [total])
    parts = [_parts(row, count) for row, count in zip(rows, counts, strict=True)]
    totals = _parts(total, counts[rank])
    if lanes[0].transport(own.device).waits_on_host:
        end = _receiving(group, lanes, parts, totals, about)
    else:
        beside = StreamBeside()
        with beside.behind(own.device):
            for some in zip_longest(*parts, fillvalue=own[:0]):
                arrivals = exchange(group, some, lanes, about).wait()
                _add(arrivals, rank, totals.pop(0) if totals else own[:0])
        end = beside.join

    def then(_: object) -> Tensor:
        end()
        return total

    return Pending([], then, [total])


def _receiving(
    group: RankGroup, lanes: Lanes, parts: Sequence[Sequence[Tensor]], totals: Sequence[Tensor], about: str
) -> Callable[[], None]:
    own = parts[group.rank]
    sent, receive = start_parts(group, parts, lanes, about)
    coming = deque([receive(own[0])])

    def finish() -> None:
        for number, total in enumerate(totals, 1):
            arrivals = coming.popleft().wait()
            coming.extend(map(receive, own[number : number + 1]))
            _add(arrivals, group.rank, total)
        sent.wait()

    return finish


def _add(arrivals: Sequence[Tensor], rank: int, total: Tensor) -> Tensor:
    """Add rows in the order of ranks; ``total`` may be this rank's row. Returns it."""
    lower, own, upper = arrivals[:rank], arrivals[rank], arrivals[rank + 1 :]
    if len(arrivals) > 2 and own.is_floating_point() and own.element_size() < 4:
        for at in range(0, own.numel(), _ADDED_AT_ONCE):  # Note [Sums of 16 bits]
            wide = arrivals[0][at : at + _ADDED_AT_ONCE].float()
            for row in arrivals[1:]:
                wide += row[at : at + _ADDED_AT_ONCE]
            total[at : at + _ADDED_AT_ONCE] = wide
        return total
    if lower:
        torch.add(own, _added(lower[0], lower[1:]), out=total)  # a + b has the bits of b + a
    elif upper:
        torch.add(own, upper[0], out=total)
        upper = upper[1:]
    elif total is not own:
        total.copy_(own)
    return _added(total, upper)


def _added(total: Tensor, others: Sequence[Tensor]) -> Tensor:
    for arrivals in others:
        total += arrivals
    return total
