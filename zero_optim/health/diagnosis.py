"""Finds what hangs, and which ranks cause it, from each rank's status. No communication."""

import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from zero_optim.comm.backends import late_or_closed
from zero_optim.comm.frames import differences, ranks_by_value, ranks_text
from zero_optim.comm.work_log import OVERLAPPED_STEP, Verdict, WorkLog
from zero_optim.comm.works import Work
from zero_optim.health.peers import ANSWER_LIMIT, Presence
from zero_optim.health.tree import Message, from_runs, to_runs
from zero_optim.host.shared_memory import GAVE_UP

_ADVICE = (
    "The process group cannot be used any more: end the processes, or destroy all groups and begin again"
)
_LONGEST_END = 10.0  # seconds that a process may take to end on a busy host, once it has been killed
# What a rank may be whose process runs. It is asked again for a while.
_MUTE = (Presence.SILENT, Presence.UNCONNECTED, Presence.CUT_OFF, Presence.UNKNOWN)
_GOES_ON = 5.0  # seconds in which a rank that has caught what its step raised may begin another pass


@dataclass(frozen=True, slots=True)
class Status:
    """What a process says of itself; as JSON, tuples are lists."""

    waits: Sequence[str]  # longest first
    open: Sequence[tuple[str, int]]  # names and counts of its calls, outermost first
    counts: Mapping[str, int]
    last: str = ""  # begin or end of a call
    verdict: Sequence[Any] | None = None  # see `verdict_to_json`
    stuck: float = 0.0  # seconds of the longest wait for the ranks that ask
    ago: float = 0.0  # seconds since `last`
    failure: str = ""  # of the last step of the ranks that ask, if no gather tells it

    @classmethod
    def of(cls, ranks: tuple[int, ...], waits: Iterable[Work], log: WorkLog) -> "Status":
        """Build it from what this process does, for a group of global ``ranks`` that asks."""
        now, activity = time.monotonic(), log.activity
        listed = sorted(waits, key=lambda work: work.waiting_since or now)
        stuck = [now - (work.waiting_since or now) for work in listed if work.group.whole == ranks]
        last = activity.last
        return cls(
            tuple(work.text for work in listed),
            tuple((mark.name, mark.count) for mark in list(activity.open.values())),
            dict(activity.counts),
            "" if last is None else f"{last.name} {last.count} {'ended' if last.is_over else 'began'}",
            verdict_to_json(log.verdicts.get(ranks)),
            max(stuck, default=0.0),
            0.0 if last is None else now - last.time,
            log.failures.get(ranks, ""),
        )


def verdict_to_json(verdict: Verdict | None) -> Sequence[Any] | None:
    """Return message and runs of missing ranks."""
    return None if verdict is None else (verdict.message, to_runs(verdict.missing))


Reports = Mapping[int, Status | Presence]  # by group rank
_GONE = (Presence.ENDED, Presence.NEVER)
_UNASKED = (Presence.UNCONNECTED, Presence.UNKNOWN)
_NAMED = 16  # missing ranks, each of which is described by itself
_LONGEST = 2000  # characters of a verdict


class Complaint(NamedTuple):
    """Why a rank complains of a wait. As JSON, a list."""

    # "slow", and all may be well; "odd", and it ends if all ranks wait for each other; "late", and it ends;
    # "broken", and it ends if ranks have.
    kind: str
    place: int  # of the rank
    status: Message
    part: Sequence[Any]  # of a mesh, runs of the ranks that it waits for
    seconds: float | None  # None if it failed early
    long: float  # that counts as a long wait for the ranks that ask
    timeout: float  # its limit
    error: str


def ended_ranks(reports: Reports) -> list[int]:
    """Return ranks whose processes have ended, or that released the group."""
    return [rank for rank, what in reports.items() if what in _GONE]


def wait_for_each_other(reports: Reports, seconds: float) -> bool:
    """Return whether every rank has waited so long for the others, and for another thing: no wait can end."""
    stuck = [
        what.waits[0]
        for what in reports.values()
        if isinstance(what, Status) and what.stuck >= seconds and not _steps_beside(what)
    ]
    return len(stuck) == len(reports) and len(set(stuck)) > 1


def are_parted(mine: Status, theirs: Status) -> bool:
    """Return whether another rank will wait in vain, as a step raised here; False while that is not sure."""
    is_ahead = any(mine.counts.get(name, 0) < count for name, count in theirs.open[:1])
    return bool(mine.failure) > bool(theirs.failure) and is_ahead and theirs.stuck >= _GOES_ON


