"""Moves of rows: from the ranks that hold them to the owner of the whole, and back, one exchange each way.

    rank 0 holds rows of A, B, C    to_owners      rank 0 owns A, C, whole
    rank 1 holds rows of A, B, C    ---------->    rank 1 owns B, whole
                                    <----------
                                    to_holders

Each message has a head: some bytes that a rank tells every other one.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeAlias, TypeVar

import torch
from torch import Tensor

from zero_optim.comm.collectives import RankGroup
from zero_optim.comm.frames import bytes_to_tensor, tensor_to_bytes
from zero_optim.comm.sending import exchange
from zero_optim.compat import private
from zero_optim.compat.streams import HostCopy, to_device
from zero_optim.dtensor.placement import shape_here
from zero_optim.flow.pending import Pending
from zero_optim.health.stamp import STAMP_NBYTES, Header

T = TypeVar("T")
_ALIGNMENT = 16  # bytes, which are a multiple of every dtype's
Whole: TypeAlias = dict[int, Tensor]  # what this rank owns, by number


class Form(NamedTuple):
    """A tensor that is moved: its shape, the dimension that is cut in chunks, and its owner."""

    shape: tuple[int, ...]
    dim: int
    owner: int


class RowMoves:
    """Moves tensors of one dtype and device between the ranks of a group. All ranks call, in one order."""

    def __init__(
        self, group: RankGroup, forms: Sequence[Form], dtype: torch.dtype, device: torch.device
    ) -> None:
        self._group, self._forms, self._dtype, self._device = group, forms, dtype, device
        ranks = range(group.size)
        self._owned = [[number for number, form in enumerate(forms) if form.owner == rank] for rank in ranks]
        self._shapes = [
            [shape_here(form.shape, form.dim, rank, group.size) for rank in ranks] for form in forms
        ]
        served = group.size == 1 or group.transport(device).name != ""
        self._sent_from = device if served else group.device  # CPU tensors of a group that has NCCL alone

    @property
    def owned(self) -> list[int]:
        """The numbers of what this rank owns."""
        return self._owned[self._group.rank]

    def nbytes(self) -> int:
        """Return the bytes that this rank holds and owns."""
        rank, size = self._group.rank, self._dtype.itemsize
        held = sum(shapes[rank].numel() for shapes in self._shapes)
        return size * (held + sum(torch.Size(self._forms[number].shape).numel() for number in self.owned))

    def start_to_owners(
        self, head: bytes, *sets: Sequence[Tensor | None]
    ) -> Pending[tuple[list[bytes], list[Whole]]]:
        """Start to send rows, by number; the value is all ranks' heads, and of each set what this rank owns.

        What is None comes with any values. The CPU waits for the heads.
        """
        group, rank, owned = self._group.during("reduce"), self._group.rank, self.owned
        sent = self._new(len(head), [[self._shapes[i][rank] for _ in sets for i in of] for of in self._owned])
        coming = [[self._shapes[i][source] for _ in sets for i in owned] for source in range(group.size)]
        came = self._new(len(head), coming)
        _copy(sent.parts, [some[i] for of_rank in self._owned for some in sets for i in of_rank])
        _copy(sent.heads, [to_device(bytes_to_tensor(head), self._sent_from)] * group.size)

        def end(_: object) -> tuple[list[bytes], list[Whole]]:
            count = len(sets) * len(owned)  # of parts that come from each rank
            pairs = enumerate([i for _ in sets for i in owned])
            joined = [torch.cat(came.parts[at::count], self._forms[i].dim) for at, i in pairs]
            moved = iter([each.to(self._device) for each in joined])
            heads = group.read(HostCopy(torch.stack(came.heads)))
            return [tensor_to_bytes(each) for each in heads], [{i: next(moved) for i in owned} for _ in sets]

        return _start(group, sent, came, end, "rows for owners")

    def start_to_holders(
        self, wholes: Whole, rows: Sequence[Tensor], header: Header | None = None
    ) -> Pending[None]:
        """Start to send what this rank owns, by number, into the ``rows`` of its holders, with a header."""
        group, rank, owned = self._group.during("gather"), self._group.rank, self.owned
        ranks = range(group.size)
        sent = self._new(STAMP_NBYTES, [[self._shapes[i][holder] for i in owned] for holder in ranks])
        came = self._new(STAMP_NBYTES, [[self._shapes[i][rank] for i in of_rank] for of_rank in self._owned])
        cuts = [(wholes[i].detach(), self._forms[i].dim, self._shapes[i]) for i in owned]
        chunks = [torch.split(tensor, [shape[dim] for shape in of], dim) for tensor, dim, of in cuts]
        _copy(sent.parts, [of_holders[holder] for holder in ranks for of_holders in chunks])
        if header is not None:
            _, mine = header.written(group.size, rank, self._sent_from)
            _copy(sent.heads, [mine] * group.size)

        def end(_: object) -> None:
            _copy([rows[i] for of_rank in self._owned for i in of_rank], came.parts)
            if header is not None:
                header.read(torch.stack(came.heads))

        return _start(group, sent, came, end, "rows for their holders")

    def _new(self, head_nbytes: int, shapes: Sequence[Sequence[torch.Size]]) -> "_Message":
        """Make memory for what all ranks get or send: for each a head, then parts of these shapes."""
        behind = -(-head_nbytes // _ALIGNMENT) * _ALIGNMENT
        sizes = [self._dtype.itemsize * sum(shape.numel() for shape in of_rank) for of_rank in shapes]
        sizes = [behind + -(-size // _ALIGNMENT) * _ALIGNMENT for size in sizes]
        flat = torch.empty(sum(sizes), dtype=torch.uint8, device=self._sent_from)
        heads, parts = list[Tensor](), list[Tensor]()
        for piece, of_rank in zip(torch.split(flat, sizes), shapes, strict=True):
            heads.append(piece[:head_nbytes])
            at = behind
            for shape in of_rank:
                end = at + shape.numel() * self._dtype.itemsize
                parts.append(piece[at:end].view(self._dtype).view(shape))
                at = end
        return _Message(flat, sizes, heads, parts)


class _Message(NamedTuple):
    """What goes to all ranks, or comes of them; ``sizes`` and ``heads`` by rank, ``parts`` in order."""

    flat: Tensor  # in bytes
    sizes: list[int]
    heads: list[Tensor]
    parts: list[Tensor]


def _start(
    group: RankGroup, sent: _Message, came: _Message, end: Callable[[object], T], about: str
) -> Pending[T]:
    work = exchange((group,), sent.flat, sent.sizes, came.flat, came.sizes, about=about)
    return Pending([work], end, [sent.flat, came.flat])


@torch.no_grad()
def _copy(places: Sequence[Tensor], values: Sequence[Tensor | None]) -> None:
    pairs = [pair for pair in zip(places, values, strict=True) if pair[1] is not None]
    if pairs:
        private.foreach_copy_(*map(list, zip(*pairs, strict=True)))
