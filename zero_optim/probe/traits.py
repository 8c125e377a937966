"""What an optimizer tolerates: found by trying the user's class.

Sharding must not change the algorithm, and only the class itself knows what it does; so `probe`
runs it on small tensors, in `trials`, and compares bits. An answer that allows rests on runs that
agreed; whatever could not be tried, or never moved a parameter, is not allowed.
"""

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor
from torch.optim import Optimizer

from zero_optim.probe.sameness import same, same_pieces
from zero_optim.probe.subject import OptimizerUnderTest, frozen, thawed
from zero_optim.probe.trials import (
    Feed,
    TrialRecord,
    TrialRun,
    isolated,
    record,
    start,
    starts_of,
    step_in_parts,
    step_whole,
)

StepRun: TypeAlias = Callable[[TrialRun, int, Mapping[int, Tensor | None]], None]

_MIXED = ((9, 13), (67,), (40,), (2, 3, 3, 3), (9, 13), (12, 5))
_NO_KERNELS = ((9, 13), (67,), (40,), (6, 11), (9, 13), (12, 5))
_MATRICES = ((9, 13), (6, 11), (8, 5), (8, 8), (9, 13), (12, 5))
_VECTORS = ((117,), (67,), (40,), (54,), (117,), (60,))

# Tried in this order; the first that a class accepts is used.
_FEEDS = (
    Feed(_MIXED),
    Feed(_MIXED, gaps=False),
    Feed(_NO_KERNELS),
    Feed(_MATRICES),
    Feed(_VECTORS),
    Feed(_MATRICES, sparse=True),
    Feed(_MIXED, num_groups=1),
    Feed(_MATRICES, num_groups=1),
)
# Factored or quantized state often begins at some size: 128 rows, or 4096 elements.
_LARGE = ((130, 130),)


@dataclass(frozen=True, slots=True)
class Traits:
    """What an optimizer class with its options tolerates, bit for bit.

    Args:
        coupling: why parameters cannot be stepped by separate optimizers; None if they can.
        counting: why one optimizer cannot step part of its parameters at a time; None if it can.
        shape_use: why a parameter cannot be cut in pieces; None if it can.
        untried: why the class could not be tried at all; None if it was.
        moves_frozen: whether a step changes parameters that never had a gradient.
    """

    coupling: str | None = None
    counting: str | None = None
    shape_use: str | None = None
    untried: str | None = None
    moves_frozen: bool = False

    @property
    def separable(self) -> bool:
        """Whether it may be sharded by whole parameters."""
        return self.untried is None and self.coupling is None

    @property
    def steppable_in_parts(self) -> bool:
        """Whether it may be stepped bucket by bucket, as `trials.step_in_parts` does."""
        return self.separable and self.counting is None

    @property
    def elementwise(self) -> bool:
        """Whether its parameters may be cut in one-dimensional pieces."""
        return self.separable and self.shape_use is None


def probe(
    optimizer_class: Callable[..., Optimizer],
    options: Mapping[str, Any],
    groups: Sequence[Mapping[str, Any]] = (),
) -> Traits:
    """Find out by trying what a class with some options tolerates.

    Takes some 10 to 40 ms, and nothing the second time; does not communicate, draws no random
    number and leaves nothing behind. Ranks with equal arguments get equal answers.

    Args:
        optimizer_class: as given to `ZeroRedundancyOptimizer`; anything that builds an optimizer
            from groups and keyword arguments.
        options: its keyword arguments. Tensors are tried as copies on the CPU; ``lr=0`` as a small
            rate; ``capturable``, ``fused`` and ``differentiable``, which choose an implementation
            of the same algorithm, are switched off if the CPU has none.
        groups: the options of each parameter group, if groups have some of their own.
    """
    subject = OptimizerUnderTest.of(optimizer_class, options, groups)
    try:
        hash(subject)
    except (
        TypeError
    ):  # some option is an object that cannot be copied: it may change, so nothing is remembered
        return _try(subject)
    return _remembered(subject)


