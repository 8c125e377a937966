"""Cases: what an iteration costs beside PyTorch's: synchronizations and time; and the sanitizer.

Note [Waits that count]
    ``torch.cuda.set_sync_debug_mode`` reports copies, ``item()`` and their like, and ``Stream.synchronize``:
    they go through functions of PyTorch that look at the mode. ``Event.synchronize`` calls CUDA at once, and
    is not reported; by it the library waits for its own copies (`zero_optim.compat.streams`). So the methods
    of the class are replaced: events that exist already are seen too, on every thread. Events that C++ code
    waits for are not seen.

    A wait is none if a backward pass has begun since the event was recorded: the GPU has other work then.
"""

import os
import subprocess
import sys
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import nn

from gpu.setting import MOST_SECONDS, Figures, Here, NotHere, fake_store
from gpu.streams import averaging
from sync_calls import Event, counting_backwards, cpu_as_accelerator, num_backwards
from zero_optim import ZeroRedundancyOptimizer
from zero_optim.compat import streams
from zero_optim.ddp import DistributedDataParallel
from zero_optim.health import unit_stamps
from zero_optim.health.stamp import Arrival, Read, Stamp
from zero_optim.hooks import zero_step

MIB = 2**20
WARM_UP = 4  # iterations: PyTorch's DDP makes its buckets anew after the first
Iterate = Callable[[], None]


def layers(width: int, depth: int) -> nn.Sequential:
    torch.manual_seed(0)
    pairs = [layer for _ in range(depth) for layer in (nn.Linear(width, width), nn.Tanh())]
    return nn.Sequential(*pairs, nn.Linear(width, 16))


TRAININGS = ("optimizer", "DDP", "both", "masters", "lazily", "zero_step")


def training(here: Here, kind: str, clips: bool) -> Iterate:
    """Build an ordinary loop's iteration, with its inputs on the device."""
    model: nn.Module = layers(32, 4).to(here.device, torch.bfloat16 if kind == "masters" else torch.float32)
    x = torch.randn(8, 32, device=here.device).to(next(model.parameters()).dtype)
    if kind != "optimizer":
        model = DistributedDataParallel(model, bucket_cap_mb=0.005)
    sharded: Any = torch.optim.AdamW(model.parameters(), lr=0.01)
    if kind != "DDP":
        master = torch.float32 if kind == "masters" else None
        sharded = ZeroRedundancyOptimizer(
            model.parameters(), torch.optim.AdamW, master_dtype=master, bucket_cap_mb=0.005, lr=0.01
        )
    if kind == "zero_step":
        model.register_comm_hook(None, zero_step(sharded, averaging(here)))
    if kind == "lazily":
        sharded.gather_lazily(model)

    def iterate() -> None:
        sharded.zero_grad()
        model(x).square().mean().backward()
        if clips:
            sharded.clip_grad_norm_(1.0)
        sharded.step()

    return iterate


def synchronizations(here: Here, kind: str, clips: bool, most: int, world: int) -> Figures:
    """Count the calls that make the CPU wait for the GPU in an iteration after warm-up.

    At most ``most`` are promised. With ``world > 1`` the group's collectives do nothing (PyTorch's "fake"
    backend), so that the code of several ranks runs in one process. Not gloo: it waits itself.
    """
    if world > 1:
        pretend(world)
    torch.use_deterministic_algorithms(False)  # its kernels may wait where the others do not
    with ExitStack() as stack:
        stack.enter_context(only_own_stamps())
        if not here.is_cuda:  # the code of devices with streams all the same
            stack.enter_context(cpu_as_accelerator())
        events = stack.enter_context(waits_for_events(torch.cuda.Event if here.is_cuda else Event))
        iterate = training(here, kind, clips)
        for _ in range(WARM_UP):
            iterate()
        here.synchronize()
        events.clear()
        reported = _reported_waits(here, iterate)
        found = [*reported, *events]
        where = ", ".join(sorted(set(found)))
        assert len(found) <= 2 * most, f"{len(found)} waits in two iterations, at {where}"
        if here.is_cuda and not reported:  # warnings of other threads may be lost: an error is not
            torch.cuda.set_sync_debug_mode("error")
            iterate()
            torch.cuda.set_sync_debug_mode("default")
            here.synchronize()
    return {"waits" if here.is_cuda else "waits for events": len(found) / 2, "at": where or "-"}


