"""The whole optimizer state: consolidated from its owners, and dealt out to them.

Its keys are those of ``torch.optim``: the index of the parameter, counted over all groups. Global entries of
a class have their own keys.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from zero_optim.comm.agreement import failing_together
from zero_optim.comm.collectives import RankGroup
from zero_optim.comm.encoding import decode, encode, inner_tensors, map_tensors
from zero_optim.comm.wire import copied, copied_to_cpu, recv_encoded, send_value
from zero_optim.errors import NotConsolidatedError, StateMismatchError
from zero_optim.plan.groups import ParamGroup
from zero_optim.plan.pieces import Pieces, piece_of
from zero_optim.probe.shaped import ShapedKeys
from zero_optim.run.progress import progress
from zero_optim.state.cut_state import CutState, Joined

WholeState = dict[Any, Any]


class Snapshot:
    """What this rank knows of the whole state; see Note [Whole state] in `zero_optim.state.dicts`.

    Attributes:
        untouched: nothing has changed the state since the optimizer was built.
        age: how often it was changed since: steps, loads and the like, which all ranks do together.
        steps: calls of step() on this rank, of skipped steps too; after going back as many less.
        is_torn: a step was given up half way, so that some parameters have taken it and others not.
        saved: the token of the last checkpoint that was saved or loaded, and the age of its state.
    """

    def __init__(self, age: int = 0, steps: int = 0) -> None:
        self.untouched = age == 0
        self.age = age
        self.steps = steps
        self.is_torn = False
        self.saved: tuple[str, int] | None = None
        self._whole: WholeState | None = None
        self._was_held = False

    def note_saved(self, token: str, age: int) -> None:
        """Take note that the state of some age is in a checkpoint."""
        self.saved = (token, age)

    def was_saved_as(self, token: str) -> bool:
        """Whether what this rank holds, unless it is new, is what a checkpoint has."""
        return not self.is_torn and (self.age == 0 or self.saved == (token, self.age))

    def hold(self, whole: WholeState) -> None:
        """Keep a whole state that is the current one."""
        self._whole, self._was_held = whole, True

    def changed(self) -> None:
        """Note that the state has changed, and drop the whole state."""
        self.age += 1
        self.drop()

    def drop(self) -> None:
        """Drop the whole state, and be no longer sure of it."""
        self.untouched, self._whole = False, None

    def get(self, rank: int) -> WholeState:
        """Return the whole state, in new containers.

        Raises:
            NotConsolidatedError: it is not on this rank, or no longer the current one.
        """
        if self._whole is None:
            call = f"call consolidate_state_dict(to={rank}) on all ranks"
            if self._was_held:
                raise NotConsolidatedError(
                    "the optimizer was stepped, loaded or given a group after the state was consolidated: "
                    f"{call} again"
                )
            raise NotConsolidatedError(f"rank {rank} holds only its own part of the state: {call} first")
        return {key: dict(value) if isinstance(value, dict) else value for key, value in self._whole.items()}


def check_targets(to: object, num_ranks: int) -> list[int]:
    """Return the group ranks that ``to`` means: one, several, or None for all.

    Raises:
        ValueError: it names no rank, or a rank that is not in the group.
    """
    if to is None:
        return list(range(num_ranks))
    asked: list[Any] = list(to) if isinstance(to, list | tuple | set | frozenset | range) else [to]
    wrong = [rank for rank in asked if type(rank) is not int or rank not in range(num_ranks)]
    if wrong or not asked:
        raise ValueError(
            f"expected to be a group rank from 0 to {num_ranks - 1} (or a list of them, or None for all), "
            f"got {to!r}"
        )
    return sorted(set(asked))


def consolidate(
    group: RankGroup,
    to: Sequence[int],
    owned: Mapping[Any, Any],
    params: Sequence[Tensor],
    cuts: Mapping[int, CutState],
) -> WholeState | None:
    """Bring the whole state to some ranks; all ranks call.

    The owners send directly to the targets, one owner after the other. Other ranks receive nothing; while
    they send, they need extra memory for one piece of 16 MiB. State on an accelerator is sent
    from the CPU where the group has a backend for it; in a group of NCCL alone it goes from device to device,
    and each pair of ranks makes a communicator for that. The rows of a cut parameter's state are received
    where they belong in the whole. After a second, the first target shows a bar on a terminal.

    Args:
        group: the ranks that own the state.
        to: group ranks that receive, in ascending order.
        owned: the state that this rank owns, parameter -> entries, and global entries.
        params: all parameters in the order of their groups.
        cuts: those that are cut, by index.

    Returns:
        On the targets the whole state, in CPU memory that nothing else uses; None on other ranks.

    Raises:
        TypeError: on every rank, if some state cannot be sent without pickle, or holds a tensor subclass that
            a target has not imported, or is no plain tensor although it is cut.
        StateMismatchError: on every rank, if the owners of a cut parameter keep different entries.
    """
    group = group.during("state")
    with failing_together(group):
        mine = by_index(owned, params)
        for index in mine.keys() & cuts.keys():
            cuts[index].cut_entries(mine[index], cuts[index].piece_of(group.rank))
        skeleton, tensors = encode(mine, "optimizer state")
    joined = Joined(cuts)
    received = []
    # All ranks own about the same number of bytes, so this rank's number gives the total.
    total = group.size * sum(tensor.nbytes for tensor in tensors)
    with progress("consolidating", total, shown=group.rank == to[0]) as advance:
        for owner in range(group.size):
            if owner == group.rank:
                send_value(group, [rank for rank in to if rank != owner], skeleton, tensors)
            elif group.rank in to:
                received.append(recv_encoded(group, owner, advance, joined.places_of(owner)))
    with failing_together(group):  # only now, as a rank that raises receives nothing more
        parts = [decode(skeleton, iter(tensors)) for skeleton, tensors in received]
        if group.rank in to:
            parts.insert(group.rank, joined.copied(mine, group.rank))
        merged = joined.merge(parts)
    return in_order(merged) if group.rank in to else None


def by_index(state: Mapping[Any, Any], params: Sequence[Tensor]) -> WholeState:
    """Key a state by parameter index instead of parameter; global entries keep their keys."""
    index_of = {param: index for index, param in enumerate(params)}
    return {index_of[key] if isinstance(key, Tensor) else key: value for key, value in state.items()}


def in_order(state: WholeState) -> WholeState:
    """Sort entries as ``torch.optim`` does: by parameter index, global entries last."""
    numbers = sorted(key for key in state if isinstance(key, int))
    return {key: state[key] for key in [*numbers, *(key for key in state if not isinstance(key, int))]}


def check_fits(
    state_dict: Mapping[str, Any],
    groups: Sequence[ParamGroup],
    names: Sequence[str],
    shaped: Sequence[ShapedKeys],
    cuts: Mapping[int, CutState],
) -> None:
    """Check that a whole state dict fits the parameters.

    Args:
        state_dict: in the format of ``torch.optim``.
        groups: this optimizer's groups.
        names: a name for each parameter.
        shaped: for each group the state entries that must have the parameter's shape.
        cuts: the cut parameters, by index.

    Raises:
        StateMismatchError: with every mismatch, one for each line.
    """
    missing = [key for key in ("state", "param_groups") if key not in state_dict]
    if missing:
        raise StateMismatchError(
            f"expected a state dict with 'state' and 'param_groups', got keys {sorted(state_dict)}"
        )
    saved = [len(group["params"]) for group in state_dict["param_groups"]]
    present = [len(group["params"]) for group in groups]
    if saved != present:
        raise StateMismatchError(
            f"the state dict has groups of {saved} parameters, this optimizer has {present}"
        )
    wrong = _wrong_shapes(state_dict, groups, names, shaped, cuts)
    if wrong:
        raise StateMismatchError("state that does not fit its parameter:\n  " + "\n  ".join(wrong))


def _wrong_shapes(
    state_dict: Mapping[str, Any],
    groups: Sequence[ParamGroup],
    names: Sequence[str],
    shaped: Sequence[ShapedKeys],
    cuts: Mapping[int, CutState],
) -> list[str]:
    params = [(param, shaped[number]) for number, group in enumerate(groups) for param in group["params"]]
    wrong = []
    for index, key in enumerate(saved_keys(state_dict)):
        entry = state_dict["state"].get(key, {})
        param, keys = params[index]
        must: frozenset[str] = frozenset()
        if isinstance(entry, dict):
            must = cuts[index].shaped if index in cuts else keys.of(param.dim())
        for name in sorted(must & entry.keys()):
            got = entry[name]
            if isinstance(got, Tensor) and got.shape != param.shape:
                wrong.append(f"{names[index]}: '{name}' has shape {tuple(got.shape)}")
    return wrong


def saved_keys(state_dict: Mapping[str, Any]) -> list[Any]:
    """List the keys under which a state dict holds its parameters' state, in order."""
    return [key for group in state_dict["param_groups"] for key in group["params"]]


