"""Values of which each rank keeps its own row; the parameters are *whole* in use, else *freed*.

No communication. Units run the row `ZERO3` of the schedule.

Note [Freed in place]
    Autograd saves a parameter as the tensor object, but its view (``weight.t()``) by the storage. New
    ``data`` would keep the old storage until the backward pass ends, without the second gather's values. So
    one storage stays, and its memory comes and goes: `UnitMemory.grow` resizes it in `fill`, and
    `UnitMemory.free` empties it in `free`, behind the current stream. A row that is all of the bucket
    (`OwnRow.is_flat`) is that storage, and stays. PyTorch does not check reads of an emptied storage. So a
    freed parameter shows one expanded NaN (zero for dtypes without), and a write in place raises. While
    parameters are freed a user's view has no memory: operators raise or read address 0.

Note [Kept in one dtype, computed with in another]
    The row keeps the original dtype; owners round it into the flat tensor. Freed parameters have the compute
    dtype too: a change would lose autograd's node that accumulates the gradient. Writes to whole parameters
    count as for masters (Note [Masters and their parameters] in `zero_optim.step.leaves`).
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import NamedTuple, NoReturn

import torch
from torch import Tensor

from zero_optim.compat import private
from zero_optim.compat.streams import record_use
from zero_optim.flow.pending import Pending
from zero_optim.plan.strides import DTYPE_AS_KEPT, STRIDES_WHEN_WHOLE
from zero_optim.shard.bucket import Bucket, Members
from zero_optim.shard.places import FreedParams
from zero_optim.shard.rows.own_row import OwnRow
from zero_optim.shard.rows.row_storage import RowStorage
from zero_optim.shard.rows.unit_memory import UnitMemory

_WRITE = (
    "a parameter of {name} was written to, or got other memory, while its values were not on this rank, so "
    "the write is lost: write inside zero_optim.ddp.unsharded(module), which sends the values to the ranks "
    "that own them. To convert or move a model, call its .to(), .half() or .cuda() before the first forward "
    "pass"
)


class Uncopied:
    """Refuses copies, which would gather in the original's place."""

    __slots__ = ()

    def __reduce__(self) -> NoReturn:
        raise RuntimeError(
            "a fully sharded model and its optimizer cannot be copied or pickled: no rank holds the "
            "parameters. Save model.state_dict(), or use zero_optim.checkpoint.save. For averages, as "
            "AveragedModel makes them, give the optimizer ema_decay"
        )


class KeptRows(NamedTuple):
    """This rank's part of a parameter, which may be none."""

    stride: tuple[int, ...]  # of the parameter when it is whole, in elements
    rows: Tensor | None  # in memory that stays; None if it owns none


