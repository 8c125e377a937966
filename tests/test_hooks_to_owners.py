"""The comm hook that reduces gradients to owners: what `test_parity` does not show of it."""

from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.distributed.algorithms.join import Join

import overlap
from overlap import BUCKET_CAP_MB, WRAPPERS, Net, adamw, both_wrappers, loss_of
from pool import on_ranks
from zero_optim import ZeroRedundancyOptimizer
from zero_optim.hooks import zero_step

HOOK = partial(zero_step, gradients="owners")


def built(wrapper: str, hook: Any = HOOK, model: Any = Net) -> tuple[Any, ZeroRedundancyOptimizer]:
    return overlap.built(WRAPPERS[wrapper], hook, model, bucket_cap_mb=BUCKET_CAP_MB)


def pair(wrapper: str, model: Any = Net) -> list[tuple[Any, ZeroRedundancyOptimizer]]:
    """The same run without a hook and with one."""
    return [built(wrapper, each, model) for each in (None, HOOK)]


def assert_alike(runs: list[tuple[Any, ZeroRedundancyOptimizer]]) -> None:
    for want, param in zip(*(model.parameters() for model, _ in runs), strict=True):
        assert torch.equal(param, want)


def clipped_step(model: nn.Module, optimizer: ZeroRedundancyOptimizer, number: int) -> Tensor:
    optimizer.zero_grad(set_to_none=number % 2 == 0)
    loss_of(model, number).backward()
    norm = optimizer.clip_grad_norm_(0.01)
    optimizer.step()
    return norm


@on_ranks(2)
def test_sparse_gradients_are_refused_on_every_rank() -> None:
    model, _ = built("torch", model=overlap.Embedder)
    with pytest.raises(ValueError, match=r"reduction to owners expected dense .* torch\.sparse_coo"):
        model(torch.arange(4)).sum().backward()


@on_ranks(2)
@pytest.mark.parametrize("fewest", [0, 1])
def test_join_is_refused_on_every_rank(fewest: int) -> None:
    """Rank 1 has one batch more, and meets the refusal in a backward pass."""
    model, optimizer = built("ours")

    def train() -> None:
        with Join([model, optimizer]):
            for number in range(fewest + dist.get_rank()):
                clipped_step(model, optimizer, number)

    with pytest.raises(RuntimeError, match=r"owners take no part in Join: .* use stage 1"):
        train()


@on_ranks(2)
def test_what_cannot_own_the_gradients_is_refused() -> None:
    model = Net()
    with pytest.raises(ValueError, match="has a reduction of its own: leave out allreduce_hook"):
        zero_step(adamw(model), allreduce_hook, gradients="owners")
    few = ZeroRedundancyOptimizer(model.head.parameters(), torch.optim.SGD, lr=0.1)
    wrapped = WRAPPERS["torch"](model)
    wrapped.register_comm_hook(None, HOOK(few))
    with pytest.raises(ValueError, match="not in the optimizer, so they have no owner"):
        loss_of(wrapped, 0).backward()


@on_ranks(2)
def test_a_second_pass_without_zero_grad_raises_on_every_rank() -> None:
    model, optimizer = built("torch")
    loss_of(model, 0).backward()
    optimizer.step()
    with pytest.raises(RuntimeError, match=r"gradient of parameter .*(?s:.*)[Cc]all zero_grad\(\)"):
        loss_of(model, 1).backward()
    dist.barrier()  # with the optimizer alive: else the other rank may hear that this one has let go of it


class Single(nn.Module):
    """One parameter."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(18, 3, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.layer(x.flatten(1))
        return out


@on_ranks(2)
@both_wrappers
def test_passes_add_up_where_one_rank_owns_every_parameter(wrapper: str) -> None:
    runs = pair(wrapper, Single)
    for number in range(4):
        for model, optimizer in runs:
            loss_of(model, number).backward()
            optimizer.step()  # the hook has stepped with what was added up so far
    assert_alike(runs)
