"""Checkpoints without a cluster: in one process, with one tensor in memory, the others mapped from files."""

from collections.abc import Iterator
from contextlib import closing, contextmanager
from datetime import datetime, timezone
from io import BufferedRandom, FileIO
from pathlib import Path
from typing import Any

import torch

from zero_optim.checkpoint.content import MODEL, OPTIMIZER, RANDOM, RankContent, model_of, model_parts
from zero_optim.checkpoint.data import DTYPES, Box, CheckpointReader, box_of, bytes_of, lay_out, write_tensors
from zero_optim.checkpoint.files import FolderLock, remove_stale_parts, replacing, write_all
from zero_optim.checkpoint.folder import complete, new_token, own_folder
from zero_optim.checkpoint.manifest import VERSION, Manifest, blamed_on, parse
from zero_optim.checkpoint.sections import mapping, of_file, of_reader, sections_of, state_dict_of
from zero_optim.checkpoint.values import kinds_in
from zero_optim.errors import CheckpointError, StateMismatchError, ZeroOptimError, message_of

FORMATS = ("torch", "torch-names", "zero-optim")


def _check_output(source: Path, out: Path, *, force: bool) -> None:
    if not source.exists():
        return  # reading it raises the error
    for place in {out.resolve(), out.parent.resolve() / out.name}:
        for folder in (place, *place.parents):
            if folder.exists() and folder.samefile(source):
                what = "the source itself" if folder == place else f"inside the source {source}"
                raise ValueError(f"{out} is {what}, which it would damage: name another place")
    if not force and (out.is_symlink() or out.exists()):
        raise ValueError(f"{out} exists: name another place, or pass --force (force=True) to replace it")


def consolidate(source: Path, out: Path, *, weights: bool = False, force: bool = False) -> None:
    """Write the optimizer's whole state, in the format of ``torch.optim``, or the weights, to one file.

    ``out`` ends in ``.pt``, or ``.safetensors`` for weights; ``force`` replaces a file or link.
    CheckpointError if the checkpoint is damaged or ``out`` cannot be written, StateMismatchError if it lacks
    the section, ValueError for a wrong ``out``.
    """
    if (out.is_symlink() or out.exists()) and not out.is_file():
        raise ValueError(f"{out} is no regular file: name one that may be made or replaced")
    _check_output(source, out, force=force)
    reader = CheckpointReader(source.absolute())
    wanted = MODEL if weights or out.suffix == ".safetensors" else OPTIMIZER
    values = reader.manifest.values
    if wanted not in values:
        raise StateMismatchError(f"{source} holds no {wanted}")
    with _writing(out), replacing(out) as file:
        if out.suffix == ".safetensors":
            _write_safetensors(file, reader)
        else:
            get = mapping(of_reader(reader), out)
            with blamed_on(source):
                whole = model_of(values, get) if wanted == MODEL else state_dict_of(values, get)
            _save(whole, file)


@contextmanager
def _writing(out: Path) -> Iterator[None]:
    """Remove what killed processes left of ``out``; turn errors in the body into CheckpointError."""
    try:
        remove_stale_parts(out)
        yield
    except ZeroOptimError:  # it says what failed, perhaps the source
        raise
    except OSError as error:
        raise CheckpointError(f"cannot write {out}: {error.strerror or error}") from error
    except Exception as error:
        reason = f"{type(error).__name__}: {message_of(error)}"
        raise CheckpointError(f"cannot write {out}: {reason}") from error


def _save(whole: object, file: FileIO) -> None:
    """Call ``torch.save``; where its RuntimeError hides that a write failed, raise the OSError."""
    buffered = BufferedRandom(file)  # a write writes everything
    try:
        torch.save(whole, buffered)
    except RuntimeError as error:
        raise error.__context__ if isinstance(error.__context__, OSError) else error from None
    buffered.detach()


def _write_safetensors(file: FileIO, reader: CheckpointReader) -> None:
    keys, tensors = dict[str, str](), of_reader(reader).tensors
    for name, (kind, body) in model_parts(reader.manifest.values).items():
        if kind in ("sparse", "subclass", "wrapper"):
            raise CheckpointError(f"{name} is no plain tensor, as safetensors needs them: write a .pt file")
        if kind == "tensor":  # other values are extra state of a module
            keys[name] = body[0]
            if (dtype := tensors[body[0]].dtype) not in DTYPES:
                raise CheckpointError(
                    f"{name} is of {dtype}, for which safetensors has no name: write a .pt file"
                )
    head, placed = lay_out([box_of(name, tensors[key]) for name, key in keys.items()])
    write_all(file, memoryview(head))
    for box, _ in placed:
        write_all(file, bytes_of(tensors[keys[box.key]]))


