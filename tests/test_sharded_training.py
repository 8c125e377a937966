"""With sharded gradients a loop trains, bit for bit, as with whole ones."""

import torch

from overlap import Net, adamw, loss_of
from pool import Ranks
from sharded import Setting, assert_same_run
from zero_optim import ZeroRedundancyOptimizer
from zero_optim.ddp import ShardedDataParallel
from zero_optim.step.partial import PartialGradient


def trains_alike(setting: Setting) -> None:
    assert_same_run(setting)


def test_training_gives_the_bits_of_whole_gradients(ranks2: Ranks) -> None:
    ranks2.run(trains_alike, Setting())


def has_only_its_own_gradients() -> None:
    model = Net()
    optimizer = adamw(model)
    wrapped = ShardedDataParallel(model, optimizer)
    loss_of(wrapped, 0).backward()
    owned = set(optimizer.owned_parameters())
    assert 0 < len(owned) < len(list(model.parameters()))
    for param in model.parameters():
        assert param.grad is not None
        assert isinstance(param.grad, PartialGradient) == (param not in owned)
        assert (param.grad.data_ptr() == 0) == (param not in owned)
    optimizer.step()
    optimizer.zero_grad()
    assert all(param.grad is None for param in model.parameters())


def test_a_rank_has_the_gradients_of_what_it_owns_alone(ranks2: Ranks) -> None:
    ranks2.run(has_only_its_own_gradients)


def clips_alike(norm_type: float, foreach: bool | None) -> None:
    def step(model: torch.nn.Module, optimizer: ZeroRedundancyOptimizer, number: int) -> torch.Tensor:
        optimizer.zero_grad()
        loss_of(model, number).backward()
        norm = optimizer.clip_grad_norm_(0.01, norm_type, foreach=foreach)
        optimizer.step()
        return norm

    assert_same_run(Setting(), step)


def test_clipping_gives_the_bits_of_whole_gradients(ranks2: Ranks) -> None:
    ranks2.run(clips_alike, 2.0, None)
    ranks2.run(clips_alike, float("inf"), True)
