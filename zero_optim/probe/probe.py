"""Probes what an optimizer class tolerates. No communication.

Sharding must not change the algorithm. So `probe` runs the class on small tensors (`trials`) and allows only
what gives equal bits.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch.optim import Optimizer

from zero_optim.probe.acceptance import first_accepted
from zero_optim.probe.comparison import difference, state_difference
from zero_optim.probe.subject import OptimizerUnderTest, remembered
from zero_optim.probe.traits import Traits
from zero_optim.probe.trials import (
    Feed,
    TrialRecord,
    anywhere,
    isolated,
    record,
    recorded,
    start,
    step_in_parts,
    step_whole,
)

# Some classes factor or quantize state from some size on: 128 rows, or 4096 elements that fill blocks. What
# they rounded shows from the second step on.
LARGE = ((256, 176),)
STEPS_OF_LARGE = 3
# Enough for the same, if several are stepped apart.
_SEVERAL_LARGE = ((128, 32), (64, 128))
_WITHOUT_GRADIENT = "it changes parameters that have no gradient, and these are not stepped then"


def probe(
    optimizer_class: Callable[..., Optimizer],
    options: Mapping[str, Any],
    groups: Sequence[Mapping[str, Any]] = (),
) -> Traits:
    """Probe a class with some options: 10 to 40 ms, cached, without side effects or random numbers.

    Ranks with equal arguments get equal answers. ``optimizer_class``: a class or a function that builds an
    optimizer from groups and ``options``. Tensors are copied to the CPU, ``lr=0`` becomes a small rate, and
    ``capturable``, ``fused``, ``differentiable`` are off if the CPU lacks them. ``groups``: each group's own
    options.
    """
    return trial_of(OptimizerUnderTest.of(optimizer_class, options, groups)).traits


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
        accepted = first_accepted(subject)
        if isinstance(accepted, str):
            return Answer(Traits(untried=accepted))
        subject, trial = accepted
        return Answer(_traits(subject, trial), subject, trial.feed)


def _traits(subject: OptimizerUnderTest, trial: TrialRecord) -> Traits:
    if not trial.moved:
        return Traits(untried=f"no parameter moved in {trial.feed.num_steps} steps")
    coupling = _why_coupled(subject, trial)
    if coupling is not None:
        return Traits(coupling, coupling, coupling)
    moves_frozen = _moves_frozen(subject, trial)
    counting: str | None = _WITHOUT_GRADIENT
    if not moves_frozen:
        begin = partial(start, subject, trial.feed, trial.starts)
        counting = difference(subject, trial, "stepped in parts", begin, step_in_parts)
    return Traits(None, counting, _why_shape_used(subject, trial), moves_frozen=moves_frozen)


def _why_coupled(subject: OptimizerUnderTest, trial: TrialRecord, *, with_state: bool = True) -> str | None:
    """Step each parameter with its own optimizer, and compare; another optimizer has none."""
    if trial.drew:
        return "it draws random numbers, and each rank would draw others"
    for indices in (*([index] for index in trial.starts), []):
        values = {index: trial.starts[index] for index in indices}
        how = "stepped alone" if indices else "stepped without parameters"
        begin = partial(start, subject, trial.feed, values)
        reason = difference(subject, trial, how, begin, with_state=with_state)
        if reason is not None:
            repeats = record(subject, trial.feed).values == trial.values
            return reason if repeats else "two equal runs of it give different results"
    return _why_coupled_otherwise(subject, trial)


def _why_coupled_otherwise(subject: OptimizerUnderTest, trial: TrialRecord) -> str | None:
    """Try again: NaN, single precision or a small size may hide a difference."""
    if trial.feed.dtype != torch.float32 or trial.feed.shapes == _SEVERAL_LARGE:
        return None
    tamer = [] if trial.finite or trial.feed.huge == 1 else [replace(trial.feed, huge=1.0)]
    half = replace(trial.feed, dtype=torch.bfloat16, num_steps=2)
    large = replace(trial.feed, shapes=_SEVERAL_LARGE, num_in_group=1, num_steps=STEPS_OF_LARGE, gaps=False)
    for feed in (*tamer, half, large.with_groups(subject)):
        again = recorded(subject, feed)
        if again is None:
            continue
        reason = _why_coupled(subject, again)
        if reason is not None and _holds_leftovers(subject, again):
            reason = _why_coupled(subject, again, with_state=False)
        if reason is not None:
            return reason
    return None


def _holds_leftovers(subject: OptimizerUnderTest, trial: TrialRecord) -> bool:
    """Return whether equal trials differ in state only, as fused SGD in bfloat16 does."""
    repeated = record(subject, trial.feed)
    return repeated.values == trial.values and state_difference(trial, repeated.run) is not None


def _why_shape_used(subject: OptimizerUnderTest, trial: TrialRecord) -> str | None:
    """Compare with every parameter cut in pieces; without a difference cut a larger one too."""
    if trial.feed.sparse:
        return "it takes sparse gradients, which are not cut"
    feed = replace(
        trial.feed, shapes=LARGE, num_groups=1, num_in_group=1, num_steps=STEPS_OF_LARGE, gaps=False
    )
    large = recorded(subject, feed.with_groups(subject))
    for whole in (trial, large):
        if whole is not None:
            begin = partial(start, subject, whole.feed, whole.starts, cut=anywhere)
            reason = difference(subject, whole, "cut in pieces", begin)
            if reason is not None:
                return reason
    return None


def _moves_frozen(subject: OptimizerUnderTest, trial: TrialRecord) -> bool:
    for kind in (0, 1):
        try:
            run = start(subject, trial.feed, trial.starts)
            still = [index for index in run.leaves if index % 4 // 2 == kind]  # some of each group
            for index in still:
                run.leaves[index][0].requires_grad_(False)
            before = [run.bits(index) for index in still]
            for step, gradients in enumerate(trial.gradients):
                step_whole(run, step, {**gradients, **dict.fromkeys(still)})
        except Exception:  # noqa: BLE001 - a class that needs every gradient also says so in a step
            continue
        if [run.bits(index) for index in still] != before:
            return True
    return False
