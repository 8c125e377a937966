"""What rank 0 shows to the user during a run, and writes to the run folder. Nothing here communicates."""

from collections.abc import Sequence
from pathlib import Path
from time import perf_counter

from zero_optim.demo import metrics, trace
from zero_optim.demo.display import Display, Summary, make_display
from zero_optim.demo.metrics import Metric, MetricsFile
from zero_optim.demo.saved import Saved, run_folder
from zero_optim.demo.trainer import Shard, Trainer


class RunLog:
    """Writes to the terminal and to the run folder, which it makes if it does not exist.

    Args:
        trainer: of rank 0, already restored if the run continues from a checkpoint.
        source: that checkpoint; None if the run is new.
    """

    def __init__(self, trainer: Trainer, source: str | None) -> None:
        config = trainer.config
        self._trainer = trainer
        self._folder = Path(config.out)
        self._folder.mkdir(parents=True, exist_ok=True)
        (self._folder / "config.json").write_text(config.to_json() + "\n")
        self._records = _records(self._folder, source, trainer.step)
        self._began = perf_counter()
        self._stalls: list[float] = []  # seconds that training waited, for each checkpoint
        self.display: Display = make_display(trainer.step, config.steps)

    def open(self, saved: Saved | None) -> None:
        """Show what the run trains, and the checkpoint from which it continues."""
        for name, value in _header(self._trainer):
            self.display.fact(name, value)
        if saved is not None:
            self.display.fact("resumed", f"from update {saved.step}, {self._trainer.config.resume}")
            if saved.text_digest != self._trainer.corpus.digest:
                self.display.fact("note", "the text is not the one that the checkpoint was trained on")

    def tell(self, record: Metric) -> None:
        """Record and show one update."""
        self._records.add(record)
        self.display.update(record)

    def saved(self, stall: float) -> None:
        """Draw the losses so far, as a save has begun; training waited ``stall`` seconds for it."""
        self._stalls.append(stall)
        self._records.draw(_what_is_sharded(self._trainer))

    def traced(self, hidden: float) -> None:
        """Show the result of the profiled update.

        Args:
            hidden: fraction of communication and stepping that overlapped with forward or backward, 0 to 1.
        """
        self.display.say(
            f"traced: {hidden:.0%} of reduce, step and gather overlapped with forward and backward, see "
            f"{self._folder / trace.PICTURE}"
        )

    def close(self, shards: Sequence[Shard]) -> None:
        """Show the result of the run.

        Args:
            shards: what each rank keeps, by rank.
        """
        seconds = perf_counter() - self._began
        losses = [loss for _, loss in self._records.validations()]
        sample = self._trainer.sample() if self._trainer.config.sample_length else None
        self.display.finish(
            Summary(shards, losses[0], losses[-1], seconds, str(self._folder), sample, self._stalls)
        )


def _records(folder: Path, source: str | None, step: int) -> MetricsFile:
    return MetricsFile(folder, [] if source is None else metrics.read(run_folder(source), step))


def _header(trainer: Trainer) -> list[tuple[str, str]]:
    config, place, corpus = trainer.config, trainer.ranks, trainer.corpus
    numel = sum(parameter.numel() for parameter in trainer.gpt.parameters())
    sizes = f"layers {config.layers}, width {config.width}, heads {config.heads}, context {config.context}"
    return [
        ("model", f"GPT of {numel:,} parameters: {sizes}"),
        ("text", f"{corpus.name}, {corpus.numel:,} bytes, the last tenth held out"),
        ("optimizer", f"{_what_is_sharded(trainer)} ({place.device.type}, {place.backend})"),
        ("updates", f"{config.steps:,}, each of {config.batch_size} x {config.context} bytes"),
    ]


def _what_is_sharded(trainer: Trainer) -> str:
    others = {"state": "", "gradients": " and gradients", "parameters": ", gradients and parameters"}
    also = others[trainer.config.shard]
    return f"{trainer.config.optimizer}{also} sharded over {_ranks(trainer.ranks.world_size)}"


def _ranks(count: int) -> str:
    return "1 rank" if count == 1 else f"{count} ranks"
