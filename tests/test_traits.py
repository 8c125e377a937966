"""What the library finds out about optimizer classes by trying them."""

import functools
import random
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch_optimizer
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.testing._internal.distributed.fake_pg import FakeStore

import own_classes as own
from own_classes import Small
from pool import on_ranks
from zero_optim import ZeroRedundancyOptimizer
from zero_optim.probe.cut_rows import why_not_cut
from zero_optim.probe.probe import probe, why_dtypes_couple
from zero_optim.probe.subject import under_test
from zero_optim.probe.traits import Traits, refusal, refusal_in_half

Builder = Callable[..., Optimizer]


def lookahead(params: Any, **options: Any) -> Optimizer:
    return torch_optimizer.Lookahead(torch.optim.AdamW(params, **options))


# ------------------------------------------------------------------ the table

ALL, WHOLE, UNCOUNTED, NONE = "SPEC", "SP--", "S-EC", "----"
"""S separable, P steppable in parts, E element-wise, C may be cut by rows."""

DRAWS, DIFFERED = "draws random numbers", "differed after step"
# Letters, and words of the first reason against what they lack.
HABITS: list[tuple[Builder, dict[str, Any], str, str]] = [
    (Small, {}, ALL, ""),
    (torch_optimizer.LARS, {"lr": 0.1, "weight_decay": 1e-4}, WHOLE, DIFFERED),
    (torch_optimizer.SWATS, {}, NONE, "'lr' differed"),
    (lookahead, {"lr": 1e-2}, UNCOUNTED, ""),
    (own.ClipsGlobally, {}, NONE, DIFFERED),
    (own.ClipsGlobally, {"lr": 0.0}, NONE, DIFFERED),
    (own.CouplesLarge, {}, NONE, DIFFERED),
    (own.CouplesLate, {"begin": 8}, NONE, DIFFERED),
    (own.Noise, {}, NONE, DIFFERED),
    (own.StateByIndex, {}, NONE, "state that belongs to no parameter"),
    (own.GlobalCounter, {}, "S-E-", "state that belongs to no parameter"),
    (own.GroupCoupled, {}, NONE, DIFFERED),
    (own.StacksEqualShapes, {}, NONE, DIFFERED),
    (own.BlocksAcross, {"least": 8192}, NONE, DIFFERED),
    (own.Langevin, {}, NONE, DRAWS),
    (own.Langevin, {"source": "numpy"}, NONE, DRAWS),
    (own.Noise, {"seed": None}, NONE, "two equal runs"),
    (own.RoundsLarge, {}, NONE, DRAWS),
    (own.WritesDown, {}, "S---", ""),
    (own.WritesDown, {"uses": "numel"}, NONE, "the group's entry"),
    (own.WritesDown, {"uses": "norm"}, NONE, DIFFERED),
    (own.ScheduleFree, {}, UNCOUNTED, ""),
    (own.ChangesItsRate, {"lr": torch.tensor(0.1)}, UNCOUNTED, ""),
    (own.SharpnessAware, {}, NONE, "needs a closure"),
    (own.OnGpuOnly, {}, NONE, "RuntimeError: expected CUDA tensors"),
    (own.NeverMoves, {}, NONE, "no parameter moved"),
    (own.Replaces, {}, "SPE-", "tensors in lists or dicts of its state"),
    (own.LargeFactored, {}, WHOLE, "cut in pieces"),
    (own.RemembersItsSize, {}, WHOLE, "the state of"),
    (own.WrapsAll, {}, WHOLE, "the state of"),
    (torch.optim.AdamW, {"capturable": True}, ALL, ""),
    (torch.optim.SGD, {"lr": torch.tensor(0.0)}, ALL, ""),
    # Numbers that are zero are tried with another value too: later it may be another.
    (own.NormedBy, {}, ALL, ""),
    (own.NormedBy, {"trust": 0.0}, "SPE-", "with trust=0.05"),
    (own.Counts, {"k": 0, "weight_decay": 0.0}, "SPE-", "weight_decay=0.05"),
]


def letters(traits: Traits) -> str:
    has = (traits.separable, traits.steppable_in_parts, traits.elementwise)
    return "".join(letter if is_true else "-" for letter, is_true in zip("SPE", has, strict=True))


