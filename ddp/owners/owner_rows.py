"""The memory of gradients that go to owners: a row for each rank, in portions sent one after the other.

Note [Rows of gradients]
    Reduced gradients are views of the owner's row. Each rank's row is laid out by itself, as gradients come:
    the last parameter first, aligned as parameters are. The parameter bucket's layout has a cut parameter
    last in one row and first in the next, and room for frozen parameters and stamps.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from zero_optim.compat import streams

# Smaller portions would save memory that does not matter, and cost messages that do.
LEAST_PORTION_NBYTES = 2**16


def most_portions(size: int) -> int:
    """Return the portions of the largest bucket: the least c >= 2 with ``(W - 1) / W (1 + 4 / c) <= 2``."""
    return -(-4 * (size - 1) // (size + 1)) if size > 1 else 1


def num_portions(nbytes: int, largest_nbytes: int, most: int) -> int:
    """Return in how many portions a bucket is sent, none larger than the largest bucket's."""
    count = -(-most * nbytes // max(1, largest_nbytes))
    return max(1, min(most, count, nbytes // LEAST_PORTION_NBYTES))


class OwnerRows:
    """The rows of a bucket in one backward pass; other ranks' portions are made when gradients come."""

    def __init__(
        self,
        edges: Sequence[Sequence[int]],  # of each rank's portions in its row
        rank: int,
        like: Tensor,  # has the dtype and device
        *,
        zeros: bool = False,  # what nothing is copied to is sent too
        filled: Sequence[Tensor] = (),  # the rows, each one portion, if they are in memory already
    ) -> None:
        self.num_portions = len(edges[rank]) - 1
        self._edges = edges
        self._rank = rank
        self._like = like
        self._zeros = zeros
        self.own = filled[rank] if filled else self._new(edges[rank][-1], zeros=zeros)
        self._portions = {(owner, 0): row for owner, row in enumerate(filled)}  # by rank and number
        if self.num_portions == 1:
            for owner in range(len(edges)):
                self.portion(owner, 0)
        self._stream, self._event = streams.current_stream(like.device), streams.recorded_event(like.device)

    def join(self) -> None:
        """Let the current stream write here."""
        if self._event is not None and streams.current_stream(self._like.device) != self._stream:
            streams.wait_for_event(self._like.device, self._event)

    def portion(self, rank: int, number: int) -> Tensor:
        """Return a portion of a rank's row."""
        portion = self._portions.get((rank, number))
        if portion is None:
            portion = self._portions[rank, number] = self._new_portion(rank, number, zeros=self._zeros)
        return portion

    def pop(self, number: int) -> list[Tensor]:
        """Return a portion of each row, by rank, to be sent; drops those of other ranks."""
        rows = []
        for rank in range(len(self._edges)):
            portion = self._portions.pop((rank, number), None)
            rows.append(self._new_portion(rank, number, zeros=True) if portion is None else portion)
        streams.record_use(*rows)  # perhaps made on the stream of another hook
        return rows

    def _new_portion(self, rank: int, number: int, *, zeros: bool) -> Tensor:
        start, stop = self._edges[rank][number : number + 2]
        return self.own[start:stop] if rank == self._rank else self._new(stop - start, zeros=zeros)

    def _new(self, numel: int, *, zeros: bool) -> Tensor:
        return (torch.zeros if zeros else torch.empty)(
            numel, dtype=self._like.dtype, device=self._like.device
        )
