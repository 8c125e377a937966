"""The plan of parameter groups: owners and buckets, computed alike on every rank.

Note [Order of gathers]
    Buckets are filled in backward order and gathered in forward order, so a forward pass can begin after the
    first gather. A parameter's relative place in its group tells when it is needed, as groups often divide
    each layer.
"""

import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, chain, pairwise

import torch
from torch import Tensor

from zero_optim.plan.cuts import Planned, choose_rows
from zero_optim.plan.groups import ParamGroup, param_names, params_of
from zero_optim.plan.layout import Layout
from zero_optim.plan.partition import RankLoads, assign_buckets
from zero_optim.plan.pieces import Pieces, owned_by_text, whole_piece
from zero_optim.plan.strides import dense_strides, kept_dtype

# The alignment of new CPU tensors: some kernels (MKL's matrix product) depend on it, so equal alignment gives
# the bits of the unsharded run.
ALIGNMENT_NBYTES = 64
# Blocks of CUDA's caching allocator. cuBLASLt may choose kernels by alignment up to 256.
ACCELERATOR_ALIGNMENT_NBYTES = 512


@dataclass(frozen=True, slots=True)
class BucketPlan:
    """One bucket's parameters, by index in the plan, in layout order."""

    params: tuple[int, ...]
    layout: Layout


@dataclass(frozen=True, slots=True)
class Plan:
    """The pieces and cost of every parameter, why it may not be cut, and the buckets in order of gathers."""

    costs: tuple[float, ...]
    pieces: tuple[Pieces, ...]
    buckets: tuple[BucketPlan, ...]
    whole_because: tuple[str | None, ...] = ()

    @property
    def is_cut(self) -> bool:
        """Whether any parameter has several owners."""
        return any(len(pieces) > 1 for pieces in self.pieces)

    def loads(self, num_ranks: int) -> list[float]:
        """Return each rank's costs; a piece has its rows' share."""
        loads: list[float] = [0] * num_ranks
        for cost, pieces in zip(self.costs, self.pieces, strict=True):
            rows = pieces[-1].stop
            for piece in pieces:
                loads[piece.owner] += cost if len(pieces) == 1 else cost * (piece.stop - piece.start) / rows
        return loads

    def __post_init__(self) -> None:
        """Check that the buckets hold no parameter twice; others keep those that are in none."""
        members = list(chain.from_iterable(bucket.params for bucket in self.buckets))
        assert len(set(members)) == len(members) <= len(self.pieces)


