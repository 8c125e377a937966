"""The watchdog: one thread a process, which looks at the waits of the library and says who is missing.

It is started with the first optimizer or DDP of more than one rank, and ends with the last. It does not take
part in collectives. How it ends a wait: Note [Waits that end] in `zero_optim.comm.works`. How it knows of
other ranks: Note [Dead, stopped or slow] in `zero_optim.comm.peers`. What it does not count: Note [Time
asleep] in `zero_optim.comm.awake`.

Note [Giving up together]
    The rank whose wait is the first to take too long asks all ranks of the group what they do. If the group
    is a part of a mesh, "group" means the whole mesh here, and ranks are numbered in that. Of what they
    say it makes a verdict, and tells it to all of them, then it breaks its connections. Who is told does the
    same: its waits raise, and no work begins any more on groups of these ranks. A rank that waits for
    nothing, because it is slow, learns of it from its next work. If several ranks decide at the same time,
    the lowest one does, and the others wait for its word.

    A wait may also fail before its time, for example because the process of another rank was killed: gloo
    sees that the connection is closed. Then the thread that waited asks, and if ranks have ended, it decides.

    Nor does a rank wait for the timeout where it is proven that waits cannot end: Note [Crosswise waits] in
    `zero_optim.comm.crosswise`. The lowest rank of a group asks for that, once a wait has lasted some
    seconds, then each time that it has lasted twice as long.

Note [Watching NCCL]
    With NCCL the CPU does not wait, and a stream that waits cannot be made to raise. So the watchdog asks the
    handle of one work of each group at a time whether it is completed. If that takes too long the ranks give
    up all the same: each logs the verdict, and raises it from the next work. A CPU that waits for the device
    is not freed by that. NCCL's own watchdog ends the process after the timeout of the process group; with
    ``on_stall="exit"`` ours does so after its own.
"""

import atexit
import logging
import os
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, Literal, get_args
from weakref import WeakKeyDictionary, WeakSet

import torch.distributed as dist

from zero_optim.comm.awake import AwakeTime
from zero_optim.comm.collectives import RankGroup
from zero_optim.comm.crosswise import Standing, stuck
from zero_optim.comm.diagnosis import Seen, Status, closed, gone, judge, judge_crosswise, standings
from zero_optim.comm.directory import Directory
from zero_optim.comm.peers import ANSWER_LIMIT, Listener, Message, Presence
from zero_optim.comm.works import GroupWorks, Record, Verdict, WorkLog, explain_nothing, log_of

OnStall = Literal["raise", "exit"]

EXIT_CODE = 75  # of a process that was ended because a wait took too long: "try again" in sysexits.h

_LONGEST_LOOK = 1.0  # seconds between two looks at the waits
_FIRST_QUESTION = 2.0  # seconds that a wait has lasted when ranks are first asked whether they wait crosswise
_BETWEEN_QUESTIONS = 0.5  # seconds between both questions; the proof needs none
_LONGEST_END = 10.0  # seconds that a process may take to end on a busy host, once it has been killed
# In what gloo raises where a rank does not come, and where it is gone.
_LATE = ("imed out",)
_CLOSED = ("onnection", "closed", "closure", "reset")
_GROUP_FOR_ALL = 1024  # up to this number of ranks each one learns all addresses when it is built

logger = logging.getLogger("zero_optim")


def check_patience(timeout: object, on_stall: object = "raise") -> None:
    """Refuse wrong values of the two options.

    Raises:
        ValueError: a timeout that is no number of seconds above 0, or another word than "raise" and "exit".
    """
    if timeout is not None and (type(timeout) not in (int, float) or not timeout > 0):  # type: ignore[operator]
        raise ValueError(f"expected timeout to be a number of seconds above 0, or None, got {timeout!r}")
    if on_stall not in get_args(OnStall):
        raise ValueError(f'expected on_stall to be "raise" or "exit", got {on_stall!r}')


def patient(group: RankGroup, timeout: object) -> RankGroup:
    """Give the same ranks, whose waits are given up after a time; a wrong one is left out, to be refused."""
    fits = type(timeout) in (int, float) and timeout > 0  # type: ignore[operator]
    return group.within(float(timeout)) if fits else group  # type: ignore[arg-type]


def watch(user: object, group: RankGroup, on_stall: object = "raise") -> None:
    """Have a watchdog as long as something lives that communicates. Does not communicate with other ranks.

    Args:
        user: what communicates; only a weak reference is kept.
        group: its ranks. A group of one needs none.
        on_stall: "exit" ends the process in the place of raising, if any user wants that.
    """
    world = dist.group.WORLD
    if group.size == 1 or world is None:
        return
    found = _WATCHDOGS.get(world)
    if found is None or not found.add(user, group, on_stall):
        if found is not None:
            found.wait_until_left()
        if not Directory.can_be_kept():
            return
        found = _WATCHDOGS[world] = Watchdog(log_of(world), world)
        found.add(user, group, on_stall)
        found.start()


