"""Finds what hangs, and which ranks cause it, from each rank's status. No communication."""

import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from zero_optim.comm.frames import differences, ranks_text
from zero_optim.comm.records import OVERLAPPED_STEP, Activity, Verdict
from zero_optim.comm.works import Work
from zero_optim.health.peers import Presence

_ADVICE = (
    "The process group cannot be used any more: end the processes, or destroy all groups and begin again"
)


@dataclass(frozen=True, slots=True)
class Status:
    """What a process says of itself; as JSON, tuples are lists.

    ``waits``: of its threads, longest first. ``open``: names and counts of its calls, outermost first.
    ``last``: its last begin or end. ``verdict``: message and missing ranks, if it gave up; ``is_deciding``:
    it is about to.
    """

    waits: Sequence[str]
    open: Sequence[tuple[str, int]]
    counts: Mapping[str, int]
    last: str = ""
    verdict: tuple[str, Sequence[int]] | None = None
    is_deciding: bool = False

    @classmethod
    def of(
        cls, waits: Iterable[Work], activity: Activity, verdict: Verdict | None, *, is_deciding: bool
    ) -> "Status":
        """Build it from what this process does."""
        now = time.monotonic()
        listed = sorted(waits, key=lambda work: -work.waited(now))
        last = activity.last
        seen = "" if last is None else f"{last.name} {last.count} {'ended' if last.is_over else 'began'}"
        return cls(
            tuple(work.text for work in listed),
            tuple((mark.name, mark.count) for mark in list(activity.open.values())),
            dict(activity.counts),
            seen if last is None else f"{seen} {now - last.time:.0f} s ago",
            None if verdict is None else (verdict.message, verdict.missing),
            is_deciding,
        )


Seen = Mapping[int, Status | Presence]  # by group rank


_GONE = (Presence.ENDED, Presence.LEFT, Presence.NEVER)


def gone(seen: Seen) -> list[int]:
    """Return the ranks whose processes have ended, or that released the group."""
    return [rank for rank, what in seen.items() if what in _GONE]


def closed(seen: Seen) -> Seen:
    """Return `gone`, or the absent ranks if a connection was closed and no process is known to have ended."""
    if gone(seen):
        return seen
    return {rank: Presence.NEVER if what is Presence.ABSENT else what for rank, what in seen.items()}


def judge(seen: Seen, own: int, seconds: float | None) -> Verdict:
    """Describe which ranks are missing, what they did last, and what the others wait for.

    ``seconds``: how long ``own`` has waited; None if its wait failed early.
    """
    mine = seen[own]
    assert isinstance(mine, Status)  # it can always be asked
    call = mine.open[0] if mine.open else None
    ended = gone(seen)  # if there are some, nobody else is to blame
    missing, told = [], []
    waiting: dict[str, list[int]] = {}
    for rank, what in sorted(seen.items()):
        if isinstance(what, Status) and what.waits and not _steps_beside(what):
            waiting.setdefault(what.waits[0], []).append(rank)
        elif not ended or rank in ended:
            missing.append(rank)
            told.append(f"rank {rank} {what.value if isinstance(what, Presence) else _doing(what, call)}")
    if not missing:
        told.append(f"every rank waits, {'but not' if len(waiting) > 1 else 'all'} for the same")
        told += _irregular(seen) if len(waiting) > 1 else []
    for work, ranks in waiting.items():
        told.append(f"{ranks_text(ranks)} wait{'s' * (len(ranks) == 1)} in {work}")
    if not ended and (len(waiting) > 1 or not missing):
        told += differences({rank: what.counts for rank, what in seen.items() if isinstance(what, Status)})
    why = "stalled" if seconds is None else f"stalled for {seconds:.3g} s"
    return Verdict(f"{why}: {'; '.join(told)}. {_ADVICE}", tuple(missing))


def _irregular(seen: Seen) -> list[str]:
    """Describe ranks that left out a step or made an extra one, if others step once in each pass."""
    told, regular = [], 0
    for rank, what in sorted(seen.items()):
        if not isinstance(what, Status):
            continue
        passes, steps = what.counts.get("backward pass", 0), what.counts.get("step()", 0)
        is_inside = any(name == "backward pass" for name, _ in what.open)
        if steps == passes - is_inside:
            regular += 1
        elif steps == passes + 1:
            told.append(f"rank {rank} has called step() {steps} times after {passes} backward passes")
        elif is_inside and steps == passes - 2:
            told.append(f"rank {rank} has left out step() {steps + 1}")
        else:
            return []
    return told if regular else []


def _steps_beside(status: Status) -> bool:
    """Return whether a thread steps; waits for its work are waits for this rank itself."""
    return any(name == OVERLAPPED_STEP for name, _ in status.open)


def _doing(status: Status, call: tuple[str, int] | None) -> str:
    seen = f" (last seen: {status.last})" if status.last else ""
    if call is None:
        inside = f"is in {status.open[0][0]} and " if status.open else ""
        return f"{inside}waits for nothing{seen}"
    if _steps_beside(status):
        call = next(each for each in status.open if each[0] == OVERLAPPED_STEP)
    name, count = call
    if status.counts.get(name, 0) < count:
        return f"has not {'called' if name.endswith('()') else 'begun its'} {name}{seen}"
    if any(name == opened for opened, _ in status.open):
        return f"is in {name} and waits for nothing{seen}"
    return f"has left {name}{seen}"
