"""Every optimizer class and every schedule gives the bits it gives without sharding, or is refused.

The classes stand in tests/optimizer_cases.py; docs/make_optimizer_table.py runs `check_case` and
`check_refusal` for its table.
"""

from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch_optimizer
from torch import nn
from torch.nn import Parameter
from torch.optim import Optimizer

import cuts
from optimizer_cases import (
    BITWISE,
    CASES,
    MISSING,
    REFUSED,
    SCHEDULERS,
    SWITCHES,
    Case,
    Feed,
    Options,
    answer_of,
    classes_of,
    documented,
    switches_of,
)
from overlap import Bag, Setting, assert_same_run, step_bag
from pool import on_ranks
from training import assert_same_bits, assert_same_value, make_params, params_of, set_grads, twin
from zero_optim import ZeroRedundancyOptimizer
from zero_optim.hooks import zero_step
from zero_optim.probe.cut_rows import why_not_cut
from zero_optim.probe.probe import probe
from zero_optim.probe.subject import under_test

# What classes of torch_optimizer call, and what PyTorch says of it.
pytestmark = pytest.mark.filterwarnings(r"ignore:This overload of \w+ is deprecated:UserWarning")


def assert_same_options(sharded: Optimizer, plain: Optimizer, when: object = "") -> None:
    """Compare the groups' options, names of parameters included."""
    assert_same_value(options_of(sharded), options_of(plain), when)


def options_of(optimizer: Optimizer) -> list[dict[str, Any]]:
    return [{k: v for k, v in group.items() if k != "params"} for group in optimizer.param_groups]


def assert_same_dict(got: dict[str, Any], expected: dict[str, Any]) -> None:
    """Compare state dicts; a plain optimizer enters parameters as their first gradients come."""
    assert got["param_groups"] == expected["param_groups"]
    assert list(got["state"]) == sorted(expected["state"])
    for index, entries in expected["state"].items():
        assert_same_value(got["state"][index], entries, f"parameter {index}")


def train_case(
    case: Case, plain: Optimizer, sharded: Optimizer, steps: Iterable[int], *, gaps: bool = True
) -> None:
    """Step side by side; parameters and options are compared after every step."""
    for step in steps:
        for optimizer in (plain, sharded):
            case.give_gradients(params_of(optimizer), step, gaps=gaps)
            optimizer.step()
        assert_same_bits(params_of(sharded), params_of(plain), f"after step {step}")
        assert_same_options(sharded, plain, f"after step {step}")


# ---------------------------------------------------------------------- the table


@pytest.mark.parametrize("module", [torch.optim, torch_optimizer], ids=lambda module: module.__name__)
def test_no_class_is_missing(module: Any) -> None:
    classes = set(classes_of(module))
    assert len(classes) >= 14
    assert {name for name in CASES if name.startswith(f"{module.__name__}.")} - MISSING == classes


# ---------------------------------------------------------------------- parity


WIDE = tuple(shape for shape in cuts.SHAPES if 0 not in shape)
WIDE_SHAPES: dict[Feed, tuple[tuple[int, ...], ...]] = {
    "any shape": WIDE,
    "no kernels": tuple(shape for shape in WIDE if len(shape) <= 2),
    "at least 1-d": tuple(shape for shape in WIDE if shape),
    "matrices": ((64, 16), (16, 8), (48, 16)),
    "sparse rows": ((64, 4), (48, 8), (7, 2), (32, 16)),
}


