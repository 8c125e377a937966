"""Versions of the mirrors: what the ranks of a new group tell of theirs, and the one that they go back to.

Nothing here communicates. See Note [Versions] in `zero_optim.state.mirror`.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from zero_optim.comm.frames import ranks_text
from zero_optim.errors import LostStateError, RankMismatchError

GO_BACK = "Go back to a checkpoint, with zero_optim.checkpoint.rebind() on all ranks"


@dataclass(frozen=True, slots=True)
class Kept:
    """What a rank of a former group says of its copies when it comes to a new one.

    Attributes:
        token: of the former group, the same on all its ranks.
        rank, size: in that group.
        own: [number, steps, age] of each version of which it has its own copy.
        others: the numbers of those of which it has the copy of the rank before.
        pieces: [parameter, owner, start, stop] of all pieces in the former group.
    """

    token: str
    rank: int
    size: int
    own: list[list[int]]
    others: list[int]
    pieces: list[list[int]]


@dataclass(frozen=True, slots=True)
class Common:
    """The version to go back to, the same on every rank: its number, age, and steps taken until then.

    ``hosts`` is for each rank of the former group the rank of the new one that has its copy, ``first`` a rank
    of the new group that was in the former one.
    """

    number: int
    steps: int
    age: int
    hosts: list[int]
    first: int


def common_version(told: Sequence[Kept | None]) -> Common:
    """Find the newest version that the ranks of a new group have whole; the same on every rank.

    ``told`` is by rank, None of one that is new. Raises RankMismatchError for versions of different runs,
    LostStateError if there is none, naming the ranks that are lost.
    """
    here = {each.rank: rank for rank, each in enumerate(told) if each is not None}
    known = [each for each in told if each is not None]
    if len({each.token for each in known}) > 1 or len(here) < len(known):
        raise RankMismatchError(
            "the ranks keep mirrors of two runs: rebind ranks of one former group, and new ones, whose "
            "optimizer was neither stepped nor loaded"
        )
    size = known[0].size
    buddies = [(rank + 1) % size for rank in range(size)]
    lost = [rank for rank in range(size) if rank not in here]
    gone = [rank for rank in lost if buddies[rank] in lost]
    if gone:
        whose = ", ".join(f"that of rank {rank} was on rank {buddies[rank]}" for rank in gone)
        raise LostStateError(
            f"{ranks_text(lost)} of the former group are lost, and mirrors with them: {whose}. {GO_BACK}"
        )
    by_former = {each.rank: each for each in known}
    numbers = set.intersection(*({number for number, *_ in each.own} for each in known))
    for rank in lost:
        numbers &= set(by_former[buddies[rank]].others)
    if not numbers:
        raise LostStateError(f"the ranks that are left have no version of the mirrors in common. {GO_BACK}")
    versions = [each for rank in known for each in rank.own if each[0] == max(numbers)]
    hosts = [here[rank] if rank in here else here[buddies[rank]] for rank in range(size)]
    _, steps, _ = min(versions, key=lambda each: each[1])
    return Common(max(numbers), steps, max(age for *_, age in versions), hosts, min(here.values()))
