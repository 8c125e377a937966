"""Mirrors: what a rank owns is with its buddy too, so that the loss of a rank loses nothing."""

import copy
import gc
import pickle
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.algorithms.join import Join

from cuts import finely_cut
from pool import on_ranks
from survivors import SHAPES, adamw, assert_trained, fresh, several
from training import assert_same_bits, assert_same_state, make_params, params_of, set_grads, train, whole
from worlds import leave, world
from zero_optim import LostStateError, RankMismatchError, RemoteRankError, ZeroRedundancyOptimizer


class Odd(torch.optim.Optimizer):
    """State of odd kinds: plain numbers that change, a list, tensors of other dtypes and changing shape."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr, "calls": 0})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            group["calls"] += 1
            for param in group["params"]:
                if param.grad is None:
                    continue
                state = self.state[param]
                state["count"] = state.get("count", 0) + 1
                state["scale"] = 1.0 / state["count"]
                state["past"] = [*state.get("past", []), state["count"]][-3:]
                state["half"] = param.detach().to(torch.bfloat16)
                state["order"] = torch.arange(state["count"])
                state["seen"] = torch.tensor(state["count"])
                param.sub_(group["lr"] * state["scale"] * param.grad)


def odd(params: Sequence[Tensor], **options: Any) -> ZeroRedundancyOptimizer:
    return ZeroRedundancyOptimizer(params, Odd, lr=0.1, **options)


def mirrored(make: Callable[..., ZeroRedundancyOptimizer], **options: Any) -> ZeroRedundancyOptimizer:
    return fresh(make, mirror=True, **options)


def content(optimizer: ZeroRedundancyOptimizer) -> tuple[list[Tensor], dict[str, Any]]:
    return [param.detach().clone() for param in params_of(optimizer)], whole(optimizer)


def assert_content(optimizer: ZeroRedundancyOptimizer, expected: tuple[list[Tensor], dict[str, Any]]) -> None:
    assert_same_bits(params_of(optimizer), expected[0])
    assert_same_state(whole(optimizer), expected[1])


# ---------------------------------------------------------------------- going back


@on_ranks(3)
@pytest.mark.parametrize("make", [adamw, several, odd])
def test_what_a_lost_rank_owned_is_rebuilt_from_its_buddy(
    tmp_path: Path, make: Callable[..., ZeroRedundancyOptimizer]
) -> None:
    rank = leave()
    with finely_cut():
        with world(tmp_path, "three", rank, range(3)):
            optimizer = mirrored(make)
            train(optimizer, 0, 3)
            optimizer.detach()
        if rank == 1:
            optimizer.core.snapshot.age += 1
            with torch.no_grad():
                for param in params_of(optimizer):
                    param.fill_(3.0)
            for entries in optimizer.state.values():
                for entry in entries.values():
                    if isinstance(entry, Tensor):
                        entry.zero_()
        if rank == 0:
            return
        with world(tmp_path, "two", rank, [1, 2]):
            assert optimizer.rebind() == 3
            assert_trained(optimizer, make, 3)
            train(optimizer, 3, 5)
            assert_trained(optimizer, make, 5)
            optimizer.detach()
        if rank == 1:
            return
        with world(tmp_path, "one", rank, [2]):
            assert optimizer.rebind() == 5
            assert_trained(optimizer, make, 5)
            train(optimizer, 5, 6)


@on_ranks(3)
def test_the_loss_of_a_rank_and_its_buddy_is_told_by_name(tmp_path: Path) -> None:
    rank = leave()
    with world(tmp_path, "three", rank, range(3)):
        optimizer = mirrored(adamw)
        train(optimizer, 0, 2)
        kept = copy.deepcopy(whole(optimizer))
        optimizer.detach()
    if rank == 2:
        with world(tmp_path, "one", rank, [2]):
            with pytest.raises(
                LostStateError,
                match=r"ranks 0, 1 of the former group are lost.*that of rank 0 was on rank 1.*"
                r"zero_optim.checkpoint.rebind\(\)",
            ):
                optimizer.rebind()
            optimizer.rebind(keep_state=False)
            optimizer.load_state_dict(kept)
            train(optimizer, 2, 3)


@on_ranks(4)
@pytest.mark.slow
def test_several_ranks_may_be_lost_if_their_buddies_are_left(tmp_path: Path) -> None:
    rank = leave()
    with finely_cut():
        with world(tmp_path, "four", rank, range(4)):
            optimizer = mirrored(several)
            train(optimizer, 0, 2)
            optimizer.detach()
        if rank % 2:
            with world(tmp_path, "two", rank, [3, 1]):
                assert optimizer.rebind() == 2
                assert_trained(optimizer, several, 2)


@on_ranks(2)
def test_loads_groups_and_values_from_outside_are_not_undone(tmp_path: Path) -> None:
    rank = leave()
    with finely_cut():
        with world(tmp_path, "two", rank, range(2)):
            optimizer = mirrored(adamw)
            assert optimizer.core.snapshot.age == optimizer.num_steps == 0
            train(optimizer, 0, 2)
            saved = copy.deepcopy(whole(optimizer))
            optimizer.load_state_dict(saved)
            optimizer.detach()
        alone = world(tmp_path, f"alone {rank}", rank, [rank])
        with alone, pytest.raises(LostStateError, match="nobody in the new group holds the state of"):
            optimizer.rebind()  # the load may have been of something else
        with world(tmp_path, "two again", rank, range(2)):
            with torch.no_grad():
                params_of(optimizer)[1].fill_(2.0)  # from outside, in a group in which nobody is lost
            assert optimizer.rebind() == 2
            assert params_of(optimizer)[1].eq(2.0).all()
            more = make_params(((50, 4),), seed=3)
            optimizer.add_param_group({"params": more, "lr": 0.3})
            train(optimizer, 2, 4)
            expected = content(optimizer)
            optimizer.detach()
        optimizer.core.snapshot.is_torn = rank == 1  # as if it was half way through a step
        with world(tmp_path, "torn", rank, range(2)):
            assert optimizer.rebind() == 4
            assert_content(optimizer, expected)


@on_ranks(2)
def test_a_rank_that_comes_new_is_given_what_the_lost_one_owned(tmp_path: Path) -> None:
    """Rank 0 is lost before its first version is whole, then after it; a rank comes new in its place."""
    rank = leave()
    with world(tmp_path, "two", rank, range(2)):
        optimizer = mirrored(several)
        optimizer.core.mirror_state()  # as the first step begins
        optimizer.core.snapshot.steps += 1
        optimizer.core.snapshot.changed()
        optimizer.detach()
    if rank == 0:
        with world(tmp_path, "new", rank, [0]):
            optimizer = mirrored(several)
            with torch.no_grad():
                for param in params_of(optimizer):
                    param.fill_(0.5)
            optimizer.detach()
    with world(tmp_path, "other", rank, [1, 0]):
        assert optimizer.rebind() == 0
        train(optimizer, 0, 2)
        optimizer.detach()
    if rank == 0:
        with world(tmp_path, "new again", rank, [0]):
            optimizer = mirrored(several)
            optimizer.detach()
    with world(tmp_path, "last", rank, range(2)):
        assert optimizer.rebind() == optimizer.num_steps == 2
        assert_trained(optimizer, several, 2)
        train(optimizer, 2, 3)
        assert_trained(optimizer, several, 3)
        optimizer.detach()
    if rank == 0:  # has only what it was given
        with world(tmp_path, "first", rank, [0]):
            assert optimizer.rebind() == 3
            assert_trained(optimizer, several, 3)


@on_ranks(2)
def test_a_version_is_labelled_with_the_steps_that_its_state_has_taken() -> None:
    optimizer = mirrored(adamw)
    for step in range(4):
        if step == 2:  # drops the versions, so that the next step begins with one
            optimizer.load_state_dict(copy.deepcopy(whole(optimizer)))
        train(optimizer, step, step + 1)
        report = optimizer.core.mirror.report([])
        assert report is not None
        assert [steps for _, steps, _ in report.own] == [step, step + 1]


# ---------------------------------------------------------------------- ways of stepping


def skip_the_last(optimizer: ZeroRedundancyOptimizer, _rank: int) -> int:
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0, growth_interval=1000)
    for step in range(3):
        set_grads(params_of(optimizer), step, scale=2.0)
        scaler.scale(torch.ones(()))
        if step == 2:
            params_of(optimizer)[0].grad.fill_(torch.inf)  # type: ignore[union-attr]
        scaler.step(optimizer)
        scaler.update()
    assert (optimizer.num_steps, optimizer.core.snapshot.age) == (2, 2)
    return 2


def join_unevenly(optimizer: ZeroRedundancyOptimizer, rank: int) -> int:
    with Join([optimizer]):
        for step in range(3 - 2 * rank):
            set_grads(params_of(optimizer), step)
            optimizer.step()
    return 3


@on_ranks(2)
@pytest.mark.parametrize("steps", [skip_the_last, join_unevenly])
def test_a_skipped_step_changes_no_mirror_and_ranks_that_have_joined_mirror_too(
    tmp_path: Path, steps: Callable[[ZeroRedundancyOptimizer, int], int]
) -> None:
    rank = leave()
    with world(tmp_path, "two", rank, range(2)):
        optimizer = mirrored(adamw)
        number = steps(optimizer, rank)
        expected = content(optimizer)
        optimizer.detach()
    if rank == 1:  # which joined early
        with world(tmp_path, "one", rank, [1]):
            assert optimizer.rebind() == number
            assert_content(optimizer, expected)


class Picky(torch.optim.SGD):
    """Keeps what cannot be sent, on the rank that owns the first parameter."""

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        super().step()
        for param in self.param_groups[0]["params"]:
            if param.shape == (7,):
                self.state[param]["kept"] = object()


class Wrapping(torch.optim.SGD):
    """Saves beside its state what depends on the parameters it has."""

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "more": len(self.param_groups[0]["params"])}


@on_ranks(2)
def test_what_cannot_be_mirrored_is_refused_on_every_rank() -> None:
    params = make_params(SHAPES)
    with pytest.raises(TypeError, match="mirror"):
        adamw(params, mirror="yes")
    with pytest.raises(RankMismatchError, match="mirror=True"):
        adamw(params, mirror=dist.get_rank() == 0)
    for allow in (False, True):
        with pytest.raises(TypeError, match="state_dict"):
            ZeroRedundancyOptimizer(params, Wrapping, lr=0.1, mirror=True, allow_unsaved=allow)
    optimizer = ZeroRedundancyOptimizer(params, Picky, lr=0.1, mirror=True, assume_separable=True)
    set_grads(params, 0)
    with pytest.raises(TypeError, match="holds a object, which cannot be sent"):
        optimizer.step()


class FailsOnce(torch.optim.SGD):
    """Its step fails where it owns the first parameter."""

    fails = False

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        if self.fails and any(param.shape == (7,) for param in self.param_groups[0]["params"]):
            raise KeyError("planted")
        super().step()


@on_ranks(2)
def test_a_rank_whose_own_step_raises_takes_part_in_the_mirror() -> None:
    params = make_params(SHAPES)
    optimizer = ZeroRedundancyOptimizer(params, FailsOnce, lr=0.1, mirror=True)
    train(optimizer, 0, 1)
    set_grads(params, 1)
    FailsOnce.fails = True
    mine = any(param.shape == (7,) for param in optimizer.owned_parameters())
    with pytest.raises(KeyError if mine else RemoteRankError, match="planted"):
        optimizer.step()
    FailsOnce.fails = False
    train(optimizer, 2, 4)
    optimizer.detach()
    assert optimizer.rebind() == 4


# ---------------------------------------------------------------------- beside


@on_ranks(2)
def test_copies_are_mirrored_anew() -> None:
    optimizer = mirrored(several)
    train(optimizer, 0, 2)
    other = copy.deepcopy(optimizer)
    loaded = pickle.loads(pickle.dumps(optimizer))
    plain = fresh(several, mirror=False)
    train(plain, 0, 4)
    for each in (optimizer, other, loaded):
        if each is not optimizer:
            assert each.core.mirror.last_age == -1
        train(each, 2, 4)
        assert each.core.mirror.last_age == each.core.snapshot.age
        assert_same_bits(params_of(each), params_of(plain))


@on_ranks(1)
def test_one_rank_alone_is_told_that_nothing_is_mirrored() -> None:
    with pytest.MonkeyPatch.context() as patch:
        said: list[str] = []
        patch.setattr("zero_optim.state.building.logger.warning", said.append)
        optimizer = mirrored(adamw)
        assert len(said) == 1
        assert "mirrors nothing" in said[0]
    train(optimizer, 0, 2)
    optimizer.detach()
    assert optimizer.rebind() == 2


@on_ranks(2)
def test_an_optimizer_that_goes_while_it_mirrors_harms_no_other() -> None:
    for _ in range(3):
        for mirror in (True, False):
            params = [torch.ones(2**16).requires_grad_() for _ in range(4)]
            optimizer = adamw(params, mirror=mirror, timeout=30)
            for _ in range(2):
                for param in params:
                    param.grad = torch.ones_like(param)
                optimizer.step()
            assert all(torch.equal(param, params[0]) for param in params)
            del optimizer
            gc.collect()
