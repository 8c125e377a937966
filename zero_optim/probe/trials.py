"""Trial runs of an optimizer class on a few small tensors: one together, and variants with its bits."""

import random
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer

from zero_optim.compat import private
from zero_optim.errors import message_of
from zero_optim.probe.feeds import Feed
from zero_optim.probe.subject import OptimizerUnderTest, bits, switch_mode

Gradients: TypeAlias = Mapping[int, Tensor | None]
Cut: TypeAlias = Callable[[int, Tensor], Sequence[Tensor]]  # cuts a parameter's value, given its index

_STEP_OF_EVALUATION = 5


@dataclass(frozen=True, slots=True)
class Variant:
    """How a trial deals out the parameters that were recorded together."""

    how: str  # for the reason
    only: Collection[int] | None = None  # the parameters that the optimizer has; None: all
    cut: Cut | None = None
    in_parts: bool = False


TOGETHER = Variant("stepped together")


@dataclass(slots=True)
class TrialRun:
    """One optimizer over some parameters, whole or in pieces."""

    optimizer: Optimizer
    leaves: dict[int, list[Tensor]]
    variant: Variant

    def give(self, gradients: Gradients) -> None:
        """Set copies of gradients, cut like the parameters; classes change them."""
        for index, gradient in gradients.items():
            pieces = self.leaves[index]
            if gradient is None or len(pieces) == 1:
                for leaf in pieces:
                    leaf.grad = None if gradient is None else gradient.clone()
                continue
            sizes = [leaf.numel() for leaf in pieces]
            for leaf, part in zip(pieces, torch.split(gradient.reshape(-1), sizes), strict=True):
                leaf.grad = part.reshape(leaf.shape).clone()

    def step(self, number: int, gradients: Gradients) -> None:
        """Step everything at once, or bucket by bucket, last parameters first, as the variant says."""
        if self.variant.in_parts:
            groups = self.optimizer.param_groups
            members = [group["params"] for group in groups]
            order = sorted(self.leaves, reverse=True)
            self.give(dict.fromkeys(order))
            for bucket in (order[:1], order[1:3], order[3:]):
                self.give({index: gradients[index] for index in bucket})
                chosen = {id(leaf) for index in bucket for leaf in self.leaves[index]}
                for group, params in zip(groups, members, strict=True):
                    group["params"] = [leaf for leaf in params if id(leaf) in chosen]
                self.optimizer.step()
                self.give(dict.fromkeys(bucket))
            for group, params in zip(groups, members, strict=True):
                group["params"] = params
        else:
            self.give(gradients)
            self.optimizer.step()
        if number == _STEP_OF_EVALUATION:
            switch_mode(self.optimizer, "eval")
            switch_mode(self.optimizer, "train")

    def bits(self, index: int) -> bytes:
        """Return a parameter's current value."""
        return b"".join(map(bits, self.leaves[index]))

    def state_of(self, index: int) -> list[Any]:
        """Return the state of each piece of a parameter."""
        return [self.optimizer.state.get(leaf, {}) for leaf in self.leaves[index]]

    def global_state(self) -> dict[Any, Any]:
        """Return state that belongs to no parameter."""
        held: dict[Any, Any] = self.optimizer.state
        return {key: value for key, value in held.items() if not isinstance(key, Tensor)}


def start(
    subject: OptimizerUnderTest, feed: Feed, values: Mapping[int, Tensor], variant: Variant = TOGETHER
) -> TrialRun:
    """Build an optimizer over some parameters, whole or cut, always with the same groups."""
    chosen = values if variant.only is None else {index: values[index] for index in variant.only}
    groups: list[list[Tensor]] = [[] for _ in range(feed.num_groups)]
    leaves = {}
    for index, value in chosen.items():
        pieces = [value] if variant.cut is None else variant.cut(index, value)
        leaves[index] = [piece.clone().requires_grad_() for piece in pieces]
        groups[index % feed.num_groups].extend(leaves[index])
    return TrialRun(subject.build(groups), leaves, variant)


def anywhere(index: int, value: Tensor) -> Sequence[Tensor]:
    """Cut into 1-D pieces that do not fit vectors; one may have one element."""
    middle = value.numel() * 3 // 8 | 1
    sizes = [middle, 1, value.numel() - middle - 1] if index == 1 else [middle, value.numel() - middle]
    return torch.split(value.reshape(-1), sizes)


