"""Folders of checkpoints: completes one, finds the newest, removes old ones.

Note [Family]
    Checkpoints of one family lie in one parent folder, and their names differ only in the number at their
    end: "run1-step9" and "run2-step9" are of two. ``keep=`` removes only checkpoints of one family that are
    older, by a number that only grows, than all that stay, and none that a save is writing.
"""

import os
import re
import secrets
import time
from collections.abc import Iterable
from contextlib import closing, suppress
from pathlib import Path

import torch

from zero_optim import __version__
from zero_optim.checkpoint import manifest as manifests
from zero_optim.checkpoint.data import Box, CheckpointReader, Saved, data_name
from zero_optim.checkpoint.files import FolderLock, is_dir, is_own_file, part_of, sync_folder
from zero_optim.checkpoint.manifest import DATA_FILE, FILE, MAX_INT, Chunk, Entry, Manifest
from zero_optim.checkpoint.values import Json
from zero_optim.errors import CheckpointError

_LEFT_BY_A_SAVE = re.compile(f"{DATA_FILE.pattern}|{part_of(FILE).pattern}")


def resolved(path: object) -> Path:
    """Make a path absolute; TypeError if it is none."""
    if path is None:
        raise TypeError(
            "expected path to be a str or a path, got None: checkpoint.latest() gives None where there is no "
            "complete checkpoint, as before the first save"
        )
    text = os.fspath(path) if isinstance(path, str | os.PathLike) else None
    if not isinstance(text, str):
        raise TypeError(f"expected path to be a str or a path, got {type(path).__name__}: {path!r}")
    return Path(text).absolute()


def own_folder(path: object) -> Path:
    """Return a checkpoint's own folder, absolute; ValueError if the path does not end in a name."""
    folder = resolved(path)
    if Path(str(path)).name in ("", ".."):
        raise ValueError(
            "expected path to end in the name of a folder of the checkpoint's own, such as 'run/step-5', "
            f"got {str(path)!r}"
        )
    return folder


def latest(path: str | os.PathLike[str], *, quick: bool = False) -> Path | None:
    """Find the newest complete checkpoint: ``path``, or a folder directly in it; else None.

    The newest has the highest number: each save takes one more than those next to it. Every byte is compared
    with its checksum; ``quick`` checks only manifests and file sizes. OSError if ``path`` cannot be listed.
    """
    for folder in reversed(_complete_ones(_with_inner(Path(path)))):
        with suppress(CheckpointError):
            if not quick:
                CheckpointReader(folder).check_all()
            return folder
    return None


def _with_inner(path: Path) -> list[Path]:
    return [path, *sorted(child for child in path.iterdir() if is_dir(child))] if is_dir(path) else []


def _complete_ones(folders: Iterable[Path]) -> list[Path]:
    age = {}
    for folder in folders:
        with suppress(CheckpointError):
            manifest = manifests.read(folder)
            age[folder] = manifest.number, manifest.time_ns  # clocks can be set back
    return sorted(age, key=age.__getitem__)


def new_token() -> str:
    """Return a random name for a save, so that its files have names of their own."""
    return secrets.token_hex(6)


def complete(folder: Path, world_size: int, saved: Saved, values: Json, *, alone: bool) -> None:
    """Write the manifest, read it back, and remove what it replaces, and strays if ``alone`` here."""
    files, written = saved
    for name, file in files.items():
        if not (folder / name).is_file() or (folder / name).stat().st_size != file.nbytes:
            raise CheckpointError(
                f"{folder / name}, which rank {file.rank} has written, cannot be seen whole by the rank that "
                "completes the checkpoint: the folder must be one that all ranks share"
            )
    software = {"zero_optim": __version__, "torch": str(torch.__version__)}
    compared = {folder}  # the checkpoints that `latest` may compare with this one
    for place in (folder.parent, folder):
        with suppress(PermissionError):  # the parent of a folder that can be written may not be listed
            compared.update(_with_inner(place))
    number = min(max(map(manifests.number_in, compared)) + 1, MAX_INT)
    chunks = dict[str, tuple[Box, list[Chunk]]]()
    for box, chunk in written:
        chunks.setdefault(box.key, (box, []))[1].append(chunk)
    entries = {key: Entry(box.dtype, box.shape, tuple(parts)) for key, (box, parts) in chunks.items()}
    manifest = Manifest(time.time_ns(), world_size, software, files, entries, values, number)
    replaced = set[str]()
    with suppress(CheckpointError):  # its manifest is missing or damaged
        replaced = set(manifests.parse(folder).files)
    manifests.commit(folder, manifest)
    named = manifests.read(folder).files  # of another save, if the file system has no locks
    for child in folder.iterdir():
        stray = child.name in replaced or (alone and _LEFT_BY_A_SAVE.fullmatch(child.name))
        if stray and child.name not in named and is_own_file(child):
            child.unlink(missing_ok=True)


def discard(folder: Path, token: str, *ranks: int) -> None:
    """Remove the files of a save that failed, unless a manifest names them, or cannot be read."""
    with suppress(OSError, CheckpointError):
        names = manifests.parse(folder).files if folder / FILE in folder.iterdir() else {}
        if not any(name.startswith(f"data-{token}-") for name in names):
            for rank in ranks:
                (folder / data_name(token, rank)).unlink(missing_ok=True)


def prune(newest: Path, keep: int) -> None:
    """Remove all older checkpoints of a family but the ``keep`` newest complete ones: Note [Family]."""
    family = _family(newest.name)
    siblings = [child for child in newest.parent.iterdir() if _family(child.name) == family]
    members = [child for child in siblings if is_dir(child) and not child.is_symlink()]
    rest = {*_complete_ones(members)[-keep:], newest}
    oldest = min(map(manifests.number_in, rest))
    for folder in members:
        if folder not in rest and manifests.number_in(folder) <= oldest and _own_files(folder):
            # First the manifest, so that it is complete or absent at every moment.
            with suppress(CheckpointError), closing(FolderLock(folder)) as lock:  # nobody is writing it
                if not lock.keeps_out and not (folder / FILE).exists():
                    continue  # somebody may be
                (folder / FILE).unlink(missing_ok=True)
                sync_folder(folder)
                for child in _own_files(folder):
                    child.unlink(missing_ok=True)
            with suppress(OSError):  # it holds other files, or is being written
                folder.rmdir()


def _family(name: str) -> str:
    return re.sub(r"[0-9]+$", "0", name)


def _own_files(folder: Path) -> list[Path]:
    files = filter(is_own_file, folder.iterdir())
    return [file for file in files if file.name == FILE or _LEFT_BY_A_SAVE.fullmatch(file.name)]
