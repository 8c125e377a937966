"""A bucket of parameters: its members, where their values lie, and its row of the schedule. No communication.

There is one class of buckets. They differ in their ``values``, which have no common ancestor: those whole on
every rank in `zero_optim.shard.whole_values`, those of units in `zero_optim.shard.rows.row_values`, those of
DTensors in `zero_optim.dtensor.held_values`.
"""

from collections.abc import Callable, Collection, Sequence
from functools import partial
from typing import Any, Generic, Protocol, TypeVar

import torch
from torch import Tensor

from zero_optim.compat import private
from zero_optim.flow.schedule import ZERO1, Placement, Schedule
from zero_optim.plan.layout import Layout
from zero_optim.plan.pieces import Piece, is_whole
from zero_optim.plan.slices import Slices
from zero_optim.shard.places import Form


class Members:
    """The parameters of a bucket, and their places in a 1-D flat tensor with a row for each owner.

    ``slices``: in which it is gathered; None if owners broadcast rows. ``label``: names it in messages.
    ``own``, ``others``: pieces that this rank owns, and the rest, each with its parameter's index.
    """

    def __init__(
        self,
        params: list[Tensor],
        layout: Layout,
        rank: int,
        label: str = "",
        *,
        slices: Slices | None = None,
        dtype: torch.dtype | None = None,  # of the flat tensor; None for that of the parameters
    ) -> None:
        self.params = params
        self.layout, self.slices = layout, slices
        self.rank = rank
        self.label = label
        self.forms = list(map(Form.of, params))
        self.device, self.dtype = self.forms[0].device, dtype or self.forms[0].dtype
        pieces = layout.pieces([form.size for form in self.forms])
        parts = [(index, piece) for index, of_param in enumerate(pieces) for piece in of_param]
        self.own = [part for part in parts if part[1].owner == rank]
        self.others = [part for part in parts if part[1].owner != rank]

    def __reduce__(self) -> tuple[Callable[..., "Members"], tuple[object, ...]]:
        """Copy and pickle with the forms that the copied parameters have then."""
        return partial(Members, slices=self.slices), (self.params, self.layout, self.rank, self.label)

    def relabel(self, label: str) -> None:
        """Take the name that a later plan has for the bucket."""
        self.label = label

    def views(self, flat: Tensor) -> list[Tensor]:
        """View the parameters in a flat tensor of any dtype."""
        starts = self.layout.offsets()
        return [
            flat.as_strided(form.size, form.stride, at) for form, at in zip(self.forms, starts, strict=True)
        ]

    def rows(self, flat: Tensor) -> list[tuple[int, Tensor]]:
        """List what owners send of a flat tensor, in bytes."""
        octets, size = flat.view(torch.uint8), flat.element_size()
        filled = (row for row in self.layout.rows if row.stop > row.start)
        return [(row.owner, octets[row.start * size : row.stop * size]) for row in filled]

    def others_of(self, changed: Collection[Tensor] | None) -> list[tuple[int, Piece]]:
        """Return the others' pieces of parameters in ``changed``, of all for None."""
        return [part for part in self.others if changed is None or self.params[part[0]] in changed]

    def check(self) -> None:
        """Raise RuntimeError if a parameter's dtype, device or shape changed."""
        for form, param in zip(self.forms, self.params, strict=True):
            form.check(param)

    @torch.no_grad()
    def copy(self, flat: Tensor, parts: Sequence[tuple[int, Piece]], *, into_params: bool) -> None:
        """Copy pieces between a flat tensor and the parameters, whose versions change."""
        if not parts:
            return
        views = self.views(flat)
        places = [_rows(views[index], piece) for index, piece in parts]
        params = [_rows(self.params[index], piece) for index, piece in parts]
        private.foreach_copy_(*((params, places) if into_params else (places, params)))


def _rows(tensor: Tensor, piece: Piece) -> Tensor:
    """View rows of a tensor; a write changes the tensor's version."""
    return tensor if is_whole(piece, tensor.shape) else tensor.detach()[piece.start : piece.stop]


class Values(Protocol):
    """What the engine asks of values. ``is_in_place``: the parameters lie in their flat tensor, and stay."""

    is_in_place: bool

    def written(self) -> list[tuple[int, int]]:
        """Return the places in memory, as addresses, that `refresh` will write to."""
        ...

    def refresh(self) -> None:
        """Take over the user's changes before a step; RuntimeError if that cannot be."""
        ...


class GatheredValues(Protocol):
    """Values of which owners send rows; ``sent``: those of a flat tensor that stays, else nothing."""

    sent: Sequence[tuple[int, Tensor]]

    def fill(self) -> tuple[Tensor, Tensor | None]:
        """Return the flat tensor with this rank's row; or without it, and the row, for slices."""
        ...

    def receive(self, flat: Tensor, changed: Collection[Tensor] | None = None) -> None:
        """Take what has come to ``flat`` for parameters, or those in ``changed``; tell autograd."""
        ...


V_co = TypeVar("V_co", covariant=True)


class Bucket(Generic[V_co]):
    """Parameters that are sent together, and the row of the table by which the engine runs them."""

    def __init__(self, members: Members, values: V_co, schedule: Schedule = ZERO1) -> None:
        self.members, self.values, self.schedule = members, values, schedule
        self.params, self.layout, self.device = members.params, members.layout, members.device
        self.nbytes = members.layout.numel * members.dtype.itemsize  # of the flat tensor with padding

    def __reduce__(self) -> tuple[Callable[..., "Bucket[Any]"], tuple[object, ...]]:
        """Copy and pickle without the readers of values that are whole, which have the original."""
        is_whole_everywhere = self.schedule.parameters is Placement.WHOLE
        return Bucket, (self.members, self.values, ZERO1 if is_whole_everywhere else self.schedule)

    def run_by(self, recipe: Schedule) -> None:
        """Take another row of the table."""
        self.schedule = recipe

    def free(self) -> None:
        """Let go of what this rank does not own, where the row says so: values of units can."""
        values: Any = self.values
        values.free()

    @property
    def is_active(self) -> bool:
        """Whether a parameter trains or has a gradient."""
        return any(p.requires_grad or p.grad is not None for p in self.params)
