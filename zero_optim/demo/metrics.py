"""The records of a run: ``metrics.jsonl`` and ``loss.png``."""

import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

METRICS, PICTURE = "metrics.jsonl", "loss.png"


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
        return json.dumps({key: value for key, value in asdict(self).items() if value is not None}) + "\n"


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


def write(folder: Path, records: Iterable[Metric]) -> None:
    """Replace the records in the file."""
    beside = folder / (METRICS + ".part")
    beside.write_text("".join(record.to_json() for record in records))
    beside.replace(folder / METRICS)


def append(folder: Path, record: Metric) -> None:
    """Append one record; it is in the file on return."""
    with (folder / METRICS).open("a") as file:
        file.write(record.to_json())


def validations(records: Sequence[Metric]) -> list[tuple[int, float]]:
    """Return (step, loss) of each validation."""
    return [(record.step, record.val_loss) for record in records if record.val_loss is not None]


def draw(folder: Path, records: Sequence[Metric], title: str) -> None:
    """Draw the losses over the updates; needs matplotlib."""
    from matplotlib.figure import Figure  # an extra; without pyplot it needs no display

    figure = Figure(figsize=(8, 4.5), layout="constrained")
    axes = figure.add_subplot(title=title, xlabel="update", ylabel="loss, nats per byte")
    trained = [(record.step, record.train_loss) for record in records if record.train_loss is not None]
    axes.plot(*zip(*trained, strict=True), color="#9db7d5", linewidth=1, label="train, each batch")
    axes.plot(*zip(*validations(records), strict=True), "o-", color="#c2410c", label="validation")
    axes.set_ylim(bottom=0)
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(folder / PICTURE, dpi=120)
