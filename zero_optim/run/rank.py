"""A rank of `launch`: a new process that calls a function in a process group, and tells how it ended."""

import os
import signal
import sys
from time import monotonic_ns
from typing import Any

import torch
import torch.distributed as dist

from zero_optim.run.host import end_with_parent, let_the_cause_end_first, order_of, use_loopback
from zero_optim.run.job import Failure, Job
from zero_optim.run.session import decode_call, pickler
from zero_optim.run.stacks import answer_with_stacks, traceback_text


def enter(rank: int, job: Job) -> None:
    """Run as a rank: call the function in a process group, and write a file that says how it ended."""
    end_with_parent(job.parent)
    os.setsid()
    signal.signal(signal.SIGINT, lambda *_: None)  # not SIG_IGN, which processes started here would inherit
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    answer_with_stacks(job.path("stacks", rank))
    job.path("begun", rank).touch()
    try:
        _run(rank, job)
    except BaseException as error:  # noqa: BLE001 - the caller raises for all of them
        job.write_failure(_failure(error, rank))
        sys.stdout.flush()
        sys.stderr.flush()
        let_the_cause_end_first(error, job.is_told)
        os._exit(1)  # without destroying the process group, which may take for ever


def _run(rank: int, job: Job) -> None:
    torch.set_num_threads(job.threads)
    use_loopback()
    size = str(job.nproc)
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=size, LOCAL_WORLD_SIZE=size)
    if job.path("prepare").exists():
        prepare, _ = decode_call(job.path("prepare").read_bytes())
        prepare(rank)
    device: dict[str, Any] = {}
    if job.backend == "nccl":
        torch.cuda.set_device(rank)
        device = {"device_id": torch.device("cuda", rank)}
    store = dist.FileStore(str(job.path("store")), job.nproc)  # type: ignore[attr-defined]
    dist.init_process_group(job.backend, store=store, rank=rank, world_size=job.nproc, **device)
    _wait_for_connections(store, job.nproc)
    fn, args = decode_call(job.path("call").read_bytes())
    value = fn(*args)
    # Like pickle, but tensors that share memory are written once, and classes of a notebook can be returned.
    torch.save(value, job.path("value", rank), pickle_module=pickler())
    if dist.is_initialized():
        dist.destroy_process_group()


def _wait_for_connections(store: dist.Store, nproc: int) -> None:  # type: ignore[name-defined]
    """Wait until every rank has connected: a rank that ends early breaks the connections of the others."""
    if store.add("connected", 1) == nproc:
        store.set("all connected", "")
    store.wait(["all connected"])


def _failure(error: BaseException, rank: int) -> Failure:
    """Describe an exception, without the frames of this file."""
    now = monotonic_ns()  # one clock for all processes of a host
    return Failure(rank, [order_of(error), now], traceback_text(error, __file__), type(error).__name__)
