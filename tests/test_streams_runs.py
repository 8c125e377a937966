"""Whole runs on the model of streams: all that the library does is in order, and planted races are found."""

import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook

from pool import Ranks, on_ranks
from streams_runs import (
    Found,
    Run,
    assert_ordered,
    break_a_pass,
    clip,
    clip_after_another_pass,
    clip_on_device,
    consolidate,
    evaluate_beside,
    join,
    leave_middle_out,
    middle_beside,
    on_model,
    recompute,
    reduce_scatters,
    replace_data,
    save,
)
from zero_optim.compat.streams import StreamBeside
from zero_optim.ddp import PrecisionPolicy, bucketer
from zero_optim.ddp.reducer import backward_pass
from zero_optim.ddp.reducer.gradient_bucket import ReducerBucket
from zero_optim.flow import pending
from zero_optim.hooks.passes import SteppedPass
from zero_optim.iteration import overlap

pytestmark = pytest.mark.on_sockets("the model has an accelerator, whose tensors go through its backend")

EVERYWHERE: dict[str, Any] = {"overlap": {}}
LAZILY: dict[str, Any] = {"lazily": True}
PACKED: dict[str, Any] = {"options": {"parameters_as_bucket_view": False}}
MASTERS: dict[str, Any] = {"options": {"master_dtype": torch.float64, "ema_decay": 0.9}}
UNUSED: dict[str, Any] = {"ddp_options": {"find_unused_parameters": True}}
STATIC: dict[str, Any] = {"ddp_options": {"static_graph": True}}
VIEWS: dict[str, Any] = {"ddp_options": {"gradient_as_bucket_view": True}}
TWO_STREAMS: dict[str, Any] = {"before": middle_beside}
REPLACED: dict[str, Any] = {"before": replace_data}
EVALUATED: dict[str, Any] = {"before": evaluate_beside, "between": join}  # beside what is between two steps
EVALUATED_BETWEEN: dict[str, Any] = {"between": evaluate_beside, "after": join}
LEFT_OUT: dict[str, Any] = {"before": leave_middle_out}
STAGES: dict[str, dict[str, Any]] = {
    "averaged gradients": {},
    "lazy gathers": LAZILY,
    "zero_step": EVERYWHERE,
    "sharded gradients": {"sharded": {}},
    "sharded parameters": {"fully": {}},
}
# What a user may add to each stage.
LOOPS: dict[str, dict[str, Any]] = {
    "reentrant checkpointing": {"prepare": partial(recompute, True)},
    "checkpointing": {"prepare": partial(recompute, False)},
    "GradScaler": {"scales": True},
    "no_sync": {"accumulates": True},
    "LoRA": {"is_frozen": True},
    "a pass that raises": {"before": break_a_pass},
}
KEPT = {"reshard_after_forward": False}
SEARCHING = {"find_unused_parameters": True}

RUNS: dict[str, dict[str, Any]] = {
    "zero_step": EVERYWHERE,
    "lazy gathers": LAZILY,
    "zero_step and lazy gathers": EVERYWHERE | LAZILY,
    "packed gathers": PACKED,
    "masters and averages": MASTERS,
    "two streams in a model": TWO_STREAMS,
    "replaced data": REPLACED,
    "an evaluation beside lazy gathers": EVALUATED | LAZILY,
    "gradients as views of buckets": VIEWS,
    "perhaps unused parameters": UNUSED,
    "a static graph": STATIC,
    "clipping, norms on the device": {"after": clip_on_device},
    "sharded gradients, clipping": {"sharded": {}, "after": clip} | LAZILY,
    "sharded gradients, two streams in a model": {"sharded": {}} | TWO_STREAMS,
    "sharded gradients, two passes": {"sharded": {}, "after": clip_after_another_pass},
    "sharded parameters kept": {"fully": KEPT, "after": clip},
    "sharded parameters, two passes": {"fully": {}, "after": clip_after_another_pass},
    "sharded parameters, two streams in a model": {"fully": {}} | TWO_STREAMS,
    "sharded parameters, an evaluation beside": {"fully": {}} | EVALUATED,
    "sharded parameters, an evaluation between both passes": {"fully": {}} | EVALUATED_BETWEEN,
    "sharded parameters in another dtype": {
        "fully": {"mixed_precision": PrecisionPolicy(params=torch.bfloat16)}
    },
    "sharded parameters, a save beside": {"fully": {}, "before": save},
    "zero_step, unused on one rank": LEFT_OUT | UNUSED | EVERYWHERE,
    "sharded gradients, unused on one rank": LEFT_OUT | {"sharded": SEARCHING},
    "sharded parameters, unused on one rank": LEFT_OUT | {"fully": SEARCHING},
    "consolidation": {"before": consolidate},
    "reduce-scatters on two streams": {"after": reduce_scatters},
    "fp16": {"hook": fp16_compress_hook},
}