def unwatch(user: object) -> None:
    """Have no watchdog any more for something that let its process group go; does not communicate.

    Args:
        user: what was given to `watch`.
    """
    for found in list(_WATCHDOGS.values()):
        found.drop(user)


@contextmanager
def watching(group: RankGroup) -> Iterator[None]:
    """Have a watchdog in the body, for calls that need neither optimizer nor DDP."""
    user = _User()
    watch(user, group)
    yield


class _User:
    """Something that communicates as long as it lives."""


def learn_addresses(group: RankGroup) -> None:
    """Read where the watchdogs of all ranks listen, when all are known to have one; asks the store once."""
    world = dist.group.WORLD
    found = None if world is None else _WATCHDOGS.get(world)
    if found is not None and 1 < group.size <= _GROUP_FOR_ALL:
        found.learn(group)


class Watchdog:
    """Looks at the waits of this process, and answers those of others.

    Args:
        log: of this process.
        world: the default group; only a weak reference is kept.
    """

    def __init__(self, log: WorkLog, world: dist.ProcessGroup) -> None:
        current = weakref.ref(world)
        self._directory = Directory(lambda: current() is not None and dist.group.WORLD is current())
        self._log = log
        self._users: WeakKeyDictionary[Any, weakref.finalize[Any, Any]] = WeakKeyDictionary()
        self._deciding: set[tuple[int, ...]] = set()
        self._proving: set[tuple[int, ...]] = set()
        self._exits = False
        self._interval = _LONGEST_LOOK
        self._awake = AwakeTime()
        self._lock = threading.Lock()
        self._is_over = False
        self._has_left = threading.Event()
        self._listener = Listener(self._directory.own_host(), os.getpid())
        self._thread = threading.Thread(target=self._run, name="zero_optim watchdog", daemon=True)

    def start(self) -> None:
        """Begin to listen and look; when the interpreter exits, or the last user is gone, it ends."""
        _LISTENERS.add(self._listener)
        self._log.explain = self.explain
        self._directory.publish(self._listener.address)
        self._thread.start()
        atexit.register(self.end)

    # ------------------------------------------------------------------ who needs it

    def add(self, user: object, group: RankGroup, on_stall: object) -> bool:
        """Go on at least as long as an object lives; False if it has ended already."""
        with self._lock:
            if self._is_over:
                return False
            if user not in self._users:
                woken = weakref.finalize(user, self._listener.wake)  # called after it has left the users
                woken.atexit = False
                self._users[user] = woken
        self._exits |= on_stall == "exit"
        limit = group.works.limit if group.phase.timeout is None else group.phase.timeout
        self._interval = min(self._interval, max(limit / 20, 0.05))
        self._listener.wake()
        return True

    def drop(self, user: object) -> None:
        """Go on no longer for an object, if it was added."""
        with self._lock:
            woken = self._users.pop(user, None)
        if woken is not None:
            woken.detach()
            self._listener.wake()

    def wait_until_left(self) -> None:
        """Wait until one that is over has said so in the store; not for long, as the store may be stuck."""
        self._has_left.wait(ANSWER_LIMIT)

    def learn(self, group: RankGroup) -> None:
        """Learn where the other ranks listen."""
        self._directory.learn(group.works.ranks)

    def end(self) -> None:
        """End the thread, and wait for it; called when the interpreter exits."""
        self._is_over = True
        self._listener.wake()
        self._thread.join(1.0)

    # ------------------------------------------------------------------ the thread

    def _run(self) -> None:
        try:
            while not self._is_done():
                if self._listener.wait(self._interval):
                    self._listener.answer(self._answer)
                self._look()
        finally:
            with self._lock:
                self._is_over = True
            self._leave()
            self._listener.close()
            atexit.unregister(self.end)

    def _is_done(self) -> bool:
        with self._lock:
            self._is_over |= not self._users or not self._directory.is_current()
            return self._is_over

    def _leave(self) -> None:
        # Without the lock, which detach() takes too: the store may not answer, if its process is stopped.
        self._log.explain = explain_nothing
        try:
            self._directory.leave()
        finally:
            self._has_left.set()

    def _look(self) -> None:
        now = self._awake.look(self._interval)
        for record in list(self._log.waits.values()):
            since = record.waiting_since
            if since is not None:  # another thread may just have ended the wait
                self._judge_wait(record, self._awake.since(since, now))
        for works in list(self._log.groups.values()):
            if works.outstanding is not None:  # see Note [Watching NCCL]
                record, handle = works.outstanding
                if works.group() is None or _has_ended(handle):
                    record.ended, works.outstanding = now, None
                else:
                    self._judge_wait(record, self._awake.since(record.started, now))

    def _judge_wait(self, record: Record, seconds: float) -> None:
        works = record.group
        if works.verdict is not None or works.whole in self._deciding:
            return
        if seconds >= record.timeout:
            self._deciding.add(works.whole)
            _beside(lambda: self._decide(record, seconds))
            return
        if seconds >= record.timeout / 2 and not record.is_warned:
            record.is_warned = True
            _beside(lambda: self._warn(record, seconds))
        if self._is_to_prove(record, seconds):
            record.asked = record.waiting_since, seconds
            self._proving.add(works.whole)
            _beside(lambda: self._prove(record))

    def _is_to_prove(self, record: Record, seconds: float) -> bool:
        whole, since = record.group.whole, record.waiting_since
        if whole[0] != self._directory.rank or whole in self._proving or not record.waiter:
            return False
        asked = record.asked[1] if record.asked is not None and record.asked[0] == since else 0.0
        return seconds >= max(min(_FIRST_QUESTION, record.timeout / 4), 2 * asked)

    # ------------------------------------------------------------------ questions

    def _answer(self, question: Message) -> Message:
        ranks = tuple(map(int, question["ranks"]))
        if "verdict" in question:
            message, missing = question["verdict"]
            told = Verdict(str(message), tuple(map(int, missing)))
            if ranks not in self._log.verdicts:
                self._log.give_up(ranks, told)
                _beside(lambda: self._act(ranks, told))
        return self._status(ranks, stands="standing" in question).to_message()

    def _status(
        self, ranks: tuple[int, ...], record: Record | None = None, *, stands: bool = False
    ) -> Status:
        waits = {id(each): each for each in list(self._log.waits.values())}
        if record is not None:
            waits[id(record)] = record
        verdict, deciding = self._log.verdicts.get(ranks), ranks in self._deciding
        standing = Standing.of(self._log, ranks) if stands else None
        return Status.of(waits.values(), self._log.activity, verdict, is_deciding=deciding, standing=standing)

    def _ask_all(self, works: GroupWorks, own: Status, question: Message) -> dict[int, Status | Presence]:
        """Ask all ranks of a group; gives what they say by group rank, with what this one says."""
        found = self._directory.ask_all(works.whole, {"ranks": works.whole, **question})
        seen = {
            rank: what if isinstance(what, Presence) else Status.read(what) for rank, what in found.items()
        }
        return seen | {self._rank_in(works): own}

    def _rank_in(self, works: GroupWorks) -> int:
        return works.whole.index(self._directory.rank)

    # ------------------------------------------------------------------ trouble

    def _warn(self, record: Record, seconds: float) -> None:
        works = record.group
        seen = self._ask_all(works, self._status(works.whole, record), {})
        if record.waiting_since is not None or works.outstanding is not None:
            told = _judged(works, seen, self._rank_in(works), seconds).message.partition(". ")[0]
            logger.warning("%s. All ranks give up after %g s", told, record.timeout)

    def _prove(self, record: Record) -> None:
        """Ask whether ranks wait crosswise, and give up if so. See Note [Crosswise waits] in `crosswise`."""
        works, told = record.group, list[Seen]()
        try:
            for pause in (0.0, _BETWEEN_QUESTIONS):
                time.sleep(pause)
                own = self._status(works.whole, stands=True)
                told.append(self._ask_all(works, own, {"standing": True}))
                found = stuck(standings(told[0]), standings(told[-1]))
                if not found:
                    return
            self._decide(record, None, told[-1], judge_crosswise(told[-1], found))
        finally:
            self._proving.discard(works.whole)

    def _decide(
        self, record: Record, seconds: float | None, seen: Seen | None = None, proven: Verdict | None = None
    ) -> Verdict:
        """Find out who is missing, and give up with all other ranks. See Note [Giving up together]."""
        works = record.group
        me = self._rank_in(works)
        self._deciding.add(works.whole)
        try:
            if seen is None:
                seen = self._ask_all(works, self._status(works.whole, record), {})
            found = _verdict_in(seen)
            if found is None and any(_is_deciding(what) for rank, what in seen.items() if rank < me):
                found = self._verdict_within(works, 2 * ANSWER_LIMIT)
            verdict = self._log.give_up(works.whole, found or proven or _judged(works, seen, me, seconds))
        finally:
            self._deciding.discard(works.whole)
        if found is None:
            self._tell(works.whole, verdict, seen)
        self._act(works.whole, verdict)
        return verdict

    def _tell(self, ranks: tuple[int, ...], verdict: Verdict, seen: Seen) -> None:
        """Tell all ranks; those that did not answer before are told beside, as waiting for them takes long.

        A process that is to end waits for all of them.
        """
        question = {"ranks": ranks, "verdict": [verdict.message, verdict.missing]}
        mute = [rank for place, rank in enumerate(ranks) if isinstance(seen[place], Presence)]
        if mute and not self._exits:
            _beside(lambda: self._directory.ask_all(mute, question))
            ranks = tuple(rank for rank in ranks if rank not in mute)
        self._directory.ask_all(ranks, question)

    def _verdict_within(self, works: GroupWorks, limit: float) -> Verdict | None:
        deadline = time.monotonic() + limit
        while works.verdict is None and time.monotonic() < deadline:
            time.sleep(0.01)
        return works.verdict

    def _act(self, ranks: tuple[int, ...], verdict: Verdict) -> None:
        """Carry out a verdict on this process: end it, or make its waits raise."""
        logger.error("%s", verdict.message)
        self._exit_if_asked()
        for works in list(self._log.groups.values()):
            if works.whole == ranks:
                works.cut()

    def _exit_if_asked(self) -> None:
        if self._exits:
            flushing = _beside(_flush)
            flushing.join(ANSWER_LIMIT)  # not longer: a thread that hangs may hold the lock of a stream
            os._exit(EXIT_CODE)

    def explain(self, record: Record, error: RuntimeError) -> Exception | None:
        """Make what a wait raises, see `WorkLog.explain`. May take seconds, and ask all ranks."""
        works = record.group
        began = time.monotonic()
        is_late, is_closed = (any(word in str(error) for word in words) for words in (_LATE, _CLOSED))
        while works.verdict is None and self._directory.is_current():
            if works.whole in self._deciding:
                self._verdict_within(works, 0.1)
                continue
            seen: Seen = self._ask_all(works, self._status(works.whole, record), {})
            mute = [what for what in seen.values() if what in (Presence.SILENT, Presence.UNKNOWN)]
            is_over = time.monotonic() - began > (_LONGEST_END if mute else ANSWER_LIMIT)
            if is_closed and is_over:
                seen = closed(seen)
            is_silent = is_closed and is_over and Presence.SILENT in mute
            if is_late or gone(seen) or is_silent or _verdict_in(seen) is not None:
                return self._decide(record, None, seen).error()
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
    """Judge a wait in a group: first who of the group is missing, then who of the mesh around it."""
    part = {place: what for place, what in seen.items() if works.whole[place] in works.ranks}
    if len(part) < len(seen) and not gone(seen):
        verdict = judge(part, own, seconds)
        if verdict.missing:
            return verdict
    return judge(seen, own, seconds)