class RowValues(Uncopied):
    """Values of which this rank keeps its ``row``: Note [Freed in place]. Starts without memory.

    ``is_left``: state dicts show the parameters as they are.
    """

    is_in_place = False

    def __init__(self, members: Members, storage: RowStorage | None = None) -> None:
        # The parameters have the compute dtype already where another bucket held them.
        self.members = members
        self._memory = UnitMemory(members.layout.numel, members.dtype, members.device)
        self._views = members.views(self._memory.flat)
        self.sent: Sequence[tuple[int, Tensor]] = members.rows(self._memory.flat)
        self.row = OwnRow(members, self._memory, RowStorage() if storage is None else storage)
        self._memory.free()
        self._freed = FreedParams(members.params, members.dtype, members.device)
        self.is_whole = self._has_changed = self.is_left = False
        self._gather: Pending[None] | None = None  # the last one, which each stream waits for
        self._num_pins = 0  # users that need the parameters whole: nothing may change them

    @property
    def nbytes_live(self) -> int:
        """Current bytes beside the row."""
        return self._memory.flat.nbytes if self._memory.is_there and not self.row.is_flat else 0

    @property
    def needs_gather(self) -> bool:
        """Whether it is not whole, and no gather is under way."""
        return not self.is_whole and not self.comes

    @property
    def comes(self) -> bool:
        """Whether somebody has still to wait for a gather."""
        return self._gather is not None and self._gather.is_unclaimed

    @property
    def storage_id(self) -> int:
        """An id of the flat tensor's storage, valid without memory."""
        return int(private.cdata(self._memory.flat.untyped_storage()))

    def shares_memory(self, tensor: Tensor) -> bool:
        """Whether a tensor is a view of the flat tensor that dies with its memory."""
        if self.row.is_flat or tensor.layout is not torch.strided:
            return False
        address = self._memory.flat.untyped_storage().data_ptr()
        return address != 0 and tensor.untyped_storage().data_ptr() == address

    def shows_freed(self, tensor: Tensor) -> bool:
        """Whether a tensor is a view of a freed parameter's data."""
        address = tensor.data_ptr()
        return any(address == shown.data_ptr() for shown in self._freed.tensors)

    # ------------------------------------------------------------------ the row

    def take_in(self, param: Tensor) -> None:
        """Copy this rank's rows out of a parameter, which is freed then."""
        self.row.take_in(param, param)
        self.release(param)

    @torch.no_grad()
    def load(self, values: Mapping[Tensor, Tensor]) -> None:
        """Replace this rank's rows of some parameters and free all; RuntimeError if they are pinned."""
        self.check_unpinned()
        for param, rows in self.row.by_param().items():
            if param in values:
                rows.copy_(values[param])
        self.mark_changed()

    def release(self, only: Tensor | None = None) -> None:
        """Make all parameters, or one, show NaN and release their memory; their values are new."""
        self._has_changed = True
        of = self.members
        for param, form, nan in zip(of.params, of.forms, self._freed.tensors, strict=True):
            if only is None or param is only:
                setattr(param, STRIDES_WHEN_WHOLE, form.stride)
                if self.row.is_rounded:
                    setattr(param, DTYPE_AS_KEPT, self.row.values.dtype)
                param.data = nan
        self._freed.note_versions()

    # ------------------------------------------------------------------ steps and writes

    def pin(self) -> None:
        """Refuse changes until `unpin`: somebody needs the parameters whole."""
        self._num_pins += 1

    def unpin(self) -> None:
        """End one `pin`."""
        self._num_pins -= 1

    def check_unpinned(self) -> None:
        """Raise RuntimeError if somebody needs the parameters whole and unchanged."""
        if self._num_pins:
            raise RuntimeError(
                f"the parameters of {self.members.label} are inside unsharded(): leave it before a step, "
                "before averaged weights, and before a save or load"
            )

    def written(self) -> list[tuple[int, int]]:
        """Return nothing: `refresh` writes nowhere."""
        return []

    def refresh(self) -> None:
        """Raise RuntimeError, before a step, if a parameter is pinned or was given other memory."""
        self.check_unpinned()
        self._check_untouched()

    def _check_untouched(self) -> None:
        shown = self._views if self.is_whole else self._freed.tensors
        for param, tensor in zip(self.members.params, shown, strict=True):
            if param.numel() and param.data_ptr() != tensor.data_ptr():
                raise RuntimeError(_WRITE.format(name=self.members.label))
        if not self.is_whole and self._freed.was_written():
            raise RuntimeError(_WRITE.format(name=self.members.label))

    def mark_changed(self) -> None:
        """Record that the row changed, and free the parameters."""
        self._has_changed = True
        self.free()
        self._freed.note_versions()

    def stepped(self, *, changed: bool) -> None:
        """Free the parameters if the row changed; accept the versions that a step changed."""
        if changed and not self._num_pins:  # else refused by `check_unpinned`, so nothing has changed
            self.mark_changed()
        else:
            self._freed.note_versions()

    @torch.no_grad()
    def take_written(self) -> None:
        """Copy writes to whole parameters into the row; RuntimeError if a dtype, device or shape changed."""
        assert self.is_whole
        for param, form, view in zip(self.members.params, self.members.forms, self._views, strict=True):
            if param.numel() and param.data_ptr() != view.data_ptr():
                form._replace(dtype=view.dtype).check(param)
                view.copy_(param)
                param.data = view
        self.row.take_written()

    # ------------------------------------------------------------------ whole and freed

    def fill(self) -> tuple[Tensor, Tensor | None]:
        """See `GatheredValues`; RuntimeError if the user wrote to the parameters.

        Other ranks then wait, as for any error in a forward pass, and the watchdog tells them.
        """
        self._check_untouched()
        own = None
        if not self.row.is_flat:
            self._memory.grow()
            own = None if self.members.slices is None else self.row.sent
            if own is None:
                self.row.fill()
        return self._memory.flat, own

    def receive(self, flat: Tensor, changed: Collection[Tensor] | None = None) -> None:
        """Make the parameters whole after all rows have come."""
        assert flat is self._memory.flat
        self._show(self._views)
        self.is_whole = True
        if self._has_changed:
            torch.autograd.graph.increment_version(self.members.params)
            self._has_changed = False

    def keep(self, gather: Pending[None]) -> None:
        """Keep a gather until `arrive`, unless one before has failed: each wait raises that."""
        if self._gather is None or not self._gather.has_failed:
            self._gather = gather

    def forget(self) -> None:
        """Drop a gather; the backend keeps its memory until it is done."""
        self._gather = None

    def arrive(self) -> None:
        """Make the current stream wait for the gather, even if another has."""
        if self._gather is not None:
            self._gather.wait()
        if self.is_whole:
            record_use(self._memory.flat)  # which may be freed while this stream still reads it

    def free(self) -> None:
        """Wait for the gather, then free the parameters and the flat tensor's memory."""
        if self._gather is not None:
            self._gather.wait()
        if not self.is_whole:
            return
        self._show(self._freed.tensors)
        self.is_whole = False
        if not self.row.is_flat:
            self._memory.free()
            self._gather = None
        self._freed.note_versions()

    def _show(self, tensors: list[Tensor]) -> None:
        for param, tensor in zip(self.members.params, tensors, strict=True):
            param.data = tensor


