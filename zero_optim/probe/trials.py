"""Trial runs of an optimizer class on a few small tensors.

The first trial steps all parameters together and records gradients and results. A `Variant` of it deals them
out otherwise (alone, in parts, cut into pieces), and must give the same bits.

Note [Gradients that trigger]
    Some optimizers couple parameters only under a condition. So gradients meet all known ones: a huge
    constant gradient (SWATS switches a group to SGD when two estimates agree), a norm above any clipping
    threshold, gradients orthogonal to the weights (AdamP and SGDP project), tiny, zero and missing ones,
    changing signs, zero weights (LARS does not scale them), and more steps than RAdam's warm-up and Ranger's
    look-ahead need. Sparse gradients with several entries for a row show whether a class coalesces them.
"""

import math
import random
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any, Literal, TypeAlias

import numpy as np
import torch
from torch import Tensor
from torch.optim import Optimizer

from zero_optim.compat import private
from zero_optim.errors import message_of
from zero_optim.plan.pieces import Piece
from zero_optim.probe.subject import OptimizerUnderTest, bits, switch_mode

Shape: TypeAlias = tuple[int, ...]
Gradients: TypeAlias = Mapping[int, Tensor | None]
Cut: TypeAlias = Callable[[int, Tensor], Sequence[Tensor]]  # cuts a parameter's value, given its index
Take: TypeAlias = Callable[[Tensor, Piece], Tensor]  # returns rows of a sparse gradient

# Above any clipping threshold or damping constant in use; its square is far from overflow.
_HUGE = 1e4
# (parameter, step) without a gradient: one, a whole group, and that with the huge gradient.
_GAPS = frozenset({(1, 3), (1, 5), (3, 5), (5, 5), (0, 6)})
_STEP_OF_EVALUATION = 5
# Of a gradient with several for a row; sorting that many does not keep the order of those for one row.
_NUM_ENTRIES = 300
# In cuts by rows, pieces start at multiples of so many bytes, as in a plan.
_ALIGNMENT_NBYTES = 64


@dataclass(frozen=True, slots=True)
class Feed:
    """Parameters and gradients of a trial. See Note [Gradients that trigger]."""

    shapes: tuple[Shape, ...]
    gaps: bool = True  # some gradients are None on some steps
    sparse: Literal["", "one row", "many entries"] = ""
    num_groups: int = 2
    num_in_group: int = 2  # at least
    num_steps: int = 9
    dtype: torch.dtype = torch.float32
    huge: float = _HUGE

    def with_groups(self, subject: OptimizerUnderTest) -> "Feed":
        """Return a feed with enough parameters for every group."""
        return replace(self, num_groups=max(self.num_groups, len(subject.groups)))

    def of_one(self, *shapes: Shape, num_steps: int | None = None) -> "Feed":
        """Return a feed of these shapes alone, without gaps."""
        steps = self.num_steps if num_steps is None else num_steps
        return replace(self, shapes=shapes, gaps=False, num_groups=1, num_in_group=1, num_steps=steps)

    def with_rows(self) -> "Feed":
        """Return a feed with parameters long enough for `by_rows`."""
        apart = [_rows_apart(torch.empty(shape, dtype=self.dtype, device="meta")) for shape in self.shapes]
        longer = ((2 * rows + shape[0], *shape[1:]) for rows, shape in zip(apart, self.shapes, strict=True))
        return replace(self, shapes=tuple(longer))

    def shape(self, index: int) -> Shape:
        """Return a parameter's shape."""
        return self.shapes[index % len(self.shapes)]

    def noise(self) -> list[Tensor]:
        """Return fixed normal numbers: a row for each step of a parameter, the last for its start."""
        num_params = max(len(self.shapes), self.num_in_group * self.num_groups)
        sizes = [math.prod(self.shape(index)) for index in range(num_params)]
        generator = torch.Generator().manual_seed(20)
        rows = torch.randn((self.num_steps + 1, sum(sizes)), generator=generator, dtype=torch.float32)
        return list(torch.split(rows, sizes, dim=1))

    def starts(self, noise: Sequence[Tensor]) -> dict[int, Tensor]:
        """Return the first values of all parameters."""
        values = {}
        for index, of_param in enumerate(noise):
            row = of_param[-1]
            value = (row, row * 0, row * 1e-3, row, row.clamp(min=0), row)[index % 6]
            values[index] = value.reshape(self.shape(index)).to(self.dtype)
        return values

    def gradient(self, index: int, step: int, noise: Tensor, weights: Tensor) -> Tensor | None:
        """Return a parameter's gradient at a step, from its current value."""
        if self.gaps and (index, step) in _GAPS:
            return None
        if self.sparse == "many entries":
            return self._entries(index, step)
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
            flat = row.reshape(weights.shape) if weights.dim() > 1 else row.reshape(1, -1)
            flat = flat.flatten(1)
            along = weights.detach().to(flat.dtype).reshape(flat.shape)
            factor = (flat * along).sum(1, keepdim=True) / (along * along).sum(1, keepdim=True).clamp(1e-30)
            row = flat - factor * along  # orthogonal to the weights, or to their rows
        elif kind == 4:
            row = row.clamp(min=0) * (0 if step == 4 else 3)
        spike = self.huge**2 if step == 7 and kind > 3 else 1.0
        return row * (spike * {6: 1e-6, 7: 30.0}.get(step, 1.0))

    def _entries(self, index: int, step: int) -> Tensor:
        """Return a sparse gradient with half of its entries in one row; the last one coalesced."""
        shape, generator = self.shape(index), torch.Generator().manual_seed(20 + 100 * index + step)
        rows = torch.randint(shape[0], (1, _NUM_ENTRIES), generator=generator)
        rows[0, ::2] = rows[0, 0].clone()
        values = torch.randn((_NUM_ENTRIES, *shape[1:]), generator=generator, dtype=torch.float32)
        gradient = torch.sparse_coo_tensor(rows, values.to(self.dtype), shape, check_invariants=False)
        return gradient.coalesce() if step == self.num_steps - 1 else gradient


