"""Mirrors: after every step each rank's state is copied to its buddy, the next rank.

`Mirror.update` communicates, and all ranks call it. The copies lie in CPU memory.

Note [Versions]
    A version is the state of all ranks at one moment. A rank keeps its *own* copy, as a step changes its
    state in place, and the *other's*: that of the rank before. A version is *whole* among some ranks if each
    has its own copy, and the buddy of each lost rank the other's.

    Before version v+1, each rank sends a few bytes when both of its copies of v are whole. A rank with the
    bytes of all drops older versions, and begins v+1. So a transfer takes four copies, of two versions.

Note [A transport of its own]
    A mirror is a move to the next rank, but `moving.move` cannot send it: there both ends wait for each
    piece. A mirror travels beside the next passes, without a thread: one message, from a copy that no step
    changes, of a length that the receiver knows before. Going back is a `move` of what `Mirror.held` returns.

Note [Forms]
    A copy is one flat tensor of bytes, all tensors one after the other. Its *form* names these tensors, and
    holds all other values (`comm.encoding`). It is sent behind the bytes, only if it has changed.
"""

import secrets
import struct
from collections.abc import Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from zero_optim.comm.agreement import failing_together
from zero_optim.comm.backends import ON_HOST
from zero_optim.comm.collectives import RankGroup
from zero_optim.comm.encoding import Nested, Skeleton, decode, encode, skeleton_from_bytes, skeleton_to_bytes
from zero_optim.comm.frames import bytes_to_tensor, tensor_to_bytes
from zero_optim.comm.lanes import Lease, lease
from zero_optim.comm.sending import start_recv, start_send
from zero_optim.comm.traffic import Waitable
from zero_optim.comm.wire import pack, unpack
from zero_optim.plan.groups import ParamGroup
from zero_optim.plan.pieces import Pieces
from zero_optim.state.moving import Held

NUM_LANES = 2  # a rank sends and receives at the same time, for which gloo needs two groups
_PACKED = struct.Struct("<qqq?8s")  # an `_Announcement`


@dataclass(frozen=True, slots=True)
class MirrorReport:
    """A rank's report of its copies to a new group: its place in the former group, and what is there.

    Attributes:
        token: the same on all ranks of that group.
        own: [number, steps, age] of each own copy.
        others: the numbers of the copies of the rank before.
        pieces: [parameter, owner, start, stop] of all pieces.
    """

    token: str
    rank: int
    size: int
    own: list[list[int]]
    others: list[int]
    pieces: list[list[int]]


@dataclass(slots=True, eq=False)
class _Copy:
    """A copy of one rank's state: the first ``nbytes`` of a memory, and its form."""

    memory: Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.uint8))
    nbytes: int = 0
    form: Skeleton = field(default_factory=list)

    def reserve(self, nbytes: int, more: int) -> Tensor:
        """Return memory for the tensors, and for more bytes behind them."""
        self.nbytes = nbytes
        if self.memory.numel() < nbytes + more:
            self.memory = torch.empty(nbytes + more, dtype=torch.uint8)
        return self.memory[: nbytes + more]

    def value(self) -> Nested:
        return decode(self.form, iter(unpack(self.form, self.memory[: self.nbytes])))


@dataclass(slots=True, eq=False)
class _Version:
    """The copies of a version on one rank, and what is equal on every rank; ``other`` once it is whole."""

    number: int
    steps: int
    age: int
    own: _Copy
    options: Sequence[ParamGroup]
    everywhere: Nested  # global entries
    other: _Copy | None = None


class _Announcement(NamedTuple):
    """What a rank tells all others before it sends a version."""

    steps: int
    form_nbytes: int
    nbytes: int
    has_failed: bool
    token: bytes  # random


class _Transfer(NamedTuple):
    """A version in transit."""

    arriving: _Copy
    form_nbytes: int
    received: list[Waitable]
    sent: list[Waitable]


