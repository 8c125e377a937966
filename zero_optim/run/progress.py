"""A progress bar for work that takes more than a second: on a terminal, if tqdm is installed."""

import importlib.util
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

_PATIENCE = 1.0  # seconds without a bar


@contextmanager
def progress(what: str, total: int, *, shown: bool = True) -> Iterator[Callable[[int], object]]:
    """Count bytes, and draw a bar on standard error after the first second; without tqdm draw nothing.

    Args:
        what: one or two words, such as "consolidating".
        total: bytes in all, as far as known.
        shown: False never draws.

    Yields:
        A function to call with the number of bytes done since its last call.
    """
    if not (shown and sys.stderr.isatty()) or importlib.util.find_spec("tqdm") is None:
        yield int
        return
    from tqdm import tqdm  # an extra

    with tqdm(desc=what, total=total, unit="B", unit_scale=True, leave=False, delay=_PATIENCE) as bar:
        yield bar.update
