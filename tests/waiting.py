"""Waiting for what a test needs: with a limit that only a hang reaches, so that no test depends on timing."""

import time
from collections.abc import Callable

LIMIT = 400.0  # seconds: processes that import torch take some of them on a busy machine
_POLL = 0.02  # seconds


def wait_until(holds: Callable[[], bool]) -> None:
    """Returns once a condition holds, or after `LIMIT`: the caller asserts what it needs, and shows it."""
    deadline = time.monotonic() + LIMIT
    while not holds() and time.monotonic() < deadline:
        time.sleep(_POLL)
