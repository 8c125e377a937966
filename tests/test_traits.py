"""What the library finds out about optimizer classes by trying them."""

import functools
import gc
import random
import warnings
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch
import torch_optimizer
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from optimizer_cases import CASES, MISSING, documented
from own_classes import (
    ChangesItsRate,
    ClipsGlobally,
    Counted,
    DAdaptation,
    GlobalCounter,
    GroupCoupled,
    Langevin,
    LargeFactored,
    NeverMoves,
    OnGpuOnly,
    OwnNoise,
    Prodigy,
    RoundsStochastically,
    ScheduleFree,
    SharpnessAware,
    Small,
    StacksEqualShapes,
)
from training import needs_muon
from zero_optim.probe.cut_rows import why_not_cut
from zero_optim.probe.probe import probe, state_entries
from zero_optim.probe.traits import Traits, refusal


def lookahead(params: Any, **options: Any) -> Optimizer:
    return torch_optimizer.Lookahead(torch.optim.AdamW(params, **options))


# ------------------------------------------------------------------ the table

ALL, WHOLE, UNCOUNTED, NONE = "SPE", "SP-", "S-E", "---"
"""S separable, P steppable in parts, E element-wise; C may be cut by rows."""

Row = tuple[Callable[..., Optimizer], dict[str, Any], str]

CONDITIONAL: dict[str, Row] = {
    "LARS with decay": (torch_optimizer.LARS, {"lr": 0.1, "weight_decay": 1e-4}, WHOLE),
    "AdamP with decay": (torch_optimizer.AdamP, {"lr": 1e-3, "weight_decay": 0.01}, WHOLE),
    **{f"SWATS, lr={lr}": (torch_optimizer.SWATS, {"lr": lr}, NONE) for lr in (1e-4, 1e-3, 1e-2, 0.1, 1.0)},
    "SWATS with decay": (torch_optimizer.SWATS, {"weight_decay": 0.01, "nesterov": True}, NONE),
    "SWATS as asked": (torch_optimizer.SWATS, {"eps": 1e-8, "amsgrad": True}, NONE),
    "Lookahead": (lookahead, {"lr": 1e-2}, UNCOUNTED),
    "clips": (ClipsGlobally, {}, NONE),
    "clips late": (ClipsGlobally, {"max_norm": 1e3}, NONE),
    "D-adaptation": (DAdaptation, {}, NONE),
    "Prodigy": (Prodigy, {"lr": 1.0}, NONE),
    "global counter": (GlobalCounter, {}, "S-"),
    "groups": (GroupCoupled, {}, NONE),
    "stacks": (StacksEqualShapes, {}, NONE),
    "noise": (Langevin, {}, NONE),
    "numpy noise": (Langevin, {"source": "numpy"}, NONE),
    "python noise": (Langevin, {"source": "python"}, NONE),
    "own noise": (OwnNoise, {}, NONE),
    "stochastic rounding": (RoundsStochastically, {}, NONE),
    "schedule-free": (ScheduleFree, {}, "S-"),
    "closure": (SharpnessAware, {}, NONE),
    "GPU only": (OnGpuOnly, {}, NONE),
    "still": (NeverMoves, {}, NONE),
    "large": (LargeFactored, {}, WHOLE),
    "small": (Small, {}, ALL),
    "rate in place": (ChangesItsRate, {"lr": torch.tensor(0.1)}, "S-"),
}


def letters(traits: Traits) -> str:
    found = (traits.separable, traits.steppable_in_parts, traits.elementwise)
    return "".join(letter if has else "-" for letter, has in zip("SPE", found, strict=True))


# Element-wise, though rows of them are not stepped as the whole is, with these options or with others.
ELEMENT_WISE_ALONE = (
    "torch_optimizer.AggMo",
    "torch_optimizer.LARS, defaults",
    "torch_optimizer.SGDW, defaults",
)


