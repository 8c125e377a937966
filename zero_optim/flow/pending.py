"""Started collectives, and what follows when somebody waits. No communication."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from zero_optim.comm.traffic import Waitable
from zero_optim.compat.streams import (
    Event,
    current_stream,
    record_use,
    recorded_event,
    wait_for_event,
)


@dataclass(slots=True)
class Pending:
    """Started collectives on one device: the first stream that waits calls ``then``; others wait for it."""

    works: Sequence[Waitable]
    tensors: list[Tensor]
    then: Callable[[], None]
    is_unclaimed: bool = field(default=True, init=False)
    _behind: tuple[torch.device, Event, object] | None = field(default=None, init=False)

    def wait(self) -> bool:
        """Let the current stream, or on the CPU the caller, wait; True if no stream must wait any more."""
        if not self.is_unclaimed:
            return self._wait_behind()
        self.is_unclaimed = False
        tensors, self.tensors, works, self.works = self.tensors, [], self.works, ()
        for work in works:
            work.wait()
        self.then()
        self.then = lambda: None  # and let go of what it keeps
        device = tensors[0].device
        record_use(*tensors)  # perhaps made on another stream, to which their memory goes back
        event = recorded_event(device)
        self._behind = None if event is None else (device, event, current_stream(device))
        return event is None

    def _wait_behind(self) -> bool:
        if self._behind is None:
            return True
        device, event, first = self._behind
        if event.query():
            self._behind = None
        elif current_stream(device) != first:
            wait_for_event(device, event)
        return self._behind is None


@dataclass(slots=True)
class Then:
    """Started work, and what takes the results after the only wait."""

    works: Sequence[Waitable]
    then: Callable[[list[Any]], None]

    def wait(self) -> None:
        """Wait for all."""
        self.then([work.wait() for work in self.works])
