"""The comm hooks that reduce gradients to owners: what `test_parity` does not show of them."""

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
from test_overlap_errors import Breaking
from zero_optim import ReductionError, ZeroRedundancyOptimizer
from zero_optim.hooks import reduce_to_owners, zero_step

HOOKS: dict[str, Any] = {
    "reduce_to_owners": reduce_to_owners,
    "zero_step": partial(zero_step, gradients="owners"),
}
both_hooks = pytest.mark.parametrize("hook", HOOKS)


def built(
    wrapper: str, hook: str | None, model: Any = Net, **options: Any
) -> tuple[Any, ZeroRedundancyOptimizer]:
    make = None if hook is None else HOOKS[hook]
    return overlap.built(WRAPPERS[wrapper], make, model, bucket_cap_mb=BUCKET_CAP_MB, **options)


def pair(wrapper: str, hook: str, model: Any = Net) -> list[tuple[Any, ZeroRedundancyOptimizer]]:
    """The same run without a hook and with one."""
    return [built(wrapper, each, model) for each in (None, hook)]


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
@both_hooks
def test_sparse_gradients_are_refused_on_every_rank(hook: str) -> None:
    model, _ = built("torch", hook, overlap.Embedder)
    with pytest.raises(ValueError, match=r"reduction to owners expected dense .* torch\.sparse_coo"):
        model(torch.arange(4)).sum().backward()


@on_ranks(2)
@both_hooks
@pytest.mark.parametrize("fewest", [0, 1])
def test_join_is_refused_on_every_rank(hook: str, fewest: int) -> None:
    """Rank 1 has one batch more, and meets the refusal in a backward pass."""
    model, optimizer = built("ours", hook)

    def train() -> None:
        with Join([model, optimizer]):
            for number in range(fewest + dist.get_rank()):
                clipped_step(model, optimizer, number)

    with pytest.raises(RuntimeError, match=r"owners take no part in Join: .* use stage 1"):
        train()


@on_ranks(2)
def test_what_cannot_own_the_gradients_is_refused() -> None:
    model = Net()
    plain: Any = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(TypeError, match=r"expected a zero_optim\.ZeroRedundancyOptimizer, got SGD"):
        reduce_to_owners(plain)
    with pytest.raises(RuntimeError, match="overlap_with_ddp=True, and waits"):
        reduce_to_owners(adamw(model, overlap_with_ddp=True))
    optimizer = adamw(model)
    with pytest.raises(ValueError, match="has a reduction of its own: leave out allreduce_hook"):
        zero_step(optimizer, allreduce_hook, gradients="owners")
    few = ZeroRedundancyOptimizer(model.head.parameters(), torch.optim.SGD, lr=0.1)
    wrapped = WRAPPERS["torch"](model)
    wrapped.register_comm_hook(None, reduce_to_owners(few))
    with pytest.raises(ValueError, match="not in the optimizer, so it has no owner"):
        loss_of(wrapped, 0).backward()


@on_ranks(2)
@both_hooks
def test_a_second_pass_without_zero_grad_raises_on_every_rank(hook: str) -> None:
    model, optimizer = built("torch", hook)
    loss_of(model, 0).backward()
    if hook == "zero_step":
        optimizer.step()
    with pytest.raises(RuntimeError, match=r"gradient of parameter .*(?s:.*)[Cc]all zero_grad\(\)"):
        loss_of(model, 1).backward()
    dist.barrier()  # with the optimizer alive: else the other rank may hear that this one has let go of it


@on_ranks(2)
@pytest.mark.parametrize("told_in", ["forward", "backward"])
def test_training_goes_on_after_a_pass_that_an_exception_broke_off(told_in: str) -> None:
    """After a pass that broke off, and the error that tells of it, the bits are those of a run without it."""
    runs = pair("ours", "reduce_to_owners", Breaking)
    sharded, other = runs[1]
    for model, optimizer in runs:
        clipped_step(model, optimizer, 0)
    other.zero_grad()
    late = loss_of(sharded, 1)
    with pytest.raises(ArithmeticError, match="on purpose"):
        sharded(overlap.inputs(1), True).sum().backward()
    other.zero_grad()
    with pytest.raises(ReductionError, match="every rank: a backward pass ended with an exception"):
        loss_of(sharded, 2) if told_in == "forward" else late.backward()
    other.zero_grad()
    for number in range(2, 5):
        assert torch.equal(*(clipped_step(*each, number) for each in runs))
    assert_alike(runs)


def single() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Flatten(), nn.Linear(18, 3, bias=False))


@on_ranks(2)
@both_hooks
@both_wrappers
def test_passes_add_up_where_one_rank_owns_every_parameter(wrapper: str, hook: str) -> None:
    runs = pair(wrapper, hook, single)
    for number in range(4):
        for model, optimizer in runs:
            loss_of(model, number).backward()
            if hook == "zero_step":  # which has stepped with what was added up so far
                optimizer.step()
            elif number % 2:
                optimizer.step()
                optimizer.zero_grad()
    assert_alike(runs)
