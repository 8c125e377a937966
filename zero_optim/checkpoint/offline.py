"""Checkpoints without a cluster: in one process, and never more than one tensor in memory.

`consolidate` writes what ``torch.load`` reads. `reshard` writes a checkpoint for another number of ranks,
from a checkpoint or from a file of ``torch.optim`` or PyTorch's ``ZeroRedundancyOptimizer``.
"""

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import unquote

from torch import Tensor

from zero_optim.checkpoint.content import EVERYWHERE, MODEL, OPTIMIZER, RANDOM, STATE
from zero_optim.checkpoint.fitting import model_parts
from zero_optim.checkpoint.folder import own_folder
from zero_optim.checkpoint.lock import FolderLock
from zero_optim.checkpoint.manifest import Chunk, DataFile, Entry, blamed_on
from zero_optim.checkpoint.safetensors import Box, whole
from zero_optim.checkpoint.storage import (
    CheckpointReader,
    complete,
    discard,
    entries_of,
    new_token,
    write_tensors,
)
from zero_optim.checkpoint.torchfile import Source, read_source, write_file
from zero_optim.checkpoint.values import Json, key_of, tensors_in, unpack
from zero_optim.errors import CheckpointError, StateMismatchError
from zero_optim.plan.partition import assign_owners
from zero_optim.run.progress import progress


def consolidate(source: Path, out: Path, *, weights: bool = False) -> None:
    """Write the optimizer's whole state, in the format of ``torch.optim``, or the weights, to one file.

    Args:
        source: a checkpoint's folder.
        out: ``.pt`` for a file that ``torch.load`` reads; ``.safetensors`` for weights.
        weights: the model's state dict, instead of the optimizer's.

    Raises:
        CheckpointError: the checkpoint is incomplete or damaged, or ``out`` cannot be written.
        StateMismatchError: it has no optimizer, or no model.
        ValueError: ``out`` is in the checkpoint, or exists and is not a regular file.
    """
    _check_output(source, out)
    if (out.is_symlink() or out.exists()) and not out.is_file():
        raise ValueError(f"{out} is no regular file: name one that may be made or replaced")
    reader = CheckpointReader(source)
    wanted = MODEL if weights or out.suffix == ".safetensors" else OPTIMIZER
    if wanted not in reader.manifest.values:
        raise StateMismatchError(f"{source} holds no {wanted}")
    build = _weights if wanted == MODEL else _optimizer_dict
    total = sum(
        entry.nbytes for key, entry in reader.manifest.entries.items() if key.startswith(wanted + "/")
    )
    with progress("consolidating", total) as advance, blamed_on(source):
        write_file(out, reader, build(reader.manifest.values), advance)


def _weights(values: Mapping[str, Json]) -> Callable[[Any], Any]:
    return lambda get: {name: unpack(part, get) for name, part in model_parts(values).items()}


def _optimizer_dict(values: Mapping[str, Json]) -> Callable[[Any], Any]:
    """Return a function that builds a state dict of ``torch.optim`` from a source of tensors."""
    about = values[OPTIMIZER]
    names = [name for group in about["groups"] for name in group["names"]]

    def build(get: Callable[..., Tensor]) -> dict[str, Any]:
        keys = {index: f"{STATE}/{key_of(name)}" for index, name in enumerate(names)}
        state = {index: unpack(values[key], get) for index, key in keys.items() if key in values}
        state.update(unpack(values[EVERYWHERE], get) if EVERYWHERE in values else {})
        groups, first = [], 0
        for group in about["groups"]:
            members = list(range(first, first + len(group["names"])))
            named = {"param_names": group["names"]} if about["named"] else {}
            groups.append({**unpack(group["options"], get), **named, "params": members})
            first += len(members)
        return {"state": state, "param_groups": groups}

    return build


def reshard(source: Path, out: Path, world_size: int) -> None:
    """Write a checkpoint as that many ranks without cuts would have written it.

    Each rank finds the parameters that it owns whole in one file. One that owns rows of a cut parameter reads
    them from the file of the rank that would own the whole.

    Args:
        source: a checkpoint's folder; or a file of ``torch.save`` with a state dict of an optimizer, of a
            model, or a dict of both under "optimizer" and "model". Parameters without names in such a file
            are identified by place.
        out: the folder of the new checkpoint.
        world_size: number of ranks, at least 1.

    Raises:
        CheckpointError: the source is incomplete or damaged, or ``out`` cannot be written.
        ValueError: ``world_size`` is below 1, the file is no state dict, or ``out`` lies in the source, or
            does not end in a folder's own name.
    """
    if world_size < 1:
        raise ValueError(f"expected a world size of at least 1, got {world_size}")
    own_folder(out)
    _check_output(source, out)
    found = read_source(source) if source.is_file() else _from_checkpoint(source)
    with blamed_on(source):
        owner_of = _owners(found, world_size)
    with _plainly(out):
        lock = FolderLock(out)
        try:
            files, entries = _write(found, owner_of, out, world_size)
            complete(out, world_size, files, entries, found.values, {}, alone=lock.keeps_out)
        finally:
            lock.release()


