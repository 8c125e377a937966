"""Stamps and marks in the gathers of units: ranks of a fully sharded model fail together.

Note [Stamps of units]
    Such a step gathers nothing, so the gathers of later forward passes carry its stamp. All ranks make them
    in one order: what arrived since the pass began is equal on every rank, so all may raise and communicate;
    the failed rank raises again. Each forward pass tells of the last call, so a step too few or too many
    shows.

    The CPU reads a unit's stamps when it has arrived; on an accelerator the next forward pass reads them.
    Passes without gradients tell nothing there. Nor do backward passes: an error would leave reductions half
    done.

Note [Marks of units]
    Ranks gather units in the order of their module calls. If data decide a route, gathers of two units may
    meet, and each rank would compute with rows of both. So each gather has a mark: bucket number and purpose.
    A rank that reads another mark raises, then and in every later gather.

    Where sends go in pairs, each rank sends its mark to all others, four bytes beside the rows, and reads all
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
from zero_optim.compat.streams import is_asynchronous
from zero_optim.errors import RankMismatchError
from zero_optim.health.stamp import MARK, MARK_NBYTES, Arrival, Stamp, write_headers
from zero_optim.health.stamps import Origins, Stamps, nothing
from zero_optim.plan.layout import Layout, Span
from zero_optim.plan.option_values import Plain

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


class UnitStamps:
    """Writes and reads the stamps of one optimizer's last call in gathers of units.

    ``stamps_of`` returns the optimizer's stamps for its present plan; None in a group of one. ``told`` is
    called with what all ranks of the group are about to raise.
    """

    def __init__(
        self,
        stamps_of: Callable[[], Stamps | None],
        group: RankGroup,
        origins: Callable[[Sequence[Mapping[str, Plain]]], Origins],
        told: Callable[[Exception], None],
    ) -> None:
        self._stamps_of = stamps_of
        self._group = group
        self._origins = origins
        self._told = told
        self.num_passes = 0
        self._came: list[Arrival] = []
        self._seen: dict[int, Stamp] = {}  # in this pass, by rank; the last one of each

    def send(self, flat: Tensor, layout: Layout, rank: int) -> Callable[[], None]:
        """Write this rank's stamp, as `Stamps.send`; no wait."""
        rooms, stamps = layout.rooms, self._stamps_of()
        may_wait = torch.is_grad_enabled() or not is_asynchronous(flat.device)
        if not rooms or stamps is None or not may_wait:
            return nothing
        places = stamps.write(flat, rooms, rank)
        return lambda: self._came.append(Arrival(rooms, places))

    def write(self, span: Tensor, start: int, rooms: Sequence[Span], rank: int) -> None:
        """Write this rank's stamp into a flat tensor's part from ``start``, if its space is there."""
        stamps, stop = self._stamps_of(), start + span.numel()
        here = [room for room in rooms if room.owner == rank and start <= room.start < stop]
        if stamps is not None and here:
            moved = [room._replace(start=room.start - start, stop=room.stop - start) for room in here]
            stamps.write(span, moved, rank)

    def begin_pass(self) -> None:
        """Begin a pass: compare and forget the rest of the last one; raises as `look`."""
        self.num_passes += 1
        try:
            self._read()
        finally:
            self._seen.clear()

    def look(self) -> None:
        """Compare what arrived, unless the CPU would wait; all ranks call, with the same gathers.

        Communicates, and raises on every rank, once, if calls or options differ or a rank failed.
        """
        if all(arrival.is_here for arrival in self._came):
            self._read()

    def _read(self) -> None:
        came, self._came = self._came, []
        for arrival in came:
            for owner, octets in arrival.read(self._group.read):
                self._seen[owner] = Stamp.read(octets)._replace(mark=0)
        known, distinct = self._stamps_of(), set(self._seen.values())
        is_well = len(distinct) < 2 and not any(stamp.has_failed for stamp in distinct)
        if known is None or not came or is_well:
            return
        error = known.difference(self._group.during("agree"), self._seen, self._origins)
        if error is not None:
            self._told(error)
            raise error


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
        self._came: deque[tuple[int, Arrival]] = deque()  # this rank's mark, and those of the owners
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

    def sender(self, mark: int, stamps: UnitStamps | None) -> "_Sender":
        """Return what sends stamps, if any, and the mark of a gather; see `Stamps.send`."""
        return _Sender(self, mark, stamps)

    def write(self, flat: Tensor, layout: Layout, rank: int, mark: int) -> Callable[[], None]:
        """Write this rank's mark into its header space; returns a function that takes out all marks."""
        if not layout.rooms:
            return nothing
        mine = mark % 2 ** (8 * MARK_NBYTES)
        octets = bytes_to_tensor(mine.to_bytes(MARK_NBYTES, "little"))
        places = write_headers(flat, layout.rooms, rank, octets, MARK)
        return lambda: self._came.append((mine, Arrival(layout.rooms, places)))

    def check(self) -> None:
        """Compare arrived marks, unless the CPU would wait; RankMismatchError if they differ."""
        self.check_known()
        while self._came and (self._came[0][1].is_here or len(self._came) > _MOST_LATE):
            mine, arrival = self._came.popleft()
            told = {
                owner: int.from_bytes(octets, "little") for owner, octets in arrival.read(self._group.read)
            }
            self.compare({self._group.rank: mine} | told)

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
        marks = (int.from_bytes(tensor_to_bytes(mark), "little") for mark in self.marks)
        self.known.compare(dict(enumerate(marks)))


@dataclass(frozen=True, slots=True, eq=False)
class _Sender:
    marks: UnitMarks
    mark: int
    stamps: UnitStamps | None

    def send(self, flat: Tensor, layout: Layout, rank: int) -> Callable[[], None]:
        take_stamps = nothing if self.stamps is None else self.stamps.send(flat, layout, rank)
        take_mark = self.marks.write(flat, layout, rank, self.mark)  # behind the stamp, which would cover it

        def take() -> None:
            take_stamps()
            take_mark()

        return take
