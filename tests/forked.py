"""Processes that start in milliseconds: forked from a process that has only imported torch."""

import multiprocessing
import os
import sys
from multiprocessing import forkserver
from multiprocessing.context import ForkServerContext

# These imports start no threads and no work of torch, so a fork is like a new process.
PRELOADED = [
    "pool_worker",
    "torch._dynamo",  # every optimizer imports it when it is built, which takes 1.5 s
    "torch.distributed.checkpoint",
    "zero_optim.checkpoint",
    "zero_optim.ddp",
]


def fork_context() -> ForkServerContext:
    """The context that forks processes from a server, which ends with the test process."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    # The server searches PYTHONPATH for modules, not sys.path. OpenBLAS would start threads at import.
    needed = {"PYTHONPATH": os.pathsep.join(sys.path), "OPENBLAS_NUM_THREADS": "1"}
    before = {name: os.environ.get(name) for name in needed}
    os.environ.update(needed)
    try:
        forkserver.ensure_running()
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
    return context
