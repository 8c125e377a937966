"""Waits of which it is proven that they cannot end: what proves it, and what does not."""

import json
import random
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace

import pytest

from zero_optim.comm.activity import Activity
from zero_optim.comm.crosswise import Course, Held, Standing, Standings, stuck
from zero_optim.comm.diagnosis import Status, judge_crosswise

MAIN, SIDE = 7, 8  # threads


def course(begun: int, *, ranks: Sequence[int] = (0, 1), home: int = MAIN, phase: str = "reduce") -> Course:
    """A group on which a rank has begun some works, all of one phase."""
    places = range(1, begun + 1)
    return Course(
        tuple(ranks), begun, home if begun else 0, False, dict.fromkeys(places, phase), {p: p for p in places}
    )


def waits(group: str, place: int, *, thread: int = MAIN, since: float = 1.0) -> Held:
    return Held(thread, group, place, since, f"work {place} of {group}")


def stands(*held: Held, **courses: Course) -> Standing:
    return Standing(MAIN, held, courses)


def found(ranks: Standings, later: Mapping[int, Standing] | None = None) -> set[int]:
    """The ranks whose waits cannot end."""
    return {each.rank for each in stuck(ranks, ranks if later is None else later)}


CROSSED = {
    0: stands(waits("gathers", 3), gathers=course(3), main=course(5)),
    1: stands(waits("main", 6), gathers=course(2), main=course(6)),
}


def test_two_ranks_that_wait_for_what_the_other_cannot_come_to_are_found() -> None:
    told = stuck(CROSSED, CROSSED)
    assert [(each.rank, each.text, each.lacking) for each in told] == [
        (0, "work 3 of gathers", (1,)),
        (1, "work 6 of main", (0,)),
    ]


def test_ranks_that_wait_for_the_same_are_left_alone_however_long_it_takes() -> None:
    same = stands(waits("main", 6), main=course(6))
    assert not found({0: same, 1: same})


def test_a_rank_that_is_in_no_wait_of_ours_raises_no_alarm() -> None:
    assert not found({**CROSSED, 1: replace(CROSSED[1], held=())})


def test_a_rank_that_does_not_answer_raises_no_alarm() -> None:
    assert not found({0: CROSSED[0]})
    assert not found(CROSSED, {0: CROSSED[0]})
    assert not found({0: CROSSED[0]}, CROSSED)


def test_a_wait_that_is_another_one_in_the_second_answer_proves_nothing() -> None:
    again = {**CROSSED, 1: replace(CROSSED[1], held=(waits("main", 6, since=2.0),))}
    assert not found(CROSSED, again)


def test_what_was_begun_until_the_second_answer_counts() -> None:
    later = {**CROSSED, 1: stands(waits("main", 6), gathers=course(3), main=course(6))}
    assert found(CROSSED) == {0, 1}
    assert not found(CROSSED, later)


def test_the_wait_of_a_thread_that_does_not_begin_the_missing_work_proves_nothing() -> None:
    saver = stands(waits("main", 6, thread=SIDE), gathers=course(2), main=course(6, home=SIDE))
    assert not found({**CROSSED, 1: saver})


def test_a_group_on_which_several_threads_begin_works_proves_nothing() -> None:
    assert not found({**CROSSED, 1: stands(waits("main", 6), gathers=course(2, home=-1), main=course(6))})


def test_a_group_on_which_a_rank_has_begun_nothing_is_the_main_threads_where_it_is_elsewhere() -> None:
    first = {
        0: stands(waits("gathers", 1), gathers=course(1), main=course(5)),
        1: stands(waits("main", 6), gathers=course(0), main=course(6)),
    }
    assert found(first) == {0, 1}
    beside = stands(waits("gathers", 1, thread=SIDE), gathers=course(1, home=SIDE), main=course(5))
    assert not found({**first, 0: beside})