def check_case(name: str, options: Options, *, finely_cut: bool = False) -> None:
    """Ten steps, some without some gradients; then the state is saved, and three runs go on from there."""
    case = CASES[name]
    params = make_params(WIDE_SHAPES[case.feed]) if finely_cut else case.params()
    cap = {**case.sharding, **({"bucket_cap_mb": cuts.ONE_A_BUCKET} if finely_cut else {})}
    mine, before = twin(params), twin(params)
    plain = case.optimizer_class(params, **options)
    sharded = ZeroRedundancyOptimizer(mine, case.optimizer_class, **cap, **options)
    if finely_cut:
        is_cut = any(len(pieces) == dist.get_world_size() for pieces in sharded.pieces().values())
        assert is_cut == (why_not_cut(under_test(case.optimizer_class, options, [{}])) is None)
        assert not is_cut or len(sharded.explain().cuts) >= 2
        whole = ZeroRedundancyOptimizer(
            twin(params), case.optimizer_class, cuts=False, **case.sharding, **options
        )
        assert all(len(pieces) == 1 for pieces in whole.pieces().values())
    assert_same_value(sharded.defaults, plain.defaults)
    assert_same_options(sharded, plain)
    train_case(case, plain, sharded, range(10))
    assert not any(torch.equal(a, b) for a, b in zip(before, mine, strict=True))
    if case.saves and (case.rates or not finely_cut):  # else caches of step sizes differ by what a rank owns
        check_saved(case, plain, sharded, options)
    elif not case.saves:
        with pytest.raises(AttributeError):
            plain.state_dict()
        with pytest.raises(TypeError, match="allow_unsaved=True"):
            ZeroRedundancyOptimizer(twin(params), case.optimizer_class, **options)
        train_case(case, plain, sharded, range(10, 13))


def check_saved(case: Case, plain: Optimizer, sharded: ZeroRedundancyOptimizer, options: Options) -> None:
    """What rank 0 consolidates loads into the plain class, what the plain one saves into a sharded one."""
    saved = plain.state_dict()
    again = ZeroRedundancyOptimizer(twin(params_of(plain)), case.optimizer_class, **options)
    again.load_state_dict(saved)
    sharded.consolidate_state_dict()
    runs = [sharded, again]
    if dist.get_rank() == 0:
        whole = sharded.state_dict()
        assert_same_dict(whole, saved)
        reloaded = case.optimizer_class(twin(params_of(plain)), **options)
        reloaded.load_state_dict(whole)
        runs.append(reloaded)
    for step in range(10, 13):
        for optimizer in (plain, *runs):
            case.give_gradients(params_of(optimizer), step)
            optimizer.step()
        for optimizer in runs:
            assert_same_bits(params_of(optimizer), params_of(plain), f"after step {step}")
            assert_same_options(optimizer, plain, f"after step {step}")


@on_ranks(2)
@pytest.mark.parametrize("name", BITWISE)
def test_class_gives_the_bits_it_gives_without_sharding(name: str) -> None:
    for options in CASES[name].options:
        check_case(name, options)


@on_ranks(2)
@pytest.mark.parametrize(
    "name", sorted({name for name, _, fails, _ in documented() if "rows" not in fails} & {*BITWISE})
)
def test_class_gives_the_same_bits_where_parameters_may_be_cut(name: str) -> None:
    with cuts.finely_cut():
        for options in CASES[name].options:
            check_case(name, options, finely_cut=True)


# ---------------------------------------------------------------------- refusals


def check_refusal(name: str, options: Options) -> None:
    """Refused when it is built, with the reason and the way out."""
    case = CASES[name]
    params = case.params()
    before = [p.data for p in params]
    with pytest.raises(ValueError, match=r"assume_separable=True") as refused:
        ZeroRedundancyOptimizer(params, case.optimizer_class, **options)
    assert case.because in str(refused.value)
    assert name.rpartition(".")[2] in str(refused.value)
    assert all(
        p.data is data or p.data_ptr() == data.data_ptr() for p, data in zip(params, before, strict=True)
    )
    ZeroRedundancyOptimizer(params, case.optimizer_class, assume_separable=True, **options)


@on_ranks(2)
@pytest.mark.parametrize("name", REFUSED)
def test_class_whose_steps_join_parameters_is_refused(name: str) -> None:
    for options in CASES[name].options:
        check_refusal(name, options)