def rows() -> Iterator[Any]:
    """The rows of the documented table, and those of classes with one habit."""
    tried = [(name, options) for name, case in CASES.items() for options in case.options]
    for (name, options), (_, shown, fails, _) in zip(tried, documented(), strict=True):
        row, failed = f"{name}, {shown}", fails.split(", ")
        holds = {
            "S": "separable" not in failed,
            "P": "in parts" not in failed,
            "E": "rows" not in failed or row.startswith(ELEMENT_WISE_ALONE),
            "C": "rows" not in failed,
        }
        expected = "".join(letter if is_true else "-" for letter, is_true in holds.items())
        if name not in MISSING:
            yield pytest.param(CASES[name].optimizer_class, options, expected, id=row)
    for name, row in CONDITIONAL.items():
        yield pytest.param(*row, id=name)


@pytest.mark.parametrize(("build", "options", "expected"), list(rows()))
def test_traits_of_every_class(
    build: Callable[..., Optimizer], options: dict[str, Any], expected: str
) -> None:
    traits = probe(build, options)
    assert letters(traits).startswith(expected[:3]), traits
    if len(expected) > 3:
        reason = why_not_cut(build, options)
        assert (reason is None) == (expected[3] == "C"), reason
    reasons = (traits.coupling or traits.untried, traits.counting, traits.shape_use)
    if traits.separable:
        assert reasons[0] is None
        assert (reasons[1] is None, reasons[2] is None) == (traits.steppable_in_parts, traits.elementwise)
    else:
        assert reasons[0]


# ------------------------------------------------------------------ reasons


@pytest.mark.parametrize(
    ("build", "words"),
    [
        (torch.optim.LBFGS, "needs a closure"),
        (SharpnessAware, "needs a closure"),
        (torch_optimizer.Adahessian, "second-order gradients"),
        (OnGpuOnly, "RuntimeError: expected CUDA tensors"),
        (NeverMoves, "no parameter moved"),
    ],
)
def test_a_class_that_cannot_be_tried_says_what_it_needs(build: Callable[..., Optimizer], words: str) -> None:
    traits = probe(build, {})
    assert words in (traits.untried or "")
    assert words in refusal(build, traits)
    assert "assume_separable=True" in refusal(build, traits)


@pytest.mark.parametrize(
    ("build", "words"),
    [
        (Langevin, "draws random numbers"),
        (RoundsStochastically, "draws random numbers"),
        (OwnNoise, "two equal runs"),
        (ClipsGlobally, "differed after step"),
        (torch_optimizer.SWATS, "differed"),
    ],
)
def test_a_refusal_says_what_differed_and_what_to_do(build: Callable[..., Optimizer], words: str) -> None:
    message = refusal(build, probe(build, {}))
    assert words in message
    assert build.__qualname__ in message
    assert "assume_separable=True" in message


# ------------------------------------------------------------------ options


class LeavesMemoryUnwritten(Small):
    """In bfloat16, its state differs between equal runs, and it may also clip all gradients together."""

    count = 0

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        half = [p for _, p in self.each() if p.dtype == torch.bfloat16]
        norm = sum((float(p.grad.float().norm()) for p in half if p.grad is not None), 1.0)
        for group, p in self.each():
            if p.dtype == torch.bfloat16:
                type(self).count += 1
                self.state[p]["unwritten"] = torch.tensor(self.count)
            p.add_(p.grad / norm if group["clips"] else p.grad, alpha=-group["lr"])


def test_state_that_is_never_written_excuses_no_difference_of_parameters() -> None:
    assert probe(LeavesMemoryUnwritten, {"clips": False}).separable
    assert "the parameter of shape" in (probe(LeavesMemoryUnwritten, {"clips": True}).coupling or "")


@pytest.mark.parametrize("switch", ["foreach", "capturable", "differentiable", "maximize"])
def test_switches_of_an_implementation_change_no_trait(switch: str) -> None:
    assert letters(probe(torch.optim.AdamW, {switch: True})) == ALL


