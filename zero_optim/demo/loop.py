"""The updates of a run, with what is due between them. Every rank runs it; rank 0 also informs the user."""

from dataclasses import replace
from functools import partial
from pathlib import Path

from zero_optim.demo import trace
from zero_optim.demo.metrics import Metric
from zero_optim.demo.run_log import RunLog
from zero_optim.demo.trainer import Trainer

TRACED_AFTER = 5  # updates: the allocator and the buckets no longer change then


def train(trainer: Trainer, run_log: RunLog | None) -> None:
    """Make the remaining updates; all ranks call, only rank 0 with a ``run_log``."""
    config = trainer.config
    if trainer.step == 0:
        _tell(run_log, Metric(step=0, val_loss=trainer.evaluate()))
    stall: float | None = None
    traced = min(trainer.step + TRACED_AFTER, config.steps - 1) if config.trace else None
    while trainer.step < config.steps:
        update = partial(_traced_update, run_log) if trainer.step == traced else Trainer.update
        record = replace(update(trainer), save_stall=stall)
        stall = None
        if _due(trainer.step, config.eval_every, config.steps):
            record = replace(record, val_loss=trainer.evaluate())
        _tell(run_log, record)
        if _due(trainer.step, config.save_every, config.steps):
            stall = trainer.save()
            if run_log is not None:
                run_log.saved(stall)
    trainer.finish_saving()


def _traced_update(run_log: RunLog | None, trainer: Trainer) -> Metric:
    """Make one update, profiled on rank 0."""
    if run_log is None:
        return trainer.update()
    folder = Path(trainer.config.out)
    with trace.traced(folder / trace.EVENTS):
        record = trainer.update()
    spans = trace.spans_of(folder / trace.EVENTS)
    trace.draw([(f"update {record.step} on rank 0", spans)], folder / trace.PICTURE)
    run_log.traced(trace.hidden(spans))
    return record


def _tell(run_log: RunLog | None, record: Metric) -> None:
    if run_log is not None:
        run_log.tell(record)


def _due(step: int, every: int, steps: int) -> bool:
    return step == steps or (every > 0 and step % every == 0)
