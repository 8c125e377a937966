"""Trial runs of an optimizer class on a few small tensors.

The first trial steps all parameters together and records gradients. Others step them one by one, in parts, or
cut into pieces, and must give the same bits.

Note [Gradients that trigger]
    Some optimizers couple parameters only under a condition. So gradients meet all known ones: a huge
    constant gradient (SWATS switches a group to SGD when two estimates agree), a norm above any clipping
    threshold, gradients orthogonal to the weights (AdamP and SGDP project), tiny, zero and missing ones,
    changing signs, zero weights (LARS does not scale them), and more steps than RAdam's warm-up and Ranger's
    look-ahead need.
"""

import math
import random
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor
from torch.optim import Optimizer

from zero_optim.compat import private
from zero_optim.probe.subject import OptimizerUnderTest, bits, switch_mode

Shape: TypeAlias = tuple[int, ...]
Cut: TypeAlias = Callable[[int, Tensor], list[Tensor]]  # cuts the first value of a parameter, given its index

_NUM_STEPS = 9
# Above any clipping threshold or damping constant in use; its square is far from overflow.
_HUGE = 1e4
# (parameter, step) without a gradient: one, a whole group, and that with the huge gradient.
_GAPS = frozenset({(1, 3), (1, 5), (3, 5), (5, 5), (0, 6)})
_STEP_OF_EVALUATION = 5
# In cuts by rows, pieces start at multiples of so many bytes, as in a plan.
_ALIGNMENT_NBYTES = 64


@dataclass(frozen=True, slots=True)
class Feed:
    """Parameters and gradients of a trial. See Note [Gradients that trigger]."""

    shapes: tuple[Shape, ...]
    gaps: bool = True  # some gradients are None on some steps
    sparse: bool = False
    num_groups: int = 2
    num_in_group: int = 2  # at least
    num_steps: int = _NUM_STEPS
    dtype: torch.dtype = torch.float32
    huge: float = _HUGE

    def with_groups(self, subject: OptimizerUnderTest) -> "Feed":
        """Return a feed with enough parameters for every group."""
        return replace(self, num_groups=max(self.num_groups, len(subject.groups)))

    def with_rows(self) -> "Feed":
        """Return a feed with parameters long enough for `by_rows`."""
        return replace(self, shapes=tuple(self._longer(shape) for shape in self.shapes))

    def _longer(self, shape: Shape) -> Shape:
        step = _rows_apart(torch.empty(shape, dtype=self.dtype, device="meta"))
        return (2 * step + shape[0], *shape[1:])

    @property
    def num_params(self) -> int:
        """The number of parameters."""
        return max(len(self.shapes), self.num_in_group * self.num_groups)

    def shape(self, index: int) -> Shape:
        """Return a parameter's shape."""
        return self.shapes[index % len(self.shapes)]

    def noise(self) -> list[Tensor]:
        """Return fixed normal numbers: a row for each step of a parameter, the last for its start."""
        generator = torch.Generator().manual_seed(20)
        sizes = [torch.Size(self.shape(index)).numel() for index in range(self.num_params)]
        rows = torch.randn((self.num_steps + 1, sum(sizes)), generator=generator, dtype=torch.float32)
        return list(torch.split(rows, sizes, dim=1))

    def start(self, index: int, noise: Tensor) -> Tensor:
        """Return a parameter's first value."""
        row = noise[-1]
        values = (row, row * 0, row * 1e-3, row, row.clamp(min=0), row)[index % 6]
        return values.reshape(self.shape(index)).to(self.dtype)

    def gradient(self, index: int, step: int, noise: Tensor, weights: Tensor) -> Tensor | None:
        """Return a parameter's gradient at a step, from its current value."""
        if self.gaps and (index, step) in _GAPS:
            return None
        dense = self._dense(index % 6, step, noise, weights).reshape(weights.shape).to(self.dtype)
        if not self.sparse:
            return dense
        rows = torch.zeros_like(dense)  # one row: more rows start threads, which costs a millisecond
        rows[step % len(rows)] = dense[step % len(rows)]
        return rows.to_sparse(1)

    def _dense(self, kind: int, step: int, noise: Tensor, weights: Tensor) -> Tensor:
        row = noise[step]
        if kind == 0 and step < 5:
            return noise[0] * self.huge
        if kind == 2:
            row = row * 1e-5
        elif kind in (3, 5):
            row = _orthogonal(row.reshape(weights.shape), weights)
        elif kind == 4:
            row = row.clamp(min=0) * (0 if step == 4 else 3)
        spike = self.huge**2 if step == 7 and kind > 3 else 1.0
        return row * (spike * {6: 1e-6, 7: 30.0}.get(step, 1.0))


