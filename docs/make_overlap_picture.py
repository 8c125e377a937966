"""Draw docs/overlap.png and docs/sharded.png: one update of a GPT on two ranks, each way on one scale.

Run from the checkout: ``python docs/make_overlap_picture.py``, or with ``overlap`` or ``sharded`` for one of
them. Takes half a minute each.
"""

import sys
import tempfile
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.nn import functional as F
from torch.profiler import record_function

from zero_optim import ZeroRedundancyOptimizer, launch
from zero_optim.ddp import DistributedDataParallel, ShardedDataParallel
from zero_optim.hooks import zero_step

ROOT = Path(__file__).parents[1]
sys.path += [str(ROOT / "examples"), str(ROOT / "notebooks")]
import timeline  # noqa: E402 - lies there
from train_gpt import GPT, Text  # noqa: E402 - the same

UPDATES, TRACED = 7, 5  # the allocator and the buckets no longer change then


def plain(gpt: GPT) -> tuple[Any, ZeroRedundancyOptimizer]:
    """Step after the backward pass."""
    optimizer = ZeroRedundancyOptimizer(gpt.parameters(), torch.optim.AdamW, bucket_cap_mb=8)
    return DistributedDataParallel(gpt), optimizer


def overlapped(gpt: GPT) -> tuple[Any, ZeroRedundancyOptimizer]:
    """Step during it."""
    model, optimizer = plain(gpt)
    model.register_comm_hook(None, zero_step(optimizer))
    return model, optimizer


def sharded(gpt: GPT) -> tuple[Any, ZeroRedundancyOptimizer]:
    """Reduce gradients to their owners, in small buckets."""
    optimizer = ZeroRedundancyOptimizer(gpt.parameters(), torch.optim.AdamW, bucket_cap_mb=1)
    return ShardedDataParallel(gpt, optimizer), optimizer


Build = Callable[[GPT], tuple[Any, ZeroRedundancyOptimizer]]
PICTURES: dict[str, dict[str, tuple[Build, bool]]] = {  # by name: each title, and whether it clips
    "overlap": {
        "step(): all gradients are reduced, then each rank steps what it owns and sends it": (plain, False),
        "zero_step(optimizer): each bucket is reduced, stepped and sent during the backward pass": (
            overlapped,
            False,
        ),
    },
    "sharded": {
        "DistributedDataParallel, clipping: every rank gets all gradients": (plain, True),
        "ShardedDataParallel, clipping: each gradient goes to its owner": (sharded, True),
    },
}


def trace(build: Build, clips: bool, path: Path) -> list[timeline.Span]:
    """Train, and return the spans of one update; on each rank."""
    torch.manual_seed(0)
    text = Text(128)
    model, optimizer = build(GPT(128, layers=6, width=384, heads=6))
    for number in range(UPDATES):
        inputs, targets = text.batch(text.train, number, 2)
        is_traced = number == TRACED and dist.get_rank() == 0
        with timeline.traced(path) if is_traced else nullcontext():
            with record_function(timeline.FORWARD):
                loss = F.cross_entropy(model(inputs).flatten(0, 1), targets.flatten())
            with record_function(timeline.BACKWARD):
                loss.backward()  # type: ignore[no-untyped-call]
            if clips:
                optimizer.clip_grad_norm_(1.0)
            optimizer.step()
            optimizer.zero_grad()
    return timeline.spans_of(path) if dist.get_rank() == 0 else []


def main(names: list[str]) -> None:
    """Run, trace, draw.

    Args:
        names: of the pictures; none for all.
    """
    for name in names or PICTURES:
        pictures = []
        for title, (build, clips) in PICTURES[name].items():
            with tempfile.TemporaryDirectory() as folder:
                spans = launch(trace, 2, build, clips, Path(folder, "trace.json"), threads=1)[0]
            pictures.append((title, spans))
            print(f"{title}: {timeline.hidden(spans):.0%} under forward and backward")  # noqa: T201
        timeline.draw(pictures, Path(__file__).with_name(f"{name}.png"))


if __name__ == "__main__":
    main(sys.argv[1:])
