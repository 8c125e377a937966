"""Marks in the gathers of units: which bucket it is, and what for.

Note [Marks of units]
    Ranks gather units in the order in which they call modules. If a rank calls others than the rest, as
    where data decide about a route, or evaluates once more, its gather of one unit meets that of another one.
    The units of a model are often alike. So no collective fails: each rank would compute with rows of two
    units, mixed. And as each rank remembers its own order, it would fetch other units ahead than the rest
    from then on.

    So each gather has a mark: the number of the bucket, and what it is gathered for. Who finds another mark
    than its own raises. From then on every gather raises the same: ranks are at different places for good.

    Where gloo sends tensors of the CPU, each rank sends its mark to all others, in a message of four bytes
    beside the rows, and looks at those of all ranks before it waits for rows. Units may differ in size, and
    gloo ends the process where rows that meet differ in length. So the rows have the mark as their tag: rows
    of different marks never meet. Both are started at once, so that nothing waits for a mark to come back. On
    two ranks marks took 60 to 90 us a gather beside small rows. On a machine with far more busy processes
    than cores, iterations took 1.2 times as long as with broadcasts and marks in the rows.

    Elsewhere the mark travels in the rows: in two bytes of the room for a stamp, which stamps leave free. Of
    ranks that own nothing of the bucket nobody hears there, and what comes of rows that differ in length is
    up to the backend. On an accelerator marks are copied to the CPU beside what runs, and looked at some
    gathers later. Inside the replicas of a mesh with state over all ranks there are none in the rows, as
    those are copies.
"""

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum

import torch
from torch import Tensor

from zero_optim.comm.collectives import RankGroup, bytes_to_tensor, tensor_to_bytes
from zero_optim.comm.frames import ranks_text
from zero_optim.comm.traffic import Waitable
from zero_optim.compat.streams import HostCopy, copy_to
from zero_optim.errors import RankMismatchError
from zero_optim.plan.layout import Layout, Room
from zero_optim.shard.stamp import MARK, MARK_NBYTES
from zero_optim.shard.storage import ParamBucket
from zero_optim.shard.unit_stamps import UnitStamps

_PURPOSES = 8  # more than there are; a mark is so many times the number of the bucket, and the purpose
_TAG = _PURPOSES - 1  # of marks: no mark, as it is no purpose
_NBYTES = 4  # of a mark beside the rows
_MOST_LATE = 8  # marks of gathers that an accelerator may not have ended


class Purpose(IntEnum):
    """What a unit is gathered for."""

    TRAINING = 1
    EVALUATION = 2
    BACKWARD = 3
    REQUEST = 4
    AS_KEPT = 5


_TOLD = {
    Purpose.TRAINING: "a forward pass in training",
    Purpose.EVALUATION: "a forward pass without gradients",
    Purpose.BACKWARD: "a backward pass",
    Purpose.REQUEST: "unsharded() or a state dict",
    Purpose.AS_KEPT: "a state dict of what owners keep",
}


@dataclass(frozen=True, slots=True)
class _Came:
    """The marks of a gather.

    Attributes:
        mark: of this rank.
        rooms: in which the ranks' marks were.
        copy: of these.
    """

    mark: int
    rooms: Sequence[Room]
    copy: HostCopy


