"""An optimizer class and its options in a trial, as a cache key."""

import math
import weakref
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, TypeAlias, TypeVar

import torch
from torch import Tensor
from torch.optim import Optimizer

from zero_optim.plan.groups import ParamGroup

Builder: TypeAlias = Callable[..., Optimizer]
F = TypeVar("F", bound=Callable[..., Any])

# Options that choose an implementation; some need an accelerator.
_SWITCHES = ("capturable", "fused", "differentiable")
_NONE = (dict, ())  # `to_hashable` of no options
_AWAKE = 0.05  # in the place of a number that is zero
_NUM_EXACT_GROUPS = 4  # up to this many different groups are all tried; of more, one of each kind


@dataclass(slots=True)
class Held:
    """An option that cannot be copied; not hashable, so no cache has it."""

    value: Any

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
    """A class, held weakly, and its options; hashable if they are."""

    reference: Callable[[], Any]
    options: object
    groups: tuple[object, ...]

    @classmethod
    def of(
        cls, build: Builder, options: Mapping[str, Any], groups: Sequence[Mapping[str, Any]]
    ) -> "OptimizerUnderTest":
        """Make options hashable, including those of functools.partial."""
        function = getattr(build, "func", None)
        if callable(function) and not getattr(build, "args", True):
            return cls.of(function, {**build.keywords, **options}, groups)  # type: ignore[attr-defined]
        exact = {to_hashable(_awake(group)): None for group in groups}
        if len(exact) <= _NUM_EXACT_GROUPS:
            return cls(_reference(build), to_hashable(_awake(options)), tuple(exact))
        distinct = {_kind_of(group): to_hashable(_awake(group)) for group in reversed(groups)}
        return cls(_reference(build), to_hashable(_awake(options)), tuple(reversed(distinct.values())))

    @property
    def is_fused(self) -> bool:
        """Whether a kernel takes the whole step, split where plans cut; for subjects of `by_kernel`."""
        return all(self._fused())

    def _fused(self) -> list[bool]:
        options = from_hashable(self.options)
        return [bool({**options, **from_hashable(group)}.get("fused")) for group in self.groups or (_NONE,)]

    def by_kernel(self) -> "tuple[OptimizerUnderTest, ...]":
        """Split it into groups with a fused kernel and the others."""
        found = list(zip(self.groups or (_NONE,), self._fused(), strict=True))
        parts = (tuple(group for group, fused in found if fused is kind) for kind in (True, False))
        held = [part for part in parts if part]
        return (self,) if len(held) == 1 else tuple(replace(self, groups=part) for part in held)

    def awake(self, shape: tuple[int, ...], names: Collection[str] | None) -> "OptimizerUnderTest | None":
        """Replace numbers that hide arithmetic; None if there are none.

        Adding nothing, or a multiple by a power of two, rounds nothing. The class's defaults count too.
        ``shape``: a parameter that it takes; ``names``: the numbers that may change (None: all).
        """
        own = [from_hashable(group) for group in self.groups or (_NONE,)]
        built = self.build([[torch.zeros(shape, requires_grad=True)] for _ in own]).param_groups
        woken = [_woken(group, names) for group in built]
        groups = dict.fromkeys(to_hashable({**group, **more}) for group, more in zip(own, woken, strict=True))
        return replace(self, groups=tuple(groups)) if any(woken) else None

    def woken(self, asleep: "OptimizerUnderTest") -> str:
        """Return the names and values of numbers that `awake` changed."""
        before = [from_hashable(group) for group in asleep.groups or (_NONE,)]
        after = map(from_hashable, self.groups)
        changed = {
            f"{key}={value}"
            for group in after
            for key, value in group.items()
            if any(old.get(key) != value for old in before)
        }
        return ", ".join(sorted(changed))

    def build(self, params: Sequence[Sequence[Tensor]]) -> Optimizer:
        """Build the optimizer. Empty groups stay, as on a rank that owns none of them."""
        own = [from_hashable(group) for group in self.groups] or [{}]
        groups = [{**own[index % len(own)], "params": list(members)} for index, members in enumerate(params)]
        optimizer: Optimizer = self.reference()(groups, **from_hashable(self.options))
        switch_mode(optimizer, "train")
        return optimizer

    def candidates(self) -> "tuple[OptimizerUnderTest, ...]":
        """Return it, and the same without implementation options, which the CPU may lack."""
        options, *groups = (_without_switches(held) for held in (self.options, *self.groups))
        plain = replace(self, options=options, groups=tuple(groups))
        return (self,) if (options, tuple(groups)) == (self.options, self.groups) else (self, plain)


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


def _without_switches(held: object) -> object:
    options = from_hashable(held)
    return to_hashable({key: False if key in _SWITCHES and options[key] else options[key] for key in options})


def _reference(build: Builder) -> Callable[[], Any]:
    try:
        return weakref.ref(build)
    except TypeError:
        return Held(build)


def _awake(options: Mapping[str, Any]) -> ParamGroup:
    """Drop the parameters, and replace a zero rate, which hides differences."""
    kept = {key: value for key, value in options.items() if key not in ("params", "param_names")}
    rate = kept.get("lr")
    if isinstance(rate, int | float) and rate == 0:
        kept["lr"] = 0.01
    elif isinstance(rate, Tensor) and not rate.any():
        kept["lr"] = torch.full_like(rate, 0.01, device="cpu")
    return kept


def _woken(options: Mapping[str, Any], names: Collection[str] | None) -> ParamGroup:
    """Return other values for zeros, and for fractions and rates that are powers of two."""
    changed: ParamGroup = {}
    for key, value in options.items():
        if type(value) not in (int, float) or not (names is None or key in names):
            continue
        if value == 0:
            changed[key] = _AWAKE
        elif math.frexp(abs(value))[0] == 0.5 and (key == "lr" or type(value) is float):
            changed[key] = value * 0.7
    return changed


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
