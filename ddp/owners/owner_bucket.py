"""Buckets whose gradients go to owners: a row for each rank, there only while gradients are in it.

Note [Memory of sharded gradients]
    Let W be the number of ranks, G the bytes of all gradients, B those of the largest bucket, and T = B (W -
    1) / W what goes to other ranks of it. One bucket is under way while the next one fills. Each gradient is
    copied into the rows, and dropped. Rows are cut into c *portions*. A portion is made when the first
    gradient comes into it, and let go when it was sent; two are under way at a time. When a part f of a
    bucket is filled, the part f of the bucket before has been summed: the hook of the gradient that comes
    next waits for that. So beside rows of its own, G / W where these are even, a rank holds at most

        what                                            c portions        one portion
        ----------------------------------------------  ----------------  -----------
        the bucket that fills, and a portion begun      f T + T / c       T
        the one before: what has not been sent          (1 - f) T + T / c T
        and what has come and was not added             2 T / c           T
        together                                        (1 + 4 / c) T     3 T

    and the gradient that autograd has just made. On the CPU c is the smallest that makes it 2 B: 3 with 4
    to 7 ranks, 4 with more. With three ranks one portion does that, and with two it takes 1.5 B. Smaller
    buckets have fewer portions, none below `LEAST_PORTION_NBYTES`. So the peak is at most G / W + 2 B + one
    gradient. Buckets are those of the optimizer: its ``bucket_cap_mb`` bounds B, but for a gradient that is
    larger, which is a bucket of its own.

    On an accelerator, and where lanes (`zero_optim.comm.lanes`) are not used, there is one portion, and a
    bucket is sent when the one before is summed, so that all ranks start their collectives in one order: 2 B
    with three ranks, less than 3 B with any number.

    If rows are uneven, such as those of whole matrices, put B in the place of T: at most (1 + 4 / c) B, or
    3 B with one portion. W - 1 copies of a long row would be almost W B. So an owner receives them in parts,
    never more at a time than a portion of all ranks' rows: Note [Parts of long rows] in
    `zero_optim.comm.row_sum`.

    Beside that there are up to `BATCH_NBYTES` of small gradients. If they come in another order than the
    buckets have, more than one bucket fills at a time. Where gradients of earlier passes are kept, which are
    the rows of its own then, the sums of this pass come on top: those of the two buckets, 2 B / W, where
    they are added as they come; all, G / W, where they are apart. On gloo with tensors on an accelerator,
    rows are packed once more to be sent.

Note [Sums apart]
    A pass may turn out bad when all its buckets but the last have been summed. On the CPU ranks know that
    before gradients are handed out. So the sums stay apart until then, and a bad pass leaves what
    earlier passes have added up as it was, bit for bit. On an accelerator gradients are handed out before
    anybody knows (Note [Late reports] in `report`). There nothing would be gained by the memory, and each
    sum is added at once: behind a pass that failed, or broke off, call ``zero_grad()``. A pass that an
    exception ends gives back what was put aside at once, on this rank, so that ``zero_grad()`` drops it.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from zero_optim.compat import streams
from zero_optim.compat.engine import copy_each, scale_each
from zero_optim.ddp.owners.bucket_owners import BucketOwners, give_back
from zero_optim.ddp.owners.owner_layout import OwnerLayout
from zero_optim.ddp.owners.owner_rows import OwnerRows, Portions
from zero_optim.ddp.reducer.bucket import ReducerBucket


@dataclass(slots=True, eq=False)
class _Filling:
    """What a bucket holds in one backward pass.

    Attributes:
        is_open: the pass has not ended: gradients that come are taken.
        adds_at_once: see `OwnerBucket.begin`.
        kept: by slot, the gradient of earlier passes, to which this one is added.
        taken: slots of the gradients that have come.
        numel: elements of them.
        pace: see `OwnerBucket.pace_by`.
        rows: by rank; None before the first gradient, and once they were handed on to be sent.
        made: says when ``rows`` may be written on another stream than ``stream``.
        failed: word of a failure is to be sent.
        reduced: by slot, rows of this rank, once they were summed.
    """

    is_open: bool = False
    adds_at_once: bool = False
    kept: dict[int, Tensor] = field(default_factory=dict)
    taken: set[int] = field(default_factory=set)
    numel: int = 0
    pace: Callable[[float], None] | None = None
    rows: OwnerRows | None = None
    stream: streams.Stream | None = None
    made: streams.Event | None = None
    failed: bool = False
    reduced: dict[int, Tensor] = field(default_factory=dict)


class OwnerBucket(ReducerBucket):
    """Gradients that go to their owners together. Does not communicate.

    If it carries the word of a failure, each row has an element for that behind its gradients: every rank
    reads its own row alone, and may own nothing of this bucket.

    Args:
        indices: the parameters' places among all.
        params: the parameters.
        owners: of their gradients.
        dtype: in which the gradients travel; None for the parameters' own.
        carries_word: it is the last bucket.
        num_portions: in which it is sent.
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
        layout = OwnerLayout.of(params, owners.pieces, owners.size, self.dtype, carries_word=carries_word)
        self._portions = Portions.of(layout, num_portions)
        self._filling = _Filling()

    def _allocate(self, dtype: torch.dtype) -> tuple[Tensor, list[Tensor]]:
        """Make nothing: rows are made in each pass."""
        return self.params[0].new_empty(0, dtype=dtype, requires_grad=False), []

    def zeros_like(self) -> "OwnerBucket":
        """Make another bucket for the same parameters, which goes on with the gradients that are kept."""
        made = OwnerBucket(
            self.indices,
            self.params,
            self._owners,
            dtype=self.dtype,
            carries_word=self.can_carry_failure_word,
            num_portions=self.num_portions,
        )
        made.begin(self._filling.kept, adds_at_once=self._filling.adds_at_once)
        return made

    @property
    def num_portions(self) -> int:
        """In how many portions it is sent."""
        return self._portions.count

    @property
    def can_carry_failure_word(self) -> bool:
        """Whether there is an element for `write_failure_word`."""
        return self._portions.layout.carries_word

    def write_failure_word(self) -> None:
        """Have the rows that are sent say that something went wrong."""
        self._filling.failed = True

    def begin(self, kept: Mapping[int, Tensor], *, adds_at_once: bool) -> None:
        """Begin a backward pass.

        Args:
            kept: by slot, gradients of earlier passes, as `give` gave them.
            adds_at_once: sums are added to them as they come, and not apart until the pass is known to be
                good; see Note [Sums apart].
        """
        self._filling = _Filling(is_open=True, adds_at_once=adds_at_once, kept=dict(kept))

    def pace_by(self, pace: Callable[[float], None]) -> None:
        """Have somebody told in this pass, before gradients are copied.

        Args:
            pace: is given which part of the bucket is filled then, from 0 to 1.
        """
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
        self._keep_pace(slots)
        rows, targets, sources = self._current_rows(), [], []
        for slot in slots:
            grad = self._pop_gradient(slot)
            for number, part in self._portions.parts[slot]:
                place = rows.place(number, part)
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

    def _keep_pace(self, slots: Sequence[int]) -> None:
        filling = self._filling
        filling.numel += sum(self.params[slot].numel() for slot in slots)
        if filling.pace is not None:
            filling.pace(min(1.0, filling.numel / max(1, self._portions.numel)))

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

    def _current_rows(self) -> OwnerRows:
        """Give the rows, made now if need be, to be written on the current stream."""
        filling, device = self._filling, self.flat.device
        if filling.rows is None:
            filling.rows = self._new_rows(zeros=False)
            filling.stream, filling.made = streams.current_stream(device), streams.recorded_event(device)
        elif filling.made is not None and streams.current_stream(device) != filling.stream:
            streams.wait_for_event(device, filling.made)
        return filling.rows

    def _new_rows(self, *, zeros: bool) -> OwnerRows:
        return OwnerRows(self._portions, self._owners.rank, self.flat, zeros=zeros)

    # ------------------------------------------------------------------ gradients go

    def pop_rows(self) -> OwnerRows:
        """Give the rows to be sent, zeros if nothing was copied; this object lets go of them."""
        rows, self._filling.rows = self._filling.rows, None
        return self._new_rows(zeros=True) if rows is None else rows

    @property
    def word(self) -> float:
        """What is sent behind the rows, if there is a place for it: NaN if something went wrong."""
        return float("nan") if self._filling.failed else 0.0

    def settle(self, total: Tensor) -> Tensor:
        """Take over the sum of this rank's row.

        Returns:
            The word of a failure, one element, if it carries one; else none.
        """
        filling = self._filling
        apart: list[int] = []
        sums: list[tuple[Tensor, torch.dtype]] = []
        for slot, part in self._portions.layout.owned_parts(self._owners.rank):
            found, param = part.seen_in(total), self.params[slot]
            if slot in filling.kept and filling.adds_at_once:
                filling.kept[slot] = self._owners.added(slot, param, filling.kept[slot], found)
                continue
            apart.append(slot)  # where there is something to add it to, it is rounded once, when it is added
            kept = found.dtype if slot in filling.kept else self._owners.dtype or param.dtype
            sums.append((found, kept))
        filling.reduced.update(zip(apart, self._owners.copies(sums), strict=True))
        return total[-1:].clone() if self.can_carry_failure_word else self.flat  # no view: that would keep it

    def give(self, result: Tensor, skipped: Sequence[bool]) -> None:
        """Make the reduced gradients the parameters' own on their owners, and partial ones on other ranks.

        Args:
            result: not used: `settle` has taken it over.
            skipped: by parameter among all, whether no rank used it.
        """
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
