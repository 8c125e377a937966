"""The list of cases, and in which process groups each is run.

Most are tests of the CPU's suite, which run on the device as they are; see `on_device`. Each is the function
that a test runs on its ranks. It compares bits with the unsharded run, or with the stage below.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

import parity
import test_fully_sharded as parameters
import test_fully_sharded_made as made
import test_fully_sharded_odd as odd
import test_fully_sharded_precision as precision
import test_fully_sharded_state as state
import test_mesh as mesh
import test_overlap_training as overlap
from fully import NARROW
from gpu import costs, first, kernels, offloaded, recipes, stages, starting, streams
from gpu.setting import Figures, Here, NotHere, Setup, asleep_on_device, need_futures
from parity_runs import STAGES, Row, Run
from training import HAS_MUON
from zero_optim.ddp import PrecisionPolicy
from zero_optim.hooks import zero_step

GLOO, GLOO_3, GLOO_4 = (Setup(f"gloo, {size} ranks, 1 card", "gloo", size) for size in (2, 3, 4))
NCCL = Setup("nccl, 1 rank", "nccl", 1)
NCCL_2 = Setup("nccl, 2 cards", "nccl", 2, 2)
EVERYWHERE = (GLOO, NCCL, NCCL_2)

FOLDER = Path("an empty folder")  # stands for one among the arguments
WIDE = PrecisionPolicy(*[torch.float32] * 5, "units")


@dataclass(frozen=True, slots=True)
class Case:
    """One row of the table in each of its setups."""

    name: str
    function: Callable[..., Figures | None]  # takes a `Here`, then ``args``
    args: tuple[object, ...] = ()
    setups: tuple[Setup, ...] = EVERYWHERE
    starts_itself: bool = False  # it makes its process group itself
    section: str = ""  # of `SECTIONS`


# ---------------------------------------------------------------------- tests of the CPU's suite


def run(here: Here, function: Any, *args: object) -> None:
    """Run a test's function on the device."""
    folder = here.folder / "empty"
    folder.mkdir(exist_ok=True)
    with asleep_on_device(here):
        function(*(str(folder) if arg == FOLDER else arg for arg in args))


def run_with_futures(here: Here, function: Any, *args: object) -> None:
    """Run a test's function where comm hooks can work."""
    need_futures(here)
    run(here, function, *args)


def overlapped(here: Here, check: Callable[[Row], None], row: Row, lazily: bool = False) -> None:
    """Run a row of the table of parity whose reductions begin behind a kernel that sleeps.

    The hook works where the backend gives no futures too.
    """
    stage = replace(STAGES[row.stage], inline=False, lazy=STAGES[row.stage].lazy or lazily)
    if stage.hook is zero_step:
        stage = replace(stage, hook=lambda optimizer: zero_step(optimizer, streams.averaging(here)))
    with patch.dict(STAGES, {row.stage: stage}):
        run(here, check, row)


def under_autocast(here: Here, row: Row) -> None:
    """Run a row of the table of parity whose forward passes compute in 16 bits."""
    loss = Run.loss

    def narrow(self: Run, step: int) -> torch.Tensor:
        with torch.autocast(here.device.type, torch.float16 if here.is_cuda else torch.bfloat16):
            return loss(self, step)

    with patch.object(Run, "loss", narrow), patch.dict(parity._references, clear=True):
        run(here, parity.assert_row, row)


def of_kernels(here: Here, check: Callable[[Row], None], row: Row) -> None:
    """Run a row of the table of parity for a way in which PyTorch's classes step."""
    if row.option == "capturable" and not here.is_cuda:
        raise NotHere("the CPU captures nothing")
    if row.option == "two classes" and not HAS_MUON:
        raise NotHere("this PyTorch does not have torch.optim.Muon")
    run(here, check, row)


# In this order, each with the seconds after which the rest of it is left out on a GPU: 12 minutes in all.
SECTIONS = {
    "versions": 20.0,
    "late loopback": 120.0,
    "costs": 150.0,
    "memory": 60.0,
    "trace": 30.0,
    "raw collectives": 20.0,
    "waits": 80.0,
    "the rest": 240.0,
}
Tests = dict[str, tuple[Any, ...]]  # the function of a test, and its arguments


