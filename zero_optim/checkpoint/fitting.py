"""Whether a checkpoint fits the objects to load into, and which rows of it each rank needs."""

from collections.abc import Iterable, Sequence
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
from zero_optim.checkpoint.data import CheckpointReader, Rows, with_strides
from zero_optim.checkpoint.objects import Members, Names, Objects, names_of
from zero_optim.checkpoint.values import Json, entries_in, key_of, unpack
from zero_optim.comm.encoding import Nested, dtype_named, map_tensors
from zero_optim.errors import StateMismatchError
from zero_optim.optimizer import ZeroRedundancyOptimizer
from zero_optim.plan.groups import names_text, options_of
from zero_optim.plan.strides import strides_of_rows
from zero_optim.probe.comparison import same
from zero_optim.probe.probe import state_entries
from zero_optim.step.averages import EMA
from zero_optim.step.leaves import MASTER

_NOT_OF_A_CLASS = {"step", MASTER, EMA}  # or of too many
Wrong = list[tuple[str, str]]  # what does not fit, and the item

_SHAPES = "shapes in the checkpoint and here"


def check_fit(reader: CheckpointReader, objects: Objects) -> list[str]:
    """Return the sections that a load asks for; StateMismatchError names all that does not fit."""
    values = reader.manifest.values
    has = {MODEL: objects.model, OPTIMIZER: objects.optimizer, **objects.others}
    sections = sorted(name for name, value in has.items() if value is not None)
    missing = [name for name in sections if name not in values]
    if missing or EXTRA not in values:
        there = ", ".join(sorted(name for name in values if "/" not in name))
        raise StateMismatchError(
            f"the checkpoint has no {' and no '.join(missing or [EXTRA])}; it has "
            f"{there or 'nothing saved by checkpoint.save'}"
        )
    wrong = Wrong()
    if objects.model is not None:
        parts, present = model_parts(values), objects.model_state()
        wrong = _wrong_names("model entries", parts, present)
        for name in filter(parts.__contains__, present):
            kind, body = parts[name]
            if kind == "tensor" and isinstance(present[name], Tensor):
                saved, here = reader.manifest.entries[body[0]].shape, tuple(present[name].shape)
                wrong += [(_SHAPES, f"{name} {saved} and {here}")] if saved != here else []
    if objects.optimizer is not None:
        wrong += _wrong_optimizer(reader, objects, objects.optimizer)
    kinds: dict[str, dict[str, None]] = {}
    for kind, item in wrong:
        kinds.setdefault(kind, {})[item] = None
    if wrong:
        lines = [f"{kind} ({len(items)}): {names_text([*items], 5)}" for kind, items in kinds.items()]
        hint = (
            "\nTo load parameters of another shape, as for a larger vocabulary, write weights and state to "
            "files with zero-optim consolidate, change these tensors there, and give them to "
            "load_state_dict()"
        )
        lines[-1] += hint if _SHAPES in kinds else ""
        raise StateMismatchError("the checkpoint does not fit:\n  " + "\n  ".join(lines))
    return sections


def _wrong_names(what: str, saved: Iterable[str], present: Iterable[str]) -> Wrong:
    saved, present = dict.fromkeys(saved), dict.fromkeys(present)
    lost = [(f"{what} that the checkpoint lacks", name) for name in present if name not in saved]
    return lost + [(f"{what} that only the checkpoint has", name) for name in saved if name not in present]


