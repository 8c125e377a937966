"""Steps during the backward pass: early buckets are first; reads, replaced parameters and failures."""

import threading
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook

from overlap import (
    Grads,
    Setting,
    assert_same_run,
    both_wrappers,
    either_way,
    grads_of,
    inputs,
    loss_of,
    plain_step,
)
from pool import on_ranks
from zero_optim import RemoteRankError, ZeroRedundancyOptimizer
from zero_optim.hooks import passes
from zero_optim.iteration import overlap
from zero_optim.iteration.overlap import Overlap


class Mark(torch.autograd.Function):
    """Notes when the backward pass comes by, and holds it up until something has happened."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, until: threading.Event) -> Tensor:
        ctx.until = until
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        assert ctx.until.wait(150), "nothing was stepped while the backward pass ran"
        return grad, None


class Held(nn.Module):
    """Many layers; the backward pass of the first ones waits for a step of the last ones."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(4)
        self.layers = nn.ModuleList(nn.Linear(18, 18) for _ in range(12))

    def forward(self, x: Tensor, until: threading.Event) -> Tensor:
        hidden = x.flatten(1)
        for index, layer in enumerate(self.layers):
            hidden = layer(hidden).tanh()
            if index == 3:
                hidden = Mark.apply(hidden, until)
        return hidden


class TracedSGD(torch.optim.SGD):
    """Tells of each step, and on which thread it runs."""

    stepped: threading.Event
    trace: list[tuple[str, str]]

    def step(self, closure: Any = None) -> Any:
        result = super().step(closure)
        self.trace.append(("step", threading.current_thread().name))
        self.stepped.set()
        return result