def refusal(optimizer_class: Callable[..., Optimizer], traits: Traits) -> str:
    """Say why a class is not sharded, and what to do about it."""
    name = getattr(optimizer_class, "__qualname__", None) or repr(optimizer_class)
    if traits.untried is not None and traits.untried not in (_CLOSURE, _SECOND_ORDER):
        return (
            f"{name} could not be tried, and nothing was found against it: {traits.untried}. If it treats "
            "every parameter by itself, assume_separable=True shards it untried; if you do not know that, "
            "use it without sharding"
        )
    what = (
        f"cannot be tried: {traits.untried}"
        if traits.untried is not None
        else "gives other results when each rank steps only its own parameters. Tried on small tensors, "
        f"bit for bit against one optimizer that steps them all: {traits.coupling}"
    )
    return (
        f"expected an optimizer that treats every parameter by itself, but {name} {what}. Use it without "
        "sharding, or choose another optimizer; assume_separable=True shards it all the same, for when you "
        "know better"
    )


@lru_cache(maxsize=256)
def _remembered(subject: OptimizerUnderTest) -> Traits:
    """Keys hold the class weakly and options as values, so nothing of the user's is kept alive."""
    return _try(subject)


def _try(subject: OptimizerUnderTest) -> Traits:
    with isolated():
        found = _first_accepted(subject)
        if isinstance(found, str):
            return Traits(untried=found)
        subject, made = found
        if not made.moved:
            return Traits(untried=f"no parameter moved in {made.feed.num_steps} steps")
        coupling = _why_coupled(subject, made)
        if coupling is not None:
            return Traits(coupling, coupling, coupling)
        moves_frozen = _moves_frozen(subject, made)
        counting = _WITHOUT_GRADIENT if moves_frozen else _why_counting(subject, made)
        return Traits(None, counting, _why_shape_used(subject, made), moves_frozen=moves_frozen)


# ---------------------------------------------------------------------- finding what a class accepts


def _first_accepted(subject: OptimizerUnderTest) -> tuple[OptimizerUnderTest, TrialRecord] | str:
    """Run all parameters together with the first feed the class accepts, or say why there is none."""
    errors: list[str] = []
    plain = subject.without_switches()
    for candidate in (subject,) if plain.options == subject.options else (subject, plain):
        for feed in _FEEDS:
            try:
                return candidate, record(candidate, feed.with_groups(candidate))
            except Exception as error:  # noqa: BLE001 - the class is the user's, and may raise anything
                errors.append(_said(error))
    return _why_untried(plain, errors)


def _why_untried(subject: OptimizerUnderTest, errors: Sequence[str]) -> str:
    """Find out what a class needs that an ordinary step does not give."""
    for feed in (_FEEDS[0], replace(_FEEDS[0], num_groups=1), _FEEDS[3]):
        for step, needs in ((_step_with_closure, _CLOSURE), (_step_with_graph, _SECOND_ORDER)):
            try:
                step(start(subject, feed, starts_of(feed)))
            except Exception as error:  # noqa: BLE001
                errors = [*errors, _said(error)]
            else:
                return needs
    asked = _needed_by_step(subject)
    if asked:
        return f"its step() needs {asked}, which only your own call of step() gives"
    return f"on small CPU tensors it raises {errors[0]}"


def _needed_by_step(subject: OptimizerUnderTest) -> str:
    """Name the arguments without which a class's ``step()`` cannot be called."""
    try:
        step = start(subject, _FEEDS[0], starts_of(_FEEDS[0])).optimizer.step
        given = inspect.signature(step).parameters.values()
    except Exception:  # noqa: BLE001 - it is not step() that lacks something
        return ""
    extra = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return ", ".join(p.name for p in given if p.default is p.empty and p.kind not in extra)


_CLOSURE = (
    "its step() needs a closure that evaluates the model, and while it searches, each rank would "
    "have changed its own parameters only"
)
_SECOND_ORDER = "its step() needs second-order gradients, of backward(create_graph=True)"


def _step_with_closure(run: TrialRun) -> None:
    leaves = [leaf for pieces in run.leaves.values() for leaf in pieces]

    def closure() -> Tensor:
        for leaf in leaves:
            leaf.grad = leaf.detach().clone()
        return torch.ones(())

    _call(run.optimizer, closure)