def _wrong_optimizer(reader: CheckpointReader, objects: Objects, optimizer: ZeroRedundancyOptimizer) -> Wrong:
    about, entries = reader.manifest.values[OPTIMIZER], reader.manifest.entries
    names = _names_in(objects, optimizer, about)
    if names.named and not about["named"]:
        saved, present = [len(g["names"]) for g in about["groups"]], [len(g) for g in names.groups]
        return [("groups of another size, where parameters have no names", f"{saved}, here {present}")]
    if about["named"] and not names.named:
        fix = "give the model as well, or build the optimizer from model.named_parameters()"
        return [("names that this optimizer does not know", f"the parameters' ({fix})")]
    wrong = _wrong_names("parameters", [n for group in about["groups"] for n in group["names"]], names.param)
    shaped = optimizer.core.owned.shaped_entries(optimizer.param_groups, names.param.values())
    for name, param in names.param.items():
        shape = tuple(about["params"].get(name, [None, param.shape])[1])
        if shape != tuple(param.shape):
            wrong.append((_SHAPES, f"{name} {shape} and {tuple(param.shape)}"))
        for key in sorted(shaped[param]):
            entry = entries.get(f"{STATE}/{key_of(name, key)}")
            if entry is not None and entry.shape != tuple(param.shape):
                wrong.append(("state of another shape", f"'{key}' of {name} {entry.shape}"))
    return wrong + _wrong_class(reader, optimizer, names)


def _wrong_class(reader: CheckpointReader, optimizer: ZeroRedundancyOptimizer, names: Names) -> Wrong:
    """Tell of a group whose class makes nothing of the saved state, also with the saved options."""
    values, wrong = reader.manifest.values, Wrong()
    saved_groups = [(set(g["names"]), g["options"]) for g in values[OPTIMIZER]["groups"]]
    for number, members in enumerate(names.groups):
        built = optimizer.core.owned.local.of_group(number)
        for name in members:
            packed, num_dims = values.get(f"{STATE}/{key_of(name)}"), names.param[name].dim()
            saved = set() if packed is None else entries_in(packed).keys() - _NOT_OF_A_CLASS
            if not saved or num_dims not in (1, 2):  # with which every class can be tried
                continue
            if saved.isdisjoint(built.state_entries(num_dims)):
                packed_options = next(options for group, options in saved_groups if name in group)
                options = unpack(packed_options, lambda key, _: reader.read_tensor(key))
                options = {**options_of(optimizer.param_groups[number]), **options}
                makes = state_entries(built.spec.subject([options]), num_dims)
                is_known = makes or type(built.optimizer).__module__.startswith("torch.optim.")
                if is_known and saved.isdisjoint(makes):
                    entries = ", ".join(sorted(saved))
                    wrong.append(
                        ("state of another class", f"{name} has {entries}, which {built.spec.name} has not")
                    )
            break  # one parameter of a group tells
    return wrong


def _names_in(objects: Objects, optimizer: ZeroRedundancyOptimizer, about: Json) -> Names:
    """Name the optimizer's parameters as the checkpoint does: by place, if it has no names."""
    names = names_of(optimizer, objects.model)
    sizes = [len(group["names"]) for group in about["groups"]]
    by_place = names.named and not about["named"] and sizes == [len(group) for group in names.groups]
    return names_of(optimizer, by_place=True) if by_place else names


