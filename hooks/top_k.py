"""Top-k sparsification: send only the largest entries of a gradient now, and the rest later.

Aji and Heafield, *Sparse Communication for Distributed Gradient Descent*, EMNLP 2017 (arXiv:1704.05021);
convergence with error feedback: Stich, Cordonnier and Jaggi, *Sparsified SGD with Memory*, NeurIPS 2018
(arXiv:1809.07599), algorithm 1. For the gradient plus error g_w of rank w:

    kept_w = the k entries of g_w largest in magnitude       sent: k values and k positions
    result = mean over w of kept_w                           the same on every rank
    error  = g_w - kept_w                                    kept, added to the next gradient of rank w
"""

import math
from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from zero_optim.compat.streams import record_use
from zero_optim.hooks.bucket import GradBucket, TensorFuture, dense_buffer
from zero_optim.hooks.exchange import group_of, start_all_gather, start_average
from zero_optim.hooks.memory import (
    Errors,
    NamedParameters,
    Register,
    check_options,
    forget_non_finite,
    working_dtype,
)


@dataclass(slots=True, eq=False)
class TopKState:
    """Options and errors of `topk_hook`; one object for each model and rank. Making it does not communicate.

    Args:
        process_group: the ranks that average; None stands for the default group.
        ratio: the fraction of a bucket's elements that each rank sends, at least one element. The paper has
            0.01.
        start_iter: number of iterations that are averaged without compression first, 0 or more.
        use_error_feedback: add what was left out to the next gradient; needs as much memory as the gradients,
            in float32 at least. Without it, entries that are never among the largest are never sent.

    Attributes:
        iteration: number of iterations whose last bucket the hook has seen.

    Raises:
        ValueError: an option out of range.
    """

    process_group: dist.ProcessGroup | None = None
    _: KW_ONLY
    ratio: float = 0.01
    start_iter: int = 0
    use_error_feedback: bool = True
    iteration: int = field(default=0, init=False)
    register: Register = field(default_factory=Register, init=False, repr=False)
    errors: Errors = field(default_factory=Errors, init=False, repr=False)

    def __post_init__(self) -> None:
        """Check the options."""
        if not 0 < self.ratio <= 1:
            raise ValueError(
                f"expected a ratio above 0 and at most 1, got {self.ratio}: 0.01 sends one percent"
            )
        if self.start_iter < 0:
            raise ValueError(f"expected a start_iter of at least 0, got {self.start_iter}")

    def state_dict(self, named_parameters: NamedParameters | None = None) -> dict[str, Any]:
        """Copy the errors, to continue from them bit for bit; see `PowerSGDState.state_dict`.

        Args:
            named_parameters: with names the state fits any buckets of the next job.
        """
        return {
            "options": {"use_error_feedback": self.use_error_feedback},
            "iteration": self.iteration,
            "register": self.register.state_dict(named_parameters),
            "errors": self.errors.state_dict(),
        }

    def load_state_dict(
        self, state_dict: Mapping[str, Any], named_parameters: NamedParameters | None = None
    ) -> None:
        """Load errors. Each rank loads what it saved itself; does not communicate.

        Args:
            state_dict: from `state_dict`; it is not changed.
            named_parameters: names, if it was saved with names.

        Raises:
            ValueError: it was saved with other options or for other parameters.
        """
        check_options(state_dict["options"], {"use_error_feedback": self.use_error_feedback})
        self.register.load_state_dict(state_dict["register"], named_parameters)
        self.errors.load_state_dict(state_dict["errors"])
        self.iteration = state_dict["iteration"]

    def __getstate__(self) -> dict[str, Any]:
        """Pickle options and errors, without the process group."""
        names = ("ratio", "start_iter", "use_error_feedback")
        return {"options": {name: getattr(self, name) for name in names}, "memories": self.state_dict()}

    def __setstate__(self, pickled: dict[str, Any]) -> None:
        """Unpickle with the default process group; to use another one, set ``process_group`` before use."""
        self.__init__(**pickled["options"])  # type: ignore[misc]
        self.load_state_dict(pickled["memories"])


def topk_hook(state: TopKState, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Average the largest entries of every rank's bucket; the other entries come out as zero.

    One all-gather of k values in the bucket's dtype and k positions of 4 bytes, so each rank receives those
    of all. All ranks of the group call. If a gradient has an infinity or a NaN, so has the result on every
    rank; none stays in the errors.

    Args:
        state: options and errors.
        bucket: dense gradients of any floating dtype.

    Raises:
        ValueError: sparse gradients, or a loaded state does not fit the parameters.
    """
    buffer, group = dense_buffer(bucket, "topk_hook"), group_of(state.process_group)
    places = state.register.places(bucket)
    iteration, state.iteration = state.iteration, state.iteration + bucket.is_last()
    if iteration < state.start_iter or buffer.numel() == 0:
        return start_average(group, buffer)
    if state.use_error_feedback:
        gradient = state.errors.recall(places, buffer.numel(), buffer).add_(buffer)
    else:
        gradient = buffer.to(working_dtype(buffer.dtype))
    values, positions = _take_largest(gradient, math.ceil(state.ratio * buffer.numel()), buffer.dtype)
    # As bytes in one row: one collective instead of two.
    row = torch.cat([values.view(torch.uint8), positions.to(torch.int32).view(torch.uint8)])

    def average(landed: TensorFuture) -> Tensor:
        record_use(buffer)
        return _sum_up(landed.value(), values.nbytes, buffer)

    return start_all_gather(group, row).then(average)


def _take_largest(
    gradient: Tensor,  # (numel,) float32 or float64; what is taken is subtracted from it
    k: int,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor]:  # (k,) in dtype, (k,) int64
    positions = gradient.abs().topk(k, sorted=False).indices
    taken = gradient[positions]
    values = taken.to(dtype)
    gradient.index_copy_(0, positions, taken - values)  # the error of rounding to 16 bits stays too
    forget_non_finite(gradient)
    return values, positions


def _sum_up(
    rows: Tensor,  # (ranks, bytes) uint8
    nbytes: int,  # of the values in a row; the rest are positions
    buffer: Tensor,  # (numel,) receives the result
) -> Tensor:
    total = torch.zeros_like(buffer, dtype=working_dtype(buffer.dtype))
    # One rank after the other. A position repeats between ranks only, so the order of summation is the same
    # on every rank.
    for received in rows.unbind(0):
        values = received[:nbytes].clone().view(buffer.dtype).to(total.dtype)  # the clone is aligned
        total.index_add_(0, received[nbytes:].clone().view(torch.int32), values)
    return buffer.copy_(total.div_(len(rows)))
