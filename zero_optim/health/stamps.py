"""Stamps of one optimizer's calls, by which ranks fail together and name the cause.

All ranks read the stamps of all ranks and conclude the same, so they may communicate about it.

Note [One header a step]
    The ranks gather their stamps once a step, in a *header*, with the first gather of new rows: by then the
    rank has stepped all that it owns. A step during the backward pass gathers rows before later ones are
    stepped, so there the header goes when the pass ends, and again with what ``step()`` steps.

Note [When stamps are read]
    On the CPU when the step has waited for its gathers; otherwise after the next step's: an accelerator would
    make the CPU wait, and gathers that modules wait for end at different times.

Note [What may differ]
    If digests differ, ranks exchange all options. A difference is an error unless a class wrote the option in
    a step on some rank, or every rank has the class's default: some classes count in their groups. Sampled
    gradients may differ where a rank has none, or by rounding.

Note [What a count cannot tell]
    Ranks whose gathers meet have counted alike. The watchdog or the next forward pass shows a step left out.
    If a ``GradScaler`` skips one on some ranks alone, rows of two iterations meet, and the sampled gradients
    differ.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from operator import methodcaller
from typing import NamedTuple, TypeAlias

from zero_optim.comm.agreement import Failure, failure_of, hear_failure
from zero_optim.comm.collectives import RankGroup
from zero_optim.comm.frames import ranks_by_value, ranks_text, values_text
from zero_optim.compat.streams import HostCopy
from zero_optim.errors import RankMismatchError, RemoteRankError
from zero_optim.health.stamp import Arrival, Header, Read, Stamp, find_error
from zero_optim.plan.groups import ParamGroup
from zero_optim.plan.option_values import OptionKey, OptionValues, Plain, differing, held_by, text_of

_SHOWN = 4  # options in a message
Options: TypeAlias = Sequence[Mapping[str, Plain]]  # by group
Sampled: TypeAlias = dict[str, str | None]  # an element of a gradient, by the parameter's name
# Of the options of a call: those with the class's defaults, and those that it changed in a step here.
Origins: TypeAlias = Callable[[Options], tuple[Collection[OptionKey], Collection[OptionKey]]]


class Call(NamedTuple):
    """A call that changes and gathers parameters, such as ``step()``, and its exception on this rank."""

    name: str
    origins: Origins
    failure: BaseException | None = None
    report_to_replicas: Callable[[BaseException], None] | None = None  # of a mesh, an error of this one

    @property
    def failure_text(self) -> str:
        """The exception, and what raised it; empty without one."""
        if self.failure is None:
            return ""
        kind, message, _ = failure_of(self.failure)
        return f"{kind} in {self.name}: {message}"[:2000]  # characters: a watchdog tells it


@dataclass(slots=True, eq=False)
class _Step:
    """One call and the stamps that arrived. ``is_raised``: this rank has raised another's failure."""

    number: int
    name: str
    digest: bytes
    options: Options
    sampled: Sampled | None = None
    arrivals: list[Arrival] = field(default_factory=list)  # two of a step during the backward pass
    is_raised: bool = False
    failure: Failure | None = None
    _octets: bytes = b""

    def octets(self) -> bytes:
        if not self._octets:
            text = self.name if self.failure is None else self.failure[0]
            stamp = Stamp(0, self.failure is not None, self.number % 2**32, self.digest, text.encode())
            self._octets = stamp.packed()
        return self._octets

    def read_uniform(self, read: Read) -> bool:
        """Wait with ``read``; return whether nothing failed here, and all stamps are this rank's."""
        return self.failure is None and all(map(methodcaller("read_uniform", read), self.arrivals))

    def read_stamps(self, read: Read) -> dict[int, Stamp]:
        """Return each rank's last stamp, or one with a failure; ``read`` waits."""
        stamps: dict[int, Stamp] = {}
        for arrival in self.arrivals:
            for rank, stamp in arrival.read_stamps(read).items():
                if rank not in stamps or not stamps[rank].has_failed:
                    stamps[rank] = stamp
        return stamps

    def fail(self, failure: BaseException) -> None:
        if self.failure is None:
            more = f". Ranks on which nothing was raised may have taken their part of {self.name}"
            self.failure, self._octets = failure_of(failure, more), b""


