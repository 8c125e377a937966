"""Training under DDP, and uneven inputs with ``Join``."""

import copy
import math
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel

from pool import on_ranks
from training import assert_same_bits
from zero_optim import ZeroRedundancyOptimizer
from zero_optim.errors import RankMismatchError, RemoteRankError


def make_model() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.LayerNorm(16), nn.Linear(16, 3))


def made(**options: Any) -> tuple[nn.Module, ZeroRedundancyOptimizer]:
    model = make_model()
    return model, ZeroRedundancyOptimizer(model.parameters(), torch.optim.SGD, lr=0.1, **options)


def batches(rank: int, count: int) -> Iterator[Tensor]:
    generator = torch.Generator().manual_seed(rank)
    for _ in range(count):
        yield torch.randn(5, 6, generator=generator)


@on_ranks(2)
@pytest.mark.parametrize("clips", [False, True])
def test_uneven_inputs_without_ddp_and_training_afterwards(clips: bool) -> None:
    """Without DDP: each rank's own gradient of a common loss, so that they are equal.

    The optimizer itself tells ``Join``, by whichever call comes first, and clips twice.
    """
    model, sharded = made(momentum=0.9)
    plain_model = copy.deepcopy(model)
    plain = torch.optim.SGD(plain_model.parameters(), lr=0.1, momentum=0.9)
    rank, size = dist.get_rank(), dist.get_world_size()

    def train(net: nn.Module, optimizer: Any, count: int) -> None:
        clip = getattr(optimizer, "clip_grad_norm_", partial(nn.utils.clip_grad_norm_, [*net.parameters()]))
        for batch in batches(0, count):
            optimizer.zero_grad()
            net(batch).square().mean().backward()
            if clips:
                clip(0.3, "inf")  # as PyTorch takes it
                clip(torch.tensor(0.2))  # likewise
            optimizer.step()

    for _ in range(2):
        train(plain_model, plain, 1 + size)
        with Join([sharded]):
            train(model, sharded, 2 + rank)
        assert_same_bits(list(model.parameters()), list(plain_model.parameters()))
    train(plain_model, plain, 2)  # and the loop after the context goes on as ever
    train(model, sharded, 2)
    assert_same_bits(list(model.parameters()), list(plain_model.parameters()))


@on_ranks(2)
def test_a_gradient_scaler_works_on_ranks_that_are_still_active() -> None:
    """Rank r has 2 + 2r batches; once others have joined, an active rank finds an infinity."""
    rank, size = dist.get_rank(), dist.get_world_size()
    plain_model, model = (
        DistributedDataParallel(make_model(), gradient_as_bucket_view=True) for _ in range(2)
    )
    plain = torch.optim.AdamW(plain_model.parameters(), lr=0.05)
    sharded = ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, lr=0.05)
    scales = []
    for net, optimizer, joinables in (
        (plain_model, plain, [plain_model]),
        (model, sharded, [model, sharded]),
    ):
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**8, growth_interval=2)
        with Join(joinables):
            for step, batch in enumerate(batches(rank, 2 + 2 * rank)):
                optimizer.zero_grad()
                loss = net(batch).square().mean()
                scaler.scale(loss * (float("inf") if step == 2 * size - 1 else 1.0)).backward()
                scaler.step(optimizer)
                scaler.update()
        scales.append(scaler.get_scale())
    assert_same_bits(list(model.parameters()), list(plain_model.parameters()))
    assert scales[0] == scales[1]


@on_ranks(2)
def test_a_closure_that_raises_is_heard_of_by_active_and_by_joined_ranks() -> None:
    """The closure raises on rank 1, while rank 0 is active and when it has run out of inputs."""
    model, sharded = made()
    before = [p.detach().clone() for p in model.parameters()]

    def closure() -> float:
        raise ZeroDivisionError("in the closure")

    def train(failing: int, count: int) -> None:
        with Join([sharded]):
            for _ in range(count):
                if dist.get_rank() == failing:
                    sharded.step(closure)
                sharded.step(lambda: 0.0)

    for count in (1, dist.get_rank()):
        with pytest.raises(
            ZeroDivisionError if dist.get_rank() == 1 else RemoteRankError, match="in the closure"
        ):
            train(1, count)
    assert_same_bits(list(model.parameters()), before)


