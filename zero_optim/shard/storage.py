"""A bucket's flat tensor and what connects it with the parameters.

Two kinds with one interface. `ViewBucket` keeps the parameters inside its flat tensor for good, so
that a gather lands in them without a copy; `PackedBucket` leaves ``param.data`` where the user put
it and copies through a flat tensor that lives for one gather. In both, `fill` gives a flat tensor
whose own row is up to date, and `settle` brings what the others' rows received into the parameters.
`make_bucket` chooses between them.

Note [A storage for each parameter]
    Savers such as safetensors' and accelerate's take parameters with one storage for tied, and keep one
    of them; ``torch.save(param)`` writes the whole storage. So no two parameters of a bucket share one. What
    a DLPack capsule of a slice of the flat tensor is turned into has a storage of its own, just as long as
    the slice, and keeps the flat tensor's memory alive for as long as it lives itself. The slice is
    taken as bytes, since DLPack does not know every dtype, and the storage is given the dtype afterwards.
    Autograd cannot see that a gather into the flat tensor changes a parameter, so `settle` tells it.

    Such a storage cannot be resized, which would reach into the neighbour's memory. It can be moved to
    shared memory (``share_memory_``, or being sent to another process): PyTorch puts other memory into
    the same storage then. Such a parameter stays there, and gathers copy.

    On CUDA the memory belongs to the flat tensor's block of the caching allocator. ``param.record_stream``
    does nothing, as for every tensor whose memory that allocator did not give out itself; the block is reused
    when the last parameter of the bucket has gone. Streams need no care here: the capsule is made and used up
    at once, and nothing is read.
"""

from collections.abc import Callable, Collection, Sequence
from functools import partial
from typing import NamedTuple, Protocol

import torch
from torch import Tensor
from torch.utils.dlpack import from_dlpack, to_dlpack  # type: ignore[attr-defined]

from zero_optim.plan.layout import Layout
from zero_optim.plan.memory import dense_strides


class ParamBucket(Protocol):
    """Parameters that travel together."""

    params: list[Tensor]
    layout: Layout

    def refresh(self) -> None:
        """Look at the parameters before a step; what the user did to them is taken over or refused.

        Raises:
            RuntimeError: a parameter has another dtype, device or shape than when the bucket was made.
        """
        ...

    def fill(self, chosen: Collection[int] | None = None) -> Tensor:
        """Give the flat tensor, 1-D, with this rank's row holding the present values.

        Args:
            chosen: the parameters that matter, counted within the bucket; None for all.
        """
        ...

    def settle(self, flat: Tensor, chosen: Collection[int] | None = None) -> None:
        """Make the parameters, or some, hold what ``flat`` now holds in the other ranks' rows."""
        ...


def rows_of(flat: Tensor, layout: Layout) -> list[tuple[int, Tensor]]:
    """Cut a flat tensor into (owner, 1-D view) by rank; empty rows are left out."""
    return [(row.owner, flat[row.start : row.stop]) for row in layout.rows if row.stop > row.start]


def is_active(bucket: ParamBucket) -> bool:
    """Whether a step may change the bucket: something in it trains or holds a gradient."""
    return any(p.requires_grad or p.grad is not None for p in bucket.params)


class Form(NamedTuple):
    """What a parameter was like when it was planned, the same on every rank whatever happens to it."""

    dtype: torch.dtype
    device: torch.device
    size: torch.Size
    stride: tuple[int, ...]

    @classmethod
    def of(cls, param: Tensor) -> "Form":
        """Take it from a parameter."""
        return cls(param.dtype, param.device, param.shape, dense_strides(param))

    def fits(self, param: Tensor) -> bool:
        """Whether a parameter can still be copied to its place; its strides may be others by now."""
        return (self.dtype, self.device, self.size) == (param.dtype, param.device, param.shape)

    def check(self, param: Tensor) -> None:
        """Refuse a parameter that does not fit any more."""
        if not self.fits(param):
            raise RuntimeError(
                f"a parameter became {param.dtype} {tuple(param.shape)} on {param.device}; when the "
                f"optimizer was built it was {self.dtype} {tuple(self.size)} on {self.device}. Convert or "
                "move the model first, then build the optimizer"
            )


def _views(flat: Tensor, forms: Sequence[Form], layout: Layout) -> list[Tensor]:
    """View each parameter's place in ``flat`` with the parameter's shape and memory format."""
    extents = sorted(extent for row in layout.rows for extent in row.extents)
    return [flat.as_strided(form.size, form.stride, e.offset) for form, e in zip(forms, extents, strict=True)]


def _with_own_storages(flat: Tensor, forms: Sequence[Form], layout: Layout) -> list[Tensor]:
    """Like `_views`, but each with a storage of its own. See Note [A storage for each parameter]."""
    octets, size = flat.view(torch.uint8), flat.element_size()
    starts = [extent.offset * size for extent in sorted(e for row in layout.rows for e in row.extents)]
    return [_over(octets[start:], form) for form, start in zip(forms, starts, strict=True)]


def _over(octets: Tensor, form: Form) -> Tensor:
    """Give a tensor of some form over the first of some bytes, with a storage that ends where it does."""
    empty = torch.empty(0, dtype=form.dtype, device=form.device)
    nbytes = form.size.numel() * empty.element_size()
    if nbytes == 0:
        return empty.reshape(form.size)
    storage = from_dlpack(to_dlpack(octets[:nbytes])).untyped_storage()
    return empty.set_(storage, 0, form.size, form.stride)


