"""Verdicts: after too long a wait, ranks find who is missing and give up together.

Note [Giving up together]
    A rank whose wait is too long, or fails early as gloo saw a closed connection, complains to the lowest
    rank that answers, by way of those above it in the tree: each of them passes one complaint up, and others
    wait for what becomes of it. The lowest rank asks all what they do, and sends them one verdict, both in a
    tree (Note [Asked in a tree] in `health.tree`). Each rank passes it on and breaks its connections: waits
    raise, and no work begins.

    A rank whose step raised where no gather tells the others asks a rank beside it. Ranks that wait for each
    other, each for another thing, give up after that limit of `Phase.limits`.
"""

import logging
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from typing import Any

from zero_optim.comm.backends import late_or_closed
from zero_optim.comm.traffic import LONG, Phase
from zero_optim.comm.work_log import GroupWorks, Verdict, WorkLog
from zero_optim.comm.works import Work
from zero_optim.compat.threads import start_thread_or_run
from zero_optim.health.diagnosis import Complaint, Status, are_parted, judge_part, verdict_of, verdict_to_json
from zero_optim.health.directory import Directory
from zero_optim.health.peers import ANSWER_LIMIT, LONGEST_SEARCH, Presence
from zero_optim.health.tree import FAN, Message, above, from_runs, to_groups, to_runs

EXIT_CODE = 75  # of a process that was ended because a wait took too long: "try again" in sysexits.h

_NEARLY = 0.9  # of a long wait, after which it counts as long for the ranks that ask
_LONGEST_ERROR = 1000  # characters of a backend's error in a complaint
_LOWER = 4 * FAN  # lower ranks, of which one is sought that answers

logger = logging.getLogger("zero_optim")


