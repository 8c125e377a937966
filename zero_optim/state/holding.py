"""An optimizer that tells other ranks what it holds, and finds out what they hold together.

Note [Going back to a mirror]
    If the ranks do not hold one whole state, but keep mirrors, they go back to the newest version of these
    that is whole among them, see Note [Versions] in `zero_optim.state.mirror`. Then the holders are the ranks
    of the former group, by their numbers there. The host of a lost one is its buddy. All that a rank gives
    comes from its copies, also for itself, and so do options.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from zero_optim.comm.agreement import failing_together
from zero_optim.comm.collectives import RankGroup
from zero_optim.comm.encoding import decode, encode
from zero_optim.comm.wire import recv_encoded, send_value
from zero_optim.errors import LostStateError, RankMismatchError
from zero_optim.plan.groups import ParamGroup, describe_options, options_of, param_names
from zero_optim.plan.pieces import Piece, Pieces, num_rows
from zero_optim.state.mirroring import MirroredOptimizer
from zero_optim.state.moving import (
    Held,
    Holding,
    exchange_holdings,
    held_pieces,
    holders_of,
    loses_state,
)
from zero_optim.state.versions import common_version
from zero_optim.state.whole import by_index


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


class HoldingOptimizer(MirroredOptimizer):
    """An optimizer that knows of which moment its state is, and what others hold. The subclass steps."""

    @property
    def age(self) -> int:
        """How often the state was changed by steps, loads and the like; 0 if never. Equal on every rank."""
        return self._snapshot.age

    def note_saved(self, token: str, age: int) -> None:
        """Take note that the state of some age is in a checkpoint.

        Args:
            token: of the checkpoint.
            age: of the state that was saved.
        """
        self._snapshot.saved = (token, age)

    def was_saved_as(self, token: str) -> bool:
        """Whether what this rank holds, unless it is new, is what a checkpoint has."""
        snapshot = self._snapshot
        return not snapshot.is_torn and (snapshot.age == 0 or snapshot.saved == (token, snapshot.age))

    # ------------------------------------------------------------------ what ranks hold together

    def _find(self, group: RankGroup, *, may_lose: bool) -> Found | None:
        """Find out what the ranks hold; None if all are new. All ranks call."""
        params = self._params()
        pieces = [self._sharding.piece_here(param) for param in params]
        former = [self._sharding.pieces[param] for param in params]
        mine = Holding(
            self._snapshot.age,
            self._snapshot.is_torn,
            describe_options(self.param_groups),
            sum(not isinstance(key, Tensor) for key in self.owned_state()),
            [[index, piece.start, piece.stop] for index, piece in enumerate(pieces) if piece is not None],
            self.num_steps,
            None if may_lose else self._mirror.kept(former),
        )
        holdings = exchange_holdings(group, mine)
        if not any(holding.kept for holding in holdings):
            return self._found_live(group, holdings)
        try:
            found = self._found_live(group, holdings)
            if found is None or all(found.pieces) or not loses_state(holdings):
                return found
        except (LostStateError, RankMismatchError):  # the same on every rank
            if not loses_state(holdings):
                raise
        return self._found_in_mirrors(group, holdings)

    def _found_live(self, group: RankGroup, holdings: Sequence[Holding]) -> Found | None:
        """Go on with what the ranks hold; None if all are new. Does not communicate."""
        holders = holders_of(holdings)
        if not holders:
            return None
        params = self._params()
        rows = [num_rows(param.shape) for param in params]
        held = held_pieces(holdings, holders, rows, param_names(self.param_groups))
        first = holders[0]
        is_told = len(holders) < group.size or any(holdings[rank].num_everywhere for rank in holders)
        steps = max(holdings[rank].steps for rank in holders)
        own = {group.rank: self._held()}
        return Found(first, holdings[first].age, steps, held, is_told, range(group.size), own)

    def _found_in_mirrors(self, group: RankGroup, holdings: Sequence[Holding]) -> Found:
        """Go back, see Note [Going back to a mirror]. Does not communicate."""
        common = common_version([holding.kept for holding in holdings])
        kept = holdings[common.first].kept
        assert kept is not None  # that rank was in the former group
        pieces: list[list[Piece]] = [[] for _ in self._params()]
        for index, *piece in kept.pieces:
            pieces[index].append(Piece(*piece))
        held, copied = self._kept_by_former(common, group.rank)
        every = [tuple(some) for some in pieces]
        return Found(common.first, common.age, common.steps, every, True, common.hosts, held, copied)

    def _told(self, group: RankGroup, found: Found | None) -> tuple[list[ParamGroup], dict[Any, Any]]:
        """Give the groups with the options to go on with, and global entries; all ranks call."""
        if found is None or not found.is_told:
            return self.param_groups, {}
        is_first = group.rank == found.first
        with failing_together(group):
            message = None
            if is_first:
                state = self.owned_state()
                everywhere = {key: value for key, value in state.items() if not isinstance(key, Tensor)}
                options = [options_of(each) for each in self.param_groups]
                beside = found.copied or {"options": options, "everywhere": everywhere}
                message = encode(beside, "the options")
        if message is not None:
            others = [rank for rank in range(group.size) if rank != group.rank]
            send_value(group, others, *message)
            skeleton, tensors = message
        else:
            skeleton, tensors = recv_encoded(group, found.first)
        with failing_together(group):
            told = decode(skeleton, iter(tensors))
            is_own = is_first and found.copied is None
            groups = self.param_groups if is_own else self._with_options(told["options"])
        return groups, told["everywhere"]

    def _held(self) -> Held:
        params = self._params()
        owned, leaves = self.owned_parameters(), self._owned.leaves
        of_params = {key: value for key, value in self.owned_state().items() if isinstance(key, Tensor)}
        values = by_index({param: leaves.rows(param).detach() for param in owned}, params)
        return Held(by_index(of_params, params), values)