@pytest.mark.parametrize("name", ["Adam", "AdamW", "SGD", "Adagrad"])
def test_fused_kernels_are_tried_themselves(name: str) -> None:
    # Whether a cut shows depends on how a processor's kernel treats the end of a vector.
    traits = probe(getattr(torch.optim, name), {"fused": True})
    assert traits.steppable_in_parts
    assert traits.elementwise or "cut in pieces" in (traits.shape_use or "")


def test_a_switch_bound_by_partial_is_found() -> None:
    build = functools.partial(functools.partial(torch.optim.Adam, lr=0.1), capturable=True)
    assert letters(probe(build, {"lr": 1e-2})) == ALL


@pytest.mark.parametrize("rate", [0, 0.0, torch.tensor(0.0), torch.tensor(0.1)])
def test_a_rate_of_zero_hides_nothing(rate: Any) -> None:
    assert letters(probe(torch.optim.SGD, {"lr": rate})) == ALL
    assert letters(probe(ClipsGlobally, {"lr": rate})) == NONE


def test_options_given_by_groups_count() -> None:
    decays = [{"weight_decay": 0.0}, {"weight_decay": 1e-4, "params": [1], "lr": 0.2}]
    assert letters(probe(torch_optimizer.LARS, {"lr": 0.1}, decays[:1])) == ALL
    assert letters(probe(torch_optimizer.LARS, {"lr": 0.1}, decays)) == WHOLE


def test_forty_groups_of_different_rates_are_tried_as_one() -> None:
    calls = []

    def build(groups: Any, **options: Any) -> Optimizer:
        calls.append(len(groups))
        return torch.optim.SGD(groups, **options)

    assert probe(build, {}, [{"lr": 0.01 * (k + 1)} for k in range(40)]).elementwise
    assert max(calls) == 2


def test_a_users_tensors_are_left_as_they_were() -> None:
    rate = torch.tensor(0.1)
    probe(ChangesItsRate, {"lr": rate})
    assert rate == torch.tensor(0.1)


# ------------------------------------------------------------------ once, and for the right class


def test_a_class_with_the_same_options_is_tried_once() -> None:
    probe(Counted, {"lr": 0.1, "betas": [0.9, 0.99]})
    built = Counted.built
    assert built > 0
    probe(Counted, {"lr": 0.1, "betas": [0.9, 0.99]})
    probe(functools.partial(Counted, lr=0.1), {"betas": [0.9, 0.99]})
    assert Counted.built == built
    probe(Counted, {"lr": 0.2, "betas": [0.9, 0.99]})
    assert Counted.built > built


def test_options_that_can_change_are_tried_again() -> None:
    class Switch:
        on = False

    class Switched(ClipsGlobally):
        def __init__(self, params: Any, switch: Switch) -> None:
            super().__init__(params, 1.0 if switch.on else 1e30)

    switch = Switch()
    assert probe(Switched, {"switch": switch}).separable
    switch.on = True
    assert not probe(Switched, {"switch": switch}).separable
    limit = [1e30]
    build = _by_list
    assert probe(build, {"limit": limit}).separable
    limit[0] = 1.0
    assert not probe(build, {"limit": limit}).separable


def _by_list(params: Any, limit: list[float]) -> Optimizer:
    return ClipsGlobally(params, limit[0])


def test_a_class_is_not_kept_alive() -> None:
    class Local(Small):
        pass

    class Option:
        pass

    option = Option()
    kept = weakref.ref(Local), weakref.ref(option)
    probe(Local, {})
    probe(Local, {"option": option})
    del Local, option
    gc.collect()
    assert [reference() for reference in kept] == [None, None]


# ------------------------------------------------------------------ without a trace


def _states() -> tuple[Any, ...]:
    name, words, *rest = np.random.get_state()
    return torch.get_rng_state().tolist(), random.getstate(), (name, words.tobytes(), *rest)


@pytest.mark.parametrize("source", ["torch", "numpy", "python"])
def test_random_numbers_are_as_before(source: str) -> None:
    before = _states()
    probe(torch.optim.Adam, {"lr": 0.123, "eps": len(source) * 1e-9})
    probe(functools.partial(Langevin), {"source": source, "unused": object()})
    assert _states() == before


