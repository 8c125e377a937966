"""Verdicts: after too long a wait, ranks find who is missing and give up together.

Note [Giving up together]
    The first rank whose wait is too long asks all ranks of the group, or of its mesh, what they do. It sends
    them a verdict and breaks its connections; so do they: waits raise, and no work begins. A rank whose wait
    fails early, as gloo saw a closed connection, does so too if ranks have ended. Several ranks may decide at
    once: a verdict first goes to the lowest rank that answers, which keeps the first.

    A rank whose step raised where no gather tells the others, and one that waits after a step with a closure,
    ask a rank beside them: it may wait for the former in vain, or have stepped without a closure.

    Ranks that wait for each other, each for another thing, do not wait for the group's timeout: they give up
    after `_LONG`, unless the caller gave a ``timeout``.
"""

import logging
import os
import sys
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict

from zero_optim.comm.backends import late_or_closed
from zero_optim.comm.records import NO_STEP, LastStep, Verdict
from zero_optim.comm.work_log import GroupWorks, WorkLog
from zero_optim.comm.works import Work
from zero_optim.compat.threads import start_thread_or_run
from zero_optim.health.diagnosis import (
    Reports,
    Status,
    are_parted,
    ended_ranks,
    judge,
    wait_for_each_other,
    without_absent,
)
from zero_optim.health.peers import ANSWER_LIMIT, Directory, Message, Presence
from zero_optim.host.shared_memory import GAVE_UP

EXIT_CODE = 75  # of a process that was ended because a wait took too long: "try again" in sysexits.h

_LONG = 60.0  # seconds of a wait after which a user has begun to wonder; the usual timeout is 30 minutes
_LONGEST_END = 10.0  # seconds that a process may take to end on a busy host, once it has been killed
# What a rank may be whose process runs. It is asked again for a while.
_MUTE = (Presence.SILENT, Presence.CUT_OFF, Presence.UNKNOWN)

logger = logging.getLogger("zero_optim")