def pick_owned(
    state_dict: Mapping[str, Any],
    params: Sequence[Tensor],
    pieces: Sequence[Pieces],
    cuts: Mapping[int, CutState],
    rank: int,
) -> dict[Any, Any]:
    """Copy from a whole state dict what a rank needs: the state of what it owns, and global entries.

    The caller's tensors are neither kept nor changed.
    """
    mine = _of_rank(state_dict, pieces, cuts, rank)
    by_param = {params[index]: value for index, value in mine["owned"].items()}
    picked: dict[Any, Any] = map_tensors({**by_param, **mine["everywhere"]}, copied)
    return picked


def check_source(state_dict: object, src: int | None, group: RankGroup) -> None:
    """Check which ranks give the dict to load: every rank, or only ``src``.

    Raises:
        ValueError: ``src`` is not a rank, or the wrong rank gives a dict.
    """
    if src is not None and (type(src) is not int or src not in range(group.size)):
        raise ValueError(f"expected src to be a group rank from 0 to {group.size - 1}, or None, got {src!r}")
    if src not in (None, group.rank) and state_dict is not None:
        raise ValueError(f"with src={src} only rank {src} gives a state dict, the others give None")
    if src in (None, group.rank) and state_dict is None:
        raise ValueError("expected a state dict, got None: name the one rank that gives it with src=…")


