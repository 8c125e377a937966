"""What a rank reads for the optimizer: the state of what it owns now, and the options of all groups."""

from typing import Any

import torch
from torch import Tensor

from zero_optim.checkpoint.content import EVERYWHERE, OPTIMIZER, STATE
from zero_optim.checkpoint.names import Names, Objects
from zero_optim.checkpoint.reading import Read
from zero_optim.checkpoint.storage import CheckpointReader, Rows
from zero_optim.checkpoint.values import entries_in, key_of, tensors_in
from zero_optim.optimizer import ZeroRedundancyOptimizer
from zero_optim.plan.groups import options_of
from zero_optim.step.averages import EMA
from zero_optim.step.leaves import MASTER


def wanted_state(
    rank: int, reader: CheckpointReader, optimizer: ZeroRedundancyOptimizer, names: Names
) -> dict[str, Rows]:
    """List the tensors of the state that this rank will own, with the rows of each."""
    owned, cuts = set(optimizer.owned_parameters()), optimizer.core.cut_states()
    wanted: dict[str, Rows] = {}
    for name, param in names.param.items():
        packed = reader.manifest.values.get(f"{STATE}/{key_of(name)}")
        if packed is None or param not in owned:
            continue
        wanted.update(dict.fromkeys(tensors_in(packed)))
        if param in cuts:
            piece = cuts[param].piece_of(rank)
            for entry, key in entries_in(packed).items():
                if cuts[param].is_cut(entry, reader.manifest.entries[key].shape):
                    wanted[key] = piece.start, piece.stop
    return wanted


def own_state(rank: int, read: Read, objects: Objects, names: Names | None) -> dict[Any, Any]:
    """Return the state that this rank will own by parameter, and the global entries.

    Raises:
        ValueError: an entry that must have the parameter's shape, or that of its rows, has another one.
    """
    if objects.optimizer is None or names is None:
        return {}
    owned, cuts = set(objects.optimizer.owned_parameters()), objects.optimizer.core.cut_states()
    keys = {f"{STATE}/{key_of(name)}": param for name, param in names.param.items() if param in owned}
    state = {param: read.value(key) for key, param in keys.items() if key in read.values}
    everywhere = read.value(EVERYWHERE) if EVERYWHERE in read.values else {}
    for number, members in enumerate(names.groups):
        for name in members:
            param = names.param.get(name)
            if param is None:
                continue
            must = {MASTER, EMA, *objects.optimizer.core.shaped_entries(param, number)}
            cut = cuts.get(param) if param in owned else None
            shape = tuple(param.shape) if cut is None else cut.shape_of(cut.piece_of(rank))
            for entry, value in state.get(param, {}).items():
                if entry in must and isinstance(value, Tensor) and value.shape != shape:
                    raise ValueError(f"{name}: '{entry}' has shape {tuple(value.shape)}, not {shape}")
    return {**state, **everywhere}


def agreed_options(read: Read, objects: Objects, names: Names | None) -> list[dict[str, Any]]:
    """Find the options to load, for each group of the optimizer."""
    if objects.optimizer is None or names is None:
        return []
    saved = [
        (set(group["names"]), read.packed(group["options"])) for group in read.values[OPTIMIZER]["groups"]
    ]
    pairs = zip(objects.optimizer.param_groups, names.groups, strict=True)
    return [_agreed(options_of(group), set(members), saved) for group, members in pairs]


def _agreed(
    own: dict[str, Any], members: set[str], saved: list[tuple[set[str], dict[str, Any]]]
) -> dict[str, Any]:
    """Return the options on which the saved groups of a group's parameters agree."""
    sources = [options for names, options in saved if names & members] or [
        options for names, options in saved if not names and not members
    ][:1]
    first = sources[0] if sources else {}
    agreed = (
        k for k in first if all(k in options and _same(options[k], first[k]) for options in sources[1:])
    )
    return {**own, **{key: first[key] for key in agreed}}


def _same(one: object, other: object) -> bool:
    if isinstance(one, Tensor) or isinstance(other, Tensor):
        return isinstance(one, Tensor) and isinstance(other, Tensor) and torch.equal(one, other)
    return one == other
