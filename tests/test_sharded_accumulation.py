"""Several backward passes before a step: which bits each way of adding up gives, and what is refused."""

from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from overlap import Net, adamw, inputs, loss_of
from pool import Ranks, on_ranks
from sharded import Setting, assert_same_gradients, assert_same_run, cut_adamw
from training import assert_same_bits
from zero_optim import ZeroRedundancyOptimizer
from zero_optim.ddp import FullyShardedDataParallel, ShardedDataParallel
from zero_optim.step.gradients import rows_of
from zero_optim.step.partial import PartialGradient, rows_here

NUM_PASSES = 3
Grads = dict[str, Tensor]


def grads_alone(model: nn.Module, number: int, rank: int, part: int | None = None) -> Grads:
    """The gradients of one micro-batch of one rank, of one of the model's outputs."""
    model.zero_grad()
    out = model(inputs(number, rank))
    (out if part is None else out[part]).square().mean().backward()
    return {name: param.grad.clone() for name, param in model.named_parameters() if param.grad is not None}


def added(totals: Grads, more: Grads) -> Grads:
    return totals | {name: totals[name] + grad if name in totals else grad for name, grad in more.items()}


def scaled(grads: Grads) -> Grads:
    return {name: grad * (1 / dist.get_world_size()) for name, grad in grads.items()}


def over_ranks(model: nn.Module, number: int, part: int | None = None) -> Grads:
    """The gradients of one pass, averaged in the order of ranks."""
    of_pass: Grads = {}
    for rank in range(dist.get_world_size()):
        of_pass = added(of_pass, scaled(grads_alone(model, number, rank, part)))
    return of_pass


def assert_owned(model: nn.Module, expected: Grads) -> None:
    """Gradients that this rank owns are the expected ones; there are some."""
    num_owned = 0
    for name, param in model.named_parameters():
        if not isinstance(param.grad, PartialGradient):
            assert param.grad is not None
            assert torch.equal(param.grad, expected[name]), name
            num_owned += 1
    assert num_owned


def expected_sums(accumulate: str) -> Grads:
    """In one process, what the owners have after some passes."""
    alone, totals = Net(), Grads()
    if accumulate == "owner":  # over ranks first, then over passes
        for number in range(NUM_PASSES):
            totals = added(totals, over_ranks(alone, number))
        return totals
    for rank in range(dist.get_world_size()):  # over passes first, on each rank, then over ranks
        of_rank: Grads = {}
        for number in range(NUM_PASSES):
            of_rank = added(of_rank, grads_alone(alone, number, rank))
        totals = added(totals, scaled(of_rank))
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
    assert_owned(model, expected_sums(accumulate))


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
    assert_owned(sharded.module, added(over_ranks(alone, 0, 0), over_ranks(alone, 0, 1)))
    other.step()


class Normed(nn.Module):
    """With buffers that each forward pass changes."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.layers = nn.Sequential(nn.Linear(18, 8), nn.BatchNorm1d(8), nn.Linear(8, 2))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.layers(x.flatten(1))
        return out


def steps_of_passes(kind: Any, way: str) -> list[Tensor]:
    """Train with several passes a step, as loops for DDP do; gradients, weights and buffers of each step."""
    model, results = Normed(), list[Tensor]()
    optimizer = adamw(model)
    wrapped = kind(model, optimizer)
    wrapped.metrics()
    for step in range(2):
        optimizer.zero_grad()
        for number in range(NUM_PASSES):
            syncs = number == NUM_PASSES - 1 or way == "plain"
            with nullcontext() if syncs or way == "around backward" else wrapped.no_sync():
                loss = loss_of(wrapped, NUM_PASSES * step + number)
                with nullcontext() if syncs else wrapped.no_sync():
                    loss.backward()
        grads = (param.grad for param in model.parameters())
        results += [grad.clone() for grad in grads if not isinstance(grad, PartialGradient | None)]
        optimizer.step()
        wrapped.check_finished()
        results += [value.clone() for value in wrapped.state_dict().values()]
    assert wrapped.metrics()["passes"] == 2 * NUM_PASSES  # each is reduced
    return results


@on_ranks(2)
@pytest.mark.parametrize("kind", [ShardedDataParallel, FullyShardedDataParallel])
def test_loops_for_ddp_accumulate_on_owners_with_the_bits_of_a_loop_without_no_sync(kind: Any) -> None:
    expected = steps_of_passes(kind, "plain")
    for way in ("around all", "around backward"):
        assert_same_bits(steps_of_passes(kind, way), expected)


@on_ranks(2)
def test_a_local_pass_behind_a_reduced_one_is_refused() -> None:
    (whole, one), (sharded, other) = Setting().whole(), Setting(accumulate="local").sharded()
    loss_of(sharded, 0).backward()
    announced = loss_of(sharded, 1)
    for loss in (announced, None):  # also of a forward pass under no_sync()
        with sharded.no_sync(), pytest.raises(RuntimeError, match=r"to its owners.*Call zero_grad\(\)"):
            (loss_of(sharded, 1) if loss is None else loss).backward()
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
            rows = rows_here(param)
            assert rows is not None
            assert torch.allclose(rows, rows_of(want.grad, piece), atol=1e-6)
