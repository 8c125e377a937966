"""Ranks that wait for each other crosswise: what proves that no timeout can help. Does not communicate.

Note [Crosswise waits]
    Rank 1 leaves out a step. Then rank 0 waits in the gather of that step, and rank 1 in the reduction of its
    next backward pass. Neither can come to what the other waits for. That can be known long before the
    timeout, and without any clock.

    What a rank says. Collectives of all ranks of a group have a *place*: the first one that a rank begins on
    the group has place 1, the next one 2. A rank says in which places its threads wait, and how many works it
    has begun on each group. It is asked twice. A wait counts if it is the same one in both answers, by the
    time at which it began. As all second answers come later than all first ones, there is a moment between
    them at which all these waits were going on at once. And works are counted up only: what a rank had not
    begun in its second answer it had not begun at that moment.

    What is assumed. (1) A collective does not end before all ranks have begun it. (2) A group's next work is
    begun by the thread that has begun all the ones before on this rank (its *home*). If there were none, that
    is the main thread, where the group's home is the main thread on the rank that waits. A group with works
    of several threads proves nothing.

    The proof. A wait for place n of a group is *held up* by a rank that has begun less than n works there. Of
    all waits, take away those that are not held up by a rank whose home thread of that group is itself in
    such a wait, until there is none of them. If waits are left, none of them can end: the first one to end
    would need a work that was begun meanwhile, by (1), on a thread that waits itself, by (2), in a wait that
    would have to end before. Nothing in it depends on how long anything took, so slow ranks raise no alarm: a
    thread that computes is in no wait. Nor does a process that is stopped, as it does not answer, or a rank
    that is in a collective of the user's or of PyTorch's, as that is no wait of ours. A thread beside the
    main one that waits proves nothing about the main one, since threads are told apart.

    Of a broadcast (1) is not quite true: on more than two ranks some may have done their part before others
    begin. The same with a comm hook that needs no other rank. But even then what is found is wrong: a rank
    has begun a work A and not B, another one B and not A, each on the thread that begins all works of both
    groups. So the two make their calls in different orders.

    Same place, other work. Where calls meet on one group, both ranks have begun a work in the same place, and
    each another one: rank 0 reduces gradients where rank 1 agrees on a checkpoint. What backends make of that
    is undefined. It is told if both wait in the group, the phases differ, and the works before are the same.

    What could count differently on ranks is left out: what is sent from one rank to another has no place, and
    a group that was used in PyTorch's ``Join``, which begins works for those that have joined, proves
    nothing. Nor do two ranks whose last works do not have the same names where they have the same places. So
    a defect of the counting makes it silent, not false. Then the timeout decides, as always.
"""

import threading
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from zero_optim.comm.works import GroupWorks, Record, WorkLog

_COMPARED = 64  # last works of a group whose names are compared
_SEVERAL = -1  # in the place of a thread


@dataclass(frozen=True, slots=True)
class Held:
    """A wait of a thread.

    Attributes:
        thread: identity.
        group: names the process group.
        place: of the work among those that all ranks of the group begin.
        since: when it began, on the clock of its process.
        text: names the work.
    """

    thread: int
    group: str
    place: int
    since: float
    text: str


@dataclass(frozen=True, slots=True)
class Course:
    """How far a process has come on a process group.

    Attributes:
        ranks: of the group, by their places in the whole that was asked.
        begun: works that all ranks begin.
        home: the thread that has begun them; 0 if there are none, `_SEVERAL` if several have.
        is_uneven: works may be counted differently on ranks.
        phases: of the last works, by their places.
        marks: of their names, likewise; equal for equal names.
    """

    ranks: tuple[int, ...]
    begun: int
    home: int
    is_uneven: bool
    phases: Mapping[int, str]
    marks: Mapping[int, int]

    def is_as(self, other: "Course", end: int) -> bool:
        """Whether the works before a place are the same, as far as both know them, and each of one thread."""
        if self.is_uneven or other.is_uneven or _SEVERAL in (self.home, other.home):
            return False
        marks = other.marks
        return all(marks.get(place, mark) == mark for place, mark in self.marks.items() if place < end)


