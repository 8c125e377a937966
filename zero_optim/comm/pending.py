"""Collectives that were started and not waited for. Nothing here starts one."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from zero_optim.comm.traffic import Waitable
from zero_optim.compat.streams import Event, record_use, recorded_event, wait_for_event


@dataclass(slots=True)
class Pending:
    """Collectives that have been started. It keeps the tensors they use until somebody has waited for them.

    Each stream that needs the result waits. The first one waits for the collectives, and on it ``then`` is
    called; any other one waits for the first. The caller takes care that only one thread waits at a time.

    Args:
        works: handles of the collectives, in the order in which they were started.
        tensors: what the collectives read or write; at least one, all on one device.
        then: called once, on the thread and the stream that waits first, behind all of them.

    Attributes:
        is_unclaimed: nobody has waited yet.
    """

    works: Sequence[Waitable]
    tensors: list[Tensor]
    then: Callable[[], None]
    is_unclaimed: bool = field(default=True, init=False)
    _behind: tuple[torch.device, Event] | None = field(default=None, init=False)

    def wait(self) -> bool:
        """Let the current stream, on the CPU the caller, wait for all of them, and for ``then``.

        Returns:
            Whether all is known to be over, so that no stream needs to wait any more. On the CPU it is.
        """
        if not self.is_unclaimed:
            return self._wait_behind()
        self.is_unclaimed = False
        tensors, self.tensors, works, self.works = self.tensors, [], self.works, ()
        for work in works:
            work.wait()
        self.then()
        self.then = _nothing  # and let go of what it keeps
        device = tensors[0].device
        record_use(*tensors)  # perhaps made on another stream, to which their memory goes back
        event = recorded_event(device)
        self._behind = None if event is None else (device, event)
        return event is None

    def _wait_behind(self) -> bool:
        if self._behind is not None:
            device, event = self._behind
            if event.query():
                self._behind = None
            else:
                wait_for_event(device, event)
        return self._behind is None


def _nothing() -> None:
    """Do nothing: the work is done."""
