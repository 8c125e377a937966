"""What any checkpoint holds, ours or of another library: packed values, and tensors read one by one."""

import os
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from zero_optim.checkpoint.content import EVERYWHERE, EXTRA, MODEL, OPTIMIZER, STATE, RankContent, model_of
from zero_optim.checkpoint.data import CheckpointReader, fill, is_lazy, lazy
from zero_optim.checkpoint.files import open_part
from zero_optim.checkpoint.objects import positional
from zero_optim.checkpoint.values import Json, key_of, unpack
from zero_optim.errors import CheckpointError, StateMismatchError
from zero_optim.plan.groups import options_of
from zero_optim.probe.saved import BESIDE
from zero_optim.state.dicts import with_beside

_ALIASES = {
    "optim": OPTIMIZER, "optimizer_state_dict": OPTIMIZER,
    "model_state_dict": MODEL, "lr_scheduler": "scheduler",
}  # fmt: skip


def of_reader(reader: CheckpointReader) -> RankContent:
    """Take a checkpoint of `save` that is open."""
    tensors = {
        key: lazy(entry.dtype, entry.shape, partial(reader.fill, key, 0))
        for key, entry in reader.manifest.entries.items()
    }
    return RankContent(dict(reader.manifest.values), tensors)


def of_file(path: Path) -> RankContent:
    """Open a file of ``torch.save``; ValueError if it is not a state dict, or reading it would run code."""
    try:
        sections = torch.load(path, mmap=True, weights_only=True, map_location="cpu")
    except Exception as error:  # pickle and torch raise anything for other files
        what = "no file of torch.save that holds tensors and plain values only"
        raise ValueError(f"{path} is {what}: {error}") from error
    return source_of(sections, path)


def source_of(sections: object, origin: Path) -> RankContent:
    """Pack another library's state dict or sections, unknown ones as ``extra``; ValueError if neither."""
    content, parts = RankContent(), _parts(sections)
    if isinstance(parts.get(MODEL), Mapping):
        content.add(MODEL, dict(parts.pop(MODEL)))
    if isinstance(parts.get(OPTIMIZER), Mapping):
        optimizer = _nested(parts[OPTIMIZER])
        if {"state", "param_groups"} <= optimizer.keys():
            del parts[OPTIMIZER]
            _add_optimizer(content, optimizer)
    if not content.values:
        raise ValueError(f"{origin} holds neither an optimizer's state dict nor a model's")
    for name in ("scheduler", "scaler"):
        if parts.get(name) is not None:
            content.add(name, parts.pop(name))
    rest = {name: value for name, value in parts.items() if value is not None}
    content.add(EXTRA, rest[EXTRA] if rest.keys() == {EXTRA} else rest or None)
    return content


def _parts(sections: object) -> dict[str, Any]:
    """Name the sections of a dict as ours are; one that is nested in another alone is taken out."""
    parts: dict[str, Any] = dict(sections) if isinstance(sections, Mapping) else {}
    while len(parts) == 1 and isinstance(inner := next(iter(parts.values())), Mapping):
        if parts.keys() & {MODEL, OPTIMIZER, "scheduler", "scaler", *_ALIASES}:
            break
        parts = dict(inner)
    if {"state", "param_groups"} <= _nested(parts).keys():
        return {OPTIMIZER: parts}
    parts = {_ALIASES.get(name, name): value for name, value in parts.items()}
    if MODEL not in parts:
        weights = {name: value for name, value in parts.items() if isinstance(value, Tensor)}
        parts = {name: value for name, value in parts.items() if name not in weights}
        parts |= {MODEL: weights} if weights else {}
    return parts


def _nested(optimizer: Mapping[Any, Any]) -> Mapping[Any, Any]:
    """Undo ``flatten_optimizer_state_dict`` of PyTorch; parameters with equal options make a group."""
    options = dict[str, dict[str, Any]]()
    for key, value in optimizer.items():
        if isinstance(key, str) and key.startswith("param_groups."):
            name, _, option = key.removeprefix("param_groups.").rpartition(".")
            options.setdefault(name, {})[option] = value
    if not options:
        return optimizer
    state, groups, rest = dict[str, dict[str, Any]](), dict[str, dict[str, Any]](), dict[Any, Any]()
    for name, of_name in options.items():
        groups.setdefault(repr(of_name), {**of_name, "params": []})["params"].append(name)
    for key, value in optimizer.items():
        if not isinstance(key, str) or not key.startswith(("state.", "param_groups.")):
            rest[key] = value
        elif key.startswith("state."):
            parts = key.removeprefix("state.").split(".")
            prefixes = (".".join(parts[:end]) for end in range(len(parts) - 1, 0, -1))
            name = next((prefix for prefix in prefixes if prefix in options), "")
            if not name:
                raise ValueError(f"{key} belongs to no parameter of which there are options")
            state.setdefault(name, {})[key.removeprefix(f"state.{name}.")] = value
    return {**rest, "state": state, "param_groups": list(groups.values())}


