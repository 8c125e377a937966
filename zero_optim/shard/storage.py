"""A bucket of parameters and its flat tensor. Nothing here communicates.

A `Bucket` keeps its parameters inside its flat tensor (`InFlat`), so that a gather writes to them without a
copy. Where that is not possible or not wanted, the parameters stay where they are, and each gather copies
through a flat tensor of its own. A gather calls `fill`, which returns a flat tensor with this rank's
current row. When the other rows have come it calls `settle`, which brings them to the parameters.

Note [Moving parameters]
    To move a parameter is to give it another storage. Code on another thread or stream that reads it at
    that moment would go on reading memory that has been released. So what the user replaced is moved only
    in `step` and in a comm hook, which the backward pass itself calls. A backward pass that goes on finds
    the same values: autograd saves a leaf as the tensor object, which has its new storage by then; of a
    view it saves the old storage, which nobody writes to any more. Where a class replaces ``param.data`` in
    its own step, a gather moves the parameter, on the thread and the stream that stepped it; the backward
    pass must not read it any more then.
"""

import itertools
from collections.abc import Callable, Sequence
from functools import partial
from typing import Protocol

import torch
from torch import Tensor

from zero_optim.compat import private
from zero_optim.compat.memory import give_back_pages, is_seen_by_others
from zero_optim.plan.layout import Layout
from zero_optim.plan.pieces import Piece, is_whole
from zero_optim.shard.places import Form, can_be_views, views_in, with_own_storages, zero_padding


class ParamBucket(Protocol):
    """The parameters of one bucket, and their flat tensor."""

    params: list[Tensor]
    label: str  # names it in messages

    @property
    def layout(self) -> Layout:
        """Where each lies in the flat tensor."""
        ...

    @property
    def device(self) -> torch.device:
        """Where the flat tensor is, wherever the user may have put the parameters since."""
        ...

    @property
    def nbytes(self) -> int:
        """The size of the flat tensor, padding included."""
        ...

    @property
    def nbytes_to_gather(self) -> int:
        """Memory that a gather takes while it is under way."""
        ...

    def refresh(self) -> None:
        """Take over what the user did to the parameters since the last step; all that fit.

        Raises:
            RuntimeError: a parameter has another dtype, device or shape than when the bucket was made.
        """
        ...

    def fill(self) -> Tensor:
        """Return the flat tensor, 1-D, with the current values in this rank's row.

        Raises nothing, since the other ranks wait. A parameter that does not fit is left to `refresh`.
        """
        ...

    def settle(self, flat: Tensor) -> None:
        """Give what other ranks own of the parameters the values in ``flat``."""
        ...


def rows_of(flat: Tensor, layout: Layout) -> list[tuple[int, Tensor]]:
    """Split a flat tensor into (owner, 1-D view), by rank, without empty rows; then rooms behind the rows."""
    rows = [(row.owner, flat[row.start : row.stop]) for row in layout.rows if row.stop > row.start]
    return rows + [(room.owner, flat[room.start : room.stop]) for room in layout.rooms_behind]


def is_active(bucket: ParamBucket) -> bool:
    """Whether a step may change the bucket: a parameter in it trains or has a gradient."""
    return any(p.requires_grad or p.grad is not None for p in bucket.params)


class InFlat:
    """The memory of parameters that lie in one flat tensor, each with its own storage there.

    Attributes:
        flat: the flat tensor.
        shared: parameters that have moved to shared memory, which gathers copy.
    """

    def __init__(self, params: Sequence[Tensor], forms: Sequence[Form], layout: Layout) -> None:
        """Move the parameters in, one after the other. Each gives its old storage back."""
        self.flat = torch.empty(layout.numel, dtype=forms[0].dtype, device=forms[0].device)
        self.shared: set[int] = set()
        zero_padding(self.flat, layout)
        self._params, self._forms, self._layout = params, forms, layout
        self._views = with_own_storages(self.flat, forms, layout)
        self._addresses = [view.data_ptr() for view in self._views]
        for index in range(len(params)):
            self._take_in(index)

    def take_in_moved(self) -> list[int]:
        """Move the parameters in whose ``data`` was replaced, all that fit; list those that do not."""
        here = zip(self._params, self._addresses, strict=True)
        moved = [index for index, (param, address) in enumerate(here) if param.data_ptr() != address]
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
        """Give a parameter's memory back to the system, unless somebody keeps a view of it."""
        view = self._views[index]
        is_here = view.data_ptr() == self._addresses[index]  # and not in shared memory
        if is_here and not is_seen_by_others(view):
            give_back_pages(view)


class Bucket:
    """The parameters of a bucket that are always whole on every rank.

    Args:
        params: the parameters. With ``as_views`` tensors in the flat tensor replace their ``data``, with
        the same
            values, shape and strides (dense strides if a parameter had gaps).
        layout: where each lies in the flat tensor. rank: this group rank. label: names the bucket in
        messages. as_views: move the parameters into a flat tensor if possible. It is not possible for
        parameters in shared
            memory, nor on a device without DLPack. Ranks may differ in this: what is sent is the same.
    """

    def __init__(
        self, params: list[Tensor], layout: Layout, rank: int, label: str = "", *, as_views: bool = True
    ) -> None:
        self.params = params
        self.layout = layout
        self.label = label
        self._rank = rank
        self._forms = list(map(Form.of, params))
        pieces = layout.pieces([form.size for form in self._forms])
        parts = [(index, piece) for index, of_param in enumerate(pieces) for piece in of_param]
        self._own = [part for part in parts if part[1].owner == rank]
        self._others = [part for part in parts if part[1].owner != rank]
        self._memory = InFlat(params, self._forms, layout) if as_views and can_be_views(params) else None

    def __reduce__(self) -> tuple[Callable[..., "Bucket"], tuple[list[Tensor], Layout, int, str]]:
        """Copy and pickle by making a new bucket of the copied parameters."""
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

    def settle(self, flat: Tensor) -> None:
        """See `ParamBucket`. Where the values are there already, this tells autograd that they changed."""
        others = self._others
        if self._memory is not None:
            changed = dict.fromkeys(index for index, _ in others)
            torch.autograd.graph.increment_version([self.params[index] for index in changed])
            shared = [part for part in others if part[0] in self._memory.shared]
            others = [part for part in shared if self._forms[part[0]].fits(self.params[part[0]])]
        self._copy(flat, others, into_params=True)

    def give_back(self, index: int) -> None:
        """Give the memory that a parameter had back to the system, once it has left this bucket for good.

        The bucket must not be gathered any more.
        """
        if self._memory is not None:
            self._memory.give_back(index)

    def _copy(self, flat: Tensor, parts: Sequence[tuple[int, Piece]], *, into_params: bool) -> None:
        """Copy between rows of parameters and their places, all in one call."""
        if not parts:
            return
        views = views_in(flat, self._forms, self.layout)
        places = [_rows(views[index], piece) for index, piece in parts]
        params = [_rows(self.params[index], piece) for index, piece in parts]
        with torch.no_grad():
            private.foreach_copy_(*((params, places) if into_params else (places, params)))


def _rows(tensor: Tensor, piece: Piece) -> Tensor:
    """View rows of a tensor; a write counts as one to the tensor."""
    return tensor if is_whole(piece, tensor.shape) else tensor.detach()[piece.start : piece.stop]
