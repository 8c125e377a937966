"""Trial runs of a user's optimizer class on a few small tensors, for `traits` to compare.

A first run steps all parameters together and records the gradients it was given. Other runs get
the same gradients, but step the parameters one by one, in parts, or cut in pieces; they are
compared with the first bit by bit. Nothing here communicates, and `isolated` keeps it from
touching the process's own state.

Note [Gradients that trigger]
    An optimizer may couple parameters only under a condition, so gradients are chosen to meet
    conditions known of: a huge steady gradient (SWATS switches a whole group to SGD when two
    estimates agree), a norm far beyond any clipping threshold, gradients orthogonal to the weights
    (AdamP and SGDP project then), tiny and zero and missing ones, changing signs, weights of zero
    (LARS leaves them unscaled), and more steps than RAdam's warm-up and Ranger's look-ahead take.
"""

import random
import warnings
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias

import numpy as np
import torch
import torch.optim.optimizer as torch_optimizer_module
from torch import Tensor
from torch.optim import Optimizer

Group: TypeAlias = dict[str, Any]
Shape: TypeAlias = tuple[int, ...]
Builder: TypeAlias = Callable[..., Optimizer]

# Options that choose an implementation of the same algorithm. Some need an accelerator.
_SWITCHES = ("capturable", "fused", "differentiable")
_NUM_STEPS = 9
_NUM_EXACT_GROUPS = 4  # this many different groups are tried as they are; of more, one of each kind
# Larger than any clipping threshold or damping constant in use; its square is far from overflow.
_HUGE = 1e4
# (parameter, step) without a gradient: one, a whole group, and the one with the huge gradient.
_GAPS = frozenset({(1, 3), (1, 5), (3, 5), (5, 5), (0, 6)})
_STEP_OF_EVALUATION = 5


# ---------------------------------------------------------------------- options as values


@dataclass(slots=True)
class Held:
    """An option that cannot be copied, kept as it is; unhashable, so that no cache keeps it."""

    value: Any

    def __call__(self) -> Any:  # noqa: ANN401 - whatever it was
        """Stand in for a weak reference, where the object allows none."""
        return self.value


def frozen(value: object) -> object:
    """Turn an option into a hashable value that no one can change; see `thawed`."""
    if value is None or isinstance(value, bool | int | float | complex | str | torch.dtype | torch.device):
        return type(value), value
    if type(value) in (list, tuple):
        return type(value), tuple(frozen(item) for item in value)  # type: ignore[attr-defined]
    if type(value) is dict:
        return dict, tuple((key, frozen(item)) for key, item in value.items())
    if isinstance(value, Tensor) and not value.is_sparse:
        on_cpu = value.detach().cpu()
        return Tensor, on_cpu.dtype, tuple(on_cpu.shape), _bits(on_cpu)
    return Held(value)


def thawed(value: Any) -> Any:  # noqa: ANN401 - whatever it was
    """Give a fresh copy of a frozen option: a trial may change its own."""
    if isinstance(value, Held):
        return value.value
    if value[0] is Tensor:
        _, dtype, shape, bits = value
        return torch.frombuffer(bytearray(bits), dtype=dtype).reshape(shape) if bits else torch.empty(shape)
    if value[0] in (list, tuple):
        return value[0](thawed(item) for item in value[1])
    return {key: thawed(item) for key, item in value[1]} if value[0] is dict else value[1]


def _bits(tensor: Tensor) -> bytes:
    if tensor.dtype == torch.float32:
        return tensor.detach().numpy().tobytes()
    whole = tensor.detach().resolve_conj().resolve_neg().contiguous().reshape(-1)
    return whole.view(torch.uint8).numpy().tobytes() if whole.numel() else b""


@dataclass(frozen=True, slots=True)
class Subject:
    """What is tried: a class and its options, held without keeping the class alive.

    Hashable if its options are; equal for equal classes and options.
    """

    reference: Callable[[], Any]
    options: object
    groups: tuple[object, ...]

    @classmethod
    def of(cls, build: Builder, options: Mapping[str, Any], groups: Sequence[Mapping[str, Any]]) -> "Subject":
        """Freeze options; those bound by functools.partial count as options too."""
        function = getattr(build, "func", None)
        if callable(function) and not getattr(build, "args", True):
            return cls.of(function, {**build.keywords, **options}, groups)  # type: ignore[attr-defined]
        exact = {frozen(_awake(group)): None for group in groups}
        if len(exact) <= _NUM_EXACT_GROUPS:
            return cls(_reference(build), frozen(_awake(options)), tuple(exact))
        distinct = {_kind_of(group): frozen(_awake(group)) for group in reversed(groups)}
        return cls(_reference(build), frozen(_awake(options)), tuple(reversed(distinct.values())))

    def build(self, params: Sequence[Sequence[Tensor]]) -> Optimizer:
        """Build the optimizer; a group stays even if it has no parameter, as on a rank that owns none."""
        own = [thawed(group) for group in self.groups] or [{}]
        groups = [{**own[index % len(own)], "params": list(part)} for index, part in enumerate(params)]
        optimizer: Optimizer = self.reference()(groups, **thawed(self.options))
        switch_mode(optimizer, "train")
        return optimizer

    def without_switches(self) -> "Subject":
        """The same with implementation switches off: a CPU may lack what they choose."""
        options, *groups = (
            frozen(
                {key: False if key in _SWITCHES and value else value for key, value in thawed(part).items()}
            )
            for part in (self.options, *self.groups)
        )
        return replace(self, options=options, groups=tuple(groups))


