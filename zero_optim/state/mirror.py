"""Mirrors: what a rank owns is copied to its buddy, the next rank, after every step.

`Mirror.update` communicates, and all ranks call it. The copies lie in CPU memory, and travel over gloo beside
the next forward and backward pass.

Note [Versions]
    A version is what all ranks own at one moment. A rank keeps its *own* copy of it and the *other's*: what
    the rank before it owns. When a rank is lost, the others must find a version that is *whole* among them:
    each has its own copy, and the buddy of the lost rank the other's.

    So before version v+1 takes memory from older ones, the ranks exchange a few bytes. A rank sends its bytes
    when both of its copies of v are whole. Who has received those of all ranks drops what is older than v,
    and begins v+1. No rank drops v before it knows that v+1 is whole everywhere. So all that are left hold
    the newest version of which any of them knows that. Several ranks may be lost, but no rank and its buddy.

    The first version has none before it, so `update` returns when it is whole on all ranks. A rank keeps its
    own copy since it changes its state in place, and may be half way through a step. Four copies, of two
    versions, are held while one is sent. If the bytes take longer than a pass, the next step waits for them.

Note [Forms]
    A copy is one flat tensor of bytes: the memory of all tensors, one after the other. Its *form* says which
    tensors these are, and holds all other values (`comm.encoding`). The form is sent only if it has changed,
    behind the bytes. A class that counts its steps in plain numbers changes it at each step.
"""

import secrets
import struct
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from zero_optim.comm.agreement import failing_together
from zero_optim.comm.backends import ON_HOST
from zero_optim.comm.collectives import RankGroup, bytes_to_tensor, tensor_to_bytes
from zero_optim.comm.encoding import Nested, Skeleton, decode, encode, skeleton_from_bytes, skeleton_to_bytes
from zero_optim.comm.lanes import Lease, lease
from zero_optim.comm.sending import start_recv, start_send
from zero_optim.comm.traffic import Waitable
from zero_optim.comm.wire import pack, unpack
from zero_optim.plan.pieces import Pieces

_WORD = struct.Struct("<qqq?8s")  # steps, bytes of the form, bytes of the tensors, whether it failed, token
NUM_LANES = 2  # a rank sends and receives at the same time, for which gloo needs two groups


@dataclass(frozen=True, slots=True)
class Kept:
    """What a rank of a former group says of its copies when it comes to a new one.

    Attributes:
        token: of the former group, the same on all its ranks.
        rank, size: in that group.
        own: [number, steps, age] of each version of which it has its own copy.
        others: the numbers of those of which it has the copy of the rank before.
        pieces: [parameter, owner, start, stop] of all pieces in the former group.
    """

    token: str
    rank: int
    size: int
    own: list[list[int]]
    others: list[int]
    pieces: list[list[int]]


class _Packed(NamedTuple):
    """What is copied: its form and tensors, and the form as bytes if it has to be sent."""

    form: Skeleton
    tensors: list[Tensor]
    form_bytes: bytes


@dataclass(slots=True, eq=False)
class _Copy:
    """A copy of what one rank owns, in the first ``nbytes`` of a memory, and its form."""

    memory: Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.uint8))
    nbytes: int = 0
    form: Skeleton = field(default_factory=list)

    def reserve(self, nbytes: int) -> Tensor:
        """Return so many bytes of memory."""
        if self.memory.numel() < nbytes:
            self.memory = torch.empty(nbytes, dtype=torch.uint8)
        return self.memory[:nbytes]

    def take(self, packed: _Packed) -> Tensor:
        """Copy a value; returns the bytes to send."""
        self.nbytes, self.form = sum(tensor.nbytes for tensor in packed.tensors), packed.form
        room = self.reserve(self.nbytes + len(packed.form_bytes))
        pack(packed.tensors, room[: self.nbytes])
        if packed.form_bytes:
            room[self.nbytes :].copy_(bytes_to_tensor(packed.form_bytes))
        return room

    def value(self) -> Nested:
        """Rebuild the value, in memory of its own."""
        return decode(self.form, iter(unpack(self.form, self.memory[: self.nbytes])))


@dataclass(slots=True, eq=False)
class _Version:
    """The copies of a version on one rank; see Note [Versions].

    ``beside`` is what every rank has: options and global entries. ``other`` is None until it is whole.
    """

    number: int
    steps: int
    age: int
    own: _Copy
    beside: Nested
    other: _Copy | None = None


class _UnderWay(NamedTuple):
    """A version on its way: works to receive it, and to send it."""

    arriving: _Copy
    form_nbytes: int
    received: list[Waitable]
    sent: list[Waitable]


