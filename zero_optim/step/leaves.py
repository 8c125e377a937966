"""Leaves: the tensors that local optimizers step for parameters, perhaps master copies (entry `MASTER`).

Note [Masters and their parameters]
    A stale master must not undo a checkpoint loaded into the model, and no version counter sees every write.
    So a master takes over each element that differs from its rounded value. Others stay: else a mask or clamp
    after each step would round the whole tensor.

Note [Leaves of cut parameters]
    The leaf of a cut parameter without a master views the owned rows only while a class uses it, as users,
    buckets or copies may give the parameter other memory. `Leaves.release` points it at one expanded NaN:
    shapes stay readable, in-place arithmetic raises. `Leaves.in_use` copies values if the class gave the
    leaf other memory.
"""

from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from zero_optim.compat import private
from zero_optim.compat.streams import is_asynchronous
from zero_optim.dtensor.held_values import HeldLeaves
from zero_optim.errors import StateMismatchError
from zero_optim.plan.pieces import Piece, Pieces, is_whole, rows_of
from zero_optim.plan.strides import kept_dtype
from zero_optim.probe.cut_rows import CutRows
from zero_optim.shard.bucket import Bucket
from zero_optim.shard.places import is_freed, shown_when_freed
from zero_optim.shard.rows.row_storage import HostStorage
from zero_optim.shard.rows.row_values import RowValues
from zero_optim.step.partial import PartialGradient, is_on_host

MASTER = "zero_optim.master"  # no class has an entry of that name