class Verdicts:
    """Finds out why a wait does not end, and gives up with all ranks; ``exits``: by ending the process."""

    def __init__(self, log: WorkLog, directory: Directory) -> None:
        self.exits = False
        self.log = log
        self._directory = directory
        self._deciding: set[tuple[int, ...]] = set()
        self._asking: set[tuple[int, ...]] = set()

    def judge_wait(self, work: Work, seconds: float) -> None:
        """Warn of a wait of some seconds, or give it up."""
        works = work.group
        if works.verdict is not None or works.whole in self._deciding:
            return
        if seconds >= work.timeout:
            self._deciding.add(works.whole)
            _beside(lambda: self._decide(works, seconds))
            return
        if works.step.closures and seconds >= ANSWER_LIMIT:
            self.judge_step(works)
        if seconds >= min(_LONG, work.timeout / 2) and not work.is_warned:
            work.is_warned = True
            _beside(lambda: self._warn(work, seconds))

    def has_failure(self) -> bool:
        """Return whether a step here raised, and other ranks have not heard of it."""
        steps = list(self.log.steps.items())
        return any(step.failure and ranks not in self.log.verdicts for ranks, step in steps)

    def judge_step(self, works: GroupWorks) -> None:
        """Give up if the ranks' last steps let them not meet any more, as a rank beside this one shows."""
        if works.verdict is None and works.whole not in self._asking | self._deciding:
            self._asking.add(works.whole)
            _beside(lambda: self._ask_beside(works))

    def _ask_beside(self, works: GroupWorks) -> None:
        # One rank is enough: all wait in the end, and where steps differ some neighbours' do.
        try:
            before = works.ranks[works.ranks.index(self._directory.rank) - 1]
            report = _reports(self._directory.ask_all([before], {"ranks": works.whole}))[0]
            mine = self._status(works.whole)
            if works.verdict is None and isinstance(report, Status) and are_parted(mine, report):
                self._decide(works, None)
        finally:
            self._asking.discard(works.whole)

    def judge_failure(self, work: Work, error: Exception | None) -> None:
        """Give up if a work that nobody waits for failed since ranks have ended."""
        if isinstance(error, RuntimeError):
            work.group.has_failed = True
            _beside(lambda: self.explain(work, error))

    def answer(self, question: Message) -> Message:
        """Return this process's status; carry out the verdict in the question, if any."""
        ranks = tuple(map(int, question["ranks"]))
        if "verdict" in question:
            message, missing = question["verdict"]
            verdict = Verdict(str(message), tuple(map(int, missing)))
            if ranks not in self.log.verdicts:
                self.log.give_up(ranks, verdict)
                _beside(lambda: self._act(ranks, verdict, is_first="is_first" in question))
        return asdict(self._status(ranks))

    def _status(self, ranks: tuple[int, ...], work: Work | None = None) -> Status:
        # A CPU that went on waits where its device does, whatever it is in.
        late = [works.outstanding for works in list(self.log.groups.values()) if works.whole == ranks]
        waits = {each for each in (*self.log.waits(), *late, work) if each is not None}
        verdict, deciding = self.log.verdicts.get(ranks), ranks in self._deciding
        step = self.log.steps.get(ranks, NO_STEP)
        return Status.of(ranks, waits, self.log.activity, verdict, step, is_deciding=deciding)

    def _ask_all(self, works: GroupWorks, work: Work | None = None) -> Reports:
        answers = self._directory.ask_all(works.whole, {"ranks": works.whole})
        return _reports(answers) | {self._rank_in(works): self._status(works.whole, work)}

    def _rank_in(self, works: GroupWorks) -> int:
        return works.whole.index(self._directory.rank)

    def _warn(self, work: Work, seconds: float) -> None:
        works = work.group
        reports = self._ask_all(works, work)
        if seconds >= _LONG and work.phase.timeout is None and wait_for_each_other(reports, 0.9 * _LONG):
            self._decide(works, seconds, reports)
        elif work.waiting_since is not None or works.outstanding is not None:
            reason = _judge(works, reports, self._rank_in(works), seconds).message.partition(". ")[0]
            logger.warning("%s. All ranks give up after %g s", reason, work.timeout)

    def _decide(
        self, works: GroupWorks, seconds: float | None, reports: Reports | None = None, broken: str = ""
    ) -> Verdict:
        me, tells = self._rank_in(works), False
        self._deciding.add(works.whole)
        try:
            if reports is None:
                reports = self._ask_all(works)
            verdict = _verdict_in(reports)
            lower = (what for rank, what in reports.items() if rank < me)
            if verdict is None and any(isinstance(what, Status) and what.is_deciding for what in lower):
                verdict = _verdict_within(works, 2 * ANSWER_LIMIT)
            if verdict is None:
                verdict = self._first_of(works, _judge(works, reports, me, seconds, broken), reports)
                tells = True
            verdict = self.log.give_up(works.whole, verdict)
            if tells:
                self._tell(works.whole, verdict, reports)
        finally:
            self._deciding.discard(works.whole)
        self._act(works.whole, verdict)
        return verdict

    def _first_of(self, works: GroupWorks, verdict: Verdict, reports: Reports) -> Verdict:
        """Tell the lowest rank that answers; returns its first verdict."""
        question = {**_announcement(works.whole, verdict), "is_first": True}
        deadline = time.monotonic() + _LONGEST_END
        for place, rank in enumerate(works.whole[: self._rank_in(works)]):
            is_busy = isinstance(reports[place], Status)
            while is_busy and works.verdict is None:
                report = _reports(self._directory.ask_all([rank], question))[0]
                if isinstance(report, Status):
                    return _verdict_in({place: report}) or verdict
                is_busy = report in _MUTE and time.monotonic() < deadline
        return works.verdict or verdict

    def _tell(self, ranks: tuple[int, ...], verdict: Verdict, reports: Reports) -> None:
        """Tell all ranks before this one gives up, and perhaps ends; silent ones find it when they go on."""
        question = _announcement(ranks, verdict)
        mute = [rank for place, rank in enumerate(ranks) if isinstance(reports[place], Presence)]
        self._directory.ask_all([rank for rank in ranks if rank not in mute], question)
        if mute:
            self._directory.ask_all(mute, question, 0.0)

    def _act(self, ranks: tuple[int, ...], verdict: Verdict, *, is_first: bool = False) -> None:
        """Carry out a verdict; the rank that ``is_first`` tells others before it exits."""
        logger.error("%s", verdict.message)
        if is_first and self.exits:
            self._directory.ask_all(ranks, _announcement(ranks, verdict))
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
        began = time.monotonic()
        is_late, is_closed = late_or_closed(error)
        while works.verdict is None and self._directory.is_current():
            if works.whole in self._deciding:
                _verdict_within(works, 0.1)
                continue
            reports = self._ask_all(works, work)
            mute = [what for what in reports.values() if what in _MUTE]
            is_told = GAVE_UP in str(error)  # by a rank that has the reason
            is_over = time.monotonic() - began > (_LONGEST_END if mute or is_told else ANSWER_LIMIT)
            if is_closed and is_over:
                reports = without_absent(reports)
            is_broken = is_closed and is_over
            if is_late or ended_ranks(reports) or is_broken or _verdict_in(reports) is not None:
                self._directory.catch_up()
                is_known = (
                    is_late or ended_ranks(reports) or {Presence.SILENT, Presence.CUT_OFF}.intersection(mute)
                )
                broken = "" if is_known else str(error).partition(". ")[0]
                return self._decide(works, None, reports, broken).error()
            if not is_closed:
                return None
            # The process that closed the connection may be about to end. On a busy host that takes long, and
            # its port takes questions that nobody answers.
            time.sleep(0.05)
        if works.verdict is None:
            return None
        while works.whole in self._deciding:  # another thread tells all ranks; this one may end the process
            time.sleep(0.01)
        self._exit_if_due()
        return works.verdict.error()