def _orthogonal(rows: Tensor, weights: Tensor) -> Tensor:
    flat = rows.flatten(1) if rows.dim() > 1 else rows.reshape(1, -1)
    along = weights.detach().to(flat.dtype).reshape(flat.shape)
    factor = (flat * along).sum(1, keepdim=True) / (along * along).sum(1, keepdim=True).clamp(min=1e-30)
    return flat - factor * along


@dataclass(slots=True)
class TrialRun:
    """One optimizer over some parameters, whole or in pieces."""

    optimizer: Optimizer
    leaves: dict[int, list[Tensor]]

    def give(self, gradients: Mapping[int, Tensor | None]) -> None:
        """Set copies of gradients, cut like the parameters; classes change them."""
        for index, gradient in gradients.items():
            pieces = self.leaves[index]
            if len(pieces) == 1 or gradient is None:
                for leaf in pieces:
                    leaf.grad = None if gradient is None else gradient.clone()
                continue
            parts = torch.split(gradient.reshape(-1), [leaf.numel() for leaf in pieces])
            for leaf, part in zip(pieces, parts, strict=True):
                leaf.grad = part.reshape(leaf.shape).clone()

    def bits(self, index: int) -> bytes:
        """Return a parameter's current value."""
        pieces = self.leaves[index]
        return bits(pieces[0]) if len(pieces) == 1 else b"".join(map(bits, pieces))

    def state_of(self, index: int) -> list[Any]:
        """Return the state of each piece of a parameter."""
        return [self.optimizer.state.get(leaf, {}) for leaf in self.leaves[index]]

    def global_state(self) -> dict[Any, Any]:
        """Return state that belongs to no parameter."""
        held: dict[Any, Any] = self.optimizer.state
        return {key: value for key, value in held.items() if not isinstance(key, Tensor)}


def start(
    subject: OptimizerUnderTest, feed: Feed, values: Mapping[int, Tensor], *, cut: Cut | None = None
) -> TrialRun:
    """Build an optimizer over some parameters, whole or cut, always with the same groups."""
    leaves = {
        index: [piece.clone().requires_grad_() for piece in ([value] if cut is None else cut(index, value))]
        for index, value in values.items()
    }
    groups: list[list[Tensor]] = [[] for _ in range(feed.num_groups)]
    for index, pieces in leaves.items():
        groups[index % feed.num_groups].extend(pieces)
    return TrialRun(subject.build(groups), leaves)


def starts_of(feed: Feed, noise: list[Tensor] | None = None) -> dict[int, Tensor]:
    """Return the first values of all parameters."""
    numbers = feed.noise() if noise is None else noise
    return {index: feed.start(index, row) for index, row in enumerate(numbers)}


def anywhere(index: int, value: Tensor) -> list[Tensor]:
    """Cut into 1-D pieces that do not fit vectors; one may have one element."""
    middle = value.numel() * 3 // 8 | 1
    sizes = [middle, 1, value.numel() - middle - 1] if index == 1 else [middle, value.numel() - middle]
    return list(torch.split(value.reshape(-1), sizes))


def by_rows(index: int, value: Tensor) -> list[Tensor]:
    """Cut between rows, as a plan does; the second parameter in three pieces."""
    step = _rows_apart(value)
    sizes = [step, step, len(value) - 2 * step] if index == 1 else [step, len(value) - step]
    return list(torch.split(value, sizes))


