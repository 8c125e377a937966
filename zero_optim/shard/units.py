"""A unit's bucket: parameters that are whole only while their unit is in use. Nothing here communicates.

A rank keeps its own row of the bucket for good, in memory of its own. The flat tensor that holds all rows is
there only while the parameters are *whole*; the rest of the time they are *freed*.

Note [Freed by emptying the storage]
    Autograd saves a parameter as the tensor object, but a view of it, such as ``weight.t()``, by its storage.
    If the parameter were only given other data, the old storage would live until the backward pass is over,
    and nothing would be freed. A new storage at the second gather would not be what the backward pass reads.
    So there is one flat tensor for ever, with one storage. It is freed by emptying this storage, and filled
    again by growing it. All parameters of the bucket are ordinary views of it.

    A view of an empty storage must not be read: PyTorch does not check that. So a freed parameter shows other
    data, of its shape: one element, NaN (zero for dtypes without NaN), expanded. A read outside the
    unit's time gives NaN, and a write in place raises, as several elements have one place in memory. Each
    parameter has such an element to itself, since some code knows parameters by their address.

    Values that come back are the same as before, unless the parameters were stepped or loaded in between.
    Only then `settle` tells autograd that they changed: a backward pass through an older graph raises.

Note [Views that somebody keeps]
    A user may keep a view of a whole parameter, such as ``weight.t()`` in a list. It has no memory when the
    unit is freed, and the memory of other values when the unit is whole again. What a read of it does
    meanwhile is up to the operator: with PyTorch 2.13 on the CPU, indexing, printing, ``tolist()`` and
    products of matrices raise; ``sum()`` and others that go from element to element read address 0, and the
    process ends; ``numpy()`` shows memory of NumPy's. Nothing here can stand in between:

    - No hook runs before an operator but a mode for all operators, which takes some µs for each.
    - A storage can be told to raise, but only when it is written to.
    - To tell such views from those that autograd saved by counting who refers to the storage is not possible:
      for the latter it is emptied, and a graph may be kept. So nobody can be warned when a view is kept.
    - If the pages were given back and the address was kept (``madvise``), a read would show zeros, silently.

    What autograd reads is guarded (`zero_optim.ddp.saved_reads`), and what a module returns is copied.

Note [Kept in one dtype, computed with in another]
    A bucket may have a compute dtype. Then the row that a rank keeps has the dtype that the parameters had,
    and their values, not rounded. The flat tensor has the compute dtype: each owner rounds its row into it,
    and so many bytes are sent. So have the parameters, whole and freed alike, since autograd would lose the
    node that adds up a parameter's gradient if its dtype went to and fro. The optimizer steps the rows.
    Whoever needs all values as they are kept makes another flat tensor, see `zero_optim.shard.wide`.

    What was written to whole parameters is taken over as masters take it over (Note [Masters and their
    parameters] in `zero_optim.step.leaves`): an element that is still the row's, rounded, leaves the row as
    it is.

Note [Freed one by one]
    A bucket is made without memory, and its parameters are left as they are. Then `take_in` copies the rows
    that this rank keeps out of one parameter after the other, and `let_go` releases the memory that it had.
    So whoever makes buckets never needs a second copy of the model, nor even of a unit.
"""

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, NoReturn

import torch
from torch import Tensor

from zero_optim.compat.streams import is_asynchronous
from zero_optim.plan.layout import Layout
from zero_optim.plan.memory import DTYPE_AS_KEPT, STRIDES_WHEN_WHOLE, kept_dtype
from zero_optim.shard.keeping import Keeping
from zero_optim.shard.padding import zero_padding
from zero_optim.shard.places import Form, views_in
from zero_optim.shard.unit_memory import FreePages, UnitMemory

if TYPE_CHECKING:
    from zero_optim.comm.pending import Pending

_WRITE = (
    "a parameter of {name} was written to, or given other memory, while it was not whole, so no owner has "
    "seen it: write inside zero_optim.ddp.unsharded(module), which hands what was written to the owners. To "
    "convert or move a model (.to(), .half(), .cuda()), do so before it is wrapped"
)
_PINNED = (
    "the parameters of {name} are whole for somebody to read or write: leave unsharded() before "
    "they are stepped, averaged, saved or loaded"
)


@dataclass(frozen=True, slots=True, eq=False)
class KeptRows:
    """What a rank keeps of a parameter of a unit.

    Attributes:
        stride: of the parameter when it is whole, in elements.
        rows: those that this rank owns, in memory that stays; None if it owns none.
    """

    stride: tuple[int, ...]
    rows: Tensor | None


