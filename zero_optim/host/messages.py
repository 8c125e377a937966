"""What ranks of one host send through memory: rows from owners, and sums.

Note [Bits of a sum]
    gloo sums a tensor in one chunk a rank, and a chunk's terms one after the other: that of rank r begins
    with rank r - 1 and goes down, so that r comes last. These sums have the same chunks and order, and so
    the same bits as on sockets, whatever else PyTorch's DDP sends.
"""

import ctypes
import math
from collections.abc import Callable, Sequence
from functools import partial
from itertools import pairwise

import torch
from torch import Tensor

from zero_optim.host.channel import Act, HostWork, Receiver
from zero_optim.host.shared_memory import SharedMemory

# Adds pieces up, by rank, into ``total``, which is this rank's piece, or another place.
Add = Callable[[Sequence[Tensor], int, Tensor], object]
Then = Callable[[str | None], None] | None

_ROWS, _ADDENDS, _SUMS = range(1, 4)  # kinds of messages
# Of which a sum has gloo's bits.
_SUMMED = frozenset({torch.float32, torch.float64, torch.complex64, torch.complex128})
_GLOO_SEGMENT = 2**20  # bytes that gloo sends at a time


class OneHost(SharedMemory):
    """The messages of ranks that share memory. All ranks call every method, in one order."""

    def spread_rows(
        self, rows: Sequence[tuple[int, Tensor]], tag: int = 0, then: Then = None, num_heads: int = 1
    ) -> HostWork:
        """Send contiguous rows from their owners to all others; to other tags only each one's first ones."""
        lists: list[list[Tensor]] = [[] for _ in range(self.size)]
        for owner, row in rows:
            lists[owner].append(row)
        own = lists[self.rank]

        def begin(work: HostWork) -> None:
            for peer in self.peers:
                self.send(work, peer, _ROWS, own, tag)
            for peer in self.peers:
                self.expect(work, (peer,), _ROWS, _copies(self, peer, lists[peer]), tag, num_heads)

        return self.start(begin, then)

    def sum_rows(self, rows: Sequence[Tensor], total: Tensor, add: Add) -> HostWork:
        """Send row r to rank r, and add up, by ``add``, all rows of this rank into ``total``."""
        return self.sum_lists([[row] for row in rows], [total], add)

    def sum_lists(
        self, rows: Sequence[Sequence[Tensor]], totals: Sequence[Tensor], add: Add, then: Then = None
    ) -> HostWork:
        """As `sum_rows`, with several rows for each rank."""
        own = rows[self.rank]

        def begin(work: HostWork) -> None:
            for peer in self.peers:
                self.send(work, peer, _ADDENDS, rows[peer])
            sums = zip(own, totals, strict=True)
            parts = [(mine.nbytes, _adding(self, mine, total, add)) for mine, total in sums]
            self.expect(work, self.peers, _ADDENDS, parts)

        return self.start(begin, then)

    def sum_all(self, tensor: Tensor) -> HostWork:
        """Sum a tensor over all ranks in place, in the order of memory."""
        flat = flattened(tensor)
        size = flat.element_size()
        edges = chunk_edges(flat.nbytes, self.size, size)
        chunks = [flat[start // size : stop // size] for start, stop in pairwise(edges)]
        own = chunks[self.rank]

        def begin(work: HostWork) -> None:
            for peer in self.peers:
                self.send(work, peer, _ADDENDS, [chunks[peer]])
            sums = [self.send(work, peer, _SUMS, [own]) for peer in self.peers]
            for message in sums:
                message.ready = 0
            adding = _adding(self, own, own, add_as_gloo)

            def act(start: int, count: int) -> None:
                adding(start, count)
                for message in sums:
                    message.ready = start + count

            self.expect(work, self.peers, _ADDENDS, [(own.nbytes, act)])
            for peer in self.peers:
                self.expect(work, (peer,), _SUMS, _copies(self, peer, [chunks[peer]]))

        return self.start(begin)


def _copies(memory: SharedMemory, peer: int, targets: Sequence[Tensor]) -> list[tuple[int, Act]]:
    copy = partial(_copy, memory.receivers[peer])
    return [(target.nbytes, partial(copy, target.data_ptr())) for target in targets]


def _copy(receiver: Receiver, address: int, start: int, count: int) -> None:
    ctypes.memmove(address + start, receiver.address, count)


def _adding(memory: SharedMemory, own: Tensor, total: Tensor, add: Add) -> Act:
    dtype, size = own.dtype, own.element_size()

    @torch.inference_mode()  # as on sockets, whatever mode a thread has
    def act(start: int, count: int) -> None:
        first, numel = start // size, count // size
        mine = own[first : first + numel]
        arrivals = [
            mine if rank == memory.rank else memory.receivers[rank].view(dtype, numel)
            for rank in range(memory.size)
        ]
        add(arrivals, memory.rank, mine if total is own else total[first : first + numel])

    return act


def can_sum(tensor: Tensor) -> bool:
    """Return whether `sum_all` takes a tensor and gives gloo's bits; the same on every rank."""
    return tensor.device.type == "cpu" and tensor.layout is torch.strided and tensor.dtype in _SUMMED


def flattened(tensor: Tensor) -> Tensor:
    """View a tensor's elements as real ones, in the order in which they lie."""
    flat = tensor.detach().as_strided((tensor.numel(),), (1,))
    return torch.view_as_real(flat).view(-1) if flat.is_complex() else flat


def chunk_edges(nbytes: int, size: int, itemsize: int) -> list[int]:
    """Return where gloo's chunks begin, in bytes, and the last one ends; as its ``allreduce`` of a ring."""
    num_segments = math.ceil(max(math.ceil(nbytes / _GLOO_SEGMENT), 2 * size) / size) * size
    segment = math.ceil(math.ceil(nbytes / num_segments) / itemsize) * itemsize
    return [min(nbytes, chunk * (num_segments // size) * segment) for chunk in range(size + 1)]


def add_as_gloo(arrivals: Sequence[Tensor], rank: int, total: Tensor) -> None:
    """Add pieces up as gloo does, by rank; ``total`` may be this rank's piece."""
    size = len(arrivals)
    others = [arrivals[(rank - back) % size] for back in range(1, size)]
    sum_of_others = others[0] if size == 2 else torch.add(others[0], others[1])
    for arrival in others[2:]:
        sum_of_others += arrival
    torch.add(arrivals[rank], sum_of_others, out=total)
