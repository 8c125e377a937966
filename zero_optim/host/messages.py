"""What ranks of one host send through memory: rows from owners, and sums.

Note [Bits of a sum]
    gloo sums a tensor in one chunk a rank, and a chunk's terms one after the other: that of rank r begins
    with rank r - 1 and goes down, so that r comes last. These sums have the same chunks and order, and so
    the same bits as on sockets, whatever else PyTorch's DDP sends.
"""

import math
from collections.abc import Callable, Sequence
from itertools import pairwise

import torch
from torch import Tensor

from zero_optim.host.channel import (
    ADDENDS,
    ROWS,
    SUMS,
    Act,
    HostWork,
    Incoming,
    Message,
    Outgoing,
    Part,
    Then,
)
from zero_optim.host.shared_memory import SharedMemory

# Adds pieces up, by rank, into ``total``, which is this rank's piece, or another place.
Add = Callable[[Sequence[Tensor], int, Tensor], object]

# Of which a sum has gloo's bits.
_SUMMED = frozenset({torch.float32, torch.float64, torch.complex64, torch.complex128})


class OneHost(SharedMemory):
    """The messages of ranks that share memory. All ranks call every method, in one order."""

    def spread_rows(
        self, rows: Sequence[tuple[int, Tensor]], tag: int = 0, then: Then = None, num_heads: int = 1
    ) -> HostWork:
        """Send contiguous rows from their owners to all others; to other tags only each one's first ones."""
        parts: list[list[Part]] = [[] for _ in range(self.size)]
        for owner, row in rows:
            parts[owner].append((row.nbytes, row.data_ptr()))
        messages = list[Message]()
        for peer, end in self.sending.items():
            messages.append(Outgoing((end,), ROWS, parts[self.rank], tag))
            messages.append(Incoming((self.receiving[peer],), ROWS, parts[peer], tag, num_heads))
        return self.start(messages, rows, then)

    def sum_rows(self, rows: Sequence[Tensor], total: Tensor, add: Add) -> HostWork:
        """Send row r to rank r, and add up, by ``add``, all rows of this rank into ``total``."""
        return self.sum_lists(list(zip(rows, strict=True)), [total], add)

    def sum_lists(
        self, rows: Sequence[Sequence[Tensor]], totals: Sequence[Tensor], add: Add, then: Then = None
    ) -> HostWork:
        """As `sum_rows`, with several rows for each rank."""
        messages = list[Message]()
        for peer, end in self.sending.items():
            messages.append(Outgoing((end,), ADDENDS, [(row.nbytes, row.data_ptr()) for row in rows[peer]]))
        sums = zip(rows[self.rank], totals, strict=True)
        adding = [_adding(self, mine, total, add) for mine, total in sums]
        messages.append(Incoming(tuple(self.receiving.values()), ADDENDS, adding))
        return self.start(messages, (rows, totals), then)

    def sum_all(self, tensor: Tensor) -> HostWork:
        """Sum a tensor over all ranks in place, in the order of memory."""
        flat = flattened(tensor)
        size = flat.element_size()
        edges = chunk_edges(flat.nbytes, self.size, size)
        chunks = [flat[start // size : stop // size] for start, stop in pairwise(edges)]
        parts: list[list[Part]] = [[(chunk.nbytes, chunk.data_ptr())] for chunk in chunks]
        sums = list[Message]()
        nbytes, adding = _adding(self, chunks[self.rank], chunks[self.rank], add_as_gloo)

        def act(start: int, count: int) -> None:
            adding(start, count)
            for message in sums:
                message.ready = start + count

        messages: list[Message] = [Incoming(tuple(self.receiving.values()), ADDENDS, [(nbytes, act)])]
        for peer, end in self.sending.items():
            messages.append(Outgoing((end,), ADDENDS, parts[peer]))
            messages.append(Incoming((self.receiving[peer],), SUMS, parts[peer]))
            sums.append(Outgoing((end,), SUMS, parts[self.rank], ready=0))
        return self.start(messages + sums, flat)


def _adding(memory: SharedMemory, own: Tensor, total: Tensor, add: Add) -> tuple[int, Act]:
    dtype, size = own.dtype, own.element_size()

    @torch.inference_mode()  # as on sockets, whatever mode a thread has
    def act(start: int, count: int) -> None:
        first, numel = start // size, count // size
        mine = own[first : first + numel]
        arrivals = [
            mine if rank == memory.rank else memory.receiving[rank].view(dtype, numel)
            for rank in range(memory.size)
        ]
        add(arrivals, memory.rank, mine if total is own else total[first : first + numel])

    return own.nbytes, act


def can_sum(tensor: Tensor) -> bool:
    """Return whether `sum_all` takes a tensor and gives gloo's bits; the same on every rank."""
    return tensor.device.type == "cpu" and tensor.layout is torch.strided and tensor.dtype in _SUMMED


def flattened(tensor: Tensor) -> Tensor:
    """View a tensor's elements as real ones, in the order in which they lie."""
    flat = tensor.detach().as_strided((tensor.numel(),), (1,))
    return torch.view_as_real(flat).view(-1) if flat.is_complex() else flat


def chunk_edges(nbytes: int, size: int, itemsize: int) -> list[int]:
    """Return where gloo's chunks begin, in bytes, and the last one ends; as its ``allreduce`` of a ring."""
    num_segments = math.ceil(max(math.ceil(nbytes / 2**20), 2 * size) / size) * size  # of a MiB at most
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