def test_ranks_that_wait_in_a_ring_are_found_and_who_waits_for_them() -> None:
    def at(group: str, **begun: int) -> Standing:
        return stands(
            waits(group, 2), **{name: course(count, ranks=range(4)) for name, count in begun.items()}
        )

    ring = {0: at("a", a=2, b=2, c=1), 1: at("b", a=1, b=2, c=2), 2: at("c", a=2, b=1, c=2)}
    idle = stands(a=course(2, ranks=range(4)), b=course(2, ranks=range(4)), c=course(2, ranks=range(4)))
    assert found({**ring, 3: idle}) == {0, 1, 2}
    assert not found({**ring, 2: replace(ring[2], held=()), 3: idle})
    assert found({**ring, 3: at("a", a=2, b=2, c=2)}) == {0, 1, 2, 3}


def test_of_ranks_that_wait_for_a_slow_one_as_well_only_those_are_found_that_wait_for_each_other() -> None:
    slow = stands(gathers=course(2, ranks=range(3)), main=course(5, ranks=range(3)), own=course(0))
    others = {
        rank: replace(there, courses={name: replace(c, ranks=(0, 1, 2)) for name, c in there.courses.items()})
        for rank, there in CROSSED.items()
    }
    assert found({**others, 2: slow}) == {0, 1}
    assert not found({0: others[0], 2: slow})


def test_different_works_in_one_place_of_a_group_are_found() -> None:
    reducing = course(6)
    agreeing = replace(reducing, phases={**reducing.phases, 6: "agree"}, marks={**reducing.marks, 6: 0})
    crossed = {0: stands(waits("main", 6), main=reducing), 1: stands(waits("main", 6), main=agreeing)}
    assert found(crossed) == {0, 1}
    assert not found({**crossed, 1: stands(main=agreeing)}), "it is in no wait"
    uneven = replace(agreeing, is_uneven=True)
    assert not found({**crossed, 1: stands(waits("main", 6), main=uneven)})
    several = replace(agreeing, home=-1)
    assert not found({**crossed, 1: stands(waits("main", 6), main=several)})
    counted_otherwise = replace(agreeing, marks={**agreeing.marks, 5: 0})
    assert not found({**crossed, 1: stands(waits("main", 6), main=counted_otherwise)})


def test_ranks_whose_works_have_other_names_in_the_same_places_prove_nothing() -> None:
    marks = dict(CROSSED[1].courses["gathers"].marks)
    for place in marks:
        there = replace(CROSSED[1].courses["gathers"], marks={**marks, place: 99})
        other = replace(CROSSED[1], courses={**CROSSED[1].courses, "gathers": there})
        assert not found({**CROSSED, 1: other})


def test_where_a_process_stands_survives_the_way_through_json() -> None:
    told = Status.of([], Activity(), None, is_deciding=False, standing=CROSSED[0])
    assert Status.read(json.loads(json.dumps(told.to_message()))) == told
    assert Standing.read(json.loads(json.dumps(asdict(CROSSED[1])))) == CROSSED[1]


# ---------------------------------------------------------------------- programs


@dataclass
class Program:
    """What a thread of a rank does: blocking collectives, one after the other.

    Attributes:
        groups: of the collectives.
        next: place of the next one in them.
        waits: for the last one that it began.
    """

    groups: list[str]
    next: int = 0
    waits: bool = False


@dataclass
class Run:
    """Ranks with some threads each; each group belongs to one thread, and has some ranks.

    Attributes:
        members: ranks of each group.
        threads: programs, by rank and thread.
        begun: works, by rank and group.
    """

    members: Mapping[str, tuple[int, ...]]
    threads: Mapping[tuple[int, int], Program]
    begun: dict[tuple[int, str], int] = field(default_factory=dict)

    def count(self, rank: int, group: str) -> int:
        return self.begun.get((rank, group), 0)

    def is_over(self, rank: int, group: str) -> bool:
        place = self.count(rank, group)
        return all(self.count(other, group) >= place for other in self.members[group])

    def able(self) -> list[tuple[int, int]]:
        """List the threads that can go on: they compute, or their wait is over."""
        return [
            key
            for key, program in self.threads.items()
            if program.next < len(program.groups)
            and (not program.waits or self.is_over(key[0], program.groups[program.next]))
        ]

    def go_on(self, key: tuple[int, int]) -> None:
        program = self.threads[key]
        group = program.groups[program.next]
        if program.waits:
            program.next, program.waits = program.next + 1, False
        else:
            self.begun[key[0], group] = self.count(key[0], group) + 1
            program.waits = True

    def standings(self, homes: Mapping[str, int]) -> Standings:
        ranks = sorted({rank for rank, _ in self.threads})
        return {
            rank: Standing(
                MAIN,
                tuple(
                    waits(group, self.count(rank, group), thread=thread, since=program.next)
                    for (of, thread), program in self.threads.items()
                    if of == rank and program.waits
                    for group in [program.groups[program.next]]
                ),
                {
                    name: course(self.count(rank, name), ranks=members, home=homes[name])
                    for name, members in self.members.items()
                    if rank in members
                },
            )
            for rank in ranks
        }


