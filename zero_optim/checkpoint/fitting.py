"""Matches a checkpoint to the objects to load into: whether it fits, and which rows of it each rank needs."""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from zero_optim.checkpoint.content import (
    EVERYWHERE,
    EXTRA,
    MODEL,
    OPTIMIZER,
    RANDOM,
    STATE,
    Place,
    model_parts,
    places_of,
)
from zero_optim.checkpoint.objects import Members, Names, Objects, names_of
from zero_optim.checkpoint.reader import CheckpointReader, Rows
from zero_optim.checkpoint.values import Json, entries_in, key_of, tensors_in, unpack
from zero_optim.comm.encoding import Nested
from zero_optim.errors import StateMismatchError
from zero_optim.optimizer import ZeroRedundancyOptimizer
from zero_optim.plan.groups import options_of
from zero_optim.plan.pieces import piece_of
from zero_optim.plan.strides import strides_of_rows

# ---------------------------------------------------------------------- whether it fits


def check_fit(reader: CheckpointReader, objects: Objects) -> list[str]:
    """Return the sections that a load asks for; StateMismatchError names all that does not fit."""
    values = reader.manifest.values
    has = {MODEL: objects.model, OPTIMIZER: objects.optimizer, **objects.others}
    asked = sorted(name for name, value in has.items() if value is not None)
    missing = [name for name in asked if name not in values]
    if missing or EXTRA not in values:
        there = ", ".join(sorted(name for name in values if "/" not in name))
        raise StateMismatchError(
            f"the checkpoint has no {' and no '.join(missing or [EXTRA])}; it has "
            f"{there or 'nothing saved by checkpoint.save'}"
        )
    wrong = _wrong_model(reader, objects) if objects.model is not None else []
    if objects.optimizer is not None:
        wrong += _wrong_optimizer(reader, objects)
    if wrong:
        raise StateMismatchError("the checkpoint does not fit:\n  " + "\n  ".join(dict.fromkeys(wrong)))
    return asked


def _wrong_names(what: str, saved: Iterable[str], present: Iterable[str]) -> list[str]:
    saved, present = dict.fromkeys(saved), dict.fromkeys(present)
    lost = [f"{what} {name} is not in the checkpoint" for name in present if name not in saved]
    return lost + [f"{what} {name} of the checkpoint is not there" for name in saved if name not in present]


def _wrong_model(reader: CheckpointReader, objects: Objects) -> list[str]:
    parts, present = model_parts(reader.manifest.values), objects.model_state()
    wrong = _wrong_names("model entry", parts, present)
    for name in parts.keys() & present.keys():
        kind, body = parts[name]
        if kind == "tensor" and isinstance(present[name], Tensor):
            saved, here = reader.manifest.entries[body[0]].shape, tuple(present[name].shape)
            if saved != here:
                wrong.append(f"{name}: shape {saved} in the checkpoint, {here} here")
    return wrong


def _wrong_optimizer(reader: CheckpointReader, objects: Objects) -> list[str]:
    about, entries = reader.manifest.values[OPTIMIZER], reader.manifest.entries
    names = names_in(objects, reader.manifest.values)
    assert names is not None
    assert objects.optimizer is not None
    if names.named and not about["named"]:
        saved, present = [len(g["names"]) for g in about["groups"]], [len(g) for g in names.groups]
        return [
            f"the checkpoint knows parameters by place and has groups of {saved}, here they have {present}"
        ]
    if about["named"] and not names.named:
        fix = "give the model as well, or build the optimizer from model.named_parameters()"
        return [f"the checkpoint knows parameters by name, and this optimizer knows no names: {fix}"]
    wrong = _wrong_names("parameter", [n for group in about["groups"] for n in group["names"]], names.param)
    shaped = objects.optimizer.core.shaped_entries(names.param.values())
    for name, param in names.param.items():
        shape = tuple(about["params"].get(name, [None, param.shape])[1])
        if shape != tuple(param.shape):
            wrong.append(f"{name}: shape {shape} in the checkpoint, {tuple(param.shape)} here")
        for key in sorted(shaped[param]):
            entry = entries.get(f"{STATE}/{key_of(name, key)}")
            if entry is not None and entry.shape != tuple(param.shape):
                wrong.append(f"{name}: '{key}' has shape {entry.shape}, not {tuple(param.shape)}")
    return wrong


