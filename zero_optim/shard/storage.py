"""A bucket's flat tensor, and how it is connected with the parameters. Nothing here communicates.

There are two kinds with one interface; `make_bucket` chooses. `ViewBucket` keeps the parameters inside its
flat tensor, so a gather writes to them without a copy. `CopyBucket` leaves ``param.data`` where the user put
it, and copies through a flat tensor that lives for one gather. A gather calls `fill` first: it returns a flat
tensor in which this rank's row is up to date. At the end it calls `settle`, which moves what the other rows
received into the parameters.

Note [Moving parameters]
    To move a parameter is to give it another storage. Code on another thread or stream that reads the
    parameter at that moment would go on reading memory that has been released. So what the user replaced is
    moved in two places only: in `step`, or in a comm hook. The backward pass itself calls the hook: on the
    thread that called ``backward()``, or on an accelerator on one of autograd's, with the stream of the pass.
    A backward pass that goes on after that finds the same values: autograd saves a leaf as the tensor object,
    which has its new storage by then; of a view it saves the old storage, which nobody writes to any more. A
    class that replaces ``param.data`` in its own step is another matter: there a gather moves the parameter,
    on the thread and the stream that stepped it. The backward pass must not read it any more then, as it must
    not read what was stepped.
"""

from collections.abc import Callable, Collection, Sequence
from functools import partial
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from zero_optim.compat import private
from zero_optim.compat.memory import give_back_pages, is_seen_by_others
from zero_optim.plan.layout import Layout
from zero_optim.shard.padding import zero_padding
from zero_optim.shard.places import Form, can_be_views, views_in, with_own_storages


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
        """Check the parameters before a step: take over what the user did to them, or refuse it.

        Raises:
            RuntimeError: a parameter has another dtype, device or shape than when the bucket was made.
        """
        ...

    def fill(self, chosen: Collection[int] | None = None) -> Tensor:
        """Return the flat tensor, 1-D, with the current values in this rank's row.

        Args:
            chosen: indices within the bucket of the parameters that matter; None for all.
        """
        ...

    def settle(self, flat: Tensor, chosen: Collection[int] | None = None) -> None:
        """Give what other ranks own of the parameters the values in ``flat``; ``chosen`` as in `fill`."""
        ...


def rows_of(flat: Tensor, layout: Layout) -> list[tuple[int, Tensor]]:
    """Split a flat tensor into (owner, 1-D view), by rank, without empty rows; then rooms behind the rows."""
    rows = [(row.owner, flat[row.start : row.stop]) for row in layout.rows if row.stop > row.start]
    return rows + [(room.owner, flat[room.start : room.stop]) for room in layout.rooms_behind]


def is_active(bucket: ParamBucket) -> bool:
    """Whether a step may change the bucket: a parameter in it trains or has a gradient."""
    return any(p.requires_grad or p.grad is not None for p in bucket.params)


def make_bucket(
    params: list[Tensor], layout: Layout, rank: int, label: str = "", *, as_views: bool
) -> "ParamBucket":
    """Make a bucket.

    Args:
        params: the parameters.
        layout: where each lies.
        rank: this group rank.
        label: names the bucket in messages.
        as_views: move the parameters into a flat tensor if possible. It is not possible for parameters in
            shared memory, nor on a device without DLPack. Ranks may differ in this: both kinds send the same.
    """
    if as_views and can_be_views(params):
        return ViewBucket(params, layout, rank, label)
    return CopyBucket(params, layout, rank, label)


class _Part(NamedTuple):
    """What one rank owns of a parameter of the bucket: rows ``[start, stop)`` of it, or all for None."""

    param: int
    rows: tuple[int, int] | None

    def of(self, tensor: Tensor) -> Tensor:
        """View the part in a tensor with the shape of the parameter; a write counts as one to the tensor."""
        return tensor if self.rows is None else tensor.detach()[slice(*self.rows)]