IN_LOOPS = {
    f"{stage}, {loop}": of_stage | of_loop
    for stage, of_stage in STAGES.items()
    for loop, of_loop in LOOPS.items()
    if not (
        loop == "GradScaler" and "zero_step" in stage
    )  # it raises: the step is over before the scaler looks
}


@on_ranks(2)
@pytest.mark.parametrize("name", [*RUNS, *(pytest.param(name, marks=pytest.mark.slow) for name in IN_LOOPS)])
def test_a_run_is_ordered(name: str) -> None:
    # A save that goes on uses a process group of gloo's, beside whatever else there is.
    assert_ordered(is_nccl="a save beside" not in name, **(RUNS | IN_LOOPS)[name])


@on_ranks(4)
@pytest.mark.slow
@pytest.mark.parametrize("stage", ["sharded gradients", "sharded parameters"])
@pytest.mark.parametrize("loop", ["plain", "checkpointing", "GradScaler", "no_sync", "LoRA"])
def test_a_run_over_a_mesh_is_ordered(stage: str, loop: str) -> None:
    assert_ordered(**STAGES[stage], **LOOPS.get(loop, {}), replicas=2)


# ---------------------------------------------------------------------- races that are put back

Patch = AbstractContextManager[Any]


def nothing(target: object, name: str) -> Callable[[], Patch]:
    """Have a wait or `record_use` do nothing; a mock would keep what it is called with."""
    return partial(mock.patch.object, target, name, lambda *_: None)


def begins_elsewhere() -> Patch:
    begin = SteppedPass.begin

    def on_thread(of: SteppedPass, optimizer: Any) -> None:
        def work() -> None:
            with StreamBeside().using(torch.device("cpu")):
                begin(of, optimizer)

        thread = threading.Thread(target=work)
        thread.start()
        thread.join()

    return mock.patch.object(SteppedPass, "begin", on_thread)


# What is put back; a run; what the two stacks go through.
PLANTED: dict[str, tuple[Callable[[], Patch], dict[str, Any], tuple[str, str]]] = {
    "the thread that steps, on its stream, takes over what the user did to parameters": (
        begins_elsewhere,
        EVERYWHERE | REPLACED,
        ("replace_data", "refresh"),
    ),
    "a bucket is launched on the stream of its last gradient, which waits for no other": (
        partial(mock.patch.object, backward_pass, "is_asynchronous", return_value=False),
        TWO_STREAMS,
        ("train", "take_pending"),
    ),
    "gradients are dropped after another stream than their own has copied them": (
        nothing(ReducerBucket, "record_use"),
        RUNS["sharded gradients, two streams in a model"],
        ("_foreach_copy_", "being freed"),
    ),
    "a gather is waited for once, by whatever stream comes first": (
        partial(mock.patch.object, pending.Pending, "_wait_behind", return_value=True),
        EVALUATED | LAZILY,
        ("start_gather", "forward"),
    ),
    "the flat tensor of a gather is dropped after a wait on another stream than its own": (
        nothing(pending, "record_use"),
        EVERYWHERE | PACKED,
        ("broadcast|receive", "wait"),  # whichever uses it last on a rank
    ),
    "what came for a reduce-scatter is dropped too early": (
        nothing(pending, "record_use"),
        RUNS["reduce-scatters on two streams"],
        ("wait", "reduce_scatters"),
    ),
    "chunks are sent on the stream of a later call, which waits for no other": (
        nothing(bucketer, "wait_for_event"),
        RUNS["reduce-scatters on two streams"],
        ("_chunks", "start_sum"),
    ),
    "chunks are dropped after another stream than their own has packed them": (
        nothing(bucketer, "record_use"),
        RUNS["reduce-scatters on two streams"],
        ("start_sum", "reduce_scatters"),
    ),
    "a thread beside the backward pass steps and gathers, on process groups of its own": (
        partial(mock.patch.object, overlap, "may_run_beside", return_value=True),
        EVERYWHERE,
        ("broadcast", "all_reduce"),
    ),
}


def races_with(name: str) -> list[Found]:
    put_back, run, _ = PLANTED[name]
    return on_model(lambda: Run(**run), put_back, is_nccl=True)


@pytest.mark.parametrize("name", PLANTED)
def test_a_race_that_is_put_back_is_found_with_both_stacks(ranks2: Ranks, name: str) -> None:
    first, second = PLANTED[name][2]
    for found in ranks2.run(races_with, name):
        named = [_names(race.first, first) and _names(race.second, second) for race in found]
        assert any(named), "\n".join([f"nothing of {first} and {second} in", *(race.text for race in found)])


def _names(side: tuple[str, ...], name: str) -> bool:
    what, *functions = side
    return any(each in what or each in functions for each in name.split("|"))
