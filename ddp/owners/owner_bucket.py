"""Buckets whose gradients go to owners: a row for each rank, there only while gradients are in it.

Note [Memory of sharded gradients]
    Let W be the number of ranks, G the bytes of all gradients, B those of the largest bucket, T = B (W - 1) /
    W. One bucket is pending while the next one fills. Rows are cut into c *portions*: each is made when the
    first gradient comes into it, and dropped when it was sent; two are pending at a time, and the bucket
    before keeps pace with the one that fills. So beside its own rows, G / W where these are even, and the
    gradient that autograd has just made, a rank holds at most (1 + 4 / c) T, or 3 T with one portion. On the
    CPU c makes that 2 B at most. On an accelerator, and without lanes (`zero_optim.comm.lanes`), there is one
    portion, and a bucket is sent when the one before is summed, so that all ranks start collectives in one
    order: less than 3 B. If rows are uneven, put B in the place of T. On top come `BATCH_NBYTES` of small
    gradients, and the sums of this pass where gradients of earlier ones are kept.

Note [Sums apart]
    A pass may turn out bad when all its buckets but the last have been summed. On the CPU sums stay apart
    until ranks know, and a bad pass leaves what earlier passes have added up as it was, bit for bit. On an
    accelerator gradients are handed out before anybody knows (Note [Late reports] in `report`), so each sum
    is added at once: behind a pass that failed call ``zero_grad()``.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from zero_optim.compat import streams
from zero_optim.compat.engine import copy_each, scale_each
from zero_optim.ddp.owners.bucket_owners import BucketOwners
from zero_optim.ddp.owners.owner_rows import OwnerRows, RowPlan
from zero_optim.ddp.reducer.gradient_bucket import ReducerBucket


@dataclass(slots=True, eq=False)
class _Filling:
    """What a bucket holds in one backward pass."""

    kept: dict[int, Tensor] = field(default_factory=dict)  # by slot, of earlier passes
    pace: Callable[[float], None] | None = None
    adds_at_once: bool = False
    is_open: bool = False  # the pass has not ended: gradients that come are taken
    taken: set[int] = field(default_factory=set)  # slots of the gradients that have come
    numel: int = 0  # elements of them
    rows: OwnerRows | None = None  # None before the first gradient, and once they were handed on to be sent
    failed: bool = False  # word of a failure is to be sent
    reduced: dict[int, Tensor] = field(default_factory=dict)  # by slot, summed rows of this rank


class OwnerBucket(ReducerBucket):
    """Gradients that go to their owners together, in portions. Does not communicate.

    In the last bucket each row has one more element, the word of a failure: every rank reads only its own
    row, and may own nothing here. A sparse gradient is summed on every rank, and kept by its owners alone.
    """

    def __init__(
        self,
        indices: Sequence[int],
        params: Sequence[Tensor],
        owners: BucketOwners,
        *,
        is_sparse: bool = False,
        dtype: torch.dtype | None = None,
        carries_word: bool = False,
        num_portions: int = 1,
    ) -> None:
        super().__init__(indices, params, is_sparse=is_sparse, dtype=dtype)
        self._owners = owners
        self._plan = RowPlan.of(params, owners, self.dtype, carries_word=carries_word, count=num_portions)
        self._filling = _Filling()

    def _allocate(self, dtype: torch.dtype) -> Tensor:
        """Rows are made in each pass."""
        return self.params[0].new_empty(0, dtype=dtype, requires_grad=False)

    def shadow(self) -> "OwnerBucket":
        """Return this one: without gradients it sends zeros."""
        return self

    @property
    def num_portions(self) -> int:
        """In how many portions it is sent."""
        return self._plan.count

    @property
    def can_carry_failure_word(self) -> bool:
        """Whether there is an element for `write_failure_word`."""
        return self._plan.carries_word

    def write_failure_word(self) -> None:
        """Mark the rows to be sent as failed."""
        self._filling.failed = True

    def begin(
        self, kept: Mapping[int, Tensor], pace: Callable[[float], None] | None = None, *, adds_at_once: bool
    ) -> None:
        """Begin a backward pass; ``kept`` has the gradients of earlier ones, by slot.

        ``pace`` is called before copies, with the filled part, from 0 to 1. ``adds_at_once``: add sums to
        earlier gradients before the pass is known to be good: Note [Sums apart].
        """
        self._filling = _Filling(dict(kept), pace, adds_at_once, is_open=True)

    def has_gradient(self, slot: int) -> bool:
        """Whether a parameter got a gradient in this pass."""
        return slot in self._filling.taken or self.params[slot].grad is not None

    # ------------------------------------------------------------------ gradients come

    def take_one(self, slot: int, divisor: float) -> None:
        """Copy one gradient into the rows, divided, or zeros if there is none, and drop it."""
        if self.is_sparse:
            super().take_one(slot, divisor)
        else:
            self.take((slot,), divisor)

    def take(self, slots: Sequence[int], divisor: float) -> None:
        """Copy gradients into the rows, divided, or zeros where there is none, and drop them."""
        if self.is_sparse or not slots:
            super().take(slots, divisor)
            return
        filling = self._filling
        filling.numel += sum(self.params[slot].numel() for slot in slots)
        if filling.pace is not None:
            filling.pace(min(1.0, filling.numel / max(1, self._plan.numel)))
        if filling.rows is None:
            filling.rows = OwnerRows(self._plan, self._owners.rank, self.flat)
        filling.rows.join()
        targets, sources = [], []
        for slot in slots:
            for target, source in filling.rows.places(slot, self._gradient(slot)):
                if source is None:
                    target.zero_()
                else:
                    targets.append(target)
                    sources.append(source)
        if len(slots) == 1 and targets and divisor != 1 and targets[0].dtype == sources[0].dtype:
            for target, source in zip(targets, sources, strict=True):
                torch.mul(source, 1 / divisor, out=target)
        elif targets:
            copy_each(targets, sources)
            if divisor != 1:
                scale_each(targets, 1 / divisor)

    def _gradient(self, slot: int) -> Tensor | None:
        if not self._filling.is_open:  # the pass broke off: what is there now is not of it
            return None
        grad = super()._gradient(slot)
        self.params[slot].grad = None
        if grad is not None:
            self._filling.taken.add(slot)
        return grad

    # ------------------------------------------------------------------ gradients go

    def pop_rows(self) -> OwnerRows:
        """Return and drop the rows to be sent, zeros if nothing was copied."""
        rows, self._filling.rows = self._filling.rows, None
        return OwnerRows(self._plan, self._owners.rank, self.flat, zeros=True) if rows is None else rows

    @property
    def word(self) -> float:
        """The element behind the rows, with ``carries_word``: NaN after a failure."""
        return float("nan") if self._filling.failed else 0.0

    def take_over(self, total: Tensor) -> Tensor:
        """Keep the sum of this rank's row; return the word of a failure, one element, or none."""
        filling, owners = self._filling, self._owners
        apart: list[int] = []
        sums: list[tuple[Tensor, torch.dtype]] = []
        for slot, view in self._plan.owned:
            reduced, param, kept = view.of(total), self.params[slot], filling.kept.get(slot)
            if kept is not None and filling.adds_at_once:
                filling.kept[slot] = owners.shown(slot, param, kept, reduced)
                continue
            apart.append(slot)  # where there is something to add it to, it is rounded once, when it is added
            sums.append((reduced, reduced.dtype if kept is not None else owners.dtype or param.dtype))
        filling.reduced.update(zip(apart, owners.copies(sums), strict=True))
        return total[-1:].clone() if self.can_carry_failure_word else self.flat  # no view: that would keep it

    def give(self, result: Tensor, skipped: Sequence[bool]) -> None:
        """Hand out reduced gradients on their owners, and partial gradients elsewhere."""
        filling, self._filling = self._filling, _Filling()
        streams.record_use(*filling.reduced.values())
        for slot, (index, param) in enumerate(zip(self.indices, self.params, strict=True)):
            kept = filling.kept.get(slot)
            if skipped[index]:
                param.grad = kept
            elif self.is_sparse:
                param.grad = self._owners.shown_sparse(param, kept, result)
            else:
                param.grad = self._owners.shown(slot, param, kept, filling.reduced.get(slot))

    def give_back(self, *, drops: bool) -> None:
        """Restore the gradients of earlier passes, unless this pass has ended."""
        filling, self._filling = self._filling, _Filling()
        for slot, param in enumerate(self.params if filling.is_open else ()):
            if drops or slot in filling.kept:
                param.grad = filling.kept.get(slot)
        if drops:
            self.pending = []
        if self.is_sparse:
            super().take_one(0, 1.0)  # no gradient