def _add_optimizer(content: RankContent, whole: Mapping[Any, Any]) -> None:
    groups, known, state, named = [], dict[Any, str](), whole["state"], True
    for number, group in enumerate(whole["param_groups"]):
        keys, own = group["params"], group.get("param_names")
        if own is None and all(isinstance(key, str) for key in keys):
            own = list(keys)
        if own is None:
            own, named = [positional(number, place) for place in range(len(keys))], False
        known.update(zip(keys, own, strict=True))
        groups.append((own, options_of(group)))
    every = Counter(chain.from_iterable(own for own, _ in groups))
    twice = [name for name, count in every.items() if count > 1]
    if twice:
        raise ValueError(f"several of the optimizer's parameters have the name {twice[0]}")
    packed = content.packed_groups(groups)
    for key, name in known.items():
        if key in state:
            content.add(f"{STATE}/{key_of(name)}", state[key])
    beside = {k: v for k, v in whole.items() if k not in ("state", "param_groups")}
    everywhere = {key: value for key, value in state.items() if key not in known}
    content.add(EVERYWHERE, everywhere | ({BESIDE: beside} if beside else {}))
    content.values[OPTIMIZER] = {"named": named, "groups": packed, "params": {}}


def sections_of(values: Mapping[str, Json], get: Callable[..., Tensor], *, by_name: bool) -> dict[str, Any]:
    """Unpack all sections but random states with the tensors of ``get``; by name it needs names."""
    sections = dict[str, Any]()
    if MODEL in values:
        sections[MODEL] = model_of(values, get)
    if OPTIMIZER in values:
        sections[OPTIMIZER] = state_dict_of(values, get, by_name=by_name)
    for key, value in values.items():
        if key not in (MODEL, OPTIMIZER) and "/" not in key and value != ["plain", None]:
            sections[key] = unpack(value, get)
    return sections


def state_dict_of(
    values: Mapping[str, Json], get: Callable[..., Tensor], *, by_name: bool = False
) -> dict[str, Any]:
    """Unpack the optimizer's state dict."""
    about, state, groups, first = values[OPTIMIZER], dict[Any, Any](), [], 0
    if by_name and not about["named"]:
        raise StateMismatchError(
            "the optimizer's parameters have no names, and this format needs them: save it with its model, "
            "build it from model.named_parameters(), or add 'param_names' to the groups of its state"
        )
    for group in about["groups"]:
        names: list[str] = group["names"]
        keys: list[Any] = names if by_name else list(range(first, first + len(names)))
        first += len(names)
        named = {"param_names": names} if about["named"] and not by_name else {}
        groups.append({**unpack(group["options"], get), **named, "params": keys})
        packed = {key: values.get(f"{STATE}/{key_of(name)}") for key, name in zip(keys, names, strict=True)}
        state |= {key: unpack(part, get) for key, part in packed.items() if part is not None}
    state |= unpack(values[EVERYWHERE], get) if EVERYWHERE in values else {}
    return with_beside({"state": state, "param_groups": groups})


def mapping(source: RankContent, out: Path) -> Callable[[str, Sequence[int]], Tensor]:
    """Return a function that reads tensors, large ones into temporary files next to ``out``, mapped."""

    def get(key: str, strides: Sequence[int]) -> Tensor:
        tensor = source.tensors[key]
        is_all = not is_lazy(tensor) and tensor.untyped_storage().nbytes() == tensor.nbytes
        if is_all and (tensor.stride() == tuple(strides) or not tensor.numel()):
            return tensor  # `torch.load` has mapped it
        memory = _new_memory(tensor.nbytes, out)
        return fill(memory.view(tensor.dtype).as_strided(tensor.shape, strides), tensor)

    return get


def _new_memory(nbytes: int, out: Path) -> Tensor:
    if nbytes < 4096:
        return torch.empty(nbytes, dtype=torch.uint8, device="cpu")
    try:
        path, file = open_part(out)
        try:
            with file:
                os.posix_fallocate(file.fileno(), 0, nbytes)  # a full disk raises here, not at a write
                # This keeps no file open, of which a process may have few.
                return torch.from_file(str(path), shared=True, size=nbytes, dtype=torch.uint8, device="cpu")
        finally:
            path.unlink(missing_ok=True)
    except OSError as error:
        raise CheckpointError(f"cannot write {out}: {error.strerror or error}") from error
