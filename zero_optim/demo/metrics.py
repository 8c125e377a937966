"""The readable files of a run: ``metrics.jsonl``, one line for each update, and ``loss.png``."""

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path

METRICS = "metrics.jsonl"
PICTURE = "loss.png"


@dataclass(frozen=True, slots=True, kw_only=True)
class Metric:
    """One update. Step 0 is the state before the first update, and has only a validation loss.

    Attributes:
        step: number of the update, from 1.
        train_loss: of its batch before the update, in nats per byte, over all ranks.
        val_loss: after the update, if the run was validated then.
        lr: its learning rate, if the optimizer has one.
        grad_norm: of all gradients together, before clipping.
        seconds: its duration, without validation.
        tokens_per_second: over all ranks.
        save_stall: seconds that training waited before it, for a checkpoint.
    """

    step: int
    train_loss: float | None = None
    val_loss: float | None = None
    lr: float | None = None
    grad_norm: float | None = None
    seconds: float | None = None
    tokens_per_second: float | None = None
    save_stall: float | None = None

    def to_json(self) -> str:
        """Write as one line, without the fields that are None."""
        return json.dumps({key: value for key, value in asdict(self).items() if value is not None})


class MetricsFile:
    """The records of a run folder; rank 0 writes them.

    Args:
        folder: the run folder, which exists.
        earlier: the records up to the checkpoint that the run continues from; they replace the file's
            content.
    """

    def __init__(self, folder: Path, earlier: Iterable[Metric] = ()) -> None:
        self._folder = folder
        self.entries = list(earlier)
        beside = folder / (METRICS + ".part")
        beside.write_text("".join(record.to_json() + "\n" for record in self.entries))
        beside.replace(folder / METRICS)

    def add(self, record: Metric) -> None:
        """Append one record; it is in the file when this returns."""
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
    """Read a run's records up to the step of the checkpoint that it resumes from.

    Raises:
        ValueError: a line is no record. Not for the last line, since a process that was killed may leave half
            a line.
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
