"""A long run whose ranks pause now and then, for up to half of the timeout: that is no stall."""

import random
import time

import torch
import torch.distributed as dist
from torch import nn

from stalling import about_to_stall, outcomes
from zero_optim import ZeroRedundancyOptimizer
from zero_optim.ddp import DistributedDataParallel


def pauses(rank: int, steps: int, long: int, longest: float) -> dict[int, float]:
    """Plan the pauses of a rank, by step: one step in ten has one of up to 1 ms, and a few have long ones."""
    source = random.Random(rank)
    planned = {step: source.uniform(0, 1e-3) for step in source.sample(range(steps), steps // 10)}
    for step in source.sample(range(steps), long):
        planned[step] = longest * source.uniform(0.5, 1)
    return planned


def jittery(steps: int, timeout: float, long: int) -> tuple[int, int, float]:
    """Train a tiny model; gives the steps taken, the pauses' number and their seconds, on this rank."""
    about_to_stall()  # all waits are judged
    torch.manual_seed(0)
    model = nn.Linear(4, 2)
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.SGD, lr=0.1, timeout=timeout)
    wrapper = DistributedDataParallel(model, timeout=timeout)
    planned = pauses(dist.get_rank(), steps, long, timeout / 2)
    inputs = torch.ones(1, 4)
    for step in range(steps):
        optimizer.zero_grad()
        loss = wrapper(inputs).square().sum()
        if step % 2:
            time.sleep(planned.get(step, 0))
        loss.backward()
        if not step % 2:
            time.sleep(planned.get(step, 0))
        optimizer.step()
    return steps, len(planned), sum(planned.values())


def run_jittery(steps: int, timeout: float, long: int) -> list[object]:
    """Make such a run on two ranks; gives what `jittery` gives on each, or the error there."""
    return [outcome.said for outcome in outcomes(2, jittery, steps, timeout, long, limit=1200.0)]
