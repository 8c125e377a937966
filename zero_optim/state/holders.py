"""The state that the ranks of a new group hold together: live, or a version of the mirrors.

Note [Who holds the state]
    A rank whose optimizer was never stepped or loaded is new, and its state does not count. All others must
    hold state of one age, and together every row once: a row with two holders comes from two runs.

Note [Going back to a mirror]
    If the ranks hold no whole state, but mirrors, they go back to the newest version that is whole among
    them: Note [Versions] in `zero_optim.state.mirror`. Then the holders are the ranks of the former group, by
    their numbers there; a lost one's host is its buddy. State and options come from copies only.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise

from zero_optim.comm.collectives import RankGroup
from zero_optim.comm.frames import ranks_text
from zero_optim.errors import LostStateError, RankMismatchError
from zero_optim.plan.groups import ParamGroup, param_names
from zero_optim.plan.pieces import Piece, Pieces, num_rows
from zero_optim.state.core import Core
from zero_optim.state.mirror import MirrorReport
from zero_optim.state.moving import Held

GO_BACK = "Go back to a checkpoint, with zero_optim.checkpoint.rebind() on all ranks"
_MOST_NAMED = 5  # parameters in a message


@dataclass(frozen=True, slots=True)
class Holding:
    """A rank's report of its state to a new group; see `Snapshot`.

    ``options`` describe each group's, ``pieces`` are its rows as [parameter, start, stop], ``mirror`` its
    copies.
    """

    age: int
    is_torn: bool
    options: list[str]
    has_everywhere: bool
    pieces: list[list[int]]
    steps: int
    mirror: MirrorReport | None


@dataclass(frozen=True, slots=True, eq=False)
class Holders:
    """The state that the ranks of a new group hold together; ``held`` is this rank's, by holder.

    Attributes:
        first: a rank that has the common part.
        pieces: each parameter's pieces by holder; none if any row is lost.
        hosts: the rank of each holder.
        shares: the first rank sends options and global entries to the others.
        options: of the mirrors, if the ranks go back; else None.
    """

    first: int
    age: int
    steps: int
    pieces: list[Pieces]
    hosts: Sequence[int]
    held: Mapping[int, Held]
    shares: bool
    options: Sequence[ParamGroup] | None = None


def find_holders(core: Core, group: RankGroup, own: Held, *, may_lose: bool) -> Holders | None:
    """Return the holders of the state; None if all ranks are new. All ranks call, with their own.

    LostStateError or RankMismatchError on every rank, unless the ranks hold one state.
    """
    pieces = [core.sharding.piece_here(param) for param in core.params]
    snapshot = core.snapshot
    mine = Holding(
        snapshot.age,
        snapshot.is_torn,
        core.describe_options(),
        bool(own.everywhere),
        [[index, piece.start, piece.stop] for index, piece in enumerate(pieces) if piece is not None],
        snapshot.steps,
        None if may_lose else core.mirror.report(core.piece_list()),
    )
    holdings = [
        Holding(**{**each, "mirror": each["mirror"] and MirrorReport(**each["mirror"])})
        for each in group.all_gather_json(asdict(mine))
    ]
    mirrors = [each.mirror for each in holdings if each.mirror is not None]
    # No rank goes back if one has changed its state without mirroring it, as after a load.
    goes_back = bool(mirrors) and not any(each.age > 0 and each.mirror is None for each in holdings)
    if goes_back:  # only if a step broke off, or a rank is lost
        is_missing = any(len(mirrors) < each.size for each in mirrors)
        ages = {each.age for each in holdings if each.age > 0}
        goes_back = any(each.is_torn for each in holdings) or is_missing or len(ages) > 1
    try:
        live = _live(core, group, holdings, own)
        if live is None or all(live.pieces) or not goes_back:
            return live
    except (LostStateError, RankMismatchError):  # the same on every rank
        if not goes_back:
            raise
    return _in_mirrors(core, group, holdings)


def _live(core: Core, group: RankGroup, holdings: Sequence[Holding], own: Held) -> Holders | None:
    """Return the holders of live state: Note [Who holds the state]; None if all ranks are new."""
    torn = [rank for rank, each in enumerate(holdings) if each.is_torn]
    if torn:
        raise LostStateError(
            f"a step broke off on {ranks_text(torn)}: some parameters there have taken it, others have not. "
            f"{GO_BACK}"
        )
    holders = {rank: each for rank, each in enumerate(holdings) if each.age > 0}
    if not holders:
        return None
    ages: dict[int, list[int]] = {}
    for rank, each in holders.items():
        ages.setdefault(each.age, []).append(rank)
    if len(ages) > 1:
        moments = "; ".join(f"{ranks_text(ranks)} after {age} steps or loads" for age, ranks in ages.items())
        raise RankMismatchError(f"ranks hold state of different moments: {moments}. {GO_BACK}")
    first = min(holders)
    for rank, each in holders.items():
        for one, other in zip(holders[first].options, each.options, strict=True):
            if one != other:
                raise RankMismatchError(
                    f"ranks disagree about the options of the optimizer: rank {first} has {one}; "
                    f"rank {rank} has {other}"
                )
    of_param: list[list[Piece]] = [[] for _ in core.params]
    for rank, each in holders.items():
        for index, *rows in each.pieces:
            of_param[index].append(Piece(rank, *rows))
    pieces: list[Pieces] = []
    for name, param, some in zip(param_names(core.groups), core.params, of_param, strict=True):
        some.sort(key=lambda piece: piece[1:])
        for piece, following in pairwise(some):
            if following.start < piece.stop or following[1:] == piece[1:]:
                raise RankMismatchError(
                    f"ranks {piece.owner} and {following.owner} both hold {name}: they come from two runs. "
                    "Rebind ranks of one former group, and new ones, whose optimizer was neither stepped nor "
                    "loaded"
                )
        is_lost = sum(piece.stop - piece.start for piece in some) < num_rows(param.shape)
        pieces.append(() if is_lost else tuple(some))
    shares = len(holders) < group.size or any(each.has_everywhere for each in holders.values())
    steps = max(each.steps for each in holders.values())
    hosts = range(group.size)
    return Holders(first, holders[first].age, steps, pieces, hosts, {group.rank: own}, shares)


def _in_mirrors(core: Core, group: RankGroup, holdings: Sequence[Holding]) -> Holders:
    """Go back: Note [Going back to a mirror]. Does not communicate; the same error on every rank."""
    known = {rank: each.mirror for rank, each in enumerate(holdings) if each.mirror is not None}
    here = {report.rank: (rank, report) for rank, report in known.items()}
    if len({report.token for report in known.values()}) > 1 or len(here) < len(known):
        raise RankMismatchError(
            "the ranks keep mirrors of two runs: rebind ranks of one former group, and new ones, whose "
            "optimizer was neither stepped nor loaded"
        )
    first = min(known)
    size = known[first].size
    buddies = {rank: (rank + 1) % size for rank in range(size) if rank not in here}  # of the lost ones
    gone = [rank for rank, buddy in buddies.items() if buddy in buddies]
    if gone:
        whose = ", ".join(f"that of rank {rank} was on rank {buddies[rank]}" for rank in gone)
        raise LostStateError(
            f"{ranks_text(list(buddies))} of the former group are lost, and mirrors with them: {whose}. "
            f"{GO_BACK}"
        )
    numbers = set.intersection(*({number for number, *_ in report.own} for report in known.values()))
    numbers.intersection_update(*(here[buddy][1].others for buddy in buddies.values()))
    if not numbers:
        raise LostStateError(f"the ranks that are left have no version of the mirrors in common. {GO_BACK}")
    number = max(numbers)
    versions = [each for report in known.values() for each in report.own if each[0] == number]
    hosts = [here[buddies.get(rank, rank)][0] for rank in range(size)]
    hosted = [former for former, host in enumerate(hosts) if host == group.rank]
    held, options = core.mirror.held(number, hosted)
    pieces: list[list[Piece]] = [[] for _ in core.params]
    for index, *piece in known[first].pieces:
        pieces[index].append(Piece(*piece))
    age, steps = max(age for *_, age in versions), min(steps for _, steps, _ in versions)
    return Holders(first, age, steps, list(map(tuple, pieces)), hosts, held, True, options)


def refuse_lost(names: Sequence[str]) -> None:
    """Raise LostStateError if there are names of lost parameters."""
    if names:
        more = f" and {len(names) - _MOST_NAMED} more" if len(names) > _MOST_NAMED else ""
        raise LostStateError(
            f"nobody in the new group holds the state of {', '.join(names[:_MOST_NAMED])}{more}: the rank "
            f"that owned it is not a member. {GO_BACK}"
        )
