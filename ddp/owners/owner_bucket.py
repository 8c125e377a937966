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
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import torch
from torch import Tensor

from zero_optim.compat import private, streams
from zero_optim.ddp.owners.owner_gradients import Owners
from zero_optim.ddp.owners.owner_rows import OwnerRows
from zero_optim.ddp.reducer.gradient_bucket import ReducerBucket
from zero_optim.plan.layout import Extent, Row, rows_apart, spans_of
from zero_optim.plan.plan import ACCELERATOR_ALIGNMENT_NBYTES, ALIGNMENT_NBYTES
from zero_optim.plan.strides import dense_strides, in_order_of_memory


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

    def __init__(
        self,
        indices: Sequence[int],
        params: Sequence[Tensor],
        owners: Owners,
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
        spans = [spans_of(owners.pieces[param], param.numel()) for param in params]
        rows = rows_apart(spans, owners.size, max(1, nbytes // self.dtype.itemsize))
        self._mine = list(self._places_of_own(rows[owners.rank]))
        self._edges = [
            [*(row.stop * number // num_portions for number in range(num_portions)), row.stop + carries_word]
            for row in rows
        ]
        self._numel = sum(edges[-1] for edges in self._edges)
        self._has_gaps = sum(row.stop for row in rows) > sum(param.numel() for param in params)
        # by slot, where the elements are: a portion (owner, number), the place in it, the extent at an offset
        self._cells: list[list[tuple[tuple[int, int], int, Extent]]] = [[] for _ in params]
        for row, edges in zip(rows, self._edges, strict=True):
            for number, (start, stop) in enumerate(pairwise(edges)):
                for place, extent in enumerate(row.within(start, stop)):
                    there = extent._replace(offset=extent.offset - start)
                    self._cells[extent.param].append(((row.owner, number), place, there))
        self._filling = _Filling()

    def _places_of_own(self, row: Row) -> Iterator[tuple[int, tuple[int, ...], tuple[int, ...], int]]:
        for slot, start, stop, offset in row.extents:
            (shape, strides), numel = self._forms[slot], self.params[slot].numel()
            if stop - start < numel:
                shape = (shape[0] * (stop - start) // numel, *shape[1:])
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
                self._multiply(rows, slots, 1 / divisor)

    def _new_rows(self, *, zeros: bool) -> OwnerRows:
        return OwnerRows(self._edges, self._owners.rank, self.flat, zeros=zeros)

    def _places(self, rows: OwnerRows, slots: Sequence[int]) -> Iterator[tuple[Tensor, Tensor | None]]:
        """Yield each place in the rows, and what belongs there; gradients leave their parameters."""
        portions: dict[tuple[int, int], tuple[Tensor, int]] = {}  # with their first elements
        for slot in slots:
            gradient, (shape, strides), cells = self._gradient(slot), self._forms[slot], self._cells[slot]
            flat = None if gradient is None or len(cells) == 1 else in_order_of_memory(gradient, strides)
            for key, _, extent in cells:
                if key not in portions:
                    portion = rows.portion(*key)
                    portions[key] = portion, int(portion.storage_offset())
                portion, first = portions[key]
                if len(cells) == 1:
                    yield portion.as_strided(shape, strides, first + extent.offset), gradient
                else:
                    part = None if flat is None else flat[extent.start : extent.stop]
                    yield portion[extent.offset : extent.end], part

    def _multiply(self, rows: OwnerRows, slots: Sequence[int], factor: float) -> None:
        """Multiply gradients in the rows, neighbours in one go."""
        ends: dict[tuple[tuple[int, int], int], tuple[int, int]] = {}  # of runs: offsets, by the place behind
        for key, place, extent in (cell for slot in sorted(slots) for cell in self._cells[slot]):
            start, _ = ends.pop((key, place), (extent.offset, 0))
            ends[key, place + 1] = start, extent.end
        for (key, _), (start, stop) in ends.items():
            rows.portion(*key)[start:stop].mul_(factor)

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
        filling, owners = self._filling, self._owners
        apart: list[int] = []
        sums: list[tuple[Tensor, torch.dtype]] = []
        first = int(total.storage_offset())
        kept = owners.dtype_of(self.params[0])
        for slot, shape, strides, offset in self._mine:
            reduced, earlier = total.as_strided(shape, strides, first + offset), filling.earlier.get(slot)
            if earlier is not None and filling.adds_at_once:
                filling.earlier[slot] = owners.shown(self.params[slot], earlier, reduced)
                continue
            apart.append(slot)  # where there is something to add it to, it is rounded once, when it is added
            sums.append((reduced, reduced.dtype if earlier is not None else kept))
        copies = owners.storage.copies(tensor.to(dtype) for tensor, dtype in sums)
        filling.reduced.update(zip(apart, copies, strict=True))
        return total[-1:].clone() if self._carries_word else self.flat  # no view: that would keep it

    def give(self, result: Tensor, skipped: Sequence[bool]) -> None:
        """Hand out reduced gradients on their owners, and partial gradients elsewhere."""
        filling, self._filling = self._filling, _Filling()
        streams.record_use(*filling.reduced.values())
        for slot, (index, param) in enumerate(zip(self.indices, self.params, strict=True)):
            earlier = filling.earlier.get(slot)
            if skipped[index]:
                param.grad = earlier
            elif self.is_sparse:
                param.grad = self._owners.shown_sparse(param, earlier, result)
            else:
                param.grad = self._owners.shown(param, earlier, filling.reduced.get(slot))

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
