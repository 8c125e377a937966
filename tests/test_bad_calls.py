"""A call that is wrong on one rank only: every rank raises, nothing has changed, and training goes on."""

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from functools import partial
from itertools import count
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook, bf16_compress_hook
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook

from pool import Ranks, on_ranks
from training import assert_same_bits, assert_same_state, make_params, params_of, set_grads, whole
from zero_optim import ZeroRedundancyOptimizer
from zero_optim.ddp import DistributedDataParallel, FullyShardedDataParallel, ShardedDataParallel, fully_shard
from zero_optim.errors import message_of
from zero_optim.hooks import zero_step
from zero_optim.step.leaves import MASTER

AdamW, SGD = torch.optim.AdamW, torch.optim.SGD
SHAPES = ((6, 5), (7,), (4, 3), ())


def breaks(values: list[nn.Parameter]) -> Iterator[nn.Parameter]:
    yield values[0]
    raise OSError("the file of parameters is gone")


def by_rate(groups: Any, lr: float) -> torch.optim.Optimizer:
    return SGD(groups, lr=lr)


def made(code: int) -> type[torch.optim.Optimizer]:
    """Classes of one name with different code."""

    class Mine(SGD):
        def scaled(self, name: str = "u") -> int:
            return 1 if name in {"u", "v", "w", "x"} else 0  # their order is another in each process

    class Other(SGD):
        def scaled(self) -> int:
            return 2

    Other.__qualname__, Other.__name__ = Mine.__qualname__, Mine.__name__
    return Other if code else Mine


# name -> (arguments of the constructor on rank 0, on rank 1)
Case = tuple[dict[str, Any], dict[str, Any]]


def constructions() -> dict[str, Case]:
    params = make_params(SHAPES)
    rate = {"lr": 0.1}
    adam = {"optimizer_class": AdamW, **rate}
    return {
        "tensor rates": ({"lr": torch.tensor(0.1)}, {"lr": torch.tensor(0.2)}),
        "classes of one name": ({"optimizer_class": made(0), **rate}, {"optimizer_class": made(1), **rate}),
        "partial arguments": (
            {"optimizer_class": partial(by_rate, lr=0.1)},
            {"optimizer_class": partial(by_rate, lr=0.2)},
        ),
        "buckets": (adam, {**adam, "bucket_cap_mb": 7}),
        "master_dtype": (adam, {**adam, "master_dtype": torch.float64}),
        "group of ranks": (adam, {**adam, "process_group": "world"}),
        "a lazy reader": (
            {**adam, "params": params, "gather_lazily": nn.ParameterList(params)},
            {**adam, "params": params},
        ),
        "a text as flag": (adam, {**adam, "overlap_with_ddp": "no"}),
        "a text as dtype": (adam, {**adam, "master_dtype": "float32"}),
        "a text as class": (adam, {**adam, "optimizer_class": "AdamW"}),
        "a generator that raises": (adam, {**adam, "params": breaks(params)}),
        "a rate that is refused": (adam, {**adam, "lr": -1.0}),
    }


def raised_by(name: str, call: Callable[[], object]) -> tuple[str, str]:
    """The class and the message of what a call raises."""
    try:
        call()
    except Exception as error:  # noqa: BLE001 - the test looks at it
        return type(error).__name__, message_of(error)
    raise AssertionError(f"{name}: nothing was raised")


def assert_rank_1_is_named(raised: list[dict[str, tuple[str, str]]]) -> None:
    """Every rank raises, and says which rank was wrong."""
    first, second = raised
    for name, (kind, text) in first.items():
        assert text, name
        assert second[name][1], name
        assert kind == "RankMismatchError" or "rank 1" in text, (name, text)


def check_constructions() -> dict[str, tuple[str, str]]:
    raised = {}
    for name, cases in constructions().items():
        arguments = {"params": make_params(SHAPES), "optimizer_class": SGD, **cases[dist.get_rank()]}
        is_read = "generator" in name or arguments["params"] is None
        params = [] if is_read else [p for p in arguments["params"] if isinstance(p, Tensor)]
        storages = [p.data_ptr() for p in params]
        raised[name] = raised_by(name, partial(ZeroRedundancyOptimizer, **arguments))
        assert [p.data_ptr() for p in params] == storages, f"{name}: parameters were moved although it raised"
        good = ZeroRedundancyOptimizer(make_params(SHAPES), AdamW, lr=0.1)  # in step with the other rank
        set_grads(params_of(good), 0)
        good.step()
    return raised


@pytest.mark.slow
def test_building_what_differs_or_is_wrong_on_one_rank_raises_on_all(ranks2: Ranks) -> None:
    assert_rank_1_is_named(ranks2.run(check_constructions))


