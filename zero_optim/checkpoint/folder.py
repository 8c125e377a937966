"""Folders of checkpoints: the newest whole one, the old ones that may go, and what a killed save left.

Note [Family]
    ``keep=`` removes. So it goes by what a caller can see: checkpoints of one family lie in one parent
    folder, and their names differ in digits alone, as "step-5" and "step-10" do, so that "best" and another
    run's "b-5" stay. Of those it removes only what is older than everything kept, by a number that only
    grows. Nothing is removed where a save is under way.
"""

import os
import re
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from zero_optim.checkpoint import manifest as manifests
from zero_optim.checkpoint.data import check_run
from zero_optim.checkpoint.files import is_own_file, part_of, sync_folder
from zero_optim.checkpoint.lock import FolderLock
from zero_optim.checkpoint.manifest import DATA_FILE, FILE, Chunk, Manifest
from zero_optim.errors import CheckpointError

_LAST_NUMBER = 2**63 - 1


def resolved(path: object) -> Path:
    """Find what a path means now, whatever becomes of the current folder.

    Raises:
        TypeError: it is no path.
    """
    text = os.fspath(path) if isinstance(path, str | os.PathLike) else None
    if not isinstance(text, str):
        raise TypeError(f"expected path to be a str or a path, got {type(path).__name__}: {path!r}")
    return Path(text).absolute()


def own_folder(path: object) -> Path:
    """Find the folder that is meant to be a checkpoint's own.

    Raises:
        TypeError: it is no path.
        ValueError: it names no folder by itself: "" may be a variable that was never set, and what lies in or
            beside the current folder is not for a save to replace.
    """
    found = resolved(path)
    if Path(str(path)).name in ("", ".."):
        raise ValueError(
            "expected path to end in the name of a folder of the checkpoint's own, such as 'run/step-5', "
            f"got {str(path)!r}"
        )
    return found


def latest(path: str | os.PathLike[str], *, quick: bool = False) -> Path | None:
    """Find the newest whole checkpoint: ``path`` itself, or a folder right in it.

    Does not communicate. Incomplete and damaged ones are passed over, and whatever cannot be read. Newest is
    the one with the highest number, which each save writes down as one more than those it finds beside it;
    clocks are asked only where numbers are equal.

    Args:
        path: a checkpoint, or the folder that holds several.
        quick: look at manifests and file sizes only. Otherwise every byte of the newest is read, and
            compared with its checksum.

    Returns:
        The checkpoint's folder; None if there is no whole one.

    Raises:
        OSError: ``path`` is there and cannot be listed.
    """
    for folder, manifest in reversed(_whole(folders_in(Path(path)))):
        try:
            if not quick:
                verify(folder, manifest)
        except CheckpointError:
            continue
        return folder
    return None


def verify(folder: Path, manifest: Manifest) -> None:
    """Read everything that a checkpoint holds and compare checksums.

    Raises:
        CheckpointError: something in it is not as it was written.
    """
    for name, file in manifest.files.items():
        check_run(folder, Chunk((), (), name, 0, file.head_nbytes, file.head_crc32), "its header")
    for key, entry in manifest.entries.items():
        for chunk in entry.chunks:
            check_run(folder, chunk, key)


def folders_in(path: Path) -> list[Path]:
    """List a folder and the folders right in it; nothing if there is no such folder."""
    return [path, *sorted(child for child in path.iterdir() if _is_dir(child))] if _is_dir(path) else []


def _is_dir(path: Path) -> bool:
    try:
        return path.is_dir()
    except OSError:  # it may not be looked at
        return False


def _whole(folders: list[Path]) -> list[tuple[Path, Manifest]]:
    """List the checkpoints that are complete, oldest first."""
    found = []
    for folder in folders:
        try:
            found.append((folder, manifests.read(folder)))
        except CheckpointError:
            continue
    return sorted(found, key=lambda pair: pair[1].age)


def next_number(folder: Path) -> int:
    """Give a number higher than that of any checkpoint that `latest` may compare with the one in a folder."""
    compared = {folder}
    for place in (folder.parent, folder):
        with suppress(PermissionError):  # one may write into a folder whose parent one may not list
            compared.update(folders_in(place))
    return min(max(map(manifests.number_in, compared)) + 1, _LAST_NUMBER)


def prune(newest: Path, keep: int) -> None:
    """Remove older checkpoints of one family: all but the ``keep`` newest whole ones, and torn ones.

    Folders that hold anything but a checkpoint's own files keep that. See Note [Family].
    """
    family = _family(newest.name)
    inside = [child for child in newest.parent.iterdir() if _family(child.name) == family]
    members = [child for child in inside if _is_dir(child) and not child.is_symlink()]
    kept = {folder for folder, _ in _whole(members)[-keep:]} | {newest}
    oldest = min(map(manifests.number_in, kept))
    for folder in members:
        if folder not in kept and manifests.number_in(folder) <= oldest:
            _remove_unless_written(folder)


def _family(name: str) -> str:
    return re.sub(r"[0-9]+", "0", name)


def _remove_unless_written(folder: Path) -> None:
    """Remove a checkpoint, or what is left of one, unless somebody is writing it."""
    if not _own_files(folder):
        return
    try:
        lock = FolderLock(folder)
    except CheckpointError:
        return
    try:
        _remove(folder)
    finally:
        lock.release()
    with suppress(OSError):  # it holds something else
        folder.rmdir()


def _remove(folder: Path) -> None:
    """Remove a checkpoint's files: its manifest first, so that it is whole or none throughout."""
    (folder / FILE).unlink(missing_ok=True)
    sync_folder(folder)
    for child in _own_files(folder):
        child.unlink(missing_ok=True)


def _own_files(folder: Path) -> list[Path]:
    """List what `save` leaves in a folder, finished or not, but for its lock."""
    unfinished = part_of(FILE)
    return [
        child
        for child in folder.iterdir()
        if (child.name in (FILE, FILE + ".part") or unfinished.fullmatch(child.name) or _is_data(child.name))
        and is_own_file(child)
    ]


def _is_data(name: str) -> bool:
    return DATA_FILE.fullmatch(name) is not None


def remove_strays(folder: Path, manifest: Manifest, replaced: Manifest | None, *, alone: bool) -> None:
    """Remove data files that belong to a replaced checkpoint, or to a save that was never completed.

    Args:
        folder: the checkpoint's.
        manifest: of the checkpoint that is there now.
        replaced: the one before.
        alone: nobody else can be writing into the folder: what is unfinished there was left by a killed save.
    """
    unfinished = part_of(FILE)
    old = set(replaced.files) if replaced is not None else set()
    for child in folder.iterdir():
        stray = child.name in old or (alone and (_is_data(child.name) or unfinished.fullmatch(child.name)))
        if stray and child.name not in manifest.files and is_own_file(child):
            child.unlink(missing_ok=True)


def library_version() -> str:
    """Give the version of zero_optim, "unknown" in a bare checkout."""
    try:
        return version("zero-optim")
    except PackageNotFoundError:
        return "unknown"