def table(stages: str, model: str, loop: str, options: str = "plain") -> Tests:
    """Rows of the table of parity, one for each stage and option; several are divided by a semicolon."""
    rows = [Row(s, model, loop, o) for s, o in product(stages.split("; "), options.split("; "))]
    return {f"table: {row}": (parity.assert_row, row) for row in rows}


ANYWHERE: Tests = {
    **table("packed", "dtypes", "ordinary"),
    **table("packed", "complex", "ordinary", "momentum, averages"),
    **table("packed", "tower", "GradScaler", "fused, one bucket"),
    **table("views", "tower", "clipped", "masters"),
    **table("views", "many tiny", "freezing", "two classes"),
    **table("lazy", "convolutions", "clipped"),
    **table("lazy", "tower", "ordinary"),
    **table("our DDP alone", "gpt", "no_sync", "gradients as views"),
    **table("our DDP alone", "tower", "ordinary", "static graph"),
    **table("our DDP alone", "reentrant checkpoints", "ordinary"),
    **table("our DDP alone", "unused", "ordinary", "gradients as views"),
    **table("views", "tower", "Join"),
    **table("gradients", "tower", "ordinary"),
    **table("gradients", "unused", "clipped", "momentum, averages"),
    **table("gradients", "tower", "freezing"),
    **table("gradients", "gpt", "no_sync"),
    **table("gradients", "reentrant checkpoints", "closure"),
    **table("gradients", "convolutions", "GradScaler"),
    **table("fully", "tied", "ordinary", "static graph"),
    **table("fully", "dtypes", "ordinary"),
    **table("fully", "unused", "clipped"),
    **table("fully", "gpt", "no_sync", "masters"),
    **table("fully", "reentrant checkpoints", "GradScaler"),
    **table("fully", "adapters of a frozen base", "ordinary", "plain; optimizer without the base"),
    **table("fully, units stay", "gpt", "clipped"),
    **table("fully, wrapped first", "tower", "ordinary"),
    **table("fully, wrapped first", "convolutions", "ordinary", "momentum, averages"),
    "parameters: units with frozen parameters": (
        parameters.test_units_with_frozen_parameters_are_freed_when_their_inputs_have_gradients,
    ),
    "parameters: fully_shard": (made.test_a_module_that_is_sharded_in_place_trains_as_a_wrapped_one, False),
    "parameters: bf16, several passes": (precision.test_bits_are_those_of_masters, NARROW, "", 3, False),
    "parameters: bf16, averages": (precision.test_averages_are_those_of_what_owners_keep,),
    **{
        f"parameters: {kind}": (odd.test_odd_models_and_losses_have_the_bits_of_whole_parameters, kind)
        for kind in list(odd.ODD)[:3]
    },
    **{
        f"parameters: checkpointing, {how}, bf16": (
            precision.test_bits_are_those_of_masters,
            NARROW,
            how,
            1,
            False,
        )
        for how in ("reentrant", "not reentrant")
    },
}
ON_GLOO: Tests = {
    **table("gradients", "sparse", "ordinary")
}  # NCCL sums no sparse tensors, in PyTorch's DDP either
ON_ONE_RANK: Tests = {"parameters: save, load, evaluate": (state.test_one_rank_alone, FOLDER)}
ON_TWO_RANKS: Tests = {
    **table("gradients", "tower", "ordinary", "cuts"),
    "parameters: bf16, cut": (precision.test_cut_parameters_keep_the_bits,),
    "parameters: units on their way": (parameters.test_only_what_is_used_or_next_is_there, True, 0),
}
ON_MORE_RANKS: Tests = {  # the sums of the reference are made in the order of ranks
    **table("gradients", "tower", "adding", "four ranks"),
    **table("gradients", "tower", "no_sync", "four ranks"),
    "parameters: order of sums, float32": (
        precision.test_bits_are_those_of_masters,
        WIDE,
        "not reentrant",
        2,
        False,
    ),
    "parameters: order of sums, bf16": (precision.test_bits_are_those_of_masters, NARROW, "", 2, False),
}
ON_A_MESH: Tests = {  # of two replicas of two ranks
    **table("gradients; fully", "tower", "ordinary", "mesh"),
    **table("gradients; fully", "tower", "adding", "mesh"),
    **table("gradients; fully", "tower", "GradScaler", "mesh"),
    "mesh: unused": (mesh.test_ranks_of_all_replicas_agree_about_buffers_and_unused_parameters,),
    "mesh: bf16, wrapped first": (
        precision.test_a_model_from_the_meta_device_wrapped_first_over_a_mesh_has_the_same_bits,
        True,
    ),
}
# Ways in which PyTorch's classes step; what is saved is loaded again.
WITH_KERNELS: Tests = {
    **table("packed; views", "convolutions", "scheduled", "plain; foreach; capturable; momentum, averages"),
    **table("packed; views", "convolutions", "scheduled", "fused, one bucket; Adafactor; Adagrad"),
    **table("packed; views", "tower", "scheduled", "two classes"),
}
WITH_FUTURES: Tests = {"overlap: step() never called": (overlap.check_no_step, "ours", True)}
# Not "ordinary" with batch norms: DDP broadcasts buffers in its evaluation, between forward and backward.
OVERLAPPED: Tests = {
    **table("overlap", "tower", "ordinary"),
    **table("overlap, torch's DDP", "gpt", "no_sync"),
    **table("overlap", "unused", "closure"),
    **table("overlap, lazy", "convolutions", "scheduled", "masters"),
    **table("overlap; overlap, torch's DDP; overlap, no thread, torch's DDP", "convolutions", "scheduled"),
}