def _step_with_graph(run: TrialRun) -> None:
    leaves = [leaf for pieces in run.leaves.values() for leaf in pieces]
    loss = torch.stack([leaf.pow(4).sum() for leaf in leaves]).sum()
    for leaf, grad in zip(leaves, torch.autograd.grad(loss, leaves, create_graph=True), strict=True):
        leaf.grad = grad
    run.optimizer.step()
    for leaf in leaves:
        leaf.grad = None  # breaks the cycle through the graph


def _call(optimizer: Optimizer, closure: Callable[[], Any]) -> None:
    if "closure" not in inspect.signature(optimizer.step).parameters:
        raise TypeError("step() takes no closure")
    optimizer.step(closure)


def _said(error: Exception) -> str:
    first_line = (str(error).splitlines() or [""])[0]
    return f"{type(error).__name__}: {first_line}"


# ---------------------------------------------------------------------- three comparisons


def _why_coupled(subject: OptimizerUnderTest, made: TrialRecord) -> str | None:
    """Step each parameter by an optimizer of its own, and none at all by another."""
    if made.drew:
        return "it draws random numbers, and each rank would draw others"
    for share in (*([index] for index in made.starts), []):
        values = {index: made.starts[index] for index in share}
        how = "stepped alone" if share else "stepped without parameters"
        reason = _compare(subject, made, how, partial(start, subject, made.feed, values))
        if reason is not None:
            repeats = record(subject, made.feed).values == made.values
            return reason if repeats else "two equal runs of it give different results"
    return _why_coupled_otherwise(subject, made)


def _why_coupled_otherwise(subject: OptimizerUnderTest, made: TrialRecord) -> str | None:
    """Try again where something may have been hidden: by NaN, or by single precision."""
    tamer = [] if made.finite or made.feed.huge == 1 else [replace(made.feed, huge=1.0)]
    half = [] if made.feed.dtype != torch.float32 else [replace(made.feed, dtype=torch.bfloat16, num_steps=2)]
    for feed in (*tamer, *half):
        again = _recorded(subject, feed)
        reason = None if again is None else _why_coupled(subject, again)
        if again is not None and reason is not None and not _holds_leftovers(subject, again):
            return reason
    return None


def _holds_leftovers(subject: OptimizerUnderTest, made: TrialRecord) -> bool:
    """Whether equal runs give equal parameters and unequal state: parts of it were never written to.

    The momentum of PyTorch's fused SGD in bfloat16 on the CPU is of that kind.
    """
    repeated = record(subject, made.feed)
    return repeated.values == made.values and _state_difference(made, repeated.run) is not None


def _why_counting(subject: OptimizerUnderTest, made: TrialRecord) -> str | None:
    """Step one optimizer bucket by bucket."""
    begin = partial(start, subject, made.feed, made.starts)
    return _compare(subject, made, "stepped in parts", begin, step_in_parts)


def _why_shape_used(subject: OptimizerUnderTest, made: TrialRecord) -> str | None:
    """Cut every parameter in pieces; if that makes no difference, a larger one too."""
    if made.feed.sparse:
        return "it takes sparse gradients, which are not cut"
    feed = replace(made.feed, shapes=_LARGE, num_groups=1, num_in_group=1, num_steps=1, gaps=False)
    large = _recorded(subject, feed.with_groups(subject))
    for whole in (made, large):
        if whole is None:
            continue
        reason = _compare(
            subject, whole, "cut in pieces", partial(start, subject, whole.feed, whole.starts, cut=True)
        )
        if reason is not None:
            return reason
    return None


_WITHOUT_GRADIENT = "it changes parameters that have no gradient, and these are not stepped then"