# ---------------------------------------------------------------------- constructor forms


def named(params: list[Parameter]) -> Iterator[tuple[str, Parameter]]:
    return ((f"layer{index}.weight", p) for index, p in enumerate(params))


def groups_of(params: list[Parameter]) -> list[dict[str, Any]]:
    return [{"params": params[:2]}, {"params": (p for p in params[2:])}]


FORMS: dict[str, Callable[[list[Parameter]], Any]] = {
    "generator": lambda params: (p for p in params),
    "iterator": iter,
    "groups, one with a generator": groups_of,
    "generator of groups": lambda params: (group for group in groups_of(params)),
    "named": lambda params: list(named(params)),
    "generator of names": named,
    "names in a group": lambda params: [{"params": list(named(params))}],
    "groups with rates": lambda params: [{"params": params[::2], "lr": 0.05}, {"params": params[1::2]}],
}


@on_ranks(2)
def test_classes_take_every_form_of_parameters_and_rates_of_groups() -> None:
    for case in map(CASES.__getitem__, BITWISE[::8]):
        for what, form in FORMS.items():
            has_rates = case.rates and what == "groups with rates"
            if what == "groups with rates" and not case.rates:
                continue
            options = {**case.options[-1], **({"lr": 0.02} if has_rates else {})}
            params = case.params()
            mine = twin(params)
            plain = case.optimizer_class(form(params), **options)
            sharded = ZeroRedundancyOptimizer(form(mine), case.optimizer_class, **case.sharding, **options)
            assert_same_value(sharded.defaults, plain.defaults, (case, what))
            assert_same_options(sharded, plain, (case, what))
            train_case(case, plain, sharded, range(3 if has_rates else 2))
            if has_rates:
                for optimizer in (plain, sharded):
                    optimizer.param_groups[1]["lr"] *= 0.5
                train_case(case, plain, sharded, range(3, 8))


def outcome(
    case: Case, build: Any, arguments: Options, params: list[Parameter]
) -> tuple[type[Exception] | None, Any]:
    """Build and step: what class of error came, and what the options and parameters are now."""
    error: type[Exception] | None = None
    options: Any = None
    try:
        optimizer = build(params, **arguments)
        options = optimizer.defaults, options_of(optimizer)
        for step in range(4):
            case.give_gradients(params, step, gaps=False)
            optimizer.step()
    except Exception as raised:  # noqa: BLE001 - whatever the plain class raises, ours should too
        error = type(raised)
    return error, (options, [p.detach() for p in params])


def arguments_of(case: Case, what: str) -> Iterator[tuple[Any, Options]]:
    """A tensor as rate, a partial, the plain optimizer's defaults passed back in, a switch on and off."""
    build, options = case.optimizer_class, case.options[-1]
    if what == "defaults":
        yield build, build(case.params(), **options).defaults
    elif what == "tensor as rate":
        yield build, {**options, "lr": torch.tensor(0.01)}
    elif what == "partial":
        yield partial(build, **options), {}
    elif what in switches_of(case):
        yield build, {**options, what: True}
        yield build, {**options, what: False}


@on_ranks(2)
@pytest.mark.parametrize("what", ["defaults", "tensor as rate", "partial", *SWITCHES])
def test_arguments_act_as_on_the_plain_class(what: str) -> None:
    for case in map(CASES.__getitem__, BITWISE[::4]):
        for build, arguments in arguments_of(case, what):
            params = case.params()
            mine = twin(params)
            sharded = partial(ZeroRedundancyOptimizer, optimizer_class=build, **case.sharding)
            plain, ours = (
                outcome(case, built, arguments, own) for built, own in ((build, params), (sharded, mine))
            )
            assert ours[0] is plain[0], f"{build} with {arguments}: {ours[0]} and {plain[0]}"
            assert_same_value(ours[1], plain[1], f"{build} with {arguments}")


