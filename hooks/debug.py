"""Hooks to observe what DDP does: one that does nothing, and one that logs what another hook does."""

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from zero_optim.hooks.bucket import GradBucket, Hook, TensorFuture, name_of
from zero_optim.hooks.exchange import landed

logger = logging.getLogger("zero_optim.hooks")


def noop_hook(state: object, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Leave every rank its own gradients; does not communicate.

    It measures how long training would take if communication cost nothing. The replicas drift apart, as
    nothing keeps them equal.

    Args:
        state: ignored.
        bucket: the gradients.
    """
    return landed(bucket.buffer())


@dataclass(frozen=True, slots=True)
class BucketRecord:
    """One bucket in one iteration.

    Args:
        iteration: counted from 0.
        index: the bucket's place in the order of reduction.
        is_last: whether it is the last of its iteration.
        num_parameters: how many gradients it holds.
        numel: elements in the flat tensor.
        nbytes: its size in bytes, before any compression.
        dtype: of its elements.
        device: where it lies.
        seconds: from the call of the hook until its result was ready. With NCCL until the work was queued:
            a profiler shows how long the GPU takes.
    """

    iteration: int
    index: int
    is_last: bool
    num_parameters: int
    numel: int
    nbytes: int
    dtype: torch.dtype
    device: torch.device
    seconds: float


def log_record(record: BucketRecord) -> None:
    """Write a record to the logger ``zero_optim.hooks``, at level INFO."""
    logger.info(
        "iteration %d bucket %d%s: %d parameters, %d elements, %d bytes, %s on %s, %.3f ms",
        record.iteration,
        record.index,
        " (last)" if record.is_last else "",
        record.num_parameters,
        record.numel,
        record.nbytes,
        record.dtype,
        record.device,
        record.seconds * 1e3,
    )


@dataclass(slots=True, eq=False)
class LoggingState:
    """State of a hook made by `logging_hook`.

    Args:
        state: the state of the hook inside.
        report: called with a `BucketRecord` for each bucket, at the end of its ``seconds``, on any thread. It
            should be quick and must not raise.

    Attributes:
        iteration: number of iterations whose last bucket has come.
    """

    state: Any = None
    report: Callable[[BucketRecord], None] = log_record
    iteration: int = field(default=0, init=False)


def logging_hook(hook: Hook) -> Hook:
    """Wrap a hook so that each bucket is logged; the state of the new hook is a `LoggingState`.

    It communicates as the hook inside does, and changes nothing.

    Args:
        hook: the hook inside.
    """

    def logged(state: LoggingState, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
        started, iteration = time.perf_counter(), state.iteration
        state.iteration += bucket.is_last()
        report, buffer, num_parameters = state.report, bucket.buffer(), len(bucket.parameters())
        index, is_last = bucket.index(), bucket.is_last()

        # It must not hold the state, which holds groups: Note [Callbacks own no process group].
        def log(landed: TensorFuture) -> torch.Tensor:
            result = landed.value()
            record = BucketRecord(
                iteration=iteration,
                index=index,
                is_last=is_last,
                num_parameters=num_parameters,
                numel=buffer.numel(),
                nbytes=buffer.numel() * buffer.element_size(),
                dtype=buffer.dtype,
                device=buffer.device,
                seconds=time.perf_counter() - started,
            )
            report(record)
            return result

        return hook(state.state, bucket).then(log)

    logged.__name__ = logged.__qualname__ = f"logging_{name_of(hook)}"
    return logged
