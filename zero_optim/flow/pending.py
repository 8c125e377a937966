"""Started work, of every kind: collectives, what follows them, and what a thread does. No communication."""

from collections.abc import Callable, Sequence
from typing import Any, Generic, Protocol, TypeVar

import torch
from torch import Tensor

from zero_optim.compat.streams import (
    current_stream,
    is_asynchronous,
    is_capturing,
    record_use,
    recorded_event,
    wait_for_event,
)

T = TypeVar("T")


class Waitable(Protocol):
    """The handle of a started collective."""

    def wait(self) -> object:
        """Wait with the caller, or the current stream."""
        ...


class Pending(Generic[T]):
    """Started works, and ``then``, which makes the value of their results: called once, by the first `wait`.

    A failure, also an interrupt, is raised by each `wait`, after the first one without frames. ``tensors``:
    of one device, which the stream of the first wait uses, and are alive until then; other streams wait for
    that one.
    """

    def __init__(
        self, works: Sequence[Waitable], then: Callable[[list[Any]], T], tensors: Sequence[Tensor] = ()
    ) -> None:
        self._works, self._then, self._tensors = works, then, tensors
        self.is_unclaimed = True  # nobody has waited
        self._has_ended = False  # well
        self._value: Any = None
        self._failure: tuple[type[BaseException], tuple[Any, ...], dict[str, Any]] | None = None
        self._behind: tuple[AfterEvent, object] | None = None  # with the first stream

    @property
    def has_failed(self) -> bool:
        """Whether each wait raises."""
        return self._failure is not None

    @property
    def is_over(self) -> bool:
        """Whether it ended well and no stream has to wait any more."""
        return self._has_ended and (self._behind is None or self._behind[0].is_completed())

    def wait(self) -> T:
        """Let the current stream, or on the CPU the caller, wait; return the value."""
        if self.is_unclaimed:
            self.is_unclaimed = False
            try:
                self._end()
            except BaseException as error:
                self._failure = type(error), error.args, error.__dict__
                raise
        elif self._failure is not None:
            raise _made_again(*self._failure)  # not a variable here: its traceback will have this frame
        elif self._behind is not None:
            self._wait_behind(*self._behind)
        value: T = self._value
        return value

    def _end(self) -> None:
        works, then, tensors = self._works, self._then, self._tensors
        del self._works, self._then, self._tensors  # with what they hold
        self._value = then([work.wait() for work in works])
        if tensors and is_asynchronous(device := tensors[0].device):
            record_use(*tensors)  # perhaps made on another stream, to which their memory goes back
            if not is_capturing(device):  # which has no event to query
                self._behind = AfterEvent(device), current_stream(device)
        self._has_ended = True

    def _wait_behind(self, end: "AfterEvent", first: object) -> None:
        if not end.is_completed() and current_stream(end.device) != first:
            end.wait()


def _made_again(
    kind: type[BaseException], args: tuple[Any, ...], attributes: dict[str, Any]
) -> BaseException:
    error = kind(*args)
    error.__dict__.update(attributes)
    return error


class AfterEvent:
    """What the current stream has done until now, as a handle of the backend."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.event = recorded_event(device)  # None without streams

    def wait(self) -> None:
        """Let the current stream wait."""
        wait_for_event(self.device, self.event)

    def is_completed(self) -> bool:
        """Return whether it is done."""
        return self.event is None or bool(self.event.query())

    def exception(self) -> Exception | None:
        """Return the device's failure; only the backend's own handle has the backend's."""
        try:
            self.is_completed()
        except RuntimeError as error:
            return error.with_traceback(None)
        return None
