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

    def wait_event(self, event: "FakeEvent") -> None:
        self.awaited.append(event)


@dataclass(eq=False)
class FakeEvent:
    """An event on a stream; it has passed once a test says so."""

    stream: FakeStream
    has_passed: bool = False

    def query(self) -> bool:
        return self.has_passed

    def synchronize(self) -> None:
        pass


@dataclass(frozen=True, eq=False)
class FakeAccelerator(streams.Accelerator):
    """Streams for every device; ``stack`` ends in the current one, on whatever thread."""

    module: Any = None
    stack: list[FakeStream] = field(default_factory=lambda: [FakeStream("main")])
    events: list[FakeEvent] = field(default_factory=list)
    used: list[tuple[Tensor, str]] = field(default_factory=list)

    def current_stream(self, device: torch.device) -> FakeStream:
        return self.stack[-1]

    def new_stream(self, device: torch.device) -> FakeStream:
        return FakeStream("beside")

    @contextmanager
    def using(self, stream: FakeStream) -> Iterator[None]:  # type: ignore[override]
        self.stack.append(stream)
        try:
            yield
        finally:
            self.stack.pop()

    def asking(self, device: torch.device) -> AbstractContextManager[None]:
        return nullcontext() if self.module is None else super().asking(device)

    def recorded_event(self, device: torch.device) -> FakeEvent:
        self.events.append(FakeEvent(self.stack[-1]))
        return self.events[-1]

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
