"""Verdicts: after a wait that is too long, ranks find who is missing and give up together.

Note [Giving up together]
    The first rank whose wait is too long asks all ranks of the group, or of its mesh, what they do. It makes
    a verdict, tells all, and breaks its connections; so do they: waits raise, and no work begins. A wait that
    fails early, as gloo saw a closed connection, also asks, and decides if ranks have ended.

    Several ranks may decide at once. So a verdict first goes to the lowest rank that answers, which keeps the
    first. A rank that answered before is asked again for some seconds. If the lowest answers only one of two
    in the same second, reasons differ, and nobody hangs. The store would often be on the silent rank.
"""

import logging
import os
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict

from zero_optim.comm.backends import tells_of_closed_connection, tells_of_late_rank
from zero_optim.comm.records import Verdict
from zero_optim.comm.threads import start_thread
from zero_optim.comm.work_log import GroupWorks, WorkLog
from zero_optim.comm.works import Work
from zero_optim.health.diagnosis import Seen, Status, closed, gone, judge
from zero_optim.health.peers import ANSWER_LIMIT, Directory, Message, Presence

EXIT_CODE = 75  # of a process that was ended because a wait took too long: "try again" in sysexits.h

_LONG = 60.0  # seconds of a wait after which a user has begun to wonder; the usual timeout is 30 minutes
_LONGEST_END = 10.0  # seconds that a process may take to end on a busy host, once it has been killed
# What a rank may be whose process runs. It is asked again for a while.
_MUTE = (Presence.SILENT, Presence.CUT_OFF, Presence.UNKNOWN)

logger = logging.getLogger("zero_optim")