def _reference(build: Builder) -> Callable[[], Any]:
    try:
        return weakref.ref(build)
    except TypeError:
        return Held(build)


def _awake(options: Mapping[str, Any]) -> Group:
    """Leave out the parameters, and replace a rate of zero (a warm-up's start): it would hide everything."""
    kept = {key: value for key, value in options.items() if key not in ("params", "param_names")}
    rate = kept.get("lr")
    if isinstance(rate, int | float) and rate == 0:
        kept["lr"] = 0.01
    elif isinstance(rate, Tensor) and not rate.any():
        kept["lr"] = torch.full_like(rate, 0.01, device="cpu")
    return kept


def _kind_of(group: Mapping[str, Any]) -> object:
    """Tell groups apart by their options, but numbers by sign alone: forty rates need not forty groups."""
    return tuple(
        (key, type(value), (value > 0, value < 0)) if type(value) in (int, float) else (key, repr(value))
        for key, value in sorted(_awake(group).items())
    )


# ---------------------------------------------------------------------- what is fed


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

    def with_groups(self, subject: Subject) -> "Feed":
        """Give every group of the subject a turn."""
        return replace(self, num_groups=max(self.num_groups, len(subject.groups)))

    @property
    def num_params(self) -> int:
        """How many parameters there are."""
        return max(len(self.shapes), self.num_in_group * self.num_groups)

    def shape(self, index: int) -> Shape:
        """The shape of a parameter."""
        return self.shapes[index % len(self.shapes)]

    def noise(self) -> list[Tensor]:
        """Fixed normal numbers, for each parameter one row a step and a last one for its start."""
        generator = torch.Generator().manual_seed(20)
        sizes = [torch.Size(self.shape(index)).numel() for index in range(self.num_params)]
        rows = torch.randn((self.num_steps + 1, sum(sizes)), generator=generator, dtype=torch.float32)
        return list(torch.split(rows, sizes, dim=1))

    def start(self, index: int, noise: Tensor) -> Tensor:
        """The first value of a parameter."""
        row = noise[-1]
        values = (row, row * 0, row * 1e-3, row, row.clamp(min=0), row)[index % 6]
        return values.reshape(self.shape(index)).to(self.dtype)

    def gradient(self, index: int, step: int, noise: Tensor, weights: Tensor) -> Tensor | None:
        """The gradient of one parameter at one step, given its present value."""
        if self.gaps and (index, step) in _GAPS:
            return None
        dense = self._dense(index % 6, step, noise, weights).reshape(weights.shape).to(self.dtype)
        if not self.sparse:
            return dense
        rows = torch.zeros_like(dense)  # one row: more would start threads, which cost a millisecond
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
    """Take out of each row its part along the weights; a vector is one row."""
    flat = rows.flatten(1) if rows.dim() > 1 else rows.reshape(1, -1)
    along = weights.detach().to(flat.dtype).reshape(flat.shape)
    share = (flat * along).sum(1, keepdim=True) / (along * along).sum(1, keepdim=True).clamp(min=1e-30)
    return flat - share * along


# ---------------------------------------------------------------------- one run


@dataclass(slots=True)
class Run:
    """One optimizer over some of the parameters, each whole or in pieces."""

    optimizer: Optimizer
    leaves: dict[int, list[Tensor]]

    def give(self, gradients: Mapping[int, Tensor | None]) -> None:
        """Set copies of gradients, cut as the parameters are: classes change them in place."""
        for index, gradient in gradients.items():
            pieces = self.leaves[index]
            if len(pieces) == 1 or gradient is None:
                for leaf in pieces:
                    leaf.grad = None if gradient is None else gradient.clone()
                continue
            parts = torch.split(gradient.reshape(-1), [leaf.numel() for leaf in pieces])
            for leaf, part in zip(pieces, parts, strict=True):
                leaf.grad = part.clone()

    def bits(self, index: int) -> bytes:
        """The present value of a parameter."""
        pieces = self.leaves[index]
        return _bits(pieces[0]) if len(pieces) == 1 else b"".join(_bits(leaf) for leaf in pieces)

    def state_of(self, index: int) -> list[Any]:
        """The state of each piece of a parameter."""
        return [self.optimizer.state.get(leaf, {}) for leaf in self.leaves[index]]

    def global_state(self) -> dict[Any, Any]:
        """State that belongs to no parameter."""
        held: dict[Any, Any] = self.optimizer.state
        return {key: value for key, value in held.items() if not isinstance(key, Tensor)}


