"""Parameters that are cut: several ranks own rows of one, and the run has the bits of the unsharded run."""

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.join import Join
from torch.optim import Optimizer

from cuts import SHAPES, cut_over, cut_pair, cutting
from overlap import Setting, assert_same_run, inputs
from pool import on_ranks
from training import agreeing_scaler, assert_same_bits, make_params, params_of, set_grads, train_both, twin
from zero_optim import RankMismatchError, ZeroRedundancyOptimizer
from zero_optim.ddp import DistributedDataParallel
from zero_optim.hooks import zero_step
from zero_optim.step.gradients import rows_of

VIEWS = pytest.mark.parametrize("view", [True, False], ids=["view", "packed"])


def assert_same_rows(plain: Optimizer, sharded: ZeroRedundancyOptimizer) -> None:
    """Compare the state that this rank owns with its rows of the unsharded state, bit for bit."""
    rank = dist.get_rank()
    for param, other in zip(params_of(sharded), params_of(plain), strict=True):
        piece = next((piece for piece in sharded.pieces()[param] if piece.owner == rank), None)
        assert (piece is None) == (param not in sharded.state)
        if piece is None:
            continue
        assert list(sharded.state[param]) == list(plain.state[other])
        for key, value in plain.state[other].items():
            expected = rows_of(value, piece) if value.shape == other.shape else value
            assert torch.equal(sharded.state[param][key], expected), key
    assert sharded.state_nbytes() > 0


@on_ranks(2)
def test_rows_written_between_steps_reach_their_masters() -> None:
    params = make_params(((64, 8),), torch.bfloat16)
    _, sharded = cut_pair(params, torch.optim.SGD, options={"lr": 1e-4}, master_dtype=torch.float32)
    (mine,) = params_of(sharded)
    master = params[0].detach().float()
    for step in range(3):
        set_grads([mine], step)
        assert mine.grad is not None
        master -= 1e-4 * mine.grad.float()
        sharded.step()
        with torch.no_grad():
            for where in (3, 60):  # a row of each rank
                mine[where] = step
                master[where] = step
    set_grads([mine], 9)
    assert mine.grad is not None
    master -= 1e-4 * mine.grad.float()
    sharded.step()
    assert torch.equal(mine, master.to(torch.bfloat16))


@on_ranks(2)
def test_a_group_added_later_may_be_cut() -> None:
    plain, sharded = cut_pair(make_params(SHAPES))
    train_both(plain, sharded, 2)
    extra = make_params(((64, 4), (5,)), seed=5)
    more = twin(extra)
    plain.add_param_group({"params": extra, "lr": 0.1})
    with cutting():
        sharded.add_param_group({"params": more, "lr": 0.1})
    assert len(sharded.pieces()[more[0]]) == 2
    train_both(plain, sharded, 3, first=2)
    assert_same_rows(plain, sharded)


@on_ranks(2)
def test_a_cut_group_that_the_class_refuses_leaves_nothing_behind() -> None:
    plain, sharded = cut_pair(make_params(SHAPES), torch.optim.SGD, options={"lr": 0.1})
    extra = make_params(((64, 4),), seed=5)
    with cutting(), pytest.raises(ValueError, match="momentum"):
        sharded.add_param_group({"params": extra, "optimizer_class": torch.optim.SGD, "momentum": -1.0})
    train_both(plain, sharded, 1)
    with cutting():
        sharded.add_param_group({"params": extra})
    train_both(sharded, sharded, 1)


