"""Sharded gradients: which a rank has, cut parameters, several passes a step; more bits in `test_parity`."""

import copy
from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from overlap import Net, adamw, inputs, loss_of
from parity_reference import InRankOrder
from pool import on_ranks
from sharded import Setting, assert_same_gradients, cut_adamw
from training import assert_same_bits
from zero_optim import ZeroRedundancyOptimizer
from zero_optim.ddp import DistributedDataParallel, FullyShardedDataParallel, ShardedDataParallel
from zero_optim.plan.pieces import rows_of
from zero_optim.step.partial import PartialGradient, rows_here


@on_ranks(2)
def test_a_rank_has_the_gradients_of_what_it_owns_alone() -> None:
    model = Net()
    optimizer = adamw(model)
    wrapped = ShardedDataParallel(model, optimizer)
    loss_of(wrapped, 0).backward()
    owned = set(optimizer.owned_parameters())
    assert 0 < len(owned) < len(list(model.parameters()))
    for param in model.parameters():
        assert isinstance(param.grad, PartialGradient) == (param not in owned)
        assert (param.grad.data_ptr() == 0) == (param not in owned)
    optimizer.step()
    optimizer.zero_grad()
    assert all(param.grad is None for param in model.parameters())


@on_ranks(2)
def test_an_owner_of_rows_has_their_gradient_and_their_norms() -> None:
    (whole, one), (sharded, other) = Setting().whole(), Setting(optimizer=cut_adamw).sharded()
    for model in (whole, sharded):
        loss_of(model, 0).backward()
    assert any(len(pieces) > 1 for pieces in other.pieces().values())
    assert_same_gradients(sharded, whole)
    for param, pieces in other.pieces().items():
        is_partial = len(pieces) > 1 or pieces[0].owner != dist.get_rank()
        assert isinstance(param.grad, PartialGradient) == is_partial
    for norm_type in (float("inf"), 2.0, 1.0):  # each larger than the one before
        for max_norm in (0.01, 1.0):  # the second finds what the first has left
            want, got = (optimizer.clip_grad_norm_(max_norm, norm_type) for optimizer in (one, other))
            assert torch.allclose(got, want, rtol=1e-5, atol=0), (norm_type, max_norm)
            assert torch.equal(got, want) or norm_type != float("inf")
            norms = [torch.empty_like(got) for _ in range(dist.get_world_size())]
            dist.all_gather(norms, got)
            assert all(torch.equal(norm, got) for norm in norms)
        assert torch.allclose(got, torch.tensor(0.01), rtol=1e-3)


@on_ranks(2)
def test_a_copy_has_an_optimizer_of_its_own_and_trains() -> None:
    wrapped, optimizer = Setting().sharded()
    loss_of(wrapped, 0).backward()
    optimizer.step()
    other = copy.deepcopy(wrapped)
    for model, stepped in ((wrapped, optimizer), (other, other._optimizer)):
        stepped.zero_grad()
        loss_of(model, 1).backward()
        stepped.step()
    for a, b in zip(wrapped.parameters(), other.parameters(), strict=True):
        assert a is not b
        assert torch.equal(a, b)


@on_ranks(2)
def test_averages_begin_at_the_weights_that_ranks_agree_on() -> None:
    """Ranks begin with other weights, and take those of the first by wrapping."""
    found = []
    for is_sharded in (False, True):
        torch.manual_seed(dist.get_rank())
        model = nn.Sequential(nn.Linear(18, 8), nn.Linear(8, 4)).bfloat16()
        build = partial(adamw, model, master_dtype=torch.float32, ema_decay=0.5)
        if is_sharded:
            optimizer = build()
            ShardedDataParallel(model, optimizer)
        else:
            DistributedDataParallel(model)
            optimizer = build()
        with optimizer.averaged_weights():
            found.append([param.detach().clone() for param in model.parameters()])
            assert all(torch.equal(a, b) for a, b in zip(found[0], model.parameters(), strict=True))


NUM_PASSES = 3


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
    (sharded, other), whole = (
        Setting(TwoHeads, options={"find_unused_parameters": True}, accumulate=accumulate).sharded(),
        InRankOrder(TwoHeads(), by_pass=True),
    )
    for model in (sharded, whole):
        left, right = model(inputs(0))
        left.square().mean().backward(retain_graph=True)
        right.square().mean().backward()
    assert_same_gradients(sharded, whole)
    other.step()


def steps_of_passes(kind: Any, way: str) -> list[Tensor]:
    """Train with several passes a step, as loops for DDP do; gradients, weights and buffers of each step."""
    torch.manual_seed(5)
    layers = nn.Flatten(), nn.Linear(18, 8), nn.BatchNorm1d(8), nn.Linear(8, 2)  # with buffers that change
    model, results = nn.Sequential(*layers), list[Tensor]()
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
            assert torch.allclose(rows, rows_of(want.grad, piece), atol=1e-6)