def _check_output(source: Path, out: Path) -> None:
    """Refuse an output that is the source, or is in it, also through links.

    Raises:
        ValueError: it is or does.
    """
    if not source.exists():
        return  # reading it raises the error
    for place in {out.resolve(), out.parent.resolve() / out.name}:
        for folder in (place, *place.parents):
            if folder.exists() and folder.samefile(source):
                what = "the source itself" if folder == place else f"inside the source {source}"
                raise ValueError(f"{out} is {what}, which it would damage: name another place")


def _from_checkpoint(folder: Path) -> Source:
    reader = CheckpointReader(folder)
    if OPTIMIZER not in reader.manifest.values and MODEL not in reader.manifest.values:
        raise StateMismatchError(
            f"{folder} was written by dcp.save: only what checkpoint.save wrote can be resharded"
        )
    boxes = {key: whole(key, entry.dtype, entry.shape) for key, entry in reader.manifest.entries.items()}
    return Source(reader.manifest.values, boxes, reader.read_tensor)


def _owners(source: Source, world_size: int) -> Callable[[str], int]:
    """Choose a rank for each key as an optimizer does by default: by size, group by group."""
    about = source.values.get(OPTIMIZER, {"groups": []})
    costs = [[_cost(source, name) for name in group["names"]] for group in about["groups"]]
    names = [name for group in about["groups"] for name in group["names"]]
    owners = [owner for group in assign_owners(costs, world_size) for owner in group]
    of_name: dict[str, int] = dict(zip(names, owners, strict=True))
    loads = [0.0] * world_size
    weights = [key for part in model_parts(source.values).values() for key in tensors_in(part)]
    for key in weights:
        if _name(key, MODEL) in of_name:
            loads[of_name[_name(key, MODEL)]] += source.boxes[key].nbytes
    rest = [key for key in dict.fromkeys(weights) if _name(key, MODEL) not in of_name]
    (more,) = assign_owners([[source.boxes[key].nbytes for key in rest]], world_size, loads)
    of_key = dict(zip(rest, more, strict=True))

    def owner_of(key: str) -> int:
        for section in (STATE, MODEL):
            if key.startswith(section + "/") and _name(key, section) in of_name:
                return of_name[_name(key, section)]
        if key.startswith(RANDOM + "/"):
            rank = int(key.split("/")[1])
            return rank if rank < world_size else 0
        return of_key.get(key, 0)

    return owner_of


def _cost(source: Source, name: str) -> float:
    """Return the number of elements of a parameter; if its shape is unknown, the bytes of its state."""
    about = source.values[OPTIMIZER]["params"].get(name)
    prefix = f"{STATE}/{key_of(name)}/"
    return (
        math.prod(about[1])
        if about
        else sum(box.nbytes for key, box in source.boxes.items() if key.startswith(prefix))
    )


def _name(key: str, section: str) -> str:
    return unquote(key[len(section) + 1 :].split("/", maxsplit=1)[0])


def _write(
    source: Source, owner_of: Callable[[str], int], out: Path, world_size: int
) -> tuple[dict[str, DataFile], dict[str, Entry]]:
    """Write all data files, one after the other."""
    token, boxes = new_token(), dict[int, list[Box]]()
    for key, box in source.boxes.items():
        boxes.setdefault(owner_of(key), []).append(box)
    files: dict[str, DataFile] = {}
    written: list[tuple[Box, Chunk]] = []
    with progress("resharding", sum(box.nbytes for box in source.boxes.values())) as advance:

        def read(key: str) -> Tensor:
            advance(source.boxes[key].nbytes)
            return source.read(key)

        try:
            for rank in sorted(boxes):
                file, places = write_tensors(out, token, rank, boxes[rank], read)
                files.update(file)
                written += places
        except BaseException:
            discard(out, token, *range(world_size))
            raise
    return files, entries_of(written)


@contextmanager
def _plainly(out: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise CheckpointError(f"cannot write {out}: {error.strerror or error}") from error
