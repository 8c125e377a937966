"""A progress bar for work of more than a second, on a terminal with tqdm."""

import importlib.util
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

_PATIENCE = 1.0  # seconds without a bar


@contextmanager
def progress(what: str, total: int, *, shown: bool = True) -> Iterator[Callable[[int], object]]:
    """Yield a function that counts bytes; after a second a bar shows them on standard error."""
    if not (shown and sys.stderr.isatty()) or importlib.util.find_spec("tqdm") is None:
        yield int
        return
    from tqdm import tqdm  # an extra

    with tqdm(desc=what, total=total, unit="B", unit_scale=True, leave=False, delay=_PATIENCE) as bar:
        yield bar.update
