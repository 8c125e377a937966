"""Checkpoints without a cluster: in one process, and never more than one tensor in memory.

Tensors are mapped from files: the system reads their pages when they are used, and may drop them.
"""

import math
import re
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from datetime import datetime, timezone
from io import BufferedRandom, FileIO
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import unquote

import torch
from torch import Tensor

from zero_optim.checkpoint.content import (
    EVERYWHERE,
    EXTRA,
    MODEL,
    OPTIMIZER,
    RANDOM,
    STATE,
    RankContent,
    model_parts,
)
from zero_optim.checkpoint.data import (
    DTYPES,
    Box,
    CheckpointReader,
    Written,
    box_of,
    bytes_of,
    lay_out,
    map_file,
    tensor_in,
    with_strides,
    write_tensors,
)
from zero_optim.checkpoint.files import FolderLock, open_part, remove_stale_parts, replacing, write_all
from zero_optim.checkpoint.folder import complete, discard, new_token, own_folder
from zero_optim.checkpoint.manifest import DataFile, Manifest, blamed_on, parse
from zero_optim.checkpoint.objects import positional
from zero_optim.checkpoint.values import Json, key_of, tensors_in, unpack
from zero_optim.comm.wire import memory_of
from zero_optim.errors import CheckpointError, StateMismatchError
from zero_optim.plan.groups import PARAM_KEYS
from zero_optim.plan.partition import assign_owners
from zero_optim.run.progress import progress
from zero_optim.state.dicts import with_beside


def _check_output(source: Path, out: Path) -> None:
    """Refuse an output that is the source, or is in it, also through links."""
    if not source.exists():
        return  # reading it raises the error
    for place in {out.resolve(), out.parent.resolve() / out.name}:
        for folder in (place, *place.parents):
            if folder.exists() and folder.samefile(source):
                what = "the source itself" if folder == place else f"inside the source {source}"
                raise ValueError(f"{out} is {what}, which it would damage: name another place")


# ---------------------------------------------------------------------- to one file


def consolidate(source: Path, out: Path, *, weights: bool = False) -> None:
    """Write the optimizer's whole state, in the format of ``torch.optim``, or the weights, to one file.

    ``out`` ends in ``.pt`` for ``torch.load``, in ``.safetensors`` for weights; a link is replaced.
    CheckpointError if the checkpoint is damaged or ``out`` cannot be written, StateMismatchError if it has no
    optimizer or model, ValueError if ``out`` is in the checkpoint or is no regular file.
    """
    _check_output(source, out)
    if (out.is_symlink() or out.exists()) and not out.is_file():
        raise ValueError(f"{out} is no regular file: name one that may be made or replaced")
    reader = CheckpointReader(source.absolute())
    wanted = MODEL if weights or out.suffix == ".safetensors" else OPTIMIZER
    values, entries = reader.manifest.values, reader.manifest.entries
    if wanted not in values:
        raise StateMismatchError(f"{source} holds no {wanted}")
    total = sum(entry.nbytes for key, entry in entries.items() if key.startswith(wanted + "/"))
    with progress("consolidating", total) as advance, blamed_on(source):
        try:
            remove_stale_parts(out)
            with replacing(out) as file:
                if out.suffix == ".safetensors":
                    _write_safetensors(file, reader, advance)
                else:
                    get = _mapped_tensors(reader, out, advance)
                    if wanted == MODEL:
                        whole = {name: unpack(part, get) for name, part in model_parts(values).items()}
                    else:
                        whole = _state_dict(values, get)
                    buffered = BufferedRandom(file)  # a write writes everything
                    torch.save(whole, buffered)
                    buffered.detach()
        except OSError as error:
            raise CheckpointError(f"cannot write {out}: {error.strerror or error}") from error


def _state_dict(values: Mapping[str, Json], get: Callable[..., Tensor]) -> dict[str, Any]:
    about, state, groups, names = values[OPTIMIZER], dict[Any, Any](), [], list[str]()
    for group in about["groups"]:
        members = range(len(names), len(names) + len(group["names"]))
        names += group["names"]
        named = {"param_names": group["names"]} if about["named"] else {}
        groups.append({**unpack(group["options"], get), **named, "params": list(members)})
        packed = {index: values.get(f"{STATE}/{key_of(names[index])}") for index in members}
        state |= {index: unpack(part, get) for index, part in packed.items() if part is not None}
    state |= unpack(values[EVERYWHERE], get) if EVERYWHERE in values else {}
    return with_beside({"state": state, "param_groups": groups})