def names_in(objects: Objects, values: Mapping[str, Json]) -> Names | None:
    """Name the optimizer's parameters as the checkpoint does: by place, if it has no names."""
    if objects.optimizer is None:
        return None
    names, saved = names_of(objects.optimizer, objects.model), values[OPTIMIZER]
    sizes = [len(group["names"]) for group in saved["groups"]]
    by_place = names.named and not saved["named"] and sizes == [len(group) for group in names.groups]
    return names.by_place() if by_place else names


# ---------------------------------------------------------------------- what a rank needs


class Read:
    """What this rank has read: tensors, of some only rows, and the values that are put together from them."""

    def __init__(self, reader: CheckpointReader, wanted: Mapping[str, Rows]) -> None:
        self._entries = reader.manifest.entries
        self._tensors = {key: reader.read_tensor(key, rows) for key, rows in wanted.items()}

    def __getitem__(self, key: str) -> Tensor:
        return self._tensors[key]

    def value(self, packed: Json) -> Nested:
        """Put a value together; its tensors have the strides that they were saved with."""
        return unpack(packed, self._strided)

    def _strided(self, key: str, strides: Sequence[int]) -> Tensor:
        tensor, shape = self._tensors[key], self._entries[key].shape
        if tuple(tensor.shape) != shape:
            strides = strides_of_rows(strides, shape[0], tensor.shape)
        return with_strides(tensor, strides)

    def blank(self, key: str) -> Tensor:
        """Allocate what another rank has read."""
        return torch.empty(self._entries[key].shape, dtype=self._entries[key].dtype)


def with_strides(tensor: Tensor, strides: Sequence[int]) -> Tensor:
    """Lay a tensor out with some strides, which are dense; copies only if it is laid out otherwise."""
    if tensor.stride() == tuple(strides) or tensor.numel() == 0:
        return tensor
    return torch.empty_strided(tensor.shape, strides, dtype=tensor.dtype).copy_(tensor)


@dataclass(frozen=True, slots=True, eq=False)
class RankInput:
    """What one rank has read.

    Attributes:
        read: the tensors.
        places: of the model, to load into.
        state: of the parameters that this rank owns, and global entries.
        options: by group of the optimizer.
        sections: other values by section; that of random states is this rank's.
        rest: of the model: extra state of its modules.
    """

    read: Read
    places: list[Place]
    state: dict[Any, Any]
    options: list[dict[str, Any]]
    sections: dict[str, Nested]
    rest: dict[str, Nested]


def read_own(
    reader: CheckpointReader,
    objects: Objects,
    members: Members,
    *,
    random: bool,
    only: Collection[Tensor] | None,
) -> RankInput:
    """Read what this rank needs of a checkpoint that fits.

    With ``random``, this rank's random state too; ``only`` these parameters of the optimizer and their state,
    None for all. ValueError if state that must have a parameter's shape has another one.
    """
    values, optimizer, rank = reader.manifest.values, objects.optimizer, members.group.rank
    places = _places(objects, values, members.group.size)
    packed = {name: values[name] for name in (*objects.others, EXTRA)}
    drawn = values.get(key_of(RANDOM, str(members.everyone.rank)))
    if random and drawn is not None:
        packed[RANDOM] = drawn
    parts = model_parts(values) if objects.model is not None else {}
    rest = {name: part for name, part in parts.items() if part[0] != "tensor"}
    state, groups, names = dict[Tensor, tuple[str, Json]](), [], names_in(objects, values)
    if optimizer is not None and names is not None:
        groups = values[OPTIMIZER]["groups"]
        if EVERYWHERE in values:
            packed[EVERYWHERE] = values[EVERYWHERE]
        owned = set(optimizer.owned_parameters())
        if only is not None:
            owned &= set(only)
            addresses = {param.data_ptr() for param in only}
            places = [p for p in places if not p.stepped or p.tensor.data_ptr() in addresses]
        keys = {param: (name, f"{STATE}/{key_of(name)}") for name, param in names.param.items()}
        state = {p: (name, values[key]) for p, (name, key) in keys.items() if p in owned and key in values}
    every = [*packed.values(), *rest.values(), *(value for _, value in state.values())]
    every += [group["options"] for group in groups]
    rows: dict[str, Rows] = {key: None for value in every for key in tensors_in(value)}
    rows |= _rows_of_state(reader, objects, state, rank)
    read = Read(reader, rows | {p.key: p.rows(rank) for p in places if piece_of(p.pieces, rank)})
    sections = {name: read.value(value) for name, value in packed.items()}
    own: dict[Any, Any] = {param: read.value(value) for param, (_, value) in state.items()}
    options = []
    if optimizer is not None and names is not None:
        _check_shapes(optimizer, {param: name for param, (name, _) in state.items()}, own, rank)
        own |= sections.pop(EVERYWHERE, {})
        saved = [(set(group["names"]), read.value(group["options"])) for group in groups]
        pairs = zip(optimizer.param_groups, names.groups, strict=True)
        options = [_agreed(options_of(group), set(members), saved) for group, members in pairs]
    extra_state = {name: read.value(part) for name, part in rest.items()}
    return RankInput(read, places, own, options, sections, extra_state)


