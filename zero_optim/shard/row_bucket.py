"""A unit's bucket: parameters are *whole* while their unit is in use, else *freed*. No communication.

Note [Freed in place]
    Autograd saves a parameter as the tensor object, but its view (``weight.t()``) by the storage. New
    ``data`` would keep the old storage until the backward pass ends, which would miss the second gather's
    values. So one storage stays, and its memory comes and goes: Note [Pages that move] in
    `zero_optim.shard.pages`. PyTorch does not check reads of an emptied storage. So a freed parameter
    shows one expanded NaN (zero for dtypes without), and a write in place raises. `settle` changes the
    version only after a step or load.

Note [Views that somebody keeps]
    While the unit is freed, a user's view shows NaN on the CPU and loses writes; the next gather or step
    raises if autograd counts them. On an accelerator operators raise or read address 0. Only a mode for all
    operators, at some µs each, could guard this: storage references do not tell these views from autograd's,
    which `zero_optim.ddp.full.saved_reads` guards.

Note [Kept in one dtype, computed with in another]
    The row keeps the original dtype; owners round it into the flat tensor. Freed parameters have the compute
    dtype too: a change would lose autograd's node that accumulates the gradient. Writes to whole parameters
    count as for masters (Note [Masters and their parameters] in `zero_optim.step.leaves`).

Note [Freed one by one]
    `take_in` copies this rank's rows out of one parameter at a time, and `let_go` releases its memory, so a
    new bucket needs no second copy of its unit.
"""

from collections.abc import Collection, Iterator, Mapping
from collections.abc import Set as AbstractSet
from typing import NoReturn

import torch
from torch import Tensor

from zero_optim.compat import private
from zero_optim.compat.streams import record_use
from zero_optim.flow.flow import Flow
from zero_optim.flow.schedule import ZERO3
from zero_optim.plan.layout import Layout
from zero_optim.plan.strides import DTYPE_AS_KEPT, STRIDES_WHEN_WHOLE, kept_dtype
from zero_optim.shard.freed import ShownWhenFreed
from zero_optim.shard.keeping import RowKeeping
from zero_optim.shard.pages import FreePages
from zero_optim.shard.places import Form
from zero_optim.shard.row import Place, UnitFlat, UnitRow
from zero_optim.shard.storage import KeptRows

_WRITE = (
    "a parameter of {name} was written to, or given other memory, while it was not whole, so no owner has "
    "seen it: write inside zero_optim.ddp.unsharded(module), which hands what was written to the owners. To "
    "convert or move a model, call its .to(), .half() or .cuda() before the first forward pass"
)
_PINNED = (
    "the parameters of {name} are whole for somebody to read or write: leave unsharded() before "
    "they are stepped, averaged, saved or loaded"
)


class Uncopied:
    """Refuses copies, which would gather in the original's place."""

    __slots__ = ()

    def __reduce__(self) -> NoReturn:
        """Refuse to be copied or pickled."""
        raise RuntimeError(
            "a fully sharded model and its optimizer cannot be copied or pickled: no rank holds the "
            "parameters. Save model.state_dict(), or use zero_optim.checkpoint.save. For averages, as "
            "AveragedModel makes them, give the optimizer ema_decay"
        )


