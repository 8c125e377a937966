"""Sparse gradients that are kept by their owners."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from zero_optim.ddp.owners.bucket_owners import BucketOwners, give_back
from zero_optim.ddp.reducer.bucket import ReducerBucket
from zero_optim.plan.pieces import piece_of
from zero_optim.step.partial import PartialGradient, owned


class SparseOwnerBucket(ReducerBucket):
    """A sparse gradient. It is summed on every rank, as without owners, and kept by its owners alone.

    Args:
        index: the parameter's place among all.
        param: the parameter.
        owners: of its gradient.
        dtype: in which it travels; None for the parameter's own.
    """

    def __init__(
        self, index: int, param: Tensor, owners: BucketOwners, *, dtype: torch.dtype | None = None
    ) -> None:
        super().__init__([index], [param], is_sparse=True, as_views=False, batched=True, dtype=dtype)
        self._owners = owners
        self._kept: Tensor | None = None
        self._is_open = self._was_used = False

    def zeros_like(self) -> "SparseOwnerBucket":
        """Make another bucket without entries, which goes on with the gradient that is kept."""
        made = SparseOwnerBucket(self.indices[0], self.params[0], self._owners, dtype=self.dtype)
        made._kept = self._kept
        return made

    def begin(self, kept: Mapping[int, Tensor], *, adds_at_once: bool) -> None:
        """Begin a backward pass; see `OwnerBucket.begin`. Its sum is one more tensor in any case."""
        self._kept, self._is_open, self._was_used = kept.get(0), True, False

    def has_gradient(self, slot: int) -> bool:
        """Whether the parameter has got one in this pass."""
        return self._was_used or self.params[slot].grad is not None

    def take_sparse(self, divisor: float) -> None:
        """Take the gradient, divided, and drop it from the parameter."""
        if not self._is_open:  # see `OwnerBucket`
            self.flat = self._no_gradient(self.dtype)
            return
        self._was_used = self.params[0].grad is not None
        super().take_sparse(divisor)
        self.params[0].grad = None

    def give(self, result: Tensor, skipped: Sequence[bool]) -> None:
        """Give the owners of the parameter the sum, whole, and the other ranks a partial gradient."""
        param, kept, self._kept, self._is_open = self.params[0], self._kept, None, False
        self.flat = self._no_gradient(self.dtype)
        if skipped[self.indices[0]]:
            param.grad = kept
        elif piece_of(self._owners.pieces[0], self._owners.rank) is None:
            of, name, agree = self._owners.pieces[0], self._owners.names[0], self._owners.agree
            elsewhere = PartialGradient(param, of, None, name, agree=agree)
            elsewhere.is_of_sparse = True
            param.grad = elsewhere
        else:
            reduced = result.to(param.dtype)
            param.grad = owned(reduced if kept is None else kept + reduced, self._owners.agree)

    def give_joined(self, unused: Sequence[bool]) -> None:
        """Do what `give` does, in a pass without a gradient of this rank."""
        self.give(self.flat, unused)

    def clear(self) -> None:
        """Do nothing; see `OwnerBucket.clear`."""

    def give_back(self, *, drops: bool) -> None:
        """Go back to the gradient of the passes before, unless this one has ended."""
        kept, self._kept = self._kept, None
        was_open, self._is_open = self._is_open, False
        if was_open:
            give_back(self.params, {} if kept is None else {0: kept}, drops=drops)
        if drops:
            self.pending = []
