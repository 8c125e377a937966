"""A unit's bucket: parameters that are whole only while their unit is in use. Nothing here communicates.

A rank keeps its own row of the bucket for good, in memory of its own. The flat tensor that holds all rows is
there only while the parameters are *whole*; the rest of the time they are *freed*.

Note [Freed in place]
    Autograd saves a parameter as the tensor object, but a view of it, such as ``weight.t()``, by its storage.
    If the parameter were only given other data, the old storage would live until the backward pass is over. A
    new storage at the second gather would not be what the backward pass reads. So there is one flat tensor
    for ever, with one storage, which loses its memory when it is freed, and gets some again when it is
    filled. All parameters are ordinary views of it. On the CPU the addresses stay, and show NaN meanwhile:
    Note [Pages that move] in `zero_optim.shard.unit_memory`. On an accelerator the storage is emptied, and
    PyTorch does not check reads of an empty storage.

    So a freed parameter shows other data, of its shape: one element, NaN (zero for dtypes without NaN),
    expanded. A write in place raises, as several elements have one place in memory. Only if the parameters
    were stepped or loaded in between does `settle` tell autograd that they changed.

Note [Views that somebody keeps]
    A view of a whole parameter that a user keeps shows NaN on the CPU while the unit is freed, and the values
    of then when it is whole again. A write to it meanwhile is lost; if autograd counts it as a write to the
    parameter, the next gather or step raises. On an accelerator it has no memory meanwhile: many operators
    raise, others read address 0. Nothing can stand in between: only a mode for all operators, which takes
    some µs for each, runs before an operator; and counting who refers to the storage does not tell such views
    from those that autograd saved. What autograd reads is guarded (`zero_optim.ddp.full.saved_reads`).

Note [Kept in one dtype, computed with in another]
    A bucket may have a compute dtype. Then the row has the dtype and the values that the parameters had, not
    rounded. The flat tensor has the compute dtype: each owner rounds its row into it. So have the parameters,
    whole and freed alike, since autograd would lose the node that adds up a parameter's gradient if its dtype
    went to and fro. The optimizer steps the rows. What was written to whole parameters is taken over as
    masters take it over (Note [Masters and their parameters] in `zero_optim.step.leaves`). Whoever needs all
    values as they are kept makes a `WideBucket`.

Note [Freed one by one]
    A bucket begins without memory, and its parameters are left as they are. Then `take_in` copies the rows
    that this rank keeps out of one parameter after the other, and `let_go` releases the memory that it had.
    So whoever makes buckets never needs a second copy of the model, nor even of a unit.
"""

from collections.abc import Iterator, Mapping
from collections.abc import Set as AbstractSet
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from zero_optim.compat import private
from zero_optim.compat.streams import Stream, current_stream, is_asynchronous, record_use
from zero_optim.plan.layout import Layout
from zero_optim.plan.memory import DTYPE_AS_KEPT, STRIDES_WHEN_WHOLE, kept_dtype
from zero_optim.shard.freed import ShownWhenFreed
from zero_optim.shard.places import Form
from zero_optim.shard.uncopied import Uncopied
from zero_optim.shard.unit_forms import KeptRows, UnitForms
from zero_optim.shard.unit_row import UnitFlat, UnitRow

if TYPE_CHECKING:
    from zero_optim.comm.started import Pending

_WRITE = (
    "a parameter of {name} was written to, or given other memory, while it was not whole, so no owner has "
    "seen it: write inside zero_optim.ddp.unsharded(module), which hands what was written to the owners. To "
    "convert or move a model, call its .to(), .half() or .cuda() before the first forward pass"
)
_PINNED = (
    "the parameters of {name} are whole for somebody to read or write: leave unsharded() before "
    "they are stepped, averaged, saved or loaded"
)


