"""Ways to write a training loop: each gives what PyTorch's wrapper gives, or what a single process would."""

import copy
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from itertools import product
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from ddp_pairs import (
    SMALL_MB,
    Pair,
    Recomputed,
    assert_averaged,
    assert_same,
    averaged,
    batch,
    mlp,
    mlp_loss,
    of_batch,
)
from pool import on_ranks
from zero_optim.ddp import DistributedDataParallel
from zero_optim.errors import ReductionError


@on_ranks(2)
def test_several_forward_passes_before_one_backward_or_before_several() -> None:
    for options in ({"gradient_as_bucket_view": True}, {"find_unused_parameters": True}):
        pair = Pair.of(mlp(), bucket_cap_mb=SMALL_MB, **options)
        for number in range(2):
            for model in pair:
                model.zero_grad()
            two = lambda model, n=number: mlp_loss(model, n) + mlp_loss(model, 10 + n).sin()  # noqa: E731
            pair.backward(two, (options, number))
        model, clean = pair.ours, copy.deepcopy(pair.ours.module)
        for number in range(3):  # each backpropagated on its own, after both forward passes
            model.zero_grad()
            first, second = mlp_loss(model, number), mlp_loss(model, 10 + number)
            first.backward()
            second.backward()
            both = lambda net, rank, n=number: mlp_loss(net, n, rank) + mlp_loss(net, 10 + n, rank)  # noqa: E731
            assert_averaged(model.module, clean, both, number, tolerance=1e-6)


@on_ranks(2)
@pytest.mark.parametrize("announced", [False, True])
def test_what_no_sync_says_of_one_forward_pass_holds_for_that_alone(announced: bool) -> None:
    """``announced``: Lightning switches reduction off in forward(), and asks for it before backward()."""
    net = mlp()
    model, clean = DistributedDataParallel(net), copy.deepcopy(net)
    loss = mlp_loss(model, 0)
    with model.no_sync():
        later = mlp_loss(model, 0 if announced else 1)
    if announced:
        loss = later
        model.reducer.prepare_for_backward([])
    loss.backward()
    assert_averaged(net, clean, of_batch(0))


def penalized(model: nn.Module, number: int, rank: int | None = None) -> Tensor:
    x = batch(number, 5, 8, rank=rank).requires_grad_()
    out = model(x)
    (slope,) = torch.autograd.grad(out.sum(), x, create_graph=True)
    return out.square().mean() + slope.square().mean()


@on_ranks(2)
def test_torch_autograd_grad_through_the_output_does_not_disturb() -> None:
    Pair.of(mlp(), bucket_cap_mb=SMALL_MB, gradient_as_bucket_view=True).train(penalized, 4)
    for options in ({"static_graph": True}, {"find_unused_parameters": True}):  # PyTorch's are wrong or fail
        model = DistributedDataParallel(mlp(), bucket_cap_mb=SMALL_MB, **options)
        clean = copy.deepcopy(model.module)
        for number in range(3):
            model.zero_grad()
            penalized(model, number).backward()
            loss = lambda net, rank, n=number: penalized(net, n, rank)  # noqa: E731
            assert_averaged(model.module, clean, loss, (options, number), tolerance=1e-6)


@on_ranks(2)
def test_gradients_taken_by_hand_are_those_of_the_rank_alone() -> None:
    for options in ({"static_graph": True}, {"find_unused_parameters": True}):
        model = DistributedDataParallel(mlp(), **options)
        clean = copy.deepcopy(model.module)
        for number in range(2):
            loss = mlp_loss(model, number)
            params = list(model.parameters())
            found = torch.autograd.grad(loss, params, retain_graph=True)  # this rank's own
            alone = torch.autograd.grad(mlp_loss(clean, number), list(clean.parameters()))
            for param, got, expected in zip(params, found, alone, strict=True):
                assert_same(got, expected, (options, number))
                assert param.grad is None
            loss.backward()
            assert_averaged(model.module, clean, of_batch(number), (options, number))
            model.zero_grad()


def checkpointed(model: nn.Module, number: int, reentrant: bool) -> Tensor:
    x = batch(number, 5, 8).requires_grad_()
    return checkpoint(model, x, use_reentrant=reentrant).square().mean()


@on_ranks(2)
def test_the_wrapper_itself_may_be_checkpointed() -> None:
    for reentrant in (False, True):
        pair = Pair.of(mlp(), bucket_cap_mb=SMALL_MB, gradient_as_bucket_view=True)
        pair.train(partial(checkpointed, reentrant=reentrant), 4, reentrant)
    model = DistributedDataParallel(mlp(), static_graph=True)  # PyTorch's fails
    clean = copy.deepcopy(model.module)
    for number in range(3):
        model.zero_grad()
        checkpointed(model, number, reentrant=True).backward()
        assert_averaged(model.module, clean, of_batch(number), number)


@on_ranks(2)
def test_parts_may_be_checkpointed_once_or_twice() -> None:
    for reentrant, times, options in (
        (True, 1, {}),
        (False, 2, {"gradient_as_bucket_view": True}),
        (False, 2, {"find_unused_parameters": True}),
        (True, 2, {"static_graph": True}),
    ):
        pair = Pair.of(Recomputed(times, reentrant), bucket_cap_mb=SMALL_MB, **options)
        pair.train(mlp_loss, 4, (reentrant, times, options))


