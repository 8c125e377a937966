"""Find out what an optimizer class tolerates, by trying it.

Sharding must not change the algorithm, and only the class itself knows what it does. So `probe` runs it on
small tensors (`trials`) and compares bits. It allows only what gave equal bits. What could not be tried, or
never changed a parameter, is not allowed. Nothing here communicates.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from typing import Any

import torch
from torch.nn import Parameter
from torch.optim import Optimizer

from zero_optim.comm.encoding import inner_tensors
from zero_optim.probe.acceptance import first_accepted
from zero_optim.probe.comparison import difference, state_difference
from zero_optim.probe.subject import OptimizerUnderTest
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
    """Try what a class with some options tolerates.

    Takes 10 to 40 ms; the result is cached. Does not communicate, draws no random number and has no side
    effect. Ranks with equal arguments get equal answers.

    Args:
        optimizer_class: as given to `ZeroRedundancyOptimizer`: a class, or a function that builds an
        optimizer from groups and keyword arguments.
        options: its keyword arguments. Tensors are copied to the CPU. ``lr=0`` becomes a small rate.
        ``capturable``, ``fused`` and ``differentiable`` choose an implementation of the same algorithm; they
        are switched off if the CPU has none.
        groups: the options of each parameter group, if groups have their own.
    """
    return _answer(OptimizerUnderTest.of(optimizer_class, options, groups)).traits


def why_not_cut(
    optimizer_class: Callable[..., Optimizer],
    options: Mapping[str, Any],
    groups: Sequence[Mapping[str, Any]] = (),
    dtype: torch.dtype = torch.float32,
) -> str | None:
    """Find out why ranks cannot share the rows of parameters, if they cannot.

    It is tried where `probe` found nothing against it: rows of small parameters are stepped as parameters of
    their own. The rows must have the bits of the whole parameter, and so must their state: each entry either
    has the parameter's shape, and is cut like it, or is the same for all rows. Options may change later, so
    numbers that are zero, such as a weight decay, are tried with another value too. Whether a class bears
    the very rows that a plan cuts is the question of `zero_optim.probe.rows.why_rows_not_cut`.

    Nothing is cut that is stepped on the CPU in a dtype narrower than float32. Kernels there compute in
    float32, and round what fills no vector at other places. Too few elements show it for a trial to rely on.

    Takes 5 to 40 ms more than `probe`; the result is cached. Like `probe` it does not communicate, but ranks
    with other processors may get other answers.

    Args:
        optimizer_class: as for `probe`; also the options and groups.
        options: its keyword arguments.
        groups: the options of each parameter group, if groups have their own.
        dtype: of what is stepped, if it is on the CPU, else float32. Trials run on the CPU alone. So it is
            assumed that float32 answers for every dtype of an accelerator: that its kernels compute each
            element in the same way, wherever the tensor ends. ``make gpu`` tries that on a device.

    Returns:
        The reason, or None if a class with these options bears cuts.
    """
    if dtype.itemsize < (8 if dtype.is_complex else 4):
        return f"{dtype} on the CPU: kernels round otherwise at the end of a vector than in the middle of one"
    subject = OptimizerUnderTest.of(optimizer_class, options, groups)
    return _remembered_cut(subject, dtype) if subject.is_hashable else _try_cut(subject, dtype)


@dataclass(frozen=True, slots=True)
class _Answer:
    """What was found, and with which subject and feed; both None if the class could not be tried."""

    traits: Traits
    subject: OptimizerUnderTest | None = None
    feed: Feed | None = None


def _answer(subject: OptimizerUnderTest) -> _Answer:
    return _remembered(subject) if subject.is_hashable else _try(subject)


@lru_cache(maxsize=256)
def _remembered(subject: OptimizerUnderTest) -> _Answer:
    """Cache the answers. Keys hold the class weakly and options as values, so no user object stays alive."""
    return _try(subject)


@lru_cache(maxsize=256)
def _remembered_cut(subject: OptimizerUnderTest, dtype: torch.dtype) -> str | None:
    return _try_cut(subject, dtype)


def _try(subject: OptimizerUnderTest) -> _Answer:
    with isolated():
        found = first_accepted(subject)
        if isinstance(found, str):
            return _Answer(Traits(untried=found))
        subject, made = found
        return _Answer(_traits(subject, made), subject, made.feed)


def _traits(subject: OptimizerUnderTest, made: TrialRecord) -> Traits:
    if not made.moved:
        return Traits(untried=f"no parameter moved in {made.feed.num_steps} steps")
    coupling = _why_coupled(subject, made)
    if coupling is not None:
        return Traits(coupling, coupling, coupling)
    moves_frozen = _moves_frozen(subject, made)
    counting = _WITHOUT_GRADIENT if moves_frozen else _why_counting(subject, made)
    return Traits(None, counting, _why_shape_used(subject, made), moves_frozen=moves_frozen)


def _try_cut(subject: OptimizerUnderTest, dtype: torch.dtype) -> str | None:
    found = _answer(subject)
    traits = found.traits
    if found.subject is None or found.feed is None or not traits.separable:
        return traits.untried or traits.coupling
    parts = found.subject.by_kernel()
    if len(parts) > 1:
        reasons = (_try_cut(part, dtype) for part in parts)
        return next((reason for reason in reasons if reason is not None), None)
    # A fused kernel may treat the end of a vector in another way, but no plan cuts there.
    if traits.shape_use is not None and (found.feed.sparse or not found.subject.is_fused):
        return traits.shape_use
    feed = replace(found.feed, dtype=dtype)
    with isolated():
        made = recorded(found.subject, feed.with_rows())
        if made is None:
            return f"parameters of {dtype} could not be tried"
        return _why_rows_differ(found.subject, feed, made) or _why_rows_differ_awake(found.subject, feed)


# ---------------------------------------------------------------------- the comparisons


def _why_coupled(subject: OptimizerUnderTest, made: TrialRecord, *, with_state: bool = True) -> str | None:
    """Step each parameter with a separate optimizer, and compare; another optimizer steps none."""
    if made.drew:
        return "it draws random numbers, and each rank would draw others"
    for indices in (*([index] for index in made.starts), []):
        values = {index: made.starts[index] for index in indices}
        how = "stepped alone" if indices else "stepped without parameters"
        begin = partial(start, subject, made.feed, values)
        reason = difference(subject, made, how, begin, with_state=with_state)
        if reason is not None:
            repeats = record(subject, made.feed).values == made.values
            return reason if repeats else "two equal runs of it give different results"
    return _why_coupled_otherwise(subject, made)


def _why_coupled_otherwise(subject: OptimizerUnderTest, made: TrialRecord) -> str | None:
    """Try again where NaN, single precision or a small size may have hidden a difference."""
    if made.feed.dtype != torch.float32 or made.feed.shapes == _SEVERAL_LARGE:
        return None
    tamer = [] if made.finite or made.feed.huge == 1 else [replace(made.feed, huge=1.0)]
    half = replace(made.feed, dtype=torch.bfloat16, num_steps=2)
    large = replace(made.feed, shapes=_SEVERAL_LARGE, num_in_group=1, num_steps=_STEPS_OF_LARGE, gaps=False)
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


def _holds_leftovers(subject: OptimizerUnderTest, made: TrialRecord) -> bool:
    """Whether equal trials give equal parameters but unequal state, parts of which were never written.

    PyTorch's fused SGD in bfloat16 on the CPU does this with its momentum.
    """
    repeated = record(subject, made.feed)
    return repeated.values == made.values and state_difference(made, repeated.run) is not None


def _why_counting(subject: OptimizerUnderTest, made: TrialRecord) -> str | None:
    """Step one optimizer bucket by bucket, and compare."""
    begin = partial(start, subject, made.feed, made.starts)
    return difference(subject, made, "stepped in parts", begin, step_in_parts)


def _why_shape_used(subject: OptimizerUnderTest, made: TrialRecord) -> str | None:
    """Cut every parameter in pieces, and compare; if there is no difference, cut a larger one too."""
    if made.feed.sparse:
        return "it takes sparse gradients, which are not cut"
    feed = replace(
        made.feed, shapes=_LARGE, num_groups=1, num_in_group=1, num_steps=_STEPS_OF_LARGE, gaps=False
    )
    large = recorded(subject, feed.with_groups(subject))
    for whole in (made, large):
        if whole is None:
            continue
        reason = difference(
            subject, whole, "cut in pieces", partial(start, subject, whole.feed, whole.starts, cut=anywhere)
        )
        if reason is not None:
            return reason
    return None


def _why_rows_differ(
    subject: OptimizerUnderTest, feed: Feed, made: TrialRecord, cut_long: Cut = by_rows
) -> str | None:
    """Cut parameters between rows as a plan does, and so that no piece fills a vector; and compare.

    A kernel may treat what does not fill a vector otherwise: in some classes, few of a thousand elements show
    it. Long tensors are divided among threads anywhere, so that pieces end their vectors in other places.
    Fused kernels divide them where plans cut.

    Args:
        subject: what is tried.
        feed: the parameters and gradients that it accepts.
        made: a trial with its `Feed.with_rows`.
        cut_long: how to cut what is longer than some vectors.
    """
    one = replace(feed, num_groups=1, num_in_group=1, gaps=False)
    large = replace(one, shapes=_LARGE, num_steps=_STEPS_OF_LARGE).with_groups(subject)
    short = replace(one, shapes=(_SHORT,) if len(feed.shapes[0]) > 1 else ((_SHORT[0] * _SHORT[1],),))
    tried: list[tuple[Feed, Cut]] = [(made.feed, cut_long), (large, cut_long)]
    if not subject.is_fused:
        tried.append((short.with_groups(subject), below_vectors))
    for each, cut in tried:
        whole = made if each is made.feed else recorded(subject, each)
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
    """Try again with numbers awake that hide arithmetic: all that the class bears, or else the usual ones."""
    for names in (None, _OFTEN_CHANGED):
        awake = subject.awake(feed.shapes[0], names)
        if awake is None:
            return None
        made = recorded(awake, feed.with_rows())
        if made is not None and made.finite:
            # Not between rows where a kernel is not fused: more elements change their place in a vector so.
            cut_long = by_rows if awake.is_fused else anywhere
            reason = _why_rows_differ(awake, feed, made, cut_long)
            return None if reason is None else f"{reason}, with {awake.woken(subject)}"
    return None


def _why_not_joined(made: TrialRecord) -> str | None:
    """Say which entries of a parameter's state nobody could join: containers with tensors, and subclasses."""
    for index, (leaf,) in made.run.leaves.items():
        (state,) = made.run.state_of(index)
        for entry in state.values() if isinstance(state, Mapping) else ():
            if not isinstance(entry, torch.Tensor) and inner_tensors(entry):
                return "it keeps tensors in lists or dicts of its state, whose rows would not be joined"
            if type(entry) not in (torch.Tensor, Parameter) and getattr(entry, "shape", None) == leaf.shape:
                return f"it keeps a {type(entry).__name__} in its state, whose rows would not be joined"
    return None


_WITHOUT_GRADIENT = "it changes parameters that have no gradient, and these are not stepped then"


def _moves_frozen(subject: OptimizerUnderTest, made: TrialRecord) -> bool:
    """Step with every second parameter frozen, then with the others: return whether a frozen one changes."""
    for kind in (0, 1):
        try:
            run = start(subject, made.feed, made.starts)
            still = [index for index in run.leaves if index % 4 // 2 == kind]  # some of each group
            for index in still:
                run.leaves[index][0].requires_grad_(False)
            before = [run.bits(index) for index in still]
            for step, gradients in enumerate(made.gradients):
                step_whole(run, step, {**gradients, **dict.fromkeys(still)})
        except Exception:  # noqa: BLE001 - a class that needs every gradient also says so in a step
            continue
        if [run.bits(index) for index in still] != before:
            return True
    return False
