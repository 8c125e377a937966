"""Several backward passes before a step: which bits each way of adding up gives, and what is refused."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from overlap import Net, adamw, inputs, loss_of
from pool import Ranks, on_ranks
from sharded import Setting, assert_same_gradients, assert_same_run, cut_adamw
from zero_optim import ZeroRedundancyOptimizer
from zero_optim.ddp import ShardedDataParallel
from zero_optim.step.gradients import owned_gradient, rows_of
from zero_optim.step.partial import PartialGradient

NUM_PASSES = 3


def grads_alone(model: nn.Module, number: int, rank: int) -> list[Tensor]:
    """The gradients of one micro-batch of one rank."""
    model.zero_grad()
    model(inputs(number, rank)).square().mean().backward()
    return [param.grad.clone() for param in model.parameters() if param.grad is not None]


def added(totals: list[Tensor], more: list[Tensor]) -> list[Tensor]:
    return [total + grad for total, grad in zip(totals, more, strict=True)] if totals else more


def expected_sums(accumulate: str) -> list[Tensor]:
    """In one process, what the owners have after some passes."""
    size, alone = dist.get_world_size(), Net()
    totals: list[Tensor] = []
    if accumulate == "owner":  # over ranks first, then over passes
        for number in range(NUM_PASSES):
            of_pass: list[Tensor] = []
            for rank in range(size):
                of_pass = added(of_pass, [grad * (1 / size) for grad in grads_alone(alone, number, rank)])
            totals = added(totals, of_pass)
        return totals
    for rank in range(size):  # over passes first, on each rank, then over ranks
        of_rank: list[Tensor] = []
        for number in range(NUM_PASSES):
            of_rank = added(of_rank, grads_alone(alone, number, rank))
        totals = added(totals, [grad * (1 / size) for grad in of_rank])
    return totals


def run_passes(model: ShardedDataParallel, accumulate: str) -> None:
    for number in range(NUM_PASSES):
        if accumulate == "local" and number < NUM_PASSES - 1:
            with model.no_sync():
                loss_of(model, number).backward()
        else:
            loss_of(model, number).backward()


def adds_up(accumulate: Any) -> None:
    model = Net()
    wrapped = ShardedDataParallel(model, adamw(model), accumulate=accumulate)
    run_passes(wrapped, accumulate)
    num_owned = 0
    for param, want in zip(model.parameters(), expected_sums(accumulate), strict=True):
        if not isinstance(param.grad, PartialGradient):
            assert param.grad is not None
            assert torch.equal(param.grad, want)
            num_owned += 1
    assert num_owned


@pytest.mark.parametrize("accumulate", ["owner", "local"])
def test_sums_have_the_bits_that_are_stated(ranks_2_and_4: Ranks, accumulate: str) -> None:
    ranks_2_and_4.run(adds_up, accumulate)


@on_ranks(2)
def test_owners_add_up_in_the_gradients_they_have() -> None:
    model = Net()
    optimizer = adamw(model)
    wrapped = ShardedDataParallel(model, optimizer)
    loss_of(wrapped, 0).backward()
    before = [param.grad for param in model.parameters()]
    loss_of(wrapped, 1).backward()
    assert all(param.grad is grad for param, grad in zip(model.parameters(), before, strict=True))


class TwoHeads(nn.Module):
    """Two outputs of one trunk."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.trunk = nn.Linear(18, 8)
        self.left = nn.Linear(8, 2)
        self.right = nn.Linear(8, 2)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        hidden = self.trunk(x.flatten(1)).tanh()
        return self.left(hidden), self.right(hidden)


