"""State on its way to new owners: who holds which rows, who needs them, and the sending.

When an optimizer comes to a new process group, owners change. Each rank tells what it holds. From that and
the new plan, every rank works out the same list of moves. Holders send to owners directly, one holder after
the other, in pieces of bounded size (`comm.wire`); rows of a cut parameter are received where they belong.

Note [Who holds the state]
    A rank whose optimizer was never stepped or loaded holds nothing that counts: it has come new to the
    group. All others must hold state of one age, which is how often it was changed. Together they must hold
    every row once. A row that nobody holds is lost with the rank that owned it; one that two hold comes from
    two runs.

    With the state goes the parameter itself: where a rank died in the middle of a gather, its owner alone is
    sure to have the new value.
"""

import json
from collections.abc import Mapping, Sequence
from copy import copy
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from typing import Any

from torch import Tensor

from zero_optim.comm.agreement import failing_together
from zero_optim.comm.collectives import RankGroup
from zero_optim.comm.encoding import Nested, decode, encode
from zero_optim.comm.frames import ranks_text
from zero_optim.comm.wire import recv_encoded, send_value
from zero_optim.errors import LostStateError, RankMismatchError
from zero_optim.plan.pieces import Piece, Pieces
from zero_optim.state.cut_state import CutState, Joined
from zero_optim.state.versions import GO_BACK, Kept

_VALUES = "values"
_MOST_NAMED = 5  # parameters in a message


@dataclass(frozen=True, slots=True)
class Holding:
    """What a rank says it holds when it comes to a new group.

    Attributes:
        age: how often its state was changed; 0 if it is new.
        is_torn: a step broke off there half way.
        options: a description of each parameter group's options.
        num_everywhere: how many global entries its state has.
        pieces: rows held, as (index of the parameter, start, stop).
        steps: how many steps were taken.
        kept: what it keeps of mirrors; None if nothing.
    """

    age: int
    is_torn: bool
    options: list[str]
    num_everywhere: int
    pieces: list[list[int]]
    steps: int
    kept: Kept | None


def exchange_holdings(group: RankGroup, mine: Holding) -> list[Holding]:
    """Give every rank's holding, by rank; all ranks call."""
    payloads = group.all_gather_bytes(json.dumps(asdict(mine)).encode())
    told = [json.loads(payload) for payload in payloads]
    return [
        Holding(**{**each, "kept": None if each["kept"] is None else Kept(**each["kept"])}) for each in told
    ]


def holders_of(holdings: Sequence[Holding]) -> list[int]:
    """List the ranks whose state counts, see Note [Who holds the state]; none if all are new.

    Raises:
        LostStateError: a step broke off on one of them.
        RankMismatchError: their state is of different ages, or they have other options.
    """
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


def loses_state(holdings: Sequence[Holding]) -> bool:
    """Whether something failed, after which ranks may go back: a step broke off, or a rank is lost.

    A rank that has changed its state but keeps no mirror of it, as after a load, cannot go back.
    """
    if any(each.age > 0 and each.kept is None for each in holdings):
        return False
    known = [each.kept for each in holdings if each.kept is not None]
    is_torn = any(each.is_torn for each in holdings)
    is_missing = any(len(known) < each.size for each in known)
    return is_torn or is_missing or len({each.age for each in holdings if each.age > 0}) > 1


def held_pieces(
    holdings: Sequence[Holding], holders: Sequence[int], num_rows: Sequence[int], names: Sequence[str]
) -> list[Pieces]:
    """Tell for each parameter which rank of the new group holds which rows; none if any row is lost.

    Args:
        holdings: by rank.
        holders: the ranks whose state counts.
        num_rows: of each parameter.
        names: of each parameter, for messages.

    Raises:
        RankMismatchError: two ranks hold the same rows.
    """
    found: list[list[Piece]] = [[] for _ in names]
    for rank in holders:
        for index, start, stop in holdings[rank].pieces:
            found[index].append(Piece(rank, start, stop))
    for index, pieces in enumerate(found):
        pieces.sort(key=lambda piece: piece[1:])
        for one, other in pairwise(pieces):
            if other.start < one.stop or other[1:] == one[1:]:
                raise RankMismatchError(
                    f"ranks {one.owner} and {other.owner} both hold {names[index]}: they come from two runs. "
                    "Rebind ranks of one former group, and new ones, whose optimizer was neither stepped nor "
                    "loaded"
                )
        if sum(piece.stop - piece.start for piece in pieces) < num_rows[index]:
            found[index] = []
    return [tuple(pieces) for pieces in found]


def refuse_lost(names: Sequence[str]) -> None:
    """Raise if there is any state that nobody holds.

    Args:
        names: of the parameters whose it is.

    Raises:
        LostStateError: there is; names the parameters.
    """
    if names:
        more = f" and {len(names) - _MOST_NAMED} more" if len(names) > _MOST_NAMED else ""
        raise LostStateError(
            f"nobody in the new group holds the state of {', '.join(names[:_MOST_NAMED])}{more}: the rank "
            f"that owned it is not a member. {GO_BACK}"
        )


# ---------------------------------------------------------------------- moving


@dataclass(frozen=True, slots=True)
class Move:
    """Rows ``[start, stop)`` of a parameter that go from one rank to another; all rows of a whole one."""

    index: int
    start: int
    stop: int


def moves_between(old: Sequence[Pieces], new: Sequence[Pieces]) -> dict[tuple[int, int], list[Move]]:
    """List what each holder has to send to each owner, by (holder, owner); what stays is in it too.

    Args:
        old: who holds which rows of each parameter.
        new: who is to own them.
    """
    moves: dict[tuple[int, int], list[Move]] = {}
    for index, (held, wanted) in enumerate(zip(old, new, strict=True)):
        for holder, first, last in held:
            for owner, start, stop in wanted:
                move = Move(index, max(first, start), min(last, stop))
                if move.start < move.stop or len(held) == len(wanted) == 1:
                    moves.setdefault((holder, owner), []).append(move)
    return moves


