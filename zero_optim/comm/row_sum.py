"""Sums of rows: of W rows on every rank, rank r receives the sum of all rows r.

A reduce-scatter by pairwise exchange and additions in the order of ranks, so bits do not depend on the
backend and lengths may differ. With two gloo ranks it takes a third of a reduce-scatter's time over loopback.

Note [Sums of 16 bits]
    W additions in sequence lose small terms: of equal gradients, 0.03 at 64 ranks, 0.63 at 1,024. So bf16 and
    fp16 are added in float32 and rounded once; for two ranks the bits are the same without.

Note [Parts of long rows]
    An owner of most rows would hold them W - 1 times. So a row of more than twice the mean length is sent in
    parts, two at a time. gloo receives parts while the caller waits; other backends exchange them at
    construction, on a second stream, so collectives have one order.
"""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import zip_longest

import torch
from torch import Tensor

from zero_optim.comm.collectives import RankGroup
from zero_optim.comm.sending import Lanes, exchange, start_parts
from zero_optim.compat.streams import StreamBeside, record_use, recorded_event, wait_for_event

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


class RowExchange:
    """A pending exchange of rows, by receiving rank, which must not change until `wait` returns."""

    def __init__(self, group: RankGroup, lanes: Lanes, rows: Sequence[Tensor], about: str = "") -> None:
        self._rows = rows  # alive until they have been sent
        self._works, self._came = exchange(group.during("reduce"), rows, lanes, about)
        # In a group of one nothing is sent, and no handle orders the stream that waits behind this one.
        self._made = None if self._works else recorded_event(rows[0].device)

    def wait(self) -> list[Tensor]:
        """Wait with the current stream, once; returns rows by sending rank, this rank's included."""
        for work in self._works:
            work.wait()
        wait_for_event(self._rows[0].device, self._made)
        rows, arrivals = self._rows, self._came
        self._rows, self._works, self._came = (), [], []
        record_use(*rows, *arrivals)  # perhaps made on another stream, to which their memory goes back
        return arrivals


class RowSum:
    """A pending sum of rows, as `RowExchange`; all ranks construct sums and wait for them in one order."""

    def __init__(
        self,
        group: RankGroup,
        lanes: Lanes,
        rows: Sequence[Tensor],
        *,
        in_place: bool = False,
        about: str = "",
    ) -> None:
        own, rank = rows[group.rank], group.rank
        self._total = total = own if in_place else torch.empty_like(own)
        sending = replace(lanes[0], phase=group.during("reduce").phase)
        memory = sending.shared_memory(own.device) if group.size > 1 else None
        if memory is not None:
            work = sending.begin_work(about, own.device)
            with work.starting():
                call = memory.sum_rows(rows, total, _add)
            sending.phase.sent(call.nbytes)
            self._finish: Callable[[], object] = work.take(call).wait
            return
        counts = num_parts([row.numel() for row in rows], own.element_size())
        if max(counts) == 1:  # as on every rank
            exchange = RowExchange(group, lanes, rows, about)
            self._finish = lambda: _add(exchange.wait(), rank, total)
            return
        parts = [_parts(row, count) for row, count in zip(rows, counts, strict=True)]
        totals = _parts(self._total, counts[rank])
        if lanes[0].transport(own.device).waits_on_host:
            self._finish = _receiving(group.during("reduce"), lanes, parts, totals, about)
        else:
            beside = StreamBeside()
            with beside.behind(own.device):
                for some in zip_longest(*parts, fillvalue=own[:0]):
                    arrivals = RowExchange(group, lanes, some, about).wait()
                    _add(arrivals, rank, totals.pop(0) if totals else own[:0])
            self._finish = beside.join

    def wait(self) -> Tensor:
        """Return the sum of this rank's row, once; the current stream waits."""
        finish, total = self._finish, self._total
        del self._finish, self._total  # with what they hold
        finish()
        record_use(total)
        return total


def _receiving(
    group: RankGroup, lanes: Lanes, parts: Sequence[Sequence[Tensor]], totals: Sequence[Tensor], about: str
) -> Callable[[], None]:
    own = parts[group.rank]
    sent, receive = start_parts(group, parts, lanes, about)
    coming = deque([receive(own[0])])

    def finish() -> None:
        for number, total in enumerate(totals, 1):
            work, arrivals = coming.popleft()
            work.wait()
            coming.extend(map(receive, own[number : number + 1]))
            _add(arrivals, group.rank, total)
        sent.wait()

    return finish


def _add(arrivals: Sequence[Tensor], rank: int, total: Tensor) -> None:
    """Add rows in the order of ranks; ``total`` may be this rank's row."""
    lower, own, upper = arrivals[:rank], arrivals[rank], arrivals[rank + 1 :]
    if len(arrivals) > 2 and own.is_floating_point() and own.element_size() < 4:
        for at in range(0, own.numel(), _ADDED_AT_ONCE):  # Note [Sums of 16 bits]
            wide = arrivals[0][at : at + _ADDED_AT_ONCE].float()
            for row in arrivals[1:]:
                wide += row[at : at + _ADDED_AT_ONCE]
            total[at : at + _ADDED_AT_ONCE] = wide
        return
    if lower:
        torch.add(own, _added(lower[0], lower[1:]), out=total)  # a + b has the bits of b + a
    elif upper:
        torch.add(own, upper[0], out=total)
        upper = upper[1:]
    elif total is not own:
        total.copy_(own)
    _added(total, upper)


def _added(total: Tensor, others: Sequence[Tensor]) -> Tensor:
    for arrivals in others:
        total += arrivals
    return total
