"""A `GradScaler` and all who watch its protocol see what is true: a step is skipped by all ranks or none.

A step that is skipped is not reached, as with the classes of ``torch.optim``.
"""

import copy
import math
from collections.abc import Iterable
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from parity_models import MODELS
from parity_runs import STAGES, Row, Run
from pool import on_ranks
from training import agreeing_scaler, assert_same_bits, make_params, params_of, set_grads, sgd
from zero_optim import ZeroRedundancyOptimizer
from zero_optim.ddp import ShardedDataParallel
from zero_optim.errors import RankMismatchError
from zero_optim.step.partial import OwnedGradient, PartialGradient

TorchDDP = nn.parallel.DistributedDataParallel


class Net(nn.Module):
    """Gives a loss. One element of one gradient is what it is told."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Linear(6, 16), nn.Linear(16, 4)

    def forward(self, inputs: Tensor, gradient: float) -> Tensor:
        outputs: Tensor = self.last(self.first(inputs).relu())
        return outputs.square().mean() + gradient * self.last.bias[0]


WAYS = "views", "lazy", "gradients", "fully"


def new_scaler(kind: Any = torch.amp.GradScaler) -> torch.amp.GradScaler:
    return kind("cpu", init_scale=2.0**8, growth_interval=2)


def note_steps(optimizer: torch.optim.Optimizer) -> list[int]:
    """Count the calls of ``step`` as accelerate does: by an attribute of the optimizer."""
    calls, step = [0], optimizer.step

    def counted(*args: Any, **kwargs: Any) -> Any:
        calls[0] += 1
        return step(*args, **kwargs)

    optimizer.step = counted  # type: ignore[method-assign]
    return calls


def train(
    wrapped: nn.Module, optimizer: torch.optim.Optimizer, scaler: torch.amp.GradScaler, unscales: bool
) -> list[tuple[int, float]]:
    """Two of five steps have an infinity on the last rank; gives calls of ``step`` and the scale, by step."""
    calls, told = note_steps(optimizer), []
    for step in range(5):
        inputs = torch.randn(3, 6, generator=torch.Generator().manual_seed(step))
        is_last = dist.get_rank() == dist.get_world_size() - 1
        gradient = math.inf if step in (1, 2) and is_last else 0.5
        optimizer.zero_grad()
        scaler.scale(wrapped(inputs, gradient)).backward()
        if unscales:
            scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
        told.append((calls[0], scaler.get_scale()))
    return told


def scales_alike(ways: Iterable[str], unscales: bool, kind: Any = torch.amp.GradScaler) -> None:
    plain = TorchDDP(Net())
    expected = train(plain, torch.optim.AdamW(plain.parameters(), lr=0.01), new_scaler(), unscales)
    assert [calls for calls, _ in expected] == [1, 1, 1, 2, 3]
    for way in ways:
        with mock.patch.dict(MODELS, odd=Net):
            run = Run.of(Row(way, "odd", "ordinary", "plain"), STAGES[way])
        assert train(run.model, run.optimizer, new_scaler(kind), unscales) == expected, way
        assert not {"found_inf", "grad_scale"} & set(vars(run.optimizer)), way
        run.optimizer.wait_for_gathers()
        got = run.model.state_dict().values() if way == "fully" else run.net.parameters()
        assert_same_bits([value.detach() for value in got], list(plain.parameters()), way)


@on_ranks(2)
@pytest.mark.parametrize("unscales", [False, True], ids=["step", "unscale_"])
def test_a_step_that_a_scaler_skips_is_not_reached_on_any_rank(unscales: bool) -> None:
    scales_alike(WAYS, unscales)


@on_ranks(2)
def test_pytorchs_scaler_for_shards_comes_to_the_same() -> None:
    scales_alike(["lazy", "gradients"], True, agreeing_scaler)


# ---------------------------------------------------------------------- who owns what


class Odd(nn.Module):
    """One rank owns all that trains, or all of a dtype; or the only gradients are sparse."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table = nn.Embedding(4, 3, sparse=True) if kind == "sparse" else None
        self.small = nn.Linear(3, 1, bias=False, dtype=torch.float64) if kind != "sparse" else None
        self.large = nn.Linear(3, 40) if kind == "dtypes" else None

    def forward(self, gradient: float) -> Tensor:
        if self.table is not None:
            rows: Tensor = self.table(torch.tensor([1, 1, 2]))
            return (rows * gradient).sum()
        loss: Tensor = self.small(torch.full((1, 3), gradient, dtype=torch.float64)).sum()
        return loss if self.large is None else loss + self.large(torch.ones(1, 3)).square().mean()


@on_ranks(2)
@pytest.mark.parametrize("kind", ["dense", "dtypes", "sparse"])
def test_an_infinity_is_heard_of_where_one_rank_owns_every_gradient_of_a_kind(kind: str) -> None:
    model = Odd(kind)
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.SGD, lr=0.1)
    wrapped, scaler = ShardedDataParallel(model, optimizer), new_scaler()
    for step in range(3):
        before = [param.detach().clone() for param in model.parameters()]
        optimizer.zero_grad()
        scaler.scale(wrapped(math.inf if step == 1 and dist.get_rank() == 1 else 0.5)).backward()
        if step == 0:
            kinds = {type(param.grad) for param in model.parameters()}
            assert kinds == {OwnedGradient} or PartialGradient in kinds
        scaler.step(optimizer)
        scaler.update()
        assert scaler.get_scale() == (2.0**8 if step == 0 else 2.0**7)
        assert (step == 1) == all(map(torch.equal, model.parameters(), before))


@on_ranks(2)
def test_a_gradient_that_its_owner_alone_has_is_an_ordinary_tensor_to_all_others() -> None:
    model = Net()
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, lr=0.05)
    wrapped = ShardedDataParallel(model, optimizer)
    wrapped(torch.ones(1, 6), 0.5).backward()
    grads = [param.grad for param in optimizer.owned_parameters()]
    assert grads
    for grad in grads:
        assert isinstance(grad, OwnedGradient)
        assert type(grad * 2) is Tensor
        copied = copy.deepcopy(grad)
        assert type(copied) is Tensor
        assert torch.equal(copied, grad)
    optimizer.step()
    assert all(type(grad) is Tensor for grad in grads)


# ---------------------------------------------------------------------- gradients that nobody reduces


@on_ranks(2)
def test_a_step_that_one_rank_alone_skips_raises_on_every_rank_in_the_next_one() -> None:
    params = make_params()
    optimizer, scaler = sgd(params), new_scaler()

    def step(number: int) -> None:
        set_grads(params_of(optimizer), number)
        scaler.scale(torch.ones(()))
        if number == 1 and dist.get_rank() == 1:
            params[0].grad.fill_(math.inf)  # type: ignore[union-attr]
        scaler.step(optimizer)
        scaler.update()

    step(0)
    if dist.get_rank() == 1:
        step(1)
    with pytest.raises(RankMismatchError, match=r"infinity on some ranks alone\. .*ShardedGradScaler"):
        step(1 + dist.get_rank())
