"""Gathers left running after step(): the same training, and nobody reads a parameter before it has come."""

import copy
import io
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

from overlap import Net, Setting, adamw, assert_same_params, inputs, plain_step
from pool import on_ranks
from zero_optim import ZeroRedundancyOptimizer
from zero_optim.comm.collectives import RankGroup
from zero_optim.shard import gathers

DELAY = 0.3  # seconds


@contextmanager
def slow_gathers(delay: float = 0.003) -> Iterator[list[Any]]:
    """Let what rank 0 sends come late: the handles of its broadcasts are ready only after a delay.

    Gives the list of the handles that have been waited for, in order.
    """
    broadcast_rows = RankGroup.broadcast_rows
    waited: list[Any] = []

    def late(self: RankGroup, *args: Any) -> list[Any]:
        works = broadcast_rows(self, *args)
        return [_Late(work, time.monotonic() + delay, waited) for work in works]

    RankGroup.broadcast_rows = late  # type: ignore[method-assign, assignment]
    try:
        yield waited
    finally:
        RankGroup.broadcast_rows = broadcast_rows  # type: ignore[method-assign]


class _Late:
    def __init__(self, work: Any, ready: float, waited: list[Any]) -> None:
        self.work, self.ready, self.waited = work, ready, waited

    def wait(self) -> None:
        self.waited.append(self)
        time.sleep(max(0.0, self.ready - time.monotonic()))
        self.work.wait()


@on_ranks(2)
@pytest.mark.parametrize("as_view", [True, False], ids=["view", "packed"])
def test_training_gives_the_same_bits_where_every_gather_is_slow(as_view: bool) -> None:
    setting = Setting("ours", Net, lambda m: adamw(m, parameters_as_bucket_view=as_view))
    (plain, one), (model, other) = setting.build(overlap=False), setting.build(overlap=as_view)
    other.gather_lazily(model)
    for number in range(6):
        plain_step(plain, one, number)
        with slow_gathers():
            plain_step(model, other, number)
    other.wait_for_gathers()
    assert_same_params(model, plain)


# PyTorch's compiler looks at every tensor's gradient where a hook breaks the graph.
@on_ranks(2, timeout=400)
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")
@pytest.mark.slow
def test_a_compiled_model_trains() -> None:
    torch._dynamo.reset()
    plain, model = Net(), Net()
    one, other = adamw(plain), adamw(model)
    other.gather_lazily(model)
    pair = [torch.compile(net, backend="aot_eager") for net in (plain, model)]
    for number in range(3):
        for net, optimizer in zip(pair, (one, other), strict=True):
            optimizer.zero_grad()
            loss = net(inputs(number, rank=0)).square().mean()
            loss.backward()
            optimizer.step()
    other.wait_for_gathers()
    for param, want in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(param, want)


@on_ranks(2)
@mock.patch.object(gathers, "LANES_FROM_NBYTES", 0)
def test_a_module_waits_for_its_own_buckets_alone() -> None:
    """Every broadcast takes long: step() does not wait, and each layer waits for its own alone."""
    model = nn.Sequential(*(nn.Linear(8, 8, bias=False) for _ in range(4)))
    optimizer = ZeroRedundancyOptimizer(
        model.parameters(), torch.optim.SGD, lr=0.1, bucket_cap_mb=8 * 8 * 4 / 2**20, gather_lazily=model
    )
    x = torch.ones(2, 8)
    model(x)  # shows which modules are called
    waited: list[int] = []
    for index, bucket in enumerate(optimizer.core.engine.buckets):
        receive = bucket.values.receive

        def noted(*args: Any, index: int = index, receive: Callable[..., None] = receive) -> None:
            waited.append(index)
            receive(*args)

        bucket.values.receive = noted
    before = [layer.weight.detach().clone() for layer in model]
    for param in model.parameters():
        param.grad = torch.ones_like(param)
    with slow_gathers(DELAY) as handles_waited_for:
        optimizer.step()
    assert handles_waited_for == []
    assert waited == []
    for index, layer in enumerate(model):
        layer(x)
        assert waited == list(range(index + 1))  # gathers are in the order of the forward pass
        assert torch.equal(layer.weight, before[index] - 0.1)
    assert not optimizer.core.engine.under_way


@on_ranks(2)
def test_what_cannot_wait_is_refused_with_what_to_give() -> None:
    model = Net()
    with pytest.raises(TypeError, match=r"gather_lazily=model, or None, got True"):
        adamw(model, gather_lazily=True)
    with pytest.raises(ValueError, match="this Linear has none of them"):
        adamw(model, gather_lazily=nn.Linear(2, 2))
    assert not any(module._forward_pre_hooks for module in model.modules())


