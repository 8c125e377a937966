"""What every rank runs: it enters the process group and trains. Rank 0 also informs the user."""

import os
import signal
import sys
import warnings
from pathlib import Path

import torch.distributed as dist

from zero_optim.demo import ranks, saved, text
from zero_optim.demo.config import RunConfig
from zero_optim.demo.failing import record_failure
from zero_optim.demo.loop import train
from zero_optim.demo.run_log import RunLog
from zero_optim.demo.trainer import Trainer
from zero_optim.run.host import end_with_parent


def main() -> None:
    """Run as a rank of `launch`. Arguments: the run, the parent's process id, where the ranks meet.

    They meet in the file of a store.
    """
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
        run_log = RunLog(trainer, config.resume)
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
