"""Steps that come too late, failures on one rank, and what is left when hook and DDP go."""

import copy
import gc
import pickle
import threading
import weakref
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook

from breaking import BreaksAnywhere, Stops, in_backward_of
from overlap import (
    Net,
    Setting,
    adamw,
    assert_same_params,
    both_wrappers,
    either_way,
    inputs,
    loss_of,
    plain_step,
)
from pool import on_ranks
from training import assert_equal_on_all_ranks
from waiting import LIMIT
from zero_optim import ZeroRedundancyOptimizer
from zero_optim.ddp import DistributedDataParallel
from zero_optim.errors import RemoteRankError
from zero_optim.hooks import zero_step

# ---------------------------------------------------------------------- too late


def clip_by_optimizer(model: nn.Module, optimizer: ZeroRedundancyOptimizer) -> None:
    optimizer.clip_grad_norm_(0.1)


def clip_by_torch(model: nn.Module, optimizer: ZeroRedundancyOptimizer) -> None:
    nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    optimizer.step()


def drop_some_gradients(model: nn.Module, optimizer: ZeroRedundancyOptimizer) -> None:
    for param in list(model.parameters())[-2:]:
        param.grad = None
    optimizer.step()


def scale(model: nn.Module, optimizer: ZeroRedundancyOptimizer) -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    scaler.scale(torch.ones(()))
    scaler.step(optimizer)


def second_pass(model: nn.Module, optimizer: ZeroRedundancyOptimizer) -> None:
    loss_of(model, 99).backward()
    optimizer.step()


TOO_LATE: dict[str, tuple[Callable[[nn.Module, ZeroRedundancyOptimizer], None], str]] = {
    "clip_grad_norm_ of ours": (clip_by_optimizer, "too early to clip"),
    "clip_grad_norm_ of PyTorch": (clip_by_torch, "gradients were changed, clipped or unscaled perhaps"),
    "some gradients dropped": (drop_some_gradients, "gradients were taken from some parameters after"),
    "GradScaler": (scale, "too early for GradScaler"),
    "two backward passes": (second_pass, "2 backward passes were reduced before step"),
}


@on_ranks(2)
@both_wrappers
def test_what_comes_too_late_raises_on_every_rank(wrapper: str) -> None:
    for name, (act, message) in TOO_LATE.items():
        model, optimizer = Setting(wrapper).build(overlap=True)
        for number in range(3):
            optimizer.zero_grad()
            loss_of(model, number).backward()
            with pytest.raises(RuntimeError, match=message):
                act(model, optimizer)
            if act is clip_by_optimizer or (act is second_pass and number):
                optimizer.step()
        plain_step(model, optimizer, 50)
        assert_equal_on_all_ranks(model.parameters(), name)


# ---------------------------------------------------------------------- failures


HEARD = r"failed with ArithmeticError in backward\(\)"


class FailingSGD(torch.optim.SGD):
    """Fails on the rank that owns what is marked."""

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for param in group["params"]:
                if getattr(param, "fails", False) and param.grad is not None:
                    raise ArithmeticError("the step failed")
        return super().step(closure)


def sgd(model: nn.Module) -> ZeroRedundancyOptimizer:
    return ZeroRedundancyOptimizer(model.parameters(), FailingSGD, lr=0.1, bucket_cap_mb=0.001)


def assert_goes_on(model: Any, optimizer: Any, number: int, late: bool, heard: str) -> None:
    with pytest.raises(RemoteRankError, match=heard) if heard else nullcontext():
        plain_step(model, optimizer, number)
    if late:
        plain_step(model, optimizer, number + 1)
    assert_equal_on_all_ranks(model.parameters(), "afterwards")


@on_ranks(2)
@either_way
@both_wrappers
def test_a_step_that_fails_on_one_rank_raises_in_the_backward_pass_of_all(wrapper: str, inline: bool) -> None:
    """Inline, other ranks hear of a pass when the next one ends, as on an accelerator."""
    zero = {"interleave": wrapper == "ours"}
    model, optimizer = Setting(wrapper, optimizer=sgd, zero=zero).build(overlap=True)
    plain_step(model, optimizer, 0)
    marked = model.module.layers[2].weight
    fails_here = optimizer.owners()[marked] == dist.get_rank()
    marked.fails = True
    for number in (1, 2):
        optimizer.zero_grad()
        error, match = (ArithmeticError, "the step failed") if fails_here else (RemoteRankError, HEARD)
        hears = fails_here or not inline or number > 1
        with pytest.raises(error, match=match) if hears else nullcontext():
            loss_of(model, number).backward()
        assert all(param.grad is not None for param in model.parameters())
        optimizer.step()
        assert_equal_on_all_ranks(model.parameters(), number)
    marked.fails = False
    assert_goes_on(model, optimizer, 3, inline, HEARD if inline and not fails_here else "")


