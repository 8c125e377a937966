"""Uneven inputs: a rank that ran out of them has the reduced gradients of what it owns."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.join import Join
from torch.optim import lr_scheduler

from overlap import loss_of
from pool import Ranks, on_ranks
from sharded import Setting
from test_sharded_training import Same, Words, sgd
from zero_optim import ZeroRedundancyOptimizer
from zero_optim.ddp import ShardedDataParallel


def train(model: nn.Module, optimizer: ZeroRedundancyOptimizer, longest: int) -> None:
    """One rank has more batches than the others."""
    rank = dist.get_rank()
    schedule = lr_scheduler.ExponentialLR(optimizer, 0.8)
    with Join([model, optimizer]):
        for number in range(5 if rank == longest else 2 + rank):
            optimizer.zero_grad()
            loss_of(model, number).backward()
            optimizer.step()
            schedule.step()


@on_ranks(2)
@pytest.mark.parametrize("longest", [0, 1])
@pytest.mark.parametrize(
    "setting",
    [
        Setting(),
        Setting(Same, options={"find_unused_parameters": True}),
        Setting(Words, sgd),
    ],
    ids=["plain", "unused", "sparse"],
)
def test_uneven_inputs_give_the_bits_of_whole_gradients(setting: Setting, longest: int) -> None:
    (whole, one), (sharded, other) = setting.whole(), setting.sharded()
    train(whole, one, longest)
    train(sharded, other, longest)
    for (name, want), param in zip(whole.named_parameters(), sharded.parameters(), strict=True):
        assert torch.equal(param, want), name


def train_epochs(model: nn.Module, optimizer: ZeroRedundancyOptimizer, set_to_none: bool) -> list[float]:
    """Gradients are clipped, and dropped at the end of an iteration; rank 1 has more batches."""
    norms = []
    for epoch in range(2):
        with Join([model, optimizer]):
            for number in range(1 + 2 * dist.get_rank()):
                loss_of(model, 10 * epoch + number).backward()
                norms.append(float(optimizer.clip_grad_norm_(0.01)))
                optimizer.step()
                optimizer.zero_grad(set_to_none=set_to_none)
        if dist.get_rank() == 0 and isinstance(model, ShardedDataParallel):
            assert all(param.grad is None for param in model.parameters())
    return norms


def epochs_alike(setting: Setting) -> None:
    for set_to_none in (True, False):
        (whole, one), (sharded, other) = setting.whole(), setting.sharded()
        assert train_epochs(sharded, other, set_to_none) == train_epochs(whole, one, set_to_none)
        for (name, want), param in zip(whole.named_parameters(), sharded.parameters(), strict=True):
            assert torch.equal(param, want), name


@pytest.mark.parametrize("setting", [Setting(), Setting(Words, sgd)], ids=["plain", "sparse"])
def test_clipping_and_a_second_epoch_give_the_bits_of_whole_gradients(
    ranks2: Ranks, setting: Setting
) -> None:
    ranks2.run(epochs_alike, setting)


def train_without_steps(model: nn.Module, optimizer: ZeroRedundancyOptimizer) -> None:
    with Join([model, optimizer]):
        for number in range(4 if dist.get_rank() == 0 else 0):
            loss_of(model, number).backward()


@on_ranks(2)
def test_several_reduced_passes_for_a_step_are_refused_on_every_rank() -> None:
    wrapped, optimizer = Setting().sharded()
    with pytest.raises(RuntimeError, match=r"pass that is reduced must be followed by optimizer\.step"):
        train_without_steps(wrapped, optimizer)
