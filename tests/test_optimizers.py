"""Every optimizer class and every schedule gives the bits it gives without sharding, or is refused.

The classes stand in tests/optimizer_cases.py; docs/make_optimizer_table.py runs `check_case` and
`check_refusal` for its table.
"""

from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any, TypeAlias

import pytest
import torch
import torch.distributed as dist
import torch_optimizer
from torch import Tensor, nn
from torch.nn import Parameter
from torch.optim import Optimizer, lr_scheduler, swa_utils

import cuts
from optimizer_cases import (
    BITWISE,
    CASES,
    MISSING,
    REFUSED,
    SCHEDULERS,
    Case,
    Feed,
    Options,
    answer_of,
    classes_of,
    documented,
    switches_of,
    write_options,
)
from pool import Ranks, on_ranks
from training import assert_same_bits, make_params, needs_muon, params_of, set_grads, twin
from zero_optim import ZeroRedundancyOptimizer
from zero_optim.probe.cut_rows import why_not_cut

Build: TypeAlias = Callable[[list[Parameter]], Optimizer]

# What classes of torch_optimizer call, and what PyTorch says of it.
pytestmark = pytest.mark.filterwarnings(r"ignore:This overload of \w+ is deprecated:UserWarning")


def assert_same_options(sharded: Optimizer, plain: Optimizer, when: object = "") -> None:
    """Compare the groups' options, names of parameters included."""
    ours, theirs = (
        [{k: v for k, v in group.items() if k != "params"} for group in optimizer.param_groups]
        for optimizer in (sharded, plain)
    )
    assert same(ours, theirs), f"{when}: {ours} and {theirs}"


def same(a: Any, b: Any) -> bool:
    """Compare bit for bit, whatever classes keep: tensors with their strides, lists, dicts, numbers."""
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        return a.dtype == b.dtype and torch.equal(a, b) and a.stride() == b.stride()
    if isinstance(a, dict) and isinstance(b, dict):
        return list(a) == list(b) and all(same(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple) and isinstance(b, list | tuple):
        return len(a) == len(b) and all(map(same, a, b))
    return type(a) is type(b) and bool(a == b)


def assert_same_dict(got: dict[str, Any], expected: dict[str, Any]) -> None:
    """Compare state dicts; a plain optimizer enters parameters as their first gradients come."""
    assert got["param_groups"] == expected["param_groups"]
    assert list(got["state"]) == sorted(expected["state"])
    for index, entries in expected["state"].items():
        assert same(got["state"][index], entries), f"parameter {index}: {got['state'][index]} and {entries}"


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
    cap = {"bucket_cap_mb": cuts.ONE_A_BUCKET} if finely_cut else {}
    mine, before = twin(params), twin(params)
    plain = case.optimizer_class(params, **options)
    sharded = ZeroRedundancyOptimizer(mine, case.optimizer_class, **cap, **options)
    if finely_cut:
        is_cut = any(len(pieces) == dist.get_world_size() for pieces in sharded.pieces().values())
        assert is_cut == (why_not_cut(case.optimizer_class, options, [{}]) is None)
        assert not is_cut or len(sharded.explain(quiet=True).cuts) >= 2
        whole = ZeroRedundancyOptimizer(twin(params), case.optimizer_class, cuts=False, **options)
        assert all(len(pieces) == 1 for pieces in whole.pieces().values())
    assert same(sharded.defaults, plain.defaults)
    assert_same_options(sharded, plain)
    train_case(case, plain, sharded, range(10))
    assert not any(torch.equal(a, b) for a, b in zip(before, mine, strict=True))
    if case.saves and (case.rates or not finely_cut):  # else caches of step sizes differ by what a rank owns
        check_saved(case, plain, sharded, options)
    elif not case.saves:
        with pytest.raises(AttributeError):
            plain.state_dict()
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


def check_all_options(name: str) -> None:
    for options in CASES[name].options:
        check_case(name, options)


def check_all_options_cut(name: str) -> None:
    with cuts.finely_cut():
        for options in CASES[name].options:
            check_case(name, options, finely_cut=True)


@pytest.mark.parametrize("name", BITWISE)
def test_class_gives_the_bits_it_gives_without_sharding(ranks2: Ranks, name: str) -> None:
    ranks2.run(check_all_options, name)


def with_cuts() -> Iterator[Any]:
    """All classes; those that bear no cuts are slow tests, as they step whole parameters once more."""
    bearing = {name for name, _, fails, _ in documented() if "rows" not in fails}
    for name in BITWISE:
        yield pytest.param(name, marks=() if name in bearing else pytest.mark.slow)


@pytest.mark.parametrize("name", list(with_cuts()))
def test_class_gives_the_same_bits_where_parameters_may_be_cut(ranks2: Ranks, name: str) -> None:
    ranks2.run(check_all_options_cut, name)


@pytest.mark.parametrize(
    "name",
    [
        pytest.param("torch.optim.Muon", marks=needs_muon),
        "torch.optim.SparseAdam",
        "torch_optimizer.MADGRAD",
        "torch_optimizer.Shampoo",
    ],
)
def test_class_gives_the_same_bits_on_four_ranks(ranks4: Ranks, name: str) -> None:
    ranks4.run(check_all_options, name)


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


@pytest.mark.parametrize("name", REFUSED)
def test_class_whose_steps_join_parameters_is_refused(ranks2: Ranks, name: str) -> None:
    for options in CASES[name].options:
        ranks2.run(check_refusal, name, options)


def give_graph_gradients(params: list[Tensor]) -> None:
    """Gradients with a graph of their own, as ``backward(create_graph=True)`` leaves them."""
    loss = torch.stack([(p**4).sum() + p.sum() for p in params]).sum()
    for p, grad in zip(params, torch.autograd.grad(loss, params, create_graph=True), strict=True):
        p.grad = grad


def check_adahessian() -> None:
    """Each rank steps what it owns as a plain Adahessian over just that would, with its own draws."""
    params = make_params()
    sharded = ZeroRedundancyOptimizer(params, torch_optimizer.Adahessian, assume_separable=True)
    owned = sharded.owned_parameters()
    of_rank = twin(owned)
    plain = torch_optimizer.Adahessian(of_rank)
    for step in range(4):
        set_grads(params, step)
        if step == 0:
            with pytest.raises(RuntimeError, match="create_graph"):
                sharded.step()
        for own, optimizer in ((params, sharded), (of_rank, plain)):
            give_graph_gradients(own)
            torch.manual_seed(step)
            optimizer.step()
            for p in own:
                p.grad = None
        assert_same_bits(owned, of_rank, f"after step {step}")
    everywhere: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everywhere, [p.detach() for p in params])
    for other in everywhere:
        assert_same_bits(other, params)
    if dist.get_world_size() == 1:
        assert len(owned) == len(params)


