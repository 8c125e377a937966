"""Buckets whose gradients go to owners: a row for each rank, there only while gradients are in it.

Note [Memory of sharded gradients]
    Let W be the number of ranks, G the bytes of all gradients, B those of the largest bucket. The rows of a
    bucket are made when its first gradient comes. Each gradient is copied into them, and dropped. One
    bucket is on its way while the next one fills: before a bucket is sent, the one before is summed, and
    what was sent and received for it is dropped. What stays is the row that this rank owns. So beside rows
    of its own, G / W where these are even, a rank holds at most

    - what it is filling for the other ranks: B (W - 1) / W,
    - what it is sending to them: the same,
    - what it receives from them: the same, in rows of the length of its own.

    With two ranks that is 1.5 B, with three 2 B, with any number less than 3 B. Buckets are those of the
    optimizer: its ``bucket_cap_mb`` bounds B, but for a parameter that is larger alone; 16 keeps 3 B below
    two of the 25 MiB that PyTorch's DDP takes for a bucket. Beside that there is the gradient that autograd
    has just made, and up to `BATCH_NBYTES` of small ones. Where gradients of earlier passes are kept, which
    are the rows of its own then, those of the two buckets come on top: 2 B / W. On gloo with tensors on an
    accelerator, rows are packed once more to be sent.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from zero_optim.compat import streams
from zero_optim.compat.engine import copy_each, scale_each
from zero_optim.ddp.bucket import ReducerBucket
from zero_optim.ddp.owner_layout import OwnerLayout
from zero_optim.plan.pieces import Pieces, piece_of
from zero_optim.step.partial import PartialGradient


@dataclass(frozen=True, slots=True, eq=False)
class BucketOwners:
    """Who owns the gradients of a bucket.

    Attributes:
        names: of the parameters, for messages.
        pieces: of each parameter.
        rank: this one.
        size: number of ranks.
    """

    names: tuple[str, ...]
    pieces: tuple[Pieces, ...]
    rank: int
    size: int

    def shown(self, slot: int, param: Tensor, reduced: Tensor | None) -> Tensor:
        """Make what stands in ``param.grad``: the gradient on the owner of the whole, else a partial one.

        Args:
            slot: of the parameter.
            param: the parameter.
            reduced: the rows of this rank; None if it owns none.
        """
        pieces = self.pieces[slot]
        if reduced is not None and len(pieces) == 1:
            return reduced
        return PartialGradient(param, pieces, reduced, self.names[slot])


@dataclass(slots=True, eq=False)
class _Filling:
    """What a bucket holds in one backward pass.

    Attributes:
        kept: by slot, the gradient of earlier passes, to which this one is added.
        taken: slots of the gradients that have come.
        rows: by rank; none before the first gradient, and none once they were sent.
        made: says when ``rows`` may be written on another stream than ``stream``.
        failed: word of a failure is to be sent.
        reduced: by slot, rows of this rank, once they were summed.
    """

    kept: dict[int, Tensor] = field(default_factory=dict)
    taken: set[int] = field(default_factory=set)
    rows: list[Tensor] = field(default_factory=list)
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
    """

    def __init__(
        self,
        indices: Sequence[int],
        params: Sequence[Tensor],
        owners: BucketOwners,
        *,
        dtype: torch.dtype | None = None,
        carries_word: bool = False,
    ) -> None:
        super().__init__(indices, params, is_sparse=False, as_views=False, batched=False, dtype=dtype)
        self._owners = owners
        self._layout = OwnerLayout.of(
            params, owners.pieces, owners.size, self.dtype, carries_word=carries_word
        )
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
            carries_word=self._layout.carries_word,
        )
        made.begin(self._filling.kept)
        return made

    @property
    def can_carry_failure_word(self) -> bool:
        """Whether there is an element for `write_failure_word`."""
        return self._layout.carries_word

    def write_failure_word(self) -> None:
        """Have the rows that are sent say that something went wrong."""
        self._filling.failed = True

    def begin(self, kept: Mapping[int, Tensor]) -> None:
        """Begin a backward pass.

        Args:
            kept: by slot, gradients of earlier passes, as `give` gave them.
        """
        self._filling = _Filling(dict(kept))

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
        rows, targets, sources = self._current_rows(), [], []
        for slot in slots:
            grad = self._pop_gradient(slot)
            for part in self._layout.parts[slot]:
                place = part.seen_in(rows[part.owner])
                if grad is None:
                    place.zero_()
                else:
                    targets.append(place)
                    sources.append(part.taken_from(grad))
        if len(targets) == 1 and divisor != 1 and targets[0].dtype == sources[0].dtype:
            torch.mul(sources[0], 1 / divisor, out=targets[0])
        elif targets:
            copy_each(targets, sources)
            if divisor != 1:
                scale_each(targets, 1 / divisor)

    def _pop_gradient(self, slot: int) -> Tensor | None:
        param = self.params[slot]
        grad, param.grad = param.grad, None
        if grad is not None and grad.is_sparse:
            self._misfits.append(slot)
            return None
        if grad is not None:
            self._filling.taken.add(slot)
        return grad

    def _current_rows(self) -> list[Tensor]:
        """Give the rows, made now if need be, to be written on the current stream."""
        filling, device = self._filling, self.flat.device
        if not filling.rows:
            filling.rows = self._layout.new_rows(self.flat)
            filling.stream, filling.made = streams.current_stream(device), streams.recorded_event(device)
        elif filling.made is not None and streams.current_stream(device) != filling.stream:
            streams.wait_for_event(device, filling.made)
        return filling.rows

    # ------------------------------------------------------------------ gradients go

    def pop_rows(self) -> list[Tensor]:
        """Give the rows to be sent, by rank, zeros if nothing was copied; this object lets go of them."""
        rows = self._filling.rows or self._layout.new_rows(self.flat, zeros=True)
        self._filling.rows = []
        if self._layout.carries_word:
            for row in rows:
                row[-1:].fill_(float("nan") if self._filling.failed else 0.0)
        streams.record_use(*rows)  # perhaps made on the stream of another hook
        return rows

    def settle(self, total: Tensor) -> Tensor:
        """Take over the sum of this rank's row: keep it, or add it to what is kept.

        Returns:
            The word of a failure, one element, if it carries one; else none.
        """
        filling = self._filling
        for slot, part in self._layout.owned_parts(self._owners.rank):
            found, param = part.seen_in(total), self.params[slot]
            if slot in filling.kept:
                kept = filling.kept[slot]
                target = kept.piece if isinstance(kept, PartialGradient) else kept
                assert target is not None  # this rank owns rows of it
                target.add_(found)
            elif found.dtype == param.dtype:
                filling.reduced[slot] = found
            else:
                filling.reduced[slot] = found.to(param.dtype)
        return total[-1:].clone() if self._layout.carries_word else self.flat  # no view: that would keep it

    def give(self, result: Tensor, skipped: Sequence[bool]) -> None:
        """Make the reduced gradients the parameters' own on their owners, and partial ones on other ranks.

        Args:
            result: not used: `settle` has taken it over.
            skipped: by parameter among all, whether no rank used it.
        """
        filling, self._filling = self._filling, _Filling()
        streams.record_use(*filling.reduced.values())
        for slot, (index, param) in enumerate(zip(self.indices, self.params, strict=True)):
            kept = filling.kept.get(slot)
            if kept is not None or skipped[index]:
                param.grad = kept
            else:
                param.grad = self._owners.shown(slot, param, filling.reduced.get(slot))

    def give_joined(self, unused: Sequence[bool]) -> None:
        """Make what was reduced in a pass without gradients of this rank the parameters' own, as `give`."""
        self.give(self.flat, unused)

    def clear(self) -> None:
        """Go back to the gradients of the passes before."""
        self.give(self.flat, [True] * (max(self.indices) + 1))


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
        self._was_used = False

    def zeros_like(self) -> "SparseOwnerBucket":
        """Make another bucket without entries, which goes on with the gradient that is kept."""
        made = SparseOwnerBucket(self.indices[0], self.params[0], self._owners, dtype=self.dtype)
        made._kept = self._kept
        return made

    def begin(self, kept: Mapping[int, Tensor]) -> None:
        """Begin a backward pass; see `OwnerBucket.begin`."""
        self._kept, self._was_used = kept.get(0), False

    def has_gradient(self, slot: int) -> bool:
        """Whether the parameter has got one in this pass."""
        return self._was_used or self.params[slot].grad is not None

    def take_sparse(self, divisor: float) -> None:
        """Take the gradient, divided, and drop it from the parameter."""
        self._was_used = self.params[0].grad is not None
        super().take_sparse(divisor)
        self.params[0].grad = None

    def give(self, result: Tensor, skipped: Sequence[bool]) -> None:
        """Give the owners of the parameter the sum, whole, and the other ranks a partial gradient."""
        param, kept, self._kept = self.params[0], self._kept, None
        self.flat = self._no_gradient(self.dtype)
        if skipped[self.indices[0]]:
            param.grad = kept
        elif piece_of(self._owners.pieces[0], self._owners.rank) is None:
            elsewhere = PartialGradient(param, self._owners.pieces[0], None, self._owners.names[0])
            elsewhere.is_of_sparse = True
            param.grad = elsewhere
        else:
            reduced = result.to(param.dtype)
            param.grad = reduced if kept is None else kept + reduced

    def give_joined(self, unused: Sequence[bool]) -> None:
        """Do what `give` does, in a pass without a gradient of this rank."""
        self.give(self.flat, unused)

    def clear(self) -> None:
        """Go back to the gradient of the passes before."""
        self.params[0].grad, self._kept = self._kept, None
