"""Stamps in the gathers of units: ranks of a fully sharded model fail together.

Note [Stamps of units]
    Such a step gathers nothing, so gathers of units have a header: each rank's stamp of the last call. All
    ranks see equal stamps, so all may raise and communicate. In a forward pass the CPU reads them when its
    first unit has arrived; on an accelerator the next forward pass does, but those of passes without
    gradients nobody. Those of backward passes tell nothing: reductions would be left half done.

Note [Marks of units]
    If data decide a route, gathers of two units may meet, and each rank would compute with rows of both. So
    each stamp has a mark, of bucket and purpose, and a rank that reads another mark raises, then and in every
    later gather. gloo ends the process if rows that meet differ in length. So there the header goes in front
    of the rows, whose tag is the mark: in one message through memory; through sockets in one of its own, as a
    receive must be told the length before. That took 60 to 90 us a gather of two ranks.
"""

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from enum import Enum
from functools import partial

import torch
from torch import Tensor

from zero_optim.comm.collectives import RankGroup
from zero_optim.comm.frames import bytes_to_tensor, ranks_text
from zero_optim.compat.streams import copy_to, current_stream, is_asynchronous, is_capturing
from zero_optim.errors import RankMismatchError
from zero_optim.health.stamp import Arrival, Header, Stamp, marked, parted
from zero_optim.health.stamps import Call, Stamps

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


_PURPOSES = tuple(Purpose)


class UnitStamps:
    """Sends and reads the stamps of a model's units; ``labels``: by first parameter of each bucket."""

    def __init__(
        self,
        labels: Mapping[Tensor, str],
        group: RankGroup,
        stamps: Stamps,
        call: Callable[[str], Call | None],  # describes one for comparisons; None if the optimizer is gone
    ) -> None:
        self._labels = list(labels.values())
        self._numbers = {param: number for number, param in enumerate(labels)}
        self._group, self._stamps, self._call = group, stamps, call
        self._begins = True  # the next gather of a pass is its first
        self._told: Arrival | None = None  # the first of a pass, whose calls were not compared
        self._marked: deque[Arrival] = deque()  # whose marks were not compared
        self._difference = ""
        self._marks = [marked(b"", mark) for mark in range(1 + len(self._labels) * len(_PURPOSES))]
        self._written: tuple[object, Tensor] | None = None  # of what call and device, a stamp for each mark

    def begin(self, first: Tensor, purpose: Purpose, *, tells: bool) -> tuple[int, Header]:
        """Return a gather's mark and header; ``tells``: it is of a pass whose first gather has the calls."""
        if self._difference:
            raise RankMismatchError(self._difference)
        mark = 1 + self._numbers[first] * len(_PURPOSES) + _PURPOSES.index(purpose)
        is_first = tells and self._begins
        self._begins &= not is_first
        tells = is_first and (torch.is_grad_enabled() or not is_asynchronous(first.device))
        return mark, Header(marked(self._stamps.last, mark), partial(self._take, tells))

    def row(self, mark: int, device: torch.device) -> Tensor | None:
        """Return a gather's stamp on a device, to which one copy brings those of all gathers after a call."""
        if is_capturing(device):  # later gathers would read what only the graph writes
            return None
        last, about = self._stamps.last, (device, current_stream(device))
        if self._written is None or self._written[0] != (last, *about):
            stamp = last[len(self._marks[0]) :]
            octets = bytes_to_tensor(stamp.join(self._marks) + stamp)
            table = torch.empty(len(self._marks), len(last), dtype=torch.uint8, device=device)
            copy_to(table, octets.view_as(table))
            self._written = (last, *about), table
        return self._written[1][mark]

    def _take(self, tells: bool, arrival: Arrival) -> None:
        self._marked.append(arrival)
        if arrival.is_here:
            self.check()
        if tells:
            self._told = arrival

    def check(self) -> None:
        """Compare marks, unless the CPU would wait; RankMismatchError if ranks gather different units."""
        # An accelerator may not have ended the last eight gathers.
        while self._marked and (self._marked[0].is_here or len(self._marked) > 8):
            arrival = self._marked.popleft()
            if arrival.read_uniform(self._group.read):
                continue
            numbers, stamps = self._group.numbers, arrival.read_stamps(self._group.read)
            parts = parted({numbers[rank]: stamp for rank, stamp in stamps.items()}, "mark")
            if parts:
                self._marked.clear()
                self._difference = _DIFFERENT.format("; ".join(self._gather_text(*part) for part in parts))
                raise RankMismatchError(self._difference)

    def _gather_text(self, ranks: Sequence[int], stamp: Stamp) -> str:
        number, purpose = divmod(stamp.mark - 1, len(_PURPOSES))
        is_known = 0 <= number < len(self._labels)
        gather = f"{self._labels[number]}, for {_PURPOSES[purpose].value}" if is_known else "something else"
        return f"{ranks_text(ranks)}: {gather}"

    def begin_pass(self) -> None:
        """Begin a pass: compare the calls of the last one, unless that is done; raises as `look`."""
        try:
            self._compare()
        finally:
            self._begins = True

    def look(self) -> None:
        """Compare calls, unless the CPU would wait; all call; raises as `Stamps.compare_last`."""
        if self._told is not None and self._told.is_here:
            self._compare()

    def _compare(self) -> None:
        arrival, self._told = self._told, None
        if arrival is None or arrival.read_uniform(self._group.read):
            return
        stamps = arrival.read_stamps(self._group.read)
        last = {rank: stamp._replace(mark=0) for rank, stamp in stamps.items()}
        if len(set(last.values())) > 1:
            call = self._call("") or Call("", lambda _: ((), ()))
            self._stamps.compare_last(self._group.during("agree"), call, last)