HOMES = {"a": MAIN, "b": MAIN, "part": MAIN, "c": SIDE, "d": SIDE}
MEMBERS = {"a": (0, 1, 2), "b": (0, 1, 2), "part": (0, 1), "c": (0, 1, 2), "d": (0, 1, 2)}


def drawn(source: random.Random, rank: int) -> dict[int, list[str]]:
    """Draw a program for each thread of a rank."""
    own = {
        thread: [g for g, home in HOMES.items() if home == thread and rank in MEMBERS[g]] for thread in (7, 8)
    }
    return {thread: source.choices(groups, k=source.randint(2, 8)) for thread, groups in own.items()}


def check_any_programs(seed: int) -> int:
    source = random.Random(seed)
    run = Run(
        MEMBERS,
        {(rank, thread): Program(p) for rank in range(3) for thread, p in drawn(source, rank).items()},
    )
    claims: dict[tuple[int, str], Program] = {}
    while able := run.able():
        for each in stuck(run.standings(HOMES), run.standings(HOMES)):
            claims[each.rank, each.text] = next(
                program
                for (rank, _), program in run.threads.items()
                if rank == each.rank
                and program.waits
                and each.text.endswith(
                    f" {run.count(rank, program.groups[program.next])} of {program.groups[program.next]}"
                )
            )
        run.go_on(source.choice(able))
        assert all(program.waits for program in claims.values()), f"one has ended, seed {seed}"
    return len(claims)


def test_what_is_found_in_any_programs_never_ends() -> None:
    assert sum(map(check_any_programs, range(200))) > 200


def check_same_programs(seed: int) -> None:
    source = random.Random(seed)
    same = drawn(source, 0)
    run = Run(
        MEMBERS,
        {
            (rank, thread): Program([g for g in groups if rank in MEMBERS[g]])
            for rank in range(3)
            for thread, groups in same.items()
        },
    )
    while able := run.able():
        run.go_on(source.choice(able))
        assert not stuck(run.standings(HOMES), run.standings(HOMES))
    assert not any(program.waits for program in run.threads.values())


def test_nothing_is_found_at_any_moment_where_all_ranks_make_the_same_calls() -> None:
    for seed in range(100):
        check_same_programs(seed)


def test_programs_that_cross_are_found() -> None:
    run = Run(
        MEMBERS,
        {(0, MAIN): Program(["a", "b"]), (1, MAIN): Program(["b", "a"]), (2, MAIN): Program(["a", "b"])},
    )
    while able := run.able():
        run.go_on(able[0])
    assert found(run.standings(HOMES)) == {0, 1, 2}


# ---------------------------------------------------------------------- what is said


def status(inside: str, passes: int, steps: int) -> Status:
    return Status(("a work",), ((inside, 1),), {"backward pass": passes, "step()": steps})


@pytest.mark.parametrize(
    ("one", "other", "said"),
    [
        (status("step()", 3, 3), status("backward pass", 4, 2), "rank 1 has left out step() 3; "),
        (
            status("backward pass", 4, 3),
            status("step()", 3, 4),
            "rank 1 has called step() 4 times after 3 backward passes; ",
        ),
        (status("backward pass", 5, 2), status("step()", 4, 2), "no timeout can end; rank 0 waits"),
    ],
)
def test_a_step_that_was_left_out_or_taken_twice_is_named_where_each_pass_has_one(
    one: Status, other: Status, said: str
) -> None:
    told = judge_crosswise({0: one, 1: other}, stuck(CROSSED, CROSSED))
    assert said in told.message, told.message
    assert "rank 0 waits in work 3 of gathers, which rank 1 has not begun; " in told.message
    assert "; times of backward pass: " in told.message
    assert told.missing == ()
