"""Timelines: what has ended for certain when a stream, or a thread of the CPU, does its next work."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch

Clock = dict[int, int]  # for each timeline, by its number, how much of its work has ended


@dataclass(eq=False)
class Timeline:
    """Something that does one piece of work after the other: a stream, or a thread of the CPU."""

    name: str  # in reports
    number: int  # no other timeline has it
    clock: Clock = field(default_factory=dict)  # work of all timelines that ends before the next work here

    def tick(self) -> int:
        """Begin the next piece of work; returns its place in the order."""
        self.clock[self.number] = self.clock.get(self.number, 0) + 1
        return self.clock[self.number]

    def see(self, clock: Clock) -> None:
        """Begin nothing more before the work that a clock names has ended."""
        for number, tick in clock.items():
            if self.clock.get(number, 0) < tick:
                self.clock[number] = tick

    def sees(self, clock: Clock) -> bool:
        """Whether the work that a clock names has ended for certain."""
        return all(self.clock.get(number, 0) >= tick for number, tick in clock.items())


class Event:
    """A place in a stream's work, as ``torch.cuda.Event``. One that was not recorded orders nothing."""

    def __init__(self, clocks: "Clocks") -> None:
        self._clocks = clocks
        self._clock: Clock = {}

    def record(self, stream: "Stream | None" = None) -> None:
        with self._clocks.lock:
            stream = self._clocks.current if stream is None else stream
            stream.see(self._clocks.host.clock)
            self._clock = dict(stream.clock)

    def wait(self, stream: "Stream | None" = None) -> None:
        with self._clocks.lock:
            stream = self._clocks.current if stream is None else stream
            stream.see(self._clock)

    def synchronize(self) -> None:
        with self._clocks.lock:
            self._clocks.host.see(self._clock)

    def query(self) -> bool:
        """Work ends late: an event has happened if somebody has waited for it on this thread."""
        with self._clocks.lock:
            return self._clocks.host.sees(self._clock)


class Stream(Timeline):
    """A stream, as ``torch.cuda.Stream``."""

    def __init__(self, clocks: "Clocks", name: str, number: int) -> None:
        super().__init__(name, number)
        self._clocks = clocks
        # If it waits before each use, memory must be safe when it is handed out again, not when it is freed.
        self.gets_memory_in_order = False
        self.device = torch.device("cpu")

    def record_event(self, event: Event | None = None) -> Event:
        event = Event(self._clocks) if event is None else event
        event.record(self)
        return event

    def wait_event(self, event: Event) -> None:
        event.wait(self)

    def wait_stream(self, other: "Stream") -> None:
        other.record_event().wait(self)

    def synchronize(self) -> None:
        self.record_event().synchronize()

    def query(self) -> bool:
        return self.record_event().query()


class Clocks:
    """All timelines, and which ones each thread uses."""

    def __init__(self) -> None:
        self.lock = threading.RLock()  # held while clocks change
        self._numbers = 0
        self._of_thread = threading.local()
        self.default = self.new_stream("the default stream")  # that a thread begins with

    def new_stream(self, name: str = "") -> Stream:
        with self.lock:
            self._numbers += 1
            return Stream(self, name or f"stream {self._numbers}", self._numbers)

    @property
    def current(self) -> Stream:
        """The stream that this thread uses."""
        return getattr(self._of_thread, "stream", self.default)

    @current.setter
    def current(self, stream: Stream) -> None:
        self._of_thread.stream = stream

    @contextmanager
    def using(self, stream: Stream) -> Iterator[None]:
        before, self.current = self.current, stream
        try:
            yield
        finally:
            self.current = before

    @property
    def host(self) -> Timeline:
        """This thread."""
        found: Timeline | None = getattr(self._of_thread, "host", None)
        if found is None:
            with self.lock:
                self._numbers += 1
                found = Timeline(f"the CPU, thread {threading.current_thread().name}", self._numbers)
            self._of_thread.host = found
        return found
