"""A script that ends while stepping threads are still at work ends well."""

import os
import subprocess
import sys
from pathlib import Path

from waiting import LIMIT

SCRIPT = """
import gc
import sys
import torch
import torch.distributed as dist
from zero_optim import ZeroRedundancyOptimizer
from zero_optim.ddp import DistributedDataParallel
from zero_optim.hooks import zero_step
from zero_optim.hooks.passes import Task

wait = Task.wait


def wait_on(task):  # inside PyTorch still, when the script has ended
    wait(task)
    for _ in range(20_000):
        torch.zeros(1).add_(1)


Task.wait = wait_on
dist.init_process_group("gloo", store=dist.FileStore(sys.argv[1], 1), rank=0, world_size=1)
runs = []
for _ in range(2):
    model = DistributedDataParallel(torch.nn.Linear(4, 4))
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.SGD, lr=0.1)
    model.register_comm_hook(None, zero_step(optimizer))
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    runs.append((model, optimizer))
del runs[1:], model, optimizer  # one is dropped, one is there at the end
gc.collect()
dist.destroy_process_group()
print("trained")
"""


def test_a_script_ends_well_while_threads_that_step_are_still_in_pytorch(tmp_path: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(tmp_path / "store")],
        capture_output=True,
        text=True,
        timeout=LIMIT,
        env=environment,
        check=False,
    )
    # The last line: PyTorch 2.8's gloo writes to the standard output.
    assert (done.returncode, done.stdout.splitlines()[-1:]) == (0, ["trained"]), done.stderr