@pytest.mark.parametrize("size", [1, 2])
def test_adahessian_if_wanted_all_the_same_sees_the_owned_blocks_of_the_hessian(
    request: pytest.FixtureRequest, size: int
) -> None:
    ranks: Ranks = request.getfixturevalue(f"ranks{size}")
    ranks.run(check_adahessian)


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
}


def in_parts(names: list[str], parts: int = 4) -> list[Any]:
    """Shares of the classes, one for each call of the ranks; all but the first are slow."""
    shares = [names[first::parts] for first in range(parts)]
    return [shares[0], *(pytest.param(share, marks=pytest.mark.slow) for share in shares[1:])]


@on_ranks(2)
@pytest.mark.parametrize("names", in_parts(BITWISE), ids=lambda names: f"{names[0]} ...")
def test_every_class_takes_every_form_of_parameters(names: list[str]) -> None:
    for name in names:
        case = CASES[name]
        options = case.options[-1]
        for what, form in FORMS.items():
            params = case.params()
            mine = twin(params)
            plain = case.optimizer_class(form(params), **options)
            sharded = ZeroRedundancyOptimizer(form(mine), case.optimizer_class, **options)
            assert same(sharded.defaults, plain.defaults), (name, what)
            assert_same_options(sharded, plain, (name, what))
            train_case(case, plain, sharded, range(2))


def outcome(case: Case, build: Build, params: list[Parameter]) -> tuple[type[Exception] | None, Any]:
    """Build and step: what class of error came, and what the parameters are now."""
    error: type[Exception] | None = None
    options: Any = None
    try:
        optimizer = build(params)
        options = (
            optimizer.defaults,
            [{k: v for k, v in group.items() if k != "params"} for group in optimizer.param_groups],
        )
        for step in range(4):
            case.give_gradients(params, step, gaps=False)
            optimizer.step()
    except Exception as raised:  # noqa: BLE001 - whatever the plain class raises, ours should too
        error = type(raised)
    return error, (options, [p.detach() for p in params])


