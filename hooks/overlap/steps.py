"""What is done with one bucket: its reduction is received, its parameters are stepped and gathered.

Note [Gradients that are all zero]
    A bucket does not tell which parameters were used: unused ones are zeros in it. An optimizer leaves a
    parameter without a gradient alone, but not one with a gradient of zeros. So parameters whose reduced
    gradient is all zeros, which every rank sees alike, are late: they are stepped when backward has ended, as
    ``param.grad`` says by then which it was. To look for them takes time, and on an accelerator the CPU waits
    for it. So nobody looks where some rank is known to have used every parameter, see `zero_step`: DDP then
    gives each of them a gradient, and one of zeros is a gradient like any other.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from zero_optim.compat import private
from zero_optim.compat.streams import record_use, to_device
from zero_optim.hooks.bucket import gradients_in
from zero_optim.hooks.overlap.owners import OwnerReduction
from zero_optim.hooks.overlap.task import Task
from zero_optim.optimizer import ZeroRedundancyOptimizer
from zero_optim.step.overlap import Overlap, StepPart


class BucketSteps:
    """Receives and steps buckets, on the thread and the stream of the caller.

    Args:
        optimizer: whose step.
        overlap: of the optimizer.
    """

    def __init__(self, optimizer: ZeroRedundancyOptimizer, overlap: Overlap) -> None:
        self._optimizer = optimizer
        self._overlap = overlap

    def receive(self, task: Task) -> tuple[Tensor, Sequence[Tensor] | None]:
        """Wait for a bucket's reduction. What fails is a failure of the pass.

        Returns:
            What DDP is given; the gradient of each parameter, None if the reduction failed.
        """
        result: Tensor = task.buffer
        gradients: Sequence[Tensor] | None = None
        with task.of.minding():
            reduced = _tensor(task.reduced.wait())
            record_use(reduced)  # made on another stream; Note [Streams of a step] in `line`
            gradients = _gradients(reduced, task.part.given)
            result = reduced
        return result, gradients

    def step(self, task: Task, gradients: Sequence[Tensor] | None) -> None:
        """Step a bucket, and start its gather. What fails is a failure of the pass.

        Args:
            task: the bucket.
            gradients: as `receive` gave them.
        """
        part: StepPart = task.part
        known: list[Tensor | None] = [None] * len(part.given)
        with task.of.minding():
            if gradients is not None:
                part, known = self._chosen(task, gradients)
        with task.of.minding():
            if task.of.error is not None:
                known = [None] * len(part.given)
            self._overlap.step(self._optimizer.param_groups, part, known, task.of.error)

    def _chosen(self, task: Task, gradients: Sequence[Tensor]) -> tuple[StepPart, list[Tensor | None]]:
        """Tell what is to be stepped now, and what each parameter is stepped with; None leaves it alone."""
        part = task.part
        if isinstance(task.reduced, OwnerReduction):
            used = task.reduced.used()
            return part, [gradient if place in used else None for place, gradient in enumerate(gradients)]
        zeros = set() if task.all_used else _all_zero(gradients)
        if not zeros:
            return part, list(gradients)
        task.of.late += [part.given[place] for place in zeros]
        places = [place for place in range(len(part.given)) if place not in zeros]
        return self._overlap.part([part.given[place] for place in places]), [
            gradients[place] for place in places
        ]


def _tensor(value: Any) -> Tensor:  # noqa: ANN401 - whatever a hook's future holds
    tensor = value[0] if isinstance(value, list | tuple) else value
    if not isinstance(tensor, Tensor):
        raise TypeError(f"expected the hook's future to hold one tensor, got {type(tensor).__name__}")
    return tensor


def _gradients(result: Tensor, params: Sequence[Tensor]) -> list[Tensor]:
    """View each parameter's gradient in a bucket's reduced tensor, with the parameter's strides."""
    if result.is_sparse:
        return [result.to(params[0].dtype)]
    return gradients_in(result, params)


def _all_zero(gradients: Sequence[Tensor]) -> set[int]:
    """Find the gradients without a nonzero element; on an accelerator the CPU waits for them.

    Looks at first elements, all at once, and at the whole only of those whose first is zero.
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
