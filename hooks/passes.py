"""One backward pass that steps the optimizer, and its buckets.

Note [Buckets of the optimizer]
    DDP's buckets decide what is reduced together, the optimizer's what is stepped and gathered together: when
    all their trained parameters are reduced, in the same order on every rank. A bucket with a trained
    parameter outside DDP is stepped after the backward pass.

Note [Gradients that are all zero]
    Unused parameters are zeros in DDP's buckets, but an optimizer skips only those without a gradient. So a
    bucket with an all-zero gradient waits, alike on all ranks, until `param.grad` tells at the end of
    backward. The search takes time, on an accelerator the CPU's; it is omitted where some rank is known to
    have used every parameter.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from zero_optim.comm.lanes import Lease
from zero_optim.comm.works import Work
from zero_optim.compat import private
from zero_optim.compat.streams import record_use, to_device
from zero_optim.hooks.bucket import TensorFuture, gradients_in
from zero_optim.hooks.owners import OwnerReduction
from zero_optim.iteration.overlap import Overlap

Gradients = dict[Tensor, Tensor | None]


@dataclass(slots=True, eq=False)
class SteppedPass:
    """One backward pass that steps: made by its first bucket, dropped at its end.

    ``joined``: this rank's inputs ended, or it broke off before its first bucket. ``reduced`` gradients, by
    bucket, are not stepped yet. ``unsure``: Note [Gradients that are all zero]. ``backward()`` raises
    ``error``, the first failure, after DDP has ended the pass.
    """

    overlap: Overlap
    leases: Sequence[Lease]
    joined: bool
    has_begun: bool = False
    is_complete: bool = False
    number: int = -1
    reduced: dict[int, Gradients] = field(default_factory=dict)
    unsure: set[Tensor] = field(default_factory=set)
    error: BaseException | None = None

    def abandon(self) -> None:
        """Give up the lanes on which something failed."""
        for lease in self.leases:
            lease.abandon()

    @contextmanager
    def storing_errors(self) -> Iterator[None]:
        """Store the body's exception as the pass's error, raised when backward has ended."""
        try:
            yield
        except BaseException as error:  # noqa: BLE001 - raised when backward has ended
            self.error = self.error or error
            self.abandon()

    def take(self, params: Sequence[Tensor], gradients: Sequence[Tensor | None], unsure: set[int]) -> None:
        """Store reduced gradients, and step the optimizer's full buckets."""
        self.unsure.update(params[place] for place in unsure)
        touched: dict[int, Gradients] = {}
        for param, gradient in zip(params, gradients, strict=True):
            number = self.overlap.bucket_of(param)
            if number is not None:
                touched[number] = self.reduced.setdefault(number, {})
                touched[number][param] = gradient
        for number, members in touched.items():
            if self.overlap.trained(number) <= members.keys() and self.unsure.isdisjoint(members):
                self.step(self.reduced.pop(number))

    def step_late(self, *, leaves_unsure: bool, has_grads: bool) -> None:
        """Step buckets that never became full.

        ``leaves_unsure`` leaves all-zero gradients to ``step()``; without ``has_grads`` they are not stepped.
        """
        late: Gradients = {}
        for number in sorted(self.reduced):
            members = self.reduced[number]
            if self.unsure.isdisjoint(members):
                late.update(members)
            elif not leaves_unsure:
                asked = {param: param.grad if has_grads else None for param in self.unsure & members.keys()}
                late.update({**members, **asked})
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


@dataclass(frozen=True, slots=True, eq=False)
class Task:
    """A bucket of DDP being reduced; ``done`` is DDP's future, ``buffer`` has the unreduced gradients."""

    of: SteppedPass
    params: Sequence[Tensor]
    buffer: Tensor
    reduced: Work | OwnerReduction
    all_used: bool
    done: TensorFuture

    def receive(self) -> tuple[Tensor, Sequence[Tensor] | None]:
        """Wait for the reduction; return DDP's result and the gradients, None if it failed."""
        result, gradients = self.buffer, None
        with self.of.storing_errors():
            reduced = _tensor(self.reduced.wait())
            record_use(reduced)  # made on another stream; Note [Streams of a step] in `queues`
            gradients = _gradients(reduced, self.params)
            result = reduced
        return result, gradients

    def step(self, gradients: Sequence[Tensor] | None) -> None:
        """Step full buckets with the gradients that `receive` returned."""
        known: list[Tensor | None] = [None] * len(self.params)
        unsure: set[int] = set()
        with self.of.storing_errors():
            if gradients is not None and isinstance(self.reduced, OwnerReduction):
                used = self.reduced.used()
                known = [gradient if place in used else None for place, gradient in enumerate(gradients)]
            elif gradients is not None:
                unsure = set() if self.all_used else _all_zero(gradients)
                known = list(gradients)
        self.of.take(self.params, known, unsure)

    def complete(self, result: Tensor) -> None:
        """Give DDP the reduced gradients, else the unreduced; never raises, as DDP waits."""
        for value in (result, self.buffer):
            try:
                self.done.set_result(value)
            except BaseException as error:  # noqa: BLE001 - raised when backward has ended
                self.of.error = self.of.error or error
            else:
                return


def _tensor(value: Any) -> Tensor:  # noqa: ANN401 - whatever a hook's future holds
    tensor = value[0] if isinstance(value, list | tuple) else value
    if not isinstance(tensor, Tensor):
        raise TypeError(f"expected the hook's future to hold one tensor, got {type(tensor).__name__}")
    return tensor


def _gradients(result: Tensor, params: Sequence[Tensor]) -> list[Tensor]:
    return [result.to(params[0].dtype)] if result.is_sparse else gradients_in(result, params)


def _all_zero(gradients: Sequence[Tensor]) -> set[int]:
    """Return the places of all-zero gradients; on an accelerator the CPU waits.

    It reads the first elements of all, and the rest of those that begin with zero.
    """
    if gradients[0].is_sparse:
        return set() if private.nnz(gradients[0]) else {0}
    filled = [place for place, gradient in enumerate(gradients) if gradient.numel()]
    if not filled:
        return set()
    first = gradients[filled[0]]
    starts = [int(gradients[place].storage_offset() - first.storage_offset()) for place in filled]
    flat = first.as_strided((starts[-1] + 1,), (1,))
    index = to_device(torch.tensor(starts), flat.device)
    suspects = (flat[index] == 0).nonzero().flatten().tolist()
    return {filled[suspect] for suspect in suspects if not gradients[filled[suspect]].any()}