class Leaves:
    """The leaf of each owned parameter: the parameter, a view of its owned rows, or a master copy.

    ``masters`` and ``separate``: parameter -> leaf other than itself, masters only or all. ``kept``:
    parameter of ``apart`` -> owned rows outside of it, on the host with a ``home``. ``held``: those that
    somebody else keeps.
    """

    def __init__(
        self,
        master_dtype: torch.dtype | None,
        apart: Collection[Tensor] = (),
        home: HostStorage | None = None,
    ) -> None:
        if master_dtype is not None and not isinstance(master_dtype, torch.dtype):
            raise TypeError(f"expected master_dtype to be a torch.dtype or None, got {master_dtype!r}")
        if master_dtype is not None and not master_dtype.is_floating_point:
            raise ValueError(f"expected master_dtype to be a floating-point dtype, got {master_dtype}")
        self._dtype = master_dtype
        self.masters: dict[Tensor, Tensor] = {}
        self.separate: dict[Tensor, Tensor] = {}
        self.kept: dict[Tensor, Tensor] = {}
        self.apart = apart
        self._home = home
        self.held = HeldLeaves()
        self._pieces: dict[Tensor, Piece | None] = {}  # None for whole parameters
        self._nothing: dict[tuple[torch.dtype, torch.device], Tensor] = {}  # what stand-ins are made of

    def add(self, param: Tensor, piece: Piece) -> Tensor:
        """Add an owned parameter and return its leaf, which views the rows until `release`."""
        self._pieces[param] = None if is_whole(piece, param.shape) else piece
        rows = self._at_home(param, self.rows(param))
        dtype, trains = self.stepped_dtype(param), param.requires_grad
        if dtype != rows.dtype:
            self.masters[param] = Parameter(rows.detach().to(dtype), requires_grad=trains)
            self.separate[param] = self.masters[param]
        elif rows is not param or param in self.apart:
            self.separate[param] = Parameter(rows.data, requires_grad=trains)
        return self.leaf(param)

    def keep(self, buckets: Iterable[Bucket[RowValues]]) -> None:
        """Record the owned rows in buckets of rows."""
        for bucket in buckets:
            self.kept.update(bucket.values.row.by_param())

    @property
    def owned(self) -> Collection[Tensor]:
        """Parameters that this rank owns, in whole or in part."""
        return self._pieces.keys()

    def leaf(self, param: Tensor) -> Tensor:
        """Return the leaf of an owned parameter."""
        return self.separate.get(param, param)

    def value(self, param: Tensor) -> Tensor:
        """Return the master or the rows of an owned parameter."""
        return self.masters[param] if param in self.masters else self.rows(param)

    def copied_value(self, param: Tensor) -> Tensor:
        """Copy an owned parameter's master or rows, on the device that steps them."""
        value = self.value(param).detach()
        there = value if param in self.masters else self._at_home(param, value)
        return there.clone() if there is value else there

    def _at_home(self, param: Tensor, rows: Tensor) -> Tensor:
        if self._home is None or param not in self.apart or param in self.kept:
            return rows
        if is_freed(rows):
            return shown_when_freed(rows.shape, rows.dtype, torch.device("cpu"))
        return self._home.brought(rows)

    def stepped_dtype(self, param: Tensor) -> torch.dtype:
        """Return the dtype that steps a parameter."""
        return stepped_dtype(kept_dtype(param), self._dtype)

    def cut_rows(self, param: Tensor, pieces: Pieces) -> CutRows:
        """Return where a parameter is cut, for the probe; accelerators' are tried in float32."""
        is_on_cpu = param.device.type == "cpu" or (self._home is not None and param in self.apart)
        dtype = self.stepped_dtype(param) if is_on_cpu else torch.float32
        return CutRows(dtype, tuple(param.shape), tuple(p.stop for p in pieces[:-1]))

    def rows(self, param: Tensor) -> Tensor:
        """View the owned rows: the parameter itself unless cut or kept apart; autograd sees writes."""
        if param in self.held.values:
            return self.held.values[param]
        if param in self.kept:
            if self._home is not None:
                self._home.wait()
            return self.kept[param]
        return param if self._pieces[param] is None else self.own_rows(param, param.detach())

    def own_rows(self, param: Tensor, tensor: Tensor) -> Tensor:
        """Return the owned rows of a tensor with the parameter's shape."""
        piece = None if param in self.held.values else self._pieces[param]
        return tensor if piece is None else rows_of(tensor, piece)

    def own_gradient(self, param: Tensor) -> Tensor | None:
        """Return the owned rows of the gradient, on the device that steps them."""
        if param in self.held.values:
            return self.held.grads.get(param)
        grad, rows = param.grad, None
        if grad is not None:
            rows = grad.piece if isinstance(grad, PartialGradient) else self.own_rows(param, grad)
        if rows is None or self._home is None or param not in self.apart or is_on_host(grad):
            return rows
        return self._home.brought(rows)

    def drop(self, params: Iterable[Tensor]) -> None:
        """Forget parameters that could not be added."""
        for param in params:
            for held in (self.masters, self.separate, self._pieces):
                held.pop(param, None)

    def follow(self) -> None:
        """Point leaves at their parameters' rows until `release`, for a class that may read them."""
        for param in self.separate:
            if param not in self.masters:
                self._put_over_rows(param)

    @torch.no_grad()
    def release(self, some: Mapping[Tensor, Tensor] | None = None) -> None:
        """Drop the gradients of all leaves, or some, and the memory of all but masters."""
        for param, leaf in (self.separate if some is None else some).items():
            leaf.grad = None
            if param not in self.masters:
                form = leaf.dtype, leaf.device
                if form not in self._nothing:
                    self._nothing[form] = shown_when_freed((), *form)
                leaf.data = self._nothing[form].expand(leaf.shape)

    @torch.no_grad()
    def follow_values(self, params: Iterable[Tensor]) -> None:
        """Update masters whose parameters changed: Note [Masters and their parameters]."""
        for param in params:
            if param in self.masters:
                _follow(self._at_home(param, self.rows(param)), self.masters[param])

    def _put_over_rows(self, param: Tensor) -> None:
        rows, leaf = self._at_home(param, self.rows(param)).data, self.separate[param]
        if not _is_over(leaf, rows):
            leaf.data = rows

    @contextmanager
    def in_use(self, gradients: Mapping[Tensor, Tensor] | None = None) -> Iterator[None]:
        """Give all leaves values and gradients in the body, or some with ``gradients``; write them back."""
        given = {} if gradients is None else gradients
        before = {param: param.grad for param in given if param not in self.separate}
        some = self.separate
        if gradients is not None:
            some = {param: some[param] for param in gradients if param in some}
        if self.held.away:
            some = {param: leaf for param, leaf in some.items() if param not in self.held.away}
        try:
            for param in before:
                param.grad = given[param]
            self._take_in(some, gradients)
            try:
                yield
            finally:  # a step that broke off has changed parameters too, as in torch.optim
                self._put_back(some)
        finally:
            self.release(some)
            for param, grad in before.items():
                param.grad = grad

    @torch.no_grad()
    def _take_in(self, some: Mapping[Tensor, Tensor], gradients: Mapping[Tensor, Tensor] | None) -> None:
        for param, leaf in some.items():
            if param in self.masters:
                _follow(self.rows(param), leaf)
            else:
                self._put_over_rows(param)
            if leaf.requires_grad != param.requires_grad:
                leaf.requires_grad_(param.requires_grad)
            grad = self.own_gradient(param) if gradients is None else gradients[param]
            leaf.grad = None if grad is None else grad.to(leaf.dtype)

    @torch.no_grad()
    def _put_back(self, some: Mapping[Tensor, Tensor]) -> None:
        rows, masters, views = list[Tensor](), list[Tensor](), list[Tensor]()
        for param, leaf in some.items():
            own = self.rows(param)
            if param in self.masters:
                rows.append(own)
                masters.append(leaf)
                continue
            views.append(param)
            if not _is_over(leaf, own):
                own.copy_(leaf)
        if masters:
            private.foreach_copy_(rows, masters)
        if views:
            torch.autograd.graph.increment_version(views)

    def taken_from(self, entries: Mapping[Tensor, dict[str, Any]]) -> dict[Tensor, Tensor]:
        """Return the masters in loaded entries, for wide rows too; StateMismatchError if one does not fit."""
        wide = {param: rows for param, rows in self.kept.items() if rows.dtype != param.dtype}
        return entries_named(MASTER, {**wide, **self.masters}, entries)

    def load(self, saved_masters: Mapping[Tensor, Tensor], params: Iterable[Tensor] | None = None) -> None:
        """Copy loaded masters in, all or some; a missing one starts anew."""
        for param in self.masters if params is None else params:
            master = self.masters[param]
            saved = saved_masters.get(param)
            rows = self.rows(param).data
            master.data.copy_(rows if saved is None else saved)
            if saved is not None and param not in self.held.away:  # else the model has its own values
                rows.copy_(master)
        for param in saved_masters.keys() - self.masters.keys():
            self.rows(param).copy_(saved_masters[param])