def _cpu_tests() -> Iterator[Case]:
    for tests, setups, how in (
        (ANYWHERE, EVERYWHERE, run),
        (ON_GLOO, (GLOO,), run),
        (ON_ONE_RANK, (NCCL,), run),
        (ON_TWO_RANKS, (GLOO, NCCL_2), run),
        (ON_MORE_RANKS, (GLOO_3, GLOO_4), run),
        (ON_A_MESH, (GLOO_4,), run),
        (WITH_KERNELS, EVERYWHERE, of_kernels),
        (WITH_FUTURES, EVERYWHERE, run_with_futures),
        (OVERLAPPED, EVERYWHERE, overlapped),
    ):
        for name, test in tests.items():
            yield Case(name, how, test, setups)
    for name, (_, row) in table("overlap; overlap, torch's DDP", "convolutions", "scheduled").items():
        yield Case(f"{name}, lazily", overlapped, (parity.assert_row, row, True))
    row = Row("lazy", "tower", "GradScaler", "plain")
    yield Case(f"table: {row}, autocast", under_autocast, (row,))


# ---------------------------------------------------------------------- what only a device has


def _own() -> Iterator[Case]:
    own = (NCCL, NCCL_2)
    for how in ("no backend", "device_id", "backend"):
        yield Case(f"start: {how}, no set_device", starting.started, (how,), own, starts_itself=True)
    yield Case("start: gloo, no set_device", starting.started, ("backend",), (GLOO,), starts_itself=True)
    yield Case("start: launch()", costs.apart, ("launch", {}, "1"), (NCCL,), starts_itself=True)
    for more in (("--stage", "1"), ("--stage", "2"), ("--stage", "3", "--bf16")):
        name = " ".join(("start: examples/train_gpt.py", *more))
        yield Case(name, costs.example, more, (NCCL,), starts_itself=True)
    for background, alone in product((False, True), (False, True)):
        name = f"checkpoint: {'save_async' if background else 'save'}, {'on one rank' if alone else 'load'}"
        setups = (GLOO, NCCL_2) if alone else EVERYWHERE
        yield Case(name, starting.checkpointed, (background, alone), setups)

    for name, dtype in product(kernels.CUT, (torch.float32, torch.bfloat16, torch.float16)):
        about = f"kernels: {name}, cut by rows, {dtype}".replace("torch.", "")
        yield Case(about, kernels.cut_by_rows, (name, dtype), (NCCL,))
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        about = f"kernels: rows added in the order of ranks, {dtype}".replace("torch.", "")
        yield Case(about, kernels.added_at_once, (dtype,), (NCCL,))
    for as_views in (True, False):
        about = "as views" if as_views else "packed"
        yield Case(f"kernels: handle for another process, {about}", kernels.sent, (as_views,))
    for passes, scales in ((1, False), (2, True)):
        name = f"fully sharded, kept on the CPU: {passes} pass{'es, GradScaler' if scales else ''}"
        yield Case(name, offloaded.on_host, (passes, scales))
    yield Case("fully sharded, kept on the CPU: checkpoints", offloaded.saved)

    for number in range(4):
        about = f"{number or 'current'} stream{'s' if number > 1 else ''}"
        yield Case(f"bucketer: {about}", streams.summed, (number,))
    yield Case("bucketer: its process group", streams.lane_works)
    yield Case("overlap: several streams", streams.in_streams)
    for wrapper in ("torch", "ours"):
        yield Case(f"overlap: param.data replaced, {wrapper} DDP", streams.replaced, (wrapper,))