class UnitBucket(Uncopied):
    """A `RowBucket`: Note [Freed in place]. Starts empty. Whole parameters may have another ``dtype``.

    ``gathers`` are under way. ``is_left``: state dicts show the parameters as they are. While
    ``num_pins`` users need them whole, nothing may change them. ``num_changes`` counts possible changes of
    the rows.
    """

    def __init__(
        self,
        params: list[Tensor],
        layout: Layout,
        rank: int,
        label: str = "",
        *,
        dtype: torch.dtype | None = None,
        keeping: RowKeeping | None = None,
        pages: FreePages | None = None,
    ) -> None:
        self.params = params
        self.label = label
        self.schedule = ZERO3
        first, pages = params[0], FreePages() if pages is None else pages
        dtype = first.dtype if dtype is None else dtype
        self._flat = UnitFlat(list(map(Form.of, params)), layout, rank, dtype, first.device, pages)
        # The parameters have the compute dtype already where another bucket held them.
        self._own = UnitRow(self._flat, kept_dtype(first), keeping)
        self._freed = ShownWhenFreed(params, dtype, first.device)
        self.is_whole = self.is_left = self._has_changed = False
        self.gathers = Flow()
        self.num_pins = self.num_changes = 0

    @property
    def layout(self) -> Layout:
        """See `ParamBucket`."""
        return self._flat.layout

    @property
    def row(self) -> Tensor:
        """This rank's permanent row of the flat tensor, 1-D; see `UnitRow`."""
        return self._own.values

    @property
    def device(self) -> torch.device:
        """See `ParamBucket`."""
        return self._flat.tensor.device

    @property
    def nbytes(self) -> int:
        """Bytes of the flat tensor while whole."""
        return self._flat.nbytes

    @property
    def nbytes_to_gather(self) -> int:
        """See `ParamBucket`."""
        return self.nbytes

    @property
    def nbytes_of_row(self) -> int:
        """Bytes of this rank's row."""
        return self._own.numel * self.row.element_size()

    @property
    def nbytes_live(self) -> int:
        """Current bytes beside the row."""
        return self._flat.nbytes_live

    @property
    def is_rounded(self) -> bool:
        """Whether parameters and row have different dtypes."""
        return self._own.is_rounded

    @property
    def storage_id(self) -> int:
        """An id of the flat tensor's storage, valid without memory."""
        return int(private.cdata(self._flat.tensor.untyped_storage()))

    def shares_memory(self, tensor: Tensor) -> bool:
        """Whether a tensor is a view of the flat tensor, which dies with it."""
        return self._flat.is_viewed_by(tensor)

    def shows_freed(self, tensor: Tensor) -> bool:
        """Whether a tensor is a view of a freed parameter's data."""
        return self._freed.is_viewed_by(tensor)

    # ------------------------------------------------------------------ rows

    def take_in(self, values: Mapping[Tensor, Tensor]) -> None:
        """Copy this rank's part of whole values into its row."""
        self._own.take_in([values.get(param) for param in self.params])

    def let_go(self, params: AbstractSet[Tensor] | None = None) -> None:
        """Make some parameters, by default all, show NaN and release their memory."""
        for param, form, nan in zip(self.params, self._flat.forms, self._freed.tensors, strict=True):
            if params is None or param in params:
                setattr(param, STRIDES_WHEN_WHOLE, form.stride)
                if self.is_rounded:
                    setattr(param, DTYPE_AS_KEPT, self.row.dtype)
                param.data = nan
        self._freed.note_versions()

    def has_new_place(self) -> None:
        """Note that the parameters came from other buckets, for autograd."""
        self._has_changed = True

    def places(self) -> Iterator[Place]:
        """Yield this rank's parts of parameters, as views of `row`."""
        self._own.make()
        return self._own.places()

    def kept(self) -> Iterator[tuple[Tensor, Tensor]]:
        """See `RowBucket`."""
        return ((self.params[place.param], place.rows) for place in self.places())

    def all_kept(self) -> Iterator[tuple[Tensor, KeptRows]]:
        """See `RowBucket`."""
        own = dict(self.kept())
        for param, form in zip(self.params, self._flat.forms, strict=True):
            yield param, KeptRows(form.stride, own.get(param))

    def row_as_sent(self) -> Tensor:
        """Return a copy of this rank's row in the flat tensor's dtype."""
        row = self._flat.tensor.new_empty(self._own.numel)
        self._own.read(row)
        return row

    def views(self, flat: Tensor) -> list[Tensor]:
        """View the parameters in a flat tensor of any dtype."""
        return self._flat.views_of(flat)

    def flat_as_kept(self) -> Tensor:
        """Return a flat tensor in the row's dtype, with zeros beside this rank's row."""
        flat = self._flat.tensor.new_zeros(self.layout.numel, dtype=self.row.dtype)
        self._own.read(flat[self._flat.span])
        return flat

    def take_over(self, flat: Tensor) -> None:
        """Copy this rank's row out of a `flat_as_kept` and free the parameters; RuntimeError if pinned."""
        self.check_unpinned()
        self._own.write(flat[self._flat.span])
        self.has_changed()

    # ------------------------------------------------------------------ steps and writes

    def check_unpinned(self) -> None:
        """Raise RuntimeError if somebody needs the parameters whole and unchanged."""
        if self.num_pins:
            raise RuntimeError(_PINNED.format(name=self.label))

    def refresh(self) -> None:
        """Raise, before a step, if a parameter is pinned or was given other memory."""
        self.check_unpinned()
        self._check_untouched()

    def _check_untouched(self) -> None:
        shown = self._flat.views if self.is_whole else self._freed.tensors
        for param, tensor in zip(self.params, shown, strict=True):
            if param.numel() and param.data_ptr() != tensor.data_ptr():
                raise RuntimeError(_WRITE.format(name=self.label))
        if not self.is_whole and self._freed.was_written():
            raise RuntimeError(_WRITE.format(name=self.label))

    def has_changed(self) -> None:
        """Note that the rows changed, and free the parameters."""
        if self.num_pins:  # refused by `check_unpinned`, so nothing has changed
            return
        self._has_changed = True
        self.num_changes += 1
        self.free()
        self.pass_over()

    def pass_over(self) -> None:
        """Accept the versions that a step changed."""
        self._freed.note_versions()

    @torch.no_grad()
    def take_written(self) -> None:
        """Copy writes to whole parameters into the row; RuntimeError if a dtype, device or shape changed."""
        assert self.is_whole
        self.num_changes += 1
        for param, form, view in zip(self.params, self._flat.forms, self._flat.views, strict=True):
            if param.numel() and param.data_ptr() != view.data_ptr():
                form._replace(dtype=view.dtype).check(param)
                view.copy_(param)
                param.data = view
        self._own.take_written()

    # ------------------------------------------------------------------ whole and freed

    def fill(self) -> Tensor:
        """Allocate the flat tensor and copy this rank's row into it."""
        self._check_untouched()
        self.gathers.wait()  # of what stays: this stream will write a stamp there
        if not self._flat.stays:
            self._flat.grow()
            with torch.no_grad():
                self._own.read(self._flat.own)
        return self._flat.tensor

    def settle(self, flat: Tensor, changed: Collection[Tensor] | None = None) -> None:
        """Make the parameters whole after all rows have come."""
        assert flat is self._flat.tensor
        self._show(self._flat.views)
        self.is_whole = True
        if self._has_changed:
            torch.autograd.graph.increment_version(self.params)
            self._has_changed = False

    def arrive(self) -> None:
        """Make the current stream wait for the gather, even if another has."""
        self.gathers.wait()
        if self.is_whole:
            record_use(self._flat.tensor)  # which may be freed while this stream still reads it

    def free(self) -> None:
        """Wait for the gather, then free the parameters and the flat tensor's memory."""
        self.arrive()
        if not self.is_whole:
            return
        self._show(self._freed.tensors)
        self._flat.empty()
        self.is_whole = False
        if not self._flat.stays:
            self.gathers.abandon()
        self._freed.note_versions()

    def _show(self, tensors: list[Tensor]) -> None:
        for param, tensor in zip(self.params, tensors, strict=True):
            param.data = tensor


