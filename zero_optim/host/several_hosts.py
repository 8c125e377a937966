"""What ranks of several hosts, as many on each, send: through memory inside a host, and across once.

Of H hosts with L ranks each, rank j of a host adds up there the rows of the ranks j of all hosts. Then the
ranks j send each other their sums. Rows of owners go the other way. So of P bytes a host sends (H-1)/H * P
for a sum to owners, and as much for a gather; between pairs of ranks it would be L times that.

Note [Bits across hosts]
    Terms are added inside each host, in the order of its ranks, then across, in the order of hosts. So bits
    are not those of sockets, but equal in all recipes and runs. 16 bits are rounded once inside, once across.

Note [Order across hosts]
    Messages across have the number of their call as a tag, so they start as soon as a host's sum is there.
    Calls through memory need one order: a thread takes them in order, waits for what crosses, and starts what
    goes down, which has a memory of its own.

Note [Tags across hosts]
    Rows that meet and differ in length end the process, in gloo's own thread. So before rows with a tag,
    ranks of one number send each other the tag and their heads, and rows cross only if all tags are equal.
"""

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from functools import partial
from itertools import pairwise

import torch
import torch.distributed as dist
from torch import Tensor

from zero_optim.compat.signals import HandlersLater, wait_for
from zero_optim.compat.threads import start_thread_or_run
from zero_optim.errors import message_of
from zero_optim.host.channel import HostWork
from zero_optim.host.messages import Add, OneHost, add_as_gloo, flattened

_LOOK = 0.1  # seconds until a waiting thread looks whether the calls have failed
_OF_TAGGED = 2**30  # is added to those of calls that have a tag themselves


class HostsCall(HostWork):
    """A pending call, which another thread ends."""

    def __init__(self, hosts: "SeveralHosts") -> None:
        super().__init__(hosts, num_pending=1)
        self.is_over = threading.Event()

    def end(self, failure: str | None = None) -> None:
        """End it, once, and tell."""
        if self.is_over.is_set():
            return
        self.num_pending = int(failure is not None)
        self.is_over.set()
        super().end(failure)


