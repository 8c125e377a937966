"""A bucket of parameters and its flat tensor; here every rank has the parameters whole. No communication.

Note [Moving parameters]
    A moved parameter gets another storage; another thread or stream would then read released memory. So
    parameters whose ``data`` was replaced move only in `step` and in comm hooks, which the backward pass
    itself calls. Autograd saves a leaf as the tensor object and a view by its old storage, so that pass finds
    the same values. If a class replaces ``param.data`` in its own step, a gather moves the parameter on that
    thread and stream; the backward pass must not read it then.
"""

import itertools
from collections.abc import Callable, Collection, Iterable, Sequence
from functools import partial
from typing import ClassVar
from weakref import WeakSet

import torch
from torch import Tensor

from zero_optim.compat import private
from zero_optim.compat.memory import give_back_pages, is_seen_by_others, seen_outside
from zero_optim.flow.pending import Pending
from zero_optim.flow.schedule import ZERO1, Schedule
from zero_optim.plan.layout import Layout
from zero_optim.plan.pieces import Piece, is_whole
from zero_optim.plan.slices import Slices
from zero_optim.shard.places import Form, can_be_views, views_in, with_own_storages, zero_padding


class InFlat:
    """Parameters inside one flat tensor with own storages.

    Those whose places are in ``shared`` stay where others have their memory too; gathers copy them.
    """

    def __init__(
        self, params: Sequence[Tensor], forms: Sequence[Form], layout: Layout, shared: set[int]
    ) -> None:
        """Move the parameters in one by one, each releasing its old storage."""
        self.flat = torch.empty(layout.numel, dtype=forms[0].dtype, device=forms[0].device)
        self.shared = shared
        zero_padding(self.flat, layout)
        self._params, self._forms, self._layout = params, forms, layout
        self._views = with_own_storages(self.flat, forms, layout)
        self.addresses = [view.data_ptr() for view in self._views]
        for index in range(len(params)):
            self._take_in(index)
        _LIVING.add(self)

    def moved(self) -> list[int]:
        """List parameters with replaced ``data``."""
        addresses = list(map(Tensor.data_ptr, self._params))  # twice a step, hence the one comparison
        if addresses == self.addresses:
            return []
        pairs = zip(addresses, self.addresses, strict=True)
        return [index for index, (address, former) in enumerate(pairs) if address != former]

    def places(self, indices: Iterable[int]) -> list[tuple[int, int]]:
        """Return the first address of each parameter, and the address behind it."""
        return [
            (self.addresses[index], self.addresses[index] + self._views[index].nbytes) for index in indices
        ]

    def take_in_moved(self) -> list[int]:
        """Move parameters with replaced ``data`` back in; list those that do not fit."""
        moved = self.moved()
        copy_out(self._params, self.places(moved))
        fits = [self._forms[index].fits(self._params[index]) for index in moved]
        for index in itertools.compress(moved, fits):
            self._take_in(index)
        return [index for index, fit in zip(moved, fits, strict=True) if not fit]

    @torch.no_grad()
    def _take_in(self, index: int) -> None:
        param, view = self._params[index], self._views[index]
        if view.data_ptr() != self.addresses[index]:  # PyTorch has put shared memory into its storage
            self.shared.add(index)
        if index in self.shared:
            views_in(self.flat, self._forms, self._layout)[index].copy_(param)
            return
        view.copy_(param)
        param.data = view

    def give_back(self, index: int) -> None:
        """Return a parameter's memory to the system, unless a view of it exists."""
        view = self._views[index]
        is_here = view.data_ptr() == self.addresses[index]  # and not in shared memory
        if is_here and not is_seen_by_others(view):
            give_back_pages(view)


_LIVING: WeakSet[InFlat] = WeakSet()


def shared_params(params: Iterable[Tensor]) -> set[int]:
    """Return the ids of parameters whose memory somebody else has too: a buffer, a vector, another weight.

    Not those that another optimizer of this library has moved: it notices when they leave.
    """
    suspects = {id(param): param for param in params}
    seen = seen_outside(suspects.values())
    moved = {address for each in list(_LIVING) for address in each.addresses} if seen else set()
    return {key for key in seen if suspects[key].data_ptr() not in moved}


def copy_out(params: Iterable[Tensor], places: Sequence[tuple[int, int]]) -> None:
    """Copy the data of parameters that lies where others will be written, as after two were swapped."""
    for param in params if places else ():
        if any(start <= param.data_ptr() < stop for start, stop in places):
            param.data = param.data.clone()


