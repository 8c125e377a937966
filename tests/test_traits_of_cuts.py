"""Which optimizer classes bear cuts: ranks may share the rows of a parameter, bit for bit."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch_optimizer
from torch.optim import Optimizer

from own_classes import (
    ClipsGlobally,
    Counted,
    GlobalCounter,
    Langevin,
    LargeFactored,
    RoundsStochastically,
    Small,
)
from zero_optim.probe.cut_rows import why_not_cut
from zero_optim.probe.probe import probe
from zero_optim.probe.trials import Feed, by_rows

# ------------------------------------------------------------------ classes of our own


class Lion(Small):
    """Steps by the sign of a blend of momentum and gradient."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group, p in self.each():
            average = self.state[p].setdefault("exp_avg", torch.zeros_like(p))
            p.sub_(torch.sign(average * 0.9 + p.grad * 0.1), alpha=group["lr"])
            average.lerp_(p.grad, 0.01)


class RowNormalized(Small):
    """Divides each row by its norm: a row is whole wherever a plan cuts, but no vector is."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group, p in self.each():
            p.sub_(p.grad / (p.grad.norm(dim=-1, keepdim=True) + 1e-8), alpha=group["lr"])


class RemembersItsSize(Small):
    """Steps element by element, but keeps a number that differs between a parameter and its rows."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        super().step()
        for _, p in self.each():
            self.state[p]["numel"] = p.numel()


class RemembersInBlocks(Small):
    """Keeps a momentum in int8, scaled by the largest of every 48 values in a row."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group, p in self.each():
            flat = torch.nn.functional.pad(p.grad.reshape(-1), (0, -p.numel() % 48)).reshape(-1, 48)
            scale = flat.abs().amax(1, keepdim=True).clamp(min=1e-30)
            coarse = ((flat / scale * 127).round() * scale / 127).reshape(-1)[: p.numel()]
            p.sub_(coarse.reshape(p.shape), alpha=group["lr"])


class Replaces(Small):
    """Replaces its state by a new tensor in every step, once as a list."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group, p in self.each():
            state = self.state[p]
            state["history"] = [p.grad.clone(), *state.get("history", [])][:3]
            state["step"] = state.get("step", 0) + 1
            p.sub_(sum(state["history"], torch.zeros_like(p)), alpha=group["lr"])


@pytest.mark.parametrize("build", [Small, Lion])
def test_an_element_wise_class_bears_cuts(build: Callable[..., Optimizer]) -> None:
    assert why_not_cut(build, {}) is None


@pytest.mark.parametrize(
    ("build", "words"),
    [
        (GlobalCounter, "state that belongs to no parameter"),
        (Langevin, "draws random numbers"),
        (RoundsStochastically, "draws random numbers"),
        (Replaces, "tensors in lists or dicts of its state"),
        (ClipsGlobally, "differed after step"),
        (LargeFactored, "cut in pieces"),
        (RowNormalized, "cut in pieces"),
        (RemembersItsSize, "the state of"),
        (RemembersInBlocks, "differed after step"),
        (torch.optim.LBFGS, "closure"),
        (torch.optim.SparseAdam, "sparse gradients"),
        (torch_optimizer.NovoGrad, "differed"),
    ],
)
def test_a_class_that_bears_no_cuts_has_a_reason(build: Callable[..., Optimizer], words: str) -> None:
    assert words in (why_not_cut(build, {}) or "")


@pytest.mark.parametrize("switch", ["foreach", "capturable", "differentiable", "maximize", "amsgrad"])
def test_switches_of_an_implementation_do_not_forbid_cuts(switch: str) -> None:
    assert why_not_cut(torch.optim.AdamW, {switch: True}) is None


@pytest.mark.parametrize("name", ["Adam", "AdamW", "SGD", "Adagrad"])
def test_fused_kernels_bear_cuts_where_plans_cut(name: str) -> None:
    assert why_not_cut(getattr(torch.optim, name), {"fused": True}) is None
    assert why_not_cut(getattr(torch.optim, name), {}, [{"fused": True}]) is None


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_nothing_is_cut_that_is_stepped_in_half_precision_on_the_cpu(dtype: torch.dtype) -> None:
    assert "end of a vector" in (why_not_cut(torch.optim.AdamW, {}, dtype=dtype) or "")


