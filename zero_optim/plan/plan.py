"""The plan of a set of parameter groups: owners and buckets, decided before the first step.

A plan is a pure function of what is equal on every rank (shapes, dtypes, strides, groups). So each rank
computes it alone, without communication. `shard.sharding` does that, and compares `describe_params`.
"""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from itertools import chain

import torch
from torch import Tensor

from zero_optim.plan.buckets import assign_buckets
from zero_optim.plan.groups import ParamGroup, param_names, params_of
from zero_optim.plan.layout import Layout, whole
from zero_optim.plan.memory import dense_strides
from zero_optim.plan.partition import assign_owners
from zero_optim.plan.pieces import Pieces, owned_by_text, whole_piece

# New CPU tensors start at such addresses, and so do extents. Some kernels look at the alignment (MKL's matrix
# product does): with the same alignment they give the same bits as without sharding.
ALIGNMENT_NBYTES = 64
# The same for other devices: CUDA's caching allocator gives memory in blocks of 512 bytes. PyTorch tells
# cuBLASLt how its operands are aligned, up to 256 bytes; it may choose another kernel for another alignment.
ACCELERATOR_ALIGNMENT_NBYTES = 512


@dataclass(frozen=True, slots=True)
class BucketPlan:
    """The parameters of one bucket, and where each lies.

    Args:
        params: indices of the parameters in the plan; the layout numbers them in this order.
        layout: rows and extents of the bucket.
    """

    params: tuple[int, ...]
    layout: Layout


@dataclass(frozen=True, slots=True)
class Plan:
    """Who owns what of every parameter, and the buckets in the order in which they are gathered.

    Args:
        costs: what owning each parameter costs.
        pieces: of each parameter, the rows that each of its owners has.
        buckets: every parameter is in exactly one.
    """

    costs: tuple[float, ...]
    pieces: tuple[Pieces, ...]
    buckets: tuple[BucketPlan, ...]

    def loads(self, num_ranks: int) -> list[float]:
        """Add up what owning its pieces costs each rank; that of a piece is the share of its rows."""
        loads: list[float] = [0] * num_ranks
        for cost, pieces in zip(self.costs, self.pieces, strict=True):
            rows = pieces[-1].stop
            for piece in pieces:
                loads[piece.owner] += cost if len(pieces) == 1 else cost * (piece.stop - piece.start) / rows
        return loads

    def __post_init__(self) -> None:
        """Check that the buckets hold every parameter once."""
        assert sorted(chain.from_iterable(b.params for b in self.buckets)) == list(range(len(self.pieces)))


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
        costs: what owning each parameter costs, in the unit of the loads.
        num_ranks: size of the process group.
        cap_nbytes: capacity of a bucket in bytes.
        loads: total cost of what each rank owns already; all zero if None.
    """
    params = list(chain.from_iterable(groups))
    by_group = assign_owners(costs, num_ranks, loads)
    owners = tuple(chain.from_iterable(by_group))
    keys = _travel_keys(params)
    buckets = assign_buckets(keys, [p.numel() * p.element_size() for p in params], cap_nbytes)
    return Plan(
        tuple(chain.from_iterable(costs)),
        tuple(whole_piece(owner, param.shape) for param, owner in zip(params, owners, strict=True)),
        tuple(_lay_out(bucket, params, owners) for bucket in buckets),
    )


def _lay_out(bucket: list[int], params: Sequence[Tensor], owners: Sequence[int]) -> BucketPlan:
    first = params[bucket[0]]
    nbytes = ALIGNMENT_NBYTES if first.device.type == "cpu" else ACCELERATOR_ALIGNMENT_NBYTES
    alignment = max(1, nbytes // first.element_size())
    layout = whole([params[i].numel() for i in bucket], [owners[i] for i in bucket], alignment)
    return BucketPlan(tuple(bucket), layout)


def _travel_keys(params: Sequence[Tensor]) -> list[Hashable]:
    """Give each parameter a key; only parameters with equal keys may share a bucket.

    Parameters that are frozen when planned have buckets of their own, since those need no gather.
    """
    slots = _device_slots(params)
    return [(p.dtype, slots[p.device], p.requires_grad) for p in params]


def _device_slots(params: Sequence[Tensor]) -> dict[torch.device, int]:
    """Number the devices by first use: cuda:0 on one rank and cuda:1 on the next are the same slot."""
    slots: dict[torch.device, int] = {}
    for param in params:
        slots.setdefault(param.device, len(slots))
    return slots


def describe_params(groups: Sequence[ParamGroup], plan: Plan) -> list[str]:
    """Describe each parameter by everything that must be equal on all ranks."""
    params = params_of(groups)
    slots = _device_slots(params)
    return [
        f"{name}, {p.dtype}, {p.device.type}[{slots[p.device]}], strides {dense_strides(p)}, "
        f"{'trainable' if p.requires_grad else 'frozen'}, {owned_by_text(pieces)}"
        for name, p, pieces in zip(param_names(groups), params, plan.pieces, strict=True)
    ]
