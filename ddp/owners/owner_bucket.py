"""Buckets whose gradients go to owners: a row for each rank, there only while gradients are in it.

Note [Memory of sharded gradients]
    Let W be the number of ranks, G the bytes of all gradients, B those of the largest bucket, T = B (W - 1) /
    W. One bucket is pending while the next one fills. Rows are cut into c *portions*: each is made when the
    first gradient comes into it, and dropped when it was sent; two are pending at a time, and the bucket
    before keeps pace with the one that fills. So beside its own rows, G / W where these are even, and the
    gradient that autograd has just made, a rank holds at most (1 + 4 / c) T, or 3 T with one portion. On the
    CPU c makes that 2 B at most. On an accelerator, and without lanes, there is one portion, and a bucket is
    sent when the one before is summed, so that all ranks start collectives in one order: less than 3 B. If
    rows are uneven, put B in the place of T. On top come `BATCH_NBYTES` of small gradients, and this pass's
    sums where earlier ones are kept.

Note [Sums apart]
    On the CPU sums stay apart until ranks know that the pass is good, and a bad one leaves earlier sums as
    they were, bit for bit. On an accelerator gradients are handed out before (Note [Late reports] in
    `report`), so each sum is added at once: behind a pass that failed call ``zero_grad()``.

Note [Gradients set by hand]
    Whole gradients that a user puts in ``param.grad`` before a pass are not reduced. Each owner adds its rows
    of them to the result, once; other ranks drop them. If all ranks set the same, DDP gives the same.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from zero_optim.compat import private, streams
from zero_optim.ddp.owners.owner_rows import OwnerRows, cells_of
from zero_optim.ddp.reducer.gradient_bucket import ReducerBucket
from zero_optim.flow.schedule import ZERO2
from zero_optim.plan.layout import Row, rows_apart, spans_of
from zero_optim.plan.pieces import Pieces, is_whole, piece_of
from zero_optim.plan.plan import ACCELERATOR_ALIGNMENT_NBYTES, ALIGNMENT_NBYTES
from zero_optim.plan.strides import dense_strides, in_order_of_memory
from zero_optim.shard.row_storage import RowStorage
from zero_optim.step.gradients import rows_of
from zero_optim.step.partial import Agree, PartialGradient, owned


@dataclass(frozen=True, slots=True, eq=False)
class BucketOwners:
    """Who owns the gradients of a bucket. Slots are places in the bucket."""

    names: tuple[str, ...]  # of the parameters
    pieces: tuple[Pieces, ...]  # of each
    rank: int
    size: int
    dtype: torch.dtype | None = None  # in which owners keep reduced gradients; None for the parameters'
    storage: RowStorage = field(default_factory=RowStorage)  # of the rows of this rank
    agree: Agree | None = None  # tells all ranks what a scaler has found; see `PartialGradient`


@dataclass(slots=True, eq=False)
class _Filling:
    earlier: dict[int, Tensor] = field(default_factory=dict)  # by slot, gradients of earlier passes
    pace: Callable[[float], None] | None = None
    adds_at_once: bool = False
    is_open: bool = False  # the pass has not ended: gradients that come are taken
    taken: set[int] = field(default_factory=set)  # slots of the gradients that have come
    numel: int = 0  # elements of them
    rows: OwnerRows | None = None  # until they are on their way
    failed: bool = False  # word of a failure is to be sent
    reduced: dict[int, Tensor] = field(default_factory=dict)  # by slot, summed rows of this rank


class OwnerBucket(ReducerBucket):
    """Gradients that go to their owners together, in portions. Does not communicate."""

    schedule = ZERO2

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
        self.num_portions = num_portions
        self._owners = owners
        self._carries_word = carries_word
        self._forms = [(tuple(param.shape), dense_strides(param)) for param in params]
        nbytes = ALIGNMENT_NBYTES if params[0].device.type == "cpu" else ACCELERATOR_ALIGNMENT_NBYTES
        spans = [spans_of(pieces, param.numel()) for pieces, param in zip(owners.pieces, params, strict=True)]
        rows = rows_apart(spans, owners.size, max(1, nbytes // self.dtype.itemsize))
        self._mine = list(self._places_of_own(rows[owners.rank]))
        self._edges = [
            [*(row.stop * number // num_portions for number in range(num_portions)), row.stop + carries_word]
            for row in rows
        ]
        self._numel = sum(edges[-1] for edges in self._edges)
        self._has_gaps = sum(row.stop for row in rows) > sum(param.numel() for param in params)
        self._cells = cells_of(rows, self._edges, len(params))  # by slot
        self._elsewhere: dict[int, PartialGradient] = {}  # by slot, without rows: the same in every pass
        self._filling = _Filling()

    def _places_of_own(self, row: Row) -> Iterator[tuple[int, tuple[int, ...], tuple[int, ...], int]]:
        for slot, _, _, offset in row.extents:
            shape, strides = self._forms[slot]
            piece = piece_of(self._owners.pieces[slot], self._owners.rank)
            assert piece is not None  # it has an extent
            if not is_whole(piece, shape):
                shape = (piece.stop - piece.start, *shape[1:])
            yield slot, shape, strides, offset

    def _allocate(self, dtype: torch.dtype) -> Tensor:
        """Rows are made in each pass."""
        return self.params[0].new_empty(0, dtype=dtype, requires_grad=False)

    @property
    def can_carry_failure_word(self) -> bool:
        """Whether there is an element for `write_failure_word`."""
        return self._carries_word

    def write_failure_word(self) -> None:
        """Mark the rows to be sent as failed."""
        self._filling.failed = True

    def begin(
        self,
        earlier: Mapping[int, Tensor],
        pace: Callable[[float], None] | None = None,  # called before copies with the filled part, 0 to 1
        *,
        adds_at_once: bool,  # Note [Sums apart]
    ) -> None:
        """Begin a backward pass; ``earlier`` has the gradients of earlier ones, by slot."""
        self._filling = _Filling(dict(earlier), pace, adds_at_once, is_open=True)

    def has_gradient(self, slot: int) -> bool:
        """Whether a parameter got a gradient in this pass."""
        return slot in self._filling.taken or self.params[slot].grad is not None

    # ------------------------------------------------------------------ gradients come

    def take_one(self, slot: int, divisor: float) -> None:
        """Copy one gradient into the rows, divided, or zeros, and drop it."""
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
            filling.pace(min(1.0, filling.numel / max(1, self._numel)))
        rows = filling.rows = filling.rows or self._new_rows(zeros=self._has_gaps)
        rows.join()
        targets, sources = [], []
        for target, source in self._places(rows, slots):
            if source is None:
                target.zero_()
            else:
                targets.append(target)
                sources.append(source)
        if len(slots) == 1 and targets and divisor != 1 and targets[0].dtype == sources[0].dtype:
            for target, source in zip(targets, sources, strict=True):
                torch.mul(source, 1 / divisor, out=target)
        elif targets:
            private.foreach_copy_(targets, sources)
            if divisor != 1:
                for run in rows.runs([cell for slot in sorted(slots) for cell in self._cells[slot]]):
                    run.mul_(1 / divisor)

    def _new_rows(self, *, zeros: bool) -> OwnerRows:
        return OwnerRows(self._edges, self._owners.rank, self.flat, zeros=zeros)

    def _places(self, rows: OwnerRows, slots: Sequence[int]) -> Iterator[tuple[Tensor, Tensor | None]]:
        """Yield each place in the rows, and what belongs there; gradients leave their parameters."""
        portions: dict[tuple[int, int], tuple[Tensor, int]] = {}  # with their first elements
        for slot in slots:
            gradient, (shape, strides), cells = self._gradient(slot), self._forms[slot], self._cells[slot]
            flat = None if gradient is None or len(cells) == 1 else in_order_of_memory(gradient, strides)
            for owner, number, _, extent in cells:
                known = portions.get((owner, number))
                if known is None:
                    portion = rows.portion(owner, number)
                    known = portions[owner, number] = portion, int(portion.storage_offset())
                portion, first = known
                if len(cells) == 1:
                    yield portion.as_strided(shape, strides, first + extent.offset), gradient
                else:
                    part = None if flat is None else flat[extent.start : extent.stop]
                    yield portion[extent.offset : extent.end], part

    def _gradient(self, slot: int) -> Tensor | None:
        if not self._filling.is_open:  # the pass broke off: what is there now is not of it
            return None
        grad = super()._gradient(slot)
        self.params[slot].grad = None
        if grad is not None:
            self._filling.taken.add(slot)
        return grad

    # ------------------------------------------------------------------ gradients go

    def rows(self) -> OwnerRows:
        """Return the rows to be sent, zeros if nothing was copied, with the word of a failure."""
        rows = self._filling.rows or self._new_rows(zeros=True)
        if self._carries_word:
            for owner in range(self._owners.size):
                last = rows.portion(owner, self.num_portions - 1)
                last[-1:].fill_(float("nan") if self._filling.failed else 0.0)
        return rows

    def free(self) -> None:
        """Let go of the rows, which are on their way."""
        self._filling.rows = None

    def take_over(self, total: Tensor) -> Tensor:
        """Keep the sum of this rank's row; return the word of a failure, or nothing."""
        filling, dtype = self._filling, self._owners.dtype
        apart: list[int] = []
        sums: list[tuple[Tensor, torch.dtype]] = []
        start = int(total.storage_offset())
        for slot, shape, strides, offset in self._mine:
            reduced = total.as_strided(shape, strides, start + offset)
            earlier = filling.earlier.get(slot)
            if earlier is not None and filling.adds_at_once:
                filling.earlier[slot] = self._shown(slot, earlier, reduced)
                continue
            apart.append(slot)  # where there is something to add it to, it is rounded once, when it is added
            kept = dtype or self.params[slot].dtype
            sums.append((reduced, reduced.dtype if earlier is not None else kept))
        filling.reduced.update(zip(apart, self._copies(sums), strict=True))
        return total[-1:].clone() if self._carries_word else self.flat  # no view: that would keep it

    def _copies(self, sums: Iterable[tuple[Tensor, torch.dtype]]) -> Iterator[Tensor]:
        return self._owners.storage.copies(tensor.to(dtype) for tensor, dtype in sums)

    def give(self, result: Tensor, skipped: Sequence[bool]) -> None:
        """Hand out reduced gradients on their owners, and partial gradients elsewhere."""
        filling, self._filling = self._filling, _Filling()
        streams.record_use(*filling.reduced.values())
        for slot, (index, param) in enumerate(zip(self.indices, self.params, strict=True)):
            earlier = filling.earlier.get(slot)
            if skipped[index]:
                param.grad = earlier
            elif self.is_sparse:
                param.grad = self._shown_sparse(earlier, result)
            else:
                param.grad = self._shown(slot, earlier, filling.reduced.get(slot))

    def give_back(self, *, drops: bool) -> None:
        """Restore the gradients of earlier passes, unless this pass has ended."""
        filling, self._filling = self._filling, _Filling()
        for slot, param in enumerate(self.params if filling.is_open else ()):
            if drops or slot in filling.earlier:
                param.grad = filling.earlier.get(slot)
        if drops:
            self.pending = []
        if self.is_sparse:
            super().take_one(0, 1.0)  # no gradient

    # ------------------------------------------------------------------ what stands in param.grad

    def _shown(self, slot: int, earlier: Tensor | None, reduced: Tensor | None) -> Tensor:
        """Return ``param.grad``: whole on its only owner, else partial. Adds ``reduced`` to ``earlier``."""
        owners = self._owners
        if earlier is None:
            if reduced is None or len(owners.pieces[slot]) > 1 or self._keeps_another(slot):
                return self._partial(slot, reduced)
            return owned(reduced, owners.agree)
        if not isinstance(earlier, PartialGradient):
            earlier = self._taken_over(slot, earlier.to_dense())
        if reduced is not None:
            target = earlier.rows_to_come if isinstance(earlier, PartialGradient) else earlier
            assert target is not None  # this rank owns rows of it
            owners.storage.add(target, reduced)
        return earlier if isinstance(earlier, PartialGradient) else owned(earlier, owners.agree)

    def _keeps_another(self, slot: int) -> bool:
        """Whether owners keep gradients in a dtype or place that ``param.grad`` does not take."""
        owners = self._owners
        return owners.dtype not in (None, self.params[slot].dtype) or owners.storage.on_host

    def _partial(self, slot: int, rows: Tensor | None) -> PartialGradient:
        if rows is None and slot in self._elsewhere:
            return self._elsewhere[slot]
        owners = self._owners
        comes = owners.storage.wait if owners.storage.on_host else None
        pieces, name, param = owners.pieces[slot], owners.names[slot], self.params[slot]
        gradient = PartialGradient(param, pieces, rows, name, owners.dtype, comes, owners.agree)
        if rows is None:
            self._elsewhere[slot] = gradient
        return gradient

    def _taken_over(self, slot: int, whole: Tensor) -> Tensor:
        owners, param = self._owners, self.params[slot]
        piece = piece_of(owners.pieces[slot], owners.rank)
        if piece is None:
            return self._partial(slot, None)
        if self._keeps_another(slot):
            rows = next(self._copies([(rows_of(whole, piece), owners.dtype or param.dtype)]))
            return self._shown(slot, None, rows)
        if is_whole(piece, param.shape):
            return whole
        return self._shown(slot, None, rows_of(whole, piece).clone())  # a view would keep the whole

    def _shown_sparse(self, earlier: Tensor | None, total: Tensor) -> Tensor:
        owners, param = self._owners, self.params[0]
        if piece_of(owners.pieces[0], owners.rank) is None:
            return PartialGradient(param, owners.pieces[0], None, owners.names[0], agree=owners.agree)
        reduced = total.to(param.dtype)
        return owned(reduced if earlier is None else earlier + reduced, owners.agree)