@on_ranks(2)
@both_wrappers
def test_early_buckets_are_stepped_before_backward_ends(wrapper: str) -> None:
    TracedSGD.stepped, TracedSGD.trace = threading.Event(), []
    trace = TracedSGD.trace

    def hook(state: object, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
        trace.append(("reduce", threading.current_thread().name))
        return allreduce_hook(None, bucket)

    def traced(model: nn.Module) -> ZeroRedundancyOptimizer:
        return ZeroRedundancyOptimizer(model.parameters(), TracedSGD, lr=0.1, bucket_cap_mb=0.001)

    model, optimizer = Setting(wrapper, Held, traced, hook=lambda: (None, hook)).build(overlap=True)
    for number in range(3):
        TracedSGD.stepped.clear()
        trace.clear()
        if number == 0:  # either DDP has one bucket for all in its first pass
            TracedSGD.stepped.set()
            model(inputs(number), TracedSGD.stepped).square().mean().backward()
            optimizer.step()
            continue
        loss = model(inputs(number), TracedSGD.stepped).square().mean()
        loss.backward()  # ends only if something is stepped, here and on the other ranks, before it has ended
        trace.append(("end", threading.current_thread().name))
        kinds = [kind for kind, _ in trace]
        assert kinds.index("step") < len(kinds) - 1 - kinds[::-1].index("reduce"), kinds
        assert kinds[-1] == "end"
        assert {thread for kind, thread in trace if kind == "step"} == {"zero_step"}
        optimizer.step()
        assert trace[-1][0] == "end"  # step() had nothing left to do


# ---------------------------------------------------------------------- reads that come too late


class StaleRead(nn.Module):
    """Reads a weight in the backward pass of its first layer, when that weight's gradient is complete."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(6)
        self.first = nn.Linear(18, 6, bias=False)
        self.others = nn.ModuleList(nn.Linear(6, 6) for _ in range(4))

    def forward(self, x: Tensor, read: int | None) -> Tensor:
        hidden = self.first(x.flatten(1)).tanh()
        if read is not None:
            hidden = hidden @ self.others[read].weight.detach()  # no gradient for it here
        for layer in self.others:
            hidden = layer(hidden).tanh()
        return hidden


@on_ranks(2)
@both_wrappers
def test_the_last_gather_of_a_pass_tells_of_failures_and_no_other_message_does(wrapper: str) -> None:
    model, optimizer = Setting(wrapper).build(overlap=True)
    for step in range(3):
        with mock.patch.object(overlap, "start_header", side_effect=AssertionError):
            loss_of(model, step).backward()
        optimizer.step()
        optimizer.zero_grad()


@on_ranks(2)
@both_wrappers
def test_a_backward_pass_that_reads_what_was_stepped_raises_on_every_rank(wrapper: str) -> None:
    options = {"bucket_cap_mb": 0.0001}  # one layer each
    for read in range(4):  # weights of this rank and of the other
        model, optimizer = Setting(wrapper, StaleRead, options=options).build(overlap=True)
        model(inputs(0), None).square().mean().backward()  # one bucket for all in the first pass of PyTorch's
        optimizer.step()
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            model(inputs(0), read).square().mean().backward()
        optimizer.wait_for_gathers()


# ---------------------------------------------------------------------- parameters that the user replaced


def replacing(model: nn.Module, optimizer: ZeroRedundancyOptimizer, step: int) -> Grads:
    """Replace ``param.data`` of some before the forward pass, of others between it and the backward pass."""
    optimizer.zero_grad()
    params = list(model.parameters())
    for param in params[step % 3 :: 3]:
        param.data = param.data.clone()
    loss = loss_of(model, step)
    for param in params[(step + 1) % 3 :: 3]:
        param.data = param.data.clone()
    loss.backward()
    grads = grads_of(model)
    optimizer.step()
    return grads


@on_ranks(2)
@both_wrappers
def test_parameters_whose_data_the_user_replaced_give_the_same_bits(wrapper: str) -> None:
    assert_same_run(Setting(wrapper), replacing, 4)


def with_two_more(model: nn.Module) -> ZeroRedundancyOptimizer:
    more = [nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(4, dtype=torch.float64))]
    return ZeroRedundancyOptimizer([*more, *model.parameters()], torch.optim.SGD, lr=0.1)


@on_ranks(2)
def test_a_parameter_that_does_not_fit_any_more_raises_when_backward_ends() -> None:
    """It is none of those that DDP holds, on one rank."""
    model, optimizer = Setting("ours", optimizer=with_two_more).build(overlap=True)
    plain_step(model, optimizer, 0)
    odd = next(iter(optimizer.owners()))
    optimizer.zero_grad()
    fits, is_odd = odd.data, dist.get_rank() == 1
    if is_odd:
        odd.data = torch.ones(5)
    expected = "a parameter became" if is_odd else "rank 1 failed with RuntimeError in backward"
    with pytest.raises(RuntimeError if is_odd else RemoteRankError, match=expected):
        loss_of(model, 1).backward()
    odd.data = fits
    optimizer.step()
    assert all(param.grad is not None for param in model.parameters())
    plain_step(model, optimizer, 2)


# ---------------------------------------------------------------------- errors anywhere


def raises_once(original: Any) -> Any:
    left = [True]

    def failing(*args: Any, **kwargs: Any) -> Any:
        if left.pop() if left else False:
            raise ArithmeticError("something failed")
        return original(*args, **kwargs)

    return failing


POINTS: dict[str, tuple[Any, str]] = {
    "beginning": (Overlap, "begin"),
    "receiving": (passes.SteppedBucket, "receive"),
    "gradients": (passes, "_gradients_in"),
    "marking use": (passes, "record_use"),
    "counting": (passes.SteppedPass, "take"),
    "stepping": (passes.SteppedPass, "step"),
}


@on_ranks(1)
@either_way
def test_an_error_at_any_point_is_raised_when_backward_has_ended(inline: bool) -> None:
    for place, name in POINTS.values():
        with pytest.MonkeyPatch.context() as patch:
            model, optimizer = Setting("ours").build(overlap=True)
            for number in range(2):
                plain_step(model, optimizer, number)
            patch.setattr(place, name, raises_once(getattr(place, name)))
            optimizer.zero_grad()
            with pytest.raises(ArithmeticError, match="something failed"):
                loss_of(model, 2).backward()
            assert all(param.grad is not None for param in model.parameters()), "DDP has ended the pass"
            optimizer.step()