def judge(reports: Reports, own: int, seconds: float | None, broken: str = "") -> Verdict:
    """Describe missing ranks and waits. ``seconds``: None if it failed early, as ``broken`` by no rank."""
    mine = reports[own]
    assert isinstance(mine, Status)  # it can always be asked
    call = mine.open[0] if mine.open else None
    ended = ended_ranks(reports)  # if there are some, nobody else is to blame
    failed = {rank: what.failure for rank, what in sorted(reports.items()) if isinstance(what, Status)}
    texts = [f"rank {rank} failed with {failure}" for rank, failure in failed.items() if failure]
    if broken:
        texts.insert(0, f"a connection of rank {own} broke ({broken})")
    waits: dict[int, str] = {}
    missing: dict[int, Status | Presence] = {}
    for rank, what in sorted(reports.items()):
        if isinstance(what, Status) and what.waits and not _steps_beside(what):
            waits[rank] = what.waits[0]
        elif not ended or what in _GONE:
            missing[rank] = what
    if any(isinstance(what, Presence) and what not in _UNASKED for what in missing.values()):
        missing = {rank: what for rank, what in missing.items() if what not in _UNASKED}
    texts += _described(missing, call)
    waiting = ranks_by_value(waits)
    if not missing:
        texts.append(f"every rank waits, {'but not' if len(waiting) > 1 else 'all'} for the same")
        texts += _irregular(reports) if len(waiting) > 1 else []
    for work, ranks in waiting.items():
        texts.append(f"{ranks_text(ranks)} wait{'s' * (len(ranks) == 1)} in {work}")
    if not ended and (len(waiting) > 1 or not missing):
        counts = {rank: what.counts for rank, what in reports.items() if isinstance(what, Status)}
        texts += differences(counts)
    why = "stalled" if seconds is None else f"stalled for {seconds:.3g} s"
    text = f"{why}: {'; '.join(texts)}"
    if len(text) > _LONGEST - len(_ADVICE):
        text = f"{text[: _LONGEST - len(_ADVICE)]}…"
    return Verdict(f"{text}. {_ADVICE}", tuple(missing))


def verdict_of(
    ranks: tuple[int, ...], reports: Reports, complaint: Complaint, seconds: float
) -> Verdict | None:
    """Return the verdict if one is due, ``seconds`` after the rank complained."""
    kind = complaint.kind
    if kind == "late" or (kind == "odd" and wait_for_each_other(reports, complaint.long)):
        return judge_part(ranks, reports, complaint)
    if kind != "broken":
        return None
    is_late, is_closed = late_or_closed(complaint.error)
    mute = {what for what in reports.values() if what in _MUTE}
    takes_long = mute or GAVE_UP in complaint.error  # by a rank that has the reason, and tells
    is_broken = is_closed and seconds > (_LONGEST_END if takes_long else ANSWER_LIMIT)
    if is_broken and not ended_ranks(reports):  # a connection was closed, by a rank that is absent
        reports = {at: Presence.NEVER if what is Presence.ABSENT else what for at, what in reports.items()}
    is_known = is_late or ended_ranks(reports) or not mute.issubset({Presence.UNKNOWN})
    if not (is_late or ended_ranks(reports) or is_broken):
        return None
    return judge_part(ranks, reports, complaint, "" if is_known else complaint.error.partition(". ")[0])


def judge_part(ranks: tuple[int, ...], reports: Reports, complaint: Complaint, broken: str = "") -> Verdict:
    """Find missing ranks of the group that the rank waits for, then of its mesh."""
    group = {*from_runs(complaint.part)}
    part = {place: what for place, what in reports.items() if ranks[place] in group}
    if len(part) < len(reports) and not ended_ranks(reports):
        verdict = judge(part, complaint.place, complaint.seconds, broken)
        if verdict.missing:
            return verdict
    return judge(reports, complaint.place, complaint.seconds, broken)


def _described(missing: Reports, call: tuple[str, int] | None) -> list[str]:
    """Describe missing ranks, if there are many those of which the same is known together."""
    is_short = len(missing) <= _NAMED
    texts = {
        rank: what.value if isinstance(what, Presence) else _doing(what, call, with_last=is_short)
        for rank, what in missing.items()
    }
    if is_short:
        return [f"rank {rank} {text}" for rank, text in texts.items()]
    return [f"each of {ranks_text(ranks)} {text}" for text, ranks in ranks_by_value(texts).items()]


def _irregular(reports: Reports) -> list[str]:
    """Describe ranks that left out a step or made an extra one, if others step once in each pass."""
    texts, regular = [], 0
    for rank, what in sorted(reports.items()):
        if not isinstance(what, Status):
            continue
        passes, steps = what.counts.get("backward pass", 0), what.counts.get("step()", 0)
        is_inside = any(name == "backward pass" for name, _ in what.open)
        if steps == passes - is_inside:
            regular += 1
        elif steps == passes + 1:
            texts.append(f"rank {rank} has called step() {steps} times after {passes} backward passes")
        elif is_inside and steps == passes - 2:
            texts.append(f"rank {rank} has left out step() {steps + 1}")
        else:
            return []
    return texts if regular else []


def _steps_beside(status: Status) -> bool:
    """Return whether a thread steps; then other threads wait for this rank itself."""
    return any(name == OVERLAPPED_STEP for name, _ in status.open)


def _doing(status: Status, call: tuple[str, int] | None, *, with_last: bool) -> str:
    last = f" (last seen: {status.last} {status.ago:.0f} s ago)" if status.last and with_last else ""
    if call is None:
        inside = f"is in {status.open[0][0]} and " if status.open else ""
        return f"{inside}waits for nothing{last}"
    if _steps_beside(status):
        call = next(each for each in status.open if each[0] == OVERLAPPED_STEP)
    name, count = call
    if status.counts.get(name, 0) < count:
        return f"has not {'called' if name.endswith('()') else 'begun its'} {name}{last}"
    if any(name == opened for opened, _ in status.open):
        return f"is in {name} and waits for nothing{last}"
    return f"has left {name}{last}"