def _rows_of_state(
    reader: CheckpointReader, objects: Objects, state: Mapping[Tensor, tuple[str, Json]], rank: int
) -> dict[str, Rows]:
    """List the entries of cut parameters of which this rank needs some rows."""
    rows: dict[str, Rows] = {}
    cuts = objects.optimizer.core.cut_states() if objects.optimizer is not None else {}
    for param in state.keys() & cuts.keys():
        piece = cuts[param].piece_of(rank)
        for entry, key in entries_in(state[param][1]).items():
            if cuts[param].is_cut(entry, reader.manifest.entries[key].shape):
                rows[key] = piece.start, piece.stop
    return rows


def _check_shapes(
    optimizer: ZeroRedundancyOptimizer, names: Mapping[Tensor, str], state: Mapping[Tensor, Any], rank: int
) -> None:
    cuts, shaped = optimizer.core.cut_states(), optimizer.core.shaped_entries(names)
    for param, name in names.items():
        cut = cuts.get(param)
        shape = tuple(param.shape) if cut is None else cut.shape_of(cut.piece_of(rank))
        for entry, value in state[param].items():
            if entry in shaped[param] and isinstance(value, Tensor) and value.shape != shape:
                raise ValueError(f"{name}: '{entry}' has shape {tuple(value.shape)}, not {shape}")


def _places(objects: Objects, values: Mapping[str, Json], num_ranks: int) -> list[Place]:
    """List the tensors of the model that a checkpoint has values for; tied ones once."""
    parts, present, seen = model_parts(values), dict[str, Tensor](), set()
    for name, tensor in objects.model_state().items():
        if parts[name][0] == "tensor" and isinstance(tensor, Tensor):
            memory = tensor.data_ptr(), tensor.device, tensor.shape, tensor.stride()
            if not tensor.numel() or memory not in seen:
                seen.add(memory)
                present[name] = tensor
    places = places_of(present, objects, num_ranks)
    return [replace(place, key=parts[place.key][1][0]) for place in places]


def _agreed(
    own: dict[str, Any], members: set[str], saved: list[tuple[set[str], dict[str, Any]]]
) -> dict[str, Any]:
    """Return the options on which the saved groups of a group's parameters agree."""
    sources = [options for names, options in saved if names & members] or [
        options for names, options in saved if not names and not members
    ][:1]
    first = sources[0] if sources else {}
    agreed = (k for k in first if all(k in other and _same(other[k], first[k]) for other in sources[1:]))
    return {**own, **{key: first[key] for key in agreed}}


def _same(one: object, other: object) -> bool:
    if isinstance(one, Tensor) or isinstance(other, Tensor):
        return isinstance(one, Tensor) and isinstance(other, Tensor) and torch.equal(one, other)
    return one == other
