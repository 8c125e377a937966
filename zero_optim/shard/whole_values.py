"""Values that every rank has whole: in one flat tensor, or copied to one for each gather. No communication.

Note [Moving parameters]
    A moved parameter gets another storage; another thread or stream would then read released memory. So
    parameters whose ``data`` was replaced move only in `step` and in comm hooks, which the backward pass
    itself calls. Autograd saves a leaf as the tensor object and a view by its old storage, so that pass finds
    the same values. If a class replaces ``param.data`` in its own step, a gather moves the parameter on that
    thread and stream; the backward pass must not read it then.
"""

from collections.abc import Callable, Collection, Iterable, Sequence
from weakref import WeakSet

import torch
from torch import Tensor

from zero_optim.compat.memory import give_back_pages, is_seen_by_others, seen_outside
from zero_optim.shard.bucket import Members
from zero_optim.shard.places import can_be_views, with_own_storages, zero_padding


class InPlaceValues:
    """Parameters inside one flat tensor with own storages, where gathers write.

    Those whose places are in ``shared`` stay where others have their memory too; gathers copy them.
    """

    is_in_place, nbytes_to_gather = True, 0  # no memory beside, while a gather is pending

    def __init__(self, members: Members, shared: set[int]) -> None:
        """Move the parameters in one by one, each releasing its old storage."""
        self._members, self._shared = members, shared
        self._flat = torch.empty(members.layout.numel, dtype=members.dtype, device=members.device)
        zero_padding(self._flat, members.layout)
        self._views = with_own_storages(self._flat, members.forms, members.layout)
        self.addresses = [view.data_ptr() for view in self._views]
        self._places = [(at, at + view.nbytes) for at, view in zip(self.addresses, self._views, strict=True)]
        for index in range(len(self._views)):
            self._take_in(index)
        self.sent: Sequence[tuple[int, Tensor]] = members.rows(self._flat)
        received = dict.fromkeys(index for index, _ in members.others)
        self._received = [members.params[index] for index in received]
        _LIVING.add(self)

    def __reduce__(self) -> tuple[Callable[..., "InPlaceValues | CopiedValues"], tuple[Members]]:
        """Copy and pickle as values of the copied parameters."""
        return whole_values, (self._members,)

    def _moved(self) -> list[int]:
        """List parameters with replaced ``data``."""
        addresses = list(map(Tensor.data_ptr, self._members.params))  # twice a step, hence one comparison
        if addresses == self.addresses:
            return []
        pairs = zip(addresses, self.addresses, strict=True)
        return [index for index, (address, former) in enumerate(pairs) if address != former]

    def _take_in_moved(self) -> list[int]:
        """Move parameters with replaced ``data`` back in; list those that do not fit."""
        moved, members = self._moved(), self._members
        copy_out(members.params, list(map(self._places.__getitem__, moved)))
        wrong = [index for index in moved if not members.forms[index].fits(members.params[index])]
        for index in moved:
            if index not in wrong:
                self._take_in(index)
        return wrong

    @torch.no_grad()
    def _take_in(self, index: int) -> None:
        param, view = self._members.params[index], self._views[index]
        if view.data_ptr() != self.addresses[index]:  # PyTorch has put shared memory into its storage
            self._shared.add(index)
        if index in self._shared:
            self._members.views(self._flat)[index].copy_(param)
            return
        view.copy_(param)
        param.data = view

    def written(self) -> list[tuple[int, int]]:
        """Return the places, as addresses, of parameters with replaced ``data``."""
        return list(map(self._places.__getitem__, self._moved()))

    def refresh(self) -> None:
        """Take over the user's changes; RuntimeError if a dtype, device or shape changed."""
        for index in self._take_in_moved():  # the others fit
            self._members.forms[index].check(self._members.params[index])

    def fill(self) -> tuple[Tensor, None]:
        """Return the flat tensor with this rank's current row; raises nothing here, as other ranks wait."""
        if self._moved():
            self._take_in_moved()
        return self._flat, None

    def receive(self, flat: Tensor, changed: Collection[Tensor] | None = None) -> None:
        """Tell autograd of other ranks' rows, and copy those of shared parameters; see `GatheredValues`."""
        received = self._received
        if changed is not None:
            received = [param for param in received if param in changed]
        torch.autograd.graph.increment_version(received)
        if self._shared:
            forms, params = self._members.forms, self._members.params
            parts = [part for part in self._members.others_of(changed) if part[0] in self._shared]
            parts = [part for part in parts if forms[part[0]].fits(params[part[0]])]
            self._members.copy(flat, parts, into_params=True)

    def give_back(self, param: Tensor) -> None:
        """Return a parameter's memory to the system, unless a view of it exists; no gather may follow."""
        index = next(index for index, own in enumerate(self._members.params) if own is param)
        view = self._views[index]
        is_here = view.data_ptr() == self.addresses[index]  # and not in shared memory
        if is_here and not is_seen_by_others(view):
            give_back_pages(view)


_LIVING: WeakSet[InPlaceValues] = WeakSet()


class CopiedValues:
    """Parameters in memory of their own; each gather has a new flat tensor."""

    is_in_place = False
    sent: Sequence[tuple[int, Tensor]] = ()

    def __init__(self, members: Members) -> None:
        self._members = members
        self.nbytes_to_gather = members.layout.numel * members.dtype.itemsize  # while one is pending

    def __reduce__(self) -> tuple[type["CopiedValues"], tuple[Members]]:
        """Copy and pickle as values of the copied parameters."""
        return CopiedValues, (self._members,)

    def written(self) -> list[tuple[int, int]]:
        """Return nothing: `refresh` writes nowhere."""
        return []

    def refresh(self) -> None:
        """Raise RuntimeError if a dtype, device or shape changed."""
        self._members.check()

    def fill(self) -> tuple[Tensor, None]:
        """Return a new flat tensor with this rank's current row."""
        members = self._members
        flat = torch.zeros(members.layout.numel, dtype=members.dtype, device=members.device)
        members.copy(flat, members.own, into_params=False)
        return flat, None

    def receive(self, flat: Tensor, changed: Collection[Tensor] | None = None) -> None:
        """Copy other ranks' rows to the parameters, or to those in ``changed``, which tells autograd."""
        self._members.copy(flat, self._members.others_of(changed), into_params=True)


def whole_values(
    members: Members,
    *,
    as_views: bool = True,  # moves the parameters into a flat tensor if they can be; ranks may differ
    shared: Collection[int] | None = None,  # ids of those that stay where they are; None to look
) -> InPlaceValues | CopiedValues:
    """Return the values of a bucket that every rank has whole."""
    if not as_views or not can_be_views(members.params):
        return CopiedValues(members)
    shared = shared_params(members.params) if shared is None else shared
    return InPlaceValues(members, {at for at, param in enumerate(members.params) if id(param) in shared})


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
