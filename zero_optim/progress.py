"""A bar for what takes more than a second, where there is a terminal and something to draw it with."""

import importlib
import sys
from time import monotonic
from types import TracebackType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from typing_extensions import Self

_PATIENCE = 1.0  # seconds without a bar


class Progress:
    """Counts bytes, and draws a bar on standard error once a second has gone by and more is to come.

    rich draws it, or tqdm, both of which may be missing: then there is none, nor without a terminal.

    Args:
        what: one word or two, such as "consolidating".
        total: bytes in all, as far as is known.
        shown: False never draws.
    """

    def __init__(self, what: str, total: int, *, shown: bool = True) -> None:
        self._what = what
        self._total = total
        self._shown = shown and sys.stderr.isatty()
        self._began = monotonic()
        self._done = 0
        self._bar: _RichBar | _TqdmBar | None = None

    def __enter__(self) -> "Self":
        """Begin to count time."""
        self._began = monotonic()
        return self

    def advance(self, nbytes: int) -> None:
        """Count bytes that are done."""
        self._done += nbytes
        if self._bar is not None:
            self._bar.show(min(self._done, self._total))
        elif self._shown and monotonic() - self._began > _PATIENCE and self._done < self._total:
            self._bar = _make_bar(self._what, self._total)
            self._shown = self._bar is not None

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Take the bar away."""
        if self._bar is not None:
            self._bar.close()


class _RichBar:
    def __init__(self, what: str, total: int) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, DownloadColumn, TextColumn, TimeRemainingColumn
        from rich.progress import Progress as Bar

        columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TimeRemainingColumn())
        self._bar = Bar(*columns, console=Console(stderr=True), transient=True)
        self._task = self._bar.add_task(what, total=total)
        self._bar.start()

    def show(self, done: int) -> None:
        self._bar.update(self._task, completed=done)

    def close(self) -> None:
        self._bar.stop()


class _TqdmBar:
    def __init__(self, what: str, total: int) -> None:
        tqdm: Any = importlib.import_module("tqdm")
        self._bar: Any = tqdm.tqdm(desc=what, total=total, unit="B", unit_scale=True, leave=False)

    def show(self, done: int) -> None:
        self._bar.update(done - self._bar.n)

    def close(self) -> None:
        self._bar.close()


def _make_bar(what: str, total: int) -> "_RichBar | _TqdmBar | None":
    for kind in (_RichBar, _TqdmBar):
        try:
            return kind(what, total)
        except ImportError:
            continue
    return None
