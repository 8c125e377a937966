"""What a run shows on the terminal, and ``metrics.jsonl`` and ``loss.png`` in its folder. Needs rich."""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn
from rich.table import Table
from rich.text import Text

from zero_optim.demo.prepare import METRICS

if TYPE_CHECKING:
    from typing_extensions import Self

_LINES = 20  # about this many lines, where there is no bar
_PLAIN_WIDTH = 100  # columns, where no terminal tells its width


@dataclass(frozen=True, slots=True)
class Metric:
    """One update; step 0 has only the validation loss before the first."""

    step: int  # from 1
    train_loss: float | None = None  # of its batch before the update, in nats per byte, over all ranks
    val_loss: float | None = None  # after the update, if the run was validated then
    lr: float | None = None  # if the optimizer has one
    grad_norm: float | None = None  # of all gradients together, before clipping
    seconds: float | None = None  # without validation
    tokens_per_second: float | None = None  # over all ranks
    save_stall: float | None = None  # seconds that training waited before it, for a checkpoint

    def to_json(self) -> str:
        """Return one JSON line without the fields that are None."""
        return json.dumps({key: value for key, value in asdict(self).items() if value is not None}) + "\n"


@dataclass(frozen=True, slots=True)
class Shard:
    """The measured bytes that one rank keeps; None for what it keeps whole."""

    num_parameters: int  # elements of the parameters that it owns
    state_nbytes: int
    gradient_nbytes: int | None = None  # after a backward pass
    parameter_nbytes: int | None = None  # that it keeps for good
    peak_nbytes: int | None = None  # of whole units beside these, where a pass had most


class Records:
    """The updates of a run, each in the file of its folder when `append` returns.

    The records of the run that is continued, ``source``, come first, up to step ``through``.
    """

    def __init__(self, folder: Path, source: Path | None = None, through: int = 0) -> None:
        self._folder = folder
        before = folder / METRICS if source is None else source / METRICS
        lines = before.read_text().splitlines() if source is not None and before.exists() else []
        self.metrics: list[Metric] = []
        for number, line in enumerate(lines, 1):
            try:
                self.metrics.append(Metric(**json.loads(line)))
            except (ValueError, TypeError) as error:
                if number < len(lines):  # a killed process may leave half of the last one
                    raise ValueError(f"{before} line {number} is no record of zero-optim train") from error
        self.metrics = [metric for metric in self.metrics if metric.step <= through]
        beside = folder / (METRICS + ".part")
        beside.write_text("".join(metric.to_json() for metric in self.metrics))
        beside.replace(folder / METRICS)

    def append(self, metric: Metric) -> None:
        """Add a record."""
        self.metrics.append(metric)
        with (self._folder / METRICS).open("a") as file:
            file.write(metric.to_json())

    def validations(self) -> list[tuple[int, float]]:
        """Return (step, loss) of each validation."""
        return [(metric.step, metric.val_loss) for metric in self.metrics if metric.val_loss is not None]

    def draw(self, title: str) -> None:
        """Draw the losses over the updates; needs matplotlib."""
        from matplotlib.figure import Figure  # an extra; without pyplot it needs no display

        figure = Figure(figsize=(8, 4.5), layout="constrained")
        axes = figure.add_subplot(title=title, xlabel="update", ylabel="loss, nats per byte")
        trained = [
            (metric.step, metric.train_loss) for metric in self.metrics if metric.train_loss is not None
        ]
        axes.plot(*zip(*trained, strict=True), color="#9db7d5", linewidth=1, label="train, each batch")
        axes.plot(*zip(*self.validations(), strict=True), "o-", color="#c2410c", label="validation")
        axes.set_ylim(bottom=0)
        axes.grid(alpha=0.3)
        axes.legend()
        figure.savefig(self._folder / "loss.png", dpi=120)


class _Console(Console):
    def on_broken_pipe(self) -> None:
        """Raise an error, where rich would end the process silently."""
        raise BrokenPipeError("standard output was closed")


class Display:
    """A bar on a terminal; else plain lines. ``done`` of all ``steps`` are updates of an earlier part."""

    def __init__(self, done: int, steps: int, console: Console | None = None) -> None:
        self._console = console or _Console(highlight=False)
        self._done = done
        self._steps = steps
        self._began = perf_counter()
        self._bar: Progress | None = None
        if self._console.is_terminal and not self._console.is_dumb_terminal:
            columns = "{task.completed}/{task.total}", BarColumn(bar_width=None), TaskProgressColumn()
            # Drawing takes time from training.
            options = {"console": self._console, "expand": True, "refresh_per_second": 4}
            self._bar = Progress(*columns, TextColumn("{task.description}"), **options)  # type: ignore[arg-type]
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
        """Write one line, never wrapped, so that a path can be copied."""
        self._console.print(Text(line) if isinstance(line, str) else line, soft_wrap=True)

    def fact(self, name: str, value: str) -> None:
        """Write one labelled line."""
        self.say(Text.assemble((f"{name:<12}", "dim"), value))

    def update(self, metric: Metric) -> None:
        """Show an update, or the validation before the first."""
        step, steps = metric.step, self._steps
        left = clock((perf_counter() - self._began) / max(1, step - self._done) * (steps - step))
        rate = f"{metric.tokens_per_second or 0:,.0f} tokens/s"
        parts = [f"update {step:>{len(str(steps))}}/{steps}"]
        if metric.train_loss is not None:
            parts += [f"loss {metric.train_loss:.3f}", rate, f"{left} left"]
            if self._bar is not None:
                text = f"loss [b]{metric.train_loss:.3f}[/b]  {rate}  {left} left"
                self._bar.update(self._bar.task_ids[0], completed=step, description=text)
        if metric.val_loss is not None:
            parts.append(f"validation {metric.val_loss:.3f}")
        is_due = self._bar is None and (step % max(1, steps // _LINES) == 0 or step == steps)
        if is_due or metric.val_loss is not None:
            self.say("   ".join(parts))

    def shards(self, shards: Sequence[Shard]) -> None:
        """Write the table of what each rank has."""
        table = Table(box=SIMPLE_HEAD) if self._console.is_terminal else Table(box=None, pad_edge=False)
        whole = sum(shard.state_nbytes for shard in shards)
        gradients = [f"{shard.gradient_nbytes:,} B" for shard in shards if shard.gradient_nbytes is not None]
        headings = ["rank", "parameters owned", "optimizer state held", "unsharded", "part"]
        for heading in [*headings, "gradients held"] if gradients else headings:
            table.add_column(heading, justify="right")
        for rank, shard in enumerate(shards):
            part = f"{shard.state_nbytes / whole:.1%}" if whole else "-"  # plain SGD has no state
            state = f"{shard.state_nbytes:,} B", f"{whole:,} B", part
            table.add_row(str(rank), f"{shard.num_parameters:,}", *state, *gradients[rank : rank + 1])
        for part_of_page in ("", table, ""):
            self._console.print(part_of_page)
        rows = [shard.parameter_nbytes for shard in shards if shard.parameter_nbytes is not None]
        if rows:
            peak = max(shard.peak_nbytes or 0 for shard in shards)
            parts = f"a rank keeps at most {max(rows):,} B of {sum(rows):,} B"
            self.fact("parameters", f"{parts}; blocks in use take at most {peak:,} B")

    def sample(self, prompt: str, added: str) -> None:
        """Write the prompt and the text that the model generated."""
        self._console.print(Text("\nsample, which continues the start of the held-out text:", style="dim"))
        self._console.print(Text.assemble((printable(prompt), "dim"), ("|", "bold cyan"), printable(added)))


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
