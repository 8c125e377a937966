"""A bucket of parameters and its flat tensor.

Parameters lie in the flat tensor if possible (`InFlat`); else each gather copies through a temporary one.

Note [Moving parameters]
    Moving a parameter gives it another storage; another thread or stream would then read released memory. So
    replaced parameters move only in `step` and in comm hooks, which the backward pass itself calls. That pass
    finds the same values: autograd saves a leaf as the tensor object, and a view by its old storage, which
    nobody writes. If a class replaces ``param.data`` in its own step, a gather moves the parameter on that
    thread and stream; the backward pass must not read it then.
"""

import itertools
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import torch
from torch import Tensor

from zero_optim.compat import private
from zero_optim.compat.memory import give_back_pages, is_seen_by_others
from zero_optim.flow.schedule import ZERO1, Schedule
from zero_optim.plan.layout import Layout
from zero_optim.plan.pieces import Piece, is_whole
from zero_optim.shard.places import Form, can_be_views, views_in, with_own_storages, zero_padding


class ParamBucket(Protocol):
    """The parameters of one bucket and their flat tensor."""

    params: list[Tensor]
    label: str  # names it in messages
    schedule: Schedule  # for its parameters

    @property
    def layout(self) -> Layout:
        """The positions of the parameters in the flat tensor."""
        ...

    @property
    def device(self) -> torch.device:
        """The flat tensor's device, even if parameters moved."""
        ...

    @property
    def nbytes(self) -> int:
        """Bytes of the flat tensor with padding."""
        ...

    @property
    def nbytes_to_gather(self) -> int:
        """Extra bytes of a pending gather."""
        ...

    def refresh(self) -> None:
        """Take over the user's changes; RuntimeError if a dtype, device or shape changed."""
        ...

    def fill(self) -> Tensor:
        """Return the flat tensor, 1-D, with this rank's current row.

        Never raises, since other ranks wait; `refresh` reports a parameter that does not fit.
        """
        ...

    def settle(self, flat: Tensor, changed: Collection[Tensor] | None = None) -> None:
        """Copy other ranks' rows of ``flat`` to the parameters; ``changed``: to these alone."""
        ...


class RowBucket(ParamBucket, Protocol):
    """A bucket of which a rank keeps its row alone; parameters are whole only while somebody uses them."""

    is_left: bool  # state dicts show the parameters as they are

    @property
    def nbytes_of_row(self) -> int:
        """Bytes of this rank's row."""
        ...

    def check_unpinned(self) -> None:
        """Raise RuntimeError if somebody needs the parameters whole and unchanged."""
        ...

    def has_changed(self) -> None:
        """Note that rows changed, and free the parameters."""
        ...

    def pass_over(self) -> None:
        """Accept the versions that a step changed."""
        ...

    def take_in(self, values: Mapping[Tensor, Tensor]) -> None:
        """Copy this rank's part of whole values into its row."""
        ...

    def let_go(self, params: AbstractSet[Tensor] | None = None) -> None:
        """Free some parameters, by default all."""
        ...

    def kept(self) -> Iterable[tuple[Tensor, Tensor]]:
        """Yield the parameters of which this rank owns rows, with views of these."""
        ...

    def all_kept(self) -> Iterable[tuple[Tensor, "KeptRows"]]:
        """Yield every parameter with this rank's part of it."""
        ...


@dataclass(frozen=True, slots=True, eq=False)
class KeptRows:
    """This rank's part of a parameter in a `RowBucket`."""

    stride: tuple[int, ...]  # of the parameter when it is whole, in elements
    rows: Tensor | None  # in memory that stays; None if it owns none


@contextmanager
def left_freed(buckets: Sequence[RowBucket]) -> Iterator[dict[Tensor, KeptRows]]:
    """Have state dicts show parameters as they are; yields this rank's part of each."""
    for bucket in buckets:
        bucket.is_left = True
    try:
        yield {param: kept for bucket in buckets for param, kept in bucket.all_kept()}
    finally:
        for bucket in buckets:
            bucket.is_left = False


class RowStore(Protocol):
    """The parameters of which ranks keep rows; ``units`` numbers the unit of each."""

    @property
    def units(self) -> Mapping[Tensor, int]:
        """The parameters; those of one unit become whole together."""
        ...

    @property
    def compute_dtypes(self) -> Mapping[Tensor, torch.dtype]:
        """The dtypes of whole parameters where rows have others."""
        ...

    def bucket(self, params: list[Tensor], layout: Layout, rank: int, label: str = "") -> RowBucket:
        """Make a bucket."""
        ...

    def freed(self) -> set[Tensor]:
        """Return the parameters that are not whole now."""
        ...


def is_active(bucket: ParamBucket) -> bool:
    """Whether a parameter of the bucket trains or has a gradient."""
    return any(p.requires_grad or p.grad is not None for p in bucket.params)


