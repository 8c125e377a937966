"""The list of cases, and in which process groups each is run."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import product
from typing import Any

import torch

from gpu import bucketing, costs, cpu_tests, data_parallel, fully, overlapping, parity, stages, starting
from gpu.setting import Figures, Setup

GLOO, GLOO_3, GLOO_4 = (Setup(f"gloo, {size} ranks, 1 card", "gloo", size) for size in (2, 3, 4))
NCCL = Setup("nccl, 1 rank", "nccl", 1)
NCCL_2 = Setup("nccl, 2 cards", "nccl", 2, 2)
EVERYWHERE = (GLOO, NCCL, NCCL_2)


@dataclass(frozen=True, slots=True)
class Phase:
    """One call on several ranks."""

    function: Callable[..., Figures | None]  # takes a `Here`, then ``args``
    args: tuple[object, ...] = ()
    num_ranks: int | None = None  # other than the setup's


@dataclass(frozen=True, slots=True)
class Case:
    """One row of the table in each of its setups."""

    name: str
    phases: tuple[Phase, ...]  # one after the other, with one folder
    setups: tuple[Setup, ...] = EVERYWHERE
    starts_itself: bool = False  # it makes its process group itself


def _case(name: str, function: Callable[..., Figures | None], *args: object, **options: Any) -> Case:
    return Case(name, (Phase(function, args),), **options)


def _views(as_views: bool) -> str:
    return "as views" if as_views else "packed"


def _starting() -> Iterator[Case]:
    own = (NCCL, NCCL_2)
    for how in ("no backend", "device_id", "backend"):
        yield _case(f"start: {how}, no set_device", starting.started, how, setups=own, starts_itself=True)
    gloo = {"setups": (GLOO,), "starts_itself": True}
    yield _case("start: gloo, no set_device", starting.started, "backend", **gloo)
    yield _case("start: launch()", costs.apart, "launch", {}, "1", setups=(NCCL,), starts_itself=True)
    for more in ((), ("--overlap", "owners"), ("--bf16",)):
        name = " ".join(("start: zero-optim train", *more))
        yield _case(name, costs.command_line, *more, setups=(NCCL,), starts_itself=True)


def _parity() -> Iterator[Case]:
    for name, as_views in product(parity.OPTIMIZERS, (True, False)):
        yield _case(f"parity: {name}, {_views(as_views)}", parity.steps, name, as_views)
    dtypes = (torch.float32, torch.bfloat16, torch.float16)
    for name, dtype in product(("AdamW", "AdamW foreach", "AdamW fused", "SGD", "Adagrad"), dtypes):
        about = f"parity: {name}, cut by rows, {dtype}".replace("torch.", "")
        yield _case(about, parity.cut_by_rows, name, dtype, setups=(NCCL,))
    for as_views in (True, False):
        yield _case(f"parity: handle for another process, {_views(as_views)}", parity.sent, as_views)


def _data_parallel() -> Iterator[Case]:
    for autocast in (False, True):
        name = "autocast and GradScaler" if autocast else "clipped"
        yield _case(f"DDP and optimizer: {name}", data_parallel.sharded_training, autocast)
    for name in data_parallel.HOOKS:
        yield _case(f"hook: {name}, on both DDPs", data_parallel.hook, name)


def _cpu_tests() -> Iterator[Case]:
    tables: tuple[tuple[dict[str, cpu_tests.Run], tuple[Setup, ...]], ...] = (
        (cpu_tests.ONE_OR_TWO_RANKS, EVERYWHERE),
        (cpu_tests.ONE_RANK, (NCCL,)),
        (cpu_tests.TWO_RANKS, (GLOO, NCCL_2)),
        (cpu_tests.WITH_FUTURES, EVERYWHERE),
        (cpu_tests.MORE_RANKS, (GLOO_3, GLOO_4)),
        (cpu_tests.MESHES, (GLOO_4,)),
    )
    for runs, setups in tables:
        for name, run in runs.items():
            function = cpu_tests.run_with_futures if runs is cpu_tests.WITH_FUTURES else cpu_tests.run
            yield _case(name, function, *run, setups=setups)


def _fully() -> Iterator[Case]:
    for passes, scales in ((1, False), (2, True)):
        name = f"fully sharded, kept on the CPU: {passes} pass{'es' if passes > 1 else ''}"
        yield _case(f"{name}{', GradScaler' if scales else ''}", fully.on_host, passes, scales)
    yield _case("fully sharded, kept on the CPU: checkpoints", fully.saved)


def _bucketing() -> Iterator[Case]:
    for num_streams in (0, 1, 2, 3):
        about = f"{num_streams or 'current'} stream{'s' if num_streams > 1 else ''}"
        yield _case(f"bucketer: {about}", bucketing.summed, num_streams)
    yield _case("bucketer: its process group", bucketing.lane_works)


def _overlap() -> Iterator[Case]:
    for wrapper, gradients, lazily in product(("torch", "ours"), ("everywhere", "owners"), (False, True)):
        name = f"overlap: {wrapper} DDP, {gradients}{', lazily' if lazily else ''}"
        yield _case(name, overlapping.overlapped, wrapper, gradients, lazily, True)
    yield _case("overlap: ours DDP, packed", overlapping.overlapped, "ours", "everywhere", False, False)
    for wrapper in ("torch", "ours"):
        yield _case(f"overlap: param.data replaced, {wrapper} DDP", overlapping.replaced, wrapper)
    yield _case("overlap: several streams", overlapping.in_streams)


def _checkpoints() -> Iterator[Case]:
    for background, num_ranks in ((False, None), (True, None), (False, 1), (True, 1)):
        name = (
            f"checkpoint: {'save_async' if background else 'save'}, {'on one rank' if num_ranks else 'load'}"
        )
        phases = (Phase(starting.saved, (background,)), Phase(starting.resumed, (), num_ranks))
        yield Case(name, phases, (GLOO, NCCL_2) if num_ranks else EVERYWHERE)


def _costs() -> Iterator[Case]:
    for kind, world in product(costs.TRAININGS, (1, 2)):
        for clips in (False, True):
            if kind in ("DDP", "zero_step") and clips:
                continue  # torch.optim has no such method; overlap refuses it
            about = f"{kind}{', clipped' if clips else ''}{', pretended group of 2' if world > 1 else ''}"
            given = kind, clips, int(clips), world
            yield _case(f"waits: {about}", costs.synchronizations, *given, setups=(NCCL,))
    yield _case("waits: both, on two cards", costs.synchronizations, "both", False, 0, 1, setups=(NCCL_2,))
    for kind, world in product(("both", "zero_step"), (1, 2)):
        about = f"{kind}{', pretended group of 2' if world > 1 else ''}"
        yield _case(f"sanitizer: {about}", costs.apart, "watch", {}, kind, str(world), setups=(NCCL,))
    for allocator in ("backend:cudaMallocAsync", "expandable_segments:True"):
        settings = {"PYTORCH_CUDA_ALLOC_CONF": allocator, "PYTORCH_ALLOC_CONF": allocator}
        given = "train", settings, "zero_step", "1"
        yield _case(f"allocator: {allocator}", costs.apart, *given, setups=(NCCL,))
    yield _case("speed: an iteration", costs.speed, 1024, 16, 40)
    for stage in stages.STAGES:
        yield _case(f"memory: {stage}", stages.memory, stage, 2048, 16)
    yield _case("speed: an iteration, small", costs.speed, 128, 24, 40, setups=(NCCL, NCCL_2))


def all_cases() -> list[Case]:
    """List the cases in the order of the table."""
    parts = _starting, _parity, _data_parallel, _cpu_tests, _fully, _bucketing, _overlap, _checkpoints, _costs
    return [case for part in parts for case in part()]