class Mirror:
    """The copies that this rank keeps. A pickle or a copy of it is empty: the buddy has none of the copy's.

    ``nbytes`` is what this rank sent for the last version.
    """

    def __init__(self) -> None:
        self.nbytes = 0
        self._versions: list[_Version] = []
        self._spare: list[_Copy] = []
        self._under_way: _UnderWay | None = None
        self._lease: Lease | None = None
        self._number = 0
        self._token, self._rank, self._size = "", 0, 1
        self._said = ""  # the form that the buddy has, as text

    def __reduce__(self) -> "tuple[type[Mirror], tuple[()]]":
        """See the class."""
        return Mirror, ()

    @property
    def tells_of(self) -> int:
        """The age of the state of which the last version tells; -1 if there is none."""
        return self._versions[-1].age if self._versions else -1

    # ------------------------------------------------------------------ keeping

    def update(self, group: RankGroup, value: Nested, beside: Nested, *, steps: int, age: int) -> None:
        """Begin a version; all ranks call.

        Returns when this rank's own copy is made; it is sent afterwards. The first version is whole on all
        ranks when this returns.

        Args:
            group: the ranks.
            value: what this rank owns, a nested value. It is copied.
            beside: what all ranks have; kept as it is.
            steps: how many steps have been taken; the ranks take the highest number.
            age: of the state.

        Raises:
            TypeError: on every rank, if something in the value cannot be sent without pickle.
            RemoteRankError: a rank has ended, or does not come.
        """
        is_first = not self._versions
        if is_first:
            self.take_lanes(group)  # a copy of an optimizer has none
            self._rank, self._size = group.rank, group.size
            self._number, self._said = 0, ""  # equal on ranks that have come new
        self._finish()
        words, packed = self._exchange(value, steps)
        for old in self._versions[:-1]:  # now the last one is whole everywhere
            self._spare += [each for each in (old.own, old.other) if each is not None]
        del self._versions[:-1]
        if is_first:
            self._token = words[0][-1].hex()
        self._number += 1
        own, arriving = (self._spare.pop() if self._spare else _Copy() for _ in range(2))
        room = own.take(packed)
        self._versions.append(_Version(self._number, max(word[0] for word in words), age, own, beside))
        self._start(room, arriving, *words[(self._rank - 1) % self._size][1:3])
        if is_first:
            self._finish()
            self._lanes()[0].all_gather_fixed(b"\1")

    def take_lanes(self, group: RankGroup) -> None:
        """Make ready to send, when the optimizer is built or bound; all ranks call.

        A rank that dies while process groups are made is noticed only after their timeout. So this is not
        left to the first step.
        """
        if self._lease is None:
            self._lease = lease(group.during("mirror"), NUM_LANES, ON_HOST)

    def _lanes(self) -> Sequence[RankGroup]:
        assert self._lease is not None  # the first update takes it
        return self._lease.groups

    def _exchange(self, value: Nested, steps: int) -> tuple[list[tuple[Any, ...]], _Packed]:
        """Tell all ranks that the last version is whole here, and what comes; see Note [Versions]."""
        lane, failure, packed = self._lanes()[0], None, _Packed([], [], b"")
        said = self._said
        try:
            form, tensors = encode(value, "optimizer state")
            said = repr(form)  # in which 1, 1.0 and True differ, and 0.0 and -0.0
            packed = _Packed(form, tensors, b"" if said == self._said else skeleton_to_bytes(form))
        except Exception as error:  # noqa: BLE001 - told to the others, and raised on every rank
            failure = error
        sizes = len(packed.form_bytes), sum(tensor.nbytes for tensor in packed.tensors)
        word = _WORD.pack(steps, *sizes, failure is not None, secrets.token_bytes(8))
        words = [_WORD.unpack(each) for each in lane.all_gather_fixed(word)]
        if any(each[3] for each in words):
            with failing_together(lane):
                if failure is not None:
                    raise failure
        self._said, self.nbytes = said, sum(sizes)
        return words, packed

    def _start(self, room: Tensor, arriving: _Copy, form_nbytes: int, nbytes: int) -> None:
        """Start to send this rank's copy to its buddy, and to receive that of the rank before."""
        before, buddy = (self._rank - 1) % self._size, (self._rank + 1) % self._size
        there, back = (self._lanes()[sender % NUM_LANES] for sender in (self._rank, before))
        into = arriving.reserve(nbytes + form_nbytes)
        arriving.nbytes = nbytes
        received = [start_recv(back, into, before)] if into.numel() else []
        sent = [start_send(there, room, buddy)] if room.numel() else []
        self._under_way = _UnderWay(arriving, form_nbytes, received, sent)
        assert self._lease is not None
        self._lease.under_way += [*received, *sent]

    def _finish(self) -> None:
        """Wait until the last version is whole on this rank, and with its buddy."""
        under_way, self._under_way = self._under_way, None
        if under_way is None:
            return
        other, form_nbytes, received, sent = under_way
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
        """Note that a step was skipped: the state is still that of the last version."""
        if self._versions:
            self._versions[-1].steps = max(steps, self._versions[-1].steps)

    def drop(self) -> None:
        """Keep no version any more, as they do not lead to the present state; does not communicate.

        What is under way is waited for, as the buddy waits for it. To be called on all ranks.
        """
        try:
            self._finish()
        finally:
            self._versions, self._spare, self._under_way = [], [], None

    def let_go(self, *, waits: bool) -> None:
        """Let the process groups go; versions are kept. Does not communicate.

        If it ``waits``, it waits for the version under way, unless a rank has ended.
        """
        try:
            if waits:
                self._finish()
        except RuntimeError:  # of the backend
            waits = False
        finally:
            taken, self._lease, self._under_way = self._lease, None, None
            if not waits and taken is not None:
                taken.abandon()

    # ------------------------------------------------------------------ going back

    def kept(self, pieces: Sequence[Pieces]) -> Kept | None:
        """Tell what is kept, made in a group with these pieces of each parameter; None if nothing is."""
        if not self._versions:
            return None
        own = [[each.number, each.steps, each.age] for each in self._versions]
        others = [each.number for each in self._versions if each.other is not None]
        every = [[index, *piece] for index, some in enumerate(pieces) for piece in some]
        return Kept(self._token, self._rank, self._size, own, others, every)

    def values_of(self, number: int, hosted: Sequence[int]) -> tuple[dict[int, Nested], Nested]:
        """Return of a version what this rank hosts, by rank of the former group, and what all ranks have."""
        if not hosted:
            return {}, None
        version = next(each for each in self._versions if each.number == number)
        copies = {self._rank: version.own, (self._rank - 1) % self._size: version.other}
        chosen = {former: copies[former] for former in hosted}
        return {former: copy.value() for former, copy in chosen.items() if copy is not None}, version.beside
