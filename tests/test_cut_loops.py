"""Cut parameters in loops of many kinds: closures, clipping, scaling, Join, lazy gathers; bit for bit."""

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.join import Join
from torch.optim import Optimizer

from cuts import ONE_A_BUCKET, SHAPES, cut_pair, cutting, sparse_gradient
from pool import on_ranks
from training import agreeing_scaler, assert_same_bits, make_params, params_of, set_grads, train_both
from zero_optim import ZeroRedundancyOptimizer


@on_ranks(2)
def test_a_closure_makes_the_gradients_of_cut_parameters() -> None:
    plain, sharded = cut_pair(make_params(((64, 4), (3,))), torch.optim.SGD, options={"lr": 0.1})
    calls = []

    def closure_for(optimizer: Optimizer) -> Any:
        def closure() -> Tensor:
            calls.append(torch.is_grad_enabled())
            optimizer.zero_grad()
            loss = torch.stack([p.square().sum() for p in params_of(optimizer)]).sum()
            loss.backward()  # type: ignore[no-untyped-call]
            return loss

        return closure

    for step in range(3):
        expected = plain.step(closure_for(plain))
        assert torch.equal(expected, sharded.step(closure_for(sharded)))  # type: ignore[arg-type]
        assert_same_bits(params_of(sharded), params_of(plain), step)
    assert calls == [True] * 6


@on_ranks(2)
@pytest.mark.parametrize("norm_type", [2.0, 1.0, float("inf")])
def test_the_norm_of_a_cut_parameter_is_pytorchs_to_the_bit(norm_type: float) -> None:
    shapes = [shape for shape in SHAPES if 0 not in shape]  # PyTorch has no maximum of nothing
    plain, sharded = cut_pair(make_params(shapes), torch.optim.SGD, options={"lr": 0.1})
    for step in range(2):
        for optimizer in (plain, sharded):
            set_grads(params_of(optimizer), step, scale=3.0)
        expected = nn.utils.clip_grad_norm_(params_of(plain), 1.0, norm_type)
        assert torch.equal(sharded.clip_grad_norm_(1.0, norm_type), expected)
        for param, other in zip(params_of(sharded), params_of(plain), strict=True):
            assert param.grad is not None
            assert other.grad is not None
            assert torch.equal(param.grad, other.grad)
        for optimizer in (plain, sharded):
            optimizer.step()
        assert_same_bits(params_of(sharded), params_of(plain), step)


@on_ranks(2)
@pytest.mark.parametrize("rows_of_rank", [0, 1])
@pytest.mark.parametrize("unscale_first", [False, True])
def test_an_infinity_in_one_piece_skips_the_step_everywhere(unscale_first: bool, rows_of_rank: int) -> None:
    """One infinity, in rows that one rank owns, and on that rank alone."""
    plain, sharded = cut_pair(make_params(((64, 8), (5,))))
    kinds = (torch.amp.GradScaler, agreeing_scaler)
    scalers = [kind("cpu", init_scale=8.0, growth_interval=2) for kind in kinds]
    for step in range(4):
        for optimizer, scaler in zip((plain, sharded), scalers, strict=True):
            scaler.scale(torch.zeros(()))
            set_grads(params_of(optimizer), step, scale=8.0)
            if step == 1 and (optimizer is plain or dist.get_rank() == rows_of_rank):
                grad = params_of(optimizer)[0].grad
                assert grad is not None
                grad[63 * rows_of_rank, 3] = float("inf")
            if unscale_first:
                scaler.unscale_(optimizer)
            scaler.step(optimizer)
            scaler.update()
        assert_same_bits(params_of(sharded), params_of(plain), step)
        assert scalers[0].get_scale() == scalers[1].get_scale()


@on_ranks(2)
@pytest.mark.parametrize("keeps_gradients", [True, False])
@pytest.mark.parametrize("sparse", [False, True])
def test_a_joined_rank_is_lent_the_rows_that_it_owns(sparse: bool, keeps_gradients: bool) -> None:
    """Rank 1 runs out of inputs after two steps; rank 0 goes on, and lends it its rows."""
    optimizer_class = torch.optim.SGD if sparse else torch.optim.AdamW
    plain, sharded = cut_pair(make_params(((64, 4), (32, 8), (3,))), optimizer_class, options={"lr": 0.1})

    def give(optimizer: Optimizer, step: int) -> None:
        for index, param in enumerate(params_of(optimizer)):
            if sparse and param.dim() == 2:
                param.grad = sparse_gradient(param, step + 10 * index, coalesced=True)
            else:
                param.grad = torch.full_like(param, 0.5 + step)
            if index == step % 4:
                param.grad = None

    with Join([sharded]):
        for step in range(2 + 4 * (dist.get_rank() == 0)):
            give(sharded, step)
            sharded.step()
        if not keeps_gradients:
            sharded.zero_grad()
    for step in range(6):
        give(plain, step)
        plain.step()
    assert_same_bits(params_of(sharded), params_of(plain))


@on_ranks(2)
def test_lazy_gathers_bring_all_pieces() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 16))
    other = copy.deepcopy(model)
    with cutting():
        sharded = ZeroRedundancyOptimizer(
            model.parameters(), torch.optim.AdamW, bucket_cap_mb=ONE_A_BUCKET, lr=0.01
        )
    sharded.gather_lazily(model)
    plain = torch.optim.AdamW(other.parameters(), lr=0.01)
    for step in range(5):
        x = torch.randn(3, 16, generator=torch.Generator().manual_seed(step))
        losses = []
        for net, optimizer in ((model, sharded), (other, plain)):
            optimizer.zero_grad()
            loss = net(x).square().sum()
            loss.backward()
            optimizer.step()
            losses.append(loss)
        assert torch.equal(*losses)
    sharded.wait_for_gathers()
    assert_same_bits(list(model.parameters()), list(other.parameters()))


class Switching(torch.optim.SGD):
    """Has a method that changes parameters, as schedule-free classes do."""

    @torch.no_grad()
    def double(self) -> None:
        for group in self.param_groups:
            for param in group["params"]:
                param.mul_(2)


@on_ranks(2)
def test_methods_of_the_class_reach_all_pieces() -> None:
    plain, sharded = cut_pair(make_params(SHAPES), Switching)
    train_both(plain, sharded, 1)
    plain.double()  # type: ignore[attr-defined]
    sharded.double()
    assert_same_bits(params_of(sharded), params_of(plain))
    train_both(plain, sharded, 1, first=1)


@on_ranks(2)
def test_what_is_remembered_of_cut_parameters_comes_back() -> None:
    plain, sharded = cut_pair(make_params(SHAPES), ema_decay=0.5)
    train_both(plain, sharded, 2)
    undo = sharded.core.remember()
    before = [param.detach().clone() for param in params_of(sharded)]
    for step in range(2, 4):
        set_grads(params_of(sharded), step)
        sharded.step()
    undo()
    sharded.gather_parameters()
    assert_same_bits(params_of(sharded), before)