def deal_out(
    group: RankGroup,
    src: int,
    state_dict: Mapping[str, Any] | None,
    params: Sequence[Tensor],
    pieces: Sequence[Pieces],
    cuts: Mapping[int, CutState],
) -> tuple[dict[Any, Any], list[ParamGroup]]:
    """Send each rank what it owns of a whole state dict that one rank holds; all ranks call.

    A rank receives only what it owns. The caller's tensors are neither kept nor changed.

    Args:
        group: the ranks.
        src: group rank that holds the dict.
        state_dict: on ``src`` in the format of ``torch.optim``, checked; None on other ranks.
        params: all parameters in the order of their groups.
        pieces: which rows of each have which owner.
        cuts: the cut parameters, by index.

    Returns:
        Parameter -> entries for what this rank owns, with global entries; and the saved groups' options.

    Raises:
        TypeError: on every rank, if some state cannot be sent without pickle, or holds a tensor subclass that
            its owner has not imported.
    """
    group = group.during("state")
    with failing_together(group):
        messages, told = [], {}
        if state_dict is not None:
            parts = [_of_rank(state_dict, pieces, cuts, rank) for rank in range(group.size)]
            messages = [encode(part, "the state dict") for part in parts]
            told = map_tensors(parts[src], copied_to_cpu)
    received = []
    if state_dict is None:
        received.append(recv_encoded(group, src))
    else:
        for rank in set(range(group.size)) - {src}:
            send_value(group, [rank], *messages[rank])
    with failing_together(group):  # only now, as a rank that raises leaves the others waiting
        for skeleton, tensors in received:
            told = decode(skeleton, iter(tensors))
    owned = {params[index]: value for index, value in told["owned"].items()}
    return {**owned, **told["everywhere"]}, told["groups"]


def _of_rank(
    state_dict: Mapping[str, Any], pieces: Sequence[Pieces], cuts: Mapping[int, CutState], rank: int
) -> dict[str, Any]:
    """Pick what a rank needs of a whole state dict, not copied: by index what it owns, and what all need."""
    state, keys = state_dict["state"], saved_keys(state_dict)
    owned = {}
    for index, key in enumerate(keys):
        piece = piece_of(pieces[index], rank)
        if piece is not None and key in state:
            owned[index] = cuts[index].rows(state[key], piece) if index in cuts else state[key]
    known = set(keys)
    return {
        "owned": owned,
        "everywhere": {key: value for key, value in state.items() if key not in known},
        "groups": [{k: v for k, v in group.items() if k != "params"} for group in state_dict["param_groups"]],
    }


def nbytes_held(value: object) -> int:
    """Return the bytes of memory of a nested state value, each storage counted once."""
    storages: dict[int, torch.UntypedStorage] = {}
    for tensor in inner_tensors(value):
        storage = tensor.untyped_storage()
        storages[storage.data_ptr()] = storage
    return sum(storage.nbytes() for storage in storages.values())
