"""The state that the ranks of a new group hold together: live, or a version of the mirrors.

Note [Who holds the state]
    A rank whose optimizer was never stepped or loaded is new, and its state does not count. All others must
    hold state of one age (the number of changes), and together every row once. A row without a holder is lost
    with its owner; a row with two holders comes from two runs.

Note [Going back to a mirror]
    If the ranks hold no whole state, but mirrors, they go back to the newest version that is whole among
    them: Note [Versions] in `zero_optim.state.mirror`. Then the holders are the ranks of the former group, by
    their numbers there; a lost one's host is its buddy. On every rank, state and options come from copies
    only.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise

from zero_optim.comm.collectives import RankGroup
from zero_optim.comm.frames import ranks_text
from zero_optim.errors import LostStateError, RankMismatchError
from zero_optim.plan.groups import ParamGroup, describe_options, param_names
from zero_optim.plan.pieces import Piece, Pieces, num_rows
from zero_optim.state.core import Core
from zero_optim.state.mirror import Kept
from zero_optim.state.moving import Held

GO_BACK = "Go back to a checkpoint, with zero_optim.checkpoint.rebind() on all ranks"
_MOST_NAMED = 5  # parameters in a message


@dataclass(frozen=True, slots=True)
class Holding:
    """A rank's report of its state to a new group.

    Attributes:
        age: how often its state was changed; 0 if it is new.
        is_torn: a step broke off half way.
        options: a description of each parameter group's options.
        has_everywhere: its state has global entries.
        pieces: its rows, as (index of the parameter, start, stop).
        steps: the number of steps.
        kept: its mirrors.
    """

    age: int
    is_torn: bool
    options: list[str]
    has_everywhere: bool
    pieces: list[list[int]]
    steps: int
    kept: Kept | None


@dataclass(frozen=True, slots=True, eq=False)
class Holders:
    """The state that the ranks of a new group hold together.

    Attributes:
        first: a rank that has the common part.
        pieces: each parameter's pieces by holder; none if any row is lost.
        hosts: the rank of each holder.
        held: this rank's state, by holder.
        tells: the first rank sends options and global entries to the others.
        options: of this rank's version of the mirrors, if the ranks go back; None for those of the groups.
    """

    first: int
    age: int
    steps: int
    pieces: list[Pieces]
    hosts: Sequence[int]
    held: Mapping[int, Held]
    tells: bool
    options: Sequence[ParamGroup] | None = None


def find_holders(core: Core, group: RankGroup, *, may_lose: bool) -> Holders | None:
    """Return the holders of the state; None if all ranks are new. All ranks call.

    Raises, on every rank, LostStateError or RankMismatchError unless the ranks hold one state.
    """
    pieces = [core.sharding.piece_here(param) for param in core.params]
    former = [core.sharding.pieces[param] for param in core.params]
    snapshot, own = core.snapshot, core.held()
    mine = Holding(
        snapshot.age,
        snapshot.is_torn,
        describe_options(core.groups),
        bool(own.everywhere),
        [[index, piece.start, piece.stop] for index, piece in enumerate(pieces) if piece is not None],
        snapshot.steps,
        None if may_lose else core.mirror.kept(former),
    )
    told = [json.loads(payload) for payload in group.all_gather_bytes(json.dumps(asdict(mine)).encode())]
    holdings = [
        Holding(**{**each, "kept": None if each["kept"] is None else Kept(**each["kept"])}) for each in told
    ]
    goes_back = any(holding.kept for holding in holdings) and _loses_state(holdings)
    try:
        live = _live(core, group, holdings, own)
        if live is None or all(live.pieces) or not goes_back:
            return live
    except (LostStateError, RankMismatchError):  # the same on every rank
        if not goes_back:
            raise
    return _in_mirrors(core, group, holdings)


def _loses_state(holdings: Sequence[Holding]) -> bool:
    """Whether ranks may go back: a step broke off, or a rank is lost.

    No rank goes back if one has changed its state without mirroring it, as after a load.
    """
    if any(each.age > 0 and each.kept is None for each in holdings):
        return False
    known = [each.kept for each in holdings if each.kept is not None]
    is_torn = any(each.is_torn for each in holdings)
    is_missing = any(len(known) < each.size for each in known)
    return is_torn or is_missing or len({each.age for each in holdings if each.age > 0}) > 1


def _live(core: Core, group: RankGroup, holdings: Sequence[Holding], own: Held) -> Holders | None:
    """Return the holders of live state; None if all ranks are new. Does not communicate."""
    holders = _holders_of_one_state(holdings)
    if not holders:
        return None
    pieces = _held_pieces(core, holdings, holders)
    tells = len(holders) < group.size or any(holdings[rank].has_everywhere for rank in holders)
    steps = max(holdings[rank].steps for rank in holders)
    age = holdings[holders[0]].age
    return Holders(holders[0], age, steps, pieces, range(group.size), {group.rank: own}, tells)


def _holders_of_one_state(holdings: Sequence[Holding]) -> list[int]:
    """List the ranks whose state counts: Note [Who holds the state]; raises unless it is one."""
    torn = [rank for rank, each in enumerate(holdings) if each.is_torn]
    if torn:
        raise LostStateError(
            f"a step broke off on {ranks_text(torn)}: some parameters there have taken it, others have not. "
            f"{GO_BACK}"
        )
    holders = [rank for rank, each in enumerate(holdings) if each.age > 0]
    ages: dict[int, list[int]] = {}
    for rank in holders:
        ages.setdefault(holdings[rank].age, []).append(rank)
    if len(ages) > 1:
        told = "; ".join(f"{ranks_text(ranks)} after {age} steps or loads" for age, ranks in ages.items())
        raise RankMismatchError(f"ranks hold state of different moments: {told}. {GO_BACK}")
    for rank in holders:
        first, options = holdings[holders[0]].options, holdings[rank].options
        if options != first:
            one, other = next((a, b) for a, b in zip(first, options, strict=True) if a != b)
            raise RankMismatchError(
                f"ranks disagree about the options of the optimizer: rank {holders[0]} has {one}; "
                f"rank {rank} has {other}"
            )
    return holders


def _held_pieces(core: Core, holdings: Sequence[Holding], holders: Sequence[int]) -> list[Pieces]:
    """Return each parameter's pieces by rank; none if any row is lost."""
    names, every = param_names(core.groups), []
    held: list[list[Piece]] = [[] for _ in names]
    for rank in holders:
        for index, start, stop in holdings[rank].pieces:
            held[index].append(Piece(rank, start, stop))
    for name, param, pieces in zip(names, core.params, held, strict=True):
        pieces.sort(key=lambda piece: piece[1:])
        for one, other in pairwise(pieces):
            if other.start < one.stop or other[1:] == one[1:]:
                raise RankMismatchError(
                    f"ranks {one.owner} and {other.owner} both hold {name}: they come from two runs. Rebind "
                    "ranks of one former group, and new ones, whose optimizer was neither stepped nor loaded"
                )
        is_lost = sum(piece.stop - piece.start for piece in pieces) < num_rows(param.shape)
        every.append(() if is_lost else tuple(pieces))
    return every


