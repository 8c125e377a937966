"""Buckets whose gradients go to owners: a row for each rank, there only while gradients are in it.

Note [Memory of sharded gradients]
    Let W be the number of ranks, G the bytes of all gradients, B those of the largest bucket, T = B (W - 1) /
    W. One bucket is under way while the next one fills. Rows are cut into c *portions*: each is made when the
    first gradient comes into it, and let go when it was sent; two are under way at a time, and the bucket
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
from zero_optim.ddp.owners.bucket_owners import BucketOwners, give_back
from zero_optim.ddp.owners.rows import OwnerRows, RowPlan
from zero_optim.ddp.reducer.bucket import ReducerBucket
from zero_optim.plan.pieces import piece_of
from zero_optim.step.partial import PartialGradient, owned


@dataclass(slots=True, eq=False)
class _Filling:
    """What a bucket holds in one backward pass."""

    is_open: bool = False  # the pass has not ended: gradients that come are taken
    adds_at_once: bool = False  # see `OwnerBucket.begin`
    kept: dict[int, Tensor] = field(default_factory=dict)  # by slot, of earlier passes
    taken: set[int] = field(default_factory=set)  # slots of the gradients that have come
    numel: int = 0  # elements of them
    pace: Callable[[float], None] | None = None  # see `OwnerBucket.pace_by`
    rows: OwnerRows | None = None  # None before the first gradient, and once they were handed on to be sent
    failed: bool = False  # word of a failure is to be sent
    reduced: dict[int, Tensor] = field(default_factory=dict)  # by slot, summed rows of this rank


class OwnerBucket(ReducerBucket):
    """Gradients that go to their owners together, in portions. Does not communicate.

    If it carries the word of a failure, as the last bucket does, each row has an element for that behind its
    gradients: every rank reads its own row alone, and may own nothing of this bucket.
    """

    def __init__(
        self,
        indices: Sequence[int],
        params: Sequence[Tensor],
        owners: BucketOwners,
        *,
        dtype: torch.dtype | None = None,
        carries_word: bool = False,
        num_portions: int = 1,
    ) -> None:
        super().__init__(indices, params, is_sparse=False, as_views=False, batched=False, dtype=dtype)
        self._owners = owners
        self._plan = RowPlan.of(
            params, owners.pieces, owners.size, self.dtype, carries_word=carries_word, count=num_portions
        )
        self._filling = _Filling()

    def _allocate(self, dtype: torch.dtype) -> Tensor:
        """Make nothing: rows are made in each pass."""
        return self.params[0].new_empty(0, dtype=dtype, requires_grad=False)

    def zeros_like(self) -> "OwnerBucket":
        """Make another bucket for the same parameters, which goes on with the gradients that are kept."""
        like = OwnerBucket(
            self.indices,
            self.params,
            self._owners,
            dtype=self.dtype,
            carries_word=self.can_carry_failure_word,
            num_portions=self.num_portions,
        )
        like.begin(self._filling.kept, adds_at_once=self._filling.adds_at_once)
        return like

    @property
    def num_portions(self) -> int:
        """In how many portions it is sent."""
        return self._plan.count

    @property
    def can_carry_failure_word(self) -> bool:
        """Whether there is an element for `write_failure_word`."""
        return self._plan.carries_word

    def write_failure_word(self) -> None:
        """Have the rows that are sent say that something went wrong."""
        self._filling.failed = True

    def begin(self, kept: Mapping[int, Tensor], *, adds_at_once: bool) -> None:
        """Begin a backward pass, with the gradients of earlier ones, by slot, as `give` gave them.

        Sums may be added to these at once, and not only when the pass is known to be good: Note [Sums apart].
        """
        self._filling = _Filling(is_open=True, adds_at_once=adds_at_once, kept=dict(kept))

    def pace_by(self, pace: Callable[[float], None]) -> None:
        """Have told in this pass, before gradients are copied, which part is filled, from 0 to 1."""
        self._filling.pace = pace

    def has_gradient(self, slot: int) -> bool:
        """Whether a parameter has got one in this pass."""
        return slot in self._filling.taken or self.params[slot].grad is not None

    def is_inside(self, slot: int) -> bool:
        """Whether a parameter's gradient is part of the bucket: none is, as they are dropped."""
        return False

    # ------------------------------------------------------------------ gradients come

    def take_one(self, slot: int, divisor: float) -> None:
        """Copy one gradient into the rows, divided, or zeros if there is none, and drop it."""
        self.take((slot,), divisor)

    def take(self, slots: Sequence[int], divisor: float) -> None:
        """Copy gradients into the rows, divided, or zeros where there is none, and drop them."""
        if not slots:
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
            grad = self._pop_gradient(slot)
            for number, part in self._plan.cells[slot]:
                place = filling.rows.place(number, part)
                if grad is None:
                    place.zero_()
                else:
                    targets.append(place)
                    sources.append(part.taken_from(grad))
        if len(slots) == 1 and targets and divisor != 1 and targets[0].dtype == sources[0].dtype:
            for target, source in zip(targets, sources, strict=True):
                torch.mul(source, 1 / divisor, out=target)
        elif targets:
            copy_each(targets, sources)
            if divisor != 1:
                scale_each(targets, 1 / divisor)

    def _pop_gradient(self, slot: int) -> Tensor | None:
        param = self.params[slot]
        if not self._filling.is_open:  # the pass broke off: what is there now is not of it
            return None
        grad, param.grad = param.grad, None
        if grad is not None and grad.is_sparse:
            self._misfits.append(slot)
            return None
        if grad is not None:
            self._filling.taken.add(slot)
        return grad

    # ------------------------------------------------------------------ gradients go

    def pop_rows(self) -> OwnerRows:
        """Give the rows to be sent, zeros if nothing was copied; this object lets go of them."""
        rows, self._filling.rows = self._filling.rows, None
        return OwnerRows(self._plan, self._owners.rank, self.flat, zeros=True) if rows is None else rows

    @property
    def word(self) -> float:
        """What is sent behind the rows, if there is a place for it: NaN if something went wrong."""
        return float("nan") if self._filling.failed else 0.0

    def take_over(self, total: Tensor) -> Tensor:
        """Take over the sum of this rank's row, and give the word of a failure, one element, or none."""
        filling = self._filling
        apart: list[int] = []
        sums: list[tuple[Tensor, torch.dtype]] = []
        for slot, part in self._plan.owned_parts(self._owners.rank):
            reduced, param = part.seen_in(total), self.params[slot]
            if slot in filling.kept and filling.adds_at_once:
                filling.kept[slot] = self._owners.added(slot, param, filling.kept[slot], reduced)
                continue
            apart.append(slot)  # where there is something to add it to, it is rounded once, when it is added
            dtype = reduced.dtype if slot in filling.kept else self._owners.dtype or param.dtype
            sums.append((reduced, dtype))
        filling.reduced.update(zip(apart, self._owners.copies(sums), strict=True))
        return total[-1:].clone() if self.can_carry_failure_word else self.flat  # no view: that would keep it

    def give(self, result: Tensor, skipped: Sequence[bool]) -> None:
        """Make what `take_over` has the parameters' own on their owners, and partial gradients elsewhere."""
        filling, self._filling = self._filling, _Filling()
        streams.record_use(*filling.reduced.values())
        for slot, (index, param) in enumerate(zip(self.indices, self.params, strict=True)):
            kept, reduced = filling.kept.get(slot), filling.reduced.get(slot)
            if skipped[index]:
                param.grad = kept
            elif kept is None:
                param.grad = self._owners.shown(slot, param, reduced)
            else:
                param.grad = self._owners.added(slot, param, kept, reduced)

    def give_joined(self, unused: Sequence[bool]) -> None:
        """Make what was reduced in a pass without gradients of this rank the parameters' own, as `give`."""
        self.give(self.flat, unused)

    def clear(self) -> None:
        """Do nothing: where the pass broke off, `give_back` has gone back to the gradients before it."""

    def give_back(self, *, drops: bool) -> None:
        """Go back to the gradients of the passes before, unless this one has ended."""
        filling, self._filling = self._filling, _Filling()
        if filling.is_open:
            give_back(self.params, filling.kept, drops=drops)
        if drops:
            self.pending = []


