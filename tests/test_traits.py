"""What the library finds out about optimizer classes by trying them."""

import functools
import gc
import random
import warnings
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import pairwise
from math import prod
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
from optimizer_cases import CASES, MISSING, documented
from own_classes import Small
from pool import on_ranks
from training import HAS_MUON, needs_muon
from zero_optim import ZeroRedundancyOptimizer
from zero_optim.plan.groups import changed_in_kind
from zero_optim.probe.comparison import same
from zero_optim.probe.cut_rows import CutRows, like_rows, why_not_cut, why_rows_not_cut
from zero_optim.probe.feeds import Feed
from zero_optim.probe.probe import probe, state_entries, why_dtypes_couple
from zero_optim.probe.traits import Traits, refusal, refusal_in_half
from zero_optim.probe.trials import by_rows

Builder = Callable[..., Optimizer]


def lookahead(params: Any, **options: Any) -> Optimizer:
    return torch_optimizer.Lookahead(torch.optim.AdamW(params, **options))


# ------------------------------------------------------------------ the table

ALL, WHOLE, UNCOUNTED, NONE = "SPEC", "SP--", "S-EC", "----"
"""S separable, P steppable in parts, E element-wise, C may be cut by rows."""

DRAWS, CLOSURE, DIFFERED = "draws random numbers", "needs a closure", "differed after step"
# Letters, and words of the first reason against what they lack.
HABITS: list[tuple[Builder, dict[str, Any], str, str]] = [
    (Small, {}, ALL, ""),
    (torch_optimizer.LARS, {"lr": 0.1, "weight_decay": 1e-4}, WHOLE, DIFFERED),
    (torch_optimizer.AdamP, {"lr": 1e-3, "weight_decay": 0.01}, WHOLE, DIFFERED),
    *((torch_optimizer.SWATS, {"lr": lr}, NONE, "'lr' differed") for lr in (1e-4, 1e-3, 1e-2, 0.1, 1.0)),
    (torch_optimizer.SWATS, {"weight_decay": 0.01, "nesterov": True}, NONE, "'lr' differed"),
    (torch_optimizer.SWATS, {"eps": 1e-8, "amsgrad": True}, NONE, "'lr' differed"),
    (lookahead, {"lr": 1e-2}, UNCOUNTED, ""),
    (own.ClipsGlobally, {}, NONE, DIFFERED),
    (own.ClipsGlobally, {"max_norm": 1e3}, NONE, DIFFERED),
    (own.CouplesLarge, {}, NONE, DIFFERED),
    (own.CouplesLarge, {"above": 60}, NONE, DIFFERED),
    (own.CouplesLate, {"begin": 8}, NONE, DIFFERED),
    (own.SeededNoise, {}, NONE, DIFFERED),
    (own.StateByIndex, {}, NONE, "state that belongs to no parameter"),
    (own.GlobalCounter, {}, "S-E-", "state that belongs to no parameter"),
    (own.GroupCoupled, {}, NONE, DIFFERED),
    (own.StacksEqualShapes, {}, NONE, DIFFERED),
    (own.BlocksAcross, {}, NONE, DIFFERED),
    (own.BlocksAcross, {"least": 8192}, NONE, DIFFERED),
    (own.Langevin, {}, NONE, DRAWS),
    (own.Langevin, {"source": "numpy"}, NONE, DRAWS),
    (own.Langevin, {"source": "python"}, NONE, DRAWS),
    (own.OwnNoise, {}, NONE, "two equal runs"),
    (own.RoundsStochastically, {}, ALL, ""),  # but for half precision, below
    (own.RoundsLarge, {}, NONE, DRAWS),
    (own.LeavesMemoryUnwritten, {"clips": False}, "S", ""),
    (own.LeavesMemoryUnwritten, {"clips": True}, "S", ""),  # likewise
    (own.WritesDown, {}, "S---", ""),
    (own.WritesDown, {"uses": "numel"}, NONE, "the group's entry"),
    (own.WritesDown, {"uses": "count"}, NONE, "the group's entry"),
    (own.WritesDown, {"uses": "norm"}, NONE, DIFFERED),
    (own.ScheduleFree, {}, UNCOUNTED, ""),
    (own.ChangesItsRate, {"lr": torch.tensor(0.1)}, UNCOUNTED, ""),
    (own.SharpnessAware, {}, NONE, CLOSURE),
    (torch.optim.LBFGS, {}, NONE, CLOSURE),
    (torch_optimizer.Adahessian, {}, NONE, "second-order gradients"),
    (own.OnGpuOnly, {}, NONE, "RuntimeError: expected CUDA tensors"),
    (torch.optim.SGD, {"no_such_option": 1}, NONE, "TypeError"),
    (own.NeverMoves, {}, NONE, "no parameter moved"),
    (own.Replaces, {}, "SPE-", "tensors in lists or dicts of its state"),
    (own.LargeFactored, {}, WHOLE, "cut in pieces"),
    (own.RowNormalized, {}, WHOLE, "cut in pieces"),
    (own.RemembersItsSize, {}, WHOLE, "the state of"),
    (own.WrapsAll, {}, WHOLE, "the state of"),
    (torch.optim.SparseAdam, {}, WHOLE, "sparse gradients"),
    (torch_optimizer.NovoGrad, {}, WHOLE, "differed"),
    *((torch.optim.AdamW, {name: True}, ALL, "") for name in ("foreach", "capturable", "differentiable")),
    *((torch.optim.AdamW, {name: True}, ALL, "") for name in ("maximize", "amsgrad")),
    (functools.partial(functools.partial(torch.optim.Adam, lr=0.1), capturable=True), {"lr": 1e-2}, ALL, ""),
    *((torch.optim.SGD, {"lr": rate}, ALL, "") for rate in (0, 0.0, torch.tensor(0.0), torch.tensor(0.1))),
    *((own.ClipsGlobally, {"lr": rate}, NONE, DIFFERED) for rate in (0, 0.0, torch.tensor(0.0))),
    # Numbers that are zero are tried with another value too: later it may be another.
    (own.NormedBy, {}, ALL, ""),
    (own.NormedBy, {"trust": 0}, "SPE-", "with trust=0.05"),
    (own.NormedBy, {"trust": 0.0}, "SPE-", "with trust=0.05"),
    (torch_optimizer.LARS, {"lr": 0.1}, "SPE-", "weight_decay=0.05"),
    (own.Counts, {"k": 0}, ALL, ""),
    (own.Counts, {"k": 0, "trust": 0}, ALL, ""),  # its name does not say that it may change
    (own.Counts, {"k": 0, "weight_decay": 0.0}, "SPE-", "weight_decay=0.05"),
]


