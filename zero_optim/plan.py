"""The plan of a set of parameter groups: owners and buckets, decided before the first step.

A plan is a pure function of what every rank sees alike (shapes, dtypes, strides, groups), so ranks
compute it apart and then compare `describe_params`.
"""

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from itertools import chain, pairwise
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn.parameter import is_lazy

from zero_optim.buckets import assign_buckets
from zero_optim.description import describe
from zero_optim.engine import wraps_tensors
from zero_optim.layout import Layout, whole
from zero_optim.partition import assign_owners

Group = dict[str, Any]
Cost = Callable[[Tensor], float]
CostName = Literal["numel", "matmul"]

# Keys of a group that describe its parameters; all others are options.
PARAM_KEYS = frozenset({"params", "param_names"})

# Extents start where a fresh CPU tensor would, so that kernels that look at alignment (MKL's matrix
# product does) give the bits they give without sharding.
ALIGNMENT_NBYTES = 64


# A step that works element by element is bound by memory: on one core of a CPU it takes, for each
# element, about the time in which a matrix product does this many floating-point operations.
_FLOPS_AN_ELEMENT = 100
_NEWTON_SCHULZ_STEPS = 5  # Muon's default


def numel_cost(param: Tensor) -> float:
    """Cost of an element-wise step, in floating-point operations of the same duration."""
    return _FLOPS_AN_ELEMENT * param.numel()