def assert_same_outcome(
    case: Case, arguments: Options, optimizer_class: Any = None
) -> type[Exception] | None:
    """Whatever a plain optimizer does with some arguments, ours does."""
    built = optimizer_class or case.optimizer_class
    params = case.params()
    mine = twin(params)
    plain = outcome(case, lambda own: built(own, **arguments), params)
    ours = outcome(case, lambda own: ZeroRedundancyOptimizer(own, built, **arguments), mine)
    assert ours[0] is plain[0], f"{built} with {arguments}: {ours[0]} and {plain[0]}"
    assert same(ours[1], plain[1]), f"{built} with {arguments}"
    return plain[0]


def check_arguments(names: list[str]) -> dict[str, list[type[Exception] | None]]:
    """A tensor as rate, a partial, and the plain optimizer's defaults passed back in."""
    found = {}
    for name in names:
        case = CASES[name]
        defaults = case.optimizer_class(case.params(), **case.options[-1]).defaults
        found[name] = [
            assert_same_outcome(case, defaults),
            assert_same_outcome(case, {**case.options[-1], "lr": torch.tensor(0.01)}),
            assert_same_outcome(case, {}, partial(case.optimizer_class, **case.options[-1])),
        ]
    return found


@pytest.mark.parametrize("names", in_parts(BITWISE), ids=lambda names: f"{names[0]} ...")
def test_arguments_act_as_on_the_plain_class(ranks2: Ranks, names: list[str]) -> None:
    found = ranks2.run(check_arguments, names)[0]
    assert all(partly is None for _, _, partly in found.values())
    assert any(defaults is None for defaults, _, _ in found.values())
    assert any(rate is None for _, rate, _ in found.values())


@on_ranks(2)
@pytest.mark.parametrize("names", in_parts(BITWISE), ids=lambda names: f"{names[0]} ...")
def test_groups_step_under_their_own_rates(names: list[str]) -> None:
    """A group's own rate, and a rate lowered between steps."""
    for name in names:
        case = CASES[name]
        if not case.rates:
            continue
        params = case.params()
        mine = twin(params)
        plain, sharded = (
            build(
                [{"params": own[::2], "lr": 0.05}, {"params": own[1::2]}], **{**case.options[-1], "lr": 0.02}
            )
            for own, build in (
                (params, case.optimizer_class),
                (mine, partial(ZeroRedundancyOptimizer, optimizer_class=case.optimizer_class)),
            )
        )
        train_case(case, plain, sharded, range(3))
        for optimizer in (plain, sharded):
            optimizer.param_groups[1]["lr"] *= 0.5
        train_case(case, plain, sharded, range(3, 8))


def test_a_shared_cache_of_step_sizes_is_what_joins_groups_of_different_rates() -> None:
    """The class alone does it: what it gives one group depends on whether another stepped before."""
    results = []
    for with_first in (True, False):
        first, second = (Parameter(torch.ones(3)) for _ in range(2))
        groups = [{"params": [first] if with_first else [], "lr": 0.5}, {"params": [second], "lr": 0.1}]
        optimizer = torch_optimizer.RAdam(groups)
        first.grad, second.grad = torch.ones(3), torch.ones(3)
        optimizer.step()
        results.append(second)
    assert not torch.equal(*results)
    assert [name for name, case in CASES.items() if not case.rates] == ["torch_optimizer.RAdam"]


# ---------------------------------------------------------------------- implementation switches


def check_switch(switch: str) -> list[str]:
    """Name the classes that take a switch here: the same bits as plain, or the same class of error."""
    taken = []
    for name in BITWISE:
        if switch in switches_of(CASES[name]):
            on, off = (
                assert_same_outcome(CASES[name], {**CASES[name].options[-1], switch: value})
                for value in (True, False)
            )
            assert off is None
            taken += [name] if on is None else []
    return taken


# How many classes take it on a CPU, with parameters that are leaves.
@pytest.mark.parametrize(
    ("switch", "at_least"),
    [("foreach", 10), ("fused", 4), ("maximize", 12), ("capturable", 0), ("differentiable", 0)],
)
def test_switch_is_handled_as_the_class_handles_it(ranks2: Ranks, switch: str, at_least: int) -> None:
    assert len(ranks2.run(check_switch, switch)[0]) >= at_least


@on_ranks(2)
def test_parameters_that_are_results_of_others_are_refused() -> None:
    """Steps to differentiate through need parameters that are results, which nobody can broadcast."""
    results = [p * 1 for p in make_params()]
    torch.optim.SGD(results, lr=0.1, differentiable=True)
    with pytest.raises(ValueError, match="non-leaf"):
        ZeroRedundancyOptimizer(results, torch.optim.SGD, lr=0.1, differentiable=True)