class InFlat:
    """Parameters inside one flat tensor with own storages; gathers copy those in ``shared`` memory."""

    def __init__(self, params: Sequence[Tensor], forms: Sequence[Form], layout: Layout) -> None:
        """Move the parameters in one by one, each releasing its old storage."""
        self.flat = torch.empty(layout.numel, dtype=forms[0].dtype, device=forms[0].device)
        self.shared: set[int] = set()
        zero_padding(self.flat, layout)
        self._params, self._forms, self._layout = params, forms, layout
        self._views = with_own_storages(self.flat, forms, layout)
        self._addresses = [view.data_ptr() for view in self._views]
        for index in range(len(params)):
            self._take_in(index)

    def take_in_moved(self) -> list[int]:
        """Move parameters with replaced ``data`` back in; list those that do not fit."""
        addresses = list(map(Tensor.data_ptr, self._params))  # twice a step, hence the one comparison
        if addresses == self._addresses:
            return []
        pairs = zip(addresses, self._addresses, strict=True)
        moved = [index for index, (address, former) in enumerate(pairs) if address != former]
        fits = [self._forms[index].fits(self._params[index]) for index in moved]
        for index in itertools.compress(moved, fits):
            self._take_in(index)
        return [index for index, fit in zip(moved, fits, strict=True) if not fit]

    @torch.no_grad()
    def _take_in(self, index: int) -> None:
        param, view = self._params[index], self._views[index]
        if view.data_ptr() != self._addresses[index]:  # PyTorch has put shared memory into its storage
            self.shared.add(index)
            views_in(self.flat, self._forms, self._layout)[index].copy_(param)
            return
        view.copy_(param)
        param.data = view

    def give_back(self, index: int) -> None:
        """Return a parameter's memory to the system, unless a view of it exists."""
        view = self._views[index]
        is_here = view.data_ptr() == self._addresses[index]  # and not in shared memory
        if is_here and not is_seen_by_others(view):
            give_back_pages(view)


class Bucket:
    """The parameters of a bucket that are always whole on every rank.

    ``as_views`` moves them into a flat tensor, with dense strides; those in shared memory, or on devices
    without DLPack, stay where they are. Ranks may differ in this.
    """

    def __init__(
        self, params: list[Tensor], layout: Layout, rank: int, label: str = "", *, as_views: bool = True
    ) -> None:
        self.params = params
        self.layout = layout
        self.label = label
        self.schedule = ZERO1
        self._rank = rank
        self._forms = list(map(Form.of, params))
        pieces = layout.pieces([form.size for form in self._forms])
        parts = [(index, piece) for index, of_param in enumerate(pieces) for piece in of_param]
        self._own = [part for part in parts if part[1].owner == rank]
        self._others = [part for part in parts if part[1].owner != rank]
        self._received = [params[index] for index in dict.fromkeys(index for index, _ in self._others)]
        self._memory = InFlat(params, self._forms, layout) if as_views and can_be_views(params) else None

    def __reduce__(self) -> tuple[Callable[..., "Bucket"], tuple[list[Tensor], Layout, int, str]]:
        """Copy and pickle as a new bucket of the copied parameters."""
        make = partial(Bucket, as_views=self.is_in_place)
        return make, (self.params, self.layout, self._rank, self.label)

    @property
    def is_in_place(self) -> bool:
        """Whether the parameters lie in the flat tensor."""
        return self._memory is not None

    @property
    def device(self) -> torch.device:
        """See `ParamBucket`."""
        return self._forms[0].device

    @property
    def nbytes(self) -> int:
        """See `ParamBucket`."""
        return self.layout.numel * self._forms[0].dtype.itemsize

    @property
    def nbytes_to_gather(self) -> int:
        """See `ParamBucket`."""
        return 0 if self.is_in_place else self.nbytes

    def refresh(self) -> None:
        """See `ParamBucket` and Note [Moving parameters]."""
        # Those that did not move fit: most steps compare addresses only.
        moved = range(len(self.params)) if self._memory is None else self._memory.take_in_moved()
        for index in moved:
            self._forms[index].check(self.params[index])

    def fill(self) -> Tensor:
        """See `ParamBucket`."""
        if self._memory is not None:
            self._memory.take_in_moved()
            return self._memory.flat
        flat = torch.zeros(self.layout.numel, dtype=self._forms[0].dtype, device=self.device)
        self._copy(flat, self._own, into_params=False)
        return flat

    def settle(self, flat: Tensor, changed: Collection[Tensor] | None = None) -> None:
        """See `ParamBucket`; tells autograd about values that changed in place."""
        others, received = self._others, self._received
        if changed is not None:
            others = [part for part in others if self.params[part[0]] in changed]
            received = [param for param in received if param in changed]
        if self._memory is not None:
            torch.autograd.graph.increment_version(received)
            shared = [part for part in others if part[0] in self._memory.shared] if self._memory.shared else ()
            others = [part for part in shared if self._forms[part[0]].fits(self.params[part[0]])]
        self._copy(flat, others, into_params=True)

    def give_back(self, index: int) -> None:
        """Return a removed parameter's memory to the system; no gather may follow."""
        if self._memory is not None:
            self._memory.give_back(index)

    def _copy(self, flat: Tensor, parts: Sequence[tuple[int, Piece]], *, into_params: bool) -> None:
        if not parts:
            return
        views = views_in(flat, self._forms, self.layout)
        places = [_rows(views[index], piece) for index, piece in parts]
        params = [_rows(self.params[index], piece) for index, piece in parts]
        with torch.no_grad():
            private.foreach_copy_(*((params, places) if into_params else (places, params)))


def _rows(tensor: Tensor, piece: Piece) -> Tensor:
    """View rows of a tensor; a write changes the tensor's version."""
    return tensor if is_whole(piece, tensor.shape) else tensor.detach()[piece.start : piece.stop]