@on_ranks(2)
def test_a_rank_whose_buckets_are_frozen_hears_of_a_step_that_fails() -> None:
    """Only rank 0 has rows in what is gathered, so its stamp is the only one."""
    rank, model = dist.get_rank(), nn.ModuleList(nn.Linear(8, 8, bias=False) for _ in range(2))
    optimizer = ZeroRedundancyOptimizer(
        model.parameters(), BreaksAnywhere, lr=0.1, bucket_cap_mb=1e-4, cuts=False
    )
    for param, owner in optimizer.owners().items():
        param.requires_grad_(owner == 0)
    ddp = DistributedDataParallel(nn.Sequential(*model))
    ddp.register_comm_hook(None, zero_step(optimizer))
    for fails in (False, True, False):
        optimizer.optim.breaks = fails and rank == 0
        with pytest.raises(RemoteRankError if rank else ArithmeticError) if fails else nullcontext():
            ddp(torch.ones(2, 8)).sum().backward()
            optimizer.step()
        optimizer.zero_grad()


@on_ranks(2)
@either_way
@both_wrappers
def test_a_reduction_that_fails_on_one_rank_raises_in_the_backward_pass_of_all(
    wrapper: str, inline: bool
) -> None:
    """The future of one bucket fails on one rank, after its collective."""
    fails = [False]

    def hook(state: object, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
        def read(future: torch.futures.Future[Tensor]) -> Tensor:
            if fails[0] and number == 1 and dist.get_rank() == 1:
                raise ArithmeticError("the hook failed")
            return future.value()

        number = bucket.index()
        return allreduce_hook(None, bucket).then(read)

    model, optimizer = Setting(wrapper, hook=lambda: (None, hook)).build(overlap=True)
    plain_step(model, optimizer, 0)
    fails[0] = True
    optimizer.zero_grad()
    fails_here, heard = dist.get_rank() == 1, r"rank 1 failed with"
    expected = pytest.raises(Exception, match="the hook failed" if fails_here else heard)
    with expected if fails_here or not inline else nullcontext():
        loss_of(model, 1).backward()
    optimizer.step()
    assert_equal_on_all_ranks(model.parameters(), "failed")
    fails[0] = False
    assert_goes_on(model, optimizer, 2, inline, heard if inline and not fails_here else "")


class Breaking(Net):
    """Its backward pass may break off in its middle."""

    def forward(self, x: Tensor, breaks: bool = False) -> Tensor:
        hidden = self.norm(self.conv(x)).relu().flatten(1)
        hidden = in_backward_of(Stops.place, hidden) if breaks else hidden
        return self.head(self.spare(self.layers(hidden)))


def run_broken_off() -> tuple[nn.Module, ZeroRedundancyOptimizer]:
    """An overlapped run whose second backward pass has broken off."""
    model, optimizer = Setting("ours", model=Breaking).build(overlap=True)
    plain_step(model, optimizer, 0)
    optimizer.zero_grad()
    with pytest.raises(ArithmeticError, match="on purpose"):
        model(inputs(1), True).sum().backward()
    return model, optimizer


def assert_trains_on(model: nn.Module, optimizer: ZeroRedundancyOptimizer) -> None:
    for number in range(2):
        plain_step(model, optimizer, 3 + number)
        assert_equal_on_all_ranks(model.parameters(), number)


def check_broken_off(waits: bool) -> None:
    """With our DDP, which recovers from a pass that broke off."""
    model, optimizer = run_broken_off()
    if waits:
        optimizer.wait_for_gathers()
    optimizer.zero_grad()
    with pytest.raises(RuntimeError, match="ended with an exception"):
        loss_of(model, 2).backward()
    if waits:
        optimizer.wait_for_gathers()
    else:
        optimizer.zero_grad()
        with pytest.raises(RuntimeError, match="the last backward pass failed"):
            loss_of(model, 2).backward()
    assert_trains_on(model, optimizer)


def check_broken_off_late(waits: bool) -> None:
    """As `check_broken_off`, where DDP tells of a pass only when the second one after it begins."""
    model, optimizer = run_broken_off()
    messages = []
    for _ in range(4):
        if waits:
            optimizer.wait_for_gathers()
        optimizer.zero_grad()
        try:
            plain_step(model, optimizer, 2)
        except RuntimeError as error:
            messages.append(str(error))
    assert any("ended with an exception" in message for message in messages)
    assert any("the last backward pass failed" in message for message in messages) or waits
    assert_trains_on(model, optimizer)


@on_ranks(2)
@either_way
@pytest.mark.parametrize("waits", [True, False])
def test_training_goes_on_after_a_backward_pass_that_broke_off(waits: bool, inline: bool) -> None:
    check = check_broken_off_late if inline else check_broken_off
    check(waits)


class Disturbed(torch.optim.SGD):
    """Its step waits for a backward pass that raises; then another thread resets gradients."""

    raised: threading.Event | None = None
    reset: Callable[[], None] | None = None
    kept: Sequence[bool] = ()  # whether each step had its gradients all the time

    def grads(self) -> list[Tensor]:
        return [p.grad for group in self.param_groups for p in group["params"] if p.grad is not None]

    def step(self, closure: Any = None) -> Any:
        if self.raised is not None:
            self.raised.wait(LIMIT)
            before, other = [grad.clone() for grad in self.grads()], threading.Thread(target=self.reset)
            other.start()
            other.join(0.2)  # not over: it waits for this step
            now = self.grads()
            self.kept = *self.kept, len(now) == len(before) and all(map(torch.equal, now, before))
        return super().step(closure)


@on_ranks(2)
@pytest.mark.parametrize("to_none", [True, False])
def test_gradients_with_which_a_thread_steps_are_reset_when_its_step_is_over(to_none: bool) -> None:
    """The backward pass has broken off, and the loop goes on."""

    def make(model: nn.Module) -> ZeroRedundancyOptimizer:
        return ZeroRedundancyOptimizer(model.parameters(), Disturbed, lr=0.1, bucket_cap_mb=0.001)

    model, optimizer = Setting("ours", model=Breaking, optimizer=make).build(overlap=True)
    plain_step(model, optimizer, 0)  # its buckets have their order then
    own: Any = optimizer.optim
    own.raised, own.reset = threading.Event(), partial(optimizer.zero_grad, to_none)
    with pytest.raises(ArithmeticError, match="on purpose"):
        model(inputs(1), True).sum().backward()
    own.raised.set()
    optimizer.wait_for_gathers()
    own.reset = None  # it refers to the optimizer
    assert own.kept
    assert all(own.kept), own.kept


# ---------------------------------------------------------------------- what is left, what is done between


def num_threads() -> int:
    return sum(thread.name == "zero_step" for thread in threading.enumerate())


@on_ranks(2)
def test_threads_end_when_hook_and_ddp_go() -> None:
    gone = []
    for number in range(20):
        model, optimizer = Setting("ours").build(overlap=True)
        if number % 4 == 0:
            plain_step(model, optimizer, 0)
        assert num_threads() >= 1
        gone.append(weakref.ref(optimizer))
        del model, optimizer
    gc.collect()
    for thread in threading.enumerate():
        if thread.name == "zero_step":
            thread.join(LIMIT)
    assert num_threads() == 0
    assert [reference() for reference in gone] == [None] * 20


@on_ranks(2)
def test_a_copy_of_an_optimizer_that_stepped_in_a_hook_steps_alone_and_takes_a_hook() -> None:
    model, optimizer = Setting().build(overlap=True)
    plain_step(model, optimizer, 0)
    for twin in (copy.deepcopy(optimizer), pickle.loads(pickle.dumps(optimizer))):
        for param, other in zip(twin.owners(), optimizer.owners(), strict=True):
            assert torch.equal(param, other)
            param.grad = torch.ones_like(param)
        twin.step()
        assert zero_step(twin) is not None


@on_ranks(2)
def test_a_group_added_after_registering_is_stepped() -> None:
    """A group that DDP held from the start is stepped by the hook from then on, with step() or without."""

    def some(model: nn.Module) -> ZeroRedundancyOptimizer:
        return ZeroRedundancyOptimizer([*model.parameters()][:4], torch.optim.AdamW, lr=0.01)

    runs = [Setting(optimizer=some).build(overlap) for overlap in (False, True)]
    for number in range(6):
        for model, optimizer in runs:
            if number == 3:
                optimizer.add_param_group({"params": [*model.parameters()][4:], "lr": 0.02})
            optimizer.zero_grad()
            loss_of(model, number).backward()
            if optimizer is runs[0][1]:
                optimizer.step()
        assert_same_params(runs[1][0], runs[0][0], number)


@on_ranks(2)
def test_a_backward_pass_through_averaged_weights_raises_and_changes_nothing() -> None:
    model, optimizer = Setting(optimizer=lambda m: adamw(m, ema_decay=0.5)).build(overlap=True)
    plain_step(model, optimizer, 0)
    loss = loss_of(model, 1)
    with optimizer.averaged_weights():
        before = [param.detach().clone() for param in model.parameters()]
        with pytest.raises(RuntimeError, match="holds the averaged weights"):
            loss_of(model, 1).backward()
        assert all(torch.equal(param, old) for param, old in zip(model.parameters(), before, strict=True))
    del loss
