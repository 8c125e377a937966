"""Handles of started collectives. No communication."""

from contextlib import suppress
from typing import Any

import torch
import torch.distributed as dist

from zero_optim.comm.records import Record
from zero_optim.comm.traffic import Phase, Waitable
from zero_optim.comm.unended import Paired
from zero_optim.compat.streams import Event, is_capturing, recorded_event


class Work:
    """A started collective: the backend's handle or a future, its record, and its counted waits.

    ``late_on``: the device that runs it while the CPU goes on, for the watchdog. ``looks_up``: a gloo
    collective, see Note [Waits that nothing ends] in `comm.unended`.
    """

    __slots__ = ("_looks_up", "_phase", "handle", "late_on", "record")

    def __init__(
        self,
        handle: Waitable,
        phase: Phase,
        record: Record,
        *,
        late_on: torch.device | None = None,
        looks_up: bool = False,
    ) -> None:
        self.handle = handle
        self.late_on = late_on
        self._looks_up = looks_up
        self._phase = phase
        self.record = record
        if late_on is not None and record.group.outstanding is None and not is_capturing(late_on):
            record.group.outstanding = self

    def wait(self, timeout: float | None = None) -> Any:  # noqa: ANN401 - what the handle gives
        """Wait with the caller, or on an accelerator with the current stream.

        ``timeout`` replaces the work's. StalledError if a rank is late or has ended.
        """
        if timeout is not None:
            self.record.timeout = timeout
        with self._phase.held_up(), self.record.waiting():
            if self._looks_up and isinstance(self.handle, dist.Work | Paired):
                return self.record.group.wait_for(self.handle)
            result = self.handle.wait()
        if self.record.group.outstanding is self:
            self.record.group.outstanding = Awaited.of(self)
        return result

    def is_completed(self) -> bool:
        """Return whether it is over, well or not. gloo's sends and receives are over after a wait."""
        handle: Any = self.handle
        try:
            return bool(handle.done() if isinstance(handle, torch.futures.Future) else handle.is_completed())
        except RuntimeError:  # of a device that has failed
            return True

    def exception(self) -> Exception | None:
        """Return its failure or its group's verdict; None if it went well or is pending. No wait.

        The error has no frames: see Note [Groups that end] in `zero_optim.comm.works`.
        """
        failure = self._failure() if self.is_completed() else None
        verdict = self.record.group.verdict
        return failure if failure is None or verdict is None else verdict.error()

    def _failure(self) -> Exception | None:
        handle: Any = self.handle
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


class Awaited:
    """A collective that a stream waits for; unlike its handle, it keeps no tensors."""

    def __init__(self, record: Record, late_on: torch.device, event: Event) -> None:
        self.record = record
        self.late_on = late_on
        self._event = event
        self._failure: RuntimeError | None = None

    @classmethod
    def of(cls, work: Work) -> "Awaited | None":
        """Build it just after a wait; None during graph capture, when events cannot be queried."""
        device = work.late_on
        if device is None or is_capturing(device):
            return None
        return cls(work.record, device, recorded_event(device))

    def is_completed(self) -> bool:
        """Return whether it is over, well or not. No wait."""
        try:
            return bool(self._event.query())
        except RuntimeError as error:  # of a device that has failed
            self._failure = error.with_traceback(None)
            return True

    def exception(self) -> Exception | None:
        """Return the device's failure; the backend's is in the handle alone."""
        return self._failure
