"""Reads regular files only, and writes files that are complete or absent.

Other users of the folder may have left anything there: a FIFO, on which reading waits, a link to a device
without an end, or a link at the path of a file that is about to be written. Nothing here communicates.
"""

import errno
import fcntl
import os
import re
import secrets
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from io import FileIO
from pathlib import Path


def open_regular(path: Path) -> FileIO:
    """Open a regular file to read, also through a link, without waiting.

    Raises:
        OSError: it cannot be opened, or is a folder, a FIFO, a device.
    """
    _check_regular(path.stat(), path)  # before it is opened, since opening a device may have effects
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        _check_regular(os.fstat(descriptor), path)
    except OSError:
        os.close(descriptor)
        raise
    return FileIO(descriptor, "rb")


def _check_regular(status: os.stat_result, path: Path) -> None:
    if not stat.S_ISREG(status.st_mode):
        raise OSError(errno.EINVAL, "it is no regular file", str(path))


def is_own_file(path: Path) -> bool:
    """Whether there is a regular file, not a link to one."""
    try:
        return stat.S_ISREG(path.lstat().st_mode)
    except OSError:
        return False


def sync_folder(folder: Path) -> None:
    """Flush to the disk what was created, renamed or removed in a folder."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def new_part(path: Path) -> Path:
    """Name a temporary file next to ``path``, which `remove_stale_parts` recognizes."""
    return path.with_name(f"{path.name}.{secrets.token_hex(8)}.part")


def part_of(name: str) -> re.Pattern[str]:
    """Return the pattern of the names that `new_part` gives for this name."""
    return re.compile(re.escape(name) + r"\.[0-9a-f]{16}\.part")


def open_part(path: Path) -> tuple[Path, FileIO]:
    """Make a temporary file next to ``path``, locked for as long as it is open."""
    flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    while True:
        beside = new_part(path)
        file = FileIO(os.open(beside, flags, 0o666), "rb+")
        if try_lock(file.fileno()) is not False and is_own_file(beside):
            return beside, file
        file.close()  # `remove_stale_parts` of another process came before the lock, and removes it


@contextmanager
def replacing(path: Path) -> Iterator[FileIO]:
    """Yield a new file next to ``path``. When the ``with`` ends, it is flushed and renamed to ``path``.

    A link at ``path`` is replaced, not followed. If anything fails, the new file is removed. It is locked
    while it is written.
    """
    beside, file = open_part(path)
    with file:
        try:
            yield file
            os.fsync(file.fileno())
            beside.replace(path)
        except BaseException:
            with suppress(OSError):
                beside.unlink(missing_ok=True)
            raise
    sync_folder(path.parent)


def remove_stale_parts(path: Path) -> None:
    """Remove temporary files of killed processes next to a file: those of `new_part` that nobody writes."""
    ours = part_of(path.name)
    with suppress(PermissionError):  # some folders can be written but not listed
        for child in path.parent.iterdir():
            if ours.fullmatch(child.name) and is_own_file(child):
                with suppress(OSError):
                    _remove_if_stale(child)


def _remove_if_stale(path: Path) -> None:
    descriptor = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        if try_lock(descriptor):
            path.unlink()
    finally:
        os.close(descriptor)


def try_lock(descriptor: int) -> bool | None:
    """Lock an open file against other processes, and other openings in this one, without waiting.

    Returns:
        False if it is locked already; None if the file system has no locks.
    """
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in (errno.EAGAIN, errno.EACCES):
            return False
        if error.errno in (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL):
            return None
        raise
    return True