class UnitBucket(Uncopied):
    """A `ParamBucket` whose parameters can be freed; see Note [Freed in place].

    It begins empty, and is used when all parameters were taken in and let go: Note [Freed one by one].

    Args:
        params: the parameters.
        layout: where each lies in the flat tensor.
        rank: this group rank.
        label: names the bucket in messages.
        unit_forms: how its parameters are kept; None for their own dtype and ordinary memory.

    Attributes:
        is_whole: the parameters can be read.
        coming: the gather that makes them whole, if one is under way.
        is_left: state dicts are to show the parameters as they are, whole or freed.
        num_pins: how many users need them whole until they say that they are done; nothing may change them.
        num_changes: how often the rows may have got other values.
    """

    def __init__(
        self,
        params: list[Tensor],
        layout: Layout,
        rank: int,
        label: str = "",
        unit_forms: UnitForms | None = None,
    ) -> None:
        self.params = params
        self.label = label
        first, forms = params[0], UnitForms() if unit_forms is None else unit_forms
        dtype = forms.compute_dtypes.get(first, first.dtype)
        self._flat = UnitFlat(list(map(Form.of, params)), layout, rank, dtype, first.device, forms.pages)
        # The parameters have the compute dtype already where another bucket held them.
        self._own = UnitRow(self._flat, kept_dtype(first), forms.keeping)
        self._freed = ShownWhenFreed(params, dtype, first.device)
        self.is_whole = self.is_left = self._has_changed = False
        self.coming: Pending | None = None
        self.num_pins = self.num_changes = 0
        self._came: Pending | None = None  # the last gather, for streams that have not waited for it
        self._came_on: Stream | None = None  # the one that has

    @property
    def layout(self) -> Layout:
        """See `ParamBucket`."""
        return self._flat.layout

    @property
    def row(self) -> Tensor:
        """What this rank keeps for good: its row of the flat tensor, 1-D; see `UnitRow`."""
        return self._own.values

    @property
    def device(self) -> torch.device:
        """See `ParamBucket`."""
        return self._flat.tensor.device

    @property
    def nbytes(self) -> int:
        """The size of the flat tensor while the parameters are whole."""
        return self._flat.nbytes

    @property
    def nbytes_to_gather(self) -> int:
        """See `ParamBucket`."""
        return self.nbytes

    @property
    def nbytes_of_row(self) -> int:
        """The size of what this rank keeps."""
        return self._own.numel * self.row.element_size()

    @property
    def nbytes_live(self) -> int:
        """Bytes of the flat tensor right now, beside the row: all, or none."""
        return self._flat.nbytes_live

    @property
    def is_rounded(self) -> bool:
        """Whether the parameters have another dtype than what this rank keeps of them."""
        return self._own.is_rounded

    @property
    def storage_id(self) -> int:
        """What tells the flat tensor's storage from others, also while it has no memory."""
        return int(private.cdata(self._flat.tensor.untyped_storage()))

    def shares_memory(self, tensor: Tensor) -> bool:
        """Whether a tensor is a view of the flat tensor, so that it dies when this is freed."""
        return self._flat.is_viewed_by(tensor)

    def shows_freed(self, tensor: Tensor) -> bool:
        """Whether a tensor is a view of what a parameter shows while it is freed."""
        return self._freed.is_viewed_by(tensor)

    # ------------------------------------------------------------------ rows

    def take_in(self, values: Mapping[Tensor, Tensor]) -> None:
        """Copy what this rank owns into its row, out of whole values of some parameters."""
        self._own.take_in([values.get(param) for param in self.params])

    def let_go(self, params: AbstractSet[Tensor] | None = None) -> None:
        """Have some parameters, by default all, show NaN from now on; the memory they had is released."""
        for param, form, nan in zip(self.params, self._flat.forms, self._freed.tensors, strict=True):
            if params is None or param in params:
                setattr(param, STRIDES_WHEN_WHOLE, form.stride)
                if self.is_rounded:
                    setattr(param, DTYPE_AS_KEPT, self.row.dtype)
                param.data = nan
        self._freed.note_versions()

    def has_new_place(self) -> None:
        """Take note that its parameters were in other buckets: autograd is told when they are whole again."""
        self._has_changed = True

    def kept(self) -> Iterator[tuple[Tensor, Tensor]]:
        """List the parameters of which this rank owns rows, each with these rows, views of `row`."""
        self._own.make()
        for place in self._own.places():
            yield self.params[place.param], place.rows

    def all_kept(self) -> Iterator[tuple[Tensor, KeptRows]]:
        """List all parameters, each with what this rank keeps of it."""
        own = dict(self.kept())
        for param, form in zip(self.params, self._flat.forms, strict=True):
            yield param, KeptRows(form.stride, own.get(param))

    def row_as_sent(self) -> Tensor:
        """Copy this rank's row, in the dtype of the flat tensor."""
        row = self._flat.tensor.new_empty(self._own.numel)
        self._own.read(row)
        return row

    def views(self, flat: Tensor) -> list[Tensor]:
        """View the parameters in a flat tensor of any dtype."""
        return self._flat.views_of(flat)

    def flat_as_kept(self) -> Tensor:
        """Make a flat tensor in the dtype that rows are kept in, with this rank's row; the rest is zero."""
        flat = self._flat.tensor.new_zeros(self.layout.numel, dtype=self.row.dtype)
        self._own.read(flat[self._flat.span])
        return flat

    def take_over(self, flat: Tensor) -> None:
        """Take this rank's row out of what `flat_as_kept` made, and free the parameters.

        Raises:
            RuntimeError: somebody needs them whole. Nothing has changed.
        """
        self.check_unpinned()
        self._own.write(flat[self._flat.span])
        self.has_changed()

    # ------------------------------------------------------------------ steps and writes

    def check_unpinned(self) -> None:
        """Raise RuntimeError if somebody needs the parameters whole: nothing may change them."""
        if self.num_pins:
            raise RuntimeError(_PINNED.format(name=self.label))

    def refresh(self) -> None:
        """Check, before a step, that nobody has given a parameter other memory, or needs it whole."""
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
        """Take note that rows have other values than the parameters, and free these."""
        if self.num_pins:  # refused by `check_unpinned`, so nothing has changed
            return
        self._has_changed = True
        self.num_changes += 1
        self.free()
        self.pass_over()

    def pass_over(self) -> None:
        """Take note that versions may have changed in a step, which counts as a write to parameters."""
        self._freed.note_versions()

    @torch.no_grad()
    def take_written(self) -> None:
        """Take this rank's row out of the whole parameters, which the user has written to.

        Raises:
            RuntimeError: a parameter was given another dtype, device or shape.
        """
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
        """See `ParamBucket`: give the flat tensor memory, with this rank's row in it."""
        self._check_untouched()
        if self._came is not None:  # what stays: this stream will write a stamp there
            self._came.wait()
        if not self._flat.stays:
            self._flat.grow()
            with torch.no_grad():
                self._own.read(self._flat.own)
        return self._flat.tensor

    def settle(self, flat: Tensor) -> None:
        """Show the parameters whole, once the flat tensor has all rows."""
        assert flat is self._flat.tensor
        self._show(self._flat.views)
        self.is_whole = True
        self._came, self.coming = self.coming if is_asynchronous(flat.device) else None, None
        self._came_on = current_stream(flat.device)
        if self._has_changed:
            torch.autograd.graph.increment_version(self.params)
            self._has_changed = False

    def arrive(self) -> None:
        """Wait, with the current stream, for the gather, also where another stream has waited for it."""
        if self.coming is not None:
            self.coming.wait()
        elif self._came is not None and self.is_whole and current_stream(self.device) != self._came_on:
            self._came.wait()
            record_use(self._flat.tensor)  # which may be freed while this stream still reads it

    def free(self) -> None:
        """Give up the flat tensor's memory, after the gather under way; the parameters show NaN."""
        self.arrive()
        if not self.is_whole:
            return
        self._show(self._freed.tensors)
        self._flat.empty()
        self.is_whole = False
        if not self._flat.stays:
            self._came = None
        self._freed.note_versions()

    def _show(self, tensors: list[Tensor]) -> None:
        for param, tensor in zip(self.params, tensors, strict=True):
            param.data = tensor