def _verdict_in(seen: Seen) -> Verdict | None:
    told = (what.verdict for what in seen.values() if isinstance(what, Status))
    return next((Verdict(*each) for each in told if each is not None), None)


def _is_deciding(what: Status | Presence) -> bool:
    return isinstance(what, Status) and what.is_deciding


def _has_ended(handle: Any) -> bool:  # noqa: ANN401 - of any backend
    """Ask a handle whether its work is over; one that raises has ended too: whoever uses it is told."""
    try:
        return bool(handle.is_completed())
    except RuntimeError:
        return True


def _beside(work: Callable[[], object]) -> threading.Thread:
    """Do something that takes long on a thread of its own: that of the watchdog has to answer meanwhile."""
    thread = threading.Thread(target=work, name="zero_optim diagnosis", daemon=True)
    thread.start()
    return thread


def _flush() -> None:
    """Write out what was printed and logged: a process that is ended at once does not."""
    for stream in (*logging.getLogger().handlers, *logger.handlers, sys.stdout, sys.stderr):
        with suppress(OSError, ValueError, AttributeError):  # closed, or none
            stream.flush()


def _close_in_child() -> None:
    """Let a forked process go without the sockets: else they would outlive the process that listens."""
    for listener in list(_LISTENERS):
        listener.close()


# By the default group, as in `zero_optim.comm.works`.
_WATCHDOGS: WeakKeyDictionary[dist.ProcessGroup, Watchdog] = WeakKeyDictionary()
_LISTENERS: WeakSet[Listener] = WeakSet()
os.register_at_fork(after_in_child=_close_in_child)
