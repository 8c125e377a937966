"""Reads regular files only, writes files that are complete or absent, and locks folders. No communication.

Note [Locks]
    The file is locked with ``flock``, which ends with the process. The holder removes the file before it
    releases the lock, so who has locked a file checks that it is still in the folder. The file names its
    holder: of two jobs the one that began later refuses, as a job may have been started again while the old
    one lives. Some file systems have no locks (Lustre without ``flock``, NFS with ``nolock``). There the last
    save counts: files have names that no other save uses, and a save removes only files that it replaced.
"""

import errno
import fcntl
import json
import os
import re
import secrets
import socket
import stat
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from io import FileIO
from pathlib import Path

from zero_optim.errors import CheckpointError

LOCK = "save.lock"
_BEGAN_NS = time.time_ns()
_OPEN_OWN = os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC


def open_regular(path: Path) -> FileIO:
    """Open a regular file to read, also through a link, without waiting; OSError for anything else."""
    _check_regular(path.stat(), path)  # before it is opened, since opening a device may have effects
    file = FileIO(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb")
    try:
        _check_regular(os.fstat(file.fileno()), path)
    except OSError:
        file.close()
        raise
    return file


def _check_regular(status: os.stat_result, path: Path) -> None:
    if not stat.S_ISREG(status.st_mode):
        raise OSError(errno.EINVAL, "it is no regular file", str(path))


def within(folder: Path, name: str) -> Path:
    """Join a name that was read from a file; ValueError if it leads out of the folder."""
    if Path(name).is_absolute() or ".." in Path(name).parts:
        raise ValueError(f"it names {name!r}, which is outside of {folder}")
    return folder / name


def is_own_file(path: Path) -> bool:
    """Whether there is a regular file, not a link to one."""
    with suppress(OSError):
        return stat.S_ISREG(path.lstat().st_mode)
    return False


def is_dir(path: Path) -> bool:
    """Whether there is a folder that can be seen."""
    with suppress(OSError):  # no permission to read it
        return path.is_dir()
    return False


def sync_folder(folder: Path) -> None:
    """Flush a file to the disk, or what was created, renamed or removed in a folder."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_all(file: FileIO, run: memoryview) -> None:
    """Write bytes in several calls, since a system call takes at most about 2 GiB."""
    while run.nbytes:
        run = run[file.write(run) :]


def part_of(name: str) -> re.Pattern[str]:
    """Return the pattern of the temporary files that `open_part` makes for a file of this name."""
    return re.compile(re.escape(name) + r"\.[0-9a-f]{16}\.part")


def open_part(path: Path) -> tuple[Path, FileIO]:
    """Make a temporary file next to ``path``, locked for as long as it is open."""
    flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    while True:
        beside = path.with_name(f"{path.name}.{secrets.token_hex(8)}.part")
        file = FileIO(os.open(beside, flags, 0o666), "rb+")
        if try_lock(file.fileno()) is not False and is_own_file(beside):
            return beside, file
        file.close()  # `remove_stale_parts` of another process came before the lock, and removes it


@contextmanager
def replacing(path: Path) -> Iterator[FileIO]:
    """Yield a new file, which replaces ``path``, also a link, at the end, or is removed if the body fails."""
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
    """Remove temporary files for ``path`` that no process writes any more."""
    ours = part_of(path.name)
    with suppress(PermissionError):  # some folders can be written but not listed
        for child in path.parent.iterdir():
            if ours.fullmatch(child.name) and is_own_file(child):
                with suppress(OSError), FileIO(os.open(child, _OPEN_OWN), "rb+") as file:
                    if try_lock(file.fileno()):
                        child.unlink()


def try_lock(descriptor: int) -> bool | None:
    """Lock an open file without waiting: False if it is locked, None if the file system has no locks."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in (errno.EAGAIN, errno.EACCES):
            return False
        if error.errno in (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL):
            return None
        raise
    return True


def _this() -> str:
    return f"process {os.getpid()} on {socket.gethostname()}"


class FolderLock:
    """The right to write into a checkpoint's folder, made if absent: Note [Locks]. Else CheckpointError."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._path = folder / LOCK
        while True:
            self._descriptor = os.open(self._path, _OPEN_OWN | os.O_CREAT, 0o666)
            try:
                locked = try_lock(self._descriptor)
                if locked is False:
                    began_ns, holder = 0, "another process"
                    with suppress(ValueError, TypeError):
                        time_ns, name = json.loads(os.pread(self._descriptor, 4096, 0))
                        began_ns, holder = int(time_ns), str(name)
                    if began_ns <= _BEGAN_NS:
                        raise CheckpointError(
                            f"cannot write the checkpoint {folder}: another save into this folder is under "
                            f"way, of {holder}, and this is {_this()}. End the older job first, or give each "
                            "job a folder of its own"
                        )
                    fcntl.flock(self._descriptor, fcntl.LOCK_EX)
                self.keeps_out = locked is not None
                if self._is_in_place():
                    with suppress(OSError):  # a full disk
                        os.ftruncate(self._descriptor, 0)
                        os.pwrite(self._descriptor, json.dumps([_BEGAN_NS, _this()]).encode(), 0)
                    return
            except BaseException:
                os.close(self._descriptor)
                raise
            os.close(self._descriptor)  # its holder has just released it

    def _is_in_place(self) -> bool:
        try:
            there = self._path.lstat()
        except FileNotFoundError:
            return False
        return os.path.samestat(there, os.fstat(self._descriptor))

    def close(self) -> None:
        """Release the lock and remove the file."""
        try:
            if self._is_in_place():
                self._path.unlink(missing_ok=True)
        finally:
            os.close(self._descriptor)
