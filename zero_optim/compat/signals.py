"""Python's signal handlers, run later.

Note [Handlers and locks]
    A handler runs on the main thread, between any two lines, and may use the process group, to save a
    checkpoint. If the main thread has a lock of shared memory then, it waits for itself. gloo's code is C++,
    which no handler interrupts. So calls through memory set the handlers aside. Signals that come meanwhile
    are raised again at the end, after at most a second.
"""

import math
import os
import signal
import threading
import time
from importlib import import_module
from typing import Any, Final

# Without the enums of the module `signal`, which takes 25 µs for all signals; this takes 1 µs.
_c_module: Any = import_module("_signal")
_handler_of, _set_handler = _c_module.getsignal, _c_module.signal
_NUMBERS: Final = tuple(map(int, signal.valid_signals()))


class HandlersLater:
    """A context in which no signal handler of Python runs; at its end those run whose signal came."""

    __slots__ = ("_handlers", "_is_over", "_numbers", "_process")

    def __enter__(self) -> None:
        self._handlers: dict[int, Any] = {}
        if threading.get_ident() != threading.main_thread().ident:
            return
        self._numbers: list[int] = []  # of signals that came
        self._is_over, self._process = False, os.getpid()
        every = list(map(_handler_of, _NUMBERS))
        seen, handlers = _SEEN[0]
        if every != seen:  # they have changed
            handlers = {number: each for number, each in zip(_NUMBERS, every, strict=True) if callable(each)}
            _SEEN[0] = every, handlers
        self._handlers = handlers
        try:
            for number in self._handlers:
                _set_handler(number, self._note)
        except BaseException:  # of a handler that was not set aside yet
            self.__exit__()
            raise

    def __exit__(self, *_: object) -> None:
        try:
            for number, handler in self._handlers.items():
                _set_handler(number, handler)
        finally:  # a handler may raise in between, and those behind it stay set aside
            self._is_over = True
        if self._handlers and self._numbers:
            _raise_all(self._numbers)

    def _note(self, number: int, frame: object) -> None:
        if self._is_over or os.getpid() != self._process:  # another thread has forked
            self._handlers[number](number, frame)
        else:
            self._numbers.append(number)


def wait_for(event: threading.Event, seconds: float = math.inf) -> bool:
    """Wait for an event; while a handler runs in the code of its wait, nobody could set it."""
    deadline = time.monotonic() + seconds
    while not event.is_set() and (left := deadline - time.monotonic()) > 0:
        with HandlersLater():
            event.wait(min(left, 1.0))
    return event.is_set()


# All handlers, and those of Python, by signal.
_SEEN: list[tuple[list[Any], dict[int, Any]]] = [([], {})]


def _raise_all(numbers: list[int]) -> None:
    try:
        signal.raise_signal(numbers.pop())
    finally:  # also if a handler raised
        if numbers:
            _raise_all(numbers)