def _mapped_tensors(
    reader: CheckpointReader, out: Path, advance: Callable[[int], object]
) -> Callable[[str, Sequence[int]], Tensor]:
    """Return a function that maps tensors; those with other strides from a temporary file next to ``out``."""

    def mapped(key: str, strides: Sequence[int]) -> Tensor:
        tensor = reader.map_tensor(key)
        advance(tensor.nbytes)
        if tensor.stride() == tuple(strides) or not tensor.numel():
            return tensor
        tensor = with_strides(tensor, strides)
        path, file = open_part(out)
        try:
            with file:
                run: Any = memory_of(tensor).numpy()
                write_all(file, memoryview(run))
            return tensor_in(map_file(path, tensor.nbytes), tensor.dtype, tensor.shape, tensor.stride())
        finally:
            path.unlink(missing_ok=True)

    return mapped


def _write_safetensors(file: FileIO, reader: CheckpointReader, advance: Callable[[int], object]) -> None:
    keys, entries = dict[str, str](), reader.manifest.entries
    for name, (kind, body) in model_parts(reader.manifest.values).items():
        if kind in ("sparse", "subclass", "wrapper"):
            raise CheckpointError(f"{name} is no plain tensor, as safetensors needs them: write a .pt file")
        if kind == "tensor":  # other values are extra state of a module
            keys[name] = body[0]
            if (dtype := entries[body[0]].dtype) not in DTYPES:
                raise CheckpointError(
                    f"{name} is of {dtype}, for which safetensors has no name: write a .pt file"
                )
    boxes = [box_of(name, entries[key].dtype, entries[key].shape) for name, key in keys.items()]
    head, placed = lay_out(boxes)
    write_all(file, memoryview(head))
    for box, _ in placed:
        write_all(file, bytes_of(reader.read_tensor(keys[box.key])))
        advance(box.nbytes)


# ---------------------------------------------------------------------- to another number of ranks


def reshard(source: Path, out: Path, world_size: int) -> None:
    """Write a checkpoint as that many ranks without cuts would have written it.

    The source is a checkpoint, or a file of ``torch.save`` with a state dict of an optimizer, of a model, or
    of both under "optimizer" and "model". CheckpointError if it is incomplete or damaged, or ``out`` cannot
    be written; ValueError if ``world_size`` is below 1, the file is no state dict, or ``out`` is refused.
    """
    if world_size < 1:
        raise ValueError(f"expected a world size of at least 1, got {world_size}")
    own_folder(out)
    _check_output(source, out)
    content = _from_file(source) if source.is_file() else _from_checkpoint(source)
    with blamed_on(source):
        owner_of = _owners(content, world_size)
    try:
        with closing(FolderLock(out)) as lock:
            files, written = _write(content, owner_of, out)
            complete(out, world_size, files, written, content.values, {}, alone=lock.keeps_out)
    except OSError as error:
        raise CheckpointError(f"cannot write {out}: {error.strerror or error}") from error


class _Source(NamedTuple):
    """What a checkpoint is made of: packed values and whole tensors by key, and how a tensor is read."""

    values: Mapping[str, Json]
    boxes: Mapping[str, Box]
    read: Callable[[str], Tensor]


def _from_checkpoint(folder: Path) -> _Source:
    reader = CheckpointReader(folder.absolute())
    if OPTIMIZER not in reader.manifest.values and MODEL not in reader.manifest.values:
        raise StateMismatchError(
            f"{folder} was written by dcp.save: only what checkpoint.save wrote can be resharded"
        )
    boxes = {key: box_of(key, entry.dtype, entry.shape) for key, entry in reader.manifest.entries.items()}
    return _Source(reader.manifest.values, boxes, reader.read_tensor)


def _from_file(path: Path) -> _Source:
    """Open a file of ``torch.save``; ValueError if it is not a state dict, or reading it would run code."""
    try:
        sections = torch.load(path, mmap=True, weights_only=True, map_location="cpu")
    except Exception as error:  # pickle and torch raise anything for other files
        raise ValueError(
            f"{path} is no file of torch.save that holds tensors and plain values only: {error}"
        ) from error
    sections = sections if isinstance(sections, dict) else {}
    if {"state", "param_groups"} <= sections.keys():
        sections = {OPTIMIZER: sections}
    elif sections and all(isinstance(value, Tensor) for value in sections.values()):
        sections = {MODEL: sections}
    content = RankContent()
    if isinstance(sections.get(MODEL), Mapping):
        content.add(MODEL, dict(sections[MODEL]))
    optimizer = sections.get(OPTIMIZER)
    if isinstance(optimizer, Mapping) and {"state", "param_groups"} <= optimizer.keys():
        groups, known = [], dict[Any, str]()
        for number, group in enumerate(optimizer["param_groups"]):
            places = [positional(number, place) for place in range(len(group["params"]))]
            names = group.get("param_names") or places
            known.update(zip(group["params"], names, strict=True))
            groups.append((names, {k: v for k, v in group.items() if k not in PARAM_KEYS}))
        packed, state = content.packed_groups(groups), optimizer["state"]
        for index, name in known.items():
            if index in state:
                content.add(f"{STATE}/{key_of(name)}", state[index])
        content.add(EVERYWHERE, {key: value for key, value in state.items() if key not in known})
        named = all("param_names" in group for group in optimizer["param_groups"])
        content.values[OPTIMIZER] = {"named": named, "groups": packed, "params": {}}
    if not content.values:
        raise ValueError(f"{path} holds neither an optimizer's state dict nor a model's")
    content.add(EXTRA, None)
    boxes = {box.key: box for box in content.all_boxes()}
    return _Source(content.values, boxes, content.tensors.__getitem__)


