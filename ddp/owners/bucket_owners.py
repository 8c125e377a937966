"""Who owns the gradients of a bucket, and what stands in ``param.grad`` on this rank.

Note [Gradients set by hand]
    Whole gradients that a user puts in ``param.grad`` before a pass are not reduced. Each owner adds its rows
    of what stands there on this rank to what is reduced, once; on other ranks it is dropped. Where all ranks
    put the same there, DDP gives the same.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from zero_optim.plan.pieces import Pieces, is_whole, piece_of
from zero_optim.step.gradients import rows_of
from zero_optim.step.partial import Agree, PartialGradient, owned
from zero_optim.units.keeping import RowKeeping
from zero_optim.units.on_host import HostKeeping


@dataclass(frozen=True, slots=True, eq=False)
class BucketOwners:
    """Who owns the gradients of a bucket."""

    names: tuple[str, ...]  # of the parameters
    pieces: tuple[Pieces, ...]  # of each
    rank: int
    size: int
    dtype: torch.dtype | None = None  # in which owners keep reduced gradients; None for the parameters'
    keeping: RowKeeping | None = None  # keeps the rows of this rank; None for ordinary memory
    agree: Agree | None = None  # tells all ranks what a scaler has found; see `PartialGradient`

    def _keeps_another(self, param: Tensor) -> bool:
        """Whether reduced gradients have another dtype or place, so that the parameter cannot show them."""
        return self.dtype not in (None, param.dtype) or isinstance(self.keeping, HostKeeping)

    def copies(self, sums: Iterable[tuple[Tensor, torch.dtype]]) -> Iterator[Tensor]:
        """Take sums of this rank's rows to where they are kept, each in a dtype."""
        converted = (tensor.to(dtype) for tensor, dtype in sums)
        return converted if self.keeping is None else self.keeping.copies(converted)

    def shown(self, slot: int, param: Tensor, reduced: Tensor | None) -> Tensor:
        """Make what stands in ``param.grad``: the gradient on the owner of the whole, else a partial one.

        A partial one everywhere if owners keep gradients in another dtype, or on the host.
        """
        pieces, keeping = self.pieces[slot], self.keeping
        if reduced is not None and len(pieces) == 1 and not self._keeps_another(param):
            return owned(reduced, self.agree)
        comes = keeping.wait if isinstance(keeping, HostKeeping) else None
        return PartialGradient(param, pieces, reduced, self.names[slot], self.dtype, comes, self.agree)

    def added(self, slot: int, param: Tensor, kept: Tensor, reduced: Tensor | None) -> Tensor:
        """Add what was reduced to the gradient of earlier passes, in place; gives what ``param.grad`` is.

        That may be a whole one, put there by the user: Note [Gradients set by hand].
        """
        if not isinstance(kept, PartialGradient):
            piece = piece_of(self.pieces[slot], self.rank)
            kept = kept.to_dense()
            if piece is None:
                kept = self.shown(slot, param, None)
            elif self._keeps_another(param):
                rows = next(self.copies([(rows_of(kept, piece), self.dtype or param.dtype)]))
                kept = self.shown(slot, param, rows)
            elif not is_whole(piece, param.shape):
                kept = self.shown(slot, param, rows_of(kept, piece).clone())  # a view would keep the whole
        if reduced is not None:
            target = kept.rows_to_come if isinstance(kept, PartialGradient) else kept
            assert target is not None  # this rank owns rows of it
            if self.keeping is None:
                target.add_(reduced)
            else:
                self.keeping.add(target, reduced)
        return kept if isinstance(kept, PartialGradient) else owned(kept, self.agree)


def give_back(params: Sequence[Tensor], kept: Mapping[int, Tensor], *, drops: bool) -> None:
    """Make gradients that were put aside, by slot, the parameters' own again; ``drops`` all others."""
    for slot, param in enumerate(params):
        if drops or slot in kept:
            param.grad = kept.get(slot)
