"""The reducer's options, the assignment of gradients to buckets, and the passes that it follows.

Note [PyTorch's buckets]
    With more than two ranks, the rounding of a sum depends on the element's place in its bucket. So buckets
    are those of PyTorch's DDP, in every pass. The first ones follow the order of registration, and are
    reduced from the last to the first. Where parameters may be unused they stay. Otherwise there is one per
    dtype until the order of gradients is known: after the first pass, with a static graph after the second.
"""

import sys
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor

from zero_optim.comm.collectives import RankGroup
from zero_optim.comm.traffic import Timeout
from zero_optim.compat.streams import HostCopy, to_device
from zero_optim.ddp.reducer.gradient_bucket import ReducerBucket
from zero_optim.ddp.reducer.gradient_storage import (
    BucketGradients,
    FlatGradients,
    GradientStorage,
    SparseGradients,
)
from zero_optim.plan.partition import assign_buckets
from zero_optim.plan.strides import dense_strides


@dataclass(frozen=True, slots=True, kw_only=True)
class ReducerOptions:
    """How gradients are reduced; the names are those of PyTorch's DDP."""

    # Of the first, second, … bucket; the last one for all that follow.
    bucket_caps_nbytes: Sequence[int] = (2**20, 25 * 2**20)
    limits_first_buckets: bool = False  # else the first pass has one per dtype, if all parameters are used
    find_unused_parameters: bool = False
    static_graph: bool = False
    gradient_as_bucket_view: bool = False
    skip_all_reduce_unused_params: bool = False
    batched_grad_copy: bool = False  # of all gradients of a bucket at once, whatever their size
    reduce_dtype: torch.dtype | None = None  # of floating-point gradients; None for the parameters' own
    timeout: Timeout = None
    on_stall: str = "raise"

    @property
    def may_be_unused(self) -> bool:
        """Whether parameters may get no gradient."""
        return self.find_unused_parameters or self.static_graph

    def dtype_of(self, param: Tensor) -> torch.dtype | None:
        """Return the dtype for reducing a parameter's gradient; None for its own."""
        return self.reduce_dtype if param.is_floating_point() else None


@dataclass(frozen=True, slots=True, eq=False)
class ReducedParams:
    """The parameters whose gradients are reduced; the same on every rank, in the same order."""

    names: Sequence[str]
    params: Sequence[Tensor]
    sparse: frozenset[str]  # names of those with sparse gradients
    index_of: Mapping[int, int]  # places by id

    @classmethod
    def of(cls, pairs: Sequence[tuple[str, Tensor]], sparse: Collection[str] = ()) -> "ReducedParams":
        """Check named parameters."""
        for name, param in pairs:
            if getattr(param, "grad_dtype", None) not in (None, param.dtype):
                raise ValueError(
                    f"{name} is {param.dtype} and asks for gradients in {param.grad_dtype}, which would be "
                    "rounded: leave out its grad_dtype, as buckets have the parameters' dtype"
                )
        if not pairs:
            raise ValueError("expected at least one parameter that requires a gradient, got none")
        devices = sorted({str(param.device) for _, param in pairs})
        if len(devices) > 1:
            raise ValueError(
                f"expected all parameters on one device, got {', '.join(devices)}: one device a rank"
            )
        index_of = {id(param): index for index, (_, param) in enumerate(pairs)}
        return cls([name for name, _ in pairs], [param for _, param in pairs], frozenset(sparse), index_of)

    def is_sparse(self, index: int) -> bool:
        """Whether the gradients of a parameter are sparse."""
        return self.names[index] in self.sparse

    def whole_buckets(
        self, index_lists: Sequence[Sequence[int]], options: ReducerOptions, *, adopt: bool
    ) -> list[ReducerBucket]:
        """Make buckets of zeros, which every rank sums; ``adopt`` gradients that shall be views of them."""
        buckets = list[ReducerBucket]()
        as_views, batched = options.gradient_as_bucket_view, options.batched_grad_copy
        for number, indices in enumerate(index_lists):
            members = BucketGradients(indices, self, options)
            if members.is_sparse:
                storage: GradientStorage = SparseGradients(members, members.gradient, _sum_of)
            else:
                storage = FlatGradients(members, as_views=as_views, adopt=adopt, divides=batched)
            is_last = number == len(index_lists) - 1
            buckets.append(ReducerBucket(members, storage, number, copies_at_once=batched, is_last=is_last))
        return buckets


def _sum_of(param: Tensor, _: Tensor | None, total: Tensor) -> Tensor:
    return total.to(param.dtype)