class WideBucket:
    """The values of a `UnitBucket` in the dtype that owners keep, for a state dict or a load.

    It is gathered like a bucket, in memory of its own. The parameters of the model stay as they are. After
    the gather `values` has, for each parameter, what stands for it.
    """

    def __init__(self, bucket: UnitBucket) -> None:
        self._bucket = bucket
        self._flat: Tensor | None = None
        self.values: dict[Tensor, Tensor] = {}
        self.params, self.layout, self.device = bucket.params, bucket.layout, bucket.device
        self.label = f"{bucket.label}, as owners keep it"
        self.nbytes = self.nbytes_to_gather = self.layout.numel * bucket.row.element_size()

    def refresh(self) -> None:
        """See `UnitBucket.refresh`."""
        self._bucket.refresh()

    def fill(self) -> Tensor:
        """Make the flat tensor, with this rank's row; raises as `UnitBucket.refresh`."""
        self.refresh()
        self._flat = self._bucket.flat_as_kept()
        return self._flat

    def settle(self, flat: Tensor) -> None:
        """Show the values, once the flat tensor has all rows."""
        self.values = dict(zip(self.params, self._bucket.views(flat), strict=True))

    def take_over(self) -> None:
        """Have the owner of each row keep what was written to the values; the parameters are freed."""
        assert self._flat is not None  # it was filled
        self._bucket.take_over(self._flat)
