"""Mirrors: after every step each rank's state is copied to its buddy, the next rank.

`Mirror.update` communicates, and all ranks call it. The copies lie in CPU memory, and travel over gloo beside
the next forward and backward pass.

Note [Versions]
    A version is the state of all ranks at one moment. A rank keeps its *own* copy, as a step changes its
    state in place, and the *other's*: that of the rank before. After the loss of a rank the others need a
    version that is *whole* among them: each has its own copy, and the lost rank's buddy the other's.

    So before version v+1, each rank sends a few bytes when both of its copies of v are whole. A rank with the
    bytes of all drops versions older than v, and begins v+1. No rank drops v before v+1 is whole everywhere.
    Several ranks may be lost, but no rank and its buddy. The first `update` returns when its version is whole
    on all ranks. During a transfer four copies, of two versions, are held. If the bytes take longer than a
    pass, the next step waits.

Note [Forms]
    A copy is one flat tensor of bytes, all tensors one after the other. Its *form* names these tensors, and
    holds all other values (`comm.encoding`). The form is sent only if it has changed, behind the bytes. A
    class that counts steps in plain numbers changes it at each step.
"""

import secrets
import struct
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

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
class MirrorReport:
    """A rank's report of its copies to a new group.

    Attributes:
        token: of the former group, the same on all its ranks.
        rank, size: in that group.
        own: [number, steps, age] of each own copy.
        others: the numbers of the copies of the rank before.
        pieces: [parameter, owner, start, stop] of all pieces in the former group.
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
        """Rebuild the value, in new memory."""
        return decode(self.form, iter(unpack(self.form, self.memory[: self.nbytes])))


@dataclass(slots=True, eq=False)
class _Version:
    """The copies of a version on one rank.

    ``beside`` is equal on every rank: options and global entries. ``other`` is None until it is whole.
    """

    number: int
    steps: int
    age: int
    own: _Copy
    beside: Nested
    other: _Copy | None = None


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
        self._number = 0
        self._token, self._rank, self._size = "", 0, 1
        self._sent_form = ""  # the form that the buddy has, as text

    def __reduce__(self) -> "tuple[type[Mirror], tuple[()]]":
        """Copy and pickle as new."""
        return Mirror, ()

    @property
    def last_age(self) -> int:
        """The age of the last version's state; -1 without versions."""
        return self._versions[-1].age if self._versions else -1

    # ------------------------------------------------------------------ keeping

    def update(self, group: RankGroup, value: Nested, beside: Nested, *, steps: int, age: int) -> None:
        """Begin a version; all ranks call.

        Returns when this rank's own copy exists; the first version is then whole on all ranks, later ones
        travel on.

        Args:
            group: the ranks.
            value: this rank's part of the state, a nested value; copied.
            beside: the part that is equal on all ranks; not copied.
            steps: the number of steps; the highest among the ranks counts.
            age: of the state.

        Raises:
            TypeError: on every rank, if something in the value cannot be sent without pickle.
            RemoteRankError: a rank has ended, or does not come.
        """
        is_first = not self._versions
        if is_first:
            self.take_lanes(group)  # a copy of an optimizer has none
            self._rank, self._size = group.rank, group.size
            self._number, self._sent_form = 0, ""  # equal on ranks that have come new
        self._finish()
        lanes = self._lanes()
        failure, form, tensors, form_text, form_bytes = None, Skeleton(), list[Tensor](), "", b""
        try:
            form, tensors = encode(value, "optimizer state")
            form_text = repr(form)  # in which 1, 1.0 and True differ, and 0.0 and -0.0
            form_bytes = b"" if form_text == self._sent_form else skeleton_to_bytes(form)
        except Exception as error:  # noqa: BLE001 - told to the others, and raised on every rank
            failure = error
        nbytes = sum(tensor.nbytes for tensor in tensors)
        word = _WORD.pack(steps, len(form_bytes), nbytes, failure is not None, secrets.token_bytes(8))
        words = [_WORD.unpack(each) for each in lanes[0].all_gather_fixed(word)]
        if any(has_failed for *_, has_failed, _ in words):
            with failing_together(lanes[0]):
                if failure is not None:
                    raise failure
        self._sent_form, self.nbytes = form_text, len(form_bytes) + nbytes
        for old in self._versions[:-1]:  # now the last one is whole everywhere
            self._spare += [each for each in (old.own, old.other) if each is not None]
        del self._versions[:-1]
        if is_first:
            self._token = words[0][-1].hex()
        self._number += 1
        own, arriving = (self._spare.pop() if self._spare else _Copy() for _ in range(2))
        outgoing, own.form = own.reserve(nbytes, len(form_bytes)), form
        pack(tensors, outgoing[:nbytes])
        if form_bytes:
            outgoing[nbytes:].copy_(bytes_to_tensor(form_bytes))
        self._versions.append(_Version(self._number, max(word[0] for word in words), age, own, beside))
        before, buddy = (self._rank - 1) % self._size, (self._rank + 1) % self._size
        _, form_nbytes, incoming_nbytes, *_ = words[before]
        incoming = arriving.reserve(incoming_nbytes, form_nbytes)
        there, back = (lanes[sender % NUM_LANES] for sender in (self._rank, before))
        received = [start_recv(back, incoming, before)] if incoming.numel() else []
        sent = [start_send(there, outgoing, buddy)] if outgoing.numel() else []
        self._transfer = _Transfer(arriving, form_nbytes, received, sent)
        assert self._lease is not None
        self._lease.under_way += [*received, *sent]
        if is_first:
            self._finish()
            lanes[0].all_gather_fixed(b"\1")

    def take_lanes(self, group: RankGroup) -> None:
        """Lease process groups, when the optimizer is built or bound; all ranks call.

        Not at the first step: a rank that dies meanwhile is noticed only after the process groups' timeout.
        """
        if self._lease is None:
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
        """Release the process groups and keep the versions. Does not communicate.

        If it ``waits``, it waits for the version in transit, unless a rank has ended.
        """
        try:
            if waits:
                self._finish()
        except RuntimeError:  # of the backend
            waits = False
        finally:
            taken, self._lease, self._transfer = self._lease, None, None
            if not waits and taken is not None:
                taken.abandon()

    # ------------------------------------------------------------------ going back

    def report(self, pieces: Sequence[Pieces]) -> MirrorReport | None:
        """Describe the versions, given each parameter's pieces in their group; None without versions."""
        if not self._versions:
            return None
        own = [[each.number, each.steps, each.age] for each in self._versions]
        others = [each.number for each in self._versions if each.other is not None]
        every = [[index, *piece] for index, some in enumerate(pieces) for piece in some]
        return MirrorReport(self._token, self._rank, self._size, own, others, every)

    def values_of(self, number: int, hosted: Sequence[int]) -> tuple[dict[int, Nested], Nested]:
        """Return a version's values hosted here, by rank of the former group, and the common part."""
        if not hosted:
            return {}, None
        version = next(each for each in self._versions if each.number == number)
        copies = {self._rank: version.own, (self._rank - 1) % self._size: version.other}
        chosen = {former: copies[former] for former in hosted}
        return {former: copy.value() for former, copy in chosen.items() if copy is not None}, version.beside
