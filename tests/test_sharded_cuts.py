"""Sharded gradients of parameters that are cut: each owner has its rows."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from cuts import cutting
from overlap import Net, adamw, loss_of
from pool import Ranks, on_ranks
from sharded import Setting, assert_same_run
from test_sharded_training import Scaled, Words, sgd
from zero_optim import ZeroRedundancyOptimizer
from zero_optim.step.partial import PartialGradient


def cut_adamw(model: nn.Module, **options: Any) -> ZeroRedundancyOptimizer:
    with cutting():
        optimizer = adamw(model, bucket_cap_mb=0.002, **options)
    assert any(len(pieces) > 1 for pieces in optimizer.pieces().values())
    return optimizer


def cut_sgd(model: nn.Module) -> ZeroRedundancyOptimizer:
    with cutting():
        return sgd(model)


@on_ranks(2)
def test_an_owner_of_rows_has_the_gradient_of_its_rows() -> None:
    (whole, _), (sharded, optimizer) = Setting().whole(), Setting(optimizer=cut_adamw).sharded()
    for model in (whole, sharded):
        loss_of(model, 0).backward()
    num_cut = 0
    for param, other in zip(sharded.module.parameters(), whole.module.parameters(), strict=True):
        pieces, grad = optimizer.pieces()[param], param.grad
        piece = next((piece for piece in pieces if piece.owner == dist.get_rank()), None)
        if len(pieces) > 1 and piece is not None:
            assert isinstance(grad, PartialGradient)
            assert grad.piece is not None
            assert other.grad is not None
            assert torch.equal(grad.piece, other.grad[piece.start : piece.stop])
            num_cut += 1
        else:
            assert isinstance(grad, PartialGradient) == (piece is None)
    assert num_cut


def trains_alike(setting: Setting) -> None:
    assert_same_run(setting)


@pytest.mark.parametrize(
    "setting",
    [
        Setting(optimizer=cut_adamw),
        Setting(Words, cut_sgd),
    ],
    ids=["dense", "sparse"],
)
def test_training_gives_the_bits_of_whole_gradients(ranks2: Ranks, setting: Setting) -> None:
    ranks2.run(trains_alike, setting)


@on_ranks(2)
def test_scaling_and_adding_up_give_the_bits_of_whole_gradients() -> None:
    scaled = Scaled(unscales=False)

    def step(model: nn.Module, optimizer: ZeroRedundancyOptimizer, number: int) -> float:
        return scaled(model, optimizer, number)

    assert_same_run(Setting(optimizer=cut_adamw), step, steps=2)

    def twice(model: Any, optimizer: ZeroRedundancyOptimizer, number: int) -> None:
        optimizer.zero_grad(set_to_none=number != 1)
        with model.no_sync():
            loss_of(model, 2 * number).backward()
        loss_of(model, 2 * number + 1).backward()
        optimizer.step()

    assert_same_run(Setting(optimizer=cut_adamw, accumulate="local"), twice)


def norms(setting: Setting, norm_type: float) -> list[Tensor]:
    found = []
    for model, optimizer in (setting.whole(), setting.sharded()):
        loss_of(model, 0).backward()
        found.append(optimizer.clip_grad_norm_(0.01, norm_type))
        found.append(optimizer.clip_grad_norm_(1.0, norm_type))
    return found


@pytest.mark.parametrize("norm_type", [2.0, 1.0, float("inf")])
def test_the_norm_of_rows_is_that_of_the_whole(ranks2: Ranks, norm_type: float) -> None:
    one, other = ranks2.run(norms, Setting(Net, cut_adamw), norm_type)
    assert one == other
    whole, clipped, sharded, clipped_rows = one
    assert torch.allclose(whole, sharded, rtol=1e-6, atol=0)
    assert torch.allclose(clipped, clipped_rows, rtol=1e-5, atol=0)
    assert torch.allclose(clipped_rows, torch.tensor(0.01), rtol=1e-3)


def test_the_largest_element_of_rows_is_that_of_the_whole(ranks2: Ranks) -> None:
    for whole, _, sharded, _ in ranks2.run(norms, Setting(Net, cut_adamw), float("inf")):
        assert torch.equal(whole, sharded)
