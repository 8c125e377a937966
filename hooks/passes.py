"""One backward pass that steps the optimizer, and its buckets.

DDP's buckets are reduced; the optimizer's are stepped and gathered, when all their trained parameters are
reduced, in one order on every rank. One with a trained parameter outside DDP is stepped after the pass.

Note [Gradients that are all zero]
    Unused parameters are zeros in DDP's buckets, but an optimizer skips only those without a gradient. So a
    bucket with an all-zero gradient waits, on all ranks, for `param.grad` at the end of backward. The search
    is left out where some rank is known to have used every parameter.

Note [Few steps]
    A step of AdamW is ten launches, whatever it steps, and a model may have hundreds of buckets. So where
    hooks step, full buckets wait until they have an eighth of the bytes that the pass has still to step. That
    depends on sizes alone, so all ranks step, and gather, the same buckets in one order. What is left
    shrinks, so the last buckets wait for no others. A thread launches nothing, and steps each at once.

Note [A thread or none]
    On gloo a thread waits for each reduction, steps, and gathers on its own groups beside the backward pass.
    With NCCL two threads could issue kernels in another order on another rank, and deadlock. There, and on
    other CPU backends, each hook starts its reduction, then steps and gathers the bucket before (reduce 0,
    reduce 1, gather 0, reduce 2, gather 1, …), on an accelerator on a side stream.

Note [Streams of a step]
    B is the backward stream, which calls hooks; S the side stream; N that of collectives; C the caller's,
    which the engine makes wait for B before the final callbacks. Memory returns to the stream it came from.

    ==========================  =====  ================  ==================================================
    tensor                      made   used              ordered or kept by
    ==========================  =====  ================  ==================================================
    bucket                      B      N, S              S waits for the reduction; `record_use` on S
    reduced by a hook           B, N   S, C (DDP)        likewise; ``done`` is set on S, and DDP waits for it
    parameters, read            C      B, S              S waits in each hook for what B was given before
    parameters, written         S, N   C (next forward)  C waits for S when backward ends, and for the gather
    moved into their bucket     B      S, N, C           the first hook does it, on B, and S waits for B
    optimizer's state           S      S, C (step())     C waits for S when backward ends; S for B in hooks
    flat tensor of a gather     S      N, C              `Pending` marks it on each stream that waits first
    what steps take and drop    S      S                 nothing else uses it
    late gradients              C      C                 stepped when C has waited for S
    ==========================  =====  ================  ==================================================
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from zero_optim.compat import private
from zero_optim.compat.streams import record_use, to_device
from zero_optim.flow.pending import Pending, Waitable
from zero_optim.iteration.overlap import Overlap
from zero_optim.optimizer import ZeroRedundancyOptimizer
from zero_optim.plan.strides import consecutive_views

Gradients = dict[Tensor, Tensor | None]


@dataclass(slots=True, eq=False)
class SteppedPass:
    """One backward pass that steps, from its first bucket to its end."""

    overlap: Overlap
    joined: bool  # this rank's inputs ended, or it broke off before its first bucket
    has_begun: bool = False
    is_complete: bool = False
    number: int = -1
    reduced: dict[int, Gradients] = field(default_factory=dict)  # that are not stepped yet, by bucket
    full: set[int] = field(default_factory=set)  # those of `reduced` that can be stepped
    unsure: set[Tensor] = field(default_factory=set)  # Note [Gradients that are all zero]
    error: BaseException | None = None  # the first, which ``backward()`` raises when DDP has ended the pass

    def came(self, number: int, *, is_last: bool) -> None:
        """Note a bucket of DDP."""
        self.number, self.is_complete = number, is_last

    @torch.no_grad()
    def begin(self, optimizer: ZeroRedundancyOptimizer) -> None:
        """Begin the step on this thread: Note [Moving parameters] in `zero_optim.shard.whole_values`."""
        self.has_begun = True
        with self.storing_errors():
            try:
                self.overlap.wait_for_steps()  # of a pass that broke off
            finally:
                self.overlap.begin_pass()
            optimizer.begin_overlapped_step(joined=self.joined)
        if self.error is not None:  # perhaps before this: a gather would, on another thread or stream
            with self.storing_errors():
                self.overlap.core.engine.take_over()

    def store(self, error: BaseException) -> None:
        """Store an exception, if it is the first."""
        self.error = self.error or error

    @contextmanager
    def storing_errors(self) -> Iterator[None]:
        """Store the body's exception as the pass's error."""
        try:
            yield
        except BaseException as error:  # noqa: BLE001 - raised when backward has ended
            self.store(error)
            with suppress(Exception):  # DDP waits for the future, whatever fails
                self.overlap.lanes.abandon()

    def take(self, params: Sequence[Tensor], gradients: Sequence[Tensor | None], unsure: set[int]) -> None:
        """Store reduced gradients, and step the optimizer's full buckets: Note [Few steps]."""
        self.unsure.update(params[place] for place in unsure)
        numbers, touched = self.overlap.core.engine.numbers_of(params), dict[int, Gradients]()
        for number, param, gradient in zip(numbers, params, gradients, strict=True):
            if number is not None:
                if number not in touched:
                    touched[number] = self.reduced.setdefault(number, {})
                touched[number][param] = gradient
        for number, members in touched.items():
            if self.overlap.trained(number) <= members.keys() and self.unsure.isdisjoint(members):
                self.full.add(number)
            else:
                self.full.discard(number)
        if self.full and self.overlap.is_worth_a_step(self.full):
            together: Gradients = {}
            for number in sorted(self.full):
                together.update(self.reduced.pop(number))
            self.full.clear()
            self.step(together)

    def step_late(self, *, leaves_unsure: bool, has_grads: bool) -> None:
        """Step buckets that never became full; if it ``leaves_unsure``, ``step()`` does the all-zero ones."""
        late: Gradients = {}
        for number in sorted(self.reduced):
            members = self.reduced[number]
            if self.unsure.isdisjoint(members):
                late.update(members)
            elif not leaves_unsure:
                waiting = self.unsure & members.keys()
                late.update({**members, **{param: param.grad if has_grads else None for param in waiting}})
        self.reduced.clear()
        for gradient in late.values():
            if gradient is not None:
                record_use(gradient)  # reduced on another stream
        if late:
            self.step(late)

    def step(self, gradients: Gradients) -> None:
        """Step parameters and gather their buckets; after a failure only gather, as others wait."""
        with self.storing_errors():
            self.overlap.step(gradients if self.error is None else dict.fromkeys(gradients), self.error)


