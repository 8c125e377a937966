"""Marks in the gathers of units: which bucket it is, and what for.

Note [Marks of units]
    Ranks gather units in the order in which they call modules. If a rank calls others than the rest, as
    where data decide about a route, or evaluates once more, its gather of one unit meets that of another one.
    The units of a model are often alike. So no collective fails: each rank would compute with rows of two
    units, mixed. And as each rank remembers its own order, it would fetch other units ahead than the rest
    from then on.

    So what travels anyway carries a mark: the number of the bucket, and what it is gathered for. It lies in
    two bytes of the room for a stamp, which stamps leave free, and goes with each gather. Who finds another
    mark than its own raises. All that gather the bucket see that, but for ranks that own nothing of what is
    gathered: of them nobody hears there.

    On an accelerator marks are copied to the CPU beside what runs, and looked at some gathers later. Gathers
    inside the replicas of a mesh with state over all ranks have no marks, as the rows there are copies.
"""

from collections import deque
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from enum import IntEnum

import torch
from torch import Tensor

from zero_optim.comm.collectives import RankGroup, bytes_to_tensor, tensor_to_bytes
from zero_optim.comm.frames import ranks_text
from zero_optim.compat.streams import HostCopy, copy_to
from zero_optim.errors import RankMismatchError
from zero_optim.plan.layout import Layout, Room
from zero_optim.shard.stamp import MARK, MARK_NBYTES
from zero_optim.shard.unit_stamps import UnitStamps

_MOST_NUMBERS = 2**12  # the rest of the two bytes is what for
_MOST_LATE = 8  # marks of gathers that an accelerator may not have ended


class Purpose(IntEnum):
    """What a unit is gathered for."""

    TRAINING = 1
    EVALUATION = 2
    BACKWARD = 3
    REQUEST = 4


_TOLD = {
    Purpose.TRAINING: "a forward pass in training",
    Purpose.EVALUATION: "a forward pass without gradients",
    Purpose.BACKWARD: "a backward pass",
    Purpose.REQUEST: "unsharded() or a state dict",
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
    """Writes and reads the marks of a model's units. Nothing here communicates.

    Args:
        labels: of the buckets of all units, by number.
        group: the ranks.
    """

    def __init__(self, labels: Sequence[str], group: RankGroup) -> None:
        self._labels = labels
        self._group = group
        self._came: deque[_Came] = deque()

    def write(self, flat: Tensor, layout: Layout, rank: int, mark: int) -> Callable[[], None]:
        """Write this rank's mark into its room; gives what takes those of all ranks when they have come."""
        rooms = layout.rooms
        octets, size = flat.view(torch.uint8), flat.element_size()
        places = [octets[room.start * size + MARK :][:MARK_NBYTES] for room in rooms]
        for room, place in zip(rooms, places, strict=True):
            if room.owner == rank:
                copy_to(place, bytes_to_tensor(mark.to_bytes(MARK_NBYTES, "little")))

        def take() -> None:
            if places:
                self._came.append(_Came(mark, rooms, HostCopy(torch.cat(places))))

        return take

    def check(self) -> None:
        """Look at what has come, unless the CPU would wait for it.

        Raises:
            RankMismatchError: another rank has gathered another bucket, or for something else.
        """
        while self._came and (self._came[0].copy.is_here or len(self._came) > _MOST_LATE):
            came = self._came.popleft()
            octets = tensor_to_bytes(self._group.read(came.copy))
            marks = [int.from_bytes(octets[at : at + MARK_NBYTES], "little") for at in _places(octets)]
            if any(mark != came.mark for mark in marks):
                self._came.clear()
                owners = [room.owner for room in came.rooms]
                raise self._difference({self._group.rank: came.mark} | dict(zip(owners, marks, strict=True)))

    def _difference(self, marks: dict[int, int]) -> RankMismatchError:
        ranks_of: dict[int, list[int]] = {}
        for rank, mark in sorted(marks.items()):
            ranks_of.setdefault(mark, []).append(self._group.numbers[rank])
        told = "; ".join(f"{ranks_text(ranks)}: {self._told(mark)}" for mark, ranks in ranks_of.items())
        return RankMismatchError(
            f"ranks gather different parts of a fully sharded model: {told}. All ranks must call the same "
            "modules, in the same order and as often, in training and evaluation; so too unsharded(), "
            "state_dict() and load_state_dict()"
        )

    def _told(self, mark: int) -> str:
        number, purpose = mark % _MOST_NUMBERS, mark // _MOST_NUMBERS
        if number >= len(self._labels) or purpose not in list(Purpose):
            return "something else"
        return f"{self._labels[number]}, for {_TOLD[Purpose(purpose)]}"


def _places(octets: bytes) -> range:
    return range(0, len(octets), MARK_NBYTES)


@dataclass(frozen=True, slots=True, eq=False)
class Marked:
    """Sends stamps, if there are any, and a mark; see `Stamps.send`.

    Attributes:
        marks: writes it.
        number: of the bucket.
        purpose: what it is gathered for.
        stamps: None for none.
    """

    marks: UnitMarks
    number: int
    purpose: Purpose
    stamps: UnitStamps | None

    def send(
        self, flat: Tensor, layout: Layout, rank: int, chosen: Collection[int] | None = None
    ) -> Callable[[], None]:
        """See `Stamps.send`."""
        take_stamps = None if self.stamps is None else self.stamps.send(flat, layout, rank, chosen)
        mark = self.number % _MOST_NUMBERS + _MOST_NUMBERS * self.purpose
        take_mark = self.marks.write(flat, layout, rank, mark)  # behind the stamp, which would cover it

        def take() -> None:
            if take_stamps is not None:
                take_stamps()
            take_mark()

        return take