def below_vectors(index: int, value: Tensor) -> list[Tensor]:
    """Cut between rows into pieces below two vectors of 64 bytes."""
    row_nbytes = value.element_size() * value.numel() // len(value)
    return list(torch.split(value, max(1, (2 * _ALIGNMENT_NBYTES - 1) // row_nbytes)))


def _rows_apart(value: Tensor) -> int:
    row_nbytes = value.element_size() * value.numel() // len(value)
    return math.lcm(row_nbytes, _ALIGNMENT_NBYTES) // row_nbytes


def step_whole(run: TrialRun, step: int, gradients: Mapping[int, Tensor | None]) -> None:
    """Step everything."""
    run.give(gradients)
    run.optimizer.step()
    _evaluate(run, step)


def step_in_parts(run: TrialRun, step: int, gradients: Mapping[int, Tensor | None]) -> None:
    """Step buckets, last parameters first, with gradients set just before."""
    groups = run.optimizer.param_groups
    members = [group["params"] for group in groups]
    order = sorted(run.leaves, reverse=True)
    run.give(dict.fromkeys(order))
    for bucket in (order[:1], order[1:3], order[3:]):
        run.give({index: gradients[index] for index in bucket})
        chosen = {id(leaf) for index in bucket for leaf in run.leaves[index]}
        for group, params in zip(groups, members, strict=True):
            group["params"] = [leaf for leaf in params if id(leaf) in chosen]
        run.optimizer.step()
        run.give(dict.fromkeys(bucket))
    for group, params in zip(groups, members, strict=True):
        group["params"] = params
    _evaluate(run, step)


def _evaluate(run: TrialRun, step: int) -> None:
    if step == _STEP_OF_EVALUATION:
        switch_mode(run.optimizer, "eval")
        switch_mode(run.optimizer, "train")


@dataclass(slots=True)
class TrialRecord:
    """A trial of all parameters together: its gradients and results."""

    feed: Feed
    run: TrialRun
    starts: dict[int, Tensor]
    gradients: list[dict[int, Tensor | None]] = field(default_factory=list)
    values: list[list[bytes]] = field(default_factory=list)
    drew: bool = False

    @property
    def moved(self) -> bool:
        """Whether any parameter changed."""
        return any(before != after for before, after in zip(self.values[0], self.values[-1], strict=True))

    @property
    def finite(self) -> bool:
        """Whether all values stayed finite: NaN would hide differences."""
        return all(bool(leaf.isfinite().all()) for (leaf,) in self.run.leaves.values())


def record(subject: OptimizerUnderTest, feed: Feed) -> TrialRecord:
    """Run all parameters together and record; raises the class's errors."""
    noise = feed.noise()
    starts = starts_of(feed, noise)
    run = start(subject, feed, starts)
    trial = TrialRecord(feed, run, starts, values=[[run.bits(index) for index in starts]])
    before = _random_states()
    for step in range(feed.num_steps):
        weights = {index: leaf.detach() for index, (leaf,) in run.leaves.items()}
        grads = {index: feed.gradient(index, step, noise[index], weights[index]) for index in weights}
        step_whole(run, step, grads)
        trial.gradients.append(grads)
        trial.values.append([run.bits(index) for index in starts])
    trial.drew = before != _random_states()
    return trial


def recorded(subject: OptimizerUnderTest, feed: Feed) -> TrialRecord | None:
    """Do as `record`; None if the class raises."""
    try:
        return record(subject, feed)
    except Exception:  # noqa: BLE001 - the user's class may raise anything
        return None


def _random_states() -> tuple[object, ...]:
    name, words, *rest = np.random.get_state(legacy=True)
    return random.getstate(), (name, words.tobytes(), *rest), bits(torch.get_rng_state())  # type: ignore[union-attr]


@contextmanager
def isolated() -> Iterator[None]:
    """Run on the CPU with gradients, then restore random states, modes, hooks and warnings."""
    ours = random.getstate(), np.random.get_state(), torch.get_rng_state()
    # Not get_default_device(): PyTorch 2.8's raises after set_default_device(None).
    elsewhere = torch.empty(0).device.type != "cpu"
    try:
        with (
            warnings.catch_warnings(),
            torch.inference_mode(False),
            torch.enable_grad(),
            torch.device("cpu") if elsewhere else nullcontext(),
            _without_global_hooks(),
        ):
            warnings.simplefilter("ignore")
            yield
    finally:
        random.setstate(ours[0])
        np.random.set_state(ours[1])
        torch.set_rng_state(ours[2])


@contextmanager
def _without_global_hooks() -> Iterator[None]:
    tables: list[dict[int, Any]] = [
        private.global_optimizer_pre_hooks,
        private.global_optimizer_post_hooks,
    ]
    kept = [dict(table) for table in tables]
    for table in tables:
        table.clear()
    try:
        yield
    finally:
        for table, hooks in zip(tables, kept, strict=True):
            late = dict(table)
            table.clear()
            table.update(hooks | late)
