"""Gradients that go to owners: who these are, and rows for each of them while gradients come.

Note [Rows of gradients]
    Reduced gradients are views of the owner's row. Each rank's row is laid out by itself, as gradients come:
    the last parameter first, aligned as parameters are. The parameter bucket's layout has a cut parameter
    last in one row and first in the next, and room for frozen parameters and stamps.

Note [Memory of sharded gradients]
    A bucket is sent while the next one fills, and that is sent when the first is summed. So beside its own
    rows and the gradient that autograd has just made, a rank holds two buckets, and what it receives: at most
    one, and its row of it where that is brought to it (Note [Sums of slices] in `row_sum`); nothing through
    the host's memory. On top come `BATCH_NBYTES` of small gradients, and this pass's sums where earlier ones
    are kept.

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
from itertools import accumulate, chain
from operator import add

import torch
from torch import Tensor

from zero_optim.compat import private, streams
from zero_optim.ddp.reducer.gradient_storage import BucketGradients
from zero_optim.flow.pending import AfterEvent
from zero_optim.plan.layout import Extent, aligned, rows_apart
from zero_optim.plan.pieces import Pieces, is_whole, piece_of, rows_of
from zero_optim.plan.plan import alignment_of
from zero_optim.plan.slices import Slices
from zero_optim.plan.strides import dense_strides, in_order_of_memory
from zero_optim.shard.rows.row_storage import RowStorage
from zero_optim.step.partial import Agree, PartialGradient, owned


@dataclass(frozen=True, slots=True, eq=False)
class Owners:
    """The owners of gradients: whole on the only owner of a parameter, else partial gradients."""

    pieces: Mapping[Tensor, Pieces]
    names: Mapping[Tensor, str]
    rank: int
    size: int
    agree: Agree  # tells all ranks what a scaler has found; see `PartialGradient`
    storage: RowStorage  # of the rows of this rank
    dtypes: Mapping[Tensor, torch.dtype]  # of what owners keep, where another
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

    def shown_of_whole(self, param: Tensor, whole: Tensor) -> Tensor:
        """Return ``param.grad`` of a dense gradient."""
        piece = piece_of(self.pieces[param], self.rank)
        if piece is None:
            return self._partial(param, None)
        rows = rows_of(whole, piece)
        if self._keeps_another(param):
            rows = next(self.storage.copies([rows.to(self.dtype_of(param))]))
        elif not is_whole(piece, param.shape):
            rows = rows.clone()  # a view would keep the whole
        return self.shown(param, None, rows)

    def shown_sparse(self, param: Tensor, earlier: Tensor | None, total: Tensor) -> Tensor:
        """Return ``param.grad`` of a sparse sum over all ranks."""
        if piece_of(self.pieces[param], self.rank) is None:
            return self._partial(param, None)
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


class _Layout:
    """Where the gradients of a bucket lie in the rows of all ranks: Note [Rows of gradients]."""

    def __init__(self, members: BucketGradients, owners: Owners, *, carries_word: bool) -> None:
        params, device = members.params, members.params[0].device
        self._forms = [(tuple(param.shape), dense_strides(param)) for param in params]
        self._numels = [param.numel() for param in params]
        pieces = [owners.pieces[param] for param in params]
        alignment = alignment_of(device, members.dtype)
        rows = {row.owner: row for row in rows_apart(pieces, self._numels, alignment)}
        ends = [rows[rank].stop if rank in rows else 0 for rank in range(owners.size)]
        lengths = [aligned(end + carries_word, alignment) for end in ends]
        # Of this rank: slot, shape, strides and offset of each gradient in its row.
        self.mine = list(self._places_of(rows[owners.rank].extents if owners.rank in rows else ()))
        self.end = ends[owners.rank]  # of its elements, behind which is the word
        self.slices = Slices(owners.rank, tuple(lengths))
        self.has_gaps = sum(ends) > sum(self._numels)
        starts = list(accumulate(lengths, initial=0))
        words = torch.tensor(list(map(add, starts, ends)) if carries_word else [], device="cpu")
        self.words = words.to(device) if carries_word else None  # places in the flat tensor
        # By slot, where the elements are: the number of the place, and the extent in the flat tensor.
        self._cells: list[list[tuple[int, Extent]]] = [[] for _ in params]
        pairs = ((starts[row.owner], extent) for row in rows.values() for extent in row.extents)
        extents = (extent._replace(offset=start + extent.offset) for start, extent in pairs)
        for place, extent in enumerate(_joined(extents)):
            self._cells[extent.param].append((place, extent))

    def _places_of(self, own: Iterable[Extent]) -> Iterator[tuple[int, Sequence[int], Sequence[int], int]]:
        for slot, start, stop, offset in own:
            (shape, strides), numel = self._forms[slot], self._numels[slot]
            if stop - start < numel:
                shape = (shape[0] * (stop - start) // numel, *shape[1:])
            yield slot, shape, strides, offset

    def places(
        self, flat: Tensor, slots: Sequence[int], gradient_of: Callable[[int], Tensor | None]
    ) -> Iterator[tuple[Tensor, Tensor | None]]:
        """Yield each place of some gradients in the rows, and what belongs there."""
        for slot in slots:
            gradient, cells = gradient_of(slot), self._cells[slot]
            shape, strides = self._forms[slot]
            if len(cells) == 1:
                yield flat.as_strided(shape, strides, cells[0][1].offset), gradient
                continue
            whole = None if gradient is None else in_order_of_memory(gradient, strides)
            for _, extent in cells:
                part = None if whole is None else whole[extent.start : extent.stop]
                yield flat[extent.offset : extent.end], part

    def runs(self, flat: Tensor, slots: Sequence[int]) -> list[Tensor]:
        """View some gradients in the rows, neighbours as one tensor: launches do not grow with the ranks."""
        ends: dict[int, tuple[int, int]] = {}  # of runs: offsets, by the place behind
        for place, extent in sorted(chain.from_iterable(map(self._cells.__getitem__, slots))):
            start, _ = ends.pop(place, (extent.offset, 0))
            ends[place + 1] = start, extent.end
        return [flat[start:stop] for start, stop in ends.values()]


class OwnerRows:
    """Dense gradients, in new rows in each pass. Does not communicate."""

    as_views = False
    views: Sequence[Tensor] = ()

    def __init__(self, members: BucketGradients, owners: Owners, *, carries_word: bool) -> None:
        self._members, self._owners = members, owners
        self._layout = _Layout(members, owners, carries_word=carries_word)
        self.can_carry_failure_word = carries_word
        self.flat = members.params[0].new_empty(0, dtype=members.dtype, requires_grad=False)
        self._filling: tuple[Tensor, AfterEvent] | None = None  # the rows, until they are on their way

    def take(self, slots: Sequence[int], divisor: float) -> None:
        """Copy gradients into the rows, divided, or zeros where there is none, and drop them."""
        if not slots:
            return
        flat = self._filled(zeros=self._layout.has_gaps)
        targets, sources = [], []
        for target, source in self._layout.places(flat, slots, self._members.pop):
            if source is None:
                target.zero_()
            else:
                targets.append(target)
                sources.append(source)
        if len(slots) == 1 and 0 < len(targets) <= 4 and divisor != 1 and flat.dtype == sources[0].dtype:
            for target, source in zip(targets, sources, strict=True):
                torch.mul(source, 1 / divisor, out=target)
        elif targets:
            private.foreach_copy_(targets, sources)
            if divisor != 1:
                private.foreach_mul_(self._layout.runs(flat, slots), 1 / divisor)

    def _filled(self, *, zeros: bool) -> Tensor:
        """Return the rows of this pass, new ones as zeros if so; the current stream may write there."""
        if self._filling is None:
            make = self.flat.new_zeros if zeros else self.flat.new_empty
            flat = make(self._layout.slices.total)
            self._filling = flat, AfterEvent(flat.device)
        else:
            flat, made = self._filling
            made.wait()
        return flat

    def rows(self, *, has_failed: bool) -> tuple[Tensor, Slices]:
        """Return the rows to be sent, zeros if nothing was copied, with the word of a failure."""
        flat, layout = self._filled(zeros=True), self._layout
        if layout.words is not None:
            flat.index_fill_(0, layout.words, float("nan") if has_failed else 0.0)
        return flat, layout.slices

    def free(self) -> None:
        """Let go of the rows, which are on their way."""
        self._filling = None

    def take_over(self, total: Tensor, *, adds: bool) -> Tensor:
        """Keep the sum of this rank's row; return the word of a failure, or nothing.

        ``adds``: to earlier gradients, at once, as Note [Sums apart] says.
        """
        owners, layout = self._owners, self._layout
        apart: list[int] = []
        sums: list[tuple[Tensor, torch.dtype]] = []
        first = int(total.storage_offset())
        kept = owners.dtype_of(self._members.params[0])
        for slot, shape, strides, offset in layout.mine:
            reduced = total.as_strided(shape, strides, first + offset)
            earlier = self._members.earlier.get(slot)
            if earlier is not None and adds:
                self._members.earlier[slot] = owners.shown(self._members.params[slot], earlier, reduced)
                continue
            apart.append(slot)  # where there is something to add it to, it is rounded once, when it is added
            sums.append((reduced, reduced.dtype if earlier is not None else kept))
        copies = owners.storage.copies(tensor.to(dtype) for tensor, dtype in sums)
        self._members.reduced.update(zip(apart, copies, strict=True))
        word = total[layout.end : layout.end + 1]  # no view is returned: that would keep the rows
        return self.flat if layout.words is None else word.clone()

    def give(self, _: Tensor, skipped: Sequence[bool]) -> None:
        """Hand out reduced gradients on their owners, and partial gradients elsewhere."""
        members = self._members
        earlier, reduced = members.end()
        streams.record_use(*reduced.values())
        for slot, (index, param) in enumerate(zip(members.indices, members.params, strict=True)):
            before = earlier.get(slot)
            param.grad = before if skipped[index] else self._owners.shown(param, before, reduced.get(slot))


def _joined(extents: Iterable[Extent]) -> list[Extent]:
    """Join the pieces of a parameter that adjoin in the flat tensor, as those of following ranks do."""
    joined: list[Extent] = []
    for extent in extents:
        ends = [(last.param, last.stop, last.end) for last in joined[-1:]]
        if ends == [(extent.param, extent.start, extent.offset)]:
            joined[-1] = joined[-1]._replace(stop=extent.stop)
        else:
            joined.append(extent)
    return joined
