"""The tree along which ranks ask each other, and short forms of what they say. No communication.

Note [Asked in a tree]
    A rank that asks all others cuts their places in the group into `FAN` ranges, and asks the first place of
    each to answer for its range; that one does the same with the rest. So no rank asks more than `FAN` others
    at a time, and 16,384 ranks are three levels. The range of a place that does not answer is cut by whoever
    asked. Equal answers travel once. Complaints go up the tree of place 0.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

FAN = 32
Message = dict[str, Any]  # plain JSON
Range = tuple[int, int]  # first place, and the place behind the last


def cut(start: int, stop: int, of: int | None = None) -> list[Range]:
    """Cut a range into at most `FAN` ranges; ``of``: the places that several such ranges have."""
    size = max(1, -(-(stop - start if of is None else of) // FAN))
    return [(first, min(first + size, stop)) for first in range(start, stop, size)]


def above(place: int, size: int) -> list[int]:
    """Return the places that answer for ranges with a place in a group of some size, nearest first."""
    places, start, stop = list[int](), 0, size
    while start != place:
        places.insert(0, start)
        start, stop = next(each for each in cut(start + 1, stop) if place < each[1])
    return places


def to_runs(numbers: Iterable[int]) -> list[Any]:
    """Return ascending numbers as runs: first, last and step, or a number alone."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and (run := runs[-1]) and number > run[1] and run[2] in (0, number - run[1]):
            run[1:] = number, number - run[1]
        else:
            runs.append([number, number, 0])
    return [run if run[2] else run[0] for run in runs]


def from_runs(runs: Iterable[Any]) -> tuple[int, ...]:
    """Return the numbers of `to_runs`."""
    numbers: list[int] = []
    for run in runs:
        first, last, step = run if isinstance(run, Sequence) else (run, run, 1)
        numbers += range(int(first), int(last) + 1, int(step))
    return tuple(numbers)


def to_groups(answers: Mapping[int, Message | str]) -> list[list[Any]]:
    """Return equal answers once, with the places as runs; of ``stuck`` and ``ago`` the least."""
    groups: dict[str, tuple[Message | str, list[int]]] = {}
    for place, answer in sorted(answers.items()):
        same = answer if isinstance(answer, str) else {**answer, "stuck": 0, "ago": 0}
        first, places = groups.setdefault(json.dumps(same, sort_keys=True), (answer, []))
        places.append(place)
        if isinstance(first, dict) and isinstance(answer, dict):
            first |= {name: min(first[name], answer[name]) for name in ("stuck", "ago")}
    return [[to_runs(places), answer] for answer, places in groups.values()]
