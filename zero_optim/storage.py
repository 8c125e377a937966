"""A bucket's flat tensor and what connects it with the parameters.

Two kinds with one interface. `ViewBucket` keeps the parameters inside its flat tensor for good, so
that a gather lands in them without a copy; `PackedBucket` leaves ``param.data`` where the user put
it and copies through a flat tensor that lives for one gather. In both, `fill` gives a flat tensor
whose own row is up to date, and `settle` brings what the others' rows received into the parameters.
"""

from collections.abc import Collection, Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from zero_optim.layout import Layout
from zero_optim.plan import dense_strides


class Bucket(Protocol):
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


def is_active(bucket: Bucket) -> bool:
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


def _members(layout: Layout, rank: int) -> tuple[list[int], list[int]]:
    """Split a bucket's parameters into those ``rank`` owns and the others."""
    own = [extent.param for row in layout.rows if row.owner == rank for extent in row.extents]
    others = [extent.param for row in layout.rows if row.owner != rank for extent in row.extents]
    return own, others


def _picked(indices: list[int], chosen: Collection[int] | None) -> list[int]:
    return indices if chosen is None else [index for index in indices if index in chosen]


class ViewBucket:
    """A bucket whose parameters are views into one flat tensor.

    Args:
        params: the parameters; their ``data`` is replaced by views with the same values, shape and
            strides (dense strides where a parameter had gaps).
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
        self._views = _views(self._flat, self._forms, layout)
        self._rank = rank
        self._others = _members(layout, rank)[1]
        self._addresses = [view.data_ptr() for view in self._views]
        for index in range(len(params)):
            self._take_in(index)

    def __reduce__(self) -> tuple[type["ViewBucket"], tuple[list[Tensor], Layout, int]]:
        """Copy and pickle by building anew around the copied parameters."""
        return ViewBucket, (self.params, self.layout, self._rank)

    def refresh(self) -> None:
        """See `Bucket`. Parameters whose ``data`` was replaced are moved in again."""
        for index in self._moved_out():
            self._forms[index].check(self.params[index])
            self._take_in(index)

    def fill(self, chosen: Collection[int] | None = None) -> Tensor:
        """See `Bucket`. The row is the parameters, unless the step has replaced their ``data``.

        Raises nothing, as the other ranks wait: what does not fit is left to the next `refresh`.
        """
        for index in self._moved_out(chosen):
            if self._forms[index].fits(self.params[index]):
                self._take_in(index)
        return self._flat

    def settle(self, flat: Tensor, chosen: Collection[int] | None = None) -> None:
        """See `Bucket`. The values are there already; autograd is told that they changed."""
        assert flat is self._flat
        torch.autograd.graph.increment_version([self.params[i] for i in _picked(self._others, chosen)])

    def _moved_out(self, chosen: Collection[int] | None = None) -> list[int]:
        """Find the parameters that are no views of the bucket any more."""
        indices = range(len(self.params)) if chosen is None else chosen
        return [index for index in indices if self.params[index].data_ptr() != self._addresses[index]]

    def _take_in(self, index: int) -> None:
        """Copy a parameter's values into its place and make it a view of that place."""
        param, view = self.params[index], self._views[index]
        with torch.no_grad():
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
        """See `Bucket`."""
        for param, form in zip(self.params, self._forms, strict=True):
            form.check(param)

    def fill(self, chosen: Collection[int] | None = None) -> Tensor:
        """See `Bucket`."""
        flat = torch.zeros(self.layout.numel, dtype=self._forms[0].dtype, device=self._forms[0].device)
        self._copy(flat, _picked(self._own, chosen), into_params=False)
        return flat

    def settle(self, flat: Tensor, chosen: Collection[int] | None = None) -> None:
        """See `Bucket`."""
        self._copy(flat, _picked(self._others, chosen), into_params=True)

    def _copy(self, flat: Tensor, indices: list[int], *, into_params: bool) -> None:
        """Copy between some parameters and their places, all in one call."""
        if not indices:
            return
        views = _views(flat, self._forms, self.layout)
        places, params = [views[i] for i in indices], [self.params[i] for i in indices]
        with torch.no_grad():
            torch._foreach_copy_(*((params, places) if into_params else (places, params)))