def _members(layout: Layout, forms: Sequence[Form], rank: int) -> tuple[list[_Part], list[_Part]]:
    """Split a bucket's parameters into what ``rank`` owns and what others do; a cut one may be in both."""
    own: list[_Part] = []
    others: list[_Part] = []
    for row in layout.rows:
        parts = own if row.owner == rank else others
        for extent in row.extents:
            rows = None
            if extent.stop - extent.start < layout.numels[extent.param]:
                # Dimension 0 of a cut parameter is outermost in memory.
                in_row = forms[extent.param].size[1:].numel()
                rows = (extent.start // in_row, extent.stop // in_row)
            parts.append(_Part(extent.param, rows))
    return own, others


def _picked(parts: list[_Part], chosen: Collection[int] | None) -> list[_Part]:
    return parts if chosen is None else [part for part in parts if part.param in chosen]


class ViewBucket:
    """A bucket whose parameters lie in one flat tensor, each with its own storage there.

    Args:
        params: the parameters. Tensors in the flat tensor replace their ``data``, with the same values, shape
            and strides (dense strides if a parameter had gaps).
        layout: where each lies.
        rank: this group rank.
        label: see `ParamBucket`.
    """

    def __init__(self, params: list[Tensor], layout: Layout, rank: int, label: str = "") -> None:
        """Move the parameters in. Their old storages are released."""
        self.params = params
        self.layout = layout
        self.label = label
        self._forms = list(map(Form.of, params))
        self._flat = torch.empty(layout.numel, dtype=params[0].dtype, device=params[0].device)
        zero_padding(self._flat, layout)
        self._views = with_own_storages(self._flat, self._forms, layout)
        self._rank = rank
        self._others = _members(layout, self._forms, rank)[1]
        self._addresses = [view.data_ptr() for view in self._views]
        self._shared: set[int] = set()  # parameters in shared memory, which gathers copy
        for index in range(len(params)):
            self._take_in(index)

    def __reduce__(self) -> tuple[Callable[..., ParamBucket], tuple[list[Tensor], Layout, int, str]]:
        """Copy and pickle by making a new bucket from the copied parameters."""
        return partial(make_bucket, as_views=True), (self.params, self.layout, self._rank, self.label)

    @property
    def device(self) -> torch.device:
        """See `ParamBucket`."""
        return self._flat.device

    @property
    def nbytes(self) -> int:
        """See `ParamBucket`."""
        return self._flat.nbytes

    @property
    def nbytes_to_gather(self) -> int:
        """See `ParamBucket`."""
        return 0

    def refresh(self) -> None:
        """See `ParamBucket`. Parameters whose ``data`` was replaced move in again, all that fit.

        Nothing else moves a parameter while a backward pass may read it; see Note [Moving parameters].
        """
        moved_out = self._moved_out()
        for index in moved_out:
            if self._forms[index].fits(self.params[index]):
                self._take_in(index)
        for index in moved_out:
            self._forms[index].check(self.params[index])

    def fill(self, chosen: Collection[int] | None = None) -> Tensor:
        """See `ParamBucket`. Only parameters whose ``data`` the step has replaced are copied, or moved.

        Raises nothing, since the other ranks wait. A parameter that does not fit is left to `refresh`.
        """
        for index in self._moved_out(chosen):
            if self._forms[index].fits(self.params[index]):
                self._take_in(index)
        return self._flat

    def settle(self, flat: Tensor, chosen: Collection[int] | None = None) -> None:
        """See `ParamBucket`. The values are there already; this tells autograd that they changed."""
        assert flat is self._flat
        others = _picked(self._others, chosen)
        changed = dict.fromkeys(part.param for part in others)
        torch.autograd.graph.increment_version([self.params[index] for index in changed])
        if self._shared:
            self._copy_out([part for part in others if part.param in self._shared])

    @torch.no_grad()
    def _copy_out(self, parts: list[_Part]) -> None:
        """Copy from the flat tensor to parameters that do not lie in it."""
        places = views_in(self._flat, self._forms, self.layout)
        for part in parts:
            param = self.params[part.param]
            if self._forms[part.param].fits(param):
                part.of(param).copy_(part.of(places[part.param]))

    def give_back(self, index: int) -> None:
        """Give the memory that a parameter had back to the system, once it has left this bucket for good.

        It is left alone where somebody keeps a view. The bucket must not be gathered any more.

        Args:
            index: of the parameter.
        """
        view = self._views[index]
        is_here = view.data_ptr() == self._addresses[index]  # and not in shared memory
        if is_here and not is_seen_by_others(view):
            give_back_pages(view)

    def _moved_out(self, chosen: Collection[int] | None = None) -> list[int]:
        """Find the parameters that are no longer in the bucket."""
        indices = range(len(self.params)) if chosen is None else chosen
        return [index for index in indices if self.params[index].data_ptr() != self._addresses[index]]

    @torch.no_grad()
    def _take_in(self, index: int) -> None:
        """Copy a parameter's values to its place and, unless it is in shared memory, move it there."""
        param, view = self.params[index], self._views[index]
        if view.data_ptr() != self._addresses[index]:  # PyTorch has put other memory into its storage
            self._shared.add(index)
            views_in(self._flat, self._forms, self.layout)[index].copy_(param)
            return
        view.copy_(param)
        param.data = view


class CopyBucket:
    """A bucket whose parameters stay where they are; each gather copies them.

    Args:
        params: the parameters.
        layout: where each lies in the flat tensor of a gather.
        rank: this group rank.
        label: see `ParamBucket`.
    """

    def __init__(self, params: list[Tensor], layout: Layout, rank: int, label: str = "") -> None:
        """Note who owns what. Allocates nothing."""
        self.params = params
        self.layout = layout
        self.label = label
        self._forms = list(map(Form.of, params))
        self._own, self._others = _members(layout, self._forms, rank)

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
        return self.nbytes

    def refresh(self) -> None:
        """See `ParamBucket`."""
        for param, form in zip(self.params, self._forms, strict=True):
            form.check(param)

    def fill(self, chosen: Collection[int] | None = None) -> Tensor:
        """See `ParamBucket`."""
        flat = torch.zeros(self.layout.numel, dtype=self._forms[0].dtype, device=self._forms[0].device)
        self._copy(flat, _picked(self._own, chosen), into_params=False)
        return flat

    def settle(self, flat: Tensor, chosen: Collection[int] | None = None) -> None:
        """See `ParamBucket`."""
        self._copy(flat, _picked(self._others, chosen), into_params=True)

    def _copy(self, flat: Tensor, parts: list[_Part], *, into_params: bool) -> None:
        """Copy between some parameters, or rows of them, and their places, all in one call."""
        if not parts:
            return
        views = views_in(flat, self._forms, self.layout)
        places = [part.of(views[part.param]) for part in parts]
        params = [part.of(self.params[part.param]) for part in parts]
        with torch.no_grad():
            private.foreach_copy_(*((params, places) if into_params else (places, params)))
