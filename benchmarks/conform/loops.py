"""The loops: what is done in the updates, and around them."""

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from conform.model import STEPS, Tower

GAMMA = 0.9  # of the schedule
MAX_NORM = 0.02  # less than every gradient of the model


@dataclass(frozen=True)
class Loop:
    """One kind of training.

    Args:
        passes: backward passes in an update.
        max_norm: to which gradients are clipped.
        frozen: the steps in which the middle block is frozen.
        two_groups: with options of their own, and a schedule.
        resumes_at: the step before which all is saved, built again and loaded.
        missing: the inputs that the last rank has less.
        is_scaled: with a GradScaler, and an infinity on the last rank in step 2.
    """

    passes: int = 1
    max_norm: float | None = None
    frozen: range = range(0)
    two_groups: bool = False
    resumes_at: int | None = None
    missing: int = 0
    is_scaled: bool = False

    @property
    def is_frozen_late(self) -> bool:
        """Whether parameters that train when the model is wrapped are frozen later."""
        return len(self.frozen) > 0 and self.frozen[0] > 0

    def num_steps(self, rank: int) -> int:
        return STEPS - self.missing * rank

    def factor(self, rank: int, step: int) -> float:
        """Return the factor of the loss."""
        return float("inf") if self.is_scaled and (rank, step) == (1, 2) else 1.0


LOOPS = {
    "plain": Loop(),
    "clip": Loop(max_norm=MAX_NORM),
    "accumulate": Loop(passes=2),
    "freeze": Loop(frozen=range(3, 5)),
    "unfreeze": Loop(frozen=range(3)),
    "groups": Loop(two_groups=True),
    "resume": Loop(resumes_at=4),
    "uneven": Loop(missing=2),
    "scaler": Loop(is_scaled=True),
}


def train(
    make: Callable[..., Any], rank: int, trial: Any, loop: Loop, dtype: torch.dtype, folder: Path
) -> Any:
    """Run a loop, and return the system after it."""
    model = Tower(trial.feed, dtype)
    frozen = model.blocks[1]
    frozen.requires_grad_(0 not in loop.frozen)
    run = make(trial, loop, model)
    run.set_mode("train")
    scaler = run.scaler() if loop.is_scaled else None
    with run.joined() if loop.missing else nullcontext():
        for step in range(loop.num_steps(rank)):
            if loop.frozen and step in (loop.frozen.start, loop.frozen.stop) and step:
                frozen.requires_grad_(step not in loop.frozen)
                run.trainable_changed()
            if step == loop.resumes_at:
                run.set_mode("eval")
                run.save(folder)
                run = make(trial, loop, Tower(trial.feed, dtype))
                run.load(folder)
                run.set_mode("train")
            _update(run, step, scaler)
    run.set_mode("eval")
    return run


def _update(run: Any, step: int, scaler: Any) -> None:
    loop, closure = run.loop, run.trial.closure

    def evaluate() -> Tensor:
        with torch.enable_grad():
            loss: Tensor = run.gradients(step, scaler)
        if loop.max_norm is not None:
            run.clip(loop.max_norm)
        return loss

    def evaluate_again() -> Tensor:
        run.zero_grad()
        return evaluate()

    if closure == "first":
        run.step(evaluate_again)
    else:
        evaluate()
        if scaler is not None:
            scaler.step(run.optimizer)
            scaler.update()
        else:
            run.step(evaluate_again if closure else None)
    run.zero_grad()
    run.schedule()