class Replacing(torch.optim.AdamW):
    """Gives what it steps new memory at each step, and has a method that changes parameters."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        super().step(closure)
        for param in params_of(self):
            param.data = param.data.clone()

    @torch.no_grad()
    def double(self) -> None:
        for param in params_of(self):
            param.mul_(2)


def replace_data(optimizer: Any) -> None:
    for param in params_of(optimizer):
        param.data = param.data * 2


def change_strides(optimizer: Any) -> None:
    for param in params_of(optimizer)[2:3]:
        param.data = param.data.to(memory_format=torch.channels_last) * 2


@torch.no_grad()
def change_in_place(optimizer: Any) -> None:
    for param in params_of(optimizer):
        param.mul_(0.5)


def double(optimizer: Any) -> None:
    optimizer.double()


def share(optimizer: Any) -> None:
    for param in params_of(optimizer):
        param.share_memory_()


@on_ranks(2)
@VIEWS
@pytest.mark.parametrize("optimizer_class", [torch.optim.AdamW, Replacing])
def test_what_user_or_class_do_with_the_data_is_stepped(view: bool, optimizer_class: Any) -> None:
    params = [*make_params(SHAPES), *make_params(((2, 64), (1, 64)), seed=2)]  # also pieces of one row
    plain, sharded = cut_pair(params, optimizer_class, parameters_as_bucket_view=view, ema_decay=0.5)
    changes = [replace_data, change_strides, change_in_place, share]
    if optimizer_class is Replacing:
        changes = [double]  # reaches all pieces
    for number, change in enumerate(changes):
        train_both(plain, sharded, 2, first=2 * number)
        for optimizer in (plain, sharded):
            change(optimizer)
        assert_same_bits(params_of(sharded), params_of(plain))
    train_both(plain, sharded, 2, first=8)
    assert share not in changes or all(param.is_shared() for param in params_of(sharded))
    sharded.gather_parameters()
    assert_same_bits(params_of(sharded), params_of(plain))


@on_ranks(2)
@VIEWS
def test_a_copy_steps_its_own_parameters_and_what_is_remembered_comes_back(view: bool) -> None:
    plain, sharded = cut_pair(make_params(SHAPES), parameters_as_bucket_view=view, ema_decay=0.5)
    train_both(plain, sharded, 2)
    other = copy.deepcopy(sharded)
    again = copy.deepcopy(plain)
    places = [{p.data_ptr() for p in params_of(optimizer) if p.numel()} for optimizer in (sharded, other)]
    assert not places[0] & places[1]
    assert all(leaf.untyped_storage().nbytes() == 4 for leaf in other.core.owned.leaves.separate.values())
    before = [param.detach().clone() for param in params_of(sharded)]
    train_both(again, other, 3, first=2)
    assert_same_bits(params_of(sharded), before)
    undo = sharded.core.remember()
    train_both(plain, sharded, 3, first=2)
    undo()
    sharded.gather_parameters()
    assert_same_bits(params_of(sharded), before)


@on_ranks(2)
@pytest.mark.parametrize(("view", "masters"), [(True, False), (False, True)])
def test_autograd_notices_that_a_step_changed_a_cut_parameter(view: bool, masters: bool) -> None:
    weight = nn.Parameter(torch.randn(32, 8, dtype=torch.bfloat16 if masters else torch.float32))
    dtype = torch.float32 if masters else None
    _, sharded = cut_pair([weight], torch.optim.SGD, parameters_as_bucket_view=view, master_dtype=dtype)
    (mine,) = params_of(sharded)
    loss = (mine.square() * mine).sum()
    loss.backward(retain_graph=True)
    sharded.step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@on_ranks(2)
def test_a_rank_steps_its_rows_alone() -> None:
    _, sharded = cut_pair(make_params(((64, 8), (32, 4))))
    set_grads(params_of(sharded), 0)
    local, stepped = sharded.optim, list[int]()
    assert isinstance(local, Optimizer)
    local.register_step_pre_hook(
        lambda *_: stepped.extend(p.grad.numel() for p in params_of(local) if p.grad is not None)
    )
    sharded.step()
    assert sum(stepped) == (64 * 8 + 32 * 4) // 2
    assert all(param.grad is not None and param.grad.shape == param.shape for param in params_of(sharded))


@on_ranks(2)
def test_explain_tells_what_is_cut_and_why_the_rest_is_not() -> None:
    """One model of AdamW that is cut, with a group of Muon-like matrices that are not."""
    params = make_params(((1024, 128), (96, 16), (400, 100)))
    texts = []
    for optimizer_class, options in (
        (torch.optim.AdamW, {}),
        (torch.optim.Adafactor, {}),
        (torch.optim.AdamW, {"cuts": False}),
        (torch.optim.AdamW, {"assume_separable": True}),
    ):
        sharded = ZeroRedundancyOptimizer(twin(params), optimizer_class, lr=0.1, **options)
        set_grads(params_of(sharded), 0)
        sharded.step()
        told = sharded.explain(quiet=True)
        mine = told.ranks[dist.get_rank()]
        assert mine.num_params == len(sharded.owned_parameters())
        assert mine.state_nbytes == sharded.state_nbytes()
        assert sum(rank.numel for rank in told.ranks) == sum(p.numel() for p in params)
        if optimizer_class is torch.optim.AdamW:
            # Two moments of float32, and a step for each parameter.
            assert mine.state_nbytes == 2 * mine.param_nbytes + 4 * mine.num_params
        assert ("cut: parameter" in str(told)) == (max(map(len, sharded.pieces().values())) > 1)
        texts.append(str(told))
    everyone: list[list[str]] = [[]] * 2
    dist.all_gather_object(everyone, texts)
    assert everyone[0] == everyone[1]
    cut, whole, off, untried = texts
    assert "cut: parameter 0 of group 0 (shape (1024, 128)) in 2 pieces, owners [0, 1]" in cut
    assert "not cut:" not in cut
    assert "balance: fullest rank / mean = 1.00" in cut
    assert "x the mean (Adafactor: " in whole
    assert "the fullest rank sends 1.5 x the mean (cuts=False)" in off
    assert "x the mean (AdamW: not tried (assume_separable=True))" in untried


@on_ranks(2)
def test_ranks_agree_on_cuts() -> None:
    with pytest.raises(RankMismatchError, match=r"cuts=True.*cuts=False"):
        ZeroRedundancyOptimizer(make_params(), torch.optim.SGD, lr=0.1, cuts=dist.get_rank() == 0)
    with pytest.raises(TypeError, match="cuts"):
        ZeroRedundancyOptimizer(make_params(), torch.optim.SGD, lr=0.1, cuts=1)  # type: ignore[arg-type]


# ---------------------------------------------------------------------- loops


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
def test_a_joined_rank_is_lent_the_rows_that_it_owns(keeps_gradients: bool) -> None:
    """Rank 1 runs out of inputs after two steps; rank 0 goes on, and lends it its rows."""
    plain, sharded = cut_pair(make_params(((64, 4), (32, 8), (3,))), options={"lr": 0.1})

    def give(optimizer: Optimizer, step: int) -> None:
        for index, param in enumerate(params_of(optimizer)):
            param.grad = None if index == step % 4 else torch.full_like(param, 0.5 + step)

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


# ---------------------- cut parameters stepped during the backward pass


class Wide(nn.Module):
    """Layers that are wide enough to be cut; one that not every pass uses."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.conv = nn.Conv2d(2, 32, 3, padding=1)
        self.layers = nn.Sequential(nn.Linear(32 * 9, 32), nn.Tanh(), nn.Linear(32, 16), nn.Tanh())
        self.spare = nn.Linear(16, 16)
        self.head = nn.Linear(16, 3)

    def forward(self, x: torch.Tensor, with_spare: bool = True) -> torch.Tensor:
        hidden = self.layers(self.conv(x).relu().flatten(1))
        out: torch.Tensor = self.head(hidden + self.spare(hidden) if with_spare else hidden)
        return out


