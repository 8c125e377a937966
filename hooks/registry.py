"""Make hooks by name, with options from a command line: ``--hook power_sgd --hook-opt rank=2``."""

import inspect
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from zero_optim.hooks.allreduce import allreduce_hook
from zero_optim.hooks.bucket import GradBucket, Hook
from zero_optim.hooks.compress import (
    bf16_compress_hook,
    bf16_compress_wrapper,
    fp16_compress_hook,
    fp16_compress_wrapper,
)
from zero_optim.hooks.debug import LoggingState, logging_hook, noop_hook
from zero_optim.hooks.local_sgd import PostLocalSGDState, post_localSGD_hook
from zero_optim.hooks.power_sgd import PowerSGDState, batched_powerSGD_hook, powerSGD_hook
from zero_optim.hooks.quantize import (
    GROUP_SIZE,
    quantization_perchannel_hook,
    quantization_pertensor_hook,
)
from zero_optim.hooks.top_k import TopKState, topk_hook

Option = int | float | bool | str
OptionalGroup = dist.ProcessGroup | None


class HookChoice(NamedTuple):
    """What ``register_comm_hook`` takes.

    Attributes:
        state: the hook's first argument.
        hook: the hook.
    """

    state: Any
    hook: Hook


def make_hook(name: str, process_group: OptionalGroup = None, **options: Option) -> HookChoice:
    """Make a hook and its state by name: ``ddp.register_comm_hook(*make_hook("power_sgd", rank=2))``.

    All ranks call. Only ``post_local_sgd`` communicates here: it makes subgroups.

    Args:
        name: one of `hook_names`.
        process_group: the ranks that average; None stands for the default group.
        **options: see `hook_options`. Text, as from a command line, is converted.

    Raises:
        ValueError: no such hook, no such option, or a wrong value.
    """
    factory = _entry(name).factory
    known = hook_options(name)
    unknown = sorted(options.keys() - known.keys())
    if unknown:
        raise ValueError(
            f"hook {name!r} has no option {', '.join(map(repr, unknown))}: it has {', '.join(known)}"
        )
    converted = {key: _convert(f"{name}.{key}", value, type(known[key])) for key, value in options.items()}
    wrap, log = converted.pop("wrap", "none"), converted.pop("log", False)
    choice = factory(process_group, **converted)
    hook = _wrapper(str(wrap))(choice.hook)
    return (
        HookChoice(LoggingState(choice.state), logging_hook(hook)) if log else HookChoice(choice.state, hook)
    )


def hook_names() -> list[str]:
    """List the names that `make_hook` knows."""
    return list(_ENTRIES)


def hook_options(name: str) -> dict[str, Option]:
    """Return the options of a hook with their defaults. Every hook has ``wrap`` and ``log``.

    Args:
        name: one of `hook_names`.

    Raises:
        ValueError: no such hook.
    """
    parameters = inspect.signature(_entry(name).factory).parameters.values()
    own = {p.name: p.default for p in parameters if p.kind is p.KEYWORD_ONLY}
    return {**own, "wrap": "none", "log": False}


def hook_summary(name: str) -> str:
    """Say in one line what a hook does.

    Args:
        name: one of `hook_names`.

    Raises:
        ValueError: no such hook.
    """
    return _entry(name).summary


def parse_hook_options(pairs: Iterable[str]) -> dict[str, str]:
    """Split ``key=value`` texts of a command line; `make_hook` converts the values.

    Raises:
        ValueError: a text without ``=``, or a key given twice.
    """
    options: dict[str, str] = {}
    for pair in pairs:
        key, equals, value = pair.partition("=")
        if not equals or not key:
            raise ValueError(f"expected a hook option as name=value, got {pair!r}")
        if key in options:
            raise ValueError(f"hook option {key!r} is given twice: {options[key]!r} and {value!r}")
        options[key.strip().replace("-", "_")] = value.strip()
    return options


def _entry(name: str) -> "_Entry":
    if name not in _ENTRIES:
        raise ValueError(f"expected one of the hooks {', '.join(_ENTRIES)}, got {name!r}")
    return _ENTRIES[name]


def _wrapper(wrap: str) -> Callable[[Hook], Hook]:
    wrappers: dict[str, Callable[[Hook], Hook]] = {
        "none": lambda hook: hook,
        "fp16": fp16_compress_wrapper,
        "bf16": bf16_compress_wrapper,
    }
    if wrap not in wrappers:
        raise ValueError(f"expected wrap to be one of {', '.join(wrappers)}, got {wrap!r}")
    return wrappers[wrap]


