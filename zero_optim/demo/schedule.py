"""The learning rate over a run: it rises during the warm-up, then falls to a tenth."""

import math

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

from zero_optim.demo.config import RunConfig, Schedule
from zero_optim.demo.optimizers import has_rate

FINAL = 0.1  # fraction of the full learning rate at the last update


def factor(step: int, schedule: Schedule, warmup: int, steps: int) -> float:
    """Return the fraction of the full learning rate that update ``step``, counted from 0, uses."""
    if step < warmup:
        return (step + 1) / (warmup + 1)
    done = min(1.0, (step - warmup) / max(1, steps - 1 - warmup))
    fall = {"cosine": 0.5 * (1 + math.cos(math.pi * done)), "linear": 1 - done, "constant": 1.0}[schedule]
    return FINAL + (1 - FINAL) * fall


def make(optimizer: Optimizer, config: RunConfig) -> LambdaLR | None:
    """Attach the schedule to an optimizer; its ``step`` is called after each update.

    Returns:
        None for an optimizer that chooses its own learning rate.
    """
    if not has_rate(optimizer):
        return None
    return LambdaLR(optimizer, lambda step: factor(step, config.schedule, config.warmup, config.steps))