def test_a_seed_among_the_options_is_not_sown() -> None:
    before = _states()
    probe(torch_optimizer.Adahessian, {"seed": 5})
    assert _states() == before


def test_global_step_hooks_do_not_fire_and_stay() -> None:
    seen = []
    handles = [
        register_optimizer_step_pre_hook(lambda *_: seen.append("pre")),
        register_optimizer_step_post_hook(lambda *_: seen.append("post")),
    ]
    try:
        probe(torch.optim.Adam, {"lr": 0.0625})
        assert seen == []
        torch.optim.SGD([torch.zeros(1, requires_grad=True)]).step()
        assert seen == ["pre", "post"]
    finally:
        for handle in handles:
            handle.remove()
    torch.optim.SGD([torch.zeros(1, requires_grad=True)]).step()
    assert seen == ["pre", "post"]


@contextmanager
def _default_device(name: str) -> Iterator[None]:
    torch.set_default_device(name)
    try:
        yield
    finally:
        torch.set_default_device(None)


@contextmanager
def _default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


@pytest.mark.parametrize(
    ("number", "surroundings"),
    list(
        enumerate(
            [
                torch.no_grad,
                torch.inference_mode,
                functools.partial(torch.device, "meta"),
                functools.partial(_default_device, "meta"),
                functools.partial(_default_dtype, torch.float64),
                functools.partial(_default_dtype, torch.bfloat16),
                functools.partial(torch.autocast, "cpu"),
            ]
        )
    ),
)
def test_surroundings_change_nothing_and_are_not_changed(
    number: int, surroundings: Callable[[], Any]
) -> None:
    def modes() -> tuple[object, ...]:
        return (
            torch.is_grad_enabled(),
            torch.is_inference_mode_enabled(),
            torch.empty(0).device,
            torch.get_default_dtype(),
            torch.get_num_threads(),
            list(warnings.filters),
        )

    with surroundings():
        before = modes()
        assert letters(probe(torch.optim.AdamW, {"lr": 1e-3 + number})) == ALL
        assert letters(probe(torch_optimizer.SWATS, {"weight_decay": 1e-3 + number * 1e-6})) == NONE
        assert modes() == before


def test_classes_are_tried_after_a_default_device_was_taken_back() -> None:
    with _default_device("meta"):
        pass
    assert letters(probe(torch.optim.AdamW, {"lr": 0.0117})) == ALL


def test_a_class_that_warns_is_not_heard() -> None:
    class Warns(Small):
        def step(self, closure: Any = None) -> None:
            warnings.warn("old", stacklevel=1)
            super().step()

    assert probe(Warns, {}).elementwise


# ------------------------------------------------------------------ the shape of state


def shaped_entries(optimizer_class: Any, options: dict[str, Any], num_dims: int) -> set[str]:
    entries = state_entries(optimizer_class, options, num_dims)
    return {name for name, is_shaped in entries.items() if is_shaped}


def test_state_with_the_parameters_shape_is_known_by_dimensions() -> None:
    assert shaped_entries(torch.optim.Adam, {"capturable": True}, 2) == {"exp_avg", "exp_avg_sq"}
    assert shaped_entries(torch.optim.SparseAdam, {}, 2) == {"exp_avg", "exp_avg_sq"}
    assert shaped_entries(torch.optim.Adafactor, {}, 1) == {"variance"}
    assert shaped_entries(torch.optim.Adafactor, {}, 2) == set()
    assert shaped_entries(torch.optim.LBFGS, {}, 1) == set()
    assert shaped_entries(torch.optim.SGD, {"lr": 0.0, "momentum": 0.9}, 0) == set()


@needs_muon
def test_state_of_a_class_for_matrices_has_their_shape_alone() -> None:
    assert shaped_entries(torch.optim.Muon, {}, 2) == {"momentum_buffer"}
    assert shaped_entries(torch.optim.Muon, {}, 1) == set()