class RankInput:
    """What one rank has read of a checkpoint that fits: model, its extra state, optimizer, other sections."""

    def __init__(self, reader: CheckpointReader, objects: Objects, members: Members, random: bool) -> None:
        values = reader.manifest.values
        self._reader = reader
        self._rows: dict[str, Rows] = {}  # of the tensors of which this rank needs some
        self._tensors: dict[str, Tensor] = {}
        self.state: dict[Any, Any] = {}
        self.options: list[dict[str, Any]] = []
        self.places = self._places(objects, members)
        if objects.optimizer is not None:
            self._read_optimizer(objects, objects.optimizer, members.group.rank)
        sections = {name: values[name] for name in (*objects.others, EXTRA)}
        drawn = values.get(key_of(RANDOM, str(members.everyone.rank)))
        if random and drawn is not None:
            sections[RANDOM] = drawn
        self.sections = {name: self.value(value) for name, value in sections.items()}
        parts = model_parts(values) if objects.model is not None else {}
        self.rest = {name: self.value(part) for name, part in parts.items() if part[0] != "tensor"}
        for place in self.places:
            if place.memory is not None:
                self._rows[place.key] = place.rows
                self.tensor(place.key)

    def tensor(self, key: str, *, is_read: bool = True) -> Tensor:
        """Return what this rank needs of a tensor, read once; or memory for what another rank has read."""
        if not is_read:
            entry = self._reader.manifest.entries[key]
            return torch.empty(entry.shape, dtype=entry.dtype, device="cpu")
        if key not in self._tensors:
            self._tensors[key] = self._reader.read_tensor(key, self._rows.get(key))
        return self._tensors[key]

    def value(self, packed: Json) -> Nested:
        """Put a value together; its tensors have the strides that they were saved with."""
        return unpack(packed, self._strided)

    def _strided(self, key: str, strides: Sequence[int]) -> Tensor:
        tensor, shape = self.tensor(key), self._reader.manifest.entries[key].shape
        if tuple(tensor.shape) != shape:
            strides = strides_of_rows(strides, shape[0], tensor.shape)
        return with_strides(tensor, strides)

    def _places(self, objects: Objects, members: Members) -> list[Place]:
        """List the tensors of the model that a checkpoint has values for; tied ones once."""
        parts, present, seen = model_parts(self._reader.manifest.values), dict[str, Tensor](), set()
        for name, tensor in objects.model_state().items():
            if parts[name][0] == "tensor" and isinstance(tensor, Tensor):
                memory = tensor.data_ptr(), tensor.device, tensor.shape, tensor.stride()
                if not tensor.numel() or memory not in seen:
                    seen.add(memory)
                    present[name] = tensor
        places = places_of(present, objects, members.group)
        return [place._replace(key=parts[place.key][1][0]) for place in places]

    def _read_optimizer(self, objects: Objects, optimizer: ZeroRedundancyOptimizer, rank: int) -> None:
        values, entries = self._reader.manifest.values, self._reader.manifest.entries
        names = _names_in(objects, optimizer, values[OPTIMIZER])
        owned = set(optimizer.owned_parameters())
        cuts = optimizer.core.cut_states()
        shaped = optimizer.core.owned.shaped_entries(optimizer.param_groups, owned)
        for name, param in names.param.items():
            packed = values.get(f"{STATE}/{key_of(name)}")
            if packed is None or param not in owned:
                continue
            cut, shape = cuts.get(param), tuple(param.shape)
            if cut is not None:
                piece = cut.piece_of(rank)
                shape = cut.shape_of(piece)
                for entry, key in entries_in(packed).items():
                    if cut.is_cut(entry, entries[key].shape):
                        self._rows[key] = piece.start, piece.stop
            state = self.value(packed)
            about = values[OPTIMIZER]["params"].get(name)
            saved = None if about is None else dtype_named(about[0])
            if MASTER in state:
                saved = getattr(state[MASTER], "dtype", None)  # in which the parameter was stepped
            self.state[param] = state = _cast(state, saved, optimizer.core.owned.leaves.stepped_dtype(param))
            for entry, value in state.items():
                if entry in shaped[param] and isinstance(value, Tensor) and value.shape != shape:
                    raise ValueError(f"{name}: '{entry}' has shape {tuple(value.shape)}, not {shape}")
        if EVERYWHERE in values:
            self.state |= self.value(values[EVERYWHERE])
        groups = [(set(g["names"]), self.value(g["options"])) for g in values[OPTIMIZER]["groups"]]
        for group, members in zip(optimizer.param_groups, names.groups, strict=True):
            sources = [options for saved_names, options in groups if not saved_names.isdisjoint(members)]
            if not members:
                sources = [options for saved_names, options in groups if not saved_names][:1]
            first, *others = sources or [{}]
            agreed = (k for k in first if all(k in other and same(other[k], first[k]) for other in others))
            self.options.append({**options_of(group), **{key: first[key] for key in agreed}})


def _cast(state: dict[str, Any], saved: torch.dtype | None, wanted: torch.dtype) -> dict[str, Any]:
    """Cast tensors of the dtype that was stepped to the one that is, as ``load_state_dict`` does."""
    if saved in (None, wanted) or not wanted.is_floating_point:
        return state
    kept = {key: value for key, value in state.items() if key in _NOT_OF_A_CLASS}
    return {**map_tensors(state, lambda t: t.to(wanted) if t.dtype == saved else t), **kept}