def stepped_dtype(kept: torch.dtype, master: torch.dtype | None) -> torch.dtype:
    """Return the dtype in which a parameter of some dtype is stepped: the masters' if that is wider."""
    if master is not None and kept.is_floating_point and kept.itemsize < master.itemsize:
        return master
    return kept


def _is_over(leaf: Tensor, rows: Tensor) -> bool:
    return leaf.data_ptr() == rows.data_ptr() and leaf.stride() == rows.stride()


def _follow(param: Tensor, master: Tensor) -> None:
    """Overwrite the master's elements whose rounded value differs from the parameter."""
    rounded = master.to(param.dtype)
    # Comparing first is quicker on the CPU. Elsewhere it would wait for the device.
    if is_asynchronous(param.device) or not torch.equal(param, rounded):
        torch.where(param == rounded, master, param.to(master.dtype), out=master.data)


@torch.no_grad()
def entries_named(
    name: str, held: Mapping[Tensor, Tensor], entries: Mapping[Tensor, dict[str, Any]]
) -> dict[Tensor, Tensor]:
    """Return each parameter's entry as a plain tensor like the ``held`` one; StateMismatchError if unfit."""
    values = {}
    for param, own in held.items():
        saved = entries.get(param, {}).get(name)
        if saved is None:
            continue
        fits = isinstance(saved, Tensor) and saved.layout is torch.strided and saved.shape == own.shape
        loses_imaginary = fits and saved.is_complex() and not own.is_complex()
        if not fits or saved.is_meta or loses_imaginary:
            got = f"shape {tuple(saved.shape)}" if isinstance(saved, Tensor) else f"{type(saved).__name__}"
            kind = f" ({saved.dtype} on {saved.device}, {saved.layout})" if isinstance(saved, Tensor) else ""
            wanted = "dense tensor" if own.is_complex() else "dense real tensor"
            raise StateMismatchError(
                f"expected '{name}' of a parameter of shape {tuple(own.shape)} to be a {wanted} "
                f"of that shape, got {got}{kind}"
            )
        is_alike = type(saved) is Tensor and (saved.dtype, saved.device) == (own.dtype, own.device)
        values[param] = saved if is_alike else torch.empty_like(own.detach()).copy_(saved)
    return values