class WideBucket:
    """A `UnitBucket`'s values in the owners' dtype, gathered apart for a state dict or a load."""

    def __init__(self, bucket: UnitBucket) -> None:
        self._bucket = bucket
        self._flat: Tensor | None = None
        self.values: dict[Tensor, Tensor] = {}
        self.params, self.layout, self.device = bucket.params, bucket.layout, bucket.device
        self.label = f"{bucket.label}, as owners keep it"
        self.schedule = bucket.schedule
        self.nbytes = self.nbytes_to_gather = self.layout.numel * bucket.row.element_size()

    def refresh(self) -> None:
        """See `UnitBucket.refresh`."""
        self._bucket.refresh()

    def fill(self) -> Tensor:
        """Return the flat tensor with this rank's row; raises as `UnitBucket.refresh`."""
        self.refresh()
        self._flat = self._bucket.flat_as_kept()
        return self._flat

    def settle(self, flat: Tensor, changed: Collection[Tensor] | None = None) -> None:
        """Set `values` after all rows have come."""
        self.values = dict(zip(self.params, self._bucket.views(flat), strict=True))

    def take_over(self) -> None:
        """Copy written values into the owners' rows; the parameters are freed."""
        assert self._flat is not None  # it was filled
        self._bucket.take_over(self._flat)