def _can_be_views(params: Sequence[Tensor]) -> bool:
    """Whether parameters may be moved into a flat tensor, and each be given its own storage there."""
    device = params[0].device
    if device.type == "cpu" and any(param.is_shared() for param in params):  # type: ignore[no-untyped-call]
        return False  # other processes look at where they are
    try:
        byte = torch.zeros(1, dtype=torch.uint8, device=device)
        return _over(byte, Form.of(byte)).data_ptr() == byte.data_ptr()
    except (BufferError, NotImplementedError, RuntimeError, TypeError, ValueError):
        return False  # the device has no DLPack


def make_bucket(params: list[Tensor], layout: Layout, rank: int, *, as_views: bool) -> "ParamBucket":
    """Make a bucket.

    Args:
        params: the parameters.
        layout: where each lies.
        rank: this group rank.
        as_views: move the parameters into a flat tensor, where that can be: it cannot for parameters in
            shared memory, nor on a device without DLPack. Ranks may differ in that: all send the same.
    """
    if as_views and _can_be_views(params):
        return ViewBucket(params, layout, rank)
    return PackedBucket(params, layout, rank)


def _members(layout: Layout, rank: int) -> tuple[list[int], list[int]]:
    """Split a bucket's parameters into those ``rank`` owns and the others."""
    own = [extent.param for row in layout.rows if row.owner == rank for extent in row.extents]
    others = [extent.param for row in layout.rows if row.owner != rank for extent in row.extents]
    return own, others


def _picked(indices: list[int], chosen: Collection[int] | None) -> list[int]:
    return indices if chosen is None else [index for index in indices if index in chosen]


class ViewBucket:
    """A bucket whose parameters lie in one flat tensor, each with a storage of its own there.

    Args:
        params: the parameters; their ``data`` is replaced by tensors in that place with the same values,
            shape and strides (dense strides where a parameter had gaps).
        layout: where each lies.
        rank: this group rank.
    """

    def __init__(self, params: list[Tensor], layout: Layout, rank: int) -> None:
        """Move the parameters in. The storage they had is let go."""
        self.params = params
        self.layout = layout
        self._forms = list(map(Form.of, params))
        # Padding is zeroed because it travels: no stray NaN should show up in a debugger.
        self._flat = torch.zeros(layout.numel, dtype=params[0].dtype, device=params[0].device)
        self._views = _with_own_storages(self._flat, self._forms, layout)
        self._rank = rank
        self._others = _members(layout, rank)[1]
        self._addresses = [view.data_ptr() for view in self._views]
        self._apart: set[int] = set()  # those in shared memory, which gathers copy
        for index in range(len(params)):
            self._take_in(index)

    def __reduce__(self) -> tuple[Callable[..., ParamBucket], tuple[list[Tensor], Layout, int]]:
        """Copy and pickle by building anew around the copied parameters."""
        return partial(make_bucket, as_views=True), (self.params, self.layout, self._rank)

    def refresh(self) -> None:
        """See `ParamBucket`. Parameters whose ``data`` was replaced are moved in again."""
        for index in self._moved_out():
            self._forms[index].check(self.params[index])
            self._take_in(index)

    def fill(self, chosen: Collection[int] | None = None) -> Tensor:
        """See `ParamBucket`. The row is the parameters, unless the step has replaced their ``data``.

        Raises nothing, as the other ranks wait: what does not fit is left to the next `refresh`.
        """
        for index in self._moved_out(chosen):
            if self._forms[index].fits(self.params[index]):
                self._take_in(index)
        return self._flat

    def settle(self, flat: Tensor, chosen: Collection[int] | None = None) -> None:
        """See `ParamBucket`. The values are there already; autograd is told that they changed."""
        assert flat is self._flat
        others = _picked(self._others, chosen)
        torch.autograd.graph.increment_version([self.params[index] for index in others])
        if self._apart:
            self._copy_out([index for index in others if index in self._apart])

    @torch.no_grad()
    def _copy_out(self, indices: list[int]) -> None:
        """Copy from the flat tensor to parameters that do not lie in it."""
        places = _views(self._flat, self._forms, self.layout)
        for index in indices:
            if self._forms[index].fits(self.params[index]):
                self.params[index].copy_(places[index])

    def _moved_out(self, chosen: Collection[int] | None = None) -> list[int]:
        """Find the parameters that do not lie in the bucket any more."""
        indices = range(len(self.params)) if chosen is None else chosen
        return [index for index in indices if self.params[index].data_ptr() != self._addresses[index]]

    @torch.no_grad()
    def _take_in(self, index: int) -> None:
        """Copy a parameter's values into its place and, unless it is shared, put it there."""
        param, view = self.params[index], self._views[index]
        if view.data_ptr() != self._addresses[index]:  # its storage was given other memory
            self._apart.add(index)
            _views(self._flat, self._forms, self.layout)[index].copy_(param)
            return
        view.copy_(param)
        param.data = view


class PackedBucket:
    """A bucket whose parameters stay where they are; each gather packs and unpacks.

    Args:
        params: the parameters.
        layout: where each lies in the flat tensor of a gather.
        rank: this group rank.
    """

    def __init__(self, params: list[Tensor], layout: Layout, rank: int) -> None:
        """Take note of who owns what; nothing is allocated."""
        self.params = params
        self.layout = layout
        self._own, self._others = _members(layout, rank)
        self._forms = list(map(Form.of, params))

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

    def _copy(self, flat: Tensor, indices: list[int], *, into_params: bool) -> None:
        """Copy between some parameters and their places, all in one call."""
        if not indices:
            return
        views = _views(flat, self._forms, self.layout)
        places, params = [views[i] for i in indices], [self.params[i] for i in indices]
        with torch.no_grad():
            torch._foreach_copy_(*((params, places) if into_params else (places, params)))