@on_ranks(4)
def test_a_scaler_that_cannot_be_told_raises_on_joined_ranks_too() -> None:
    """Ranks 0 and 1 are active, 2 and 3 have no inputs."""
    rank = dist.get_rank()
    _, sharded = made()

    def train() -> None:
        with Join([sharded]):
            if rank < 2:
                vars(sharded).update(found_inf=torch.tensor(1.0 - rank), grad_scale=None)  # as scalers do
                sharded.step()

    with pytest.raises(RuntimeError, match=r"scalers of ranks \[0\] found an infinite .* \[1\] did not"):
        train()


@on_ranks(2)
@pytest.mark.parametrize(("set_to_none", "clips"), [(False, False), (True, True)])
def test_an_epoch_after_uneven_inputs_begins_without_the_gradients_of_other_ranks(
    set_to_none: bool, clips: bool
) -> None:
    """Two epochs in which rank r has 1 + 2r batches; gradients are dropped when an iteration ends.

    One parameter is not used; it decays where its gradient is zeros, which is so after the first step.
    """
    norms: list[list[float]] = [[], []]
    models = [
        DistributedDataParallel(make_model(), find_unused_parameters=True, gradient_as_bucket_view=True)
        for _ in range(2)
    ]
    for number, net in enumerate(models):
        net.module.idle = nn.Parameter(torch.ones(3))
        options: dict[str, Any] = {"lr": 0.05, "weight_decay": 0.1}
        if number:
            optimizer: Any = ZeroRedundancyOptimizer(net.parameters(), torch.optim.SGD, **options)
            joinables, clip = [net, optimizer], optimizer.clip_grad_norm_
        else:
            optimizer = torch.optim.SGD(net.parameters(), **options)
            joinables, clip = [net], partial(nn.utils.clip_grad_norm_, list(net.parameters()))
        for epoch in range(2):
            with Join(joinables):
                for batch in batches(dist.get_rank() + 10 * epoch, 1 + 2 * dist.get_rank()):
                    net(batch).square().mean().backward()
                    if clips:
                        norms[number].append(float(clip(0.3)))
                    optimizer.step()
                    optimizer.zero_grad(set_to_none=set_to_none)
    assert norms[0] == norms[1]
    assert_same_bits(list(models[1].parameters()), list(models[0].parameters()))


@on_ranks(2)
def test_an_error_of_clipping_raises_on_joined_ranks_too() -> None:
    """Rank 1 has run out of inputs, and hears of it all the same."""
    model, sharded = made()
    is_active = dist.get_rank() == 0

    def clip(*args: Any) -> None:
        with Join([sharded]):
            if is_active:
                model(torch.full((2, 6), math.inf)).sum().backward()
                sharded.clip_grad_norm_(*args)
                sharded.step()

    with pytest.raises(RuntimeError, match=r"the norm of order 2\.0 of all gradients is nan"):
        clip(1.0, 2.0, True)
    with pytest.raises(TypeError, match="expected max_norm to be a number"):
        clip("much")


@on_ranks(2)
def test_inside_join_a_rank_that_clips_alone_raises_on_every_rank() -> None:
    _, sharded = made()

    def train() -> None:
        with Join([sharded]):
            if dist.get_rank() == 1:
                sharded.clip_grad_norm_(1.0)
            sharded.step()

    with pytest.raises(
        RuntimeError, match=r"ranks \[1\] called clip_grad_norm_\(\), and ranks \[0\] stepped"
    ):
        train()


@on_ranks(2)
def test_inside_join_ranks_that_clip_with_other_arguments_raise_on_every_rank() -> None:
    _, sharded = made()

    def train() -> None:
        with Join([sharded]):
            sharded.clip_grad_norm_(1.0 + dist.get_rank())
            sharded.step()

    with pytest.raises(RankMismatchError, match=r"clip_grad_norm_: rank 0 has max_norm=1\.0, .* rank 1 has"):
        train()
