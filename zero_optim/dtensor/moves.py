"""Moves of rows: from the ranks that hold them to the owner of the whole, and back, one exchange each way.

    rank 0 holds rows of A, B, C    to_owners      rank 0 owns A, C, whole
    rank 1 holds rows of A, B, C    ---------->    rank 1 owns B, whole
                                    <----------
                                    to_holders

Each message has a head: some bytes that a rank tells every other one.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor

from zero_optim.comm.collectives import RankGroup
from zero_optim.comm.frames import bytes_to_tensor, tensor_to_bytes
from zero_optim.comm.sending import exchange
from zero_optim.compat import private
from zero_optim.compat.streams import HostCopy, to_device
from zero_optim.dtensor.placement import shape_here, spans
from zero_optim.flow.pending import Pending
from zero_optim.health.stamp import STAMP_NBYTES, Send

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
        group, (rank, size) = self._group.during("reduce"), (self._group.rank, self._group.size)
        behind = -(-len(head) // _ALIGNMENT) * _ALIGNMENT
        pieces, places, rows = list[Tensor](), list[Tensor](), list[Tensor]()
        for owned in self._owned:
            piece, parts = self._new(behind, [self._shapes[i][rank] for _ in sets for i in owned])
            pieces.append(piece)
            chosen = [some[i] for some in sets for i in owned]
            places += [place for place, each in zip(parts, chosen, strict=True) if each is not None]
            rows += [each for each in chosen if each is not None]
        with torch.no_grad():
            _copy(places, rows)
        octets = to_device(bytes_to_tensor(head), self._sent_from)
        for piece in pieces:
            piece[: len(head)] = octets
        into = [
            self._new(behind, [self._shapes[i][source] for _ in sets for i in self.owned])
            for source in range(size)
        ]

        def end(works: list[list[Tensor]]) -> tuple[list[bytes], list[Whole]]:
            (received,) = works
            heads = torch.stack([piece[: len(head)] for piece in received])
            parts = [
                self._parts(piece, behind, [self._shapes[i][source] for _ in sets for i in self.owned])
                for source, piece in enumerate(received)
            ]
            wholes = []
            for number in range(len(sets)):
                first = number * len(self.owned)
                joined = [
                    torch.cat([of_rank[first + place] for of_rank in parts], self._forms[i].dim)
                    for place, i in enumerate(self.owned)
                ]
                wholes.append({i: t.to(self._device) for i, t in zip(self.owned, joined, strict=True)})
            return [tensor_to_bytes(each) for each in group.read(HostCopy(heads))], wholes

        started = exchange(group, pieces, (group,), "rows for owners", [piece for piece, _ in into])
        return Pending([started], end)

    def start_to_holders(
        self, wholes: Mapping[int, Tensor], rows: Sequence[Tensor], send: Send | None = None
    ) -> Pending[None]:
        """Start to send what this rank owns, by number, into the ``rows`` of its holders, with a stamp."""
        group, (rank, size) = self._group.during("gather"), (self._group.rank, self._group.size)
        behind = STAMP_NBYTES
        pieces, places, parts = list[Tensor](), list[Tensor](), list[Tensor]()
        for holder in range(size):
            piece, into = self._new(behind, [self._shapes[i][holder] for i in self.owned])
            pieces.append(piece)
            places += into
            for i in self.owned:
                form = self._forms[i]
                start, stop = spans(form.shape[form.dim], size)[holder]
                parts.append(wholes[i].detach().narrow(form.dim, start, stop - start))
        with torch.no_grad():
            _copy(places, parts)
        heads = torch.zeros(size, behind, dtype=torch.uint8, device=self._sent_from)
        take = None if send is None else send(list(enumerate(heads.unbind())), rank)
        for piece in pieces:
            piece[:behind] = heads[rank]
        shapes = [[self._shapes[i][rank] for i in owned] for owned in self._owned]
        received = [self._new(behind, of_owner)[0] for of_owner in shapes]

        def end(works: list[list[Tensor]]) -> None:
            (arrived,) = works
            here, there = list[Tensor](), list[Tensor]()
            for owner, piece in enumerate(arrived):
                heads[owner] = piece[:behind]
                here += [rows[i] for i in self._owned[owner]]
                there += self._parts(piece, behind, shapes[owner])
            with torch.no_grad():
                _copy(here, there)
            if take is not None:
                take()

        return Pending([exchange(group, pieces, (group,), "rows for their holders", received)], end)

    def _new(self, behind: int, shapes: Sequence[torch.Size]) -> tuple[Tensor, list[Tensor]]:
        """Make a message with room for a head, and the views of what lies behind it."""
        nbytes = behind + self._dtype.itemsize * sum(shape.numel() for shape in shapes)
        piece = torch.empty(nbytes, dtype=torch.uint8, device=self._sent_from)
        return piece, self._parts(piece, behind, shapes)

    def _parts(self, piece: Tensor, behind: int, shapes: Sequence[torch.Size]) -> list[Tensor]:
        numels = [shape.numel() for shape in shapes]
        flat = torch.split(piece[behind:].view(self._dtype), numels) if numels else ()
        return [part.view(shape) for part, shape in zip(flat, shapes, strict=True)]


def _copy(places: list[Tensor], values: list[Tensor]) -> None:
    if places:
        private.foreach_copy_(places, values)