class Bucket:
    """Parameters that are sent in one 1-D flat tensor, with a row for each owner; whole on every rank."""

    schedule: Schedule = ZERO1
    keeps_gather: ClassVar[bool] = False  # until `arrive`; else the engine does

    def __init__(
        self,
        params: list[Tensor],
        layout: Layout,
        rank: int,
        label: str = "",
        *,
        slices: Slices | None = None,  # in which it is gathered; None if owners broadcast rows
        dtype: torch.dtype | None = None,  # of the flat tensor; None for that of the parameters
        as_views: bool = True,  # moves the parameters into the flat tensor if they can be; ranks may differ
        shared: Collection[int] | None = None,  # ids of those that stay where they are; None to look
    ) -> None:
        self.params = params
        self.layout, self.slices = layout, slices
        self.rank = rank
        self.label = label  # names it in messages
        self.forms = list(map(Form.of, params))
        self.device, self.dtype = self.forms[0].device, dtype or self.forms[0].dtype
        self.nbytes = layout.numel * self.dtype.itemsize  # of the flat tensor with padding
        pieces = layout.pieces([form.size for form in self.forms])
        parts = [(index, piece) for index, of_param in enumerate(pieces) for piece in of_param]
        self.own = [part for part in parts if part[1].owner == rank]
        self._others = [part for part in parts if part[1].owner != rank]
        self._received = [params[index] for index in dict.fromkeys(index for index, _ in self._others)]
        if shared is None:
            shared = shared_params(params) if as_views else ()
        stay = {index for index, param in enumerate(params) if id(param) in shared}
        self.is_in_place = as_views and can_be_views(params)  # the parameters lie in the flat tensor
        self._in_flat = InFlat(params, self.forms, layout, stay) if self.is_in_place else None
        self.nbytes_to_gather = 0 if self.is_in_place else self.nbytes  # while one is pending
        self._lasting: Tensor | None = None  # a flat tensor, with its rows
        if self._in_flat is not None:
            self._keep(self._in_flat.flat)

    def _keep(self, flat: Tensor) -> None:
        self._lasting, self._sent = flat, rows_in(flat, self.layout)

    def __reduce__(self) -> tuple[Callable[..., "Bucket"], tuple[list[Tensor], Layout, int, str]]:
        """Copy and pickle as a new bucket of the copied parameters."""
        make = partial(Bucket, slices=self.slices, as_views=self.is_in_place)
        return make, (self.params, self.layout, self.rank, self.label)

    def relabel(self, label: str) -> None:
        """Take the name that a later plan has for it."""
        self.label = label

    def run_by(self, recipe: Schedule) -> None:
        """Take the row of the table by which the engine runs this bucket."""
        self.schedule = recipe

    @property
    def is_active(self) -> bool:
        """Whether a parameter trains or has a gradient."""
        return any(p.requires_grad or p.grad is not None for p in self.params)

    def views(self, flat: Tensor) -> list[Tensor]:
        """View the parameters in a flat tensor of any dtype."""
        return views_in(flat, self.forms, self.layout)

    def written(self) -> list[tuple[int, int]]:
        """Return the places, as addresses, of parameters with replaced ``data``: `refresh` writes there."""
        if self._in_flat is None or not (moved := self._in_flat.moved()):
            return []
        return self._in_flat.places(moved)

    def refresh(self) -> None:
        """Take over the user's changes; RuntimeError if a dtype, device or shape changed."""
        # Those that did not move fit: most steps compare addresses only.
        moved = range(len(self.params)) if self._in_flat is None else self._in_flat.take_in_moved()
        for index in moved:
            self.forms[index].check(self.params[index])

    def fill(self) -> Tensor:
        """Return the flat tensor with this rank's current row; raises nothing here, as other ranks wait."""
        if self._in_flat is not None:
            if self._in_flat.moved():
                self._in_flat.take_in_moved()
            return self._in_flat.flat
        flat = torch.zeros(self.layout.numel, dtype=self.dtype, device=self.device)
        self._copy(flat, self.own, into_params=False)
        return flat

    @property
    def own_row(self) -> Tensor | None:
        """This rank's row where a gather sends it from there, as `fill` leaves it out; else None."""
        return None

    def rows(self, flat: Tensor) -> list[tuple[int, Tensor]]:
        """List what owners send of a flat tensor, as `rows_in`."""
        return self._sent if flat is self._lasting else rows_in(flat, self.layout)

    def receive(self, flat: Tensor, changed: Collection[Tensor] | None = None) -> None:
        """Copy other ranks' rows of ``flat`` to the parameters, or to those in ``changed``; tell autograd."""
        others, received = self._others, self._received
        if changed is not None:
            others = [part for part in others if self.params[part[0]] in changed]
            received = [param for param in received if param in changed]
        if self._in_flat is not None:
            torch.autograd.graph.increment_version(received)
            shared = self._in_flat.shared
            if not shared:
                return
            others = [part for part in others if part[0] in shared]
            others = [part for part in others if self.forms[part[0]].fits(self.params[part[0]])]
        self._copy(flat, others, into_params=True)

    def keep(self, gather: Pending[None]) -> None:
        """Keep a gather that was started, if it `keeps_gather`."""
        raise NotImplementedError

    def arrive(self) -> None:
        """Make the current stream wait for the gather that it keeps."""
        raise NotImplementedError

    def stepped(self, *, changed: bool) -> None:
        """Note that a step is over, in which this rank's row may have changed."""

    def free(self) -> None:
        """Let go of what this rank does not own; here of nothing."""

    def give_back(self, param: Tensor) -> None:
        """Return the memory of a parameter that moved away to the system; no gather may follow."""
        if self._in_flat is not None:
            self._in_flat.give_back(next(index for index, own in enumerate(self.params) if own is param))

    def _copy(self, flat: Tensor, parts: Sequence[tuple[int, Piece]], *, into_params: bool) -> None:
        if not parts:
            return
        views = self.views(flat)
        places = [_rows(views[index], piece) for index, piece in parts]
        params = [_rows(self.params[index], piece) for index, piece in parts]
        with torch.no_grad():
            private.foreach_copy_(*((params, places) if into_params else (places, params)))


def rows_in(flat: Tensor, layout: Layout) -> list[tuple[int, Tensor]]:
    """List what owners send of a flat tensor, in bytes."""
    octets, size = flat.view(torch.uint8), flat.element_size()
    filled = (row for row in layout.rows if row.stop > row.start)
    return [(row.owner, octets[row.start * size : row.stop * size]) for row in filled]


def _rows(tensor: Tensor, piece: Piece) -> Tensor:
    """View rows of a tensor; a write changes the tensor's version."""
    return tensor if is_whole(piece, tensor.shape) else tensor.detach()[piece.start : piece.stop]
