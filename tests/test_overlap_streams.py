"""What waits for what, on which stream or thread; seen with streams that only tell what was asked of them."""

import threading
import weakref
from collections.abc import Iterator
from contextlib import nullcontext
from itertools import product
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from fake_streams import FakeAccelerator, FakeStream, fake_streams
from overlap import (
    WRAPPERS,
    Grads,
    Net,
    Setting,
    adamw,
    assert_same_run,
    both_wrappers,
    either_way,
    grads_of,
    loss_of,
    plain_step,
)
from pool import on_ranks
from zero_optim import RemoteRankError, ZeroRedundancyOptimizer
from zero_optim.comm.pending import Pending
from zero_optim.flow.flow import Flow
from zero_optim.hooks import owners, passes, zero_step
from zero_optim.iteration.overlap import Overlap
from zero_optim.shard import bucket

DEVICE = torch.device("cpu")


@pytest.fixture
def accelerator() -> Iterator[FakeAccelerator]:
    with fake_streams() as fake:
        yield fake


class CountedWork:
    """A collective that counts how often it is waited for."""

    def __init__(self) -> None:
        self.num_waits = 0

    def wait(self) -> None:
        self.num_waits += 1


def pending(*tensors: Tensor) -> tuple[Pending[None], CountedWork, list[str]]:
    work, called = CountedWork(), list[str]()
    return Pending([work], lambda _: called.append("then"), tensors), work, called


# ---------------------------------------------------------------------- each stream waits


def test_on_the_cpu_the_first_who_waits_is_the_only_one() -> None:
    gather, work, called = pending(torch.zeros(2))
    assert gather.is_unclaimed
    for _ in range(2):
        gather.wait()
        assert gather.is_over
    assert (work.num_waits, called, gather.is_unclaimed) == (1, ["then"], False)


def test_a_second_stream_that_reads_the_same_parameter_or_another_waits_too(
    accelerator: FakeAccelerator,
) -> None:
    under_way, a, b = Flow(), torch.zeros(1), torch.zeros(1)
    gather, work, _ = pending(torch.zeros(2))
    under_way.start(lambda: gather, keys=[a, b])
    assert under_way.is_unclaimed
    with accelerator.using(FakeStream("first")):
        under_way.wait_for([a])
    behind = accelerator.events[-1]
    assert under_way, "other streams have to wait still"
    assert not under_way.is_unclaimed
    for param in (a, b):
        stream = FakeStream("other")
        with accelerator.using(stream):
            under_way.wait_for([param])
        assert stream.awaited == [behind]
    stream = FakeStream("all")
    with accelerator.using(stream):
        under_way.wait()
    assert stream.awaited == [behind]
    behind.has_passed = True
    under_way.wait()
    assert not under_way
    assert work.num_waits == 1


def test_gathers_that_are_over_are_let_go_of_though_some_are_left_at_each_wait(
    accelerator: FakeAccelerator,
) -> None:
    under_way, a, b = Flow(), torch.zeros(1), torch.zeros(1)
    gathers: list[weakref.ref[Pending[None]]] = []
    for _ in range(5):
        for event in accelerator.events:
            event.has_passed = True  # those of the steps before
        gather = Pending([], lambda _: None, [torch.zeros(2)])
        gathers.append(weakref.ref(gather))
        under_way.start(lambda gather=gather: gather, keys=[a, b])  # type: ignore[misc]
        under_way.wait()
        assert under_way, "that of this step is left"
    assert [known() for known in gathers] == [None, None, None, None, gather]
    stream = FakeStream("other")
    with accelerator.using(stream):
        under_way.wait_for([b])
    assert stream.awaited == accelerator.events[-1:], "that of this step is waited for still"


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
def test_what_the_user_replaced_is_moved_on_the_thread_of_the_backward_pass(wrapper: str) -> None:
    threads: set[str] = set()
    take_in = bucket.InFlat._take_in

    def noted(self: bucket.InFlat, index: int) -> None:
        threads.add(threading.current_thread().name)
        take_in(self, index)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(bucket.InFlat, "_take_in", noted)
        for interleave in (True, False):
            assert_same_run(Setting(wrapper, zero={"interleave": interleave}), replacing, 4)
    assert threads == {threading.current_thread().name}


def with_two_more(model: nn.Module) -> ZeroRedundancyOptimizer:
    more = [nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(4, dtype=torch.float64))]
    return ZeroRedundancyOptimizer([*more, *model.parameters()], torch.optim.SGD, lr=0.1)


