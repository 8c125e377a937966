"""Futures that order streams: who waits has its stream wait for the one that set the value."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from modelled.clocks import Clock, Clocks
from modelled.operators import Accesses, tensors_in


class Future(torch.futures.Future[Any]):
    """A ``torch.futures.Future`` made with ``devices=``.

    A callback runs at once where the value is there, on a stream of its own that waits for the value.
    """

    def __init__(self, accesses: Accesses) -> None:
        super().__init__()
        self._accesses = accesses
        self._clock: Clock = {}
        self._host_clock: Clock = {}
        self._result: Any = None
        self._has_failed = False
        self._callbacks: list[Callable[[], None]] = []

    @property
    def _clocks(self) -> Clocks:
        return self._accesses.clocks

    def wait(self) -> Any:
        try:
            return super().wait()
        finally:
            self._order()

    def _order(self) -> None:
        """Let this thread's stream wait for the value, and keep the value's memory for it."""
        with self._clocks.lock:
            self._clocks.host.see(self._host_clock)
            self._clocks.current.see(self._clock)
            for tensor in tensors_in(self._result):
                record_use(self._accesses, tensor)

    def set_result(self, result: Any) -> None:
        with self._clocks.lock:
            current = self._clocks.current
            current.see(self._clocks.host.clock)
            self.complete(result, dict(current.clock))

    def complete(self, result: Any, clock: Clock) -> None:
        """Set the result, which is there when what a clock names has ended."""
        with self._clocks.lock:
            self._clock, self._host_clock = clock, dict(self._clocks.host.clock)
            self._result = result
            super().set_result(result)
            callbacks, self._callbacks = self._callbacks, []
        for callback in callbacks:
            callback()

    def then(self, callback: Callable[[Any], Any]) -> "Future":
        child = Future(self._accesses)

        def run() -> None:
            with self._clocks.using(self._clocks.new_stream("a callback's stream")):
                self._order()
                try:
                    child.set_result(callback(self))
                except Exception as error:  # noqa: BLE001 - raised where the child is waited for
                    child.set_exception(error)  # type: ignore[arg-type]

        self._run(run)
        return child

    def add_done_callback(self, callback: Callable[[Any], None]) -> None:
        self.then(callback)

    def _run(self, function: Callable[[], None]) -> None:
        with self._clocks.lock:
            if not self.done():
                self._callbacks.append(function)
                return
        function()


def record_use(accesses: Accesses, tensor: Tensor) -> None:
    """Keep a tensor's memory for the current stream, as ``Tensor.record_stream`` does.

    It does nothing for memory that the allocator did not give to this very storage, such as DLPack's.
    """
    with accesses.clocks.lock:
        block = accesses.block_of(tensor)
        if block is not None and block.storage() is tensor.untyped_storage():
            block.users.add(accesses.clocks.current)