class Stamps:
    """Writes and reads the stamps of one optimizer's calls, in a group of several ranks."""

    def __init__(self, own_options: Collection[str] = ()) -> None:
        self._own_options = frozenset(own_options)
        self._values = OptionValues()
        self._left_out: set[OptionKey] = set()  # the same on every rank
        self.samples = True  # whether gradients are compared; equal on every rank
        self._sampled: Sampled | None = None  # of the next call
        self._num_rounded = 0
        self._step = _Step(0, "construction", self._values.digest, ())  # the last call; it gathers nothing
        self._unread: list[_Step] = []  # calls that were not compared; the last one is `_step`
        self._reported: frozenset[Stamp] = frozenset()  # in the last comparison; the same on every rank

    def __reduce__(self) -> "tuple[type[Stamps], tuple[Collection[str]]]":
        return Stamps, (self._own_options,)

    def begin(self, groups: Sequence[ParamGroup], call: Call) -> Header:
        """Begin a call before its gathers, and return its `header`; all ranks call, with all groups."""
        left_out: Collection[OptionKey] = self._left_out
        if self._own_options:
            left_out = self._left_out | {
                (number, name)
                for number, group in enumerate(groups)
                for name in self._own_options.intersection(group)
            }
        self._values.follow(groups, left_out)
        number, values = self._step.number + 1, self._values
        digest, (sampled, self._sampled) = values.digest, (self._sampled, None)
        if sampled is not None:
            digest = blake2b(digest + repr(sampled).encode(), digest_size=len(digest)).digest()
        self._step = _Step(number, call.name, digest, values.by_group, sampled)
        if call.failure is not None:
            self._step.fail(call.failure)
        self._unread.append(self._step)
        return Header(self._step.octets(), self._step.arrivals.append)

    def send_sample(self, sampled: Sampled) -> None:
        """Compare elements of gradients in the next call."""
        self._sampled = sampled

    def fail(self, failure: BaseException) -> None:
        """Put a failure into the next header."""
        if self._step.number:
            self._step.fail(failure)

    def header(self) -> Header | None:
        """Return this rank's stamp of the call, for one gather behind its last step; None before a call."""
        step = self._step
        return Header(step.octets(), step.arrivals.append) if step.number else None

    @property
    def last(self) -> bytes:
        """This rank's stamp of the last call."""
        return self._step.octets()

    def raise_failures(self, group: RankGroup) -> None:
        """Raise RemoteRankError, once, if only other ranks failed in the last call, by stamps that came."""
        for step in self._unread:
            is_known = step.is_raised or step.failure is not None
            are_here = all(arrival.is_here for arrival in step.arrivals)
            if is_known or not are_here or step.read_uniform(HostCopy.read):
                continue
            error = find_error(step.read_stamps(HostCopy.read), group.numbers, step.name)
            if isinstance(error, RemoteRankError):
                step.is_raised = True
                raise error

    def compare(self, group: RankGroup, call: Call, *, with_last: bool) -> None:
        """Compare calls, ``with_last`` the one that all are in; all call, and raise but where that failed."""
        while len(self._unread) > (not with_last):
            step = self._unread.pop(0)
            if step.read_uniform(group.read):  # as nearly always
                continue
            stamps = step.read_stamps(group.read)
            asks = with_last and step is self._step and len({each.number for each in stamps.values()}) == 1
            error = self._find_error(group, step, stamps, step.name, call.origins, asks=asks)
            if error is not None:
                self._reported = frozenset(stamps.values())
                if call.failure is None and step.failure is None and not step.is_raised:
                    raise error
                break  # as on every rank

    def compare_last(self, group: RankGroup, call: Call, stamps: Mapping[int, Stamp]) -> None:
        """Compare stamps of last calls that differ; all ranks call with the same, and raise, once."""
        if not self._reported.issuperset(stamps.values()):
            self._reported = frozenset(stamps.values())
            error = self._find_error(group, self._step, stamps, "", call.origins)
            if error is not None and call.report_to_replicas is not None:
                call.report_to_replicas(error)
            if error is not None:
                raise error

    def _find_error(
        self,
        group: RankGroup,
        step: _Step,
        stamps: Mapping[int, Stamp],
        call: str,
        origins: Origins,
        *,
        asks: bool = True,
    ) -> Exception | None:
        """Return the error for every rank, as `find_error`; all call. ``asks``: for messages of failures."""
        error = find_error(stamps, group.numbers, call)
        if isinstance(error, RemoteRankError) and asks:
            return hear_failure(group, step.failure) or error
        has_failed = any(stamp.has_failed for stamp in stamps.values())
        if error is not None or has_failed or len({stamp.digest for stamp in stamps.values()}) < 2:
            return error
        return self._difference(group, step, origins)

    def _different_gradients(self, group: RankGroup, name: str, sampled: list[Sampled]) -> Exception | None:
        for param in sampled[0] if all(each.keys() == sampled[0].keys() for each in sampled) else ():
            elements = {rank: each[param] for rank, each in zip(group.numbers, sampled, strict=True)}
            known = {rank: text for rank, text in elements.items() if text is not None}
            if len(known) < len(elements):
                self.samples = self.samples and not known
                continue
            by_value = ranks_by_value(known)
            if len(by_value) == 1:
                continue
            self._num_rounded += 1
            self.samples = self.samples and self._num_rounded < 8  # such comparisons are enough
            values = list(map(complex, by_value))
            far = 0.01 * max(map(abs, values))  # what is nearer may be rounding
            if all(abs(value - values[0]) <= far for value in values):
                continue
            each = values_text(by_value)
            return RankMismatchError(
                f"ranks have different gradients in {name}: one element of the gradient of {param}: {each}. "
                "The step was taken, and each owner stepped with its own gradient. Let the backward pass "
                "before step() be reduced: call the wrapper, not the module in it, outside of no_sync(), "
                "with every parameter of the optimizer in the wrapper; without a wrapper average the "
                "gradients. If only owners shall have reduced gradients, set the others to None. A "
                "GradScaler skips a step for itself if it found an infinity on some ranks alone. Reduce "
                "gradients before it looks at them, as DDP does, or use "
                "torch.distributed.fsdp.sharded_grad_scaler.ShardedGradScaler, with the process group"
            )
        return None

    def _difference(self, group: RankGroup, step: _Step, origins: Origins) -> Exception | None:
        """Exchange options and sampled gradients; return the error for what must not differ."""
        by_default, by_class = origins(step.options)
        sampled = step.sampled
        mine = [step.options, sorted(by_class), sorted(by_default), sampled and [*sampled.items()]]
        everyone = group.all_gather_json(mine)
        options = [of_rank[0] for of_rank in everyone]
        changed = {tuple(key) for of_rank in everyone for key in of_rank[1]}
        default = set.intersection(*({tuple(key) for key in of_rank[2]} for of_rank in everyone))
        differ = [key for key in differing(options) if key[1] not in self._own_options]
        self._left_out.update(key for key in differ if key in changed or key in default)
        wrong = [key for key in differ if key not in self._left_out]
        if not wrong:
            sampled_by_all = [dict(of_rank[3] or ()) for of_rank in everyone]
            return self._different_gradients(group, step.name, sampled_by_all)

        def each(ranks: Sequence[int], value: str) -> str:
            numbers = [group.numbers[rank] for rank in ranks]
            return f"{ranks_text(numbers)} {'have' if len(ranks) > 1 else 'has'} {value}"

        names = tuple(dict.fromkeys(name for _, name in wrong))
        return RankMismatchError(
            f"ranks have different options in {step.name}: {shortened(options_text(options, wrong, each))}. "
            "The step was taken, and each owner stepped with its own. Give every rank the same: run "
            "schedulers on all ranks alike, and load the same state on all. If they are meant to differ, "
            f"build it with own_options={names!r}"
        )


def options_text(
    options: Sequence[Options],
    keys: Sequence[OptionKey],
    each: Callable[[Sequence[int], str], str],
    separator: str = "; ",
) -> list[str]:
    """Describe each option by the values that some ranks have; ``options``: by rank."""
    return [
        f"{name} of group {number}: "
        + separator.join(each(ranks, text_of(value)) for value, ranks in held_by(options, (number, name)))
        for number, name in keys
    ]


def shortened(differences: Sequence[str]) -> str:
    """Format the first differences, and how many more there are."""
    more = f", and {len(differences) - _SHOWN} more" if len(differences) > _SHOWN else ""
    return "; ".join(differences[:_SHOWN]) + more
