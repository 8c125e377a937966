"""What the user sees: a bar on a terminal, plain lines elsewhere, and a table at the end.

Only rank 0 makes one. Needs rich, an extra.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from time import perf_counter
from types import TracebackType
from typing import TYPE_CHECKING

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn
from rich.table import Table
from rich.text import Text

if TYPE_CHECKING:
    from typing_extensions import Self

    from zero_optim.demo.metrics import Metric
    from zero_optim.demo.trainer import Shard

_LINES = 20  # about this many lines, where there is no bar
_PLAIN_WIDTH = 100  # columns, where no terminal tells its width


@dataclass(frozen=True, slots=True)
class Summary:
    """The result of a run.

    Attributes:
        shards: what each rank keeps, by rank.
        first_loss, last_loss: of the whole run, on the held-out text, in nats per byte.
        seconds: of this part of the run, validation and checkpoints included.
        folder: the run folder.
        sample: the prompt and the text that the model generated; None for no sample.
        stalls: seconds that training waited, for each checkpoint.
    """

    shards: Sequence["Shard"]
    first_loss: float
    last_loss: float
    seconds: float
    folder: str
    sample: tuple[str, str] | None
    stalls: Sequence[float] = ()


class _Console(Console):
    def on_broken_pipe(self) -> None:
        """Raise an error, where rich would end the process without a message."""
        raise BrokenPipeError("standard output was closed")


class Display:
    """Plain lines, for logs and pipes.

    Args:
        console: where to write.
        done: updates made before this part of the run.
        steps: updates in the whole run.
    """

    def __init__(self, console: Console, done: int, steps: int) -> None:
        self._console = console
        self._done = done
        self._steps = steps
        self._began = perf_counter()

    def __enter__(self) -> "Self":
        """Start the clock."""
        self._began = perf_counter()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Leave the terminal as it was."""

    @property
    def seconds(self) -> float:
        """Seconds since the loop began."""
        return perf_counter() - self._began

    def say(self, line: str) -> None:
        """Write one line. It is never wrapped: a log has one line for each event."""
        self._console.print(Text(line), soft_wrap=True)

    def fact(self, name: str, value: str) -> None:
        """Write one labelled line."""
        print_fact(self._console, name, value)

    def update(self, record: "Metric") -> None:
        """Show an update, or the validation before the first."""
        every = max(1, self._steps // _LINES)
        if record.step % every == 0 or record.val_loss is not None or record.step == self._steps:
            self.say(self._line(record))

    def _line(self, record: "Metric") -> str:
        width = len(str(self._steps))
        parts = [f"update {record.step:>{width}}/{self._steps}"]
        if record.train_loss is not None:
            parts.append(f"loss {record.train_loss:.3f}")
            parts.append(f"{record.tokens_per_second or 0:,.0f} tokens/s")
            parts.append(f"{clock(self._seconds_left(record.step))} left")
        if record.val_loss is not None:
            parts.append(f"validation {record.val_loss:.3f}")
        return "   ".join(parts)

    def _seconds_left(self, step: int) -> float:
        return self.seconds / max(1, step - self._done) * (self._steps - step)

    def finish(self, summary: Summary) -> None:
        """Show the result of the run."""
        print_summary(self._console, summary)


class BarDisplay(Display):
    """A bar that moves, for terminals; validations stay above it as lines."""

    def __init__(self, console: Console, done: int, steps: int) -> None:
        super().__init__(console, done, steps)
        self._bar = Progress(
            TextColumn("{task.completed}/{task.total}"),
            BarColumn(bar_width=None),
            TaskProgressColumn(),
            TextColumn("{task.description}"),
            console=console,
            expand=True,
            refresh_per_second=4,  # drawing takes time from training
        )
        self._task = self._bar.add_task("starting", total=steps, completed=done)

    def __enter__(self) -> "Self":
        """Show the bar."""
        self._bar.start()
        return super().__enter__()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Stop drawing; the bar stays as the last line."""
        self._bar.stop()

    def update(self, record: "Metric") -> None:
        """Move the bar."""
        if record.val_loss is not None:
            self.say(self._line(record))
        if record.train_loss is not None:
            rate, left = record.tokens_per_second or 0, clock(self._seconds_left(record.step))
            text = f"loss [b]{record.train_loss:.3f}[/b]  {rate:,.0f} tokens/s  {left} left"
            self._bar.update(self._task, completed=record.step, description=text)


def make_display(done: int, steps: int) -> Display:
    """Choose the display that suits standard output; see `Display` for the arguments."""
    console = _Console(highlight=False)
    if console.is_terminal and not console.is_dumb_terminal:
        return BarDisplay(console, done, steps)
    return Display(_Console(highlight=False, width=_PLAIN_WIDTH), done, steps)


def print_fact(console: Console, name: str, value: str) -> None:
    """Write one labelled line. It is never wrapped, so that a path in it can be copied."""
    console.print(Text.assemble((f"{name:<12}", "dim"), value), soft_wrap=True)


def print_summary(console: Console, summary: Summary) -> None:
    """Write the table of ranks, then the result of the run and its folder."""
    console.print()
    console.print(_table(summary.shards, plain=not console.is_terminal))
    console.print()
    _print_parameters(console, summary.shards)
    losses = f"{summary.first_loss:.3f} -> {summary.last_loss:.3f} nats per byte"
    print_fact(console, "validation", losses)
    print_fact(console, "time", f"{summary.seconds:.0f} s")
    if summary.stalls:
        mean, most = sum(summary.stalls) / len(summary.stalls), max(summary.stalls)
        count = f"{len(summary.stalls)} written in the background"
        waits = f"training waited {1e3 * mean:.0f} ms for each (at most {1e3 * most:.0f})"
        print_fact(console, "checkpoints", f"{count}; {waits}")
    print_fact(console, "run folder", summary.folder)
    if summary.sample is not None:
        given, added = map(printable, summary.sample)
        console.print(Text("\nsample, which continues the start of the held-out text:", style="dim"))
        console.print(Text.assemble((given, "dim"), ("|", "bold cyan"), added))


def _print_parameters(console: Console, shards: Sequence["Shard"]) -> None:
    """Write what ranks have of the parameters, if these are sharded."""
    kept = [shard.parameter_nbytes for shard in shards if shard.parameter_nbytes is not None]
    peaks = [shard.peak_nbytes for shard in shards if shard.peak_nbytes is not None]
    if kept:
        parts = f"a rank keeps at most {_bytes(max(kept))} of {_bytes(sum(kept))}"
        print_fact(console, "parameters", f"{parts}; blocks in use take at most {_bytes(max(peaks))}")


def _table(shards: Sequence["Shard"], *, plain: bool) -> Table:
    whole = sum(shard.state_nbytes for shard in shards)
    table = Table(box=None, pad_edge=False) if plain else Table(box=SIMPLE_HEAD)
    headings = ["rank", "parameters owned", "optimizer state held", "unsharded", "part"]
    gradients = [_bytes(shard.gradient_nbytes) for shard in shards if shard.gradient_nbytes is not None]
    for heading in [*headings, "gradients held"] if gradients else headings:
        table.add_column(heading, justify="right")
    for rank, shard in enumerate(shards):
        part = f"{shard.state_nbytes / whole:.1%}" if whole else "-"  # plain SGD has no state
        state = (_bytes(shard.state_nbytes), _bytes(whole), part)
        table.add_row(str(rank), f"{shard.num_parameters:,}", *state, *gradients[rank : rank + 1])
    return table


def _bytes(number: int) -> str:
    return f"{number:,} B"


def clock(seconds: float) -> str:
    """Write a time as h:mm:ss or m:ss."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def printable(text: str) -> str:
    """Replace characters that would move a terminal's cursor or change its colours."""
    return "".join(
        char if char.isprintable() or char == "\n" else "\N{REPLACEMENT CHARACTER}" for char in text
    )