@on_ranks(2)
@both_wrappers
def test_a_parameter_that_does_not_fit_any_more_raises_when_backward_ends(wrapper: str) -> None:
    """One that does not fit any more, of parameters that DDP does not hold, on one rank."""
    model, optimizer = Setting(wrapper, optimizer=with_two_more).build(overlap=True)
    plain_step(model, optimizer, 0)
    odd = next(iter(optimizer.owners()))
    optimizer.zero_grad()
    kept = [param.data.clone() for param in model.parameters()]
    for param, data in zip(model.parameters(), kept, strict=True):
        param.data = data
    fits, is_odd = odd.data, dist.get_rank() == 1
    if is_odd:
        odd.data = torch.ones(5)
    expected = "a parameter became" if is_odd else "rank 1 failed with RuntimeError in backward"
    with pytest.raises(RuntimeError if is_odd else RemoteRankError, match=expected):
        loss_of(model, 1).backward()
    odd.data = fits
    optimizer.step()
    assert all(param.grad is not None for param in model.parameters())
    assert all(
        param.data_ptr() != data.data_ptr() for param, data in zip(model.parameters(), kept, strict=True)
    )
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
    "receiving": (passes.Task, "receive"),
    "the tensor received": (passes, "_tensor"),
    "gradients": (passes, "gradients_in"),
    "marking use": (passes, "record_use"),
    "counting": (passes.SteppedPass, "take"),
    "stepping": (passes.SteppedPass, "step"),
}


@on_ranks(1)
@either_way
def test_an_error_at_any_point_is_raised_when_backward_has_ended(inline: bool) -> None:
    for place, name in POINTS.values():
        with fake_streams() if inline else nullcontext(), pytest.MonkeyPatch.context() as patch:
            model, optimizer = Setting("ours").build(overlap=True)
            for number in range(2):
                plain_step(model, optimizer, number)
            patch.setattr(place, name, raises_once(getattr(place, name)))
            optimizer.zero_grad()
            with pytest.raises(ArithmeticError, match="something failed"):
                loss_of(model, 2).backward()
            assert all(param.grad is not None for param in model.parameters()), "DDP has ended the pass"
            optimizer.step()


class FailingFuture:
    """A future that does not take its first value."""

    def __init__(self) -> None:
        self.taken: list[Tensor] = []
        self.num_calls = 0

    def set_result(self, value: Tensor) -> None:
        self.num_calls += 1
        if self.num_calls == 1:
            raise ValueError("not this one")
        self.taken.append(value)


@on_ranks(1)
def test_the_thread_goes_on_after_any_error() -> None:
    """Even if what minds errors fails: both the first error and what it calls."""
    model, optimizer = Setting("ours").build(overlap=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(passes, "_tensor", raises_once(passes._tensor))
        patch.setattr(passes.SteppedPass, "abandon", raises_once(passes.SteppedPass.abandon))
        with pytest.raises(ArithmeticError, match="something failed"):
            loss_of(model, 0).backward()
    optimizer.step()
    before = [param.detach().clone() for param in model.parameters()]
    plain_step(model, optimizer, 1)
    assert not any(torch.equal(param, old) for param, old in zip(model.parameters(), before, strict=True))


def test_a_future_that_refuses_the_result_gets_the_gradients_as_they_were() -> None:
    unused: Any = None
    of = passes.SteppedPass(unused, (), False)
    buffer, future = torch.zeros(2), FailingFuture()
    bucket = passes.Task(of, (), buffer, unused, False, future)  # type: ignore[arg-type]
    bucket.result = torch.ones(2)
    bucket.complete()
    assert future.taken == [buffer]
    assert isinstance(of.error, ValueError)


# ---------------------------------------------------------------------- known to be used


SEARCHES = (
    ("ours", "", False),
    ("ours", "may be unused", True),
    ("torch", "", True),
    ("torch", "with its wrapper", False),
    ("torch", "may be unused", True),
)


@on_ranks(2)
def test_nobody_looks_for_unused_parameters_where_all_are_known_to_be_used() -> None:
    calls: list[object] = []
    all_zero, used = passes._all_zero, owners.OwnerReduction._used_here

    def noted_zeros(gradients: Any) -> Any:
        calls.append(gradients)
        return all_zero(gradients)

    def noted_use(self: Any, params: Any) -> Any:
        calls.append(self)
        return used(self, params)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(passes, "_all_zero", noted_zeros)
        patch.setattr(owners.OwnerReduction, "_used_here", noted_use)
        for (wrapper, how, searches), gradients in product(SEARCHES, ("everywhere", "owners")):
            options = {"find_unused_parameters": True} if how == "may be unused" else {}
            model = WRAPPERS[wrapper](Net(), bucket_cap_mb=0.0004, **options)
            optimizer = adamw(model)
            known = model if how == "with its wrapper" else None
            hook = zero_step(optimizer, gradients=gradients, ddp=known)  # type: ignore[arg-type]
            model.register_comm_hook(None, hook)
            plain_step(model, optimizer, 0)
            assert bool(calls) == searches, (wrapper, how, gradients)
            calls.clear()
