"""Stamps in a step's gathers, by which ranks fail together and name the cause.

Each owner writes a stamp into the header space of its row. All ranks read all stamps and conclude the same,
so they may communicate about it. If all agree, a step has no further collective.

Note [When stamps are read]
    On the CPU at the end of the step, if it waits for its gathers; a failure needs no exchange and is raised
    as soon as they are over. Otherwise after the next step's gathers: an accelerator would make the CPU wait,
    and gathers that modules wait for end at different times on different ranks. `step()` or the next backward
    pass reads the stamps of a step in the backward pass.

Note [What may differ]
    If digests differ, ranks exchange all options and who wrote them. An option that differs is an error
    unless a class wrote it in a step on some rank, or every rank has the class's default: some classes count
    in their groups. It leaves the digest, so a right run pays one exchange at most.

Note [What a count cannot tell]
    Ranks whose gathers meet have counted alike. A step left out shows when the next collective meets another,
    by the watchdog, or in the next forward pass: Note [Stamps of units] in `unit_stamps`. Counts of backward
    passes may differ in right runs. But a ``GradScaler`` calls the optimizer at each step, even one it leaves
    out, so these calls are counted: otherwise rows of two iterations would meet.
"""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from torch import Tensor

from zero_optim.comm.agreement import Failure, failure_of, failure_of_others
from zero_optim.comm.collectives import RankGroup, bytes_to_tensor
from zero_optim.comm.frames import ranks_text
from zero_optim.compat.streams import HostCopy
from zero_optim.errors import RankMismatchError
from zero_optim.health.stamp import (
    Arrival,
    Stamp,
    different_calls,
    different_numbers,
    failed_ranks,
    failure_elsewhere,
    write_headers,
)
from zero_optim.plan.groups import ParamGroup
from zero_optim.plan.layout import Layout, Span
from zero_optim.plan.option_values import OptionKey, OptionValues, Plain, differing, held_by, text_of

_SHOWN = 4  # options in a message


class Origins(NamedTuple):
    """Options that have the class's defaults, and options that it changed in a step, on this rank."""

    made: Collection[OptionKey]
    written: Collection[OptionKey]


class Call(NamedTuple):
    """A call that changes and gathers parameters, such as ``step()``, and its exception on this rank.

    ``origins`` returns who wrote the options; called only if ranks differ.
    """

    name: str
    origins: Callable[[Sequence[Mapping[str, Plain]]], Origins]
    failure: BaseException | None = None


@dataclass(slots=True, eq=False)
class _Step:
    """One call and the stamps that arrived. Keeps no exception and no optimizer.

    ``came``: the stamps of each gather. ``is_told``: this rank has raised or will, after
    another's failure. ``failure``: class and message of this rank's exception.
    """

    number: int
    name: str
    digest: bytes
    options: Sequence[Mapping[str, Plain]]
    came: list[Arrival] = field(default_factory=list)
    is_told: bool = False
    failure: Failure | None = None
    _packed: bytes = b""
    _mine: Tensor | None = None

    def stamp(self) -> Tensor:
        if self._mine is None:
            failed = None if self.failure is None else self.failure[0]
            self._packed = Stamp.of(self.number, self.digest, self.name, failed).packed()
            self._mine = bytes_to_tensor(self._packed)
        return self._mine

    def are_alike(self, read: Callable[[HostCopy], Tensor]) -> bool:
        """Whether this rank went on well, and all that arrived is its own stamp."""
        mine = self._packed
        return self.failure is None and all(
            octets == mine for arrival in self.came for _, octets in arrival.read(read)
        )

    def fail(self, failure: BaseException) -> None:
        if self.failure is None:
            more = f". Ranks on which nothing was raised may have taken their part of {self.name}"
            self.failure, self._mine = failure_of(failure, more), None

    def stamps(self, read: Callable[[HostCopy], Tensor] = HostCopy.read) -> dict[int, Stamp]:
        """Return each rank's last stamp, or one that tells of a failure."""
        stamps: dict[int, Stamp] = {}
        for arrival in self.came:
            for owner, octets in arrival.read(read):
                if owner not in stamps or not stamps[owner].has_failed:
                    stamps[owner] = Stamp.read(octets)
        return stamps


