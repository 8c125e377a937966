"""Defects of the past, put back: the model of streams finds each, and names both stacks."""

import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch

from pool import Ranks
from streams_runs import (
    Found,
    Run,
    evaluate_beside,
    join,
    middle_beside,
    on_model,
    reduce_scatters,
    replace_data,
)
from zero_optim.comm import row_sum
from zero_optim.compat.streams import StreamBeside
from zero_optim.ddp import bucketer
from zero_optim.ddp.reducer.stream_order import StreamOrder
from zero_optim.flow import pending
from zero_optim.hooks.stepper import ZeroStep
from zero_optim.iteration import overlap

pytestmark = pytest.mark.on_sockets("the model has an accelerator, whose tensors go through its backend")

Patch = AbstractContextManager[Any]


def nothing(target: object, name: str) -> Callable[[], Patch]:
    """Have a wait or `record_use` do nothing; a mock would keep what it is called with."""
    return partial(mock.patch.object, target, name, lambda *_: None)


def begins_elsewhere() -> Patch:
    begin = ZeroStep._begin

    def on_thread(stepper: ZeroStep, of: Any) -> None:
        def work() -> None:
            with StreamBeside().using(torch.device("cpu")):
                begin(stepper, of)

        thread = threading.Thread(target=work)
        thread.start()
        thread.join()

    return mock.patch.object(ZeroStep, "_begin", on_thread)


PACKED = {"parameters_as_bucket_view": False}
# What is put back; a run; what the two stacks go through.
PLANTED: dict[str, tuple[Callable[[], Patch], dict[str, Any], tuple[str, str]]] = {
    "the thread that steps, on its stream, takes over what the user did to parameters": (
        begins_elsewhere,
        {"overlap": {}, "before": replace_data},
        ("replace_data", "refresh"),
    ),
    "a bucket is launched on the stream of its last gradient, which waits for no other": (
        partial(mock.patch.object, StreamOrder, "of", return_value=None),
        {"before": middle_beside},
        ("train", "take_pending"),
    ),
    "a gather is waited for once, by whatever stream comes first": (
        partial(mock.patch.object, pending.Pending, "_wait_behind", return_value=True),
        {"before": evaluate_beside, "between": join, "lazily": True},
        ("start_gather", "forward"),
    ),
    "the flat tensor of a gather is dropped after a wait on another stream than its own": (
        nothing(pending, "record_use"),
        {"overlap": {}, "options": PACKED},
        ("broadcast|receive", "wait"),  # whichever uses it last on a rank
    ),
    "what ranks sent is dropped after it was added up on another stream than its own": (
        nothing(row_sum, "record_use"),
        {"overlap": {"gradients": "owners"}},
        ("wait", "__call__"),
    ),
    "what came for a reduce-scatter is dropped too early": (
        nothing(row_sum, "record_use"),
        {"after": reduce_scatters},
        ("wait", "reduce_scatters"),
    ),
    "chunks are sent on the stream of a later call, which waits for no other": (
        nothing(bucketer, "wait_for_event"),
        {"after": reduce_scatters},
        ("_chunks", "packed"),
    ),
    "chunks are dropped after another stream than their own has packed them": (
        nothing(bucketer, "record_use"),
        {"after": reduce_scatters},
        ("packed", "reduce_scatters"),
    ),
    "a thread beside the backward pass steps and gathers, on process groups of its own": (
        partial(mock.patch.object, overlap, "may_run_beside", return_value=True),
        {"overlap": {}},
        ("all_reduce", "broadcast"),
    ),
}


def races_with(name: str) -> list[Found]:
    put_back, options, _ = PLANTED[name]
    with ExitStack() as stack:

        def make() -> Run:
            run = Run(**options)
            build = run.build

            def build_with_defect(net: Any) -> None:
                if run.streams is not None:
                    stack.enter_context(put_back())
                build(net)

            run.build = build_with_defect  # type: ignore[method-assign]
            return run

        return on_model(make, is_nccl=True)


@pytest.mark.parametrize("name", PLANTED)
def test_a_defect_that_is_put_back_is_found(ranks2: Ranks, name: str) -> None:
    first, second = PLANTED[name][2]
    for found in ranks2.run(races_with, name):
        sides = [(race.first, race.second) for race in found]
        named = [_names(one, first) and _names(other, second) for one, other in sides]
        assert any(named), "\n".join([f"nothing of {first} and {second} in", *(race.text for race in found)])


def _names(side: tuple[str, ...], name: str) -> bool:
    what, *functions = side
    return any(each in what or each in functions for each in name.split("|"))
