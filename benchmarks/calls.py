"""Calls of the library's functions in one iteration, on two ranks: plain, `zero_step`, ZeRO-2 and ZeRO-3.

Counted with a profile of every call of a Python function in the library, on all threads, in iterations of six
parameters, or three units. A rank that waits for the other one looks at their memory again and again, so the
least of some iterations counts. The plain model and optimizer are not counted: they have none.
"""

import sys
import threading
from collections import Counter
from collections.abc import Callable
from functools import partial
from operator import itemgetter
from types import FrameType
from typing import Any

import torch
from harness import arguments, launch, record, show
from torch import nn

from zero_optim import ZeroRedundancyOptimizer
from zero_optim.ddp import DistributedDataParallel, FullyShardedDataParallel, ShardedDataParallel
from zero_optim.hooks import zero_step

WARM_UP, ITERATIONS = 2, 20


class Profile:
    """Counts calls of functions whose code lies in the library."""

    def __init__(self) -> None:
        self.calls: Counter[Any] = Counter()

    def __call__(self, frame: FrameType, event: str, _: object) -> None:
        """Count one; the interpreter calls."""
        if event == "call" and "/zero_optim/" in frame.f_code.co_filename:
            self.calls[frame.f_code] += 1

    def of(self, work: Callable[[], Any]) -> tuple[Any, dict[str, int]]:
        """Return the result of some work, with calls, functions and files in it."""
        self.calls.clear()
        for module in (threading, sys):
            module.setprofile(self)
        try:
            result = work()
        finally:
            for module in (threading, sys):
                module.setprofile(None)
        files = {code.co_filename for code in self.calls}
        return result, {"calls": self.calls.total(), "functions": len(self.calls), "files": len(files)}


def new_model() -> nn.Sequential:
    """Make a model of six parameters, or three units."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 32), nn.Linear(32, 24), nn.Linear(24, 8))


def in_ddp(model: nn.Module, optimizer: ZeroRedundancyOptimizer, *, steps: bool = False) -> nn.Module:
    """Wrap a model; with ``steps`` buckets are stepped in the backward pass."""
    wrapped: nn.Module = DistributedDataParallel(model)
    if steps:
        wrapped.register_comm_hook(None, zero_step(optimizer))  # type: ignore[operator]
    return wrapped


WRAPPERS: dict[str, Callable[..., nn.Module]] = {
    "plain": in_ddp,
    "zero_step": lambda model, optimizer: in_ddp(model, optimizer, steps=True),
    "ZeRO-2": ShardedDataParallel,
    "ZeRO-3, 3 units": lambda model, optimizer: FullyShardedDataParallel(model, optimizer, units=nn.Linear),
}


def _loss_of(model: nn.Module) -> torch.Tensor:
    loss: torch.Tensor = model(torch.ones(4, 16)).square().mean()
    return loss


def measure() -> dict[str, Any]:
    """Count for each wrapper; runs on each rank."""
    result: dict[str, Any] = {}
    for name, wrap in WRAPPERS.items():
        model = new_model()
        optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, lr=0.01)
        wrapped, profile = wrap(model, optimizer), Profile()
        parts: dict[str, list[dict[str, int]]] = {"forward": [], "backward": [], "step": []}
        for _ in range(WARM_UP + ITERATIONS):
            loss, forward = profile.of(partial(_loss_of, wrapped))
            _, backward = profile.of(loss.backward)
            _, step = profile.of(optimizer.step)
            optimizer.zero_grad()
            for part, counted in zip(parts.values(), (forward, backward, step), strict=True):
                part.append(counted)
        result[name] = {
            part: min(counted[WARM_UP:], key=itemgetter("calls")) for part, counted in parts.items()
        }
    return result


def main() -> None:
    """Count, show and record."""
    options = arguments(__doc__).parse_args()
    result = launch(2, measure)[0]
    rows = [
        [f"{name}, {part}", *figures.values()]
        for name, parts in result.items()
        for part, figures in parts.items()
    ]
    show("Calls of the library in one iteration, rank 0 of 2", ["", "calls", "functions", "files"], rows)
    record("calls", result, dry=options.dry)


if __name__ == "__main__":
    main()