@dataclass(frozen=True, slots=True)
class BucketAssignment:
    """The place of each parameter's gradient: bucket and slot. Buckets are in the order of reduction."""

    names: Sequence[str] = ()
    buckets: Sequence[ReducerBucket] = ()
    places: Sequence[tuple[ReducerBucket, int]] = ()

    @classmethod
    def of(cls, names: Sequence[str], buckets: Sequence[ReducerBucket]) -> "BucketAssignment":
        """Find the places of parameters, each of which is in one bucket."""
        places = {index: (each, slot) for each in buckets for slot, index in enumerate(each.indices)}
        return cls(names, buckets, [places[index] for index in range(len(names))])


def assign(
    reduced: ReducedParams, options: ReducerOptions, order: Sequence[int] | None = None
) -> BucketAssignment:
    """Make the buckets: Note [PyTorch's buckets]."""
    keys = [(p.dtype, i if reduced.is_sparse(i) else None) for i, p in enumerate(reduced.params)]
    nbytes = [param.numel() * param.element_size() for param in reduced.params]
    caps = options.bucket_caps_nbytes
    may_be_unused = options.find_unused_parameters and not options.static_graph
    if order is None and not (options.limits_first_buckets or may_be_unused):
        caps = (sys.maxsize,)
    index_lists = assign_buckets(keys, nbytes, caps, range(len(keys)) if order is None else order)
    if order is None:
        index_lists.sort(key=min, reverse=True)
    buckets = reduced.whole_buckets(index_lists, options, adopt=order is not None)
    return BucketAssignment.of(reduced.names, buckets)


def describe_params(pairs: Iterable[tuple[str, Tensor]]) -> list[str]:
    """Describe parameters, for comparison between ranks."""
    return [
        f"{name} {tuple(param.shape)} {param.dtype}, strides {dense_strides(param)}, "
        f"{'trainable' if param.requires_grad else 'frozen'}"
        for name, param in pairs
    ]


# every: each parameter must get one gradient. some: it may get none. learning: nothing is known yet, so
# nothing is reduced before the end. learnt: each must get as many as in the pass that was there to learn.
Kind = Literal["every", "some", "learning", "learnt"]


@dataclass(slots=True)
class History:
    """Facts learnt from the passes so far; `Reducer.reset` makes it anew."""

    num_params: int
    num_passes: int = 0  # that were reduced
    num_buckets_reduced: int = 0  # in the last one
    last_order: list[int] = field(default_factory=list)  # parameters as gradients of the last pass came here
    looks_static: bool = True  # the same parameters were used in all passes
    learnt: list[int] | None = None  # gradients of each parameter in a static graph, once that is known
    undefined: tuple[int, ...] = ()  # unused ones of it that took part: an ``autograd.Function`` gave None
    unused: Sequence[bool] = ()  # by parameter, in a static graph, once that is known: no rank has a gradient

    def kind(self, options: ReducerOptions) -> Kind:
        """Return the kind of the next pass."""
        if options.static_graph:
            return "learning" if self.learnt is None else "learnt"
        return "some" if options.find_unused_parameters else "every"

    def knows_order(self, options: ReducerOptions) -> bool:
        """Whether buckets may follow the order of gradients from now on."""
        num_watched = 2 if options.static_graph else 1  # as in PyTorch's reducer
        return self.num_passes >= num_watched and (options.static_graph or not options.find_unused_parameters)

    def order(self) -> list[int]:
        """Return all parameters in the order of gradients; the last have none."""
        return self.last_order + sorted(set(range(self.num_params)) - set(self.last_order))

    def order_of_first(self, group: RankGroup) -> list[int]:
        """Return rank 0's `order`; all ranks call, and the CPU waits, this once."""
        agreed = to_device(torch.tensor(self.order(), dtype=torch.int64, device="cpu"), group.device)
        # Not "agree": where it meets an agreement, ranks have made different calls, which is to be seen.
        for work in group.during("order").broadcast_rows([(0, agreed)], "gradients"):
            work.wait()
        order: list[int] = group.read(HostCopy(agreed)).tolist()
        return order

    def conclude(
        self,
        calls: Sequence[int],
        order: Sequence[int],
        unused: Sequence[bool],
        num_buckets: int,
        options: ReducerOptions,
    ) -> None:
        """Learn from an ended pass: gradients by parameter, their order, parameters that no rank used."""
        self.num_buckets_reduced = num_buckets
        is_usual = order == self.last_order  # compared faster than sets are made
        if self.num_passes and not is_usual and set(order) != set(self.last_order):
            self.looks_static = False
        self.num_passes += 1
        self.last_order = list(order)
        if options.static_graph and self.learnt is None:
            self.learnt = list(calls)
            self.unused = list(unused)
            self.undefined = tuple(index for index, count in enumerate(calls) if count and unused[index])