def _owners(source: _Source, world_size: int) -> Callable[[str], int]:
    """Choose a rank for each key as an optimizer does by default: by size, group by group."""
    about = source.values.get(OPTIMIZER, {"groups": [], "params": {}})
    costs = defaultdict[str, float](float)  # elements of a parameter, or if unknown the bytes of its state
    for key, box in source.boxes.items():
        name, slash, _ = key.removeprefix(STATE + "/").partition("/")
        if slash and key.startswith(STATE + "/"):
            costs[unquote(name)] += box.nbytes
    costs.update({name: float(math.prod(shape)) for name, (_, shape) in about["params"].items()})
    owners = assign_owners(
        [[costs[name] for name in group["names"]] for group in about["groups"]], world_size
    )
    of_name: dict[str, int] = {}
    for group, ranks in zip(about["groups"], owners, strict=True):
        of_name.update(zip(group["names"], ranks, strict=True))

    def owner_by_name(key: str) -> int | None:
        section = next((each for each in (STATE, MODEL) if key.startswith(each + "/")), None)
        return of_name.get(unquote(key[len(section) + 1 :].partition("/")[0])) if section else None

    loads, rest = [0.0] * world_size, dict[str, int]()
    for key in (key for part in model_parts(source.values).values() for key in tensors_in(part)):
        owner = owner_by_name(key)
        if owner is None:
            rest[key] = source.boxes[key].nbytes
        else:
            loads[owner] += source.boxes[key].nbytes
    (more,) = assign_owners([list(rest.values())], world_size, loads)
    of_key = dict(zip(rest, more, strict=True))

    def owner_of(key: str) -> int:
        owner = owner_by_name(key)
        if owner is None and key.startswith(RANDOM + "/"):
            rank = int(key.split("/")[1])
            owner = rank if rank < world_size else 0
        return of_key.get(key, 0) if owner is None else owner

    return owner_of


def _write(source: _Source, owner_of: Callable[[str], int], out: Path) -> tuple[dict[str, DataFile], Written]:
    token, boxes = new_token(), dict[int, list[Box]]()
    for key, box in source.boxes.items():
        boxes.setdefault(owner_of(key), []).append(box)
    files, written = dict[str, DataFile](), Written()
    with progress("resharding", sum(box.nbytes for box in source.boxes.values())) as advance:

        def read(box: Box) -> memoryview:
            advance(box.nbytes)
            return bytes_of(source.read(box.key))

        try:
            for rank in sorted(boxes):
                file, places = write_tensors(out, token, rank, boxes[rank], read)
                files.update(file)
                written += places
        except BaseException:
            discard(out, token, *boxes)
            raise
    return files, written


# ---------------------------------------------------------------------- what a checkpoint holds


def inspect(folder: Path) -> dict[str, Any]:
    """Read all of a checkpoint, compare every byte with its checksum, and describe it in plain values.

    Sizes are in bytes; ``reason`` says why it is not ``complete``. CheckpointError without a folder.
    """
    if not folder.is_dir():
        raise CheckpointError(f"no checkpoint at {folder}: there is no such folder")
    manifest, reason, sections = Manifest(0, 0, {}, {}, {}, {}, {}), "", dict[str, dict[str, Any]]()
    try:
        manifest = parse(folder)
        CheckpointReader(folder).check_all()
    except CheckpointError as error:
        reason = str(error)
    for key in {**manifest.entries, **manifest.values}:
        name = re.split(r"[/.]", key, maxsplit=1)[0]
        section = sections.setdefault(name, {"name": name, "num_tensors": 0, "nbytes": 0, "num_values": 0})
        section["num_values"] += key in manifest.values
        section["num_tensors"] += key in manifest.entries
        section["nbytes"] += manifest.entries[key].nbytes if key in manifest.entries else 0
    time = datetime.fromtimestamp(manifest.time_ns / 1e9, timezone.utc)
    return {
        "path": str(folder),
        "complete": not reason,
        "reason": reason,
        "version": manifest.version,
        "saved": time.strftime("%Y-%m-%d %H:%M:%S UTC") if manifest.time_ns else "",
        "world_size": manifest.world_size,
        "software": dict(manifest.software),
        "sections": [sections[name] for name in sorted(sections)],
        "files": [(name, file.rank, file.nbytes) for name, file in manifest.files.items()],
    }
