"""The output for users: a bar on a terminal, plain lines elsewhere, a table at the end. Needs rich."""

from collections.abc import Sequence
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


class _Console(Console):
    def on_broken_pipe(self) -> None:
        """Raise an error, where rich would end the process silently."""
        raise BrokenPipeError("standard output was closed")


class Display:
    """A bar on a terminal; else plain lines. Validations are lines in both.

    ``done``: updates before this part of the run; ``steps``: updates of the whole run.
    """

    def __init__(self, done: int, steps: int, console: Console | None = None) -> None:
        self._console = console or _Console(highlight=False)
        self._done = done
        self._steps = steps
        self._began = perf_counter()
        self._bar: Progress | None = None
        if self._console.is_terminal and not self._console.is_dumb_terminal:
            self._bar = Progress(
                TextColumn("{task.completed}/{task.total}"),
                BarColumn(bar_width=None),
                TaskProgressColumn(),
                TextColumn("{task.description}"),
                console=self._console,
                expand=True,
                refresh_per_second=4,  # drawing takes time from training
            )
            self._bar.add_task("starting", total=steps, completed=done)
        else:
            self._console.width = _PLAIN_WIDTH

    def __enter__(self) -> "Self":
        self._began = perf_counter()
        if self._bar is not None:
            self._bar.start()
        return self

    def __exit__(self, *error: object) -> None:
        if self._bar is not None:
            self._bar.stop()

    def say(self, line: str | Text) -> None:
        """Write one line, never wrapped: a log has one line for each event, and a path can be copied."""
        self._console.print(Text(line) if isinstance(line, str) else line, soft_wrap=True)

    def fact(self, name: str, value: str) -> None:
        """Write one labelled line."""
        self.say(Text.assemble((f"{name:<12}", "dim"), value))

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

    def shards(self, shards: Sequence["Shard"]) -> None:
        """Write the table of what each rank has."""
        plain = not self._console.is_terminal
        table = Table(box=None, pad_edge=False) if plain else Table(box=SIMPLE_HEAD)
        whole = sum(shard.state_nbytes for shard in shards)
        gradients = [_bytes(shard.gradient_nbytes) for shard in shards if shard.gradient_nbytes is not None]
        headings = ["rank", "parameters owned", "optimizer state held", "unsharded", "part"]
        for heading in [*headings, "gradients held"] if gradients else headings:
            table.add_column(heading, justify="right")
        for rank, shard in enumerate(shards):
            part = f"{shard.state_nbytes / whole:.1%}" if whole else "-"  # plain SGD has no state
            state = (_bytes(shard.state_nbytes), _bytes(whole), part)
            table.add_row(str(rank), f"{shard.num_parameters:,}", *state, *gradients[rank : rank + 1])
        for part_of_page in ("", table, ""):
            self._console.print(part_of_page)
        rows = [shard.parameter_nbytes for shard in shards if shard.parameter_nbytes is not None]
        if rows:
            peak = max(shard.peak_nbytes or 0 for shard in shards)
            parts = f"a rank keeps at most {_bytes(max(rows))} of {_bytes(sum(rows))}"
            self.fact("parameters", f"{parts}; blocks in use take at most {_bytes(peak)}")

    def sample(self, prompt: str, added: str) -> None:
        """Write the prompt and the text that the model generated."""
        self._console.print(Text("\nsample, which continues the start of the held-out text:", style="dim"))
        self._console.print(Text.assemble((printable(prompt), "dim"), ("|", "bold cyan"), printable(added)))


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