def _reported_waits(here: Here, iterate: Iterate) -> list[str]:
    """Run two iterations, and say where PyTorch reports waits; see Note [Waits that count]."""
    if not here.is_cuda:
        iterate()
        iterate()
        return []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        iterate()
        iterate()
        torch.cuda.set_sync_debug_mode("default")
    found = [w for w in caught if "called a synchronizing" in str(w.message)]
    return [f"{Path(w.filename).name}:{w.lineno}" for w in found]


@contextmanager
def waits_for_events(kind: type) -> Iterator[list[str]]:
    """List where the CPU waits for events of the backward pass that began last, or of before the first.

    ``kind``: class of the events, such as ``torch.cuda.Event``. Those that were recorded before do not count.
    """
    waits: list[str] = []
    untyped: Any = kind
    record, synchronize = untyped.record, untyped.synchronize

    def recording(event: Any, *args: Any, **kwargs: Any) -> None:
        event.recorded_in = num_backwards()
        record(event, *args, **kwargs)

    def synchronizing(event: Any) -> None:
        if getattr(event, "recorded_in", None) == num_backwards():
            own = (__file__, streams.__file__)
            frame = next(frame for frame in reversed(traceback.extract_stack()) if frame.filename not in own)
            waits.append(f"{Path(frame.filename).name}:{frame.lineno}")
        synchronize(event)

    with ExitStack() as stack:
        stack.enter_context(counting_backwards())
        stack.enter_context(patch.object(kind, "record", recording))
        stack.enter_context(patch.object(kind, "synchronize", synchronizing))
        yield waits


def pretend(world: int) -> None:
    """Put a group of several ranks, which does nothing, in the place of the one there is."""
    dist.init_process_group("fake", store=fake_store(), rank=0, world_size=world)


@contextmanager
def only_own_stamps() -> Iterator[None]:
    """Read the stamps of all ranks, but believe this rank's alone: ranks that are pretended send none."""
    stamps = Arrival.read_stamps

    def own(arrival: Arrival, read: Read) -> dict[int, Stamp]:
        return {rank: stamp for rank, stamp in stamps(arrival, read).items() if rank == dist.get_rank()}

    with patch.object(Arrival, "read_stamps", own), patch.object(unit_stamps, "parted", lambda *_: []):
        yield


def apart(here: Here, job: str, settings: dict[str, str], *arguments: str) -> Figures:
    """Run a job of `gpu.apart` in a process of its own, with environment variables ``settings``.

    Job "watch" trains under PyTorch's sanitizer, "train" without it, "launch" as `launch` starts it.
    """
    command = [sys.executable, "-m", "gpu.apart", str(here.device), here.backend, str(here.store), job]
    text = _output_of([*command, *arguments], settings)
    assert "CSAN detected" not in text, text[-6000:]
    assert "job done" in text, text[-6000:]
    return {"reports": 0} if job == "watch" else {}


def example(here: Here, *arguments: str) -> None:
    """Run ``examples/train_gpt.py`` for a few updates, in one process, then some more from the checkpoint."""
    if find_spec("tqdm") is None:
        raise NotHere("examples/train_gpt.py needs tqdm")
    small = "--layers 1 --width 32 --heads 2 --context 16 --batch-size 4 --eval-every 2"
    script, run = Path(__file__).parents[2] / "examples" / "train_gpt.py", here.folder / "run"
    command = [sys.executable, str(script), *small.split(), "--run", str(run), *arguments]
    settings = {} if here.is_cuda else {"CUDA_VISIBLE_DEVICES": ""}
    for steps in (4, 6):
        shown = _output_of([*command, "--steps", str(steps)], settings)
        assert f"from update {0 if steps == 4 else 4} to {steps}" in shown
        assert f"({here.device.type}, " in shown


def _output_of(command: Sequence[str], settings: dict[str, str]) -> str:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path)), **settings}
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=MOST_SECONDS, env=environment, check=False
    )
    output = done.stdout + done.stderr
    assert done.returncode == 0, output[-6000:]
    return output
