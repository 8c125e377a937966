"""Who owns the gradients of a bucket, and what stands in ``param.grad`` on this rank.

Note [Gradients set by hand]
    A user may put whole gradients in ``param.grad`` before a pass that is reduced, such as zeros. They are
    not reduced, as those are that passes under ``no_sync()`` made. Each owner adds its rows of what stands
    there on this rank to what is reduced, once. What stands there on the other ranks is dropped. Where all
    ranks put the same there, DDP gives the same. Otherwise DDP averages what they put there.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from zero_optim.plan.pieces import Pieces, is_whole, piece_of
from zero_optim.shard.keeping import RowKeeping
from zero_optim.shard.on_host import HostKeeping
from zero_optim.step.gradients import rows_of
from zero_optim.step.partial import Agree, PartialGradient, owned


@dataclass(frozen=True, slots=True, eq=False)
class BucketOwners:
    """Who owns the gradients of a bucket.

    Attributes:
        names: of the parameters, for messages.
        pieces: of each parameter.
        rank: this one, of ``size``.
        dtype: in which owners keep reduced gradients; None for that of the parameters.
        keeping: keeps the rows of this rank; None for ordinary memory.
        agree: tells all ranks what a scaler has found; see `PartialGradient`.
    """

    names: tuple[str, ...]
    pieces: tuple[Pieces, ...]
    rank: int
    size: int
    dtype: torch.dtype | None = None
    keeping: RowKeeping | None = None
    agree: Agree | None = None

    def _keeps_another(self, param: Tensor) -> bool:
        """Whether reduced gradients have another dtype or place, so that the parameter cannot show them."""
        return self.dtype not in (None, param.dtype) or isinstance(self.keeping, HostKeeping)

    def copies(self, sums: Iterable[tuple[Tensor, torch.dtype]]) -> Iterator[Tensor]:
        """Take sums of this rank's rows to where they are kept, each in a dtype."""
        converted = (tensor.to(dtype) for tensor, dtype in sums)
        return converted if self.keeping is None else self.keeping.copies(converted)

    def shown(self, slot: int, param: Tensor, reduced: Tensor | None) -> Tensor:
        """Make what stands in ``param.grad``: the gradient on the owner of the whole, else a partial one.

        It is a partial one everywhere if owners keep gradients in another dtype, or on the host. What was
        reduced are the rows of this rank; None if it owns none.
        """
        pieces, keeping = self.pieces[slot], self.keeping
        if reduced is not None and len(pieces) == 1 and not self._keeps_another(param):
            return owned(reduced, self.agree)
        comes = keeping.wait if isinstance(keeping, HostKeeping) else None
        return PartialGradient(param, pieces, reduced, self.names[slot], self.dtype, comes, self.agree)

    def added(self, slot: int, param: Tensor, kept: Tensor, reduced: Tensor | None) -> Tensor:
        """Add what was reduced to the gradient of earlier passes, in place; gives what ``param.grad`` is.

        That gradient is as `shown` gave it; or whole, put there by the user: Note [Gradients set by hand].
        What was reduced is None if this rank owns no rows, or if they were added before.
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