class Mirror:
    """This rank's copies; a pickle or copy is empty. ``nbytes``: bytes sent for the last version."""

    def __init__(self) -> None:
        self.nbytes = 0
        self._versions: list[_Version] = []
        self._spare: list[_Copy] = []
        self._transfer: _Transfer | None = None
        self._lease: Lease | None = None
        self._token, self._rank, self._size = "", 0, 1
        self._sent_form = ""  # the form that the buddy has, as text

    def __reduce__(self) -> "tuple[type[Mirror], tuple[()]]":
        """Copy and pickle as new."""
        return Mirror, ()

    @property
    def last_age(self) -> int:
        """The age of the last version's state; -1 without versions."""
        return self._versions[-1].age if self._versions else -1

    # ------------------------------------------------------------------ making versions

    def update(
        self, group: RankGroup, held: Held, options: Sequence[ParamGroup], *, steps: int, age: int
    ) -> None:
        """Begin a version of this rank's state, with the groups' options; all ranks call.

        Returns when this rank's own copy exists; the first version is then whole on all ranks. The highest
        number of ``steps`` counts. TypeError on every rank, if something cannot be sent without pickle.
        """
        is_first, shared = not self._versions, deepcopy((options, held.everywhere))
        if is_first:
            self.take_lanes(group)  # a copy of an optimizer has none
            self._rank, self._size = group.rank, group.size
            self._sent_form = ""  # also on ranks that have come new
        self._finish()
        form, form_bytes, tensors, announced = self._announce(held, steps)
        if is_first:
            self._token = announced[0].token.hex()
        number = 1 if is_first else self._versions[-1].number + 1
        for old in self._versions[:-1]:  # now the last one is whole everywhere
            self._spare += [each for each in (old.own, old.other) if each is not None]
        del self._versions[:-1]
        own, other = (self._spare.pop() if self._spare else _Copy() for _ in range(2))
        nbytes = announced[self._rank].nbytes
        outgoing, own.form = own.reserve(nbytes, len(form_bytes)), form
        pack(tensors, outgoing[:nbytes])
        if form_bytes:
            outgoing[nbytes:].copy_(bytes_to_tensor(form_bytes))
        self._versions.append(_Version(number, max(each.steps for each in announced), age, own, *shared))
        self._start(outgoing, other, announced)
        if is_first:
            self._finish()
            self._lanes()[0].all_gather_fixed(b"\1")

    def _announce(self, held: Held, steps: int) -> tuple[Skeleton, bytes, list[Tensor], list[_Announcement]]:
        """Encode the state, and tell the others its size."""
        lane = self._lanes()[0]
        failure, form, tensors, text, form_bytes = None, Skeleton(), list[Tensor](), "", b""
        try:
            form, tensors = encode({"state": held.state, "values": held.values}, "optimizer state")
            text = repr(form)  # in which 1, 1.0 and True differ, and 0.0 and -0.0
            form_bytes = b"" if text == self._sent_form else skeleton_to_bytes(form)
        except Exception as error:  # noqa: BLE001 - told to the others, and raised on every rank
            failure = error
        nbytes = sum(tensor.nbytes for tensor in tensors)
        mine = _PACKED.pack(steps, len(form_bytes), nbytes, failure is not None, secrets.token_bytes(8))
        announced = [_Announcement(*_PACKED.unpack(each)) for each in lane.all_gather_fixed(mine)]
        if any(each.has_failed for each in announced):
            with failing_together(lane):
                if failure is not None:
                    raise failure
        self._sent_form, self.nbytes = text, len(form_bytes) + nbytes
        return form, form_bytes, tensors, announced

    def _start(self, outgoing: Tensor, arriving: _Copy, announced: Sequence[_Announcement]) -> None:
        """Start to send to the buddy, and to receive from the rank before; each sender has a lane."""
        before, buddy = (self._rank - 1) % self._size, (self._rank + 1) % self._size
        form_nbytes = announced[before].form_nbytes
        incoming = arriving.reserve(announced[before].nbytes, form_nbytes)
        there, back = (self._lanes()[sender % NUM_LANES] for sender in (self._rank, before))
        received = [start_recv(back, incoming, before)] if incoming.numel() else []
        sent = [start_send(there, outgoing, buddy)] if outgoing.numel() else []
        self._transfer = _Transfer(arriving, form_nbytes, received, sent)
        assert self._lease is not None
        self._lease.under_way += [*received, *sent]

    def take_lanes(self, group: RankGroup) -> None:
        """Lease process groups, when the optimizer is built or bound; all ranks call."""
        if self._lease is None:  # not at the first step: the death of a rank meanwhile is noticed late
            self._lease = lease(group.during("mirror"), NUM_LANES, ON_HOST)

    def _lanes(self) -> Sequence[RankGroup]:
        assert self._lease is not None  # the first update takes it
        return self._lease.groups

    def _finish(self) -> None:
        """Wait until the last version is whole here, and sent."""
        transfer, self._transfer = self._transfer, None
        if transfer is None:
            return
        other, form_nbytes, received, sent = transfer
        for work in received:
            work.wait()
        if form_nbytes:
            text = other.memory[other.nbytes : other.nbytes + form_nbytes]
            other.form = skeleton_from_bytes(tensor_to_bytes(text))
        else:
            before = self._versions[-2].other
            assert before is not None  # the first form is always sent, and versions are whole in order
            other.form = before.form
        self._versions[-1].other = other
        for work in sent:
            work.wait()
        if self._lease is not None:
            self._lease.under_way.clear()

    def relabel(self, steps: int) -> None:
        """Note a skipped step: the last version is still the state."""
        if self._versions:
            self._versions[-1].steps = max(steps, self._versions[-1].steps)

    def drop(self) -> None:
        """Drop all versions after waiting for the one in transit; all ranks call. Does not communicate."""
        try:
            self._finish()
        finally:
            self._versions, self._spare, self._transfer = [], [], None

    def let_go(self, *, waits: bool) -> None:
        """Release the process groups, maybe after waiting for the version in transit; keep the versions."""
        try:
            if waits:
                self._finish()
        except RuntimeError:  # of the backend
            waits = False
        finally:
            lent, self._lease, self._transfer = self._lease, None, None
            if not waits and lent is not None:
                lent.abandon()

    # ------------------------------------------------------------------ going back

    def report(self, pieces: Sequence[Pieces]) -> MirrorReport | None:
        """Describe the versions, for each parameter's pieces in their group; None without versions."""
        if not self._versions:
            return None
        own = [[each.number, each.steps, each.age] for each in self._versions]
        others = [each.number for each in self._versions if each.other is not None]
        every = [[index, *piece] for index, some in enumerate(pieces) for piece in some]
        return MirrorReport(self._token, self._rank, self._size, own, others, every)

    def held(self, number: int, former: Sequence[int]) -> tuple[dict[int, Held], Sequence[ParamGroup] | None]:
        """Return the copies of a version, by ``former`` rank, as holders of a move, and the options."""
        if not former:
            return {}, None
        version = next(each for each in self._versions if each.number == number)
        copies = {self._rank: version.own, (self._rank - 1) % self._size: version.other}
        values = {rank: copy.value() for rank in former if (copy := copies[rank]) is not None}
        held = {
            rank: Held(each["state"], each["values"], version.everywhere, is_live=False)
            for rank, each in values.items()
        }
        return held, version.options