def _open(path: Path) -> RankContent:
    if path.is_file():
        return of_file(path)
    if (path / ".metadata").exists():
        from zero_optim.checkpoint.formats.dcp_folder import of_dcp

        with blamed_on(path):
            return of_dcp(path)
    if path.is_dir() and ((path / "latest").is_file() or any(path.glob("*mp_rank_*_model_states.pt"))):
        from zero_optim.checkpoint.formats.deepspeed import of_deepspeed

        with blamed_on(path):
            return of_deepspeed(path)
    return of_reader(CheckpointReader(path.absolute()))


def convert(source: Path, out: Path, to: str, *, force: bool = False) -> None:
    """Write a checkpoint of one library in the format of another.

    The source is a checkpoint of `save`, ``dcp.save`` or DeepSpeed, or a file of ``torch.save``. ``to`` is
    "torch", a file with state by index, "torch-names", by name, or "zero-optim", a checkpoint as one rank
    saves it. CheckpointError if the source is damaged or ``out`` cannot be written; StateMismatchError if the
    format cannot carry all of it; ValueError if ``out`` exists, unless ``force`` replaces a file or
    checkpoint.
    """
    if to not in FORMATS:
        raise ValueError(f"expected a format of {', '.join(FORMATS)}, got {to!r}")
    own_folder(out)
    _check_output(source, out, force=force)
    if to != "zero-optim" and out.is_dir():
        raise ValueError(f"{out} exists, and only a file is replaced by a file: remove it first")
    content = _open(source)
    if to == "zero-optim":

        def read(box: Box) -> memoryview:
            with blamed_on(source):
                return content.bytes_of(box)

        with _writing(out), closing(FolderLock(out)) as lock:
            saved = write_tensors(out, new_token(), 0, content.all_boxes(), read)
            complete(out, 1, saved, content.values, alone=lock.keeps_out)
        return
    values = {key: value for key, value in content.values.items() if not key.startswith(RANDOM)}
    groups = values.pop(OPTIMIZER, {"groups": []})["groups"]
    values |= {f"the options of group {number}": group["options"] for number, group in enumerate(groups)}
    for key, value in values.items():  # another library could not read these without running code
        if odd := kinds_in(value) & {"array", "class", "deque", "enum", "object"}:
            raise StateMismatchError(f"{key} has a value of kind {min(odd)}, which this format cannot carry")
    with _writing(out):
        with blamed_on(source):
            whole = sections_of(content.values, mapping(content, out), by_name=to != "torch")
        with replacing(out) as file:
            _save(whole, file)


def inspect(folder: Path) -> dict[str, Any]:
    """Compare every byte of a checkpoint with its checksum, and describe it, with a reason if incomplete."""
    if not folder.is_dir():
        raise CheckpointError(f"no checkpoint at {folder}: there is no such folder")
    manifest, reason, sections = Manifest(0, 0, {}, {}, {}, {}), "", dict[str, dict[str, Any]]()
    try:
        manifest = parse(folder)
        CheckpointReader(folder).check_all()
    except CheckpointError as error:
        reason = str(error)
    for key in {**manifest.entries, **manifest.values}:
        name = key.partition("/")[0]
        section = sections.setdefault(name, {"name": name, "num_tensors": 0, "nbytes": 0, "num_values": 0})
        section["num_values"] += key in manifest.values
        if key in manifest.entries:
            section["num_tensors"] += 1
            section["nbytes"] += sum(chunk.nbytes for chunk in manifest.entries[key].chunks)
    time = datetime.fromtimestamp(manifest.time_ns / 1e9, timezone.utc)
    return {
        "path": str(folder),
        "complete": not reason,
        "reason": reason,
        "version": VERSION,
        "saved": time.strftime("%Y-%m-%d %H:%M:%S UTC") if manifest.time_ns else "",
        "world_size": manifest.world_size,
        "software": dict(manifest.software),
        "sections": [sections[name] for name in sorted(sections)],
        "files": [(name, file.rank, file.nbytes) for name, file in manifest.files.items()],
    }
