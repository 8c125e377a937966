"""The whole optimizer state: brought together from its owners, and dealt out to them.

Whole state is keyed as ``torch.optim`` keys it: by the index of the parameter, counted through all
groups, with a class's global entries under keys of their own.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from zero_optim.agreement import failing_together
from zero_optim.collectives import RankGroup
from zero_optim.errors import NotConsolidatedError, StateMismatchError
from zero_optim.plan import Group
from zero_optim.traits import ShapedKeys
from zero_optim.wire import copied, encode, map_tensors, recv_value, send_value

WholeState = dict[Any, Any]


class Snapshot:
    """What this rank knows of the whole state; see Note [Whole state] in `zero_optim.optimizer`.

    Attributes:
        untouched: nothing has changed the state since the optimizer was built.
    """

    def __init__(self) -> None:
        self.untouched = True
        self._whole: WholeState | None = None
        self._was_held = False

    def hold(self, whole: WholeState) -> None:
        """Keep a whole state that is the present one."""
        self._whole, self._was_held = whole, True

    def changed(self) -> None:
        """Note that the state is another one now; what was held is let go."""
        self.untouched, self._whole = False, None

    def get(self, rank: int) -> WholeState:
        """Give the whole state, in containers of its own.

        Raises:
            NotConsolidatedError: it is not here, or not the present one any more.
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


def consolidate(
    group: RankGroup, to: int, local_state: Mapping[Any, Any], params: Sequence[Tensor]
) -> WholeState | None:
    """Bring the whole state to one rank; all ranks call.

    Each owner sends straight to ``to``, one after the other; ranks other than ``to`` receive
    nothing and hold one piece of `wire.PIECE_NBYTES` more for the time.

    Args:
        group: the ranks that own the state.
        to: group rank that receives.
        local_state: this rank's part, leaf -> state.
        params: all parameters in the order of their groups.

    Returns:
        On ``to`` the whole state, in CPU memory that nothing else uses; None elsewhere.

    Raises:
        TypeError: on every rank, when some state cannot be sent without pickle.
    """
    with failing_together(group):
        mine = by_index(local_state, params)
        skeleton, tensors = encode(mine, "optimizer state")
    if group.rank != to:
        send_value(group, to, skeleton, tensors)
        return None
    merged: WholeState = {}
    for owner in range(group.size):
        part = map_tensors(mine, _cpu_copy) if owner == to else recv_value(group, owner)
        for key, value in part.items():
            merged.setdefault(key, value)  # global entries: every rank has one, the first counts
    return in_order(merged)


def _cpu_copy(tensor: Tensor) -> Tensor:
    return copied(tensor) if tensor.device.type == "cpu" else tensor.detach().cpu()


def by_index(state: Mapping[Any, Any], params: Sequence[Tensor]) -> WholeState:
    """Key a state by parameter index instead of parameter; global entries keep their keys."""
    index_of = {param: index for index, param in enumerate(params)}
    return {index_of[key] if isinstance(key, Tensor) else key: value for key, value in state.items()}


def in_order(state: WholeState) -> WholeState:
    """Sort entries as ``torch.optim`` has them: by parameter index, global entries last."""
    numbers = sorted(key for key in state if isinstance(key, int))
    return {key: state[key] for key in [*numbers, *(key for key in state if not isinstance(key, int))]}


def check_fits(
    state_dict: Mapping[str, Any],
    groups: Sequence[Group],
    names: Sequence[str],
    shaped: Callable[[int], ShapedKeys],
) -> None:
    """Check a whole state dict against the parameters it is to be loaded for.

    Args:
        state_dict: in the format of ``torch.optim``.
        groups: this optimizer's groups.
        names: a name for each parameter.
        shaped: for a group's index, tells which state of its class must have the parameter's shape.

    Raises:
        StateMismatchError: with every mismatch, one a line.
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
    wrong = _wrong_shapes(state_dict, groups, names, shaped)
    if wrong:
        raise StateMismatchError("state that does not fit its parameter:\n  " + "\n  ".join(wrong))


def _wrong_shapes(
    state_dict: Mapping[str, Any],
    groups: Sequence[Group],
    names: Sequence[str],
    shaped: Callable[[int], ShapedKeys],
) -> list[str]:
    params = [(param, shaped(number)) for number, group in enumerate(groups) for param in group["params"]]
    wrong = []
    for index, key in enumerate(saved_keys(state_dict)):
        entry = state_dict["state"].get(key, {})
        param, keys = params[index]
        must = keys.of(param.dim()) if isinstance(entry, dict) else frozenset()
        for name in sorted(must & entry.keys()):
            got = entry[name]
            if isinstance(got, Tensor) and got.shape != param.shape:
                wrong.append(f"{names[index]}: '{name}' has shape {tuple(got.shape)}")
    return wrong


def saved_keys(state_dict: Mapping[str, Any]) -> list[Any]:
    """List the keys under which a state dict holds its parameters' state, in order."""
    return [key for group in state_dict["param_groups"] for key in group["params"]]


def own_part(
    state_dict: Mapping[str, Any], params: Sequence[Tensor], leaves: Sequence[Tensor]
) -> dict[Any, Any]:
    """Copy out of a whole state dict what this rank needs: its leaves' state and global entries.

    The caller's tensors are neither kept nor changed.
    """
    keys = saved_keys(state_dict)
    owner_of = dict(zip(keys, params, strict=True))
    mine = set(leaves)
    part: dict[Any, Any] = {}
    for key, value in state_dict["state"].items():
        if key not in owner_of:
            part[key] = map_tensors(value, copied)
        elif owner_of[key] in mine:
            part[owner_of[key]] = map_tensors(value, copied)
    return part


def nbytes_held(value: object) -> int:
    """Measure the bytes of memory behind a nested state value, each storage counted once."""
    storages: dict[int, torch.UntypedStorage] = {}
    for tensor in _tensors(value):
        for part in (tensor._indices(), tensor._values()) if tensor.is_sparse else (tensor,):
            storage = part.untyped_storage()
            storages[storage.data_ptr()] = storage
    return sum(storage.nbytes() for storage in storages.values())


def _tensors(value: object) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, Mapping):
        value = list(value.values())
    children = value if isinstance(value, list | tuple) else ()
    return [tensor for child in children for tensor in _tensors(child)]