# ---------------------------------------------------------------------- schedules


def test_no_schedule_is_missing() -> None:
    assert set(SCHEDULERS) == set(lr_scheduler.__all__) - {"LRScheduler"}


def follow(schedule: Any, step: int) -> None:
    """Step a schedule; one of them goes by a loss."""
    if isinstance(schedule, lr_scheduler.ReduceLROnPlateau):
        schedule.step(1.0 + step // 3)
    else:
        schedule.step()


def check_schedule(name: str, optimizer_class: type[Optimizer], options: Options) -> None:
    params = make_params()
    mine = twin(params)
    plain = optimizer_class([{"params": params[:3]}, {"params": params[3:], "lr": 0.02}], **options)
    groups = [{"params": mine[:3]}, {"params": mine[3:], "lr": 0.02}]
    sharded = ZeroRedundancyOptimizer(groups, optimizer_class, **options)
    schedules = [SCHEDULERS[name](optimizer) for optimizer in (plain, sharded)]
    for step in range(8):
        for optimizer, schedule in zip((plain, sharded), schedules, strict=True):
            set_grads(params_of(optimizer), step)
            optimizer.step()
            follow(schedule, step)
        assert_same_bits(mine, params, f"after step {step}")
        assert_same_options(sharded, plain, f"after step {step}")
        assert schedules[0].get_last_lr() == schedules[1].get_last_lr()
    states = [{k: v for k, v in s.state_dict().items() if not k.startswith("_sched")} for s in schedules]
    assert states[0].keys() == states[1].keys()


@on_ranks(2)
@pytest.mark.filterwarnings("ignore:The epoch parameter in `scheduler.step")  # SequentialLR of PyTorch 2.8
def test_every_schedule_gives_the_rates_and_bits_it_gives_without_sharding() -> None:
    """On a class with one momentum and on one with two betas: some schedules move these too."""
    for name in SCHEDULERS:
        check_schedule(name, torch.optim.SGD, {"lr": 0.1, "momentum": 0.9})
        check_schedule(name, torch.optim.AdamW, {"lr": 0.1})


def make_model() -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(3)
        return nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 3))


def check_weight_averages(average: Any) -> None:
    """Weight averages and their schedule, with the statistics of batch norm made anew at the end."""
    models = make_model(), make_model()
    plain = torch.optim.SGD(models[0].parameters(), lr=0.1, momentum=0.9)
    sharded = ZeroRedundancyOptimizer(models[1].parameters(), torch.optim.SGD, lr=0.1, momentum=0.9)
    optimizers = plain, sharded
    averaged = [swa_utils.AveragedModel(model, multi_avg_fn=average) for model in models]
    schedules = [swa_utils.SWALR(o, swa_lr=0.02, anneal_epochs=3) for o in optimizers]
    inputs = torch.randn((4, 5, 6), generator=torch.Generator().manual_seed(4))
    for step in range(8):
        for model, optimizer, mean, schedule in zip(models, optimizers, averaged, schedules, strict=True):
            optimizer.zero_grad()
            model(inputs[step % 4]).square().sum().backward()
            optimizer.step()
            mean.update_parameters(model)
            schedule.step()
        assert schedules[0].get_last_lr() == schedules[1].get_last_lr()
        assert_same_bits(list(models[1].parameters()), list(models[0].parameters()), f"after step {step}")
        assert_same_bits(list(averaged[1].parameters()), list(averaged[0].parameters()), f"after step {step}")
    assert not torch.equal(averaged[1].module[0].weight, models[1][0].weight)
    for mean in averaged:
        swa_utils.update_bn(inputs, mean)
    assert same(dict(averaged[1].state_dict()), dict(averaged[0].state_dict()))


@on_ranks(2)
def test_weight_averages_of_torch_give_the_bits_they_give_without_sharding() -> None:
    for average in (None, swa_utils.get_ema_multi_avg_fn(0.9), swa_utils.get_swa_multi_avg_fn()):
        check_weight_averages(average)


# ---------------------------------------------------------------------- the table in the documentation


def test_the_documented_table_names_every_class_and_says_yes_for_tested_ones_only() -> None:
    rows = documented()
    tried = [(name, write_options(options)) for name, case in CASES.items() for options in case.options]
    assert [(row[0], row[1]) for row in rows] == tried
    for row in rows:
        case = CASES[row[0]]
        expected = answer_of(case)
        assert row[-1] == expected or (case.answer == "refused" and row[-1].startswith(expected)), row