def load(optimizer: ZeroRedundancyOptimizer, model: nn.Module) -> None:
    optimizer.consolidate_state_dict(to=None)
    optimizer.load_state_dict(optimizer.state_dict())


def average(optimizer: ZeroRedundancyOptimizer, model: nn.Module) -> None:
    with optimizer.averaged_weights():
        model(inputs(0))


def load_model(optimizer: ZeroRedundancyOptimizer, model: nn.Module) -> None:
    saved = {name: torch.ones_like(value) for name, value in model.state_dict().items()}
    step_once(optimizer, model)
    model.load_state_dict(saved)


def call_part(optimizer: ZeroRedundancyOptimizer, model: Any) -> None:
    """A module that the first forward pass did not call, by itself."""
    found = model.layers(torch.ones(2, 36)), model.spare(torch.ones(2, 12))
    assert all(not out.isnan().any() for out in found)
    optimizer.wait_for_gathers()


READERS: dict[str, Callable[[ZeroRedundancyOptimizer, Any], Any]] = {
    "wait_for_gathers": lambda optimizer, model: optimizer.wait_for_gathers(),
    "state_dict of the model": lambda optimizer, model: torch.save(model.state_dict(), io.BytesIO()),
    "load_state_dict of the model": load_model,
    "load_state_dict": load,
    "averaged_weights": average,
    "deepcopy": lambda optimizer, model: copy.deepcopy(optimizer),
    "gather_parameters": lambda optimizer, model: optimizer.gather_parameters(),
    "evaluation": lambda optimizer, model: torch.no_grad()(model)(inputs(0)),
    "step": lambda optimizer, model: step_once(optimizer, model, 1),
    "part of the model": call_part,
}


def step_once(optimizer: ZeroRedundancyOptimizer, model: nn.Module, number: int = 0) -> None:
    for param in model.parameters():
        generator = torch.Generator().manual_seed(number + param.numel())
        param.grad = torch.randn(param.shape, generator=generator).to(param.dtype)
    optimizer.step()


@on_ranks(2)
@pytest.mark.parametrize("as_view", [True, False], ids=["view", "packed"])
def test_whatever_reads_parameters_through_our_interface_waits_first(as_view: bool) -> None:
    """Under slow gathers each does what it does without them."""
    for name, read in READERS.items():
        results = []
        for lazy in (False, True):
            model = Net().bfloat16() if "model" not in name and name == "load_state_dict" else Net()
            optimizer = adamw(
                model, parameters_as_bucket_view=as_view, ema_decay=0.5, master_dtype=torch.float32
            )
            if lazy:
                optimizer.gather_lazily(model)
            if name != "load_state_dict":
                model(inputs(0), with_spare=False)
            with slow_gathers(0.02):
                step_once(optimizer, model)
                assert bool(optimizer.core.engine.under_way) == lazy
                read(optimizer, model)
                if name != "step":
                    assert not optimizer.core.engine.under_way, name
                optimizer.wait_for_gathers()
            results.append([param.detach().clone() for param in model.parameters()])
        assert all(torch.equal(a, b) for a, b in zip(*results, strict=True)), name


@on_ranks(2)
def test_after_remove_each_step_waits_again() -> None:
    model = Net()
    optimizer = adamw(model)
    lazy = optimizer.gather_lazily(model)
    step_once(optimizer, model)
    assert optimizer.core.engine.under_way
    lazy.remove()
    lazy.remove()
    assert not optimizer.core.engine.under_way
    for module in model.modules():
        hooks = (module._forward_pre_hooks, module._forward_hooks, module._state_dict_pre_hooks)
        assert not any(hooks)
    step_once(optimizer, model, 1)
    assert not optimizer.core.engine.under_way


@on_ranks(2)
def test_parameters_outside_the_model_are_waited_for_by_step() -> None:
    model, extra = Net(), nn.Linear(8, 8)
    alone = copy.deepcopy(extra)
    optimizer, plain = adamw(nn.ModuleList([model, extra])), torch.optim.AdamW(alone.parameters(), lr=0.01)
    optimizer.gather_lazily(model)
    for param in (*model.parameters(), *extra.parameters(), *alone.parameters()):
        param.grad = torch.ones_like(param)
    plain.step()
    with slow_gathers(0.02):
        optimizer.step()
        assert all(map(torch.equal, extra.parameters(), alone.parameters()))
    optimizer.wait_for_gathers()