@dataclass(slots=True, eq=False)
class SteppedBucket:
    """A bucket of DDP being reduced, then stepped: one work of `Overlap.under_way`."""

    of: SteppedPass
    params: Sequence[Tensor]
    buffer: Tensor  # has the unreduced gradients
    reduced: Waitable  # has one tensor, perhaps in a list
    all_used: bool
    done: torch.futures.Future[Tensor]
    _gradients: Sequence[Tensor] = field(default=(), init=False)
    result: Tensor | None = field(default=None, init=False)  # None if the reduction failed

    @torch.no_grad()
    def begin(self) -> Pending[Any]:
        """Wait for the reduction, with the side stream; as a `Flow` starts work."""
        with self.of.overlap.streams.behind(self.buffer.device):
            with self.of.storing_errors():
                self.receive()
            if not self.of.overlap.takes_thread:
                self.complete()
        return Pending([self], list)

    def receive(self) -> None:
        """Take what the reduction has summed."""
        value: Any = self.reduced.wait()
        reduced = value[0] if isinstance(value, list | tuple) else value
        if not isinstance(reduced, Tensor):
            raise TypeError(f"expected the hook's future to hold one tensor, got {type(reduced).__name__}")
        record_use(reduced)  # made on another stream
        dtype = self.params[0].dtype
        self._gradients = [reduced.to(dtype)] if reduced.is_sparse else _gradients_in(reduced, self.params)
        self.result = reduced

    @torch.no_grad()
    def wait(self) -> None:
        """Step the buckets of the optimizer that are full now; as a `Flow` ends work."""
        unsure = set[int]()
        with self.of.storing_errors():
            if self._gradients and not self.all_used:
                unsure = _all_zero(self._gradients)
        with self.of.storing_errors():
            self.of.take(self.params, self._gradients or [None] * len(self.params), unsure)
        if self.of.overlap.takes_thread:
            self.complete()

    def complete(self) -> None:
        """Give DDP the reduced gradients, else the unreduced; never raises, as DDP waits."""
        for value in (self.buffer if self.result is None else self.result, self.buffer):
            try:
                self.done.set_result(value)
            except BaseException as error:  # noqa: BLE001 - raised when backward has ended
                self.of.store(error)
            else:
                return


def _gradients_in(reduced: Tensor, params: Sequence[Tensor]) -> list[Tensor]:
    """View each parameter's gradient, with its strides, in a dense reduced bucket of any dtype."""
    flat, dtype = reduced.reshape(-1), params[0].dtype
    if dtype.is_complex and not flat.is_complex():  # PyTorch's DDP has real numbers in the bucket
        flat = torch.view_as_complex(flat.to(dtype.to_real()).view(-1, 2))
    return consecutive_views(flat.to(dtype), params)


def _all_zero(gradients: Sequence[Tensor]) -> set[int]:
    """Return the places of all-zero gradients, by their first elements; on an accelerator the CPU waits."""
    if gradients[0].is_sparse:
        return set() if private.nnz(gradients[0]) else {0}
    filled = [place for place, gradient in enumerate(gradients) if gradient.numel()]
    if not filled:
        return set()
    first = gradients[filled[0]]
    starts = [int(gradients[place].storage_offset() - first.storage_offset()) for place in filled]
    flat = first.as_strided((starts[-1] + 1,), (1,))
    index = to_device(torch.tensor(starts, device="cpu"), flat.device)
    suspects = (flat[index] == 0).nonzero().flatten().tolist()
    return {filled[suspect] for suspect in suspects if not gradients[filled[suspect]].any()}