def _first() -> Iterator[Case]:
    yield Case("versions", first.versions, (), (NCCL,), section="versions")
    yield Case("private names", first.private_names, (), (NCCL,), section="versions")
    for recipe, world in product(recipes.OURS, (2, 8)):
        name = f"late loopback of {world}: {recipe}"
        yield Case(name, recipes.late, (recipe, world), (NCCL,), section="late loopback")
    for recipe in ("ZeRO-1", "ZeRO-2", "ZeRO-3"):
        name = f"late loopback of 8: {recipe}, a missing wait is seen"
        yield Case(name, recipes.late_without_waits, (recipe,), (NCCL,), section="late loopback")
    for world in (8, 1024):
        about = f"costs of a rank of {world}: host ms / GPU ms / peak MiB"
        yield Case(about, recipes.cost, (world,), (NCCL,), section="costs")
    for stage in stages.STAGES:
        yield Case(f"memory: {stage}", stages.memory, (stage, 2048, 16), section="memory")
    for recipe in ("zero_step", "ZeRO-3"):
        yield Case(f"trace: {recipe}", first.traced, (recipe,), (NCCL,), section="trace")
    yield Case("raw collectives", first.raw, section="raw collectives")


def _costs() -> Iterator[Case]:
    for kind, world, clips in product(costs.TRAININGS, (1, 2), (False, True)):
        if not (kind in ("DDP", "zero_step") and clips):  # torch.optim cannot clip; overlap refuses it
            about = f"{kind}{', clipped' * clips}{', pretended group of 2' * (world > 1)}"
            yield Case(f"waits: {about}", costs.synchronizations, (kind, clips, int(clips), world), (NCCL,))
    yield Case("waits: both, on two cards", costs.synchronizations, ("both", False, 0, 1), (NCCL_2,))
    for kind, world in product(("both", "zero_step"), (1, 2)):
        about = f"{kind}{', pretended group of 2' * (world > 1)}"
        yield Case(f"sanitizer: {about}", costs.apart, ("watch", {}, kind, str(world)), (NCCL,))
    for allocator in ("backend:cudaMallocAsync", "expandable_segments:True"):
        settings = {"PYTORCH_CUDA_ALLOC_CONF": allocator, "PYTORCH_ALLOC_CONF": allocator}
        yield Case(f"allocator: {allocator}", costs.apart, ("train", settings, "zero_step", "1"), (NCCL,))
    yield Case("speed: an iteration", recipes.speed, (1024, 16, 40))
    yield Case("speed: an iteration, small", recipes.speed, (128, 24, 40), (NCCL, NCCL_2))


def all_cases() -> list[Case]:
    """List the cases in the order of their sections."""
    kinds = {"waits": "waits", "sanitizer": "waits", "speed": "costs"}
    rest = [
        replace(case, section=kinds.get(case.name.partition(":")[0], "the rest"))
        for case in (*_costs(), *_own(), *_cpu_tests())
    ]
    return sorted((*_first(), *rest), key=lambda case: list(SECTIONS).index(case.section))
