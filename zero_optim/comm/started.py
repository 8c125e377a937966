"""A collective that was started, as the code that started it holds it. Nothing here communicates."""

from contextlib import suppress
from typing import Any

import torch
import torch.distributed as dist

from zero_optim.comm.traffic import Phase, Waitable
from zero_optim.comm.unended import Paired
from zero_optim.comm.works import Record
from zero_optim.compat.streams import Event, is_capturing, recorded_event


class Work:
    """A collective that was started: a handle with a label, whose waits are counted.

    Args:
        handle: of the backend, or a future.
        phase: where waits are counted.
        record: the label.
        late_on: the device that does it, if the CPU does not wait for it; the watchdog asks the handle.
        looks_up: it is a collective of gloo, see Note [Waits that nothing ends] in `zero_optim.comm.unended`.

    Attributes:
        handle: as given.
        record: the label, and what is known of it.
        late_on: as given.
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
        """Wait for it: the caller, or on an accelerator the current stream.

        Args:
            timeout: seconds after which the watchdog gives up this wait, and the group; None for the timeout
                that the work has. Has no effect where no watchdog runs.

        Raises:
            StalledError: a rank did not come in time, or has ended.
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
        """Tell whether it is over, well or not; waits for nothing.

        What gloo sends from rank to rank is over as soon as somebody has waited for it.
        """
        handle: Any = self.handle
        try:
            return bool(handle.done() if isinstance(handle, torch.futures.Future) else handle.is_completed())
        except RuntimeError:  # of a device that has failed
            return True

    def exception(self) -> Exception | None:
        """Give what it failed with; None if it went well, or is not over. Waits for nothing, and asks nobody.

        If its group was given up, that is the reason, as `wait` raises it. What is given refers to no frame:
        see Note [Groups that end] in `zero_optim.comm.works`.
        """
        if not self.is_completed():
            return None
        found = self._found()
        verdict = self.record.group.verdict
        return found if found is None or verdict is None else verdict.error()

    def _found(self) -> Exception | None:
        """Give what the backend says of a work that is over."""
        handle: Any = self.handle
        with suppress(AttributeError, TypeError):  # a future has none; PyTorch 2.8 cannot hand it out
            found = handle.exception()
            if isinstance(found, Exception):
                return found
        if self.late_on is None:  # else a stream would wait
            try:
                handle.wait()
            except Exception as error:  # noqa: BLE001 - given, not raised
                return error.with_traceback(None)
        return None


class Awaited:
    """A collective that a stream waits for, in the place of its handle, which keeps all that it brings.

    Args:
        record: the label.
        late_on: the device.
        event: happens on the stream that waits, when the collective is over.
    """

    def __init__(self, record: Record, late_on: torch.device, event: Event) -> None:
        self.record = record
        self.late_on = late_on
        self._event = event
        self._failure: RuntimeError | None = None

    @classmethod
    def of(cls, work: Work) -> "Awaited | None":
        """Make it just after a wait; None if a graph is being captured, as nobody may ask then."""
        device = work.late_on
        if device is None or is_capturing(device):
            return None
        return cls(work.record, device, recorded_event(device))

    def is_completed(self) -> bool:
        """Tell whether it is over, well or not; waits for nothing."""
        try:
            return bool(self._event.query())
        except RuntimeError as error:  # of a device that has failed
            self._failure = error.with_traceback(None)
            return True

    def exception(self) -> Exception | None:
        """Give what the device failed with; what the backend says of a collective is in the handle alone."""
        return self._failure