@dataclass(frozen=True, slots=True)
class Variant:
    """How a trial deals out the parameters that were recorded together."""

    how: str  # for the reason
    only: Collection[int] | None = None  # the parameters that the optimizer has; None: all
    cut: Cut | None = None
    take: Take | None = None  # for sparse gradients of cut parameters
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
            if self.variant.take is None:
                parts: Sequence[Tensor] = torch.split(gradient.reshape(-1), sizes)
            else:
                ends = np.cumsum([0, *map(len, pieces)]).tolist()
                parts = [self.variant.take(gradient, Piece(0, *rows)) for rows in pairwise(ends)]
            for leaf, part in zip(pieces, parts, strict=True):
                leaf.grad = part.clone() if part.is_sparse else part.reshape(leaf.shape).clone()

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


def by_rows(index: int, value: Tensor) -> Sequence[Tensor]:
    """Cut between rows, as a plan does; the second parameter in three pieces."""
    step = _rows_apart(value)
    sizes = [step, step, len(value) - 2 * step] if index == 1 else [step, len(value) - step]
    return torch.split(value, sizes)


def below_vectors(_: int, value: Tensor) -> Sequence[Tensor]:
    """Cut between rows into pieces below two vectors of 64 bytes."""
    row_nbytes = value.element_size() * value.numel() // len(value)
    return torch.split(value, max(1, (2 * _ALIGNMENT_NBYTES - 1) // row_nbytes))


def _rows_apart(value: Tensor) -> int:
    row_nbytes = value.element_size() * value.numel() // len(value)
    return math.lcm(row_nbytes, _ALIGNMENT_NBYTES) // row_nbytes


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


def record(subject: OptimizerUnderTest, feed: Feed) -> TrialRecord:
    """Run all parameters together and record; raises the class's errors."""
    noise = feed.noise()
    starts = feed.starts(noise)
    run = start(subject, feed, starts)
    trial = TrialRecord(subject, feed, run, starts, values=[[run.bits(index) for index in starts]])
    before = _random_states()
    for step in range(feed.num_steps):
        weights = {index: leaf.detach() for index, (leaf,) in run.leaves.items()}
        grads = {index: feed.gradient(index, step, noise[index], weights[index]) for index in weights}
        run.step(step, grads)
        trial.gradients.append(grads)
        trial.values.append([run.bits(index) for index in starts])
    trial.drew = before != _random_states()
    return trial


def first_record(subject: OptimizerUnderTest, *feeds: Feed) -> TrialRecord | list[str]:
    """Record the first feed that the class accepts, also as another candidate; or return errors."""
    errors: list[str] = []
    for candidate in subject.candidates():
        for feed in feeds:
            try:
                return record(candidate, feed.with_groups(candidate))
            except Exception as error:  # noqa: BLE001 - the user's class may raise anything
                errors.append(first_line_of(error))
    return errors


def recorded(subject: OptimizerUnderTest, feed: Feed) -> TrialRecord | None:
    """Record one feed; None if the class raises."""
    try:
        return record(subject, feed.with_groups(subject))
    except Exception:  # noqa: BLE001 - the user's class may raise anything
        return None


def first_line_of(error: Exception) -> str:
    """Return an error's name and first line."""
    first_line = (message_of(error).splitlines() or [""])[0]
    return f"{type(error).__name__}: {first_line}"


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