@pytest.mark.parametrize("dtype", [torch.float64, torch.complex64])
def test_wider_dtypes_are_tried_in_themselves(dtype: torch.dtype) -> None:
    assert why_not_cut(torch.optim.SGD, {"lr": 0.1}, dtype=dtype) is None


class RoundsAtTheEnd(Small):
    """Its own kernel treats the end of a vector otherwise; the one it calls fused does too."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group, p in self.each():
            flat, grad = p.view(-1), p.grad.reshape(-1)
            full = p.numel() // 16 * 16  # 64 bytes
            flat[:full].sub_(grad[:full], alpha=group["lr"])
            flat[full:].sub_(grad[full:] * (group["lr"] * 1.01))


def test_a_fused_group_does_not_hide_what_another_group_does() -> None:
    fused, plain = {"fused": True}, {"fused": False}
    assert why_not_cut(RoundsAtTheEnd, {}, [fused]) is None
    assert "differed" in (why_not_cut(RoundsAtTheEnd, {}, [plain]) or "")
    assert "differed" in (why_not_cut(RoundsAtTheEnd, {}, [fused, plain]) or "")
    assert "differed" in (why_not_cut(RoundsAtTheEnd, {"fused": True}, [plain]) or "")
    assert "differed" in (why_not_cut(RoundsAtTheEnd, {}, [plain, fused, {"lr": 0.5}]) or "")


def test_a_class_that_cannot_be_built_gives_a_reason_and_raises_nothing() -> None:
    assert "TypeError" in (why_not_cut(torch.optim.SGD, {"no_such_option": 1}) or "")


class NormedBy(Small):
    """Divides by the norm of the parameter, if an option says so."""

    def __init__(self, params: Any, lr: float = 0.1, *, trust: Any = False, **options: Any) -> None:
        torch.optim.Optimizer.__init__(self, params, {"lr": lr, "trust": trust, **options})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group, p in self.each():
            p.sub_(p.grad / (p.norm() + 1) if group["trust"] else p.grad, alpha=group["lr"])


def test_options_of_groups_forbid_cuts() -> None:
    groups = [{"trust": False}, {"trust": True}]
    assert why_not_cut(NormedBy, {}, groups[:1]) is None
    assert "differed" in (why_not_cut(NormedBy, {}, groups) or "")


def test_numbers_that_are_zero_are_tried_with_another_value_too() -> None:
    assert why_not_cut(NormedBy, {}) is None
    for trust in (0, 0.0):  # later it may be another number
        assert "with trust=0.05" in (why_not_cut(NormedBy, {"trust": trust}) or "")
    assert "weight_decay=0.05" in (why_not_cut(torch_optimizer.LARS, {"lr": 0.1}) or "")


class Counts(NormedBy):
    """Counts in its group, which takes no fraction."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            if type(group["k"]) is not int:
                raise TypeError("k counts")
            group["k"] += 1
        super().step()


def test_weight_decay_is_awake_though_another_number_must_stay_zero() -> None:
    assert why_not_cut(Counts, {"k": 0}) is None
    assert why_not_cut(Counts, {"k": 0, "trust": 0}) is None  # its name does not say that it may change

    class Decays(Counts):
        def step(self, closure: Any = None) -> None:
            for group in self.param_groups:
                group["trust"] = bool(group["weight_decay"])
            super().step()

    assert "weight_decay=0.05" in (why_not_cut(Decays, {"k": 0, "weight_decay": 0.0}) or "")


def test_cuts_are_tried_once_and_only_when_asked_for() -> None:
    probe(Counted, {"lr": 0.1})
    built = Counted.built
    why_not_cut(Counted, {"lr": 0.1})
    assert Counted.built > built
    built = Counted.built
    why_not_cut(Counted, {"lr": 0.1})
    assert Counted.built == built


def test_trial_pieces_start_where_a_plan_may_cut() -> None:
    feed = Feed(((9, 13), (67,), (40,), (2, 3, 3, 3))).with_rows()
    for index, start in feed.starts(feed.noise()).items():
        pieces = by_rows(index, start)
        assert len(pieces) == (3 if index == 1 else 2)
        assert torch.equal(torch.cat(pieces), start)
        for piece in pieces[:-1]:
            assert piece.numel() * piece.element_size() % 64 == 0
        assert pieces[-1].numel() * start.element_size() % 64  # the end of a vector