# torch.compile warns of its own innards here and there.
@on_ranks(2, timeout=600)
@pytest.mark.filterwarnings("ignore")
@pytest.mark.slow
def test_the_wrapper_or_what_it_wraps_may_be_compiled() -> None:
    backend, steps = "inductor", 3
    for options in ({"gradient_as_bucket_view": True}, {"static_graph": True}):
        torch._dynamo.reset()
        plain = DistributedDataParallel(mlp(), **options)
        inner = DistributedDataParallel(torch.compile(mlp(), backend=backend), **options)  # type: ignore[arg-type]
        wrapped = DistributedDataParallel(mlp(), **options)
        outer: Any = torch.compile(wrapped, backend=backend)
        for number in range(steps):
            for model in (plain, inner, outer):
                model.zero_grad()
                mlp_loss(model, number).backward()
            for param, *others in zip(
                *(model.parameters() for model in (plain, inner, wrapped)), strict=True
            ):
                for other in others:
                    assert_same(other.grad, param.grad, (options, number), 1e-6)
        for model in (plain, inner, wrapped):
            assert model.reducer.own.history.num_passes == steps
        with outer.no_sync():
            mlp_loss(outer, 0).backward()
        assert wrapped.reducer.own.history.num_passes == steps


# ---------------------- unused parameters and outputs, under every mode


MODES: dict[str, dict[str, Any]] = {
    "plain": {},
    "find_unused": {"find_unused_parameters": True},
    "static": {"static_graph": True},
}
LACKS = ("nothing", "parameter", "output", "parameter on rank 1")
WAYS = ("plain", "no_sync", "no_sync around backward", "checkpoint", "reentrant checkpoint")
BUCKET_CAP_MB = 0.0005  # several buckets


@dataclass
class Output:
    main: Tensor
    others: dict[str, list[Tensor]]


class Net(nn.Module):
    """Two heads, one of them perhaps not asked for, and a layer that is perhaps not used."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.trunk = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 8))
        self.main, self.other, self.spare = nn.Linear(8, 3), nn.Linear(8, 2), nn.Linear(8, 8)

    def forward(self, x: Tensor, with_spare: bool, reentrant: bool | None) -> Output:
        hidden = self.trunk(x) if reentrant is None else checkpoint(self.trunk, x, use_reentrant=reentrant)
        if with_spare:
            hidden = hidden + self.spare(hidden)
        return Output(self.main(hidden), {"heads": [self.other(hidden)]})


@dataclass(frozen=True)
class Case:
    lacks: str
    way: str

    def loss(self, net: nn.Module, rank: int, number: int) -> Tensor:
        generator = torch.Generator().manual_seed(100 * number + rank)
        x = torch.randn(4, 6, generator=generator, requires_grad=True)
        spared = self.lacks == "parameter" or (self.lacks == "parameter on rank 1" and rank == 1)
        reentrant = {"checkpoint": False, "reentrant checkpoint": True}.get(self.way)
        out = net(x, not spared, reentrant)
        loss = out.main.square().mean()
        return loss if self.lacks == "output" else loss + out.others["heads"][0].sin().mean()


def train(case: Case, ddp: nn.Module, number: int) -> range:
    """Run one iteration, two passes where the first is not reduced; tells which batches were used."""
    rank = dist.get_rank()
    if case.way in ("no_sync", "no_sync around backward"):
        quiet: Any = ddp.no_sync
        with quiet() if case.way == "no_sync" else nullcontext():
            loss = case.loss(ddp, rank, 2 * number)
        with quiet():
            loss.backward()
        case.loss(ddp, rank, 2 * number + 1).backward()
        return range(2 * number, 2 * number + 2)
    case.loss(ddp, rank, number).backward()
    return range(number, number + 1)


@on_ranks(2)
@pytest.mark.parametrize("mode", MODES)
def test_every_combination_is_right_or_refused(mode: str) -> None:
    for lacks, way in product(LACKS, WAYS):
        case, net = Case(lacks, way), Net()
        ddp = DistributedDataParallel(
            copy.deepcopy(net), gradient_as_bucket_view=True, bucket_cap_mb=BUCKET_CAP_MB, **MODES[mode]
        )
        where = (mode, lacks, way)
        if mode == "plain" and lacks != "nothing":
            check_error(case, ddp, where)
            continue
        for number in range(3):
            ddp.zero_grad(set_to_none=number % 2 == 0)
            numbers = train(case, ddp, number)
            losses = lambda net, rank, n=numbers, case=case: sum(case.loss(net, rank, k) for k in n)  # noqa: E731
            expected = averaged(net, losses, 2)  # type: ignore[arg-type]
            for name, param in ddp.module.named_parameters():
                at, want = (*where, number, name), expected.get(name)
                if want is None:  # gradients of zeros stay where nobody used a parameter
                    assert param.grad is None or (number % 2 and not param.grad.any()), at
                else:
                    assert_same(param.grad, want, at)


def check_error(case: Case, ddp: nn.Module, where: object) -> None:
    """The first pass raises, on every rank, with names; the reducer is whole after it."""
    name = "other.bias" if case.lacks == "output" else "spare.bias"
    for _ in range(2):
        ddp.zero_grad()
        with pytest.raises(ReductionError, match=f"no gradient for .*{name}") as caught:
            train(case, ddp, 0)
        alone = case.lacks == "parameter on rank 1"
        assert ("rank 1:" if alone else "every rank:") in str(caught.value), where
        assert "find_unused_parameters=True" in str(caught.value)