@on_ranks(2)
@pytest.mark.parametrize("accumulate", ["owner", "local"])
def test_two_losses_of_one_forward_pass_add_up(accumulate: str) -> None:
    """Of one forward pass: one backward pass each, where a part may be unused."""
    options = {"find_unused_parameters": True}
    setting = Setting(TwoHeads, options=options, accumulate=accumulate)
    (sharded, other), alone = setting.sharded(), TwoHeads()
    left, right = sharded(inputs(0))
    left.square().mean().backward(retain_graph=True)
    right.square().mean().backward()
    size = dist.get_world_size()
    totals: dict[str, Tensor] = {}
    for part in (0, 1):
        of_pass: dict[str, Tensor] = {}
        for rank in range(size):
            alone.zero_grad()
            alone(inputs(0, rank))[part].square().mean().backward()
            for name, param in alone.named_parameters():
                if param.grad is not None:
                    grad = param.grad * (1 / size)
                    of_pass[name] = of_pass[name] + grad if name in of_pass else grad
        for name, grad in of_pass.items():
            totals[name] = totals[name] + grad if name in totals else grad
    for name, param in sharded.module.named_parameters():
        if not isinstance(param.grad, PartialGradient):
            assert param.grad is not None
            assert torch.equal(param.grad, totals[name]), name
    other.step()


@on_ranks(2)
def test_owners_that_add_up_refuse_no_sync() -> None:
    wrapped, optimizer = Setting().sharded()
    with pytest.raises(RuntimeError, match=r'accumulate="owner" adds several .* build .* accumulate="local"'):
        wrapped.no_sync()
    loss_of(wrapped, 0).backward()
    optimizer.step()


@on_ranks(2)
def test_a_local_pass_behind_a_reduced_one_is_refused() -> None:
    (whole, one), (sharded, other) = Setting().whole(), Setting(accumulate="local").sharded()
    loss_of(sharded, 0).backward()
    with sharded.no_sync(), pytest.raises(RuntimeError, match=r"reduced to its owners.*Call zero_grad\(\)"):
        loss_of(sharded, 1).backward()
    # PyTorch's loop may go on, as nothing was added.
    other.step()
    loss_of(whole, 0).backward()
    one.step()
    assert_same_gradients(sharded, whole)


@on_ranks(2)
def test_what_no_rank_uses_keeps_its_sum() -> None:
    """A frozen parameter keeps what was added up for it."""
    model = Net()
    optimizer = adamw(model)
    wrapped = ShardedDataParallel(model, optimizer, find_unused_parameters=True)
    loss_of(wrapped, 0).backward()
    weight = model.spare.weight
    before = weight.grad
    copy = None if isinstance(before, PartialGradient) or before is None else before.clone()
    weight.requires_grad_(False)
    loss_of(wrapped, 1).backward()
    assert weight.grad is before
    assert copy is None or (before is not None and torch.equal(before, copy))


@on_ranks(2)
def test_zero_grad_may_come_between_forward_and_a_local_pass() -> None:
    """PyTorch's order: zero_grad() comes between forward and backward."""

    def step(model: Any, optimizer: ZeroRedundancyOptimizer, number: int) -> None:
        with model.no_sync():
            loss = loss_of(model, 2 * number)
            optimizer.zero_grad()
            loss.backward()
        loss_of(model, 2 * number + 1).backward()
        optimizer.step()

    assert_same_run(Setting(accumulate="local"), step)


@on_ranks(2)
@pytest.mark.parametrize("setting", [Setting(), Setting(optimizer=cut_adamw)], ids=["whole", "cut"])
def test_owners_add_to_whole_gradients_that_the_user_set(setting: Setting) -> None:
    """The user puts whole gradients there: zeros, then some value."""

    def step(model: nn.Module, optimizer: ZeroRedundancyOptimizer, number: int) -> None:
        for param in model.parameters():
            param.grad = torch.full_like(param, float(number))
        loss_of(model, number).backward()
        optimizer.step()

    (whole, one), (sharded, other) = setting.whole(), setting.sharded()
    step(whole, one, 0)
    step(sharded, other, 0)
    assert_same_gradients(sharded, whole)
    step(whole, one, 2)
    step(sharded, other, 2)
    for param, want in zip(sharded.parameters(), whole.parameters(), strict=True):
        assert want.grad is not None
        piece = next((piece for piece in other.pieces()[param] if piece.owner == dist.get_rank()), None)
        assert isinstance(param.grad, PartialGradient) == (piece is None or len(other.pieces()[param]) > 1)
        if piece is not None:
            rows = owned_gradient(param, piece)
            assert rows is not None
            assert torch.allclose(rows, rows_of(want.grad, piece), atol=1e-6)