def letters(traits: Traits) -> str:
    has = (traits.separable, traits.steppable_in_parts, traits.elementwise)
    return "".join(letter if is_true else "-" for letter, is_true in zip("SPE", has, strict=True))


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
            yield pytest.param(CASES[name].optimizer_class, options, expected, "", id=row)
    for build, options, expected, words in HABITS:
        yield pytest.param(build, options, expected, words, id=f"{getattr(build, '__name__', '')}, {options}")


@pytest.mark.parametrize(("build", "options", "expected", "words"), list(rows()))
def test_traits_of_every_class(build: Builder, options: dict[str, Any], expected: str, words: str) -> None:
    traits = probe(build, options)
    assert letters(traits).startswith(expected[:3]), traits
    reason = why_not_cut(build, options) or ""
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
        (torch.optim.AdamW, {}, None),
    ],
)
def test_half_precision_is_tried_apart(build: Builder, options: dict[str, Any], words: str | None) -> None:
    traits = probe(build, options)
    assert traits.in_half is None if words is None else words in (traits.in_half or "")
    message = refusal_in_half(build, traits)
    assert (words or "") in message
    assert "master_dtype=torch.float32" in message


@pytest.mark.parametrize("other", [torch.bfloat16, torch.float64])
def test_several_dtypes_in_a_group_are_tried_apart(other: torch.dtype) -> None:
    """Adafactor of PyTorch takes its ``eps`` from the dtype of a step's first parameter."""
    dtypes = {torch.float32, other}
    reason = why_dtypes_couple(torch.optim.Adafactor, {}, [], dtypes)
    assert reason is not None
    assert "in a group, stepped alone, the parameter of shape" in reason
    assert why_dtypes_couple(torch.optim.Adafactor, {"eps": (1e-8, 1e-3)}, [], dtypes) is None
    for name in ("AdamW", "SGD", "Adagrad", "RMSprop", *["Muon"] * HAS_MUON):
        assert why_dtypes_couple(getattr(torch.optim, name), {}, [], dtypes) is None, name


