"""The work of every rank: training, and what is due between updates. Rank 0 informs the user."""

import os
from dataclasses import replace
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.elastic.multiprocessing.errors import record

from zero_optim.demo import text, trace
from zero_optim.demo.config import RunConfig
from zero_optim.demo.metrics import Metric, RunLog
from zero_optim.demo.prepare import choose_device
from zero_optim.demo.trainer import Trainer
from zero_optim.run.host import num_cores, use_loopback

TRACED_AFTER = 5  # updates: the allocator and the buckets no longer change then


@record  # for the report of torchrun, if a rank fails
def run_under_torchrun(config: RunConfig) -> None:
    """Run as a rank that torchrun started."""
    local_rank, local_world_size = int(os.environ["LOCAL_RANK"]), int(os.environ["LOCAL_WORLD_SIZE"])
    if local_world_size == int(os.environ["WORLD_SIZE"]):
        use_loopback()
    if "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(max(1, num_cores() // local_world_size))
    if choose_device(config.device, local_world_size) == "cuda":
        torch.cuda.set_device(local_rank)
        dist.init_process_group("nccl", device_id=torch.device("cuda", local_rank))
    else:
        dist.init_process_group("gloo")
    work(config)
    dist.destroy_process_group()


def work(config: RunConfig) -> None:
    """Train; every rank of the default process group calls."""
    is_cuda = dist.get_backend() == "nccl"
    device = torch.device("cuda", torch.cuda.current_device()) if is_cuda else torch.device("cpu")
    trainer = Trainer(config, device, text.load(config.text, config.context))
    if config.resume is not None:
        trainer.restore(config.resume)
    if dist.get_rank() != 0:
        _train(trainer, None)
        trainer.shards()
        with trainer.whole():
            return
    run_log = RunLog(trainer)
    with run_log.display:
        _train(trainer, run_log)
    shards = trainer.shards()
    with trainer.whole():
        run_log.close(shards)


def _train(trainer: Trainer, run_log: RunLog | None) -> None:
    config = trainer.config

    def due(every: int) -> bool:
        return trainer.step == config.steps or (every > 0 and trainer.step % every == 0)

    if trainer.step == 0:
        loss = trainer.evaluate()
        if run_log is not None:
            run_log.tell(Metric(step=0, val_loss=loss))
    stall: float | None = None
    traced = min(trainer.step + TRACED_AFTER, config.steps - 1) if config.trace else None
    while trainer.step < config.steps:
        is_traced = trainer.step == traced and run_log is not None
        record = replace(_traced_update(trainer) if is_traced else trainer.update(), save_stall=stall)
        stall = None
        if due(config.eval_every):
            record = replace(record, val_loss=trainer.evaluate())
        if run_log is not None:
            run_log.tell(record)
            if is_traced:
                run_log.tell_traced(record.step)
        if due(config.save_every):
            stall = trainer.save()
            if run_log is not None:
                run_log.tell_saved(stall)
    trainer.finish_saving()


def _traced_update(trainer: Trainer) -> Metric:
    with trace.traced(Path(trainer.config.out) / trace.EVENTS):
        return trainer.update()