@pytest.mark.parametrize(("build", "options", "expected", "words"), HABITS)
def test_a_habit_of_a_class_is_found_by_trying_it(
    build: Builder, options: dict[str, Any], expected: str, words: str
) -> None:
    traits = probe(under_test(build, options))
    assert letters(traits).startswith(expected[:3]), traits
    reason = why_not_cut(under_test(build, options)) or ""
    assert (reason == "") == (expected[3:] != "-"), reason
    assert words in reason
    assert (traits.counting is None) == (traits.untried is not None or "P" in letters(traits))
    if not traits.separable:
        message = refusal(build, traits)
        assert words in message
        assert getattr(build, "__qualname__", "") in message
        assert "assume_separable=True" in message


@pytest.mark.parametrize(
    ("build", "options", "words"),
    [
        (own.RoundsStochastically, {}, DRAWS),
        # State that is never written excuses no difference of parameters.
        (own.LeavesMemoryUnwritten, {"clips": True}, "the parameter of shape"),
        (own.LeavesMemoryUnwritten, {"clips": False}, None),
    ],
)
def test_half_precision_is_tried_apart(build: Builder, options: dict[str, Any], words: str | None) -> None:
    traits = probe(under_test(build, options))
    assert traits.in_half is None if words is None else words in (traits.in_half or "")
    message = refusal_in_half(build, traits)
    assert (words or "") in message
    assert "master_dtype=torch.float32" in message


def test_several_dtypes_in_a_group_are_tried_apart() -> None:
    """Adafactor of PyTorch takes its ``eps`` from the dtype of a step's first parameter."""
    dtypes = frozenset({torch.float32, torch.bfloat16})
    reason = why_dtypes_couple(under_test(torch.optim.Adafactor, {}, []), dtypes)
    assert reason is not None
    assert "in a group, stepped alone, the parameter of shape" in reason
    assert why_dtypes_couple(under_test(torch.optim.Adafactor, {"eps": (1e-8, 1e-3)}, []), dtypes) is None
    assert why_dtypes_couple(under_test(torch.optim.AdamW, {}, []), dtypes) is None


def test_fused_kernels_are_tried_themselves_and_bear_cuts_where_plans_cut() -> None:
    # Whether a cut anywhere shows depends on how a processor's kernel treats the end of a vector.
    build = torch.optim.AdamW
    traits = probe(under_test(build, {"fused": True}))
    assert traits.steppable_in_parts
    assert traits.elementwise or "cut in pieces" in (traits.shape_use or "")
    assert why_not_cut(under_test(build, {"fused": True})) is None
    assert why_not_cut(under_test(build, {}, [{"fused": True}])) is None


FUSED, PLAIN = {"fused": True}, {"fused": False}
TRUSTS = [{"trust": False}, {"trust": True}]


@pytest.mark.parametrize(
    ("build", "options", "groups", "words"),
    [
        (torch_optimizer.LARS, {"lr": 0.1}, [{"weight_decay": 1e-4, "params": [1], "lr": 0.2}], "differed"),
        (own.NormedBy, {}, TRUSTS, "differed"),
        # A fused group does not hide what another group does.
        (own.RoundsAtTheEnd, {}, [FUSED], None),
        (own.RoundsAtTheEnd, {}, [FUSED, PLAIN], "differed"),
    ],
)
def test_options_of_groups_count(
    build: Builder, options: dict[str, Any], groups: list[dict[str, Any]], words: str | None
) -> None:
    reason = why_not_cut(under_test(build, options, groups))
    assert reason is None if words is None else words in (reason or "")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_wider_dtypes_are_tried_in_themselves_and_half_precision_is_not_cut(dtype: torch.dtype) -> None:
    reason = why_not_cut(under_test(torch.optim.SGD, {"lr": 0.1}), dtype)
    assert reason is None if dtype.itemsize > 2 else "end of a vector" in (reason or "")


# ------------------------------------------------------------------ once, and for the right class


def test_a_class_with_the_same_options_is_tried_once() -> None:
    built = 0
    asks: tuple[tuple[Callable[..., object], Builder, dict[str, Any], bool], ...] = (
        (probe, own.Counted, {"lr": 0.1, "betas": [0.9, 0.99]}, True),
        (probe, own.Counted, {"lr": 0.1, "betas": [0.9, 0.99]}, False),
        (probe, functools.partial(own.Counted, lr=0.1), {"betas": [0.9, 0.99]}, False),
        (probe, own.Counted, {"lr": 0.2, "betas": [0.9, 0.99]}, True),
        (why_not_cut, own.Counted, {"lr": 0.2, "betas": [0.9, 0.99]}, True),
        (why_not_cut, own.Counted, {"lr": 0.2, "betas": [0.9, 0.99]}, False),
    )
    for ask, build, options, is_new in asks:
        ask(under_test(build, options))
        assert (own.Counted.built > built) == is_new, (ask, options)
        built = own.Counted.built


