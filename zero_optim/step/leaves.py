"""What the local optimizer steps for each parameter that this rank owns: its leaf, perhaps a master copy.

Master copies travel in state dicts as entries of the parameter's state, `MASTER`. Of a parameter that is cut,
they have the rows that this rank owns.

Note [Masters and their parameters]
    A checkpoint loaded into the model must not be undone by a stale master. No version counter sees every
    way of writing to a parameter, so the values are compared: an element that is not its master rounded was
    changed from outside, and its master becomes that value. The other elements keep their masters. A mask, a
    clamp or a padding row that a script writes after each step would otherwise round the whole tensor each
    time, and what masters are for would be lost. A NaN is not equal to itself and is taken over, which
    changes nothing; 0.0 and -0.0 are equal, and the master stays.

Note [Leaves of cut parameters]
    A rank that owns some rows of a parameter steps a leaf that is a view of these rows, unless it has a
    master. The user, a bucket or a copy of the optimizer may give the parameter other memory at any time, and
    expects that the old memory is released then. So the leaf is put over the rows for as long as a class uses
    it, and has no memory at other times. `Leaves.let_go` then gives it a stand-in of its shape, dtype and
    device: one NaN, expanded. So shapes can be read at any time, and arithmetic in place raises.

    While the class steps, between `Leaves.take_in` and `Leaves.put_back`, the leaf counts and not the
    parameter: where the class gave the leaf other memory, `put_back` copies the values to the parameter.
    Autograd does not see that a write to the leaf changes the parameter, so `put_back` tells it.
"""

import math
from collections.abc import Collection, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from zero_optim.compat import private
from zero_optim.compat.streams import is_asynchronous
from zero_optim.errors import StateMismatchError
from zero_optim.plan.memory import kept_dtype
from zero_optim.plan.pieces import Piece, Pieces, is_whole
from zero_optim.probe.rows import CutRows
from zero_optim.shard.freed import is_freed, shown_when_freed
from zero_optim.shard.on_host import HostKeeping
from zero_optim.shard.units import UnitBucket
from zero_optim.step.gradients import owned_gradient, rows_of
from zero_optim.step.partial import is_on_host

MASTER = "zero_optim.master"  # no class has an entry of that name
OLD_MASTER = "master"  # its name in older files