def make_plan(
    groups: Sequence[Sequence[Tensor]],
    costs: Sequence[Sequence[float]],
    loads: Sequence[float],
    cap_nbytes: int,
    bears_cuts: Sequence[bool] | None = None,
    units: Sequence[int | None] | None = None,
    used: Sequence[torch.dtype] | None = None,
    row_nbytes: int = 2**20,
) -> Plan:
    """Plan buckets, which never mix ``units``, and owners; without ``bears_cuts`` only the model is even.

    ``loads``: of each rank before. ``row_nbytes``: a row that is worth a message of the transport.
    """
    params = list(chain.from_iterable(groups))
    bears = [False] * len(params) if bears_cuts is None else bears_cuts
    units = units or [None] * len(params)
    numels, item_nbytes = [p.numel() for p in params], [kept_dtype(p).itemsize for p in params]
    nbytes = [numel * size for numel, size in zip(numels, item_nbytes, strict=True)]
    slots = _device_slots(params)
    # A bucket has one key. Frozen parameters need no gather; those that may be cut can have equal rows.
    keys = [
        (kept_dtype(p), slots[p.device], p.requires_grad, bear, unit)
        for p, bear, unit in zip(params, bears, units, strict=True)
    ]
    last_first = range(len(params) - 1, -1, -1)
    in_units = [index for index in last_first if units[index] is not None]
    buckets = sorted(assign_buckets(keys, nbytes, sys.maxsize, in_units), key=max, reverse=True)
    outside = [index for index in last_first if units[index] is None]
    buckets += assign_buckets(keys, nbytes, cap_nbytes, outside)
    alignments, steps = [], [0] * len(params)
    for bucket in buckets:
        narrow = 1 if used is None else max(1, item_nbytes[bucket[0]] // used[bucket[0]].itemsize)
        alignments.append(alignment_of(params[bucket[0]].device, kept_dtype(params[bucket[0]])) * narrow)
        for index in bucket:
            steps[index] = _cut_step(params[index], alignments[-1]) if bears[index] else 0
    every_cost = tuple(chain.from_iterable(costs))
    members = [range(*ends) for ends in pairwise(accumulate(map(len, groups), initial=0))]
    trains = [params[bucket[0]].requires_grad for bucket in buckets]
    planned = Planned(
        numels, item_nbytes, every_cost, steps, members, buckets, alignments, trains, row_nbytes
    )
    layouts = choose_rows(planned, loads, even_buckets=bears_cuts is not None)
    plans = [BucketPlan(tuple(bucket), layout) for bucket, layout in zip(buckets, layouts, strict=True)]
    needed = [place / len(group) for group in groups for place in range(len(group))]
    plans.sort(key=lambda plan: min(needed[index] for index in plan.params))
    pieces: dict[int, Pieces] = {}
    for plan in plans:
        of_bucket = plan.layout.pieces([params[index].shape for index in plan.params])
        pieces.update(zip(plan.params, of_bucket, strict=True))
    return Plan(every_cost, tuple(pieces[index] for index in range(len(params))), tuple(plans))


def make_plan_beside(
    held: Sequence[Pieces | None],
    groups: Sequence[Sequence[Tensor]],
    costs: Sequence[Sequence[float]],
    loads: Sequence[float],
    cap_nbytes: int,
    bears_cuts: Sequence[bool] | None,
    row_nbytes: int,
) -> Plan:
    """Plan parameters of which others hold rows, beside plain ones, which stay whole.

    ``held``: for each parameter the rows of each rank, none if it is not cut by rows, or None. Those whose
    class bears it keep them; others get an owner.
    """
    params, every_cost = list(chain.from_iterable(groups)), tuple(chain.from_iterable(costs))
    members = [range(*ends) for ends in pairwise(accumulate(map(len, groups), initial=0))]
    outside = [[index for index in group if held[index] is None] for group in members]
    plain = [[params[index] for index in group] for group in outside]
    spent = [[every_cost[index] for index in group] for group in outside]
    plan = make_plan(plain, spent, loads, cap_nbytes, row_nbytes=row_nbytes)
    places = list(chain.from_iterable(outside))
    pieces = dict(zip(places, plan.pieces, strict=True))
    bears = [False] * len(held) if bears_cuts is None else bears_cuts
    pieces.update((index, rows) for index, rows in enumerate(held) if rows and bears[index])
    ranks = RankLoads([load + more for load, more in zip(loads, plan.loads(len(loads)), strict=True)])
    for group in members:
        moved = [index for index in group if index not in pieces]
        for index, owner in zip(moved, ranks.assign([every_cost[index] for index in moved]), strict=True):
            pieces[index] = whole_piece(owner, params[index].shape)
    buckets = tuple(
        BucketPlan(tuple(places[index] for index in bucket.params), bucket.layout) for bucket in plan.buckets
    )
    return Plan(every_cost, tuple(pieces[index] for index in range(len(held))), buckets)


def alignment_of(device: torch.device, dtype: torch.dtype) -> int:
    """Return the alignment of extents, in elements."""
    nbytes = ALIGNMENT_NBYTES if device.type == "cpu" else ACCELERATOR_ALIGNMENT_NBYTES
    return max(1, nbytes // dtype.itemsize)


def _cut_step(param: Tensor, alignment: int) -> int:
    """Return the elements between possible cuts, whole rows at aligned addresses; 0 for none."""
    numel = param.numel()
    if param.dim() == 0 or param.shape[0] < 2 or numel == 0:
        return 0
    if dense_strides(param)[0] != numel // param.shape[0]:
        return 0  # dimension 0 is not outermost, so a row is no contiguous memory
    step = math.lcm(numel // param.shape[0], alignment)
    return step if step < numel else 0


def _device_slots(params: Sequence[Tensor]) -> dict[torch.device, int]:
    """Number devices by first use, so that ranks' cuda:0 and cuda:1 are equal."""
    return {device: slot for slot, device in enumerate(dict.fromkeys(param.device for param in params))}


def describe_params(groups: Sequence[ParamGroup]) -> list[str]:
    """Describe the properties of parameters that must be equal on all ranks."""
    params = params_of(groups)
    slots = _device_slots(params)
    return [
        f"{name}, {kept_dtype(p)}, {p.device.type}[{slots[p.device]}], strides {dense_strides(p)}, "
        f"{'trainable' if p.requires_grad else 'frozen'}"
        for name, p in zip(param_names(groups), params, strict=True)
    ]


def describe_owners(groups: Sequence[ParamGroup], plan: Plan) -> list[str]:
    """Describe each parameter's owners; if only they differ, cost functions do."""
    named = zip(param_names(groups), plan.pieces, strict=True)
    return [f"{name} {owned_by_text(pieces)}" for name, pieces in named]


def describe_costs(groups: Sequence[ParamGroup], plan: Plan) -> list[str]:
    """Describe each parameter's cost."""
    return [f"{name} costs {cost}" for name, cost in zip(param_names(groups), plan.costs, strict=True)]
