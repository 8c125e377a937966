"""Buckets whose gradients go to owners: a row for each rank, in memory only while gradients are there.

Note [Rows of gradients]
    Reduced gradients are views of the owner's row. Each rank's row is laid out by itself, as gradients come:
    the last parameter first, aligned as parameters are. The parameter bucket's layout has a cut parameter
    last in one row and first in the next, and room for frozen parameters and stamps.

Note [Memory of sharded gradients]
    Let W be the number of ranks, G the bytes of all gradients, B those of the largest bucket. A bucket is
    sent while the next one fills, and that is sent when the first is summed. So beside its own rows, G / W
    where these are even, and the gradient that autograd has just made, a rank holds two buckets, and what it
    receives: at most B, and its row of a bucket where that is brought to it (Note [Sums of slices] in
    `row_sum`); nothing through the host's memory. On top come `BATCH_NBYTES` of small gradients, and this
    pass's sums where earlier ones are kept.

Note [Sums apart]
    On the CPU sums stay apart until ranks know that the pass is good, and a bad one leaves earlier sums as
    they were, bit for bit. On an accelerator gradients are handed out before (Note [Late reports] in
    `report`), so each sum is added at once: behind a pass that failed call ``zero_grad()``.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from operator import add

import torch
from torch import Tensor

from zero_optim.compat import private, streams
from zero_optim.ddp.owners.owner_gradients import Owners
from zero_optim.ddp.reducer.gradient_bucket import ReducerBucket
from zero_optim.flow.pending import AfterEvent
from zero_optim.plan.layout import Extent, aligned, rows_apart, spans_of
from zero_optim.plan.plan import ACCELERATOR_ALIGNMENT_NBYTES, ALIGNMENT_NBYTES
from zero_optim.plan.slices import Slices
from zero_optim.plan.strides import dense_strides, in_order_of_memory

_FEW = 4  # parts of a gradient that are copied and divided in one go, one by one


@dataclass(slots=True, eq=False)
class _Filling:
    earlier: dict[int, Tensor] = field(default_factory=dict)  # by slot, gradients of earlier passes
    adds_at_once: bool = False
    is_open: bool = False  # the pass has not ended: gradients that come are taken
    taken: set[int] = field(default_factory=set)  # slots of the gradients that have come
    flat: Tensor | None = None  # the rows, until they are on their way
    made: AfterEvent | None = None
    failed: bool = False  # word of a failure is to be sent
    reduced: dict[int, Tensor] = field(default_factory=dict)  # by slot, summed rows of this rank


class OwnerBucket(ReducerBucket):
    """Gradients that go to their owners together. Does not communicate."""

    def __init__(
        self,
        indices: Sequence[int],
        params: Sequence[Tensor],
        owners: Owners,
        *,
        is_sparse: bool = False,
        dtype: torch.dtype | None = None,
        carries_word: bool = False,
    ) -> None:
        super().__init__(indices, params, is_sparse=is_sparse, dtype=dtype)
        self._owners = owners
        self._forms = [(tuple(param.shape), dense_strides(param)) for param in params]
        nbytes = ALIGNMENT_NBYTES if params[0].device.type == "cpu" else ACCELERATOR_ALIGNMENT_NBYTES
        alignment = max(1, nbytes // self.dtype.itemsize)
        spans = [spans_of(owners.pieces[param], param.numel()) for param in params]
        rows = rows_apart(spans, alignment)
        ends, lengths = [0] * owners.size, [aligned(int(carries_word), alignment)] * owners.size
        for row in rows:
            ends[row.owner], lengths[row.owner] = row.stop, aligned(row.stop + carries_word, alignment)
        own = next((row.extents for row in rows if row.owner == owners.rank), ())
        self._mine = list(self._places_of(own))
        self._slices = Slices(owners.rank, tuple(lengths))
        self._has_gaps = sum(ends) > sum(param.numel() for param in params)
        # The word is behind each row's elements.
        starts = list(accumulate(lengths, initial=0))
        words = torch.tensor(list(map(add, starts, ends)) if carries_word else [], device="cpu")
        self._words = words.to(params[0].device) if carries_word else None
        self._end = ends[owners.rank]
        # By slot, where the elements are: the number of the place, and the extent in the flat tensor.
        self._cells: list[list[tuple[int, Extent]]] = [[] for _ in params]
        pairs = ((starts[row.owner], extent) for row in rows for extent in row.extents)
        extents = (extent._replace(offset=start + extent.offset) for start, extent in pairs)
        for place, extent in enumerate(_joined(extents)):
            self._cells[extent.param].append((place, extent))
        self._filling = _Filling()

    def _places_of(self, own: Iterable[Extent]) -> Iterator[tuple[int, Sequence[int], Sequence[int], int]]:
        for slot, start, stop, offset in own:
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
        return self._words is not None

    def write_failure_word(self) -> None:
        """Mark the rows to be sent as failed."""
        self._filling.failed = True

    def begin(self, earlier: Mapping[int, Tensor], *, adds_at_once: bool) -> None:
        """Begin a backward pass; ``earlier``: gradients of earlier ones, by slot. Note [Sums apart]."""
        self._filling = _Filling(dict(earlier), adds_at_once, is_open=True)

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
        flat = self._filled(zeros=self._has_gaps)
        targets, sources = [], []
        for target, source in self._places(flat, slots):
            if source is None:
                target.zero_()
            else:
                targets.append(target)
                sources.append(source)
        if len(slots) == 1 and 0 < len(targets) <= _FEW and divisor != 1 and flat.dtype == sources[0].dtype:
            for target, source in zip(targets, sources, strict=True):
                torch.mul(source, 1 / divisor, out=target)
        elif targets:
            private.foreach_copy_(targets, sources)
            if divisor != 1:
                self._multiply(flat, slots, 1 / divisor)

    def _filled(self, *, zeros: bool) -> Tensor:
        """Return the rows of this pass, new ones as zeros if so; the current stream may write there."""
        filling, like = self._filling, self.flat
        if filling.flat is None or filling.made is None:
            make = torch.zeros if zeros else torch.empty
            filling.flat = make(self._slices.total, dtype=like.dtype, device=like.device)
            filling.made = AfterEvent(like.device, streams.recorded_event(like.device))
        else:
            filling.made.wait()
        return filling.flat

    def _places(self, flat: Tensor, slots: Sequence[int]) -> Iterator[tuple[Tensor, Tensor | None]]:
        """Yield each place in the rows, and what belongs there; gradients leave their parameters."""
        for slot in slots:
            gradient, (shape, strides), cells = self._gradient(slot), self._forms[slot], self._cells[slot]
            if len(cells) == 1:
                yield flat.as_strided(shape, strides, cells[0][1].offset), gradient
                continue
            whole = None if gradient is None else in_order_of_memory(gradient, strides)
            for _, extent in cells:
                part = None if whole is None else whole[extent.start : extent.stop]
                yield flat[extent.offset : extent.end], part

    def _multiply(self, flat: Tensor, slots: Sequence[int], factor: float) -> None:
        """Multiply gradients in the rows, neighbours as one tensor."""
        ends: dict[int, tuple[int, int]] = {}  # of runs: offsets, by the place behind
        for place, extent in sorted(cell for slot in slots for cell in self._cells[slot]):
            start, _ = ends.pop(place, (extent.offset, 0))
            ends[place + 1] = start, extent.end
        private.foreach_mul_([flat[start:stop] for start, stop in ends.values()], factor)

    def _gradient(self, slot: int) -> Tensor | None:
        if not self._filling.is_open:  # the pass broke off: what is there now is not of it
            return None
        grad = super()._gradient(slot)
        self.params[slot].grad = None
        if grad is not None:
            self._filling.taken.add(slot)
        return grad

    # ------------------------------------------------------------------ gradients go

    def rows(self) -> tuple[Tensor, Slices]:
        """Return the rows to be sent, zeros if nothing was copied, with the word of a failure."""
        flat = self._filled(zeros=True)
        if self._words is not None:
            flat.index_fill_(0, self._words, float("nan") if self._filling.failed else 0.0)
        return flat, self._slices

    def free(self) -> None:
        """Let go of the rows, which are on their way."""
        self._filling.flat = None

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
        word = total[self._end : self._end + 1]  # no view is returned: that would keep the rows
        return self.flat if self._words is None else word.clone()

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


def _joined(extents: Iterable[Extent]) -> list[Extent]:
    """Join the pieces of a parameter that adjoin in the flat tensor, as those of following ranks do."""
    joined: list[Extent] = []
    for extent in extents:
        last = joined[-1] if joined else None
        if last is not None and (last.param, last.stop, last.end) == (
            extent.param,
            extent.start,
            extent.offset,
        ):
            joined[-1] = last._replace(stop=extent.stop)
        else:
            joined.append(extent)
    return joined
