"""Stamps and marks in the gathers of units: ranks of a fully sharded model fail together.

Note [Stamps of units]
    Such a step gathers nothing, so the gathers of later forward passes carry the stamp of the last call. All
    ranks see equal stamps, so all may raise and communicate. The CPU reads a unit's stamps when it has
    arrived; on an accelerator the next forward pass reads them, and passes without gradients tell nothing.
    Backward passes tell nothing: reductions would be left half done.

Note [Marks of units]
    Ranks gather units in the order of their module calls. If data decide a route, gathers of two units may
    meet, and each rank would compute with rows of both. So each gather has a mark, bucket number and purpose,
    and a rank that reads another mark raises, then and in every later gather. Where sends go in pairs, ranks
    exchange marks before rows, and the mark is the rows' tag: gloo ends the process if rows that meet differ
    in length. That took 60 to 90 us a gather of two ranks. Elsewhere the stamp in each row has the mark.
"""

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from enum import Enum

import torch
from torch import Tensor

from zero_optim.comm.collectives import RankGroup
from zero_optim.comm.frames import bytes_to_tensor, ranks_text
from zero_optim.comm.pending import Pending
from zero_optim.comm.sending import spread_rows
from zero_optim.comm.traffic import Waitable
from zero_optim.compat.streams import HostCopy, is_asynchronous
from zero_optim.errors import RankMismatchError
from zero_optim.health.stamp import (
    HEAD_NBYTES,
    STAMP_NBYTES,
    Arrival,
    Header,
    Kind,
    Read,
    Stamp,
    marked,
    send_stamp,
    stamps_in,
    verdict,
)
from zero_optim.health.stamps import Call, Stamps

_MOST = 8  # more than there are purposes; a mark is so many times the number of the bucket, and the purpose
_TAG = _MOST - 1  # of marks: no mark, as it is no purpose
_MOST_LATE = 8  # marks of gathers that an accelerator may not have ended
_DIFFERENT = (
    "ranks gather different parts of a fully sharded model: {}. All ranks must call the same modules, in the "
    "same order and as often, in training and evaluation; so too unsharded(), state_dict() and "
    "load_state_dict()"
)


class Purpose(Enum):
    """The purpose of a unit's gather."""

    TRAINING = "a forward pass in training"
    EVALUATION = "a forward pass without gradients"
    BACKWARD = "a backward pass"
    REQUEST = "unsharded() or a state dict"
    AS_KEPT = "a state dict of what owners keep"


_NUMBERS = {purpose: number for number, purpose in enumerate(Purpose, 1)}
_PURPOSES = {number: purpose for purpose, number in _NUMBERS.items()}


class UnitStamps:
    """Sends the stamp of an optimizer's last call in gathers of units; ``call``: for comparisons."""

    def __init__(self, stamps: Stamps, group: RankGroup, call: Callable[[], Call]) -> None:
        self._stamps = stamps
        self._group = group
        self._call = call
        self.arrivals: list[Arrival] = []  # that were not read
        self._last: dict[int, Stamp] = {}  # of each rank in this pass, without marks

    def own(self, device: torch.device) -> bytes | None:
        """Return this rank's stamp; None where nobody reads it."""
        may_wait = torch.is_grad_enabled() or not is_asynchronous(device)
        return self._stamps.last if may_wait else None

    def send(self, headers: Sequence[Header], rank: int) -> Callable[[], None] | None:
        """Send this rank's stamp with a gather, as `send_stamp`."""
        own = self.own(headers[0][1].device) if headers else None
        return None if own is None else send_stamp(headers, rank, own, self.arrivals.append)

    def begin_pass(self) -> None:
        """Begin a pass: compare and forget the rest of the last one; raises as `look`."""
        try:
            self._compare()
        finally:
            self._last.clear()

    def look(self) -> None:
        """Compare what arrived, unless the CPU would wait; all call; raises as `Stamps.compare_last`."""
        if all(arrival.is_here for arrival in self.arrivals):
            self._compare()

    def _compare(self) -> None:
        for rank, stamp in stamps_in(self.arrivals, self._group.read).items():
            self._last[rank] = stamp._replace(mark=0)
        self.arrivals.clear()
        if len(set(self._last.values())) > 1:
            self._stamps.compare_last(self._group.during("agree"), self._call(), self._last)


class UnitMarks:
    """Sends and compares the marks of a model's units; ``labels``: their names, by first parameter."""

    def __init__(self, labels: Mapping[Tensor, str], group: RankGroup) -> None:
        self._labels = list(labels.values())
        self._numbers = {param: number for number, param in enumerate(labels)}
        self._group = group
        self._arrivals: deque[Arrival] = deque()
        self._difference = ""

    def mark_of(self, first: Tensor, purpose: Purpose) -> int:
        """Return the mark of a gather of the bucket with this first parameter."""
        return self._numbers[first] * _MOST + _NUMBERS[purpose]

    def start_rows(
        self, mark: int, lanes: Sequence[RankGroup], rows: Sequence[tuple[int, Tensor]], label: str
    ) -> list[Waitable]:
        """As `start_broadcasts`, with marks beside."""
        self._check_known()
        ranks = lanes[0]
        heads = torch.zeros(ranks.size, HEAD_NBYTES, dtype=torch.uint8, device="cpu")
        head = marked(bytes(HEAD_NBYTES), mark)
        heads[ranks.rank] = bytes_to_tensor(head)
        works = spread_rows(ranks, list(enumerate(heads)), lanes, _TAG, label)
        beside = Pending(
            works, lambda _: self._compare(Arrival(range(ranks.size), heads, head), HostCopy.read)
        )
        return [beside, *spread_rows(ranks, rows, lanes, mark, label)]

    def send(
        self, mark: int, stamps: UnitStamps | None, headers: Sequence[Header], rank: int
    ) -> Callable[[], None] | None:
        """Send the mark with a gather, in the stamp if there is one; as `send_stamp`."""
        own = None if stamps is None or not headers else stamps.own(headers[0][1].device)

        def take(arrival: Arrival) -> None:
            if stamps is not None and own is not None:
                stamps.arrivals.append(arrival)
            self._arrivals.append(arrival)

        return send_stamp(headers, rank, marked(own or bytes(STAMP_NBYTES), mark), take)

    def check(self) -> None:
        """Compare arrived marks, unless the CPU would wait; RankMismatchError if they differ."""
        self._check_known()
        while self._arrivals and (self._arrivals[0].is_here or len(self._arrivals) > _MOST_LATE):
            self._compare(self._arrivals.popleft(), self._group.read)

    def _check_known(self) -> None:
        if self._difference:
            raise RankMismatchError(self._difference)

    def _compare(self, arrival: Arrival, read: Read) -> None:
        """Raise RankMismatchError unless all ranks have this rank's mark."""
        if arrival.is_uniform(read):
            return
        stamps = dict(arrival.stamps(read)) | {self._group.rank: Stamp.read(arrival.mine)}
        error = verdict(Kind(("mark",), self._gather_text, _DIFFERENT), stamps, self._group.numbers)
        if error is not None:
            self._arrivals.clear()
            self._difference = str(error)
            raise error

    def _gather_text(self, ranks: Sequence[int], stamp: Stamp) -> str:
        number, purpose = divmod(stamp.mark, _MOST)
        is_known = number < len(self._labels) and purpose in _PURPOSES
        gather = f"{self._labels[number]}, for {_PURPOSES[purpose].value}" if is_known else "something else"
        return f"{ranks_text(ranks)}: {gather}"
