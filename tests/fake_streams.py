"""Streams for CPU tensors that do nothing but tell what was asked of them.

With `without_thread` the overlapped step runs as on an accelerator: in the hooks, without a thread.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from zero_optim.compat import streams


@dataclass(eq=False)
class FakeStream:
    """A stream; it keeps the events that it was made to wait for."""

    name: str
    awaited: list["FakeEvent"] = field(default_factory=list)
    device: str = "cpu"

    def wait_event(self, event: "FakeEvent") -> None:
        self.awaited.append(event)


@dataclass(eq=False)
class FakeEvent:
    """An event on a stream; it has passed once a test says so."""

    stream: FakeStream | None = None
    has_passed: bool = False

    def record(self, stream: FakeStream) -> None:
        self.stream = stream

    def query(self) -> bool:
        return self.has_passed

    def synchronize(self) -> None:
        pass


class FakeModule:
    """What ``torch.cuda`` is for CUDA; ``stack`` ends in the current stream, on whatever thread."""

    def __init__(self) -> None:
        self.stack = [FakeStream("main")]
        self.events: list[FakeEvent] = []

    def Stream(self, device: torch.device) -> FakeStream:
        return FakeStream("beside")

    def Event(self) -> FakeEvent:
        self.events.append(FakeEvent())
        return self.events[-1]

    def current_stream(self, device: torch.device) -> FakeStream:
        return self.stack[-1]

    def device(self, device: torch.device) -> AbstractContextManager[None]:
        return nullcontext()

    @contextmanager
    def stream(self, stream: FakeStream) -> Iterator[None]:
        self.stack.append(stream)
        try:
            yield
        finally:
            self.stack.pop()


@dataclass(frozen=True, eq=False)
class FakeAccelerator(streams.Accelerator):
    """Streams for every device."""

    module: Any = field(default_factory=FakeModule)
    used: list[tuple[Tensor, str]] = field(default_factory=list)

    @property
    def stack(self) -> list[FakeStream]:
        """The streams in use, the current one last."""
        return list(self.module.stack)

    @property
    def events(self) -> list[FakeEvent]:
        """The events so far."""
        return list(self.module.events)

    def record_use(self, tensor: Tensor) -> None:
        self.used.append((tensor, self.stack[-1].name))

    def host_tensor(self, like: Tensor) -> Tensor:
        return torch.empty_like(like)

    def future(self, device: torch.device) -> torch.futures.Future[Tensor]:
        return torch.futures.Future()

    def were_used_on(self, name: str, *tensors: Tensor) -> bool:
        """Whether the memory of tensors was marked as used on a stream."""
        marked = {tensor.untyped_storage().data_ptr() for tensor, stream in self.used if stream == name}
        return all(tensor.untyped_storage().data_ptr() in marked for tensor in tensors)


@contextmanager
def fake_streams() -> Iterator[FakeAccelerator]:
    """Give CPU tensors such streams."""
    before, accelerator = streams.accelerator_of, FakeAccelerator()
    streams.accelerator_of = lambda device: accelerator
    try:
        yield accelerator
    finally:
        streams.accelerator_of = before


def without_thread(check: Callable[..., object], *args: object) -> None:
    """Run a check with such streams, on a rank."""
    with fake_streams():
        check(*args)