def test_entries_that_a_class_writes_and_does_not_use_are_known() -> None:
    traits = probe(own.WritesDown, {})
    assert (traits.idle, traits.retyped, traits.unsaved) == ({"numel", "norm"}, {"count"}, None)


@pytest.mark.parametrize("name", ["Adam", "AdamW", "SGD", "Adagrad"])
def test_fused_kernels_are_tried_themselves_and_bear_cuts_where_plans_cut(name: str) -> None:
    # Whether a cut anywhere shows depends on how a processor's kernel treats the end of a vector.
    build = getattr(torch.optim, name)
    traits = probe(build, {"fused": True})
    assert traits.steppable_in_parts
    assert traits.elementwise or "cut in pieces" in (traits.shape_use or "")
    assert why_not_cut(build, {"fused": True}) is None
    assert why_not_cut(build, {}, [{"fused": True}]) is None


FUSED, PLAIN = {"fused": True}, {"fused": False}
TRUSTS = [{"trust": False}, {"trust": True}]


@pytest.mark.parametrize(
    ("build", "options", "groups", "words"),
    [
        (torch_optimizer.LARS, {"lr": 0.1}, [{"weight_decay": 1e-4, "params": [1], "lr": 0.2}], "differed"),
        (own.NormedBy, {}, TRUSTS[:1], None),
        (own.NormedBy, {}, TRUSTS, "differed"),
        # A fused group does not hide what another group does.
        (own.RoundsAtTheEnd, {}, [FUSED], None),
        (own.RoundsAtTheEnd, {}, [PLAIN], "differed"),
        (own.RoundsAtTheEnd, {}, [FUSED, PLAIN], "differed"),
        (own.RoundsAtTheEnd, FUSED, [PLAIN], "differed"),
        (own.RoundsAtTheEnd, {}, [PLAIN, FUSED, {"lr": 0.5}], "differed"),
    ],
)
def test_options_of_groups_count(
    build: Builder, options: dict[str, Any], groups: list[dict[str, Any]], words: str | None
) -> None:
    reason = why_not_cut(build, options, groups)
    assert reason is None if words is None else words in (reason or "")


def test_forty_groups_of_different_rates_are_tried_as_one() -> None:
    calls = []

    def build(groups: Any, **options: Any) -> Optimizer:
        calls.append(len(groups))
        return torch.optim.SGD(groups, **options)

    assert probe(build, {}, [{"lr": 0.01 * (k + 1)} for k in range(40)]).elementwise
    assert max(calls) == 2


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64, torch.complex64])
def test_wider_dtypes_are_tried_in_themselves_and_half_precision_is_not_cut(dtype: torch.dtype) -> None:
    reason = why_not_cut(torch.optim.SGD, {"lr": 0.1}, dtype=dtype)
    assert reason is None if dtype.itemsize > 2 else "end of a vector" in (reason or "")


# ------------------------------------------------------------------ once, and for the right class


def test_a_class_with_the_same_options_is_tried_once() -> None:
    built = 0
    for ask, options, is_new in (
        (probe, {"lr": 0.1, "betas": [0.9, 0.99]}, True),
        (probe, {"lr": 0.1, "betas": [0.9, 0.99]}, False),
        (functools.partial(probe, functools.partial(own.Counted, lr=0.1)), {"betas": [0.9, 0.99]}, False),
        (probe, {"lr": 0.2, "betas": [0.9, 0.99]}, True),
        (why_not_cut, {"lr": 0.2, "betas": [0.9, 0.99]}, True),
        (why_not_cut, {"lr": 0.2, "betas": [0.9, 0.99]}, False),
    ):
        asked: Any = ask if isinstance(ask, functools.partial) else functools.partial(ask, own.Counted)
        asked(options)
        assert (own.Counted.built > built) == is_new, (ask, options)
        built = own.Counted.built


