"""The output for users: a bar on a terminal, plain lines elsewhere, a table at the end. Needs rich."""

from collections.abc import Sequence
from dataclasses import dataclass
from time import perf_counter
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
    """The result of a run."""

    shards: Sequence["Shard"]  # by rank
    first_loss: float  # of the whole run, on the held-out text, in nats per byte
    last_loss: float
    seconds: float  # of this part of the run, validation and checkpoints included
    folder: str
    sample: tuple[str, str] | None  # the prompt and the text that the model generated
    stalls: Sequence[float] = ()  # seconds that training waited, for each checkpoint


class _Console(Console):
    def on_broken_pipe(self) -> None:
        """Raise an error, where rich would end the process silently."""
        raise BrokenPipeError("standard output was closed")


class Display:
    """A bar on a terminal; else plain lines. Validations are lines in both.

    ``done``: updates before this part of the run; ``steps``: updates of the whole run.
    """

    def __init__(self, console: Console, done: int, steps: int) -> None:
        self._console = console
        self._done = done
        self._steps = steps
        self._began = perf_counter()
        self._bar: Progress | None = None
        if console.is_terminal and not console.is_dumb_terminal:
            self._bar = Progress(
                TextColumn("{task.completed}/{task.total}"),
                BarColumn(bar_width=None),
                TaskProgressColumn(),
                TextColumn("{task.description}"),
                console=console,
                expand=True,
                refresh_per_second=4,  # drawing takes time from training
            )
            self._bar.add_task("starting", total=steps, completed=done)

    def __enter__(self) -> "Self":
        self._began = perf_counter()
        if self._bar is not None:
            self._bar.start()
        return self

    def __exit__(self, *error: object) -> None:
        if self._bar is not None:
            self._bar.stop()

    def say(self, line: str) -> None:
        """Write one line, never wrapped: a log has one line for each event."""
        self._console.print(Text(line), soft_wrap=True)

    def fact(self, name: str, value: str) -> None:
        """Write one labelled line."""
        print_fact(self._console, name, value)

    def update(self, record: "Metric") -> None:
        """Show an update, or the validation before the first."""
        step, steps = record.step, self._steps
        left = clock((perf_counter() - self._began) / max(1, step - self._done) * (steps - step))
        rate = f"{record.tokens_per_second or 0:,.0f} tokens/s"
        parts = [f"update {step:>{len(str(steps))}}/{steps}"]
        if record.train_loss is not None:
            parts += [f"loss {record.train_loss:.3f}", rate, f"{left} left"]
            if self._bar is not None:
                text = f"loss [b]{record.train_loss:.3f}[/b]  {rate}  {left} left"
                self._bar.update(self._bar.task_ids[0], completed=step, description=text)
        if record.val_loss is not None:
            parts.append(f"validation {record.val_loss:.3f}")
        is_due = self._bar is None and (step % max(1, steps // _LINES) == 0 or step == steps)
        if is_due or record.val_loss is not None:
            self.say("   ".join(parts))

    def finish(self, summary: Summary) -> None:
        """Show the result of the run."""
        print_summary(self._console, summary)


def make_display(done: int, steps: int) -> Display:
    """Return the `Display` that suits standard output."""
    console = _Console(highlight=False)
    if not console.is_terminal or console.is_dumb_terminal:
        console = _Console(highlight=False, width=_PLAIN_WIDTH)
    return Display(console, done, steps)


def print_fact(console: Console, name: str, value: str) -> None:
    """Write one labelled line, never wrapped, so that a path in it can be copied."""
    console.print(Text.assemble((f"{name:<12}", "dim"), value), soft_wrap=True)


def print_summary(console: Console, summary: Summary) -> None:
    """Write the table of ranks, then the run's result and folder."""
    console.print()
    console.print(_table(summary.shards, plain=not console.is_terminal))
    console.print()
    kept = [shard.parameter_nbytes for shard in summary.shards if shard.parameter_nbytes is not None]
    if kept:
        peak = max(shard.peak_nbytes or 0 for shard in summary.shards)
        parts = f"a rank keeps at most {_bytes(max(kept))} of {_bytes(sum(kept))}"
        print_fact(console, "parameters", f"{parts}; blocks in use take at most {_bytes(peak)}")
    print_fact(console, "validation", f"{summary.first_loss:.3f} -> {summary.last_loss:.3f} nats per byte")
    print_fact(console, "time", f"{summary.seconds:.0f} s")
    if summary.stalls:
        mean, most = sum(summary.stalls) / len(summary.stalls), max(summary.stalls)
        waits = f"training waited {1e3 * mean:.0f} ms for each (at most {1e3 * most:.0f})"
        print_fact(console, "checkpoints", f"{len(summary.stalls)} written in the background; {waits}")
    print_fact(console, "run folder", summary.folder)
    if summary.sample is not None:
        prompt, added = map(printable, summary.sample)
        console.print(Text("\nsample, which continues the start of the held-out text:", style="dim"))
        console.print(Text.assemble((prompt, "dim"), ("|", "bold cyan"), added))


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
    """Format seconds as h:mm:ss or m:ss."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def printable(text: str) -> str:
    """Replace characters that would move a terminal's cursor or change its colours."""
    return "".join(
        char if char.isprintable() or char == "\n" else "\N{REPLACEMENT CHARACTER}" for char in text
    )
