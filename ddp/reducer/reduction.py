"""The reduction of one bucket: PyTorch's all-reduce, or a comm hook."""

import inspect
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.futures import Future

from zero_optim.comm.collectives import RankGroup
from zero_optim.compat import private
from zero_optim.ddp.reducer.gradient_bucket import GradBucket, ReducerBucket
from zero_optim.ddp.reducer.report import FailureReport
from zero_optim.errors import ReductionError, message_of
from zero_optim.flow.pending import Pending

Hook = Callable[[Any, Any], Future[Tensor]]  # (state, bucket), PyTorch's contract

# Starts the reduction of a bucket to the gradients: one tensor of the bucket's length, or a sparse one. The
# bool: send the word of a failure, as Note [Two ways to tell of a failure] in `report` says.
Launch: TypeAlias = Callable[[ReducerBucket, bool], Pending[Tensor]]


class Launched(list[tuple[ReducerBucket, Pending[Tensor]]]):
    """The buckets of a pass whose reductions were started, in order."""

    def results(self, report: FailureReport | None = None) -> Iterator[tuple[ReducerBucket, Tensor]]:
        """Wait for each bucket, and yield it with its gradients; a report reads its word."""
        for bucket, reduction in self:
            reduced = reduction.wait()
            if report is not None and report.awaits_word and bucket.is_last:
                report.read_word(reduced)
            yield bucket, reduced

    def drain(self, report: FailureReport | None = None) -> None:
        """Wait for every bucket, and drop the results."""
        for _ in self.results(report):
            pass

    def check(self, report: FailureReport) -> None:
        """Raise ReductionError on every rank if one failed; all ranks call, before they use results."""
        try:
            if report.in_last_bucket:
                self.drain(report)
            report.check()
        except ReductionError:
            self.drain()
            raise


class HookSlot:
    """The comm hook, at most one. After a ``failure`` it is not called again: its collectives are unknown."""

    def __init__(self) -> None:
        self.hook: tuple[Hook, object] | None = None
        self.name = ""
        self.failure: str | None = None

    def forget(self) -> None:
        """Forget a failure, where all begins anew."""
        self.failure = None

    def rename(self, name: str) -> None:
        """Show the hook by another name in statistics."""
        self.name = name

    def register(self, state: object, hook: Hook) -> None:
        """Set the hook; see `Reducer.register_comm_hook`."""
        _check_hook(hook)
        if self.hook is not None:
            raise RuntimeError(
                "register_comm_hook or register_builtin_comm_hook can only be called once. "
                f"{self.name} is registered already: to do both, wrap one in the other and "
                f"register that instead of {hook_name(hook)}"
            )
        self.hook, self.name = (hook, state), hook_name(hook)

    def divisor(self) -> float | None:
        """Return by what gradients are divided as they are copied, for a hook of ours; None if not."""
        hook, state = self.hook or (None, None)
        asked: Callable[[object], float | None] | None = getattr(hook, "divides_by", None)
        return None if asked is None else asked(state)

    def launching(self, group: RankGroup, *, all_used: bool) -> Launch:
        """Return the launch function: the comm hook, or a sum. It holds a weak reference."""
        reference, is_divided = weakref.ref(self), self.hook is not None and self.divisor() is not None

        def launch(bucket: ReducerBucket, has_failed: bool) -> Pending[Tensor]:
            slot, flat = reference(), bucket.storage.flat
            assert slot is not None  # see above
            if has_failed:
                flat[:1].fill_(float("nan"))
            if slot.hook is None:
                return group.start_sum(flat, bucket.label)
            with slot.minding():
                argument = GradBucket(bucket, all_used=all_used, is_divided=is_divided)
                return slot._start(bucket, group, argument)

        return launch

    def _start(self, bucket: ReducerBucket, group: RankGroup, argument: GradBucket) -> Pending[Tensor]:
        """Call the hook, which also divides. Counts the wait, not the bytes that the hook sends."""
        assert self.hook is not None  # asked for by the caller
        (hook, state), name = self.hook, self.name
        with group.begin_work(bucket.label, runs_hook=True) as work:
            future = hook(state, argument)
            if not isinstance(future, private.Future):
                raise RuntimeError(  # noqa: TRY004 - PyTorch's type
                    "DDP communication hook's callback must return a torch.futures.Future object, but got "
                    f"{type(future).__name__} from {name}. Expected a future of one tensor, as "
                    "all_reduce(..., async_op=True).get_future() gives"
                )
            work.take(future)

        def reduced(values: list[Any]) -> Tensor:
            value = values[0]
            result = value[0] if isinstance(value, list | tuple) and len(value) == 1 else value
            if not isinstance(result, Tensor):
                raise TypeError(
                    f"the future returned by the comm hook {name} holds {type(value).__name__}: "
                    "expected one tensor, shaped like bucket.buffer()"
                )
            flat = bucket.storage.flat
            if flat.is_complex() and not result.is_complex():  # they travel as pairs of real numbers
                result = torch.view_as_complex(result.reshape(-1, 2))
            if not bucket.members.is_sparse and result.numel() != flat.numel():
                raise ValueError(
                    f"the comm hook {name} returned {result.numel()} elements for a bucket of "
                    f"{flat.numel()}: expected a tensor shaped like bucket.buffer()"
                )
            return result

        return Pending([work], reduced)

    @contextmanager
    def minding(self) -> Iterator[None]:
        """Record a failure of the hook, or of its work."""
        try:
            yield
        except Exception as error:
            self.failure = f"a comm hook failed in an earlier backward pass: {message_of(error)}"
            raise


def _check_hook(hook: object) -> None:
    """Refuse a wrong signature or annotation. Users match on PyTorch's sentences, which come first."""
    if not callable(hook):
        raise TypeError(
            "Communication hook must be callable. Expected a comm hook, hook(state, bucket), got "
            f"{type(hook).__name__}"
        )
    signature, bucket = inspect.signature(hook), object()
    try:
        bound = signature.bind(None, bucket)
    except TypeError as error:
        message = f"expected a comm hook, hook(state, bucket), got {hook_name(hook)}{signature}"
        raise TypeError(message) from error
    for name, value in bound.arguments.items():
        taken = signature.parameters[name].annotation
        is_open = taken in (Any, object, inspect.Parameter.empty) or not isinstance(taken, type)
        if value is bucket and not is_open and not hasattr(taken, "buffer"):
            raise ValueError(
                "Communication hook: bucket annotation should be dist.GradBucket. "
                f"{hook_name(hook)} is annotated to take {taken}"
            )
    returned = signature.return_annotation
    if returned not in (inspect.Signature.empty, Any, Future[Tensor]) and not isinstance(returned, str):
        raise ValueError(
            "Communication hook: return annotation should be torch.futures.Future[torch.Tensor]. "
            f"{hook_name(hook)} is annotated to return {returned}"
        )


def hook_name(hook: object) -> str:
    """Return a hook's name for messages and statistics."""
    return str(getattr(hook, "__qualname__", type(hook).__qualname__))