@dataclass(frozen=True, slots=True)
class Standing:
    """Where the threads of a process stand.

    Attributes:
        main: identity of the main thread.
        held: the waits of its threads, one for each thread that waits.
        courses: by group.
    """

    main: int
    held: tuple[Held, ...]
    courses: Mapping[str, Course]

    @classmethod
    def of(cls, log: WorkLog, whole: tuple[int, ...]) -> "Standing":
        """Tell where this process stands.

        Args:
            log: its works.
            whole: the ranks that are asked; groups count that are given up with them.
        """
        inner: dict[int, Record] = {}
        for record in list(log.waits.values()):
            thread, since = record.waiter, record.waiting_since
            known = inner.get(thread)
            if since is not None and (known is None or since >= (known.waiting_since or 0.0)):
                inner[thread] = record
        groups = {id(works): works for works in list(log.groups.values()) if works.whole == whole}
        names = {key: name for key, works in groups.items() if (name := works.name)}
        held = [
            Held(thread, names[id(record.group)], record.place, since, record.text)
            for thread, record in inner.items()
            if thread and record.place and id(record.group) in names
            if (since := record.waiting_since) is not None
        ]
        recent: dict[int, list[Record]] = {}
        for record in list(log.ring):
            if record.place:
                recent.setdefault(id(record.group), []).append(record)
        places = {rank: place for place, rank in enumerate(whole)}
        courses = {
            name: _course(groups[key], recent.get(key, [])[-_COMPARED:], places)
            for key, name in names.items()
        }
        return cls(threading.main_thread().ident or 0, tuple(held), courses)

    @classmethod
    def read(cls, message: Any) -> "Standing":  # noqa: ANN401 - plain JSON
        """Read what `dataclasses.asdict` made of it, by way of JSON."""
        return cls(
            int(message["main"]),
            tuple(Held(**held) for held in message["held"]),
            {
                str(name): Course(
                    tuple(course["ranks"]),
                    int(course["begun"]),
                    int(course["home"]),
                    bool(course["is_uneven"]),
                    {int(place): str(phase) for place, phase in course["phases"].items()},
                    {int(place): int(mark) for place, mark in course["marks"].items()},
                )
                for name, course in message["courses"].items()
            },
        )

    def lasting(self, before: "Standing") -> "Standing":
        """Give the same with those waits alone that went on all the time since it stood otherwise."""
        return replace(self, held=tuple(held for held in self.held if held in before.held))


def _course(works: GroupWorks, recent: list[Record], places: Mapping[int, int]) -> Course:
    return Course(
        tuple(places[rank] for rank in works.ranks),
        works.begun,
        works.home,
        works.is_uneven,
        {record.place: record.phase for record in recent},
        {record.place: zlib.crc32(record.text.encode()) for record in recent},
    )


Standings = Mapping[int, Standing]  # by rank; those that did not answer are missing


@dataclass(frozen=True, slots=True)
class Stuck:
    """A wait that cannot end.

    Attributes:
        rank: whose.
        text: the work that it waits for.
        lacking: ranks that have not begun it, and cannot; none if they have begun another one there.
    """

    rank: int
    text: str
    lacking: tuple[int, ...]


def stuck(first: Standings, second: Standings) -> tuple[Stuck, ...]:
    """Find the waits that cannot end; none if nothing is proven. See Note [Crosswise waits].

    Args:
        first: what ranks said.
        second: what they said when all the first answers had come.
    """
    lasting = {rank: there.lasting(first[rank]) for rank, there in second.items() if rank in first}
    waits = {(rank, held.thread): held for rank, there in lasting.items() for held in there.held}
    left = set(waits)
    while left:
        ending = {
            (rank, thread)
            for rank, thread in left
            if not any(home in left for home in _held_up_by(lasting, rank, waits[rank, thread]))
        }
        if not ending:
            break
        left -= ending
    found = [Stuck(rank, waits[rank, thread].text, ()) for rank, thread in sorted(left)]
    if found:
        lacking = {key: _lacking(lasting, key[0], waits[key]) for key in left}
        return tuple(
            replace(each, lacking=lacking[key]) for each, key in zip(found, sorted(left), strict=True)
        )
    return _met_otherwise(lasting)


def _lacking(standings: Standings, rank: int, held: Held) -> tuple[int, ...]:
    ranks = standings[rank].courses[held.group].ranks
    courses = {each: standings[each].courses.get(held.group) for each in ranks if each in standings}
    return tuple(each for each, course in courses.items() if course and course.begun < held.place)


def _held_up_by(standings: Standings, rank: int, held: Held) -> Iterator[tuple[int, int]]:
    """Go through the ranks and threads that hold up a wait."""
    here = standings[rank]
    mine = here.courses[held.group]
    for other in _lacking(standings, rank, held):
        there = standings[other]
        theirs = there.courses[held.group]
        if mine.is_as(theirs, held.place):
            home = theirs.home or (there.main if mine.home == here.main else _SEVERAL)
            yield other, home


def _met_otherwise(standings: Standings) -> tuple[Stuck, ...]:
    """Find ranks that wait in one group, and have begun different works in one place of it."""
    waits: dict[str, list[tuple[int, Held]]] = {}
    for rank, there in sorted(standings.items()):
        for held in there.held:
            waits.setdefault(held.group, []).append((rank, held))
    for group, of_group in waits.items():
        courses = {rank: standings[rank].courses[group] for rank, _ in of_group}
        for rank, held in of_group:
            mine = courses[rank]
            if mine.begun < held.place:
                continue
            for theirs in courses.values():
                phases = {course.phases.get(held.place) for course in (mine, theirs)}
                if len(phases - {None}) == 2 and mine.is_as(theirs, held.place):
                    return tuple(Stuck(each, wait.text, ()) for each, wait in of_group)
    return ()
