"""Works: what a process keeps of a collective until its end. No communication.

Note [Works that outlive the interpreter]
    The last reference to a work releases its tensors, which takes the GIL. If gloo's thread does that while
    Python ends, the process aborts (exit status 134). So works are kept until they have ended; once one has
    failed, as long as their group or Python's modules.
"""

import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import KW_ONLY, dataclass, field
from types import TracebackType
from typing import Any

import torch

from zero_optim.comm.backends import raised_by_backend
from zero_optim.comm.traffic import Phase
from zero_optim.comm.work_log import GroupWorks
from zero_optim.compat.autograd import is_profiling
from zero_optim.compat.streams import is_capturing
from zero_optim.errors import ZeroOptimError
from zero_optim.flow.pending import AfterEvent, Waitable

_BEFORE_PYTORCH = 0.9
# How a work is named in messages, by its phase.
_NOUNS = {
    "gather": "the gather",
    "reduce": "the reduction",
    "clip": "the norm for clip_grad_norm_()",
    "agree": "an exchange between all ranks",
    "order": "an exchange of the order of buckets",
    "state": "the exchange of optimizer state",
    "checkpoint": "the exchange of a checkpoint",
    "buffers": "the broadcast of the model's buffers",
}


@dataclass(slots=True, eq=False)
class Work:
    """One or more calls of the backend that are waited for together, from their begin on.

    It is a context in which a thread is in the backend's code, which starts the calls or waits for them.

    ``about``: such as ``bucket 3 (layers.7.weight, …)``, or empty. ``late_on``: the device that runs it while
    the CPU goes on. ``polls``: Note [Waits that nothing ends]. ``runs_hook``: a comm hook may raise in it.
    ``handles``: of the backend, or a future; none if the calls end in the context. Times are seconds of
    `time.monotonic`.
    """

    group: GroupWorks
    phase: Phase
    about: str = ""
    _: KW_ONLY
    late_on: torch.device | None = None
    polls: bool = False
    runs_hook: bool = False
    handles: Sequence[Waitable] = field(default=(), init=False)
    started: float = field(default_factory=time.monotonic, init=False)
    waiting_since: float | None = field(default=None, init=False)
    is_warned: bool = field(default=False, init=False)
    _ends: bool = field(default=False, init=False)  # in the context that it is in
    _range: Any = field(default=None, init=False)  # of a profiler

    @property
    def timeout(self) -> float:
        """Return its limit; on a device less than the group's, at which PyTorch may end the process."""
        limit, _ = self.phase.limits(self.group.limit)
        return limit if self.late_on is None else min(limit, _BEFORE_PYTORCH * self.group.limit)

    @property
    def text(self) -> str:
        """Return its name in messages."""
        noun = _NOUNS.get(self.phase.name, f"a collective ({self.phase.name})")
        return f"{noun} of {self.about}" if self.about else noun

    @property
    def label(self) -> str:
        """Return its name for a profiler."""
        bucket = self.about.partition(" (")[0]
        return f"zero_optim.{self.phase.name} {bucket}" if bucket else f"zero_optim.{self.phase.name}"

    def __enter__(self) -> "Work":
        self.waiting_since = time.monotonic()
        self._ends = bool(self.handles)
        if not self._ends and len(self.group.pending) >= self.group.drops_from:
            self.group.drop_ended()
        self.group.pending.add(self)
        if is_profiling():
            self._range = torch.profiler.record_function(f"{self.label}{' wait' * self._ends}")
            self._range.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        explained: Exception | None = None
        if self._range is not None:
            self._range.__exit__(kind, error, traceback)
            self._range = None
        try:
            if isinstance(error, RuntimeError) and not isinstance(error, ZeroOptimError):
                is_of_backend = raised_by_backend(error)
                self.group.has_failed |= is_of_backend
                if not self.runs_hook or is_of_backend or self.group.verdict is not None:
                    explained = self.group.log.explain(self, error)
                if explained is not None:
                    raise explained from error
        finally:
            explained = None  # see Note [Groups that end]
            self.waiting_since = None
            # Note [Works that outlive the interpreter]; a device has no thread that takes the GIL.
            if self.late_on is not None or not self.handles or (self._ends and error is None):
                self.group.pending.discard(self)

    def take(self, *handles: Waitable) -> "Work":
        """Take the handles of the calls, in the context that has started them; returns itself."""
        self.handles = handles
        if self.late_on is not None and self.group.outstanding is None and not is_capturing(self.late_on):
            self.group.outstanding = self
        return self

    def wait(self) -> Any:  # noqa: ANN401 - what the last handle gives
        """Wait with the caller or the current stream; StalledError if a rank is late or has ended."""
        result: Any = None
        with self.phase, self:
            for handle in self.handles:
                result = self.group.wait_for(handle) if self.polls else handle.wait()
        device = self.late_on
        if self.group.outstanding is self and device is not None:
            if is_capturing(device):  # which has no event to query
                self.group.outstanding = None
            else:  # the handles keep tensors
                self.handles = (AfterEvent(device),)
        return result

    def is_completed(self) -> bool:
        """Return whether it ended, also by failure. gloo's sends and receives end in a wait."""
        handles: Sequence[Any] = self.handles
        try:
            return all(
                handle.done() if hasattr(handle, "done") else handle.is_completed()  # a future has the former
                for handle in handles
            )
        except RuntimeError:  # of a device that has failed
            return True

    def exception(self) -> Exception | None:
        """Return its failure or its group's error, without frames; None if well or pending. No wait."""
        failures = map(self._failure, self.handles if self.is_completed() else ())
        failure = next((each for each in failures if each is not None), None)
        verdict = self.group.verdict
        return failure if failure is None or verdict is None else verdict.error()

    def _failure(self, handle: Any) -> Exception | None:  # noqa: ANN401 - of any backend
        with suppress(AttributeError, TypeError):  # a future has none; PyTorch 2.8 cannot hand it out
            failure = handle.exception()
            if isinstance(failure, Exception):
                return failure
        if self.late_on is None:  # else a stream would wait
            try:
                handle.wait()
            except Exception as error:  # noqa: BLE001 - returned, not raised
                return error.with_traceback(None)
        return None
