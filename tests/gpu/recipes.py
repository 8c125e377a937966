"""Ours and PyTorch's recipes, each as a function that builds an iteration; and what an iteration costs."""

import gc
import time
import warnings
from collections.abc import Callable
from contextlib import ExitStack
from statistics import median
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel as TorchDistributedDataParallel

from fully import NARROW
from gpu.costs import MIB, layers, pretend
from gpu.loopback import Kind, looped
from gpu.setting import Figures, Here, NotHere, futures_work
from gpu.streams import waiting_hook
from zero_optim import ZeroRedundancyOptimizer
from zero_optim.comm.works import Work
from zero_optim.ddp import DistributedDataParallel, FullyShardedDataParallel, ShardedDataParallel
from zero_optim.errors import ZeroOptimError
from zero_optim.hooks import zero_step

with warnings.catch_warnings():  # not where tests replace calls
    warnings.simplefilter("ignore")  # it uses torch.jit.script, which is deprecated
    from torch.distributed.optim import ZeroRedundancyOptimizer as TorchZeroRedundancyOptimizer

OURS = ("ZeRO-1", "ZeRO-1, clipped", "gather_lazily", "zero_step", "ZeRO-2", "ZeRO-3", "ZeRO-3, bf16")
PYTORCHS = ("DDP and AdamW", "PyTorch's ZeRO", "FSDP2")
WARM_UP, ROUNDS = 3, 7
STEPS = 4
KINDS: tuple[Kind, ...] = ("early", "late")
Iterate = Callable[[], Tensor]


def build(
    here: Here, recipe: str, width: int, depth: int, cap: dict[str, float] | None = None, rows: int = 32
) -> Iterate:
    """Build an iteration, which returns the loss; ``cap``: of our buckets, else a quarter of the model."""
    model: Any = layers(width, depth).to(here.device)
    options: dict[str, Any] = {"lr": 1e-3, "fused": here.is_cuda}
    if recipe in PYTORCHS:
        wrapped, optimizer = _theirs(here, recipe, model, options)
    else:
        quarter = {"bucket_cap_mb": 4 * sum(p.numel() for p in model.parameters()) / MIB / 4}
        wrapped, optimizer = _ours(here, recipe, model, quarter if cap is None else cap, options)
    x = torch.randn(rows, width, generator=torch.Generator().manual_seed(1)).to(here.device)

    def iterate() -> Tensor:
        optimizer.zero_grad()
        loss = wrapped(x).float().square().mean()
        loss.backward()
        if "clipped" in recipe:
            optimizer.clip_grad_norm_(1.0)
        optimizer.step()
        return loss.detach()

    return iterate


def _ours(
    here: Here, recipe: str, model: nn.Sequential, cap: dict[str, float], options: dict[str, Any]
) -> tuple[Any, Any]:
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, **cap, **options)
    if recipe == "ZeRO-2":
        return ShardedDataParallel(model, optimizer), optimizer
    if recipe.startswith("ZeRO-3"):
        policy = {"mixed_precision": NARROW} if "bf16" in recipe else {}
        units = [each for each in model if isinstance(each, nn.Linear)]
        return FullyShardedDataParallel(model, optimizer, units=units, **policy), optimizer
    wrapped = DistributedDataParallel(model, gradient_as_bucket_view=True, **cap)
    if recipe == "zero_step":
        hook: Any = allreduce_hook if here.is_cuda and futures_work(here) else waiting_hook
        wrapped.register_comm_hook(None, zero_step(optimizer, hook))
    elif recipe == "gather_lazily":
        optimizer.gather_lazily(model)
    return wrapped, optimizer


def _theirs(here: Here, recipe: str, model: nn.Sequential, options: dict[str, Any]) -> tuple[Any, Any]:
    if recipe == "FSDP2":
        mesh = DeviceMesh.from_group(dist.group.WORLD, here.device.type)
        for module in (*(each for each in model if isinstance(each, nn.Linear)), model):
            fully_shard(module, mesh=mesh)
        return model, torch.optim.AdamW(model.parameters(), **options)
    wrapped = TorchDistributedDataParallel(model, gradient_as_bucket_view=True)
    if recipe == "DDP and AdamW":
        return wrapped, torch.optim.AdamW(wrapped.parameters(), **options)
    params, kind = wrapped.parameters(), torch.optim.AdamW
    return wrapped, TorchZeroRedundancyOptimizer(params, kind, parameters_as_bucket_view=True, **options)


def losses(here: Here, recipe: str, world: int, kind: Kind) -> Tensor:
    """Train for some steps."""
    torch.manual_seed(0)
    with looped(here, world, kind):
        iterate = build(here, recipe, 64, 6)
        return torch.stack([iterate() for _ in range(STEPS)]).cpu()


def late(here: Here, recipe: str, world: int) -> Figures:
    """The losses of a recipe are the same with late collectives and without."""
    early, slow = (losses(here, recipe, world, kind) for kind in KINDS)
    assert early.isfinite().all(), early
    assert torch.equal(early, slow), (early, slow)
    return {"last loss": f"{early[-1].item():.6g}"}


