"""What the ranks of a new group hold together: their live state, or a version of the mirrors.

Note [Going back to a mirror]
    If the ranks do not hold one whole state, but keep mirrors, they go back to the newest version of these
    that is whole among them, see Note [Versions] in `zero_optim.state.mirror`. Then the holders are the ranks
    of the former group, by their numbers there. The host of a lost one is its buddy. All that a rank gives
    comes from its copies, also for itself, and so do options.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from zero_optim.comm.agreement import failing_together
from zero_optim.comm.collectives import RankGroup
from zero_optim.comm.encoding import decode, encode
from zero_optim.comm.wire import recv_encoded, send_value
from zero_optim.errors import LostStateError, RankMismatchError
from zero_optim.plan.groups import ParamGroup, describe_options, options_of, param_names
from zero_optim.plan.pieces import Piece, Pieces, num_rows
from zero_optim.state.core import Core
from zero_optim.state.moving import (
    Held,
    Holding,
    exchange_holdings,
    held_pieces,
    holders_of,
    loses_state,
)
from zero_optim.state.versions import common_version


@dataclass(frozen=True, slots=True, eq=False)
class Found:
    """What the ranks of a new group hold together.

    Attributes:
        first: a rank that gives what is the same for all.
        age: of the state.
        steps: how many were taken.
        pieces: which holder has which rows of each parameter.
        is_told: ranks are new, or there are global entries: the first one tells the others.
        hosts: the rank of each holder.
        held: what the holders have whose host this rank is.
        copied: what all ranks have, if it comes from a mirror.
    """

    first: int
    age: int
    steps: int
    pieces: list[Pieces]
    is_told: bool
    hosts: Sequence[int]
    held: Mapping[int, Held]
    copied: Mapping[str, Any] | None = None


def find(core: Core, group: RankGroup, *, may_lose: bool) -> Found | None:
    """Find out what the ranks hold; None if all are new. All ranks call."""
    pieces = [core.sharding.piece_here(param) for param in core.params]
    former = [core.sharding.pieces[param] for param in core.params]
    snapshot, held = core.snapshot, core.held()
    mine = Holding(
        snapshot.age,
        snapshot.is_torn,
        describe_options(core.groups),
        len(held.everywhere),
        [[index, piece.start, piece.stop] for index, piece in enumerate(pieces) if piece is not None],
        snapshot.steps,
        None if may_lose else core.mirror.kept(former),
    )
    holdings = exchange_holdings(group, mine)
    if not any(holding.kept for holding in holdings):
        return _found_live(core, group, holdings, held)
    try:
        found = _found_live(core, group, holdings, held)
        if found is None or all(found.pieces) or not loses_state(holdings):
            return found
    except (LostStateError, RankMismatchError):  # the same on every rank
        if not loses_state(holdings):
            raise
    return _found_in_mirrors(core, group, holdings)


def _found_live(core: Core, group: RankGroup, holdings: Sequence[Holding], own: Held) -> Found | None:
    """Go on with what the ranks hold; None if all are new. Does not communicate."""
    holders = holders_of(holdings)
    if not holders:
        return None
    rows = [num_rows(param.shape) for param in core.params]
    held = held_pieces(holdings, holders, rows, param_names(core.groups))
    first = holders[0]
    is_told = len(holders) < group.size or any(holdings[rank].num_everywhere for rank in holders)
    steps = max(holdings[rank].steps for rank in holders)
    return Found(first, holdings[first].age, steps, held, is_told, range(group.size), {group.rank: own})


def _found_in_mirrors(core: Core, group: RankGroup, holdings: Sequence[Holding]) -> Found:
    """Go back, see Note [Going back to a mirror]. Does not communicate."""
    common = common_version([holding.kept for holding in holdings])
    kept = holdings[common.first].kept
    assert kept is not None  # that rank was in the former group
    pieces: list[list[Piece]] = [[] for _ in core.params]
    for index, *piece in kept.pieces:
        pieces[index].append(Piece(*piece))
    values, copied = core.mirror.values_of(common, group.rank)
    held = {former: Held(each["state"], each["values"], is_live=False) for former, each in values.items()}
    every = [tuple(some) for some in pieces]
    return Found(common.first, common.age, common.steps, every, True, common.hosts, held, copied)


def told(core: Core, group: RankGroup, found: Found | None) -> tuple[list[ParamGroup], Mapping[Any, Any]]:
    """Give the groups with the options to go on with, and global entries; all ranks call."""
    if found is None or not found.is_told:
        return core.groups, {}
    is_first = group.rank == found.first
    with failing_together(group):
        message = None
        if is_first:
            options = [options_of(each) for each in core.groups]
            beside = found.copied or {"options": options, "everywhere": core.held().everywhere}
            message = encode(beside, "the options")
    if message is not None:
        others = [rank for rank in range(group.size) if rank != group.rank]
        send_value(group, others, *message)
        skeleton, tensors = message
    else:
        skeleton, tensors = recv_encoded(group, found.first)
    with failing_together(group):
        got = decode(skeleton, iter(tensors))
        is_own = is_first and found.copied is None
        groups = core.groups if is_own else core.with_options(got["options"])
    return groups, got["everywhere"]