class Leaves:
    """What the local optimizer steps: this rank's parameters, the rows it owns of them, or master copies.

    Args:
        master_dtype: parameters of a narrower floating-point dtype are stepped in this one; None
            steps every parameter itself.
        apart: parameters whose rows will be in `kept`.
        home: keeps these rows on the host, where they are stepped; None if they are where the parameters are.

    Attributes:
        masters: parameter -> the master copy of what this rank owns of it.
        separate: parameter -> leaf, of all those whose leaf is not the parameter itself.
        kept: parameter -> the rows that this rank owns, where they are not kept in the parameter.
    """

    def __init__(
        self,
        master_dtype: torch.dtype | None,
        apart: Collection[Tensor] = (),
        home: HostKeeping | None = None,
    ) -> None:
        if master_dtype is not None and not isinstance(master_dtype, torch.dtype):
            raise TypeError(f"expected master_dtype to be a torch.dtype or None, got {master_dtype!r}")
        if master_dtype is not None and not master_dtype.is_floating_point:
            raise ValueError(f"expected master_dtype to be a floating-point dtype, got {master_dtype}")
        self._dtype = master_dtype
        self.masters: dict[Tensor, Tensor] = {}
        self.separate: dict[Tensor, Tensor] = {}
        self.kept: dict[Tensor, Tensor] = {}
        self._apart = apart
        self._home = home
        self._pieces: dict[Tensor, Piece] = {}
        self._nothing: dict[tuple[torch.dtype, torch.device], Tensor] = {}  # what stand-ins are made of

    def add(self, param: Tensor, piece: Piece) -> Tensor:
        """Begin to step what this rank owns of a parameter; gives its leaf.

        It is over the rows until `let_go`, to be called when the class has it.
        """
        self._pieces[param] = piece
        rows = self._at_home(param, self.rows(param))
        dtype, trains = self.stepped_dtype(param), param.requires_grad
        if dtype != rows.dtype:
            self.masters[param] = Parameter(rows.detach().to(dtype), requires_grad=trains)
            self.separate[param] = self.masters[param]
        elif rows is not param or param in self._apart:
            self.separate[param] = Parameter(rows.data, requires_grad=trains)
        return self.leaf(param)

    def keep(self, buckets: Iterable[UnitBucket]) -> None:
        """Take note of the rows that this rank owns of the parameters in buckets of units."""
        for bucket in buckets:
            self.kept.update(bucket.kept())

    @property
    def owned(self) -> Collection[Tensor]:
        """The parameters of which this rank owns all rows, or some."""
        return self._pieces.keys()

    @property
    def has_apart(self) -> bool:
        """Whether some parameters have their rows elsewhere; the same on every rank."""
        return len(self._apart) > 0

    def leaf(self, param: Tensor) -> Tensor:
        """Give what is stepped for an owned parameter."""
        return self.separate.get(param, param)

    def value(self, param: Tensor) -> Tensor:
        """Give the present value of what is stepped for an owned parameter: its master, or its rows."""
        return self.masters[param] if param in self.masters else self.rows(param)

    def copied_value(self, param: Tensor) -> Tensor:
        """Copy the present value of what is stepped for an owned parameter, to where it is stepped."""
        value = self.value(param).detach()
        there = value if param in self.masters else self._at_home(param, value)
        return there.clone() if there is value else there

    def _at_home(self, param: Tensor, rows: Tensor) -> Tensor:
        """Give rows of a parameter where they are stepped: a copy, if they will be in `kept` on the host.

        Rows that are freed have no values: they stay without memory.
        """
        if self._home is None or param not in self._apart or param in self.kept:
            return rows
        if is_freed(rows):
            return shown_when_freed(rows.shape, rows.dtype, torch.device("cpu"))
        return self._home.brought(rows)

    def stepped_dtype(self, param: Tensor) -> torch.dtype:
        """Tell the dtype in which a parameter is stepped."""
        dtype, kept = self._dtype, kept_dtype(param)
        if dtype is not None and kept.is_floating_point and kept.itemsize < dtype.itemsize:
            return dtype
        return kept

    def tried_dtype(self, param: Tensor) -> torch.dtype:
        """Tell for which dtype a class must bear cuts; float32 on accelerators, see the probe."""
        is_on_cpu = param.device.type == "cpu" or (self._home is not None and param in self._apart)
        return self.stepped_dtype(param) if is_on_cpu else torch.float32

    def cut_rows(self, param: Tensor, pieces: Pieces) -> CutRows:
        """Tell where a parameter is cut, for trials of its class."""
        return CutRows(self.tried_dtype(param), tuple(param.shape), tuple(p.stop for p in pieces[:-1]))

    def rows(self, param: Tensor) -> Tensor:
        """View what this rank owns of a parameter: the parameter itself unless it is cut, or kept apart.

        Autograd sees a write to it as one to the parameter.
        """
        if param in self.kept:
            if self._home is not None:
                self._home.wait()
            return self.kept[param]
        piece = self._pieces[param]
        return param if is_whole(piece, param.shape) else rows_of(param.detach(), piece)

    def own_rows(self, param: Tensor, tensor: Tensor) -> Tensor:
        """Take what this rank owns out of a tensor with the shape of a parameter; see `rows_of`."""
        return rows_of(tensor, self._pieces[param])

    def own_gradient(self, param: Tensor) -> Tensor | None:
        """Give what this rank owns of a parameter's gradient, where it is stepped; see `owned_gradient`."""
        grad, home = owned_gradient(param, self._pieces[param]), self._home
        if grad is None or home is None or param not in self._apart or is_on_host(param.grad):
            return grad
        return home.brought(grad)

    def drop(self, params: Iterable[Tensor]) -> None:
        """Forget parameters that could not be added."""
        for param in params:
            for held in (self.masters, self.separate, self._pieces):
                held.pop(param, None)

    def follow(self) -> None:
        """Put leaves over the rows of their parameters, for a class that may read them; until `let_go`."""
        for param in self.separate:
            if param not in self.masters:
                self._put_over_rows(param)

    @torch.no_grad()
    def let_go(self, params: Iterable[Tensor] | None = None) -> None:
        """Take the gradients from all leaves, or some, and their memory unless they are masters."""
        for param, leaf in self._some(params).items():
            leaf.grad = None
            if param not in self.masters:
                leaf.data = self._stand_in(leaf)

    def _stand_in(self, leaf: Tensor) -> Tensor:
        """Make a tensor like a leaf that has the memory of one element."""
        form = leaf.dtype, leaf.device
        if form not in self._nothing:
            value = math.nan if leaf.is_floating_point() or leaf.is_complex() else 0
            self._nothing[form] = torch.full((), value, dtype=leaf.dtype, device=leaf.device)
        return self._nothing[form].expand(leaf.shape)

    def follow_values(self, params: Iterable[Tensor]) -> None:
        """Give masters what was changed from outside; see Note [Masters and their parameters]."""
        for param in params:
            if param in self.masters:
                _follow(self._at_home(param, self.rows(param)), self.masters[param])

    def _put_over_rows(self, param: Tensor) -> None:
        rows, leaf = self._at_home(param, self.rows(param)).data, self.separate[param]
        if not _is_over(leaf, rows):
            leaf.data = rows

    def take_in(self, gradients: Mapping[Tensor, Tensor | None] | None = None) -> None:
        """Give separate leaves their gradients, and values that were changed from outside.

        See Note [Masters and their parameters]. The CPU does not wait for an asynchronous device.

        Args:
            gradients: of those whose leaves are meant, what this rank owns of each, or None without a
                gradient; None for all, with the gradients that the parameters hold.
        """
        for param, leaf in self._some(gradients).items():
            if param in self.masters:
                _follow(self.rows(param), leaf)
            else:
                self._put_over_rows(param)
            leaf.requires_grad_(param.requires_grad)
            grad = self.own_gradient(param) if gradients is None else gradients[param]
            leaf.grad = None if grad is None else grad.to(leaf.dtype)

    @torch.no_grad()
    def put_back(self, params: Iterable[Tensor] | None = None) -> None:
        """Give the parameters, or some, the values of separate leaves; `let_go` comes next."""
        leaves = self._some(params)
        masters = {param: leaf for param, leaf in leaves.items() if param in self.masters}
        views = [param for param in leaves if param not in self.masters]
        if masters:
            private.foreach_copy_([self.rows(param) for param in masters], list(masters.values()))
        for param in views:
            rows = self.rows(param)
            if not _is_over(leaves[param], rows):
                rows.copy_(leaves[param])
        if views:
            torch.autograd.graph.increment_version(views)

    def _some(self, params: Iterable[Tensor] | None) -> dict[Tensor, Tensor]:
        every = self.separate
        return every if params is None else {param: every[param] for param in params if param in every}

    def taken_from(self, entries: Mapping[Tensor, dict[str, Any]]) -> dict[Tensor, Tensor]:
        """Take masters out of loaded entries, ready for `load`; all that may raise does so here.

        Rows that are kept in a wider dtype than their parameter has need none: they take its values.

        Raises:
            StateMismatchError: a master does not have its parameter's shape, or is no dense tensor.
        """
        wide = {param: rows for param, rows in self.kept.items() if rows.dtype != param.dtype}
        return entries_named(MASTER, {**wide, **self.masters}, entries)

    def load(self, saved_masters: Mapping[Tensor, Tensor], params: Iterable[Tensor] | None = None) -> None:
        """Take over masters that were loaded, of all or some; one without starts from its own value."""
        for param in self.masters if params is None else params:
            master = self.masters[param]
            saved = saved_masters.get(param)
            rows = self.rows(param).data
            master.data.copy_(rows if saved is None else saved)
            if saved is not None:
                rows.copy_(master)
        for param in saved_masters.keys() - self.masters.keys():
            self.rows(param).copy_(saved_masters[param])


def _is_over(leaf: Tensor, rows: Tensor) -> bool:
    """Whether a leaf is a view of some rows."""
    return leaf.data_ptr() == rows.data_ptr() and leaf.stride() == rows.stride()


@torch.no_grad()
def _follow(param: Tensor, master: Tensor) -> None:
    """Give a master those elements of its parameter that are not the master's, rounded."""
    rounded = master.to(param.dtype)
    # To look first whether any differ is quicker on the CPU. Elsewhere it would wait for the device.
    if is_asynchronous(param.device) or not torch.equal(param, rounded):
        torch.where(param == rounded, master, param.to(master.dtype), out=master.data)


@torch.no_grad()
def entries_named(
    name: str, held: Mapping[Tensor, Tensor], entries: Mapping[Tensor, dict[str, Any]]
) -> dict[Tensor, Tensor]:
    """Take the entry of some name for each parameter that has one, as a plain tensor like what is held.

    Args:
        name: of the entry.
        held: what this rank keeps of each parameter under that name.
        entries: loaded, by parameter.

    Raises:
        StateMismatchError: an entry does not have the shape of what is held, or is no dense tensor.
    """
    taken = {}
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
        taken[param] = saved if is_alike else torch.empty_like(own.detach()).copy_(saved)
    return taken