class SeveralHosts:
    """The messages of ranks of several hosts; ``across`` joins those of one number, ``ranks`` is by host."""

    def __init__(
        self, up: OneHost, down: OneHost, across: dist.ProcessGroup, ranks: Sequence[Sequence[int]], rank: int
    ) -> None:
        self._up, self._down, self.across, self._ranks = up, down, across, ranks
        self._host = next(host for host, here in enumerate(ranks) if rank in here)
        self._numbers = {rank: number for here in ranks for number, rank in enumerate(here)}
        self._number = self._numbers[rank]
        self.num_started = 0
        self._jobs = deque[Callable[[], None]]()
        self._is_served = False
        self._lock = threading.Lock()

    @property
    def failure(self) -> str | None:
        """Why no call ends well any more."""
        return self._up.failure or self._down.failure

    def close(self, why: str) -> None:
        """Give up: all pending calls fail, on this host."""
        self._up.close(why)
        self._down.close(why)

    def release(self) -> None:
        """Take part no more, with nothing that failed."""
        self._up.release()
        self._down.release()

    def wait(self, call: HostWork, seconds: float) -> None:
        """Wait until a call has ended, or failed."""
        assert isinstance(call, HostsCall)
        deadline = time.monotonic() + seconds
        while not call.is_completed():
            if (left := deadline - time.monotonic()) <= 0:
                raise RuntimeError(f"Timed out waiting {seconds} s for a call across hosts")
            wait_for(call.is_over, min(left, _LOOK))

    def spread_rows(self, rows: Sequence[tuple[int, Tensor]], tag: int = 0) -> HostsCall:
        """Send contiguous rows from their owners to all others: Note [Tags across hosts]."""

        def spread(call: HostsCall, number: int) -> Iterator[None]:
            number += _OF_TAGGED * bool(tag)
            num_heads = sum(map(len, self._ranks)) * bool(tag)
            heads, cross = (
                self._crossing(some, number, call) for some in (rows[:num_heads], rows[num_heads:])
            )
            tags = [torch.tensor([tag], device="cpu") for _ in self._ranks]  # by host
            own = tags[self._host]
            sent = [[own]] * len(tags), [[each] for each in tags]
            crossing = [*self._cross(number + 1, *sent), *heads()] if tag else cross()
            yield
            _wait_for(crossing)
            if tag and all(map(own.equal, tags)):
                _wait_for(cross())
            self._spread(rows, call, tag)

        return self._start(spread)

    def sum_rows(self, rows: Sequence[Tensor], total: Tensor, add: Add) -> HostsCall:
        """Send row r to rank r, and add up, by ``add``, all rows of this rank into ``total``."""

        def add_up(call: HostsCall, number: int) -> Iterator[None]:
            yield from self._sum(rows, total, add, number, call)
            call.end()

        return self._start(add_up)

    def sum_all(self, tensor: Tensor) -> HostsCall:
        """Sum a tensor over all ranks in place."""
        flat, size = flattened(tensor), sum(map(len, self._ranks))
        edges = [flat.numel() * rank // size for rank in range(size + 1)]
        chunks = [flat[start:stop] for start, stop in pairwise(edges)]
        rows, own = list(enumerate(chunks)), chunks[self._rank_at(self._host)]

        def add_up(call: HostsCall, number: int) -> Iterator[None]:
            cross = self._crossing(rows, number + 1, call)
            yield from self._sum(chunks, own, add_as_gloo, number, call)
            _wait_for(cross())
            self._spread(rows, call)

        return self._start(add_up)

    def _start(self, steps: Callable[[HostsCall, int], Iterator[None]]) -> HostsCall:
        """Start a call: its ``steps``, given a tag, run to the yield here, and the rest on the thread."""
        with HandlersLater():
            if self.failure is not None:
                raise dist.DistNetworkError(self.failure)
            self.num_started += 1
            call = HostsCall(self)
            rest = steps(call, 2 * (self.num_started % (2**29 - 1)))  # each call has two tags
            next(rest)

            def finish() -> None:
                try:
                    next(rest, None)
                except Exception as error:  # noqa: BLE001 - every wait raises it
                    self.close(f"Connection closed: a call across hosts failed: {message_of(error)}")
                    call.end(self.failure)

            with self._lock:
                self._jobs.append(finish)
                is_new, self._is_served = not self._is_served, True
            if is_new:
                start_thread_or_run(self._serve, "zero_optim hosts")
        return call

    def _rank_at(self, host: int) -> int:
        return self._ranks[host][self._number]

    def _sum(
        self, rows: Sequence[Tensor], total: Tensor, add: Add, tag: int, call: HostsCall
    ) -> Iterator[None]:
        """Start to add up inside, then across; behind the yield wait, and add up the hosts' sums."""
        hosts = range(len(self._ranks))
        sums = [
            total if host == self._host else torch.empty_like(rows[self._rank_at(host)]) for host in hosts
        ]
        arrivals = [total if host == self._host else torch.empty_like(total) for host in hosts]
        crossing = Future[list[dist.Work]]()

        def cross(failure: str | None) -> None:
            works = list[dist.Work]()
            try:
                if failure is None:
                    works = self._cross(tag, [[each] for each in sums], [[each] for each in arrivals])
            except Exception as error:  # noqa: BLE001 - of the backend; raised behind the yield
                failure = message_of(error)
            if failure is None:
                crossing.set_result(works)
            else:
                crossing.set_exception(dist.DistNetworkError(failure))

        inside = [[rows[here[number]] for here in self._ranks] for number in range(len(self._ranks[0]))]
        call.nbytes += self._up.sum_lists(inside, sums, add, cross).nbytes
        call.nbytes += sum(each.nbytes for each in sums if each is not total)
        yield
        _wait_for(crossing.result())
        with torch.inference_mode():  # as on sockets, whatever mode a thread has
            add(arrivals, self._host, total)

    def _crossing(
        self, rows: Sequence[tuple[int, Tensor]], tag: int, call: HostsCall
    ) -> Callable[[], list[dist.Work]]:
        """Return what starts to send this rank's rows across, and to receive those of its number."""
        of_number = [self._rank_at(host) for host in range(len(self._ranks))]
        by_host = [[row for owner, row in rows if owner == rank] for rank in of_number]
        own, num_others = by_host[self._host], len(self._ranks) - 1
        spread = sum(row.nbytes for rows_of in by_host for row in rows_of)
        call.nbytes += num_others * sum(row.nbytes for row in own) + (len(self._ranks[0]) - 1) * spread
        return partial(self._cross, tag, [own] * len(by_host), by_host)

    def _cross(
        self, tag: int, sends: Sequence[list[Tensor]], receives: Sequence[list[Tensor]]
    ) -> list[dist.Work]:
        """Start to send tensors to hosts and to receive from them; as bytes, since gloo lacks some dtypes."""

        def across(rows_of: Sequence[list[Tensor]]) -> list[tuple[int, Tensor]]:
            others = (host for host in range(len(self._ranks)) if host != self._host)
            return [(host, row.view(torch.uint8)) for host in others for row in rows_of[host] if row.numel()]

        group = self.across
        works = [dist.irecv(row, group=group, tag=tag, group_src=host) for host, row in across(receives)]
        works += [dist.isend(row, group=group, tag=tag, group_dst=host) for host, row in across(sends)]
        return [work for work in works if work is not None]

    def _spread(self, rows: Sequence[tuple[int, Tensor]], call: HostsCall, tag: int = 0) -> None:
        down = [(self._numbers[owner], row) for owner, row in rows]
        self._down.spread_rows(down, tag, call.end, len(self._ranks))

    def _serve(self) -> None:
        while True:
            with self._lock:
                if not self._jobs:
                    self._is_served = False
                    return
                job = self._jobs.popleft()
            job()


def _wait_for(works: Sequence[dist.Work]) -> None:
    for work in works:
        work.wait()
