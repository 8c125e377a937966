"""What every rank runs: it enters the process group and trains. Rank 0 also informs the user."""

import json
import os
import signal
import sys
import time
import traceback
import warnings
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch.distributed as dist

from zero_optim.demo import ranks, saved, text, trace
from zero_optim.demo.config import RunConfig
from zero_optim.demo.metrics import Metric
from zero_optim.demo.run_log import RunLog
from zero_optim.demo.trainer import Trainer
from zero_optim.errors import CheckpointError, DivergedError
from zero_optim.run.host import end_with_parent

TRACED_AFTER = 5  # updates: the allocator and the buckets no longer change then
_EXPECTED = (DivergedError, BrokenPipeError, CheckpointError)  # their message is enough, without a traceback


def main() -> None:
    """Run as a rank of `launch`. Arguments: the run, the parent's process id, the file of the store."""
    end_with_parent(int(sys.argv[2]))
    if os.environ["RANK"] != "0":
        warnings.simplefilter("ignore")  # rank 0 shows the same ones
    try:
        work(RunConfig.from_json(sys.argv[1]), sys.argv[3])
    except Exception as error:  # noqa: BLE001 - the parent reports whatever it is
        record_failure(error)
        sys.exit(1)


def run_under_torchrun(config: RunConfig) -> None:
    """Run as a rank that torchrun started. A failure is recorded for torchrun and raised."""
    end_with_parent(os.getppid())
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # no traceback: the launcher reports a Ctrl-C
    try:
        work(config)
    except Exception as error:
        record_failure(error)
        raise


def record_failure(error: Exception) -> None:
    """Write a failure to the launcher's error file, in its format, with the time in ns added."""
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if not path:
        return
    trace = "".join(traceback.format_exception(error)).rstrip()
    info = {
        "py_callstack": trace,
        "timestamp": str(int(time.time())),
        "time_ns": str(time.time_ns()),
        "text": f": {error}" if isinstance(error, _EXPECTED) else ":\n" + trace,
    }
    message = {"message": f"{type(error).__name__}: {error}", "extraInfo": info}
    Path(path).write_text(json.dumps({"message": message}))


def work(config: RunConfig, meeting: str | None = None) -> None:
    """Train; all ranks call, and rank 0 writes a `RunLog`.

    Args:
        config: the run.
        meeting: as `ranks.join` takes it.
    """
    place = ranks.join(config.device, meeting)
    trainer = Trainer(config, place, text.load(config.text, config.context))
    if config.resume is not None:
        trainer.restore(config.resume)
    if place.rank == 0:
        run_log = RunLog(trainer)
        run_log.open(saved.look(Path(config.resume)) if config.resume is not None else None)
        with run_log.display:
            train(trainer, run_log)
        shards = trainer.shards()
        with trainer.whole():
            run_log.close(shards)
    else:
        train(trainer, None)
        trainer.shards()
        with trainer.whole():
            pass
    dist.destroy_process_group()


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
