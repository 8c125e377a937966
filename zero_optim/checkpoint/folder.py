"""Folders of checkpoints: the newest whole one, the old ones that may go, and what a killed save left."""

import os
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from zero_optim.checkpoint import manifest as manifests
from zero_optim.checkpoint.data import check_run
from zero_optim.checkpoint.manifest import DATA_FILE, FILE, PART, Manifest
from zero_optim.errors import CheckpointError


def latest(path: str | os.PathLike[str], *, quick: bool = False) -> Path | None:
    """Find the newest whole checkpoint: ``path`` itself, or a folder right in it.

    Does not communicate. Incomplete and damaged ones are passed over.

    Args:
        path: a checkpoint, or the folder that holds several.
        quick: look at manifests and file sizes only. Otherwise every byte of the newest is read, and
            compared with its checksum.

    Returns:
        The checkpoint's folder; None if there is no whole one.
    """
    for folder, manifest in reversed(_whole(Path(path))):
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
    for key, entry in manifest.entries.items():
        for chunk in entry.chunks:
            check_run(folder, chunk, key)


def _whole(path: Path) -> list[tuple[Path, Manifest]]:
    """List the checkpoints that are complete, oldest first."""
    inside = sorted(child for child in path.iterdir() if child.is_dir()) if path.is_dir() else []
    found = []
    for folder in (path, *inside):
        if (folder / FILE).is_file():
            try:
                found.append((folder, manifests.read(folder)))
            except CheckpointError:
                continue
    return sorted(found, key=lambda pair: pair[1].time_ns)


def prune(newest: Path, keep: int) -> None:
    """Remove checkpoints beside ``newest``: all but the ``keep`` newest whole ones, and torn ones.

    Folders that hold anything but a checkpoint's own files keep that.
    """
    kept = {folder for folder, _ in _whole(newest.parent)[-keep:]} | {newest, newest.parent}
    for folder in newest.parent.iterdir():
        if folder not in kept and folder.is_dir() and not folder.is_symlink():
            _remove(folder)


def _remove(folder: Path) -> None:
    """Remove a checkpoint: its manifest first, so that it is whole or none throughout."""
    own = [
        child for child in folder.iterdir() if child.name in (FILE, PART) or DATA_FILE.fullmatch(child.name)
    ]
    if not own:
        return
    (folder / FILE).unlink(missing_ok=True)
    manifests.sync_folder(folder)
    for child in own:
        child.unlink(missing_ok=True)
    if not any(folder.iterdir()):
        folder.rmdir()


def remove_strays(folder: Path, manifest: Manifest) -> None:
    """Remove data files that belong to a replaced checkpoint, or to a save that was never completed."""
    for child in folder.iterdir():
        if DATA_FILE.fullmatch(child.name) and child.name not in manifest.files:
            child.unlink(missing_ok=True)


def library_version() -> str:
    """Give the version of zero_optim, "unknown" in a bare checkout."""
    try:
        return version("zero-optim")
    except PackageNotFoundError:
        return "unknown"