def _moves_frozen(subject: OptimizerUnderTest, made: TrialRecord) -> bool:
    """Step with every second parameter frozen, then with the others: does one that is frozen change?"""
    for kind in (0, 1):
        try:
            run = start(subject, made.feed, made.starts)
            still = [index for index in run.leaves if index % 4 // 2 == kind]  # some of each group
            for index in still:
                run.leaves[index][0].requires_grad_(False)
            before = [run.bits(index) for index in still]
            for step, gradients in enumerate(made.gradients):
                step_whole(run, step, {**gradients, **dict.fromkeys(still)})
        except Exception:  # noqa: BLE001 - a class that needs every gradient says so in a step too
            continue
        if [run.bits(index) for index in still] != before:
            return True
    return False


def _recorded(subject: OptimizerUnderTest, feed: Feed) -> TrialRecord | None:
    try:
        return record(subject, feed)
    except Exception:  # noqa: BLE001 - a class that knows no bfloat16, say, is none the worse
        return None


def _compare(
    subject: OptimizerUnderTest,
    made: TrialRecord,
    how: str,
    begin: Callable[[], TrialRun],
    step_run: StepRun = step_whole,
) -> str | None:
    """Make a run with the recorded gradients, and say what came out different from the record."""
    try:
        run = begin()
        differs = _first_difference(made, run, step_run) or _state_difference(made, run)
        if differs is None:
            differs = _group_difference(subject, made, run)
    except Exception as error:  # noqa: BLE001 - it ran with all parameters, so this tells the two apart
        return f"{how}, it raises {_said(error)}"
    return None if differs is None else f"{how}, {differs}"


def _first_difference(made: TrialRecord, run: TrialRun, step_run: StepRun) -> str | None:
    for step, gradients in enumerate(made.gradients):
        step_run(run, step, {index: gradients[index] for index in run.leaves})
        for index in run.leaves:
            got, expected = run.bits(index), made.values[step + 1][index]
            if got != expected:
                how_much = _how_much(got, expected, made.feed.dtype)
                return f"{_named(made, index)} differed after step {step + 1}, {how_much}"
    return None


# ---------------------------------------------------------------------- bits


def _named(made: TrialRecord, index: int) -> str:
    return f"the parameter of shape {made.feed.shape(index)}"


def _how_much(got: bytes, expected: bytes, dtype: torch.dtype) -> str:
    """Tell rounding from another algorithm."""
    a, b = (torch.frombuffer(bytearray(bits), dtype=dtype).double().numpy() for bits in (got, expected))
    with np.errstate(all="ignore"):
        apart = float(np.nanmax(np.abs(a - b) / np.maximum(np.abs(b), 1e-30), initial=0.0))
    return f"by {apart:.1e} of its value at most"


def _state_difference(made: TrialRecord, run: TrialRun) -> str | None:
    """Compare at the end the state of each parameter, and the state of none."""
    for index in run.leaves:
        (whole,) = made.run.leaves[index]
        if not same_pieces(made.run.state_of(index)[0], run.state_of(index), whole.shape):
            return f"the state of {_named(made, index)} differed"
    if same(made.run.global_state(), run.global_state()):
        return None
    return "the state that belongs to no parameter differed"


def _group_difference(subject: OptimizerUnderTest, made: TrialRecord, run: TrialRun) -> str | None:
    """Compare group entries at the end; caches that may hold anything (RAdam's buffer) do not count.

    An entry is one if the class, given this run's entry before every step, does the same.
    """
    differing = []
    both = zip(made.run.optimizer.param_groups, run.optimizer.param_groups, strict=True)
    for number, (mine, other) in enumerate(both):
        keys = sorted((mine.keys() | other.keys()) - {"params"}, key=str)
        differing += [
            (number, key, other.get(key)) for key in keys if not same(mine.get(key), other.get(key))
        ]
    if not differing:
        return None
    entries = [(number, key, frozen(value)) for number, key, value in differing]

    def step_run(again: TrialRun, step: int, gradients: Mapping[int, Tensor | None]) -> None:
        for number, key, value in entries:
            again.optimizer.param_groups[number][key] = thawed(value)
        step_whole(again, step, gradients)

    again = start(subject, made.feed, made.starts)
    if _first_difference(made, again, step_run) is None and _state_difference(made, again) is None:
        return None
    return f"the group's entry '{differing[0][1]}' differed"