def test_options_that_can_change_are_tried_again() -> None:
    class Switch:
        on = False

    class Switched(own.ClipsGlobally):
        def __init__(self, params: Any, switch: Switch) -> None:
            super().__init__(params, 1.0 if switch.on else 1e30)

    switch = Switch()
    assert probe(Switched, {"switch": switch}).separable
    switch.on = True
    assert not probe(Switched, {"switch": switch}).separable

    def by_list(params: Any, limit: list[float]) -> Optimizer:
        return own.ClipsGlobally(params, limit[0])

    limit = [1e30]
    assert probe(by_list, {"limit": limit}).separable
    limit[0] = 1.0
    assert not probe(by_list, {"limit": limit}).separable


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


def test_random_numbers_and_a_users_tensors_are_as_before() -> None:
    before, rate = _states(), torch.tensor(0.1)
    probe(torch.optim.Adam, {"lr": 0.123})
    for source in own.DRAWS:
        probe(functools.partial(own.Langevin), {"source": source, "unused": object()})
    probe(torch_optimizer.Adahessian, {"seed": 5})  # is not sown
    probe(own.ChangesItsRate, {"lr": rate, "unused": object()})
    assert _states() == before
    assert rate == torch.tensor(0.1)


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
def _default(what: str, value: Any, after: Any) -> Iterator[None]:
    """Set a default of torch; with PyTorch 2.8, taking a device back leaves it without one to ask for."""
    setter = getattr(torch, f"set_default_{what}")
    setter(value)
    try:
        yield
    finally:
        setter(after)