def test_options_that_can_change_are_tried_again() -> None:
    class Switch:
        on = False

    class Switched(own.ClipsGlobally):
        def __init__(self, params: Any, switch: Switch) -> None:
            super().__init__(params, max_norm=1.0 if switch.on else 1e30)

    switch = Switch()
    assert probe(under_test(Switched, {"switch": switch})).separable
    switch.on = True
    assert not probe(under_test(Switched, {"switch": switch})).separable

    def by_list(params: Any, limit: list[float]) -> Optimizer:
        return own.ClipsGlobally(params, max_norm=limit[0])

    limit = [1e30]
    assert probe(under_test(by_list, {"limit": limit})).separable
    limit[0] = 1.0
    assert not probe(under_test(by_list, {"limit": limit})).separable


# ------------------------------------------------------------------ without a trace


def _states() -> tuple[Any, ...]:
    name, words, *rest = np.random.get_state()
    return torch.get_rng_state().tolist(), random.getstate(), (name, words.tobytes(), *rest)


def test_random_numbers_and_a_users_tensors_are_as_before() -> None:
    before, rate = _states(), torch.tensor(0.1)
    probe(under_test(torch.optim.Adam, {"lr": 0.123}))
    for source in own.DRAWS:
        probe(under_test(functools.partial(own.Langevin), {"source": source, "unused": object()}))
    probe(under_test(torch_optimizer.Adahessian, {"seed": 5}))  # is not sown
    probe(under_test(own.ChangesItsRate, {"lr": rate, "unused": object()}))
    assert _states() == before
    assert rate == torch.tensor(0.1)


def test_global_step_hooks_do_not_fire_and_stay() -> None:
    seen = []
    handles = [
        register_optimizer_step_pre_hook(lambda *_: seen.append("pre")),
        register_optimizer_step_post_hook(lambda *_: seen.append("post")),
    ]
    try:
        probe(under_test(torch.optim.Adam, {"lr": 0.0625}))
        assert seen == []
        torch.optim.SGD([torch.zeros(1, requires_grad=True)]).step()
        assert seen == ["pre", "post"]
    finally:
        for handle in handles:
            handle.remove()
    torch.optim.SGD([torch.zeros(1, requires_grad=True)]).step()
    assert seen == ["pre", "post"]


@contextmanager
def _default(what: str, value: Any, after: Any) -> Iterator[None]:
    """Set a default of torch; with PyTorch 2.8, taking a device back leaves it without one to ask for."""
    setter = getattr(torch, f"set_default_{what}")
    setter(value)
    try:
        yield
    finally:
        setter(after)


SURROUNDINGS: list[Callable[[], Any]] = [
    torch.inference_mode,
    functools.partial(_default, "device", "meta", None),
    functools.partial(_default, "dtype", torch.float64, torch.float32),
    functools.partial(torch.autocast, "cpu"),
]


@pytest.mark.parametrize(("number", "surroundings"), list(enumerate(SURROUNDINGS)))
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
        assert letters(probe(under_test(torch.optim.AdamW, {"lr": 1e-3 + number}))) == "SPE"
        assert (
            letters(probe(under_test(torch_optimizer.SWATS, {"weight_decay": 1e-3 + number * 1e-6}))) == "---"
        )
        assert modes() == before
    assert letters(probe(under_test(torch.optim.AdamW, {"lr": 1e-2 + number}))) == "SPE"


# ------------------------------------------------------------------ what cannot be tried as usual


class Talks(torch.optim.SGD):
    """Averages what it has with the other ranks, as if they had the same."""

    def step(self, closure: Any = None) -> Any:
        for param in self.param_groups[0]["params"]:
            dist.all_reduce(param.grad)
        return super().step(closure)


@on_ranks(2)
def test_a_class_that_communicates_in_its_step_is_refused() -> None:
    with pytest.raises(ValueError, match="its step communicates, and each rank would send what it has"):
        ZeroRedundancyOptimizer([torch.nn.Parameter(torch.ones(3))], Talks, lr=0.1)


@on_ranks(1)
def test_a_class_is_tried_on_a_backend_that_does_not_count_collectives() -> None:
    dist.destroy_process_group()
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    optimizer = ZeroRedundancyOptimizer([torch.nn.Parameter(torch.ones(3))], torch.optim.AdamW, lr=0.1)
    assert optimizer.param_groups[0]["lr"] == 0.1