class Stamps:
    """Writes and reads the stamps of one optimizer's steps, in a group of several ranks.

    ``tell``: called with what `check_failures` will raise. ``numbers``: see `RankGroup.numbers`; empty for
    group ranks. ``asked``: calls of a scaler since the last step, see Note [What a count cannot tell].
    """

    def __init__(self, own_options: Collection[str] = ()) -> None:
        self._own_options = frozenset(own_options)
        self._values = OptionValues()
        self._left_out: set[OptionKey] = set()  # the same on every rank
        self.asked = 0
        self._step = _Step(0, "construction", self._values.digest, ())  # the last call; it gathers nothing
        self._unread: list[_Step] = []  # calls that were not looked at; the last one is `_step`
        self._told: frozenset[Stamp] = frozenset()  # by an error, the last ones; the same on every rank
        self.tell: Callable[[BaseException], None] = _tell_nobody
        self.numbers: Sequence[int] = ()

    def __reduce__(self) -> "tuple[type[Stamps], tuple[Collection[str]]]":
        return Stamps, (self._own_options,)

    # ------------------------------------------------------------------ before and in the gathers

    def begin(self, groups: Sequence[ParamGroup], call: Call) -> None:
        """Begin a call before its gathers; all ranks call, with all public groups."""
        own = {
            (number, name)
            for number, group in enumerate(groups if self._own_options else ())
            for name in self._own_options.intersection(group)
        }
        self._values.follow(groups, self._left_out | own if own else self._left_out)
        number = self._step.number + 1 + self.asked
        self.asked = 0
        self._step = _Step(number, call.name, self._values.digest, self._values.by_group)
        if call.failure is not None:
            self._step.fail(call.failure)
        self._unread.append(self._step)

    def fail(self, failure: BaseException) -> None:
        """Put a failure into the gathers to come."""
        if self._step.number:
            self._step.fail(failure)

    def send(self, flat: Tensor, layout: Layout, rank: int) -> Callable[[], None]:
        """Write this rank's stamp into its row of a flat tensor, if there is space; no wait.

        Returns a function that takes all stamps out of ``flat``, to be called after the gather.
        """
        step, rooms = self._step, layout.rooms
        if not step.number or not rooms:
            return nothing
        places = self.write(flat, rooms, rank)
        return lambda: step.came.append(Arrival(rooms, places))

    def write(self, flat: Tensor, rooms: Sequence[Span], rank: int) -> list[Tensor]:
        """Write this rank's last stamp into its header space; returns all header spaces as bytes."""
        return write_headers(flat, rooms, rank, self._step.stamp())

    # ------------------------------------------------------------------ when they have come

    def check_failures(self) -> None:
        """Raise RemoteRankError if only other ranks failed in the last call, and their stamps are here."""
        for step in self._unread:
            if not step.is_told and step.failure is None and all(arrival.is_here for arrival in step.came):
                stamps = step.stamps()
                if failed_ranks(stamps):
                    step.is_told = True
                    error = failure_elsewhere(step.name, self._numbered(stamps))
                    self.tell(error)
                    raise error

    def compare(self, group: RankGroup, call: Call, *, with_last: bool) -> None:
        """Compare the calls not compared yet; all ranks call, at the same point of their programs.

        Communicates, and raises on every rank, if ranks are in different calls, have different options, or
        failed; raises nothing if ``call`` failed here. ``with_last``: the last call too, whose gathers are
        over with all ranks still in it.
        """
        error: Exception | None = None
        while len(self._unread) > (not with_last):
            step = self._unread.pop(0)
            if step.are_alike(group.read):  # as nearly always
                continue
            stamps = step.stamps(group.read)
            has_failed = bool(failed_ranks(stamps))
            if has_failed:
                if step is self._step and with_last and len({stamp.number for stamp in stamps.values()}) == 1:
                    told = failure_of_others(group, step.failure)
                    error = None if step.is_told else told
                elif step.failure is None and not step.is_told:
                    error = failure_elsewhere(step.name, self._numbered(stamps))
                step.is_told = True
            else:
                error = different_calls(self._numbered(stamps))
                if error is None and len({stamp.digest for stamp in stamps.values()}) > 1:
                    error = self._compared(group, step, call.origins(step.options))
            if has_failed or error is not None:
                self._told = frozenset(stamps.values())
                break  # as on every rank
        if error is not None and call.failure is None:
            raise error

    def difference(
        self,
        group: RankGroup,
        stamps: Mapping[int, Stamp],
        origins: Callable[[Sequence[Mapping[str, Plain]]], Origins],
    ) -> Exception | None:
        """Return the error for every rank, or None; all ranks call, with the same stamps.

        Communicates if the ranks' last calls differ. Reports nothing twice.
        """
        step, new = self._step, frozenset(stamps.values())
        failed = failed_ranks(stamps)
        if new <= self._told or len(failed) == len(stamps):  # what each rank has raised need not be told
            return None
        self._told = new
        if failed:
            told = failure_of_others(group, step.failure)
            return failure_elsewhere(step.name, self._numbered(stamps)) if told is None else told
        differ = different_numbers(self._numbered(stamps))
        return self._compared(group, step, origins(step.options)) if differ is None else differ

    def _numbered(self, stamps: Mapping[int, Stamp]) -> dict[int, Stamp]:
        return dict(zip(_called(stamps, self.numbers), stamps.values(), strict=True))

    def _compared(self, group: RankGroup, step: _Step, mine: Origins) -> Exception | None:
        """Exchange the options of a call; return an error for those that must not differ."""
        everyone = group.all_gather_json([step.options, sorted(mine.written), sorted(mine.made)])
        options = [of_rank[0] for of_rank in everyone]
        written = {tuple(key) for of_rank in everyone for key in of_rank[1]}
        made = set.intersection(*({tuple(key) for key in of_rank[2]} for of_rank in everyone))
        differ = [key for key in differing(options) if key[1] not in self._own_options]
        self._left_out.update(key for key in differ if key in written or key in made)
        wrong = [key for key in differ if key not in self._left_out]
        if not wrong:
            return None
        shown = shortened([_difference(options, key, self.numbers) for key in wrong])
        names = tuple(dict.fromkeys(name for _, name in wrong))
        return RankMismatchError(
            f"ranks have different options in {step.name}: {shown}. The step was taken, and each "
            "owner stepped with its own. Give every rank the same: run schedulers on all ranks alike, and "
            f"load the same state on all. If they are meant to differ, build it with own_options={names!r}"
        )


def shortened(differences: Sequence[str]) -> str:
    """Format the first differences, and how many more there are."""
    more = f", and {len(differences) - _SHOWN} more" if len(differences) > _SHOWN else ""
    return "; ".join(differences[:_SHOWN]) + more


def _difference(
    options: Sequence[Sequence[Mapping[str, Plain]]], key: OptionKey, numbers: Sequence[int]
) -> str:
    held = [(value, _called(ranks, numbers)) for value, ranks in held_by(options, key)]
    told = "; ".join(
        f"{ranks_text(ranks)} {'have' if len(ranks) > 1 else 'has'} {text_of(value)}" for value, ranks in held
    )
    return f"{key[1]} of group {key[0]}: {told}"


def _called(ranks: Iterable[int], numbers: Sequence[int]) -> list[int]:
    return [numbers[rank] if numbers else rank for rank in ranks]


def _tell_nobody(_: BaseException) -> None:
    """Do nothing: there are no replicas."""


def nothing() -> None:
    """Do nothing: there are no stamps."""