def start(subject: Subject, feed: Feed, values: Mapping[int, Tensor], *, cut: bool = False) -> Run:
    """Build an optimizer over some parameters; the groups are the same whichever they are."""
    leaves = {index: _leaves(value, cut and (3 if index == 1 else 2)) for index, value in values.items()}
    groups: list[list[Tensor]] = [[] for _ in range(feed.num_groups)]
    for index, pieces in leaves.items():
        groups[index % feed.num_groups].extend(pieces)
    return Run(subject.build(groups), leaves)


def starts_of(feed: Feed, noise: list[Tensor] | None = None) -> dict[int, Tensor]:
    """The first values of all parameters."""
    numbers = feed.noise() if noise is None else noise
    return {index: feed.start(index, row) for index, row in enumerate(numbers)}


def _leaves(value: Tensor, num_pieces: int) -> list[Tensor]:
    """Cut where vector instructions would not; a third piece has a single element."""
    if not num_pieces:
        return [value.clone().requires_grad_()]
    middle = value.numel() * 3 // 8 | 1
    sizes = [middle, value.numel() - middle] if num_pieces == 2 else [middle, 1, value.numel() - middle - 1]
    return [piece.clone().requires_grad_() for piece in torch.split(value.reshape(-1), sizes)]


def step_whole(run: Run, step: int, gradients: Mapping[int, Tensor | None]) -> None:
    """Step everything; halfway, look at the model as an evaluation does, where the class has modes."""
    run.give(gradients)
    run.optimizer.step()
    if step == _STEP_OF_EVALUATION:
        switch_mode(run.optimizer, "eval")
        switch_mode(run.optimizer, "train")


def step_in_parts(run: Run, step: int, gradients: Mapping[int, Tensor | None]) -> None:
    """Step bucket by bucket, the last parameters first; a bucket's gradients arrive just before."""
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
    if step == _STEP_OF_EVALUATION:
        switch_mode(run.optimizer, "eval")
        switch_mode(run.optimizer, "train")


def switch_mode(optimizer: Optimizer, mode: str) -> None:
    """Call ``train()`` or ``eval()`` of classes that have modes, as schedule-free ones do."""
    method = getattr(optimizer, mode, None)
    if callable(method):
        method()


@dataclass(slots=True)
class Record:
    """A run of all parameters together: what it was given and what came out."""

    feed: Feed
    run: Run
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
        """Whether everything stayed finite: NaN would hide differences."""
        return all(bool(leaf.isfinite().all()) for (leaf,) in self.run.leaves.values())


def record(subject: Subject, feed: Feed) -> Record:
    """Run all parameters together, choosing the gradients on the way.

    Raises:
        Exception: whatever the class raises.
    """
    noise = feed.noise()
    starts = starts_of(feed, noise)
    run = start(subject, feed, starts)
    made = Record(feed, run, starts, values=[[run.bits(index) for index in starts]])
    before = _random_states()
    for step in range(feed.num_steps):
        weights = {index: leaf.detach() for index, (leaf,) in run.leaves.items()}
        given = {index: feed.gradient(index, step, noise[index], weights[index]) for index in weights}
        step_whole(run, step, given)
        made.gradients.append(given)
        made.values.append([run.bits(index) for index in starts])
    made.drew = before != _random_states()
    return made


# ---------------------------------------------------------------------- leaving no trace


def _random_states() -> tuple[object, ...]:
    name, words, *rest = np.random.get_state(legacy=True)
    return random.getstate(), (name, words.tobytes(), *rest), _bits(torch.get_rng_state())  # type: ignore[union-attr]


@contextmanager
def isolated() -> Iterator[None]:
    """Try things without a trace: random numbers, modes, hooks and warnings are as before afterwards.

    On the CPU whatever the default device, outside ``no_grad`` and ``inference_mode``.
    """
    ours = random.getstate(), np.random.get_state(), torch.get_rng_state()
    elsewhere = torch.get_default_device().type != "cpu"
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
    """Silence hooks registered for the steps of every optimizer: a trial is no step of the user's."""
    tables: list[dict[int, Any]] = [
        torch_optimizer_module._global_optimizer_pre_hooks,
        torch_optimizer_module._global_optimizer_post_hooks,
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
