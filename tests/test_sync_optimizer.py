"""The optimizer's part of an ordinary iteration: the CPU does not wait for an accelerator.

The classes of ``torch.optim`` are not what is looked at; SGD reads nothing.
"""

from itertools import product
from typing import Any

import pytest
import torch
from torch import nn

from pool import on_ranks
from sync_calls import SyncCall, cpu_as_accelerator, recorded, texts
from training import make_params, set_grads
from zero_optim import ZeroRedundancyOptimizer

WAYS: dict[str, dict[str, Any]] = {
    "views": {},
    "masters and averages, packed": {
        "master_dtype": torch.float32,
        "ema_decay": 0.9,
        "parameters_as_bucket_view": False,
    },
}


def own(calls: list[SyncCall]) -> list[SyncCall]:
    """Leave out where PyTorch brings a factor or a flag to the gradients' device: it is there already."""
    places = [[line for line in call.stack.splitlines() if line.startswith("  File ")][-1] for call in calls]
    theirs = ("clip_grad.py", "grad_scaler.py")
    return [
        call for call, place in zip(calls, places, strict=True) if not any(name in place for name in theirs)
    ]


def begin_iteration() -> None:
    """Run a backward pass, of nothing: what the step before left to be read has come by then."""
    torch.ones(1, requires_grad=True).sum().backward()


@on_ranks(1)
def test_the_cpu_does_not_wait_to_clip_on_one_rank() -> None:
    params = [*make_params(), *make_params(dtype=torch.float64)]
    with cpu_as_accelerator():
        sharded = ZeroRedundancyOptimizer(params, torch.optim.SGD, lr=0.1)
        for step in range(2):
            begin_iteration()
            set_grads(params, step)
            expected = torch.nn.utils.get_total_norm([p.grad for p in params if p.grad is not None])
            with recorded() as calls:
                norm = sharded.clip_grad_norm_(0.5)
            assert not own(calls), texts(own(calls))
            assert torch.allclose(norm.double(), expected.double())


@on_ranks(2)
def test_the_cpu_waits_no_more_in_a_scaled_step_than_the_scaler_does() -> None:
    """With an infinity in the second step. The scaler's own wait is not counted."""
    params = [*make_params(), *make_params(dtype=torch.float64)]
    with cpu_as_accelerator():
        sharded = ZeroRedundancyOptimizer(params, torch.optim.SGD, lr=0.1)
        scaler = torch.amp.GradScaler("cpu")
        scaler.scale(torch.ones(1))
        for step in range(3):
            begin_iteration()
            set_grads(params, step)
            if step == 1:
                params[0].grad[0] = torch.inf  # type: ignore[index]
            with recorded() as calls:
                scaler.step(sharded)
            assert not own(calls), texts(own(calls))
            scaler.update()


@on_ranks(2)
@pytest.mark.parametrize("ways", WAYS)
def test_the_cpu_waits_once_to_clip_and_not_at_all_to_step(ways: str) -> None:
    """Two groups, two dtypes, some frozen; also after a user has written to a parameter."""
    for lazily, max_norm in product((False, True), (None, 0.5)):
        model = nn.ParameterList([*make_params(dtype=torch.bfloat16), *make_params(seed=1)])
        model[1].requires_grad_(False)
        groups = [{"params": list(model)[:4]}, {"params": list(model)[4:], "lr": 0.5}]
        with cpu_as_accelerator():
            sharded = ZeroRedundancyOptimizer(groups, torch.optim.SGD, lr=0.1, momentum=0.9, **WAYS[ways])
            if lazily:
                sharded.gather_lazily(model)
            for step in range(3):
                sharded.zero_grad()
                trained = [p for p in model if p.requires_grad]
                begin_iteration()
                set_grads(trained, step)
                with torch.no_grad():
                    model[0][0] = 0.0
                with recorded() as calls:
                    if max_norm is not None:
                        sharded.clip_grad_norm_(max_norm)
                    sharded.step()
                    sharded.wait_for_gathers()
                    sharded.zero_grad()
                assert len(own(calls)) == (max_norm is not None), texts(own(calls))