class Verdicts:
    """Finds out why a wait does not end, and gives up with all ranks; any thread may call.

    ``exits``: giving up ends the process instead of making its waits raise.
    """

    def __init__(self, log: WorkLog, directory: Directory) -> None:
        self.exits = False
        self._log = log
        self._directory = directory
        self._deciding: set[tuple[int, ...]] = set()

    def judge_wait(self, work: Work, seconds: float) -> None:
        """Warn of a wait of some seconds, or give it up."""
        works = work.group
        if works.verdict is not None or works.whole in self._deciding:
            return
        if seconds >= work.timeout:
            self._deciding.add(works.whole)
            _beside(lambda: self._decide(work, seconds))
            return
        if seconds >= min(_LONG, work.timeout / 2) and not work.is_warned:
            work.is_warned = True
            _beside(lambda: self._warn(work, seconds))

    def judge_failure(self, work: Work, error: Exception | None) -> None:
        """Find out why a work failed that nobody waits for; give up if ranks have ended."""
        if isinstance(error, RuntimeError):
            work.group.has_failed = True
            _beside(lambda: self.explain(work, error))

    def answer(self, question: Message) -> Message:
        """Return this process's status; carry out the verdict in the question, if any."""
        ranks = tuple(map(int, question["ranks"]))
        if "verdict" in question:
            message, missing = question["verdict"]
            told = Verdict(str(message), tuple(map(int, missing)))
            if ranks not in self._log.verdicts:
                self._log.give_up(ranks, told)
                _beside(lambda: self._act(ranks, told, is_first="is_first" in question))
        return asdict(self._status(ranks))

    def _status(self, ranks: tuple[int, ...], work: Work | None = None) -> Status:
        # A CPU that went on waits where its device does, whatever it is in.
        late = [works.outstanding for works in list(self._log.groups.values()) if works.whole == ranks]
        waits = {each for each in (*self._log.waits(), *late, work) if each is not None}
        verdict, deciding = self._log.verdicts.get(ranks), ranks in self._deciding
        return Status.of(waits, self._log.activity, verdict, is_deciding=deciding)

    def _ask_all(self, works: GroupWorks, own: Status, question: Message) -> dict[int, Status | Presence]:
        found = self._directory.ask_all(works.whole, {"ranks": works.whole, **question})
        seen = {rank: what if isinstance(what, Presence) else Status(**what) for rank, what in found.items()}
        return seen | {self._rank_in(works): own}

    def _rank_in(self, works: GroupWorks) -> int:
        return works.whole.index(self._directory.rank)

    def _warn(self, work: Work, seconds: float) -> None:
        works = work.group
        seen = self._ask_all(works, self._status(works.whole, work), {})
        if work.waiting_since is not None or works.outstanding is not None:
            told = _judged(works, seen, self._rank_in(works), seconds).message.partition(". ")[0]
            logger.warning("%s. All ranks give up after %g s", told, work.timeout)

    def _decide(self, work: Work, seconds: float | None, seen: Seen | None = None) -> Verdict:
        """Find the missing ranks, and give up with all others. See Note [Giving up together]."""
        works = work.group
        me, tells = self._rank_in(works), False
        self._deciding.add(works.whole)
        try:
            if seen is None:
                seen = self._ask_all(works, self._status(works.whole, work), {})
            found = _verdict_in(seen)
            lower = (what for rank, what in seen.items() if rank < me)
            if found is None and any(isinstance(what, Status) and what.is_deciding for what in lower):
                found = _verdict_within(works, 2 * ANSWER_LIMIT)
            if found is None:
                found, tells = self._kept(works, _judged(works, seen, me, seconds), seen), True
            verdict = self._log.give_up(works.whole, found)
        finally:
            self._deciding.discard(works.whole)
        if tells:
            self._tell(works.whole, verdict, seen)
        self._act(works.whole, verdict)
        return verdict

    def _kept(self, works: GroupWorks, verdict: Verdict, seen: Seen) -> Verdict:
        """Tell the lowest rank that answers; returns the verdict that it keeps."""
        question = {**_telling(works.whole, verdict), "is_first": True}
        deadline = time.monotonic() + _LONGEST_END
        for place, rank in enumerate(works.whole[: self._rank_in(works)]):
            is_busy = isinstance(seen[place], Status)
            while is_busy and works.verdict is None:
                told = self._directory.ask_all([rank], question)[0]
                if not isinstance(told, Presence):
                    return _verdict_in({place: Status(**told)}) or verdict
                is_busy = told in _MUTE and time.monotonic() < deadline
        return works.verdict or verdict

    def _tell(self, ranks: tuple[int, ...], verdict: Verdict, seen: Seen) -> None:
        """Tell all ranks; silent ones on a thread, unless this process must end."""
        question = _telling(ranks, verdict)
        mute = [rank for place, rank in enumerate(ranks) if isinstance(seen[place], Presence)]
        if mute and not self.exits:
            _beside(lambda: self._directory.ask_all(mute, question))
            ranks = tuple(rank for rank in ranks if rank not in mute)
        self._directory.ask_all(ranks, question)

    def _act(self, ranks: tuple[int, ...], verdict: Verdict, *, is_first: bool = False) -> None:
        """Carry out a verdict: end this process or its waits. The rank that ``is_first`` tells others."""
        logger.error("%s", verdict.message)
        if is_first and self.exits:
            self._directory.ask_all(ranks, _telling(ranks, verdict))
        self._exit_if_asked()
        for works in list(self._log.groups.values()):
            if works.whole == ranks:
                works.cut()

    def _exit_if_asked(self) -> None:
        if self.exits:
            flushing = _beside(_flush)
            flushing.join(ANSWER_LIMIT)  # not longer: a thread that hangs may hold the lock of a stream
            os._exit(EXIT_CODE)

    def explain(self, work: Work, error: RuntimeError) -> Exception | None:
        """Build what a wait raises, see `WorkLog.explain`. May take seconds, and ask all ranks."""
        works = work.group
        began = time.monotonic()
        is_late, is_closed = tells_of_late_rank(error), tells_of_closed_connection(error)
        while works.verdict is None and self._directory.is_current():
            if works.whole in self._deciding:
                _verdict_within(works, 0.1)
                continue
            seen: Seen = self._ask_all(works, self._status(works.whole, work), {})
            mute = [what for what in seen.values() if what in _MUTE]
            is_over = time.monotonic() - began > (_LONGEST_END if mute else ANSWER_LIMIT)
            if is_closed and is_over:
                seen = closed(seen)
            is_silent = is_closed and is_over and any(what is not Presence.UNKNOWN for what in mute)
            if is_late or gone(seen) or is_silent or _verdict_in(seen) is not None:
                return self._decide(work, None, seen).error()
            if not is_closed or is_over:
                return None
            # The process that closed the connection may be about to end. On a busy host that takes long: some
            # of its connections are closed, and its port still takes questions, which nobody answers.
            time.sleep(0.05)
        if works.verdict is None:
            return None
        self._exit_if_asked()
        return works.verdict.error()


def _judged(works: GroupWorks, seen: Seen, own: int, seconds: float | None) -> Verdict:
    """Find the missing ranks of the group, then of the mesh around it."""
    part = {place: what for place, what in seen.items() if works.whole[place] in works.ranks}
    if len(part) < len(seen) and not gone(seen):
        verdict = judge(part, own, seconds)
        if verdict.missing:
            return verdict
    return judge(seen, own, seconds)


def _verdict_within(works: GroupWorks, limit: float) -> Verdict | None:
    deadline = time.monotonic() + limit
    while works.verdict is None and time.monotonic() < deadline:
        time.sleep(0.01)
    return works.verdict


def _telling(ranks: tuple[int, ...], verdict: Verdict) -> Message:
    return {"ranks": ranks, "verdict": [verdict.message, verdict.missing]}


def _verdict_in(seen: Seen) -> Verdict | None:
    told = (what.verdict for what in seen.values() if isinstance(what, Status))
    return next((Verdict(each[0], tuple(each[1])) for each in told if each is not None), None)


def _beside(work: Callable[[], object]) -> threading.Thread:
    """Run slow work on a thread: the watchdog must answer meanwhile."""
    return start_thread(work, "zero_optim diagnosis")


def _flush() -> None:
    """Flush prints and logs, which a process that is killed does not."""
    for stream in (*logging.getLogger().handlers, *logger.handlers, sys.stdout, sys.stderr):
        with suppress(OSError, ValueError, AttributeError):  # closed, or none
            stream.flush()