def _convert(name: str, value: Option, kind: type) -> Option:
    """Convert text, or a number, to an option's type."""
    try:
        if kind is bool:
            return {"true": True, "1": True, "yes": True, "false": False, "0": False, "no": False}[
                str(value).lower()
            ]
        if kind is int and isinstance(value, float) and not value.is_integer():
            raise ValueError(value)
        converted: Option = kind(value)
    except (KeyError, ValueError, TypeError):
        raise ValueError(f"expected hook option {name} to be {_article(kind)}, got {value!r}") from None
    return converted


def _article(kind: type) -> str:
    return {bool: "true or false", int: "a whole number", float: "a number"}.get(kind, "text")


def _stateless(hook: Hook, process_group: OptionalGroup) -> HookChoice:
    return HookChoice(process_group, hook)


def _quantize_channel(process_group: OptionalGroup, *, group_size: int = GROUP_SIZE) -> HookChoice:
    if group_size < 1:
        raise ValueError(f"expected a group_size of at least 1 element, got {group_size}")

    def quantized(state: OptionalGroup, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
        return quantization_perchannel_hook(state, bucket, group_size)

    quantized.__name__ = quantized.__qualname__ = f"quantization_perchannel_{group_size}_hook"
    return HookChoice(process_group, quantized)


def _power_sgd(  # noqa: PLR0913 - an argument for each option
    hook: Hook,
    process_group: OptionalGroup,
    *,
    rank: int = 1,
    start: int = 0,
    min_rate: float = 2.0,
    error_feedback: bool = True,
    warm_start: bool = True,
    epsilon: float = 0.0,
    seed: int = 0,
    stats_every: int = 10_000,
) -> HookChoice:
    state = PowerSGDState(
        process_group,
        matrix_approximation_rank=rank,
        start_powerSGD_iter=start,
        min_compression_rate=min_rate,
        use_error_feedback=error_feedback,
        warm_start=warm_start,
        orthogonalization_epsilon=epsilon,
        random_seed=seed,
        compression_stats_logging_frequency=stats_every,
    )
    return HookChoice(state, hook)


def _top_k(
    process_group: OptionalGroup, *, ratio: float = 0.01, start: int = 0, error_feedback: bool = True
) -> HookChoice:
    state = TopKState(process_group, ratio=ratio, start_iter=start, use_error_feedback=error_feedback)
    return HookChoice(state, topk_hook)


def _post_local_sgd(process_group: OptionalGroup, *, start: int = 0, subgroup_size: int = 0) -> HookChoice:
    subgroup = _subgroup(subgroup_size, process_group) if subgroup_size else None
    state = PostLocalSGDState(process_group, subgroup, start, subgroup is not None)
    return HookChoice(state, post_localSGD_hook)


def _subgroup(size: int, process_group: OptionalGroup) -> OptionalGroup:
    """Divide the group into subgroups of ``size`` ranks, in order, and return the one of this rank."""
    mine: OptionalGroup = dist.new_subgroups(size, group=process_group)[0]  # type: ignore[no-untyped-call]
    return mine


@dataclass(frozen=True, slots=True)
class _Entry:
    summary: str
    factory: Callable[..., HookChoice]  # its keyword-only arguments are the options


_ENTRIES: Mapping[str, _Entry] = MappingProxyType(
    {
        "allreduce": _Entry("the plain mean", partial(_stateless, allreduce_hook)),
        "fp16": _Entry("the mean in float16", partial(_stateless, fp16_compress_hook)),
        "bf16": _Entry("the mean in bfloat16", partial(_stateless, bf16_compress_hook)),
        "quantize_tensor": _Entry(
            "8 bits an element, one scale a bucket", partial(_stateless, quantization_pertensor_hook)
        ),
        "quantize_channel": _Entry("8 bits an element, a scale for each group of them", _quantize_channel),
        "power_sgd": _Entry("each matrix as a product of two thin ones", partial(_power_sgd, powerSGD_hook)),
        "batched_power_sgd": _Entry(
            "each bucket as a product of two thin matrices", partial(_power_sgd, batched_powerSGD_hook)
        ),
        "top_k": _Entry("the largest elements alone", _top_k),
        "post_local_sgd": _Entry("the mean at first, then that of subgroups, or none", _post_local_sgd),
        "noop": _Entry("nothing: every rank keeps its own gradients", partial(_stateless, noop_hook)),
    }
)