@dataclass(frozen=True, slots=True, eq=False)
class Held:
    """What a holder has, by index of the parameter.

    Attributes:
        state: entries.
        values: the rows of the parameter itself.
        everywhere: global entries.
        is_live: these are the very rows, and no copies.
    """

    state: Mapping[int, Any]
    values: Mapping[int, Tensor]
    everywhere: Mapping[Any, Any] = field(default_factory=dict)
    is_live: bool = True


@dataclass(frozen=True, slots=True)
class Forms:
    """What is known of all parameters, in order.

    Attributes:
        shapes: of each.
        shaped: for each, names of entries that surely have its shape.
    """

    shapes: Sequence[tuple[int, ...]]
    shaped: Sequence[frozenset[str]]


@dataclass(slots=True, eq=False)
class Moved:
    """What a rank owns now, by index: entries, and the parameters' rows that came from other ranks."""

    state: dict[Any, Any]
    values: dict[int, Tensor]


def move_state(
    group: RankGroup,
    old: Sequence[Pieces],
    new: Sequence[Pieces],
    forms: Forms,
    hosts: Sequence[int],
    held: Mapping[int, Held],
) -> Moved:
    """Send the state from its holders to its new owners; all ranks call.

    What a rank holds itself and keeps whole is neither sent nor copied. What is received is in CPU memory.

    Args:
        group: the new ranks.
        old: which holder has which rows of each parameter.
        new: which rank is to own them.
        forms: of the parameters.
        hosts: for each holder the rank that sends for it. A rank may be host to several, each of which may
            have rows of one parameter.
        held: what the holders have whose host this rank is.

    Raises:
        TypeError: on every rank, if some state cannot be sent without pickle, or holds a tensor subclass that
            its new owner has not imported.
        StateMismatchError: on every rank, if the holders of a parameter keep different entries.
    """
    group = group.during("state")
    rank, moves = group.rank, moves_between(old, new)
    split = {index for index, pair in enumerate(zip(old, new, strict=True)) if max(map(len, pair)) > 1}
    with failing_together(group):
        mine = {
            (holder, owner): _message(holder, some, old, split, forms, held[holder])
            for (holder, owner), some in moves.items()
            if hosts[holder] == rank
        }
        stays = {holder: message for (holder, owner), message in mine.items() if owner == rank}
        encoded = {
            pair: encode(message, "optimizer state") for pair, message in mine.items() if pair[1] != rank
        }
    joined = Joined(_parts_here(rank, moves, new, split, forms))
    received = {}
    for holder, host in enumerate(hosts):
        if host == rank:
            for owner in sorted(owner for sender, owner in encoded if sender == holder):
                send_value(group, [owner], *encoded[holder, owner])
        elif (holder, rank) in moves:
            received[holder] = recv_encoded(group, host, place=joined.places_of(holder))
    with failing_together(group):  # only now, as a rank that raises receives nothing more
        parts = {holder: decode(skeleton, iter(tensors)) for holder, (skeleton, tensors) in received.items()}
        for holder, message in stays.items():
            is_live = held[holder].is_live
            cut = {key: value for key, value in message.items() if _index(key) in split}
            whole = {
                key: value for key, value in message.items() if key not in cut and (key >= 0 or not is_live)
            }
            parts[holder] = {**whole, **joined.copied(cut, holder)}
        merged = joined.merge([parts[holder] for holder in sorted(parts)])
    values = {~key: merged.pop(key)[_VALUES] for key in list(merged) if key < 0}
    return Moved(merged, values)


def _index(key: int) -> int:
    """Give the index of the parameter that a key of a message is about: ``~index`` for its values."""
    return key if key >= 0 else ~key


def _message(
    holder: int, moves: Sequence[Move], old: Sequence[Pieces], split: set[int], forms: Forms, held: Held
) -> dict[int, Nested]:
    """Collect what goes to one owner: entries under the parameter's index, its own rows under ``~index``."""
    message: dict[int, Nested] = {}
    for move in moves:
        index = move.index
        entries: Nested = held.state.get(index)
        values = held.values[index]
        if index in split:
            cut = CutState(forms.shapes[index], old[index], forms.shaped[index])
            piece = cut.piece_of(holder)
            rows = slice(move.start - piece.start, move.stop - piece.start)
            picked = cut.cut_entries(entries, piece)
            if picked:
                entries = copy(entries)
                entries.update({name: value.detach()[rows] for name, value in picked.items()})
            values = values[rows]
        if entries is not None:
            message[index] = entries
        message[~index] = {_VALUES: values}
    return message


def _parts_here(
    rank: int,
    moves: Mapping[tuple[int, int], Sequence[Move]],
    new: Sequence[Pieces],
    split: set[int],
    forms: Forms,
) -> dict[int, CutState]:
    """Tell how what this rank will own of split parameters is put together from what the holders send."""
    own = {index: piece for index, pieces in enumerate(new) for piece in pieces if piece.owner == rank}
    found: dict[int, list[Piece]] = {}
    for (holder, owner), some in moves.items():
        for move in some if owner == rank else ():
            if move.index in split:
                at = own[move.index].start
                found.setdefault(move.index, []).append(Piece(holder, move.start - at, move.stop - at))
    parts = {}
    for index, pieces in found.items():
        shape = (own[index].stop - own[index].start, *forms.shapes[index][1:])
        parts[index] = CutState(shape, tuple(pieces), forms.shaped[index])
        parts[~index] = CutState(shape, tuple(pieces), frozenset({_VALUES}))
    return parts
