"""Cases: tests of the CPU's suite, run on the device as they are; see `on_device`.

Each is the function that a test runs on its ranks. It compares bits with the unsharded run, or with the stage
below. Here every layer sleeps too, in the forward and the backward pass.
"""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules import module as every_module

import test_ddp_mixed_precision as casts
import test_fully_sharded as parameters
import test_fully_sharded_made as made
import test_fully_sharded_odd as odd
import test_fully_sharded_precision as precision
import test_fully_sharded_state as state
import test_mesh as mesh
import test_overlap_training as overlap
import test_sharded_accumulation as accumulation
import test_sharded_training as gradients
from fully import NARROW
from gpu.setting import Here, need_futures
from on_device import on_device
from parity import assert_row
from parity_runs import Row
from sharded import Setting, cut_adamw
from sync_calls import cpu_as_accelerator
from test_fully_sharded_forms import trains_as_optimizer_first
from zero_optim.ddp import PrecisionPolicy

Run = tuple[Any, ...]  # the function of a test, and its arguments

FOLDER = Path("an empty folder")  # stands for one among the arguments
WIDE = PrecisionPolicy(*[torch.float32] * 5, "units")

# Of the table of parity.
ROWS = (
    Row("packed", "dtypes", "ordinary", "plain"),
    Row("packed", "complex", "ordinary", "momentum, averages"),
    Row("packed", "tower", "GradScaler", "fused, one bucket"),
    Row("views", "tower", "clipped", "masters"),
    Row("views", "many tiny", "freezing", "two classes"),
    Row("lazy", "convolutions", "clipped", "plain"),
    Row("lazy", "tower", "ordinary", "plain"),
    Row("our DDP alone", "gpt", "no_sync", "gradients as views"),
    Row("our DDP alone", "tower", "ordinary", "static graph"),
    Row("our DDP alone", "reentrant checkpoints", "ordinary", "plain"),
    Row("our DDP alone", "unused", "ordinary", "gradients as views"),
    Row("our DDP alone", "tower", "ordinary", "mixed precision"),
    Row("views", "tower", "Join", "plain"),
    Row("gradients", "tower", "ordinary", "mixed precision"),
    Row("gradients", "sparse", "ordinary", "plain"),
    Row("gradients", "unused", "clipped", "momentum, averages"),
    Row("gradients", "tower", "freezing", "plain"),
    Row("gradients", "gpt", "no_sync", "plain"),
    Row("gradients", "reentrant checkpoints", "closure", "plain"),
    Row("gradients", "convolutions", "GradScaler", "plain"),
    Row("fully", "tied", "ordinary", "static graph"),
    Row("fully", "dtypes", "ordinary", "plain"),
    Row("fully", "unused", "clipped", "plain"),
    Row("fully", "gpt", "no_sync", "masters"),
    Row("fully", "reentrant checkpoints", "GradScaler", "plain"),
)

ROWS_WITH_HOOKS = (
    Row("overlap", "tower", "ordinary", "plain"),
    Row("overlap, torch's DDP", "gpt", "no_sync", "plain"),
    Row("overlap, owners", "unused", "closure", "plain"),
    Row("overlap, lazy", "convolutions", "ordinary", "masters"),
    Row("to owners", "tower", "clipped", "plain"),
)

ONE_OR_TWO_RANKS: dict[str, Run] = {
    **{f"table: {row}": (assert_row, row) for row in ROWS},
    "mixed precision: every policy": (casts.test_training_gives_the_bits_of_a_run_by_hand, {}),
    "parameters: units kept": (parameters.test_units_that_stay_have_the_bits_of_whole_parameters, "", False),
    "parameters: LoRA": (parameters.test_adapters_train_alike, True, ""),
    "parameters: LoRA, checkpointing": (parameters.test_adapters_train_alike, True, "not reentrant"),
    "parameters: LoRA, base on every rank": (parameters.test_adapters_train_alike, False, ""),
    "parameters: optimizer built later": (
        made.test_an_optimizer_that_is_built_later_gives_the_bits_of_one_built_before,
        True,
    ),
    "parameters: odd ones": (made.test_parameters_of_any_form_become_units, False),
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

WITH_FUTURES: dict[str, Run] = {
    **{f"table: {row}": (assert_row, row) for row in ROWS_WITH_HOOKS},
    "overlap: step() never called": (overlap.check_no_step, "ours", True),
}

ONE_RANK: dict[str, Run] = {"parameters: save, load, evaluate": (state.test_one_rank_alone, FOLDER)}

TWO_RANKS: dict[str, Run] = {
    "gradients: cut": (gradients.trains_alike, Setting(optimizer=cut_adamw)),
    "parameters: bf16, cut": (precision.test_cut_parameters_keep_the_bits,),
    "parameters: units on their way": (parameters.test_only_what_is_used_or_next_is_there, True, 0),
    "parameters: bf16, built later": (trains_as_optimizer_first, ["wrapper", "dtypes"], FOLDER, "AdamW"),
}

MORE_RANKS: dict[str, Run] = {  # the sums of the reference are made in the order of ranks
    "gradients: order of sums": (gradients.summed_in_rank_order,),
    "gradients: order of sums, passes on owners": (accumulation.adds_up, "owner"),
    "gradients: order of sums, passes on ranks": (accumulation.adds_up, "local"),
    "parameters: order of sums, float32": (
        precision.test_bits_are_those_of_masters,
        WIDE,
        "not reentrant",
        2,
        False,
    ),
    "parameters: order of sums, bf16": (precision.test_bits_are_those_of_masters, NARROW, "", 2, False),
}

MESHES: dict[str, Run] = {  # of two replicas of two ranks
    **{
        f"mesh: {stage}, {loop}": (assert_row, Row(stage, "tower", loop, "mesh"))
        for stage in ("gradients", "fully", "fully, state over all")
        for loop in ("ordinary", "adding", "GradScaler")
    },
    "mesh: unused": (mesh.test_ranks_of_all_replicas_agree_about_buffers_and_unused_parameters,),
    "mesh: bf16": (trains_as_optimizer_first, ["wrapper", "mesh", "dtypes"], FOLDER, "AdamW"),
}


def run(here: Here, function: Any, *args: object) -> None:
    """Run a test's function on the device."""
    folder = here.folder / "empty"
    folder.mkdir(exist_ok=True)
    likewise = nullcontext() if here.is_cuda else cpu_as_accelerator()  # the library's code for devices
    with on_device(here.device), layers_asleep(here), likewise:
        function(*(str(folder) if arg == FOLDER else arg for arg in args))


def run_with_futures(here: Here, function: Any, *args: object) -> None:
    """Run a test's function where comm hooks can work."""
    need_futures(here)
    run(here, function, *args)


@contextmanager
def layers_asleep(here: Here) -> Iterator[None]:
    """Have each layer's forward and backward pass begin behind a kernel that sleeps."""

    def sleep(*_: object) -> None:
        here.sleep(0.2)

    def sleep_on_the_way_back(_: nn.Module, __: object, output: object) -> None:
        if isinstance(output, Tensor) and output.requires_grad:
            output.register_hook(sleep)  # type: ignore[no-untyped-call]

    handles = [
        every_module.register_module_forward_pre_hook(sleep),
        every_module.register_module_forward_hook(sleep_on_the_way_back),
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