class AddsToGradients(torch.optim.Optimizer):
    """SGD with weight decay, which it adds to the gradients themselves."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    param.grad.add_(param, alpha=0.1)
                    param.add_(param.grad, alpha=-group["lr"])


def in_place(model: nn.Module) -> ZeroRedundancyOptimizer:
    """Steps need copies of the gradients."""
    return cut_over(model.parameters(), AddsToGradients, cap=0.001, lr=0.01)


def one_row(model: nn.Module) -> ZeroRedundancyOptimizer:
    return cut_over(model.parameters(), cap=1.0, lr=0.01)


@on_ranks(2)
@pytest.mark.parametrize("optimizer", [in_place, one_row])
def test_stepping_cut_parameters_in_backward_gives_the_same_bits(optimizer: Any) -> None:
    """With a class that changes gradients in place, and with one row for each rank."""
    assert_same_run(Setting("ours", Wide, optimizer), steps=4)


@on_ranks(4)
@pytest.mark.parametrize("optimizer", [in_place, one_row])
def test_rows_of_gradients_are_reduced_to_four_owners(optimizer: Any) -> None:
    runs = []
    for how in (None, "owners"):
        model = DistributedDataParallel(Wide(), bucket_cap_mb=0.004, find_unused_parameters=True)
        sharded = optimizer(model)
        if how is not None:
            model.register_comm_hook(None, zero_step(sharded, gradients=how))
        for step in range(4):
            sharded.zero_grad()
            model(inputs(step), step % 2 == 0 and dist.get_rank() == 0).square().mean().backward()
            sharded.step()
        runs.append(model)
    for param, other in zip(*(model.parameters() for model in runs), strict=True):
        torch.testing.assert_close(param, other, rtol=1e-4, atol=1e-5)
        everywhere = param.detach().clone()
        dist.broadcast(everywhere, 0)
        assert torch.equal(everywhere, param), "ranks hold the same parameters"
