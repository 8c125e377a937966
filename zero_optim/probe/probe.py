"""Probes what an optimizer class tolerates: runs it on small tensors and allows what gives equal bits."""

import inspect
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import combinations, product
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from zero_optim.probe.comparison import difference, state_difference
from zero_optim.probe.feeds import LARGE, STEPS_OF_LARGE, Feed
from zero_optim.probe.saved import why_not_saved
from zero_optim.probe.subject import OptimizerUnderTest, remembered
from zero_optim.probe.traits import NEEDS_CLOSURE, NEEDS_SECOND_ORDER, Traits
from zero_optim.probe.trials import TrialRecord, Variant, anywhere, first_record, isolated, recorded, start

_MIXED = ((9, 13), (67,), (40,), (2, 3, 3, 3), (9, 13), (12, 5))
_NO_KERNELS = ((9, 13), (67,), (40,), (6, 11), (9, 13), (12, 5))
_MATRICES = ((9, 13), (6, 11), (8, 5), (8, 8), (9, 13), (12, 5))
_VECTORS = ((117,), (67,), (40,), (54,), (117,), (60,))

# Tried in this order; the first accepted one is used.
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
# Of classes with idle entries, which may begin to count later.
_MANY_STEPS = 64
# Enough for the same, if several are stepped apart.
_SEVERAL_LARGE = ((128, 32), (64, 128))

# Of the trials for the shapes of state. Distinct sizes, so that no other tensor has the shape by chance.
_SIZES = (5, 3, 7, 2, 4, 6)
_LARGE_SIZES = (128, 34, 3, 2, 5, 7)


def probe(subject: OptimizerUnderTest) -> Traits:
    """Probe a class with some options: 10 to 40 ms, or seconds with idle entries; cached. No side effects."""
    return trial_of(subject).traits


def state_entries(subject: OptimizerUnderTest, num_dims: int) -> dict[str, bool]:
    """Return whether each state entry of parameters with so many dimensions has their shape; or nothing."""
    if not 0 < num_dims <= len(_SIZES):
        return {}

    def entries_of(shape: tuple[int, ...], group: object) -> dict[str, bool]:
        feed = Feed((shape,), gaps=False, num_groups=1, num_steps=1)
        with isolated():
            trial = first_record(replace(subject, groups=(group,)), feed, replace(feed, sparse=True))
        if not isinstance(trial, TrialRecord):
            return {}
        (entries,) = trial.run.state_of(0)
        return {key: isinstance(entry, Tensor) and entry.shape == shape for key, entry in entries.items()}

    tried = []
    for group in subject.groups:
        shapes = [_SIZES[:num_dims], _LARGE_SIZES[:num_dims]]
        if num_dims == 1:  # a large vector only then: Shampoo would take minutes
            differs = entries_of(_SIZES[:2], group) != entries_of(_LARGE_SIZES[:2], group)
            shapes[1:] = [(4352,)] if differs else []
        tried += [entries for shape in shapes if (entries := entries_of(shape, group))]
    return {name: all(entries.get(name) for entries in tried) for entries in tried for name in entries}


@remembered
def why_dtypes_couple(subject: OptimizerUnderTest, dtypes: frozenset[torch.dtype]) -> str | None:
    """Return why a group cannot mix dtypes, or None: Adafactor takes ``eps`` from its first parameter."""
    answer = trial_of(subject)
    if answer.subject is None or answer.feed is None or not answer.traits.separable:
        return None  # the class is refused, or not tried
    with isolated():
        trial = recorded(answer.subject, answer.feed)
        if trial is None:
            return None
        pairs = combinations(sorted(dtypes, key=str), 2)
        for (one, other), shapes in product(pairs, (answer.feed.shapes, _MATRICES)):
            feed = replace(answer.feed, shapes=shapes, dtype=one, second=other, num_steps=3)
            reason = _try_coupling(feed, trial)
            if reason is not None:
                return f"with parameters of {one} and {other} in a group, {reason}"
    return None


@dataclass(frozen=True, slots=True)
class Answer:
    """The result of a class's trials, and the options and feed that it accepted."""

    traits: Traits
    subject: OptimizerUnderTest | None = None
    feed: Feed | None = None


@remembered
def trial_of(subject: OptimizerUnderTest) -> Answer:
    """Try a class; see `probe`."""
    with isolated():
        trial = first_record(subject, *_FEEDS)
        if isinstance(trial, TrialRecord):
            return Answer(_traits(trial), trial.subject, trial.feed)
        return Answer(Traits(untried=_why_untried(subject.candidates()[-1], trial)))


def _traits(trial: TrialRecord) -> Traits:
    if not trial.moved:
        return Traits(untried=f"no parameter moved in {trial.feed.num_steps} steps")
    coupling = _why_coupled(trial)
    if coupling is not None:
        return Traits(coupling=coupling, counting=coupling, shape_use=coupling)
    in_half = _try_coupling(replace(trial.feed, dtype=torch.bfloat16, num_steps=2), trial)
    moves_frozen = _moves_frozen(trial)
    if moves_frozen:
        counting: str | None = "it changes parameters that have no gradient, and these are not stepped then"
    else:
        counting = difference(trial, Variant("stepped in parts", in_parts=True))
    return Traits(
        in_half=in_half,
        counting=counting,
        shape_use=_why_shape_used(trial),
        unsaved=why_not_saved(trial),
        moves_frozen=moves_frozen,
        idle=frozenset(trial.idle),
        retyped=frozenset(trial.retyped - trial.idle),
    )


