"""Files as checkpoints need them: only regular ones are read, a new one is in place whole or not at all.

Whoever can write into the folder may have left anything there: a FIFO, which would be waited for, a link to
a device without an end, a link in the place of a file that is about to be written.
"""

import errno
import fcntl
import os
import re
import secrets
import stat
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from io import FileIO
from pathlib import Path

_STALE_SECONDS = 60.0  # below that age a file beside may be one whose writer is about to lock it


def open_regular(path: Path) -> FileIO:
    """Open a regular file to read, or what a link to one leads to, without waiting.

    Raises:
        OSError: it cannot be opened, or is a folder, a FIFO, a device.
    """
    _check_regular(path.stat(), path)  # before it is opened: to open a device may have effects
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
    """Make what was created, renamed or removed in a folder last."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def new_part(path: Path) -> Path:
    """Name a new file beside ``path``, which `remove_stale_parts` knows."""
    return path.with_name(f"{path.name}.{secrets.token_hex(8)}.part")


def part_of(name: str) -> re.Pattern[str]:
    """Tell files apart that are written beside a file of this name, under names of `new_part`."""
    return re.compile(re.escape(name) + r"\.[0-9a-f]{16}\.part")


@contextmanager
def replacing(path: Path) -> Iterator[FileIO]:
    """Give a new file beside ``path``; it is on the disk and in place when the ``with`` ends.

    A link at ``path`` is replaced, not followed. The new file is gone if anything fails. It is locked while
    it is written.
    """
    beside = new_part(path)
    flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    with FileIO(os.open(beside, flags, 0o666), "rb+") as file:
        try:
            try_lock(file.fileno())
            yield file
            os.fsync(file.fileno())
            beside.replace(path)
        except BaseException:
            with suppress(OSError):
                beside.unlink(missing_ok=True)
            raise
    sync_folder(path.parent)


def remove_stale_parts(path: Path) -> None:
    """Remove what killed processes have left beside a file: what has our kind of name and nobody writes."""
    ours = part_of(path.name)
    with suppress(PermissionError):  # one may write into a folder that one may not list
        for child in path.parent.iterdir():
            if ours.fullmatch(child.name) and is_own_file(child):
                with suppress(OSError):
                    _remove_if_stale(child)


def _remove_if_stale(path: Path) -> None:
    descriptor = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        old = time.time() - os.fstat(descriptor).st_mtime > _STALE_SECONDS
        if old and try_lock(descriptor):
            path.unlink()
    finally:
        os.close(descriptor)


def try_lock(descriptor: int) -> bool | None:
    """Lock an open file against other processes, and other openings in this one, without waiting.

    Returns:
        False if it is locked already; None where the file system has no locks.
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