class UnitMarks:
    """Writes and reads the marks of a model's units. Only `start_rows` communicates.

    Args:
        units: the name and the buckets of each, by number.
        group: the ranks.
    """

    def __init__(self, units: Sequence[tuple[str, Sequence[ParamBucket]]], group: RankGroup) -> None:
        named = [(name, bucket) for name, buckets in units for bucket in buckets]
        self._labels = [name for name, _ in named]
        self._numbers = {bucket.params[0]: number for number, (_, bucket) in enumerate(named)}
        self._group = group
        self._came: deque[_Came] = deque()
        self._difference = ""

    def mark_of(self, bucket: ParamBucket, purpose: Purpose) -> int:
        """Make the mark of a gather; the bucket has the parameters of one of a unit."""
        return self._numbers[bucket.params[0]] * _PURPOSES + purpose

    def start_rows(
        self, mark: int, lanes: Sequence[RankGroup], rows: Sequence[tuple[int, Tensor]], label: str
    ) -> list[Waitable]:
        """Start to send rows from their owners, and marks beside them; as `start_broadcasts`."""
        self.check_known()
        ranks = lanes[0]
        marks = torch.zeros(ranks.size, _NBYTES, dtype=torch.uint8)
        marks[ranks.rank] = bytes_to_tensor(mark.to_bytes(_NBYTES, "little"))
        works = ranks.spread_rows(list(enumerate(marks)), lanes, _TAG, label)
        return [_Beside(self, marks, works), *ranks.spread_rows(rows, lanes, mark, label)]

    def write(self, flat: Tensor, layout: Layout, rank: int, mark: int) -> Callable[[], None]:
        """Write this rank's mark into its room; gives what takes those of all ranks when they have come."""
        rooms = layout.rooms
        octets, size = flat.view(torch.uint8), flat.element_size()
        places = [octets[room.start * size + MARK :][:MARK_NBYTES] for room in rooms]
        for room, place in zip(rooms, places, strict=True):
            if room.owner == rank:
                copy_to(place, bytes_to_tensor(mark.to_bytes(_NBYTES, "little")[:MARK_NBYTES]))

        def take() -> None:
            if places:
                self._came.append(_Came(mark % 2 ** (8 * MARK_NBYTES), rooms, HostCopy(torch.cat(places))))

        return take

    def check(self) -> None:
        """Look at what has come, unless the CPU would wait for it.

        Raises:
            RankMismatchError: another rank has gathered another bucket, or for something else.
        """
        self.check_known()
        while self._came and (self._came[0].copy.is_here or len(self._came) > _MOST_LATE):
            came = self._came.popleft()
            octets = tensor_to_bytes(self._group.read(came.copy))
            owners = [room.owner for room in came.rooms]
            marks = zip(owners, _marks_in(octets, MARK_NBYTES), strict=True)
            self.compare({self._group.rank: came.mark} | dict(marks))

    def check_known(self) -> None:
        """Check that no marks have differed so far.

        Raises:
            RankMismatchError: they have.
        """
        if self._difference:
            raise RankMismatchError(self._difference)

    def compare(self, marks: Mapping[int, int]) -> None:
        """Check that the marks of ranks, by group rank, are one.

        Raises:
            RankMismatchError: they are not.
        """
        ranks_of: dict[int, list[int]] = {}
        for rank, mark in sorted(marks.items()):
            ranks_of.setdefault(mark, []).append(self._group.numbers[rank])
        if len(ranks_of) == 1:
            return
        self._came.clear()
        told = "; ".join(f"{ranks_text(ranks)}: {self._told(mark)}" for mark, ranks in ranks_of.items())
        self._difference = (
            f"ranks gather different parts of a fully sharded model: {told}. All ranks must call the same "
            "modules, in the same order and as often, in training and evaluation; so too unsharded(), "
            "state_dict() and load_state_dict()"
        )
        self.check_known()

    def _told(self, mark: int) -> str:
        number, purpose = divmod(mark, _PURPOSES)
        if number >= len(self._labels) or purpose not in list(Purpose):
            return "something else"
        return f"{self._labels[number]}, for {_TOLD[Purpose(purpose)]}"


def _marks_in(octets: bytes, nbytes: int) -> list[int]:
    """Read marks of some bytes each that lie one after the other."""
    return [int.from_bytes(octets[at : at + nbytes], "little") for at in range(0, len(octets), nbytes)]


@dataclass(frozen=True, slots=True, eq=False)
class _Beside:
    """The marks of all ranks, on their way; a wait for them compares.

    Attributes:
        known: compares.
        marks: of all, by rank, once `works` have ended.
        works: that bring them.
    """

    known: UnitMarks
    marks: Tensor
    works: Sequence[Waitable]

    def wait(self) -> None:
        """Wait for them.

        Raises:
            RankMismatchError: they differ, or others did before: what was started then may never come.
        """
        self.known.check_known()
        for work in self.works:
            work.wait()
        self.known.compare(dict(enumerate(_marks_in(tensor_to_bytes(self.marks.flatten()), _NBYTES))))


@dataclass(frozen=True, slots=True, eq=False)
class Marked:
    """Sends stamps, if there are any, and a mark; see `Stamps.send`.

    Attributes:
        marks: writes it.
        mark: of the gather.
        stamps: None for none.
    """

    marks: UnitMarks
    mark: int
    stamps: UnitStamps | None

    def send(self, flat: Tensor, layout: Layout, rank: int) -> Callable[[], None]:
        """See `Stamps.send`."""
        take_stamps = None if self.stamps is None else self.stamps.send(flat, layout, rank)
        take_mark = self.marks.write(flat, layout, rank, self.mark)  # behind the stamp, which would cover it

        def take() -> None:
            if take_stamps is not None:
                take_stamps()
            take_mark()

        return take