@dataclass(frozen=True, slots=True, eq=False)
class UnitForms:
    """How the parameters of units are kept.

    Attributes:
        compute_dtypes: of those that have, or get, another dtype than their owners keep, see `UnitBucket`.
        keeping: keeps their rows; None for ordinary memory.
        pages: of the CPU, of which flat tensors are made in turn.
    """

    compute_dtypes: Mapping[Tensor, torch.dtype] = field(default_factory=dict)
    keeping: Keeping | None = None
    pages: FreePages = field(default_factory=FreePages)

    def anew(self) -> "UnitForms":
        """Give the same forms for another optimizer, which keeps what it owns in files of its own.

        So the files of the former one are given up with its rows.
        """
        return self if self.keeping is None else replace(self, keeping=self.keeping.anew())


def is_freed(tensor: Tensor) -> bool:
    """Whether a tensor is what a freed parameter shows; not known of a single element."""
    return tensor.layout is torch.strided and tensor.numel() > 1 and not any(tensor.stride())


class UnitBucket:
    """A bucket whose parameters can be freed; see Note [Freed by emptying the storage].

    It begins empty, and is used when all parameters were taken in and let go: Note [Freed one by one].

    Args:
        params: the parameters.
        layout: where each lies in the flat tensor.
        rank: this group rank.
        label: see `ParamBucket`.
        unit_forms: how its parameters are kept; None for their own dtype and ordinary memory. See Note [Kept
            in one dtype, computed with in another].

    Attributes:
        row: what this rank keeps for good: its row of the flat tensor, 1-D, empty before the first parameter
            was taken in. If it owns everything, and keeps it in memory as it is computed with, that is the
            flat tensor, which is never emptied then.
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
        """Note where everything is to be."""
        self.params = params
        self.layout = layout
        self.label = label
        self._forms = list(map(Form.of, params))
        first = params[0]
        given = UnitForms() if unit_forms is None else unit_forms
        compute_dtype = given.compute_dtypes.get(first, first.dtype)
        self._keeping = given.keeping
        kept = kept_dtype(first)  # the parameters have the other one already where another bucket held them
        self._own = next(((row.start, row.stop) for row in layout.rows if row.owner == rank), (0, 0))
        self._shown = torch.empty(len(params), dtype=compute_dtype, device=first.device)
        self._shown.copy_(shown_when_freed(self._shown.shape, compute_dtype, first.device))
        self._octets = self._shown.view(torch.uint8).clone()
        self._nans = [one.expand(param.shape) for one, param in zip(self._shown, params, strict=True)]
        is_all = self._own == (0, layout.end_of_rows) and self._keeping is None
        self._owns_all = is_all and compute_dtype == kept
        # What owns all is never freed.
        self._memory = (
            UnitMemory(torch.empty(layout.numel, dtype=compute_dtype, device=first.device))
            if self._owns_all
            else given.pages.memory(layout.numel, compute_dtype, first.device)
        )
        self._flat = self._memory.flat
        self._views = self.views(self._flat)
        self.row = self._own_row() if self._owns_all else first.detach().new_empty(0, dtype=kept)
        self._has_row = False
        self._memory.free()
        self.is_whole = False
        self.coming: Pending | None = None
        self.is_left = False
        self.num_pins = 0
        self.num_changes = 0
        self._versions: list[int] = []  # of the parameters when they were freed
        self._has_changed = False

    def __deepcopy__(self, memo: object) -> NoReturn:
        """Refuse to copy."""
        self.__reduce__()

    def __reduce__(self) -> NoReturn:
        """Refuse to copy or pickle what only this rank's part is of."""
        raise RuntimeError(
            "an optimizer of a fully sharded model cannot be copied or pickled: no rank holds its "
            "parameters. Use zero_optim.checkpoint.save"
        )

    def _own_row(self) -> Tensor:
        return self._flat[slice(*self._own)]

    @property
    def device(self) -> torch.device:
        """See `ParamBucket`."""
        return self._flat.device

    @property
    def nbytes(self) -> int:
        """The size of the flat tensor while the parameters are whole."""
        return self.layout.numel * self._flat.element_size()

    @property
    def nbytes_to_gather(self) -> int:
        """See `ParamBucket`."""
        return self.nbytes

    @property
    def nbytes_of_row(self) -> int:
        """The size of what this rank keeps."""
        return (self._own[1] - self._own[0]) * self.row.element_size()

    @property
    def nbytes_live(self) -> int:
        """Bytes of the flat tensor right now, beside the row: all, or none."""
        return self.nbytes if self._memory.is_there and not self._owns_all else 0

    # ------------------------------------------------------------------ made

    def take_in(self, values: Mapping[Tensor, Tensor]) -> None:
        """Copy what this rank owns of some parameters into its row; the parameters stay as they are.

        Args:
            values: of those parameters, whole; others than the bucket's are passed over.
        """
        self._make_row()
        with torch.no_grad():
            for index, first, place in self._places():
                whole = values.get(self.params[index])
                if whole is not None:
                    cut = place.shape != whole.shape
                    place.copy_(whole[first : first + len(place)] if cut else whole)
                    if self._keeping is not None:
                        self._keeping.keep([place])

    def _make_row(self) -> None:
        if self._has_row:
            return
        self._has_row = True
        if self._owns_all:
            self._memory.grow()
            zero_padding(self._flat, self.layout)
            return
        row = self.row.new_empty(self._own[1] - self._own[0])
        if self._keeping is None:
            zero_padding(row, self.layout, self._own[0])
        self.row = row if self._keeping is None else self._keeping.new_row(row.zero_())

    def let_go(self, params: AbstractSet[Tensor] | None = None) -> None:
        """Have some parameters show NaN from now on, all by default; the memory they had is released.

        Args:
            params: others than the bucket's are passed over.
        """
        for param, form, nan in zip(self.params, self._forms, self._nans, strict=True):
            if params is None or param in params:
                setattr(param, STRIDES_WHEN_WHOLE, form.stride)
                if self.is_rounded:
                    setattr(param, DTYPE_AS_KEPT, self.row.dtype)
                param.data = nan
        self._versions = _versions(self.params)

    def has_new_place(self) -> None:
        """Take note that its parameters were in other buckets, whose flat tensors are gone.

        Autograd is told when they are whole again: a graph of before must not be used any more.
        """
        self._has_changed = True

    def _places(self) -> Iterator[tuple[int, int, Tensor]]:
        """List what this rank owns: the parameter's index, the first of the rows, and these, in `row`."""
        start = self._own[0]
        for row in self.layout.rows:
            if (row.start, row.stop) != self._own:
                continue
            for extent in row.extents:
                form = self._forms[extent.param]
                numel, size, first = extent.stop - extent.start, form.size, 0
                if numel < self.layout.numels[extent.param]:  # dimension 0 is outermost in memory
                    in_row = size[1:].numel()
                    first, size = extent.start // in_row, torch.Size((numel // in_row, *size[1:]))
                yield extent.param, first, self.row.as_strided(size, form.stride, extent.offset - start)

    def kept(self) -> Iterator[tuple[Tensor, Tensor]]:
        """List the parameters of which this rank owns rows, each with these rows, views of `row`."""
        self._make_row()
        for index, _, rows in self._places():
            yield self.params[index], rows

    def all_kept(self) -> Iterator[tuple[Tensor, KeptRows]]:
        """List all parameters, each with what this rank keeps of it."""
        own = dict(self.kept())
        for param, form in zip(self.params, self._forms, strict=True):
            yield param, KeptRows(form.stride, own.get(param))

    def shares_memory(self, tensor: Tensor) -> bool:
        """Whether a tensor is a view of the flat tensor, so that it dies when this is freed."""
        if self._owns_all or tensor.layout is not torch.strided:
            return False
        address = self._flat.untyped_storage().data_ptr()
        return address != 0 and tensor.untyped_storage().data_ptr() == address

    @property
    def storage_id(self) -> int:
        """What tells the flat tensor's storage from others, also while it is empty."""
        return int(self._flat.untyped_storage()._cdata)

    def shows_freed(self, tensor: Tensor) -> bool:
        """Whether a tensor is a view of what a parameter shows while it is freed."""
        address = tensor.data_ptr()
        return any(address == nan.data_ptr() for nan in self._nans)

    # ------------------------------------------------------------------ steps and loads

    def check_unpinned(self) -> None:
        """Refuse to change what somebody needs whole.

        Raises:
            RuntimeError: somebody does.
        """
        if self.num_pins:
            raise RuntimeError(_PINNED.format(name=self.label))

    def refresh(self) -> None:
        """Check that nobody has given a parameter other memory, or needs it whole; before a step.

        Raises:
            RuntimeError: somebody has, or has written to it while it was freed.
        """
        self.check_unpinned()
        self._check_untouched()

    def _check_untouched(self) -> None:
        shown = self._views if self.is_whole else self._nans
        for param, tensor in zip(self.params, shown, strict=True):
            if param.numel() and param.data_ptr() != tensor.data_ptr():
                raise RuntimeError(_WRITE.format(name=self.label))
        # Some writes in place do not notice that the elements have one place in memory.
        if not self.is_whole and (self._versions != _versions(self.params) or self._is_shown_changed()):
            raise RuntimeError(_WRITE.format(name=self.label))

    def _is_shown_changed(self) -> bool:
        """Whether somebody has written to ``param.data``, which changes no version; not known of a device."""
        shown = self._shown.view(torch.uint8)
        # On an asynchronous device the CPU would have to wait.
        if is_asynchronous(shown.device) or torch.equal(shown, self._octets):
            return False
        shown.copy_(self._octets)  # this is told once
        return True

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
        self._versions = _versions(self.params)

    @torch.no_grad()
    def take_written(self) -> None:
        """Take this rank's row out of the whole parameters, which the user has written to.

        Raises:
            RuntimeError: a parameter was given another dtype, device or shape.
        """
        assert self.is_whole
        self.num_changes += 1
        for param, form, view in zip(self.params, self._forms, self._views, strict=True):
            if param.numel() and param.data_ptr() != view.data_ptr():
                form._replace(dtype=view.dtype).check(param)
                view.copy_(param)
                param.data = view
        written = self._own_row()
        if self.is_rounded:
            kept = self.row.to(written.dtype) == written
            self._write_row(torch.where(kept, self.row, written.to(self.row.dtype)))
        elif not self._owns_all:
            self._write_row(written)

    # ------------------------------------------------------------------ values as they are kept

    @property
    def is_rounded(self) -> bool:
        """Whether the parameters have another dtype than what this rank keeps of them."""
        return self._flat.dtype != self.row.dtype

    def views(self, flat: Tensor) -> list[Tensor]:
        """View the parameters in a flat tensor of any dtype."""
        return views_in(flat, self._forms, self.layout)

    def flat_as_kept(self) -> Tensor:
        """Make a flat tensor in the dtype that rows are kept in, with this rank's row; the rest is zero."""
        flat = self.row.new_zeros(self.layout.numel)
        self._read_row(flat[slice(*self._own)])
        return flat

    def take_over(self, flat: Tensor) -> None:
        """Take this rank's row out of what `flat_as_kept` made, and free the parameters.

        Raises:
            RuntimeError: somebody needs them whole. Nothing has changed.
        """
        self.check_unpinned()
        self._write_row(flat[slice(*self._own)])
        self.has_changed()

    # ------------------------------------------------------------------ whole and freed

    def row_as_sent(self) -> Tensor:
        """Copy this rank's row, in the dtype of the flat tensor."""
        row = self._flat.new_empty(self._own[1] - self._own[0])
        self._read_row(row)
        return row

    def fill(self, chosen: Collection[int] | None = None) -> Tensor:
        """Make the flat tensor, with this rank's row in it; for a gather.

        Args:
            chosen: see `ParamBucket`; the whole row is filled all the same.
        """
        self._check_untouched()
        if not self._owns_all:
            self._memory.grow()
            with torch.no_grad():
                self._read_row(self._own_row())
        return self._flat

    def _read_row(self, target: Tensor) -> None:
        if self._keeping is None:
            target.copy_(self.row)
        else:
            self._keeping.read(self.row, target)

    def _write_row(self, values: Tensor) -> None:
        if self._keeping is None:
            self.row.copy_(values)
        else:
            self._keeping.write(self.row, values)

    def settle(self, flat: Tensor, chosen: Collection[int] | None = None) -> None:
        """Show the parameters whole, once the flat tensor has all rows."""
        assert flat is self._flat
        self._show(self._views)
        self.is_whole = True
        self.coming = None
        if self._has_changed:
            torch.autograd.graph.increment_version(self.params)
            self._has_changed = False

    def arrive(self) -> None:
        """Wait for the gather under way, if there is one."""
        if self.coming is not None:
            self.coming.wait()

    def free(self) -> None:
        """Empty the flat tensor, after the gather under way; the parameters show NaN."""
        self.arrive()
        if not self.is_whole:
            return
        self._show(self._nans)
        if not self._owns_all:
            self._memory.free()
        self.is_whole = False
        self._versions = _versions(self.params)

    def _show(self, tensors: list[Tensor]) -> None:
        for param, tensor in zip(self.params, tensors, strict=True):
            param.data = tensor


def _versions(params: list[Tensor]) -> list[int]:
    return [param._version for param in params]


def shown_when_freed(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Make what a freed parameter of some form shows; see Note [Freed by emptying the storage]."""
    value = math.nan if dtype.is_floating_point or dtype.is_complex else 0
    return torch.full((), value, dtype=dtype, device=device).expand(tuple(shape))