def _why_coupled(trial: TrialRecord, *, with_state: bool = True) -> str | None:
    """Step each parameter with its own optimizer, and compare; another optimizer has none."""
    if trial.communicated:
        return "its step communicates, and each rank would send what it has of other parameters"
    if trial.drew:
        return "it draws random numbers, and each rank would draw others"
    alone = (Variant("stepped alone", only=(index,)) for index in trial.starts)
    for variant in (*alone, Variant("stepped without parameters", only=())):
        reason = difference(trial, variant, with_state=with_state)
        if reason is not None:
            repeats = trial.repeated().values == trial.values
            return reason if repeats else "two equal runs of it give different results"
    return _why_coupled_otherwise(trial)


def _why_coupled_otherwise(trial: TrialRecord) -> str | None:
    """Try again: NaN or a small size may hide a difference, and idle entries may count later."""
    feed = trial.feed
    if feed.dtype != torch.float32 or feed.shapes == _SEVERAL_LARGE or feed.num_steps == _MANY_STEPS:
        return None
    tamer = [] if trial.finite or feed.huge == 1 else [replace(feed, huge=1.0)]
    large = replace(feed, shapes=_SEVERAL_LARGE, num_in_group=1, num_steps=STEPS_OF_LARGE, gaps=False)
    longer = [replace((*tamer, feed)[0], num_steps=_MANY_STEPS)] if trial.idle | trial.retyped else []
    reasons = (_try_coupling(each, trial) for each in (*tamer, large, *longer))
    return next((reason for reason in reasons if reason is not None), None)


def _try_coupling(feed: Feed, trial: TrialRecord) -> str | None:
    again = recorded(trial.subject, feed)
    if again is None:
        return None
    reason = _why_coupled(again)
    if reason is not None:
        # Equal trials may differ in state only, as those of fused SGD in bfloat16 do.
        repeated = again.repeated()
        if repeated.values == again.values and state_difference(again, repeated.run) is not None:
            reason = _why_coupled(again, with_state=False)
    trial.idle |= again.idle
    trial.retyped |= again.retyped
    return reason


def _why_shape_used(trial: TrialRecord) -> str | None:
    """Compare with every parameter cut in pieces; without a difference cut a larger one too."""
    if trial.feed.sparse:
        return "it takes sparse gradients, which are not cut"
    cut = Variant("cut in pieces", cut=anywhere)
    reason = difference(trial, cut)
    if reason is None:
        large = recorded(trial.subject, trial.feed.of_one(LARGE, num_steps=STEPS_OF_LARGE))
        reason = None if large is None else difference(large, cut)
    return reason


def _moves_frozen(trial: TrialRecord) -> bool:
    for kind in (0, 1):
        try:
            run = trial.begin()
            still = [index for index in run.leaves if index % 4 // 2 == kind]  # some of each group
            for index in still:
                run.leaves[index][0].requires_grad_(False)
            before = [run.bits(index) for index in still]
            for step, gradients in enumerate(trial.gradients):
                run.step(step, {**gradients, **dict.fromkeys(still)})
        except Exception:  # noqa: BLE001 - a class that needs every gradient also says so in a step
            continue
        if [run.bits(index) for index in still] != before:
            return True
    return False


def _why_untried(subject: OptimizerUnderTest, error: str) -> str:
    for feed in (_FEEDS[0], replace(_FEEDS[0], num_groups=1), _FEEDS[3]):
        for step, needs in ((_step_with_closure, NEEDS_CLOSURE), (_step_with_graph, NEEDS_SECOND_ORDER)):
            with suppress(Exception):  # the user's class may raise anything
                run = start(subject, feed, feed.starts(feed.noise()))
                step(run.optimizer, [leaf for (leaf,) in run.leaves.values()])
                return needs
    return f"on small CPU tensors it raises {error}"


def _step_with_closure(optimizer: Optimizer, leaves: Sequence[Tensor]) -> None:
    def closure() -> Tensor:
        for leaf in leaves:
            leaf.grad = leaf.detach().clone()
        return torch.ones(())

    if "closure" not in inspect.signature(optimizer.step).parameters:
        raise TypeError("step() takes no closure")
    step: Callable[..., Any] = optimizer.step
    step(closure=closure)  # by name: another argument may come before it


def _step_with_graph(optimizer: Optimizer, leaves: Sequence[Tensor]) -> None:
    loss = torch.stack([leaf.pow(4).sum() for leaf in leaves]).sum()
    for leaf, grad in zip(leaves, torch.autograd.grad(loss, leaves, create_graph=True), strict=True):
        leaf.grad = grad
    optimizer.step()
    for leaf in leaves:
        leaf.grad = None  # breaks the cycle through the graph
