"""Masters and averages have names in the state that no class has; files with their old names still load."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from cuts import finely_cut
from own_classes import Small
from pool import on_ranks
from training import (
    MIXED,
    assert_same_bits,
    assert_same_state,
    make_params,
    params_of,
    set_grads,
    train_both,
    twin,
    whole,
)
from zero_optim import ZeroRedundancyOptimizer, checkpoint
from zero_optim.step.averages import EMA
from zero_optim.step.leaves import MASTER


class Averages(Small):
    """Keeps entries named as ours once were: an average of gradients, and a number."""

    def update(self, p: Any, group: dict[str, Any]) -> None:
        state = self.state[p]
        if not state:
            state.update(ema=torch.zeros_like(p), master=torch.zeros((), dtype=p.dtype))
        state["ema"].lerp_(p.grad, 0.1)
        state["master"] += 1
        p.sub_(state["ema"] * state["master"], alpha=group["lr"])


OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "averaged": {"ema_decay": 0.9},
    "masters": {"master_dtype": torch.float64},
}


def without_ours(saved: dict[str, Any]) -> dict[str, Any]:
    kept = {
        index: {name: value for name, value in entries.items() if name not in (MASTER, EMA)}
        for index, entries in saved["state"].items()
    }
    return {**saved, "state": kept}


@on_ranks(2)
@pytest.mark.parametrize("kept", OPTIONS)
def test_entries_of_a_class_named_ema_and_master_are_kept(tmp_path: Path, kept: str) -> None:
    path, build = tmp_path / "one", Averages
    params = make_params(MIXED)
    plain = build(params)
    with finely_cut():
        sharded = ZeroRedundancyOptimizer(twin(params), build, **OPTIONS[kept])
        train = train_both if kept != "masters" else train_alone
        train(plain, sharded, 4)
        saved = whole(sharded)
        if kept != "masters":
            assert_same_state(without_ours(saved), plain.state_dict())
        checkpoint.save(path, optimizer=sharded)
        for number in range(3):
            again = ZeroRedundancyOptimizer(twin(params_of(sharded)), build, **OPTIONS[kept])
            if number == 0:
                again.load_state_dict(saved)
            elif number == 1:
                checkpoint.load(path, optimizer=again)
            else:
                again.load_state_dict(saved if dist.get_rank() == 0 else None, src=0)
            assert_same_state(whole(again), saved)
        group = dist.new_group()
        sharded.detach()
        sharded.rebind(group)
        assert_same_state(whole(sharded), saved)
    train(plain, sharded, 2, 4)
    train_alone(plain, again, 2, 4)
    assert_same_bits(params_of(again), params_of(sharded))


def train_alone(
    _plain: torch.optim.Optimizer, sharded: torch.optim.Optimizer, steps: int, first: int = 0
) -> None:
    for step in range(first, first + steps):
        set_grads(params_of(sharded), step)
        sharded.step()


class Factors(Small):
    """Keeps one entry, of the parameter's shape or, for a large one, with a number for each row."""

    def update(self, p: Any, group: dict[str, Any]) -> None:
        is_large = p.dim() == 2 and p.numel() >= 4096
        square = p.grad.square()
        seen = self.state[p].setdefault("seen", torch.zeros_like(square[:, :1] if is_large else square))
        seen.add_(square.mean(1, keepdim=True) if is_large else square)
        p.sub_(p.grad / (seen.sqrt() + 1e-8), alpha=group["lr"])


@on_ranks(2)
def test_entries_may_have_another_shape_for_large_parameters() -> None:
    params = make_params(((64, 80), (6, 8), (70, 3)))
    plain, sharded = Factors(params), ZeroRedundancyOptimizer(twin(params), Factors)
    train_both(plain, sharded, 2)
    again = ZeroRedundancyOptimizer(twin(params), Factors)
    again.load_state_dict(whole(sharded))
    train_both(plain, again, 2, 2)
