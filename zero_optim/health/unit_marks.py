"""Marks in the gathers of units: the bucket and the purpose.

Note [Marks of units]
    Ranks gather units in the order of their module calls. If data decide a route, gathers of two units may
    meet, and each rank would compute with rows of both. So each gather has a mark: bucket number and purpose.
    A rank that reads another mark raises, then and in every later gather.

    For gloo on the CPU each rank sends its mark to all others, four bytes beside the rows, and reads all
    before it waits for rows. The mark is the rows' tag, so rows of different marks never meet: gloo ends the
    process if rows that meet differ in length. On two ranks marks took 60 to 90 us a gather. Elsewhere the
    mark is in the stamp of each row, read some gathers later on an accelerator. Replicas of a mesh with
    state over all ranks have none in their rows, which are copies.
"""

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Protocol

import torch
from torch import Tensor

from zero_optim.comm.collectives import RankGroup, bytes_to_tensor, tensor_to_bytes
from zero_optim.comm.frames import ranks_text
from zero_optim.comm.sending import spread_rows
from zero_optim.comm.traffic import Waitable
from zero_optim.compat.streams import HostCopy, copy_to
from zero_optim.errors import RankMismatchError
from zero_optim.health.stamp import MARK, MARK_NBYTES
from zero_optim.health.stamps import nothing
from zero_optim.health.unit_stamps import UnitStamps
from zero_optim.plan.layout import Layout

_PURPOSES = 8  # more than there are; a mark is so many times the number of the bucket, and the purpose
_TAG = _PURPOSES - 1  # of marks: no mark, as it is no purpose
_NBYTES = 4  # of a mark beside the rows
_MOST_LATE = 8  # marks of gathers that an accelerator may not have ended


class Purpose(IntEnum):
    """The purpose of a unit's gather."""

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


class OfParams(Protocol):
    """A bucket of parameters."""

    @property
    def params(self) -> Sequence[Tensor]:
        """The parameters."""
        ...


class UnitMarks:
    """Writes and reads the marks of a model's units, given by name with their buckets."""

    def __init__(self, units: Sequence[tuple[str, Sequence[OfParams]]], group: RankGroup) -> None:
        named = [(name, bucket) for name, buckets in units for bucket in buckets]
        self._labels = [name for name, _ in named]
        self._numbers = {bucket.params[0]: number for number, (_, bucket) in enumerate(named)}
        self._group = group
        self._came: deque[tuple[dict[int, int], Sequence[int], HostCopy]] = deque()
        self._difference = ""

    def mark_of(self, bucket: OfParams, purpose: Purpose) -> int:
        """Return the mark of a gather of a unit's bucket."""
        return self._numbers[bucket.params[0]] * _PURPOSES + purpose

    def start_rows(
        self, mark: int, lanes: Sequence[RankGroup], rows: Sequence[tuple[int, Tensor]], label: str
    ) -> list[Waitable]:
        """Start to send rows from their owners, with marks beside; as `start_broadcasts`."""
        self.check_known()
        ranks = lanes[0]
        marks = torch.zeros(ranks.size, _NBYTES, dtype=torch.uint8)
        marks[ranks.rank] = bytes_to_tensor(mark.to_bytes(_NBYTES, "little"))
        works = spread_rows(ranks, list(enumerate(marks)), lanes, _TAG, label)
        return [_Beside(self, marks, works), *spread_rows(ranks, rows, lanes, mark, label)]

    def write(self, flat: Tensor, layout: Layout, rank: int, mark: int) -> Callable[[], None]:
        """Write this rank's mark into its header space; returns a function that takes out all marks."""
        rooms = layout.rooms
        octets, size = flat.view(torch.uint8), flat.element_size()
        places = [octets[room.start * size + MARK :][:MARK_NBYTES] for room in rooms]
        if not places:
            return nothing
        mine = mark % 2 ** (8 * MARK_NBYTES)
        for room, place in zip(rooms, places, strict=True):
            if room.owner == rank:
                copy_to(place, bytes_to_tensor(mine.to_bytes(MARK_NBYTES, "little")))
        owners = [room.owner for room in rooms]
        return lambda: self._came.append(({self._group.rank: mine}, owners, HostCopy(torch.cat(places))))

    def check(self) -> None:
        """Compare arrived marks, unless the CPU would wait; RankMismatchError if they differ."""
        self.check_known()
        while self._came and (self._came[0][-1].is_here or len(self._came) > _MOST_LATE):
            mine, owners, copy = self._came.popleft()
            octets = tensor_to_bytes(self._group.read(copy))
            self.compare(mine | dict(zip(owners, _marks_in(octets, MARK_NBYTES), strict=True)))

    def check_known(self) -> None:
        """Raise RankMismatchError if marks differed before."""
        if self._difference:
            raise RankMismatchError(self._difference)

    def compare(self, marks: Mapping[int, int]) -> None:
        """Raise RankMismatchError unless the marks of the group ranks are equal."""
        ranks_of: dict[int, list[int]] = {}
        for rank, mark in sorted(marks.items()):
            ranks_of.setdefault(mark, []).append(self._group.numbers[rank])
        if len(ranks_of) == 1:
            return
        self._came.clear()
        told = "; ".join(f"{ranks_text(ranks)}: {self._text(mark)}" for mark, ranks in ranks_of.items())
        self._difference = (
            f"ranks gather different parts of a fully sharded model: {told}. All ranks must call the same "
            "modules, in the same order and as often, in training and evaluation; so too unsharded(), "
            "state_dict() and load_state_dict()"
        )
        self.check_known()

    def _text(self, mark: int) -> str:
        number, purpose = divmod(mark, _PURPOSES)
        if number >= len(self._labels) or purpose not in list(Purpose):
            return "something else"
        return f"{self._labels[number]}, for {_TOLD[Purpose(purpose)]}"


def _marks_in(octets: bytes, nbytes: int) -> list[int]:
    return [int.from_bytes(octets[at : at + nbytes], "little") for at in range(0, len(octets), nbytes)]


@dataclass(frozen=True, slots=True, eq=False)
class _Beside:
    """Pending marks of all ranks, by rank; a wait compares them."""

    known: UnitMarks
    marks: Tensor
    works: Sequence[Waitable]

    def wait(self) -> None:
        """Wait; RankMismatchError if marks differ, or did before: then rows may never come."""
        self.known.check_known()
        for work in self.works:
            work.wait()
        self.known.compare(dict(enumerate(_marks_in(tensor_to_bytes(self.marks.flatten()), _NBYTES))))


@dataclass(frozen=True, slots=True, eq=False)
class Marked:
    """Sends stamps, if any, and the mark of a gather; see `Stamps.send`."""

    marks: UnitMarks
    mark: int
    stamps: UnitStamps | None

    def send(self, flat: Tensor, layout: Layout, rank: int) -> Callable[[], None]:
        """See `Stamps.send`."""
        take_stamps = nothing if self.stamps is None else self.stamps.send(flat, layout, rank)
        take_mark = self.marks.write(flat, layout, rank, self.mark)  # behind the stamp, which would cover it

        def take() -> None:
            take_stamps()
            take_mark()

        return take
