"""One of three ranks is killed while it trains; the other two go on in the same processes.

    python docs/survive.py FOLDER

Processes, model, optimizer and wrapper live on: `docs/rebinding.md` explains the calls. A job on several
hosts learns from its scheduler, or from a store outside of the ranks, who is left; here the process that
started the ranks writes a file.
"""

import json
import multiprocessing
import os
import signal
import sys
import time
from multiprocessing.connection import wait
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import nn

from zero_optim import StalledError, ZeroRedundancyOptimizer, checkpoint
from zero_optim.ddp import DistributedDataParallel

if TYPE_CHECKING:
    from multiprocessing.process import BaseProcess

STEPS, SAVED_EVERY = 20, 5
KILLED, KILLED_AT = 1, 12


def join_group(folder: Path, generation: int, number: int) -> list[int]:
    """Form a group of the processes that are left. The file that names them appears when one has ended."""
    named = folder / f"members-{generation}.json"
    while not named.exists():
        time.sleep(0.05)
    members: list[int] = json.loads(named.read_text())
    store = dist.FileStore(str(folder / f"store-{generation}"), len(members))  # type: ignore[attr-defined]
    dist.init_process_group("gloo", store=store, rank=members.index(number), world_size=len(members))
    return members


def train(folder: Path, number: int) -> None:
    """Run as one process, from the first step to the last, in as many groups as it takes."""
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    torch.set_num_threads(1)
    generation = 0
    join_group(folder, generation, number)
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 1)))
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, lr=0.01)
    checkpoint.save(folder / "step-0", model=model, optimizer=optimizer, extra=0)
    step = 0
    while step < STEPS:
        try:
            if (number, step, generation) == (KILLED, KILLED_AT, 0):
                os.kill(os.getpid(), signal.SIGKILL)
            inputs = torch.randn(8, 16, generator=torch.Generator().manual_seed(100 * step + dist.get_rank()))
            loss = (model(inputs) - inputs.sum(1, keepdim=True)).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            step += 1
            if step % SAVED_EVERY == 0:
                path = folder / f"step-{step}"
                checkpoint.save(path, model=model, optimizer=optimizer, extra=step, keep=2)
        except StalledError as error:  # a rank has ended
            print(f"process {number}: step {step} broke off: {str(error).splitlines()[0][:60]}", flush=True)
            generation += 1
            step = go_on(folder, generation, number, model, optimizer)
    if dist.get_rank() == 0:
        print(f"loss {loss.item():.6f} after {step} steps on {dist.get_world_size()} ranks", flush=True)
    model.detach()
    optimizer.detach()
    dist.destroy_process_group()


def go_on(
    folder: Path,
    generation: int,
    number: int,
    model: DistributedDataParallel,
    optimizer: ZeroRedundancyOptimizer,
) -> int:
    """Leave the broken group, form a new one, and go back to the newest checkpoint; gives its step."""
    optimizer.zero_grad()  # of the pass that broke off
    model.detach()
    optimizer.detach()
    dist.destroy_process_group()
    members = join_group(folder, generation, number)
    newest = checkpoint.latest(folder)
    assert newest is not None  # one was saved before the first step
    step: int = checkpoint.rebind(newest, model=model, optimizer=optimizer)
    model.rebind()
    print(f"process {number}: goes on with {members} from step {step}", flush=True)
    return step


def name_members(folder: Path, generation: int, members: list[int]) -> None:
    """Write who is left, in one step."""
    part = folder / "members.part"
    part.write_text(json.dumps(members))
    part.rename(folder / f"members-{generation}.json")


def main(folder: Path) -> None:
    """Start three processes, and tell those that are left when one is killed."""
    folder.mkdir(parents=True, exist_ok=True)
    context = multiprocessing.get_context("spawn")
    running: dict[int, BaseProcess] = {}
    for number in range(3):
        running[number] = context.Process(target=train, args=(folder, number), daemon=True)
        running[number].start()
    generation = 0
    name_members(folder, generation, list(running))
    while running:
        wait([process.sentinel for process in running.values()])
        ended = {number: each.exitcode for number, each in running.items() if each.exitcode is not None}
        running = {number: each for number, each in running.items() if number not in ended}
        if any(code == -signal.SIGKILL for code in ended.values()):
            generation += 1
            name_members(folder, generation, list(running))
        elif any(ended.values()):
            sys.exit(f"failed: {ended}")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