class SparseOwnerBucket(ReducerBucket):
    """A sparse gradient. It is summed on every rank, as without owners, and kept by its owners alone."""

    def __init__(
        self, index: int, param: Tensor, owners: BucketOwners, *, dtype: torch.dtype | None = None
    ) -> None:
        super().__init__([index], [param], is_sparse=True, as_views=False, batched=True, dtype=dtype)
        self._owners = owners
        self._kept: dict[int, Tensor] = {}
        self._is_open = self._was_used = False

    def zeros_like(self) -> "SparseOwnerBucket":
        """Make another bucket without entries, which goes on with the gradient that is kept."""
        like = SparseOwnerBucket(self.indices[0], self.params[0], self._owners, dtype=self.dtype)
        like._kept = self._kept
        return like

    def begin(self, kept: Mapping[int, Tensor], *, adds_at_once: bool) -> None:
        """Begin a backward pass; see `OwnerBucket.begin`. Its sum is one more tensor in any case."""
        self._kept, self._is_open, self._was_used = dict(kept), True, False

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
        param, owners, kept = self.params[0], self._owners, self._kept.get(0)
        self._kept, self._is_open = {}, False
        self.flat = self._no_gradient(self.dtype)
        if skipped[self.indices[0]]:
            param.grad = kept
        elif piece_of(owners.pieces[0], owners.rank) is None:
            elsewhere = PartialGradient(param, owners.pieces[0], None, owners.names[0], agree=owners.agree)
            elsewhere.is_of_sparse = True
            param.grad = elsewhere
        else:
            reduced = result.to(param.dtype)
            param.grad = owned(reduced if kept is None else kept + reduced, owners.agree)

    def give_joined(self, unused: Sequence[bool]) -> None:
        """Do what `give` does, in a pass without a gradient of this rank."""
        self.give(self.flat, unused)

    def clear(self) -> None:
        """Do nothing; see `OwnerBucket.clear`."""

    def give_back(self, *, drops: bool) -> None:
        """Go back to the gradient of the passes before, unless this one has ended."""
        kept, self._kept = self._kept, {}
        was_open, self._is_open = self._is_open, False
        if was_open:
            give_back(self.params, kept, drops=drops)
        if drops:
            self.pending = []
