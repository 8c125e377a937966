"""What happens when: order under random delays, overlap seen in a trace, and reads of changed parameters."""

import random
import threading
import time
from itertools import product
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook

from overlap import (
    Grads,
    Net,
    Setting,
    assert_same_params,
    assert_same_run,
    both_wrappers,
    either_way,
    inputs,
    loss_of,
    plain_step,
    run_either_way,
)
from pool import on_ranks
from zero_optim import ZeroRedundancyOptimizer

LONGEST_DELAY = 0.02  # seconds


def delayed_hook(state: random.Random, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
    """Average, and complete the future late by a random time, in no order."""
    done: torch.futures.Future[Tensor] = torch.futures.Future()
    delay, future = state.random() * LONGEST_DELAY, allreduce_hook(None, bucket)

    def wait() -> None:
        value = future.wait()
        time.sleep(delay)
        done.set_result(value)

    threading.Thread(target=wait, daemon=True).start()
    return done


def step_slowly(model: nn.Module, optimizer: ZeroRedundancyOptimizer, step: int) -> Grads:
    """Ranks differ in when they come to the backward pass, too."""
    if dist.get_rank() == step % dist.get_world_size():
        time.sleep(LONGEST_DELAY)
    return plain_step(model, optimizer, step)


class Deep(nn.Module):
    """Many layers, hence many buckets."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(4)
        self.layers = nn.ModuleList(nn.Linear(18, 18) for _ in range(12))

    def forward(self, x: Tensor) -> Tensor:
        hidden = x.flatten(1)
        for layer in self.layers:
            hidden = layer(hidden).tanh()
        return hidden


@on_ranks(4)
@both_wrappers
def test_any_timing_gives_the_same_bits_on_four_ranks(wrapper: str) -> None:
    def hook() -> tuple[object, Any]:
        return random.Random(dist.get_rank()), delayed_hook

    for interleave in (True, False):
        setting = Setting(wrapper, Deep, hook=hook, zero={"interleave": interleave})
        assert_same_run(setting, step_slowly, 4, where=interleave)


# ---------------------------------------------------------------------- a trace


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


class Held(Deep):
    """The backward pass of the first layers waits for a step of the last ones."""

    def forward(self, x: Tensor, until: threading.Event) -> Tensor:  # type: ignore[override]
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
def test_a_backward_pass_that_reads_what_was_stepped_raises_on_every_rank(wrapper: str) -> None:
    options = {"bucket_cap_mb": 0.0001}  # one layer each
    for interleave, read in product((True, False), range(4)):  # weights of this rank and of the other
        setting = Setting(wrapper, StaleRead, options=options, zero={"interleave": interleave})
        model, optimizer = setting.build(overlap=True)
        model(inputs(0), None).square().mean().backward()  # one bucket for all in the first pass of PyTorch's
        optimizer.step()
        loss = model(inputs(0), read).square().mean()
        if interleave:
            with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                loss.backward()
        else:
            loss.backward()
        optimizer.wait_for_gathers()


@on_ranks(2)
def test_a_graph_from_before_the_step_is_not_walked_again() -> None:
    model, optimizer = Setting().build(overlap=True)
    loss = loss_of(model, 0)
    loss.backward(retain_graph=True)
    optimizer.step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


# ---------------------------------------------------------------------- rebuilt buckets


def check_rebuilding(wrapper: str) -> None:
    """Buckets differ between the first pass and later ones; owners stay."""
    seen: list[list[tuple[int, ...]]] = []

    def hook(state: object, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
        if bucket.index() == 0:
            seen.append([])
        seen[-1].append(tuple(map(id, bucket.parameters())))
        return allreduce_hook(None, bucket)

    setting = Setting(wrapper, model=Backwards, hook=lambda: (None, hook))
    (plain, one), (model, other) = setting.build(overlap=False), setting.build(overlap=True)
    owners = list(other.owners().values())
    for number in range(4):
        plain_step(plain, one, number)
        seen.clear()
        plain_step(model, other, number)
        assert len(seen) == 1
        assert number == 0 or len(seen[0]) > 3
        if number == 0:
            first = seen[0]
        assert_same_params(model, plain, number)
    assert seen[0] != first
    assert list(other.owners().values()) == owners


class Backwards(Net):
    """Layers stand in another order than they are used in."""

    def __init__(self) -> None:
        super().__init__()
        self.head, self.conv = self._modules.pop("head"), self._modules.pop("conv")


@on_ranks(2)
@either_way
@both_wrappers
def test_rebuilt_buckets_give_the_same_bits_and_keep_their_owners(wrapper: str, inline: bool) -> None:
    run_either_way(inline, check_rebuilding, wrapper)