@dataclass(slots=True)
class TrialRecord:
    """A trial of all parameters together: its gradients and results."""

    subject: OptimizerUnderTest
    feed: Feed
    run: TrialRun
    starts: dict[int, Tensor]
    gradients: list[dict[int, Tensor | None]] = field(default_factory=list)
    values: list[list[bytes]] = field(default_factory=list)
    drew: bool = False
    communicated: bool = False
    idle: set[str] = field(default_factory=set)  # group entries without influence: Note [Idle entries]
    retyped: set[str] = field(default_factory=set)  # those that are one number in two types

    @property
    def moved(self) -> bool:
        """Whether any parameter changed."""
        return self.values[0] != self.values[-1]

    @property
    def finite(self) -> bool:
        """Whether all values stayed finite: NaN would hide differences."""
        return all(bool(leaf.isfinite().all()) for (leaf,) in self.run.leaves.values())

    def begin(self, variant: Variant = TOGETHER) -> TrialRun:
        """Start another run of the same parameters."""
        return start(self.subject, self.feed, self.starts, variant)

    def repeated(self) -> "TrialRecord":
        """Run it all once more."""
        return record(self.subject, self.feed)


def record(subject: OptimizerUnderTest, feed: Feed) -> TrialRecord:
    """Run all parameters together, some in every group, and record; raises the class's errors."""
    feed = replace(feed, num_groups=max(feed.num_groups, len(subject.groups)))
    noise = feed.noise()
    starts = feed.starts(noise)
    run = start(subject, feed, starts)
    trial = TrialRecord(subject, feed, run, starts, values=[[run.bits(index) for index in starts]])
    before, num_collectives = _random_states(), _num_collectives()
    for step in range(feed.num_steps):
        weights = {index: leaf.detach() for index, (leaf,) in run.leaves.items()}
        grads = {index: feed.gradient(index, step, noise[index], weights[index]) for index in weights}
        run.step(step, grads)
        trial.gradients.append(grads)
        trial.values.append([run.bits(index) for index in starts])
    trial.drew = before != _random_states()
    trial.communicated = num_collectives != _num_collectives()
    return trial


def first_record(subject: OptimizerUnderTest, *feeds: Feed) -> TrialRecord | str:
    """Record the first feed that the class accepts, also as another candidate; or return the first error."""
    errors: list[str] = []
    for candidate in subject.candidates():
        for feed in feeds:
            try:
                return record(candidate, feed)
            except Exception as error:  # noqa: BLE001 - the user's class may raise anything
                errors.append(first_line_of(error))
    return errors[0]


def recorded(subject: OptimizerUnderTest, feed: Feed) -> TrialRecord | None:
    """Record one feed; None if the class raises."""
    try:
        return record(subject, feed)
    except Exception:  # noqa: BLE001 - the user's class may raise anything
        return None


def first_line_of(error: Exception) -> str:
    """Return an error's name and first line."""
    first_line = (message_of(error).splitlines() or [""])[0]
    return f"{type(error).__name__}: {first_line}"


def _num_collectives() -> int:
    """Return how many the default group has begun; 0 from a backend that does not count, as "fake"."""
    world = dist.group.WORLD if dist.is_available() else None
    count = getattr(world, "_get_sequence_number_for_group", None)
    try:
        return 0 if count is None else int(count())
    except RuntimeError:
        return 0


def _random_states() -> tuple[object, ...]:
    name, words, *rest = np.random.get_state(legacy=True)
    return random.getstate(), (name, words.tobytes(), *rest), bits(torch.get_rng_state())  # type: ignore[union-attr]


@contextmanager
def isolated() -> Iterator[None]:
    """Run on the CPU with gradients, then restore random states, modes, hooks and warnings."""
    ours = random.getstate(), np.random.get_state(), torch.get_rng_state()
    tables = private.global_optimizer_pre_hooks, private.global_optimizer_post_hooks
    hooks = [dict(table) for table in tables]
    # Not get_default_device(): PyTorch 2.8's raises after set_default_device(None).
    elsewhere = torch.empty(0).device.type != "cpu"
    try:
        for table in tables:
            table.clear()
        with (
            warnings.catch_warnings(),
            torch.inference_mode(False),
            torch.enable_grad(),
            torch.device("cpu") if elsewhere else nullcontext(),
        ):
            warnings.simplefilter("ignore")
            yield
    finally:
        for table, before in zip(tables, hooks, strict=True):
            late = dict(table)
            table.clear()
            table.update(before | late)
        random.setstate(ours[0])
        np.random.set_state(ours[1])
        torch.set_rng_state(ours[2])