def _in_mirrors(core: Core, group: RankGroup, holdings: Sequence[Holding]) -> Holders:
    """Go back: Note [Going back to a mirror]. Does not communicate; the same error on every rank."""
    here = {each.kept.rank: (rank, each.kept) for rank, each in enumerate(holdings) if each.kept is not None}
    known = [each.kept for each in holdings if each.kept is not None]
    if len({each.token for each in known}) > 1 or len(here) < len(known):
        raise RankMismatchError(
            "the ranks keep mirrors of two runs: rebind ranks of one former group, and new ones, whose "
            "optimizer was neither stepped nor loaded"
        )
    size = known[0].size
    lost = [rank for rank in range(size) if rank not in here]
    buddies = {rank: (rank + 1) % size for rank in lost}
    gone = [rank for rank in lost if buddies[rank] in lost]
    if gone:
        whose = ", ".join(f"that of rank {rank} was on rank {buddies[rank]}" for rank in gone)
        raise LostStateError(
            f"{ranks_text(lost)} of the former group are lost, and mirrors with them: {whose}. {GO_BACK}"
        )
    numbers = set.intersection(*({number for number, *_ in each.own} for each in known))
    numbers.intersection_update(*(here[buddies[rank]][1].others for rank in lost))
    if not numbers:
        raise LostStateError(f"the ranks that are left have no version of the mirrors in common. {GO_BACK}")
    number = max(numbers)
    versions = [each for rank in known for each in rank.own if each[0] == number]
    hosts = [here[buddies.get(rank, rank)][0] for rank in range(size)]
    hosted = [former for former, host in enumerate(hosts) if host == group.rank]
    values, beside = core.mirror.values_of(number, hosted)
    beside = beside or {"options": None, "everywhere": {}}
    held = {
        former: Held(each["state"], each["values"], beside["everywhere"], is_live=False)
        for former, each in values.items()
    }
    first, kept = min(here.values(), key=lambda each: each[0])
    pieces: list[list[Piece]] = [[] for _ in core.params]
    for index, *piece in kept.pieces:
        pieces[index].append(Piece(*piece))
    age, steps = max(age for *_, age in versions), min(steps for _, steps, _ in versions)
    return Holders(first, age, steps, list(map(tuple, pieces)), hosts, held, True, beside["options"])


def refuse_lost(names: Sequence[str]) -> None:
    """Raise LostStateError if there are names of lost parameters."""
    if names:
        more = f" and {len(names) - _MOST_NAMED} more" if len(names) > _MOST_NAMED else ""
        raise LostStateError(
            f"nobody in the new group holds the state of {', '.join(names[:_MOST_NAMED])}{more}: the rank "
            f"that owned it is not a member. {GO_BACK}"
        )