class Verdicts:
    """Finds out why a wait does not end, and gives up with all ranks; ``exits``: by ending the process."""

    def __init__(self, log: WorkLog, directory: Directory) -> None:
        self.exits = False
        self.log = log
        self._directory = directory
        self._telling: set[tuple[int, ...]] = set()  # the verdict to ranks below this one in the tree
        self._complaints: dict[tuple[tuple[int, ...], str], threading.Event] = {}  # by ranks and kind

    def look_at_wait(self, work: Work, seconds: float) -> None:
        """Complain of a wait of some seconds if it is long."""
        works = work.group
        if works.verdict is not None:
            return
        if seconds >= work.timeout:
            self._complain_beside(works, self._complaint("late", work, seconds))
            return
        long, kind = _long(work)
        if seconds >= long and not work.is_warned:
            work.is_warned = True
            self._complain_beside(works, self._complaint(kind, work, seconds))

    def has_failure(self) -> bool:
        """Return whether a step here raised, and other ranks have not heard of it."""
        failures = list(self.log.failures.items())
        return any(failure and ranks not in self.log.verdicts for ranks, failure in failures)

    def look_at_failed_step(self, works: GroupWorks) -> None:
        """Give up if ranks wait in vain after a step that raised here, as a rank beside this one shows."""
        if works.verdict is None:
            _beside(lambda: self._ask_beside(works))

    def _ask_beside(self, works: GroupWorks) -> None:
        ranks = works.whole  # one of them is enough: all wait in the end
        before = ranks.index(works.ranks[works.ranks.index(self._directory.rank) - 1])
        report = _reports(self._directory.ask_places(ranks, [before], {}))[before]
        mine = self._status(ranks)
        if works.verdict is None and isinstance(report, Status) and are_parted(mine, report):
            self._complain(ranks, self._complaint("late", Work(works, Phase()), None))

    def look_at_failure(self, work: Work, error: Exception | None) -> None:
        """Give up if a work that nobody waits for failed since ranks have ended."""
        if isinstance(error, RuntimeError):
            work.group.has_failed = True
            _beside(lambda: self.explain(work, error))

    def answer(self, question: Message) -> Iterator[Message]:
        """Yield this process's status, then what it was asked to find out; carry out a verdict, if any."""
        ranks, verdict = from_runs(question["ranks"]), None
        if "verdict" in question and ranks not in self.log.verdicts:
            verdict = self.log.give_up(ranks, _from_json(question["verdict"]))
            self._telling.add(ranks)
        yield asdict(self._status(ranks))
        if "looks" in question:
            self._note_look(ranks, question["looks"])
        if "complaint" in question:
            self._complain(ranks, Complaint(*question["complaint"]))
            yield {"settled": verdict_to_json(self.log.verdicts.get(ranks))}
        elif (stop := question.pop("stop", None)) is not None:
            answers = self._directory.ask_all(ranks, question, int(stop))
            named = {at: each.name if isinstance(each, Presence) else each for at, each in answers.items()}
            yield {"answers": to_groups(named)}
        if verdict is not None:
            _beside(lambda: self._act(ranks, verdict))

    def _waits(self, ranks: tuple[int, ...]) -> set[Work]:
        # A CPU that went on waits where its device does, whatever it is in.
        late = [works.outstanding for works in list(self.log.groups.values()) if works.whole == ranks]
        return {*self.log.waits(), *(each for each in late if each is not None)}

    def _note_look(self, ranks: tuple[int, ...], kind: str) -> None:
        # Ranks that wait for the same complain once, though not at the same moment.
        for work in self._waits(ranks):
            long, own_kind = _long(work)
            if work.group.whole == ranks and kind == own_kind:
                seconds = time.monotonic() - (work.waiting_since or work.started)
                work.is_warned |= seconds >= _NEARLY * long

    def _status(self, ranks: tuple[int, ...], work: Work | None = None) -> Status:
        return Status.of(ranks, self._waits(ranks) | ({work} if work is not None else set()), self.log)

    def _complaint(self, kind: str, work: Work, seconds: float | None, error: str = "") -> Complaint:
        works = work.group
        place, waits = works.whole.index(self._directory.rank), work if seconds is not None or error else None
        status, part = asdict(self._status(works.whole, waits)), to_runs(works.ranks)
        long = _NEARLY * _long(work)[0]
        return Complaint(kind, place, status, part, seconds, long, work.timeout, error)

    def _complain_beside(self, works: GroupWorks, complaint: Complaint) -> None:
        if (works.whole, complaint.kind) not in self._complaints:
            _beside(lambda: self._complain(works.whole, complaint))

    def _complain(self, ranks: tuple[int, ...], complaint: Complaint) -> None:
        """Have the lowest rank that answers look into a complaint; returns when it has."""
        key, is_over = (ranks, complaint.kind), threading.Event()
        under_way = self._complaints.setdefault(key, is_over)
        if under_way is not is_over:
            under_way.wait(LONGEST_SEARCH)
            return
        try:
            me = ranks.index(self._directory.rank)
            if not any(self._pass_up(ranks, place, complaint) for place in self._lower(ranks, me)):
                self._look_into(ranks, me, complaint)
        finally:
            del self._complaints[key]
            is_over.set()

    def _lower(self, ranks: tuple[int, ...], me: int) -> Iterator[int]:
        """Yield the places to complain to: those above in the tree, then the lowest that answers."""
        yield from above(me, len(ranks))
        for start in range(0, min(me, _LOWER), FAN):
            places = range(start, min(start + FAN, me))
            answers = self._directory.ask_places(ranks, places, {})
            yield from (place for place, answer in answers.items() if not isinstance(answer, Presence))

    def _pass_up(self, ranks: tuple[int, ...], place: int, complaint: Complaint) -> bool:
        """Return whether a rank has found out more; then this one has its verdict, if any."""
        if ranks in self.log.verdicts:
            return True
        answer = self._directory.ask_places(ranks, [place], {"complaint": complaint})[place]
        if isinstance(answer, Presence) or "settled" not in answer:
            return False
        if answer["settled"] is not None and ranks not in self.log.verdicts:  # else it has been told
            self._act(ranks, self.log.give_up(ranks, _from_json(answer["settled"])))
        return True

    def _look_into(self, ranks: tuple[int, ...], me: int, complaint: Complaint) -> None:
        """Ask all ranks, and give up if it is due; or complain to a lower rank, if one answers now."""
        began = time.monotonic()
        while ranks not in self.log.verdicts and self._directory.is_current():
            reports = _reports(self._directory.ask_all(ranks, {"looks": complaint.kind}))
            lowest = min((place for place, what in reports.items() if isinstance(what, Status)), default=me)
            if lowest < me and self._pass_up(ranks, lowest, complaint):
                return
            reports |= {me: self._status(ranks), **_reports({complaint.place: complaint.status})}
            known = (what.verdict for what in reports.values() if isinstance(what, Status) and what.verdict)
            found = next(map(_from_json, known), None)
            found = found or verdict_of(ranks, reports, complaint, time.monotonic() - began)
            if found is not None:
                self._give_up(ranks, found)
            elif complaint.kind != "broken":
                reason = judge_part(ranks, reports, complaint).message.partition(". ")[0]
                logger.warning("%s. All ranks give up after %g s", reason, complaint.timeout)
            elif late_or_closed(complaint.error)[1]:
                # The process that closed the connection may be about to end. On a busy host that takes long,
                # and its port takes questions that nobody answers.
                time.sleep(0.05)
                continue
            return

    def _give_up(self, ranks: tuple[int, ...], verdict: Verdict) -> None:
        """Tell all ranks before this one gives up, and perhaps ends; silent ones find it when they go on."""
        self._telling.add(ranks)
        verdict = self.log.give_up(ranks, verdict)
        self._directory.ask_all(ranks, {"verdict": verdict_to_json(verdict)})
        self._act(ranks, verdict)

    def _act(self, ranks: tuple[int, ...], verdict: Verdict) -> None:
        """Carry out a verdict that the ranks below this one know."""
        self._telling.discard(ranks)
        logger.error("%s", verdict.message)
        self._exit_if_due()
        for works in list(self.log.groups.values()):
            if works.whole == ranks:
                works.cut()

    def _exit_if_due(self) -> None:
        if self.exits:
            if (flushing := _beside(_flush)) is not None:
                flushing.join(ANSWER_LIMIT)  # not longer: a thread that hangs may hold the lock of a stream
            os._exit(EXIT_CODE)

    def explain(self, work: Work, error: RuntimeError) -> Exception | None:
        """Build what a wait raises, see `WorkLog.explain`. May take seconds."""
        works = work.group
        if works.verdict is None and self._directory.is_current():
            self._directory.catch_up()
            self._complain(works.whole, self._complaint("broken", work, None, str(error)[:_LONGEST_ERROR]))
        if works.verdict is None:
            return None
        while works.whole in self._telling:  # another thread does; this one may end the process
            time.sleep(0.01)
        self._exit_if_due()
        return works.verdict.error()


def _long(work: Work) -> tuple[float, str]:
    """Return the seconds after which this rank complains of a wait, and the kind of the complaint."""
    _, apart = work.phase.limits(work.timeout)
    return (apart, "odd") if apart < work.timeout else (min(LONG, work.timeout / 2), "slow")


def _reports(answers: Mapping[int, Message | Presence]) -> dict[int, Status | Presence]:
    return {rank: what if isinstance(what, Presence) else Status(**what) for rank, what in answers.items()}


def _from_json(said: Sequence[Any]) -> Verdict:
    return Verdict(str(said[0]), from_runs(said[1]))


def _beside(work: Callable[[], object]) -> threading.Thread | None:
    """Run slow work on a thread if it can, as the watchdog must answer meanwhile."""
    return start_thread_or_run(work, "zero_optim diagnosis")


def _flush() -> None:
    for stream in (*logging.getLogger().handlers, *logger.handlers, sys.stdout, sys.stderr):
        with suppress(OSError, ValueError, AttributeError):  # closed, or none
            stream.flush()
