"""Counts the events that the CPU waits for, of which PyTorch's own count knows nothing.

Note [Waits that count]
    ``torch.cuda.set_sync_debug_mode`` reports copies, ``item()`` and their like, and ``Stream.synchronize``:
    they go through functions of PyTorch that look at the mode. ``Event.synchronize`` calls CUDA at once, and
    is not reported; by it the library waits for its own copies (`zero_optim.compat.streams`). So the methods
    of the class are replaced: events that exist already are seen too, on every thread. Events that C++ code
    waits for are not seen.

    A wait is none if a backward pass has begun since the event was recorded: the GPU has other work then.
"""

import traceback
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

from sync_calls import counting_backwards, num_backwards
from zero_optim.compat import streams

_NOT_SHOWN = (__file__, streams.__file__)


@contextmanager
def waits_for_events(kind: type) -> Iterator[list[str]]:
    """List where the CPU waits for events of the backward pass that began last, or of before the first.

    Args:
        kind: of the events, such as ``torch.cuda.Event``. Those that were recorded before do not count.
    """
    found: list[str] = []
    untyped: Any = kind
    record, synchronize = untyped.record, untyped.synchronize

    def recording(event: Any, *args: Any, **kwargs: Any) -> None:
        event.recorded_in = num_backwards()
        record(event, *args, **kwargs)

    def synchronizing(event: Any) -> None:
        if getattr(event, "recorded_in", None) == num_backwards():
            frames = [frame for frame in traceback.extract_stack() if frame.filename not in _NOT_SHOWN]
            found.append(f"{Path(frames[-1].filename).name}:{frames[-1].lineno}")
        synchronize(event)

    with ExitStack() as stack:
        stack.enter_context(counting_backwards())
        stack.enter_context(patch.object(kind, "record", recording))
        stack.enter_context(patch.object(kind, "synchronize", synchronizing))
        yield found