def matmul_cost(param: Tensor) -> float:
    """Cost of a step that orthogonalizes matrices by Newton-Schulz iterations, as Muon's does.

    For the m x n matrix (m <= n) that the parameter flattens to, an iteration multiplies m x n by
    n x m, m x m by m x m, and m x m by m x n: 4 m^2 n + 2 m^3 operations. Jordan, "Muon: An
    optimizer for hidden layers in neural networks", 2024. Vectors cost what their elements do.
    """
    if param.dim() < 2 or param.numel() == 0:
        return numel_cost(param)
    short, long = sorted((param.shape[0], param.numel() // param.shape[0]))
    return numel_cost(param) + _NEWTON_SCHULZ_STEPS * (4 * short**2 * long + 2 * short**3)


def cost_named(cost: CostName | Cost) -> Cost:
    """Find a cost function.

    Raises:
        ValueError: ``cost`` is neither a known name nor callable.
    """
    if callable(cost):
        return cost
    named: dict[str, Cost] = {"numel": numel_cost, "matmul": matmul_cost}
    if cost not in named:
        raise ValueError(
            f"expected cost to be one of {sorted(named)} or a function of a parameter, got {cost!r}"
        )
    return named[cost]


@dataclass(frozen=True, slots=True)
class BucketPlan:
    """Parameters that travel together, and where each lies.

    Args:
        params: indices of the parameters in the plan; the layout counts in this order.
        layout: rows and extents of the bucket.
    """

    params: tuple[int, ...]
    layout: Layout


@dataclass(frozen=True, slots=True)
class Plan:
    """Owner of every parameter, and the buckets, whose order is the order of issue.

    Args:
        costs: what owning each parameter costs.
        owners: group rank that owns each parameter.
        buckets: every parameter lies in exactly one.
    """

    costs: tuple[float, ...]
    owners: tuple[int, ...]
    buckets: tuple[BucketPlan, ...]

    def __post_init__(self) -> None:
        """Prove that the buckets hold every parameter once."""
        assert sorted(chain.from_iterable(b.params for b in self.buckets)) == list(range(len(self.owners)))


def make_plan(
    groups: Sequence[Sequence[Tensor]],
    costs: Sequence[Sequence[float]],
    num_ranks: int,
    cap_nbytes: int,
    loads: Sequence[float] | None = None,
) -> Plan:
    """Choose owners, then buckets. Does not communicate.

    Args:
        groups: parameters of each group.
        costs: what owning each costs, in the unit of the loads.
        num_ranks: size of the process group.
        cap_nbytes: capacity of a bucket in bytes.
        loads: costs the ranks carry already.
    """
    params = list(chain.from_iterable(groups))
    by_group = assign_owners(costs, num_ranks, loads)
    owners = tuple(chain.from_iterable(by_group))
    keys = _travel_keys(params)
    buckets = assign_buckets(keys, [p.numel() * p.element_size() for p in params], cap_nbytes)
    return Plan(
        tuple(chain.from_iterable(costs)),
        owners,
        tuple(_lay_out(bucket, params, owners) for bucket in buckets),
    )


def _lay_out(bucket: list[int], params: Sequence[Tensor], owners: Sequence[int]) -> BucketPlan:
    alignment = max(1, ALIGNMENT_NBYTES // params[bucket[0]].element_size())
    layout = whole([params[i].numel() for i in bucket], [owners[i] for i in bucket], alignment)
    return BucketPlan(tuple(bucket), layout)


def _travel_keys(params: Sequence[Tensor]) -> list[Hashable]:
    """Tell parameters apart that cannot, or should not, share a bucket.

    Parameters frozen from the start have buckets of their own, since those need no gather.
    """
    slots = _device_slots(params)
    return [(p.dtype, slots[p.device], p.requires_grad) for p in params]


def _device_slots(params: Sequence[Tensor]) -> dict[torch.device, int]:
    """Number the devices by first use: cuda:0 here and cuda:1 on the next rank are the same slot."""
    slots: dict[torch.device, int] = {}
    for param in params:
        slots.setdefault(param.device, len(slots))
    return slots


def dense_strides(param: Tensor) -> tuple[int, ...]:
    """Strides under which the elements fill ``numel`` places: the parameter's own if it is dense."""
    # The first answer is the second's for every contiguous tensor, at a fifth of the time.
    return param.stride() if param.is_contiguous() else torch.empty_like(param, device="meta").stride()


def consecutive_views(flat: Tensor, params: Sequence[Tensor]) -> list[Tensor]:
    """View parameters' places in a 1-D tensor that holds them one behind the other, with their strides."""
    views, start = [], flat.storage_offset()
    for param in params:
        views.append(flat.as_strided(param.shape, dense_strides(param), start))
        start += param.numel()
    return views


def params_of(groups: Sequence[Group]) -> list[Tensor]:
    """List all parameters, group by group."""
    return [param for group in groups for param in group["params"]]


def member_ids(groups: Sequence[Group]) -> list[list[int]]:
    """Tell the groups' members by identity: much faster to compare than tensors are to look up."""
    return [list(map(id, group["params"])) for group in groups]


def options_of(group: Group) -> Group:
    """Copy a group's options, without its parameters."""
    return {key: value for key, value in group.items() if key not in PARAM_KEYS}


def param_names(groups: Sequence[Group]) -> list[str]:
    """Name every parameter for messages: its own name where given, else group and place."""
    names: list[str] = []
    for number, group in enumerate(groups):
        given = group.get("param_names")
        for place, param in enumerate(group["params"]):
            known = f"'{given[place]}'" if given else f"{place} of group {number}"
            names.append(f"parameter {known} (shape {tuple(param.shape)})")
    return names


def describe_params(groups: Sequence[Group], plan: Plan) -> list[str]:
    """Describe each parameter by all that must be equal on every rank."""
    params = params_of(groups)
    slots = _device_slots(params)
    return [
        f"{name}, {p.dtype}, {p.device.type}[{slots[p.device]}], strides {dense_strides(p)}, "
        f"{'trainable' if p.requires_grad else 'frozen'}, owned by rank {owner}"
        for name, p, owner in zip(param_names(groups), params, plan.owners, strict=True)
    ]


def describe_options(groups: Sequence[Group]) -> list[str]:
    """Describe each group's options, so that ranks can compare them."""
    described = []
    for number, group in enumerate(groups):
        options = [f"{key}={describe(value)}" for key, value in group.items() if key not in PARAM_KEYS]
        described.append(f"group {number} with {', '.join(sorted(options)) or 'no options'}")
    return described


def check_shardable(groups: Sequence[Group]) -> None:
    """Refuse parameters that cannot be placed in a bucket.

    Args:
        groups: every parameter group of the optimizer, those planned before included.

    Raises:
        TypeError: a parameter without storage of its own (lazy, meta, DTensor).
        ValueError: a sparse parameter; two that share memory, or one that overlaps itself.
    """
    params = params_of(groups)
    if any(map(is_lazy, params)):
        raise TypeError(
            "a lazy parameter has no shape yet: run one forward pass before building the optimizer"
        )
    names = param_names(groups)
    for param, name in zip(params, names, strict=True):
        if _is_wrapper(param):
            raise TypeError(
                f"{name} is a {type(param).__name__}, which has no memory of its own (a DTensor is sharded "
                "already): give plain tensors"
            )
        if param.layout != torch.strided:
            raise ValueError(
                f"ZeroRedundancyOptimizer only supports dense parameters, but got {name}: {param.layout}. "
                "Only gradients may be sparse, as those of nn.Embedding(sparse=True)"
            )
        if param.device.type == "meta":
            raise TypeError(f"expected a parameter with storage, got {name} on {param.device}")
    _check_memory(params, names)


def _is_wrapper(param: Tensor) -> bool:
    return wraps_tensors(param)


def _check_memory(params: Sequence[Tensor], names: Sequence[str]) -> None:
    """Refuse parameters that reach into each other's memory: sharding would tear them apart."""
    spans: list[tuple[int, int, int]] = []  # (first byte, byte behind the last, index)
    for index, param in enumerate(params):
        if param.numel() == 0:
            continue
        reach = sum((size - 1) * stride for size, stride in zip(param.shape, param.stride(), strict=True)) + 1
        if reach < param.numel():
            raise ValueError(f"{names[index]} uses one place in memory for several elements: clone it first")
        spans.append((param.data_ptr(), param.data_ptr() + reach * param.element_size(), index))
    for (_, end, before), (start, _, after) in pairwise(sorted(spans)):
        if start < end:
            raise ValueError(
                f"{names[before]} and {names[after]} share memory. To tie weights, use one Parameter in both "
                "modules (model.parameters() then yields it once); else clone one of them"
            )