SURROUNDINGS: list[Callable[[], Any]] = [
    torch.no_grad,
    torch.inference_mode,
    functools.partial(torch.device, "meta"),
    functools.partial(_default, "device", "meta", None),
    functools.partial(_default, "dtype", torch.float64, torch.float32),
    functools.partial(_default, "dtype", torch.bfloat16, torch.float32),
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
        assert letters(probe(torch.optim.AdamW, {"lr": 1e-3 + number})) == "SPE"
        assert letters(probe(torch_optimizer.SWATS, {"weight_decay": 1e-3 + number * 1e-6})) == "---"
        assert modes() == before
    assert letters(probe(torch.optim.AdamW, {"lr": 1e-2 + number})) == "SPE"


# ------------------------------------------------------------------ the shape of state


@pytest.mark.parametrize(
    ("build", "options", "num_dims", "shaped"),
    [
        (torch.optim.Adam, {"capturable": True}, 2, {"exp_avg", "exp_avg_sq"}),
        (torch.optim.SparseAdam, {}, 2, {"exp_avg", "exp_avg_sq"}),
        (torch.optim.Adafactor, {}, 1, {"variance"}),
        (torch.optim.Adafactor, {}, 2, set()),
        (torch.optim.LBFGS, {}, 1, set()),
        (torch.optim.SGD, {"lr": 0.0, "momentum": 0.9}, 0, set()),
        pytest.param(getattr(torch.optim, "Muon", None), {}, 2, {"momentum_buffer"}, marks=needs_muon),
        pytest.param(getattr(torch.optim, "Muon", None), {}, 1, set(), marks=needs_muon),
    ],
)
def test_state_with_the_parameters_shape_is_known_by_dimensions(
    build: Any, options: dict[str, Any], num_dims: int, shaped: set[str]
) -> None:
    entries = state_entries(build, options, num_dims)
    assert {name for name, is_shaped in entries.items() if is_shaped} == shaped


# ------------------------------------------------------------------ the trials of cuts


def test_trial_pieces_start_where_a_plan_may_cut() -> None:
    feed = Feed(((9, 13), (67,), (40,), (2, 3, 3, 3))).with_rows()
    for index, start in feed.starts(feed.noise()).items():
        pieces = by_rows(index, start)
        assert len(pieces) == (3 if index == 1 else 2)
        assert torch.equal(torch.cat(list(pieces)), start)
        for piece in pieces[:-1]:
            assert piece.numel() * piece.element_size() % 64 == 0
        assert pieces[-1].numel() * start.element_size() % 64  # the end of a vector


def test_tensor_subclasses_are_compared_by_what_they_hold() -> None:
    codes, scale = torch.ones(4, dtype=torch.int8), torch.ones(2)
    assert same(own.InBlocks(codes, scale), own.InBlocks(codes.clone(), scale.clone()))
    for other in (own.InBlocks(codes, scale * 2), own.InBlocks(codes * 2, scale), codes.float()):
        assert not same(own.InBlocks(codes, scale), other)


@pytest.mark.parametrize(
    "shape", [(50257, 768), (768, 50257), (4001, 385), (2**20,), (600, 400, 3, 3)], ids=str
)
def test_rows_of_a_large_weight_have_their_like_in_a_small_one(shape: tuple[int, ...]) -> None:
    ends = (112, 208, 464)
    likes = like_rows(shape, ends)
    assert 0 < len(likes) <= len(ends) + 1  # one for each piece, unless they are alike
    for start, stop in pairwise((0, *ends, shape[0])):
        real = [rows for rows in (start, stop - start, shape[0] - stop) if rows]
        assert any(_is_like(shape, real, *like) for like in likes)


def _is_like(shape: tuple[int, ...], real: list[int], small: tuple[int, ...], sizes: tuple[int, ...]) -> bool:
    """Whether pieces have as many elements as the real ones, but for multiples of 256, and enough."""
    assert sum(sizes) == small[0]
    assert prod(small) <= 2**19
    pairs = [
        (rows * prod(shape[1:]), size * prod(small[1:])) for rows, size in zip(real, sizes, strict=False)
    ]
    return len(real) == len(sizes) and all((a - b) % 256 == 0 and b >= min(4096, a) for a, b in pairs)


class TakesVectors(torch.optim.SGD):
    """Raises for matrices."""

    def step(self, closure: Any = None) -> None:
        if any(p.dim() > 1 for group in self.param_groups for p in group["params"]):
            raise ValueError("vectors only")
        super().step()


@pytest.mark.parametrize(
    ("build", "group", "shape", "ends", "words"),
    [
        (torch.optim.AdamW, {}, (512, 80), (100, 200), None),
        (TakesVectors, {}, (4096,), (1024,), None),
        (TakesVectors, {}, (64, 64), (16,), "could not be tried"),
        (torch.optim.SGD, {"lr": 1e-30}, (64, 64), (16,), "no element changed"),
    ],
)
def test_the_very_rows_of_a_plan_are_tried(
    build: Builder, group: dict[str, Any], shape: tuple[int, ...], ends: tuple[int, ...], words: str | None
) -> None:
    assert like_rows((512, 80), (100, 200)) == [((512, 80), (100, 100, 312))]
    reason = why_rows_not_cut(build, {"lr": 0.1}, group, CutRows(torch.float32, shape, ends))
    assert reason is None if words is None else words in (reason or "")


def test_options_that_change_in_kind() -> None:
    before = {"params": [], "lr": 0.1, "decay": 0, "betas": (0.0, 0.9), "flag": None, "name": "a", "k": 1}
    assert changed_in_kind(before, {**before, "lr": 0.0, "initial_lr": 0.1, "k": 7, "decay": 0.0}) == []
    for changes in (
        {"decay": 0.1}, {"k": 0.0}, {"betas": (0.1, 0.9)}, {"flag": False}, {"name": "b"}, {"new": 2},
        {"lr": torch.tensor(0.1)}, {"decay": None},
    ):  # fmt: skip
        assert changed_in_kind(before, {**before, **changes}) == list(changes)
    assert changed_in_kind(before, {key: before[key] for key in before if key != "k"}) == ["k"]


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