# ---------------------------------------------------------------------- schedules


@on_ranks(2)
@pytest.mark.parametrize("name", SCHEDULERS)
def test_schedules_give_the_rates_and_bits_they_give_without_sharding(name: str) -> None:
    """On a class with one momentum and on one with two betas: some schedules move these too."""
    for optimizer_class, options in ((torch.optim.SGD, {"momentum": 0.9}), (torch.optim.AdamW, {})):
        params = make_params()
        mine = twin(params)
        plain, sharded = (
            build([{"params": own[:3]}, {"params": own[3:], "lr": 0.02}], lr=0.1, **options)
            for build, own in (
                (optimizer_class, params),
                (partial(ZeroRedundancyOptimizer, optimizer_class=optimizer_class), mine),
            )
        )
        schedules = [SCHEDULERS[name](optimizer) for optimizer in (plain, sharded)]
        loss = [1.0] if name == "ReduceLROnPlateau" else []  # it goes by a loss
        for step in range(8):
            for optimizer, schedule in zip((plain, sharded), schedules, strict=True):
                set_grads(params_of(optimizer), step)
                optimizer.step()
                schedule.step(*(value + step // 3 for value in loss))
            assert_same_bits(mine, params, f"after step {step}")
            assert_same_options(sharded, plain, f"after step {step}")
            assert schedules[0].get_last_lr() == schedules[1].get_last_lr()
        states = [{k for k in s.state_dict() if not k.startswith("_sched")} for s in schedules]
        assert states[0] == states[1]


# ---------------------------------------------------------------------- steps during the backward pass

REFUSED_IN_PARTS = ("torch_optimizer.Lookahead", "torch_optimizer.MADGRAD")  # they count their steps


def in_small_buckets(optimizer_class: Any, options: Options, model: nn.Module) -> ZeroRedundancyOptimizer:
    return ZeroRedundancyOptimizer(model.parameters(), optimizer_class, bucket_cap_mb=0.0005, **options)


def check_overlapped(wrapper: str, names: Iterable[str]) -> None:
    refused = set()
    for name in names:
        case = CASES[name]
        is_sparse = case.feed == "sparse rows"
        # Every set of options on PyTorch's DDP, every class on both.
        for options in case.options if wrapper == "torch" else case.options[-1:]:
            setting = Setting(
                wrapper,
                partial(lambda case, sparse: Bag(case.params(), sparse=sparse), case, is_sparse),
                partial(in_small_buckets, case.optimizer_class, {**case.sharding, **options}),
            )
            if probe(under_test(case.optimizer_class, options)).steppable_in_parts:
                assert_same_run(setting, step_bag, 8, moves=not is_sparse, where=(name, options))
                continue
            refused.add(name)
            words = rf"(?i){name.rpartition('.')[2]} cannot be stepped during .*: stepped in parts, "
            with pytest.raises(ValueError, match=words):
                zero_step(setting.optimizer(setting.model()))
    assert refused == set(REFUSED_IN_PARTS) & set(names)


@on_ranks(2, timeout=600)
@pytest.mark.slow
@pytest.mark.parametrize("wrapper", [pytest.param("torch", marks=pytest.mark.exhaustive), "ours"])
def test_steps_in_the_backward_pass_give_the_same_bits_or_are_refused(wrapper: str) -> None:
    check_overlapped(wrapper, BITWISE)


@on_ranks(2)
def test_classes_that_count_their_steps_are_refused_with_the_reason() -> None:
    check_overlapped("torch", REFUSED_IN_PARTS)


# ---------------------------------------------------------------------- the table in the documentation


def test_the_documented_table_names_every_class_and_says_yes_for_tested_ones_only() -> None:
    rows = documented()
    for row in rows:
        case = CASES[row[0]]
        expected = answer_of(case)
        assert row[-1] == expected or (case.answer == "refused" and row[-1].startswith(expected)), row
