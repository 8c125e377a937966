"""Check that a checkpoint fits the objects to load into: sections, names and shapes. One error names all."""

from collections.abc import Iterable, Mapping

from torch import Tensor

from zero_optim.checkpoint.content import EXTRA, MODEL, OPTIMIZER, STATE
from zero_optim.checkpoint.names import Names, Objects, names_of, positional
from zero_optim.checkpoint.storage import CheckpointReader
from zero_optim.checkpoint.values import Json, key_of
from zero_optim.errors import StateMismatchError


class Content:
    """What a load asks of a checkpoint, checked against what the checkpoint has.

    Raises:
        StateMismatchError: a section is missing or does not fit.
    """

    def __init__(self, reader: CheckpointReader, objects: Objects) -> None:
        values = reader.manifest.values
        has = {MODEL: objects.model, OPTIMIZER: objects.optimizer, **objects.others}
        self.asked = sorted(name for name, value in has.items() if value is not None)
        missing = [name for name in self.asked if name not in values]
        if missing or EXTRA not in values:
            held = (
                ", ".join(sorted(name for name in values if "/" not in name))
                or "nothing saved by checkpoint.save"
            )
            raise StateMismatchError(
                f"the checkpoint has no {' and no '.join(missing or [EXTRA])}; it has {held}"
            )
        wrong = _wrong_model(reader, objects) if objects.model is not None else []
        if objects.optimizer is not None:
            wrong += _wrong_optimizer(reader, objects)
        if wrong:
            raise StateMismatchError("the checkpoint does not fit:\n  " + "\n  ".join(dict.fromkeys(wrong)))


def _wrong_names(what: str, saved: Iterable[str], present: Iterable[str]) -> list[str]:
    saved, present = dict.fromkeys(saved), dict.fromkeys(present)
    lost = [f"{what} {name} is not in the checkpoint" for name in present if name not in saved]
    return lost + [f"{what} {name} of the checkpoint is not there" for name in saved if name not in present]


def model_parts(values: Mapping[str, Json]) -> dict[str, Json]:
    """Return the packed values of the model's state dict, by name; empty without a model."""
    _, pairs = values.get(MODEL, ["dict", []])
    return dict(pairs)


def _wrong_model(reader: CheckpointReader, objects: Objects) -> list[str]:
    parts, present = model_parts(reader.manifest.values), objects.model_state()
    wrong = _wrong_names("model entry", parts, present)
    for name in parts.keys() & present.keys():
        kind, body = parts[name]
        if kind == "tensor" and isinstance(present[name], Tensor):
            entry = reader.manifest.entries[body[0]]
            if entry.shape != tuple(present[name].shape):
                wrong.append(
                    f"{name}: shape {entry.shape} in the checkpoint, {tuple(present[name].shape)} here"
                )
    return wrong


def _wrong_optimizer(reader: CheckpointReader, objects: Objects) -> list[str]:
    values, entries = reader.manifest.values, reader.manifest.entries
    names = names_in(objects, values)
    assert names is not None
    about = values[OPTIMIZER]
    if names.named and not about["named"]:
        saved, present = [len(g["names"]) for g in about["groups"]], [len(g) for g in names.groups]
        return [
            f"the checkpoint knows parameters by place and has groups of {saved}, here they have {present}"
        ]
    if about["named"] and not names.named:
        fix = "give the model as well, or build the optimizer from model.named_parameters()"
        return [f"the checkpoint knows parameters by name, and this optimizer knows no names: {fix}"]
    wrong = _wrong_names("parameter", [n for group in about["groups"] for n in group["names"]], names.param)
    assert objects.optimizer is not None
    cuts = objects.optimizer.core.cut_states()
    for number, group in enumerate(names.groups):
        for name in group:
            param = names.param[name]
            shaped = objects.optimizer.core.shaped_entries(param, number)
            shape = tuple(about["params"].get(name, [None, param.shape])[1])
            if shape != tuple(param.shape):
                wrong.append(f"{name}: shape {shape} in the checkpoint, {tuple(param.shape)} here")
            for key in sorted(cuts[param].shaped if param in cuts else shaped):
                entry = entries.get(f"{STATE}/{key_of(name, key)}")
                if entry is not None and entry.shape != tuple(param.shape):
                    wrong.append(f"{name}: '{key}' has shape {entry.shape}, not {tuple(param.shape)}")
    return wrong


def names_in(objects: Objects, values: Mapping[str, Json]) -> Names | None:
    """Name the optimizer's parameters as the checkpoint does: by place, if it has no names."""
    if objects.optimizer is None:
        return None
    names = names_of(objects.optimizer, objects.model)
    saved = [len(group["names"]) for group in values[OPTIMIZER]["groups"]]
    if not names.named or values[OPTIMIZER]["named"] or saved != [len(group) for group in names.groups]:
        return names
    groups = [[positional(n, place) for place in range(len(group))] for n, group in enumerate(names.groups)]
    params = {
        positional(n, i): names.param[name] for n, g in enumerate(names.groups) for i, name in enumerate(g)
    }
    return Names(groups, False, params)
