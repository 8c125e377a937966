"""Processes that start in milliseconds: forked from one that has imported torch and does nothing else."""

import multiprocessing
import os
import sys
from multiprocessing import forkserver
from multiprocessing.context import ForkServerContext

# Imports start no threads and no work of torch's, so what is forked is as good as new.
PRELOADED = [
    "pool_worker",
    "torch._dynamo",  # what every optimizer imports when it is built, a second and a half
    "torch.distributed.checkpoint",
    "zero_optim.checkpoint",
    "zero_optim.ddp",
]


def fork_context() -> ForkServerContext:
    """The context whose processes are forked from the server, which ends with the test process."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    # The server looks for modules here, not on sys.path. OpenBLAS would start threads when it is imported.
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