class WideValues:
    """`RowValues` in the owners' dtype, ``by_param``, gathered beside these for a state dict or a load."""

    sent: Sequence[tuple[int, Tensor]] = ()
    needs_gather = True

    def __init__(self, members: Members, narrow: RowValues) -> None:
        self._flat = torch.zeros(members.layout.numel, dtype=members.dtype, device=members.device)
        self._flat_row = self._flat[narrow.row.span]
        self.by_param = dict(zip(members.params, members.views(self._flat), strict=True))
        self._narrow = narrow
        self._gather: Pending[None] | None = None

    def fill(self) -> tuple[Tensor, None]:
        """Return the flat tensor with this rank's row; raises as `RowValues.refresh`."""
        self._narrow.refresh()
        self._narrow.row.read(self._flat_row)
        return self._flat, None

    def receive(self, flat: Tensor, changed: Collection[Tensor] | None = None) -> None:
        """Do nothing: others' rows have come to their places."""

    def keep(self, gather: Pending[None]) -> None:
        """Keep the gather until `arrive`."""
        self._gather = gather

    def arrive(self) -> None:
        """Make the current stream wait for the gather."""
        if self._gather is not None:
            self._gather.wait()

    def free(self) -> None:
        """Drop a gather, after a failure."""
        self._gather = None

    def take_written(self) -> None:
        """Copy written values into the owners' rows and free the parameters; RuntimeError if pinned."""
        self._narrow.check_unpinned()
        self._narrow.row.write(self._flat_row)
        self._narrow.mark_changed()


def wide_bucket(bucket: Bucket[RowValues]) -> Bucket[WideValues]:
    """Return a bucket of the same parameters in the owners' dtype."""
    of, dtype = bucket.members, bucket.values.row.values.dtype
    label = f"{of.label}, as owners keep it"
    members = Members(of.params, of.layout, of.rank, label, slices=of.slices, dtype=dtype)
    return Bucket(members, WideValues(members, bucket.values), bucket.schedule)


@contextmanager
def left_freed(buckets: Sequence[Bucket[RowValues]]) -> Iterator[dict[Tensor, KeptRows]]:
    """Have state dicts show parameters as they are; yields this rank's part of each."""
    parts: dict[Tensor, KeptRows] = {}
    for bucket in buckets:
        bucket.values.is_left = True
    try:
        for bucket in buckets:
            rows = bucket.values.row.by_param()
            for param, form in zip(bucket.params, bucket.members.forms, strict=True):
                parts[param] = KeptRows(form.stride, rows.get(param))
        yield parts
    finally:
        for bucket in buckets:
            bucket.values.is_left = False
