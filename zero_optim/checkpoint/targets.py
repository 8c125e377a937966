"""The tensors of the model that a checkpoint is loaded into: who reads them, and how others get them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from zero_optim.checkpoint.content import tensor_pieces
from zero_optim.checkpoint.fitting import model_parts
from zero_optim.checkpoint.names import Objects
from zero_optim.checkpoint.reading import Read
from zero_optim.checkpoint.storage import Rows
from zero_optim.checkpoint.values import Json
from zero_optim.comm.collectives import RankGroup
from zero_optim.comm.wire import PIECE_NBYTES, memory_of
from zero_optim.plan.pieces import Pieces, is_whole, piece_of


@dataclass(frozen=True, slots=True, eq=False)
class Target:
    """A tensor of the model to load into, and the ranks that read it or its rows.

    Attributes:
        tensor: the tensor.
        key: its name among the tensors of the checkpoint.
        pieces: which rank reads which rows.
        stepped: the optimizer steps it, and gathers it from its owners.
        apart: the rows of this rank, where they are not in the tensor.
    """

    tensor: Tensor
    key: str
    pieces: Pieces
    stepped: bool
    apart: Tensor | None

    @property
    def reader(self) -> int:
        """The only rank that reads it; asked of what no optimizer steps."""
        return self.pieces[0].owner

    def rows(self, rank: int) -> Rows:
        """Return the rows that a rank which reads reads; None for all."""
        piece = piece_of(self.pieces, rank)
        if piece is None or is_whole(piece, self.tensor.shape):
            return None
        return piece.start, piece.stop


def targets_in(group: RankGroup, objects: Objects, values: Mapping[str, Json]) -> list[Target]:
    """List the tensors of the model that the values of a checkpoint are for; tied ones once."""
    if objects.model is None:
        return []
    parts = model_parts(values)
    present: dict[str, Tensor] = {}
    places: set[tuple[object, ...]] = set()
    for name, tensor in objects.model_state().items():
        if parts[name][0] == "tensor" and isinstance(tensor, Tensor):
            place = (
                (tensor.data_ptr(), tensor.device, tensor.shape, tensor.stride())
                if tensor.numel()
                else (name,)
            )
            if place not in places:  # tied weights are loaded once
                places.add(place)
                present[name] = tensor
    pieces = tensor_pieces(present, objects.optimizer, group.size)
    stepped = {p.data_ptr() for p in objects.optimizer.owners()} if objects.optimizer is not None else set()
    with objects.left_freed() as kept:
        apart = {address: each.rows for address, each in kept.items()}
    targets = []
    for name, tensor in present.items():
        address = tensor.data_ptr()
        is_stepped = tensor.numel() > 0 and address in stepped
        targets.append(Target(tensor, parts[name][1][0], pieces[name], is_stepped, apart.get(address)))
    return targets


@torch.no_grad()
def place_own(group: RankGroup, targets: Sequence[Target], read: Read) -> None:
    """Copy what this rank has read to the parameters that it owns, or to its rows of them."""
    for target in targets:
        if target.stepped and piece_of(target.pieces, group.rank):
            place, rows = target.apart, target.rows(group.rank)
            if place is None:
                place = target.tensor if rows is None else target.tensor[slice(*rows)]
            place.copy_(read[target.key])


@torch.no_grad()
def share_model(group: RankGroup, targets: Sequence[Target], read: Read) -> None:
    """Load tensors of the model that no optimizer gathers, on all ranks; all ranks call."""
    batch: list[Target] = []
    for target in [target for target in targets if not target.stepped]:
        batch.append(target)
        if sum(entry.tensor.nbytes for entry in batch) >= PIECE_NBYTES:
            _share(group, batch, read)
            batch = []
    _share(group, batch, read)


def _share(group: RankGroup, batch: Sequence[Target], read: Read) -> None:
    """Broadcast some tensors from the ranks that read them."""
    rows = []
    for target in batch:
        saved = read[target.key] if target.reader == group.rank else read.blank(target.key)
        rows.append(saved.to(group.device))
    live = [(t.reader, memory_of(row)) for t, row in zip(batch, rows, strict=True) if row.numel()]
    for work in group.broadcast_rows(live):
        work.wait()
    for target, row in zip(batch, rows, strict=True):
        target.tensor.copy_(row)
