"""What rank 0 writes of a run: ``metrics.jsonl``, ``loss.png``, lines on the terminal."""

import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING

import torch.distributed as dist

from zero_optim.demo import trace
from zero_optim.demo.display import Display, Summary, make_display
from zero_optim.demo.prepare import METRICS, look, run_folder

if TYPE_CHECKING:
    from zero_optim.demo.trainer import Shard, Trainer

PICTURE = "loss.png"


@dataclass(frozen=True, slots=True, kw_only=True)
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
        return json.dumps({key: value for key, value in asdict(self).items() if value is not None})


class MetricsFile:
    """The records of a run folder; ``earlier`` ones replace the file's content."""

    def __init__(self, folder: Path, earlier: Iterable[Metric] = ()) -> None:
        self._folder = folder
        self.entries = list(earlier)
        beside = folder / (METRICS + ".part")
        beside.write_text("".join(record.to_json() + "\n" for record in self.entries))
        beside.replace(folder / METRICS)

    def add(self, record: Metric) -> None:
        """Append one record; it is in the file on return."""
        self.entries.append(record)
        with (self._folder / METRICS).open("a") as file:
            file.write(record.to_json() + "\n")

    def validations(self) -> list[tuple[int, float]]:
        """Return (step, loss) of each validation."""
        return [(record.step, record.val_loss) for record in self.entries if record.val_loss is not None]

    def draw(self, title: str) -> None:
        """Draw the losses over the updates; needs matplotlib."""
        from matplotlib.figure import Figure  # an extra; without pyplot it needs no display

        figure = Figure(figsize=(8, 4.5), layout="constrained")
        axes = figure.add_subplot(title=title, xlabel="update", ylabel="loss, nats per byte")
        trained = [
            (record.step, record.train_loss) for record in self.entries if record.train_loss is not None
        ]
        axes.plot(*zip(*trained, strict=True), color="#9db7d5", linewidth=1, label="train, each batch")
        axes.plot(*zip(*self.validations(), strict=True), "o-", color="#c2410c", label="validation")
        axes.set_ylim(bottom=0)
        axes.grid(alpha=0.3)
        axes.legend()
        figure.savefig(self._folder / PICTURE, dpi=120)


def read(folder: Path, through: int) -> list[Metric]:
    """Read a run's records up to the checkpoint's step.

    ValueError for a line that is no record, but for the last: a killed process may leave half of it.
    """
    path = folder / METRICS
    lines = path.read_text().splitlines() if path.exists() else []
    records = []
    for number, line in enumerate(lines, 1):
        try:
            records.append(Metric(**json.loads(line)))
        except (ValueError, TypeError) as error:
            if number < len(lines):
                raise ValueError(f"{path} line {number} is no record of zero-optim train") from error
    return [record for record in records if record.step <= through]


class RunLog:
    """Writes to the terminal and the run folder, after the trainer is restored. No communication."""

    def __init__(self, trainer: "Trainer") -> None:
        config = trainer.config
        self._trainer = trainer
        self._folder = Path(config.out)
        self._folder.mkdir(parents=True, exist_ok=True)
        (self._folder / "config.json").write_text(config.to_json() + "\n")
        earlier = [] if config.resume is None else read(run_folder(config.resume), trainer.step)
        self._records = MetricsFile(self._folder, earlier)
        self._began = perf_counter()
        self._stalls: list[float] = []  # seconds that training waited, for each checkpoint
        self.display: Display = make_display(trainer.step, config.steps)
        self._show_header()

    def _show_header(self) -> None:
        trainer, config, corpus = self._trainer, self._trainer.config, self._trainer.corpus
        numel = sum(parameter.numel() for parameter in trainer.gpt.parameters())
        sizes = (
            f"layers {config.layers}, width {config.width}, heads {config.heads}, context {config.context}"
        )
        fact = self.display.fact
        fact("model", f"GPT of {numel:,} parameters: {sizes}")
        fact("text", f"{corpus.name}, {corpus.numel:,} bytes, the last tenth held out")
        fact("optimizer", f"{self._what_is_sharded()} ({trainer.device.type}, {dist.get_backend()})")
        fact("updates", f"{config.steps:,}, each of {config.batch_size} x {config.context} bytes")
        if config.resume is not None:
            source = look(Path(config.resume))
            fact("resumed", f"from update {source.step}, {config.resume}")
            if source.text_digest != corpus.digest:
                fact("note", "the text is not the one that the checkpoint was trained on")

    def _what_is_sharded(self) -> str:
        config, count = self._trainer.config, dist.get_world_size()
        also = {"state": "", "gradients": " and gradients", "parameters": ", gradients and parameters"}[
            config.shard
        ]
        return f"{config.optimizer}{also} sharded over {'1 rank' if count == 1 else f'{count} ranks'}"

    def tell(self, record: Metric) -> None:
        """Record and show one update."""
        self._records.add(record)
        self.display.update(record)

    def tell_saved(self, stall: float) -> None:
        """Draw the losses as a save begins; training waited ``stall`` seconds for it."""
        self._stalls.append(stall)
        self._records.draw(self._what_is_sharded())

    def tell_traced(self, step: int) -> None:
        """Draw the profiled update, and show how much of it overlapped with computing."""
        spans = trace.spans_of(self._folder / trace.EVENTS)
        trace.draw([(f"update {step} on rank 0", spans)], self._folder / trace.PICTURE)
        self.display.say(
            f"traced: {trace.hidden(spans):.0%} of reduce, step and gather overlapped with forward and "
            f"backward, see {self._folder / trace.PICTURE}"
        )

    def close(self, shards: Sequence["Shard"]) -> None:
        """Show the result of the run."""
        losses = [loss for _, loss in self._records.validations()]
        sample = self._trainer.sample() if self._trainer.config.sample_length else None
        seconds = perf_counter() - self._began
        self.display.finish(
            Summary(shards, losses[0], losses[-1], seconds, str(self._folder), sample, self._stalls)
        )
