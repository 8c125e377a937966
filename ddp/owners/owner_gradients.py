"""`Owners`: who owns the rows of gradients, and what ``param.grad`` is when they were reduced to these.

Note [Gradients set by hand]
    Whole gradients that a user puts in ``param.grad`` before a pass are not reduced. Each owner adds its rows
    of them to the result, once; other ranks drop them. If all ranks set the same, DDP gives the same.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from zero_optim.plan.pieces import Pieces, is_whole, piece_of
from zero_optim.shard.row_storage import RowStorage
from zero_optim.step.gradients import rows_of
from zero_optim.step.partial import Agree, PartialGradient, owned


@dataclass(frozen=True, slots=True, eq=False)
class Owners:
    """The owners of gradients: whole on the only owner of a parameter, else partial gradients."""

    pieces: Mapping[Tensor, Pieces]
    names: Mapping[Tensor, str]
    rank: int
    size: int
    agree: Agree | None = None  # tells all ranks what a scaler has found; see `PartialGradient`
    storage: RowStorage = field(default_factory=RowStorage)  # of the rows of this rank
    dtypes: Mapping[Tensor, torch.dtype] = field(default_factory=dict)  # of what owners keep, where another
    _elsewhere: dict[Tensor, PartialGradient] = field(default_factory=dict)  # without rows: in every pass

    def dtype_of(self, param: Tensor) -> torch.dtype:
        """Return the dtype in which owners keep reduced gradients."""
        return self.dtypes.get(param, param.dtype)

    def shown(self, param: Tensor, earlier: Tensor | None, reduced: Tensor | None) -> Tensor:
        """Return ``param.grad``; ``reduced``, this rank's rows, is added to the earlier gradient."""
        if earlier is None:
            if reduced is None or len(self.pieces[param]) > 1 or self._keeps_another(param):
                return self._partial(param, reduced)
            return owned(reduced, self.agree)
        if not isinstance(earlier, PartialGradient):
            earlier = self.shown_of_whole(param, earlier.to_dense())
        if reduced is not None:
            target = earlier.rows_to_come if isinstance(earlier, PartialGradient) else earlier
            assert target is not None  # this rank owns rows of it
            self.storage.add(target, reduced)
        return earlier

    def shown_of_whole(self, param: Tensor, whole: Tensor, *, is_view: bool = False) -> Tensor:
        """Return ``param.grad`` of a dense gradient; ``is_view``: rows may be views, as the memory stays."""
        piece = piece_of(self.pieces[param], self.rank)
        if piece is None:
            return self._partial(param, None)
        rows = rows_of(whole, piece)
        if self._keeps_another(param):
            rows = next(self.storage.copies([rows.to(self.dtype_of(param))]))
        elif not (is_view or is_whole(piece, param.shape)):
            rows = rows.clone()  # a view would keep the whole
        return self.shown(param, None, rows)

    def shown_sparse(self, param: Tensor, earlier: Tensor | None, total: Tensor) -> Tensor:
        """Return ``param.grad`` of a sparse sum over all ranks."""
        pieces = self.pieces[param]
        if piece_of(pieces, self.rank) is None:
            return PartialGradient(param, pieces, None, self.names[param], agree=self.agree)
        reduced = total.to(param.dtype)
        return owned(reduced if earlier is None else earlier + reduced, self.agree)

    def _keeps_another(self, param: Tensor) -> bool:
        """Whether owners keep the gradient in a dtype or place that ``param.grad`` does not take."""
        return self.storage.on_host or param in self.dtypes

    def _partial(self, param: Tensor, rows: Tensor | None) -> PartialGradient:
        known = self._elsewhere.get(param) if rows is None else None
        if known is not None:
            return known
        comes = self.storage.wait if self.storage.on_host else None
        pieces, name, dtype = self.pieces[param], self.names[param], self.dtype_of(param)
        gradient = PartialGradient(param, pieces, rows, name, dtype, comes, self.agree)
        if rows is None:
            self._elsewhere[param] = gradient
        return gradient
