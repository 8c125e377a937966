"""Probes what an optimizer class tolerates. No communication.

Sharding must not change the algorithm, which only the class knows. So `probe` runs it on small tensors
(`trials`) and allows only what gave equal bits.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch.nn import Parameter
from torch.optim import Optimizer

from zero_optim.comm.encoding import inner_tensors
from zero_optim.probe.acceptance import first_accepted
from zero_optim.probe.comparison import difference, state_difference
from zero_optim.probe.subject import OptimizerUnderTest, remembered
from zero_optim.probe.traits import Traits
from zero_optim.probe.trials import (
    Cut,
    Feed,
    TrialRecord,
    anywhere,
    below_vectors,
    by_rows,
    isolated,
    record,
    recorded,
    start,
    step_in_parts,
    step_whole,
)

# Some classes factor or quantize state from some size on: 128 rows, or 4096 elements that fill blocks, the
# largest of which has as many. What they rounded shows from the second step on.
_LARGE = ((256, 176),)
_STEPS_OF_LARGE = 3
# Enough for the same, where several are stepped apart.
_SEVERAL_LARGE = ((128, 32), (64, 128))
# Many vectors of any processor; cut, no piece fills one.
_SHORT = (63, 7)
# Numbers that scripts change between runs, and by which resumed runs differ.
_OFTEN_CHANGED = frozenset({"lr", "weight_decay"})


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
    return _try(OptimizerUnderTest.of(optimizer_class, options, groups)).traits


def why_not_cut(
    optimizer_class: Callable[..., Optimizer],
    options: Mapping[str, Any],
    groups: Sequence[Mapping[str, Any]] = (),
    dtype: torch.dtype = torch.float32,
) -> str | None:
    """Return why ranks cannot share the rows of parameters; None if the class bears cuts.

    Rows stepped as parameters must have the bits of the whole, and so must their state: an entry has the
    parameter's shape and is cut with it, or is equal for all rows. Zero numbers are tried with another value
    too, as options may change. `zero_optim.probe.rows.why_rows_not_cut` tries a plan's very rows.

    Takes 5 to 40 ms beyond `probe`; cached. Other processors may give other answers. ``dtype``: of what is
    stepped on the CPU, else float32: accelerators' kernels are assumed, and tested by ``make gpu``, to
    compute elements alike wherever a tensor ends.
    """
    if dtype.itemsize < (8 if dtype.is_complex else 4):  # too few elements show it for a trial to rely on
        return f"{dtype} on the CPU: kernels round otherwise at the end of a vector than in the middle of one"
    return _try_cut(OptimizerUnderTest.of(optimizer_class, options, groups), dtype)


@dataclass(frozen=True, slots=True)
class _Answer:
    traits: Traits
    subject: OptimizerUnderTest | None = None
    feed: Feed | None = None


@remembered
def _try(subject: OptimizerUnderTest) -> _Answer:
    with isolated():
        accepted = first_accepted(subject)
        if isinstance(accepted, str):
            return _Answer(Traits(untried=accepted))
        subject, trial = accepted
        return _Answer(_traits(subject, trial), subject, trial.feed)


def _traits(subject: OptimizerUnderTest, trial: TrialRecord) -> Traits:
    if not trial.moved:
        return Traits(untried=f"no parameter moved in {trial.feed.num_steps} steps")
    coupling = _why_coupled(subject, trial)
    if coupling is not None:
        return Traits(coupling, coupling, coupling)
    moves_frozen = _moves_frozen(subject, trial)
    begin = partial(start, subject, trial.feed, trial.starts)
    counting = (
        _WITHOUT_GRADIENT
        if moves_frozen
        else difference(subject, trial, "stepped in parts", begin, step_in_parts)
    )
    return Traits(None, counting, _why_shape_used(subject, trial), moves_frozen=moves_frozen)


@remembered
def _try_cut(subject: OptimizerUnderTest, dtype: torch.dtype) -> str | None:
    answer = _try(subject)
    traits = answer.traits
    if answer.subject is None or answer.feed is None or not traits.separable:
        return traits.untried or traits.coupling
    parts = answer.subject.by_kernel()
    if len(parts) > 1:
        reasons = (_try_cut(part, dtype) for part in parts)
        return next((reason for reason in reasons if reason is not None), None)
    # A fused kernel may treat the end of a vector in another way, but no plan cuts there.
    if traits.shape_use is not None and (answer.feed.sparse or not answer.subject.is_fused):
        return traits.shape_use
    feed = replace(answer.feed, dtype=dtype)
    with isolated():
        trial = recorded(answer.subject, feed.with_rows())
        if trial is None:
            return f"parameters of {dtype} could not be tried"
        return _why_rows_differ(answer.subject, feed, trial) or _why_rows_differ_awake(answer.subject, feed)


def _why_coupled(subject: OptimizerUnderTest, trial: TrialRecord, *, with_state: bool = True) -> str | None:
    """Step each parameter with its own optimizer, and compare; another optimizer steps none."""
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
    """Try again where NaN, single precision or a small size may hide a difference."""
    if trial.feed.dtype != torch.float32 or trial.feed.shapes == _SEVERAL_LARGE:
        return None
    tamer = [] if trial.finite or trial.feed.huge == 1 else [replace(trial.feed, huge=1.0)]
    half = replace(trial.feed, dtype=torch.bfloat16, num_steps=2)
    large = replace(trial.feed, shapes=_SEVERAL_LARGE, num_in_group=1, num_steps=_STEPS_OF_LARGE, gaps=False)
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
    """Return whether equal trials differ in state only: fused SGD in bfloat16 leaves some unwritten."""
    repeated = record(subject, trial.feed)
    return repeated.values == trial.values and state_difference(trial, repeated.run) is not None


def _why_shape_used(subject: OptimizerUnderTest, trial: TrialRecord) -> str | None:
    """Cut every parameter in pieces, and compare; without a difference cut a larger one too."""
    if trial.feed.sparse:
        return "it takes sparse gradients, which are not cut"
    feed = replace(
        trial.feed, shapes=_LARGE, num_groups=1, num_in_group=1, num_steps=_STEPS_OF_LARGE, gaps=False
    )
    large = recorded(subject, feed.with_groups(subject))
    for whole in (trial, large):
        if whole is None:
            continue
        reason = difference(
            subject, whole, "cut in pieces", partial(start, subject, whole.feed, whole.starts, cut=anywhere)
        )
        if reason is not None:
            return reason
    return None


def _why_rows_differ(
    subject: OptimizerUnderTest, feed: Feed, trial: TrialRecord, cut_long: Cut = by_rows
) -> str | None:
    """Cut parameters between rows, as a plan does, into pieces that fill no vector, and compare.

    Kernels may treat partial vectors differently: in some classes few of a thousand elements show it. Long
    tensors are split among threads anywhere, by fused kernels where plans cut.
    """
    one = replace(feed, num_groups=1, num_in_group=1, gaps=False)
    large = replace(one, shapes=_LARGE, num_steps=_STEPS_OF_LARGE).with_groups(subject)
    short = replace(one, shapes=(_SHORT,) if len(feed.shapes[0]) > 1 else ((_SHORT[0] * _SHORT[1],),))
    tried: list[tuple[Feed, Cut]] = [(trial.feed, cut_long), (large, cut_long)]
    if not subject.is_fused:
        tried.append((short.with_groups(subject), below_vectors))
    for each, cut in tried:
        whole = trial if each is trial.feed else recorded(subject, each)
        if whole is None:
            return f"parameters of shape {each.shapes[0]} and {each.dtype} could not be tried"
        if whole.run.global_state():
            return "it keeps state that belongs to no parameter"
        reason = _why_not_joined(whole)
        if reason is not None:
            return reason
        begin = partial(start, subject, each, whole.starts, cut=cut)
        reason = difference(subject, whole, "cut between rows", begin)
        if reason is not None:
            return reason
    return None


def _why_rows_differ_awake(subject: OptimizerUnderTest, feed: Feed) -> str | None:
    """Repeat with `awake` numbers: all that the class bears, or else the usual ones."""
    for names in (None, _OFTEN_CHANGED):
        awake = subject.awake(feed.shapes[0], names)
        if awake is None:
            return None
        trial = recorded(awake, feed.with_rows())
        if trial is not None and trial.finite:
            # Not between rows where a kernel is not fused: more elements change their place in a vector so.
            cut_long = by_rows if awake.is_fused else anywhere
            reason = _why_rows_differ(awake, feed, trial, cut_long)
            return None if reason is None else f"{reason}, with {awake.woken(subject)}"
    return None


def _why_not_joined(trial: TrialRecord) -> str | None:
    """Return state that cannot be joined: containers with tensors, tensor subclasses."""
    for index, (leaf,) in trial.run.leaves.items():
        (state,) = trial.run.state_of(index)
        for entry in state.values() if isinstance(state, Mapping) else ():
            if not isinstance(entry, torch.Tensor) and inner_tensors(entry):
                return "it keeps tensors in lists or dicts of its state, whose rows would not be joined"
            if type(entry) not in (torch.Tensor, Parameter) and getattr(entry, "shape", None) == leaf.shape:
                return f"it keeps a {type(entry).__name__} in its state, whose rows would not be joined"
    return None


_WITHOUT_GRADIENT = "it changes parameters that have no gradient, and these are not stepped then"


def _moves_frozen(subject: OptimizerUnderTest, trial: TrialRecord) -> bool:
    """Return whether frozen parameters change: every second one frozen, then the others."""
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
