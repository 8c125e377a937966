"""An optimizer class and its options in a trial, as a cache key."""

import math
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import islice
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.optim import Optimizer

from zero_optim.plan.groups import ParamGroup

F = TypeVar("F", bound=Callable[..., Any])

# Options that choose an implementation; some need an accelerator.
_SWITCHES = ("capturable", "fused", "differentiable")
_AWAKE = 0.05  # in the place of a number that is zero
_NUM_EXACT_GROUPS = 4  # up to this many different groups are all tried; of more, one of each kind


@dataclass(slots=True, eq=False)
class Held:
    """An option that cannot be copied; equal to one of the same object. Not hashable, so no cache has it."""

    value: Any
    __hash__ = None  # type: ignore[assignment]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Held) and self.value is other.value

    def __call__(self) -> Any:  # noqa: ANN401 - whatever it was
        """Return the object, as a weak reference would."""
        return self.value


def to_hashable(value: object) -> object:
    """Convert an option to an immutable, hashable value; `from_hashable` reverses it."""
    if value is None or isinstance(value, bool | int | float | complex | str | torch.dtype | torch.device):
        return type(value), value
    if type(value) in (list, tuple):
        return type(value), tuple(to_hashable(item) for item in value)  # type: ignore[attr-defined]
    if type(value) is dict:
        return dict, tuple((key, to_hashable(item)) for key, item in value.items())
    if isinstance(value, Tensor) and not value.is_sparse:
        on_cpu = value.detach().cpu()
        return Tensor, on_cpu.dtype, tuple(on_cpu.shape), bits(on_cpu)
    return Held(value)


def from_hashable(value: Any) -> Any:  # noqa: ANN401 - whatever it was
    """Return a new copy of the option, for a trial to change."""
    if isinstance(value, Held):
        return value.value
    if value[0] is Tensor:
        _, dtype, shape, held = value
        return torch.frombuffer(bytearray(held), dtype=dtype).reshape(shape) if held else torch.empty(shape)
    if value[0] in (list, tuple):
        return value[0](from_hashable(item) for item in value[1])
    return {key: from_hashable(item) for key, item in value[1]} if value[0] is dict else value[1]


def bits(tensor: Tensor) -> bytes:
    """Return a tensor's elements in order, as bytes."""
    if tensor.dtype == torch.float32:
        return tensor.detach().numpy().tobytes()
    whole = tensor.detach().resolve_conj().resolve_neg().contiguous().reshape(-1)
    return whole.view(torch.uint8).numpy().tobytes() if whole.numel() else b""


@dataclass(frozen=True, slots=True)
class OptimizerUnderTest:
    """A class, held weakly, its options, and those of at least one group; hashable if they are."""

    reference: Callable[[], Any]
    options: object
    groups: tuple[object, ...]

    @property
    def is_fused(self) -> bool:
        """Whether a kernel takes the whole step of each group, split where plans cut."""
        options = from_hashable(self.options)
        return all({**options, **from_hashable(group)}.get("fused") for group in self.groups)

    def awake(
        self, shape: tuple[int, ...], names: Collection[str] | None
    ) -> "tuple[OptimizerUnderTest, str] | None":
        """Replace zeros and powers of two, which hide rounding, and name the changes; None if none."""
        own = [from_hashable(group) for group in self.groups]
        changes: set[str] = set()
        built = self.build([[torch.zeros(shape, requires_grad=True)] for _ in own]).param_groups
        for options, group in zip(own, built, strict=True):
            for key, value in group.items():
                if type(value) not in (int, float) or not (names is None or key in names):
                    continue
                is_power = math.frexp(abs(value))[0] == 0.5 and (key == "lr" or type(value) is float)
                if value == 0 or is_power:
                    options[key] = value * 0.7 or _AWAKE
                    changes.add(f"{key}={options[key]}")
        groups = tuple(_distinct(map(to_hashable, own)))
        return (replace(self, groups=groups), ", ".join(sorted(changes))) if changes else None

    def build(self, params: Sequence[Sequence[Tensor]]) -> Optimizer:
        """Build the optimizer. Empty groups stay, as on a rank that owns none of them."""
        own = [from_hashable(group) for group in self.groups]
        groups = [{**own[index % len(own)], "params": list(members)} for index, members in enumerate(params)]
        optimizer: Optimizer = self.reference()(groups, **from_hashable(self.options))
        switch_mode(optimizer, "train")
        return optimizer

    def candidates(self) -> "tuple[OptimizerUnderTest, ...]":
        """Return it, and the same without implementation options, which the CPU may lack."""
        every = map(from_hashable, (self.options, *self.groups))
        off = ({k: False if k in _SWITCHES and v else v for k, v in each.items()} for each in every)
        options, *groups = map(to_hashable, off)
        plain = replace(self, options=options, groups=tuple(groups))
        return (self,) if plain == self else (self, plain)


def under_test(
    build: Callable[..., Optimizer], options: Mapping[str, Any], groups: Sequence[Mapping[str, Any]] = ()
) -> OptimizerUnderTest:
    """Make options hashable, including those of functools.partial."""
    function = getattr(build, "func", None)
    if callable(function) and not getattr(build, "args", True):
        return under_test(function, {**build.keywords, **options}, groups)  # type: ignore[attr-defined]
    try:
        reference: Callable[[], Any] = weakref.ref(build)
    except TypeError:
        reference = Held(build)
    distinct = _distinct(to_hashable(_awake(group)) for group in groups or [{}])
    chosen = tuple(islice(distinct, _NUM_EXACT_GROUPS + 1))
    if len(chosen) > _NUM_EXACT_GROUPS:
        of_kind = {_kind_of(group): to_hashable(_awake(group)) for group in reversed(groups)}
        chosen = tuple(_distinct(reversed(of_kind.values())))
    return OptimizerUnderTest(reference, to_hashable(_awake(options)), chosen)


def remembered(function: F) -> F:
    """Cache a function of a subject, by options and a weak reference to the class."""
    cached: Any = lru_cache(maxsize=4096)(function)

    def call(subject: OptimizerUnderTest, *args: object) -> Any:  # noqa: ANN401
        try:
            hash(subject)
        except TypeError:  # an option that cannot be copied may change
            return function(subject, *args)
        return cached(subject, *args)

    answer: F = call  # type: ignore[assignment]
    return answer


def _distinct(groups: Iterable[object]) -> Iterator[object]:
    """Yield groups that differ, in order; some cannot be hashed."""
    seen = list[object]()
    for group in groups:
        if group not in seen:
            seen.append(group)
            yield group


def _awake(options: Mapping[str, Any]) -> ParamGroup:
    """Drop the parameters, and replace a zero rate, which hides differences."""
    options_kept = {key: value for key, value in options.items() if key not in ("params", "param_names")}
    rate = options_kept.get("lr")
    if isinstance(rate, int | float) and rate == 0:
        options_kept["lr"] = 0.01
    elif isinstance(rate, Tensor) and not rate.any():
        options_kept["lr"] = torch.full_like(rate, 0.01, device="cpu")
    return options_kept


def _kind_of(group: Mapping[str, Any]) -> object:
    """Return a group's options with only the signs of numbers, to limit the trial groups."""
    return tuple(
        (key, type(value), (value > 0, value < 0)) if type(value) in (int, float) else (key, repr(value))
        for key, value in sorted(_awake(group).items())
    )


def switch_mode(optimizer: Optimizer, mode: str) -> None:
    """Call an optimizer's ``train()`` or ``eval()``, if any."""
    method = getattr(optimizer, mode, None)
    if callable(method):
        method()