@on_ranks(2)
def test_what_is_alike_on_all_ranks_is_no_difference() -> None:
    if dist.get_rank() == 1:
        SGD(make_params(SHAPES), lr=0.1)  # PyTorch patches a class when it is built first
        made(0)(make_params(SHAPES), lr=0.1)
    for name in sorted(constructions()):
        given = constructions()[name][0]
        optimizer = ZeroRedundancyOptimizer(
            **{"params": make_params(SHAPES), "optimizer_class": SGD, **given}
        )
        set_grads(params_of(optimizer), 0)
        optimizer.step()


def closure_over(optimizer: ZeroRedundancyOptimizer, fails: bool = False) -> Callable[[], float]:
    def closure() -> float:
        set_grads(params_of(optimizer), 5)
        if fails:
            raise ArithmeticError("the loss is no number")
        return 1.0

    return closure


def other_dict(optimizer: ZeroRedundancyOptimizer, change: Callable[[Any], Any]) -> Any:
    found = whole(optimizer)
    return change(found) if dist.get_rank() == 1 else found


def without_state(found: dict[str, Any]) -> dict[str, Any]:
    return {"param_groups": found["param_groups"]}


def with_lock(found: dict[str, Any]) -> dict[str, Any]:
    groups = [{**group, "lock": (group for _ in ())} for group in found["param_groups"]]
    return {**found, "param_groups": groups}


def with_entry(name: str, value: object, found: dict[str, Any]) -> dict[str, Any]:
    state = {index: {**entries, name: value} for index, entries in found["state"].items()}
    return {**found, "state": state}


def options(optimizer: ZeroRedundancyOptimizer) -> list[dict[str, Any]]:
    return [
        {key: value for key, value in group.items() if key != "params"} for group in optimizer.param_groups
    ]


# name -> what a rank calls; whether it is the rank that does so wrongly
Call = Callable[[ZeroRedundancyOptimizer, bool], object]
CALLS: dict[str, Call] = {
    "a text as norm's order": lambda o, bad: o.clip_grad_norm_(1.0, "x" if bad else 2.0),  # type: ignore[arg-type]
    "another norm": lambda o, bad: o.clip_grad_norm_(2.0 if bad else 1.0),
    "a closure that raises": lambda o, bad: o.step(closure_over(o, bad)),
    "a number as closure": lambda o, bad: o.step(3 if bad else closure_over(o)),  # type: ignore[arg-type]
    "a group that raises": lambda o, bad: o.add_param_group(
        {"params": breaks(make_params(((3,),))) if bad else make_params(((3,),))}
    ),
    "a group with another tensor rate": lambda o, bad: o.add_param_group(
        {"params": make_params(((3,),)), "lr": torch.tensor(0.5 if bad else 0.25)}
    ),
    "a target that is no rank": lambda o, bad: o.consolidate_state_dict(to="x" if bad else 0),  # type: ignore[arg-type]
    "a state dict without state": lambda o, bad: o.load_state_dict(other_dict(o, without_state)),
    "an option that cannot be copied": lambda o, bad: o.load_state_dict(other_dict(o, with_lock)),
    "a master of another shape": lambda o, bad: o.load_state_dict(
        other_dict(o, partial(with_entry, MASTER, torch.zeros(1)))
    ),
    "an argument too many: explain": lambda o, bad: o.explain(1) if bad else o.explain(),  # type: ignore[call-arg, func-returns-value]
    "options for other groups": lambda o, bad: o.load_owned_state(o.owned_state(), options(o) * (1 + bad)),
    "another hook": lambda o, bad: zero_step(o, bf16_compress_hook if bad else allreduce_hook),
    "a text as flag": lambda o, bad: zero_step(o, interleave="no" if bad else True),  # type: ignore[arg-type]
}


def check_calls(beside: bool) -> dict[str, tuple[str, str]]:
    """``beside``: calls that load masters and averages."""
    options_beside: dict[str, Any] = {"master_dtype": torch.float64, "ema_decay": 0.5} if beside else {}
    sharded, twin_of = both = [
        ZeroRedundancyOptimizer(make_params(SHAPES), AdamW, lr=0.1, **options_beside) for _ in range(2)
    ]
    raised, steps = {}, count()

    def step_both() -> None:
        step = next(steps)
        for optimizer in both:
            set_grads(params_of(optimizer), step)
            optimizer.step()

    for name, call in CALLS.items():
        if beside != ("master" in name or "average" in name):
            continue
        step_both()
        for optimizer in both:
            optimizer.consolidate_state_dict(to=None)
        raised[name] = raised_by(name, partial(call, sharded, dist.get_rank() == 1))
        assert len(sharded.param_groups) == 1, name
        assert options(sharded) == options(twin_of), name
        if "closure" not in name:  # after a step, also one that raised, the consolidated state is out of date
            assert_same_state(sharded.state_dict(), twin_of.state_dict())
        sharded.consolidate_state_dict(to=None)
        twin_of.consolidate_state_dict(to=None)
        assert_same_state(sharded.state_dict(), twin_of.state_dict())
        assert_same_bits(params_of(sharded), params_of(twin_of), f"although {name} raised")
        step_both()
        assert_same_bits(params_of(sharded), params_of(twin_of), f"after {name} raised")
    return raised


