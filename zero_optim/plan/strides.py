"""Memory layout of parameters, and whether they fit in a bucket."""

import math
from collections.abc import Collection, Sequence
from itertools import pairwise

import torch
from torch import Tensor
from torch.nn.parameter import is_lazy

from zero_optim.compat.autograd import wraps_tensors
from zero_optim.plan.groups import ParamGroup, param_names, params_of

# The attribute with a whole unit parameter's strides.
STRIDES_WHEN_WHOLE = "_zero_optim_strides"
# The attribute with the owners' dtype, if it differs.
DTYPE_AS_KEPT = "_zero_optim_dtype"


def kept_dtype(param: Tensor) -> torch.dtype:
    """Return the owners' dtype of a parameter; a unit may compute in another."""
    known: torch.dtype | None = getattr(param, DTYPE_AS_KEPT, None)
    return param.dtype if known is None else known


def dense_strides(param: Tensor) -> tuple[int, ...]:
    """Return strides without gaps: a dense parameter's own, or a whole unit's."""
    known: tuple[int, ...] | None = getattr(param, STRIDES_WHEN_WHOLE, None)
    if known is not None:
        return known
    # Both give the same for a contiguous tensor; the first takes a fifth of the time.
    return param.stride() if param.is_contiguous() else torch.empty_like(param, device="meta").stride()


def contiguous_strides(shape: Sequence[int]) -> tuple[int, ...]:
    """Return the strides of a contiguous tensor of a shape."""
    return torch.empty(tuple(shape), device="meta").stride()


def in_order_of_memory(tensor: Tensor, strides: Sequence[int]) -> Tensor:
    """View a tensor as 1-D, in the memory order of dense strides; a copy if it has others."""
    if tensor.stride() != strides:
        copy = torch.empty_strided(tensor.shape, strides, dtype=tensor.dtype, device=tensor.device)
        tensor = copy.copy_(tensor)
    return tensor.as_strided((tensor.numel(),), (1,), tensor.storage_offset())


def strides_of_rows(strides: Sequence[int], num_rows: int, shape: Sequence[int]) -> tuple[int, ...]:
    """Return dense strides for a shape, in the dimension order of a dense tensor with other rows."""
    row = max(1, math.prod(shape[1:]))
    if num_rows == 1 or strides[0] >= row:
        return (row, *strides[1:])
    dense, end = [0] * len(shape), 1
    for dim in sorted(range(len(shape)), key=lambda dim: (strides[dim], -dim)):
        dense[dim] = end
        end *= max(1, shape[dim])
    return tuple(dense)


def consecutive_views(flat: Tensor, params: Sequence[Tensor]) -> list[Tensor]:
    """View consecutive parameters in a 1-D tensor, with their strides."""
    views, start = [], flat.storage_offset()
    for param in params:
        views.append(flat.as_strided(param.shape, dense_strides(param), start))
        start += param.numel()
    return views


def check_shardable(
    groups: Sequence[ParamGroup], apart: Collection[Tensor] = (), held: Collection[Tensor] = ()
) -> None:
    """Refuse parameters that cannot be in a bucket: TypeError or ValueError.

    ``apart``: those without memory now. ``held``: those of which somebody else keeps rows.
    """
    params = params_of(groups)
    if any(map(is_lazy, params)):
        raise TypeError(
            "a lazy parameter has no shape yet: run one forward pass before building the optimizer"
        )
    names = param_names(groups)
    for param, name in zip(params, names, strict=True):
        if wraps_tensors(param) and param not in held:
            raise TypeError(
                f"{name} is a {type(param).__name__}, which has no memory of its own: give plain tensors, or "
                "DTensors of fully_shard"
            )
        if param.layout != torch.strided:
            raise ValueError(
                f"ZeroRedundancyOptimizer only supports dense parameters, but got {name}: {param.layout}. "
                "Only gradients may be sparse, as those of nn.Embedding(sparse=True)"
            )
        if param.device.type == "meta":
            raise TypeError(f"expected a parameter with storage, got {name} on {param.device}")
    named = zip(params, names, strict=True)
    _check_memory([(param, name) for param, name in named if param not in apart and param not in held])


def _check_memory(named: Sequence[tuple[Tensor, str]]) -> None:
    ranges: list[tuple[int, int, str]] = []  # (first byte, byte after the last, name)
    for param, name in named:
        if param.numel() == 0:
            continue
        reach = sum((size - 1) * stride for size, stride in zip(param.shape, param.stride(), strict=True)) + 1
        if reach < param.numel():
            raise ValueError(f"{name} uses one place in memory for several elements: clone it first")
        ranges.append((param.data_ptr(), param.data_ptr() + reach * param.element_size(), name))
    for (_, end, before), (start, _, after) in pairwise(sorted(ranges)):
        if start < end:
            raise ValueError(
                f"{before} and {after} share memory. To tie weights, use one Parameter in both "
                "modules (model.parameters() then yields it once); else clone one of them"
            )