def late_without_waits(here: Here, recipe: str) -> Figures:
    """A missing wait is seen: `Work.wait` does not wait for gathers, and the losses differ."""
    if recipe == "ZeRO-3" and not here.is_cuda:
        raise NotHere("the CPU would write to memory that was freed")
    right, wait = losses(here, recipe, 8, "early"), Work.wait
    with patch.object(Work, "wait", lambda work: None if work.phase.name == "gather" else wait(work)):
        try:
            wrong = losses(here, recipe, 8, "late")
        except ZeroOptimError as error:  # what ranks tell each other is garbage as well
            return {"seen as": type(error).__name__}
    assert not torch.equal(right, wrong), "nothing was seen"
    return {"seen as": "NaN" if not wrong.isfinite().all() else "other losses"}


def cost(here: Here, world: int) -> Figures:
    """Return host ms, GPU ms and peak MiB of an iteration of each recipe, on a rank of a pretended group."""
    width, depth = (2048, 16) if here.is_cuda else (32, 2)
    torch.use_deterministic_algorithms(False)
    figures: Figures = {}
    for recipe in (*PYTORCHS, *OURS):
        try:
            figures[recipe] = " / ".join(f"{value:.2f}" for value in _cost(here, recipe, world, width, depth))
        except Exception as error:  # the other recipes are of interest all the same
            if recipe in OURS:
                raise
            figures[recipe] = f"does not run: {str(error).splitlines()[0][:80]}"
    return figures


def _cost(here: Here, recipe: str, world: int, width: int, depth: int) -> list[float]:
    gc.collect()
    before = 0
    if here.is_cuda:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(here.device)
        before = torch.cuda.memory_allocated(here.device)
    with ExitStack() as stack:
        if recipe == "FSDP2":  # it wants a backend in C++, and DDP futures that hold tensors
            pretend(world)
            stack.callback(dist.destroy_process_group)
        else:
            switch = stack.enter_context(looped(here, world, "early"))
        iterate = build(here, recipe, width, depth)
        for _ in range(WARM_UP):
            iterate()
        if recipe != "FSDP2":
            switch.kind = "skipped"
        times = [_timed(here, iterate) for _ in range(ROUNDS)]
    peak = torch.cuda.max_memory_allocated(here.device) - before if here.is_cuda else 0
    return [*(median(each) for each in zip(*times, strict=True)), peak / MIB]


def _timed(here: Here, iterate: Iterate) -> tuple[float, float]:
    """Return the ms until the CPU comes back, and until the GPU has done its work."""
    here.synchronize()
    begin = time.perf_counter()
    iterate()
    host = time.perf_counter() - begin
    here.synchronize()
    return 1e3 * host, 1e3 * (time.perf_counter() - begin)


CONTENDERS = {"torch": "PyTorch's ZeRO", "ours": "ZeRO-1", "ours, zero_step": "zero_step"}


def speed(here: Here, width: int, depth: int, rounds: int) -> Figures:
    """Median time of an iteration in ms, in turns, of the slowest rank; and the ratio to PyTorch's."""
    if not here.is_cuda:
        width, depth = 32, 2  # only the code is of interest
    torch.use_deterministic_algorithms(False)  # what it costs is no contender's
    contenders = {kind: build(here, recipe, width, depth, {}, 64) for kind, recipe in CONTENDERS.items()}
    names = list(contenders)
    times = torch.zeros(WARM_UP + rounds, len(names), dtype=torch.float64)
    gc.collect()
    gc.disable()  # a collection belongs to no contender
    try:
        for turn in range(WARM_UP + rounds):
            for place in range(len(names)):
                index = (place + turn) % len(names)  # each round begins with another one
                times[turn, index] = _in_ms(here, contenders[names[index]])
    finally:
        gc.enable()
    slowest = times.to(here.device)  # NCCL sends nothing else
    dist.all_reduce(slowest, dist.ReduceOp.MAX)
    columns = slowest[WARM_UP:].t().tolist()
    medians = {kind: median(column) for kind, column in zip(names, columns, strict=True)}
    figures: Figures = {f"{kind} ms": round(value, 3) for kind, value in medians.items()}
    for kind in names[1:]:
        figures[f"{kind}/torch"] = round(medians[kind] / medians["torch"], 3)
    return figures


def _in_ms(here: Here, iterate: Iterate) -> float:
    """Time an iteration in ms: all ranks begin together."""
    dist.all_reduce(torch.zeros(1, device=here.device))
    here.synchronize()
    if not here.is_cuda:
        begin = time.perf_counter()
        iterate()
        return 1e3 * (time.perf_counter() - begin)
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    start.record()  # type: ignore[no-untyped-call]
    iterate()
    end.record()  # type: ignore[no-untyped-call]
    here.synchronize()
    return float(start.elapsed_time(end))  # type: ignore[no-untyped-call]