@pytest.mark.parametrize("beside", [False, True])
def test_a_call_that_is_wrong_on_one_rank_raises_on_all_and_changes_nothing(
    ranks2: Ranks, beside: bool
) -> None:
    assert_rank_1_is_named(ranks2.run(check_calls, beside))


def steps_with(wrong: str) -> str:
    """Steps wrongly on rank 1, which cannot tell the others before they step."""
    optimizer = ZeroRedundancyOptimizer(make_params(SHAPES), AdamW, lr=0.1)
    set_grads(params_of(optimizer), 0)
    is_wrong = dist.get_rank() == 1
    if wrong == "rate" and is_wrong:
        optimizer.param_groups[0]["lr"] = "x"
    with pytest.raises(TypeError) as caught:
        optimizer.step(**({"foo": 1} if wrong == "keyword" and is_wrong else {}))
    everyone: list[Any] = [None, None]
    dist.all_gather_object(everyone, [param.detach() for param in params_of(optimizer)])
    assert_same_bits(*everyone)
    return str(caught.value)


@pytest.mark.parametrize("wrong", ["keyword", "rate"])
def test_ranks_hear_that_some_have_stepped_where_one_refused_its_step(ranks2: Ranks, wrong: str) -> None:
    first, second = ranks2.run(steps_with, wrong)
    assert first == f"rank 1: {second}. Ranks on which nothing was raised may have taken their part of step()"


@on_ranks(2)
def test_another_hook_on_one_rank_is_noticed_when_it_is_registered() -> None:
    ddp = DistributedDataParallel(nn.Linear(3, 2))
    for odd in (1, 0):
        state = PowerSGDState(None, matrix_approximation_rank=1 + odd * dist.get_rank())  # type: ignore[no-untyped-call]
        told = pytest.raises(Exception, match="ranks disagree about the comm hook")
        with told if odd else nullcontext():
            ddp.register_comm_hook(state, powerSGD_hook)
    ddp(torch.ones(1, 3)).sum().backward()


class FirstSharded(DistributedDataParallel):
    """Wraps a model that is fully sharded already."""

    def __init__(self, module: nn.Module) -> None:
        optimizer = ZeroRedundancyOptimizer(module.parameters(), SGD, lr=0.1)
        fully_shard(module, optimizer)
        super().__init__(module if dist.get_rank() else nn.Linear(3, 2))


def with_optimizer(wrapper: Callable[..., nn.Module]) -> Callable[..., nn.Module]:
    return lambda module, **options: wrapper(
        module, ZeroRedundancyOptimizer(module.parameters(), SGD, lr=0.1), **options
    )


SHARDED = with_optimizer(ShardedDataParallel)
# name -> wrapper, what the other rank is given, what the bad one
WRAPPINGS: dict[str, tuple[Callable[..., nn.Module], dict[str, Any], dict[str, Any]]] = {
    "a text as group": (DistributedDataParallel, {}, {"process_group": "world"}),
    "no init_sync": (DistributedDataParallel, {}, {"init_sync": False}),
    "devices of a model on the CPU": (DistributedDataParallel, {}, {"device_ids": [0]}),
    "a freed model": (FirstSharded, {}, {}),
    "sharded: another way to add up": (SHARDED, {}, {"accumulate": "local"}),
    "fully sharded: devices": (with_optimizer(FullyShardedDataParallel), {}, {"device_ids": [0]}),
}


def check_wrappings() -> dict[str, tuple[str, str]]:
    raised = {}
    for name, (wrapper, good, bad) in WRAPPINGS.items():
        options = bad if dist.get_rank() else good
        raised[name] = raised_by(name, partial(wrapper, nn.Linear(3, 2), **options))
        DistributedDataParallel(nn.Linear(3, 2), **good)  # in step with the other rank
    return raised


def test_wrapping_with_what_is_wrong_on_one_rank_raises_on_all(ranks2: Ranks) -> None:
    for (name, first), second in zip(*(each.items() for each in ranks2.run(check_wrappings)), strict=True):
        assert first[0] == second[1][0], name
        assert "rank 1" in first[1], (name, first)