def _judge(works: GroupWorks, reports: Reports, own: int, seconds: float | None, broken: str = "") -> Verdict:
    """Find missing ranks of the group, then of its mesh."""
    part = {place: what for place, what in reports.items() if works.whole[place] in works.ranks}
    if len(part) < len(reports) and not ended_ranks(reports):
        verdict = judge(part, own, seconds, broken)
        if verdict.missing:
            return verdict
    return judge(reports, own, seconds, broken)


def _verdict_within(works: GroupWorks, limit: float) -> Verdict | None:
    deadline = time.monotonic() + limit
    while works.verdict is None and time.monotonic() < deadline:
        time.sleep(0.01)
    return works.verdict


def _reports(answers: Mapping[int, Message | Presence]) -> dict[int, Status | Presence]:
    return {
        rank: what if isinstance(what, Presence) else Status(**{**what, "step": LastStep(*what["step"])})
        for rank, what in answers.items()
    }


def _announcement(ranks: tuple[int, ...], verdict: Verdict) -> Message:
    return {"ranks": ranks, "verdict": [verdict.message, verdict.missing]}


def _verdict_in(reports: Reports) -> Verdict | None:
    verdicts = (what.verdict for what in reports.values() if isinstance(what, Status))
    return next((Verdict(each[0], tuple(each[1])) for each in verdicts if each is not None), None)


def _beside(work: Callable[[], object]) -> threading.Thread | None:
    """Run slow work on a thread if it can, as the watchdog must answer meanwhile."""
    return start_thread_or_run(work, "zero_optim diagnosis")


def _flush() -> None:
    for stream in (*logging.getLogger().handlers, *logger.handlers, sys.stdout, sys.stderr):
        with suppress(OSError, ValueError, AttributeError):  # closed, or none
            stream.flush()
