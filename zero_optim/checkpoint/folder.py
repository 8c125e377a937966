"""Folders of checkpoints: finds the newest complete one, removes old ones and the files of killed saves.

Note [Family]
    ``keep=`` removes checkpoints, so the rule is one that a caller can see. Checkpoints of one family lie in
    one parent folder, and their names differ only in digits: "step-5" and "step-10", but not "best" or
    another run's "b-5". Of one family, only checkpoints older than all kept ones are removed. A number that
    only grows gives the order. A checkpoint that a save is writing is not removed.
"""

import os
import re
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from zero_optim.checkpoint import manifest as manifests
from zero_optim.checkpoint.data import HeaderChecks, check_run
from zero_optim.checkpoint.files import is_own_file, part_of, sync_folder
from zero_optim.checkpoint.lock import FolderLock
from zero_optim.checkpoint.manifest import DATA_FILE, FILE, Manifest
from zero_optim.errors import CheckpointError

_LAST_NUMBER = 2**63 - 1


def resolved(path: object) -> Path:
    """Make a path absolute, so that it does not depend on the current folder.

    Raises:
        TypeError: it is no path.
    """
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
    """Return a checkpoint's own folder.

    Raises:
        TypeError: it is no path.
        ValueError: the path does not end in a name. "" may be a variable that was never set, and a save must
        not replace what is in the current folder or next to it.
    """
    found = resolved(path)
    if Path(str(path)).name in ("", ".."):
        raise ValueError(
            "expected path to end in the name of a folder of the checkpoint's own, such as 'run/step-5', "
            f"got {str(path)!r}"
        )
    return found


def latest(path: str | os.PathLike[str], *, quick: bool = False) -> Path | None:
    """Find the newest complete checkpoint: ``path`` itself, or a folder directly in it.

    Does not communicate. Skips incomplete and damaged checkpoints, and what cannot be read. The newest has
    the highest number: each save takes one more than those next to it. If numbers are equal, the time counts.

    Args:
        path: a checkpoint, or the folder that holds several.
        quick: check only manifests and file sizes. Otherwise every byte of the newest is compared with its
        checksum.

    Returns:
        The checkpoint's folder; None if there is no complete one.

    Raises:
        OSError: ``path`` exists and cannot be listed.
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
        CheckpointError: something in it differs from what was written.
    """
    headers = HeaderChecks(folder, manifest.files)
    for name in manifest.files:
        headers.check(name)
    for key, entry in manifest.entries.items():
        for chunk in entry.chunks:
            check_run(folder, chunk, key)


def folders_in(path: Path) -> list[Path]:
    """List a folder and the folders directly in it; empty if it does not exist."""
    return [path, *sorted(child for child in path.iterdir() if _is_dir(child))] if _is_dir(path) else []


def _is_dir(path: Path) -> bool:
    try:
        return path.is_dir()
    except OSError:  # no permission to read it
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
    """Return a number higher than those of all checkpoints that `latest` may compare with this folder's."""
    compared = {folder}
    for place in (folder.parent, folder):
        with suppress(PermissionError):  # the parent of a folder that can be written may not be listed
            compared.update(folders_in(place))
    return min(max(map(manifests.number_in, compared)) + 1, _LAST_NUMBER)


def prune(newest: Path, keep: int) -> None:
    """Remove older checkpoints of one family: all but the ``keep`` newest complete ones, and incomplete ones.

    Other files in their folders stay. See Note [Family].
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
    """Remove a checkpoint, also an incomplete one, unless somebody is writing it."""
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
    with suppress(OSError):  # it holds other files
        folder.rmdir()


def _remove(folder: Path) -> None:
    """Remove a checkpoint's files: first the manifest, so that it is complete or absent at every moment."""
    (folder / FILE).unlink(missing_ok=True)
    sync_folder(folder)
    for child in _own_files(folder):
        child.unlink(missing_ok=True)


def _own_files(folder: Path) -> list[Path]:
    """List the files of `save` in a folder, finished or not, without its lock."""
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
        replaced: the manifest before.
        alone: nobody else can be writing to the folder, so unfinished files are those of a killed save.
    """
    unfinished = part_of(FILE)
    old = set(replaced.files) if replaced is not None else set()
    for child in folder.iterdir():
        stray = child.name in old or (alone and (_is_data(child.name) or unfinished.fullmatch(child.name)))
        if stray and child.name not in manifest.files and is_own_file(child):
            child.unlink(missing_ok=True)


def library_version() -> str:
    """Return the version of zero_optim; "unknown" if it is not installed."""
    try:
        return version("zero-optim")
    except PackageNotFoundError:
        return "unknown"
