"""A lock, so that only one save at a time writes into a folder.

Note [Locks]
    If the existence of a file were the lock, a killed process would leave it, and it would block for ever. So
    the file is locked with ``flock``, which ends with the process. The file may stay and then means nothing.
    To release the lock, the holder first removes the file. So a process that has locked a file checks that it
    is still the one in the folder, and starts again if not.

    On NFS, Linux sends the lock to the server, so it works between hosts, but not if mounted with ``nolock``
    or ``local_lock``. Some file systems have no locks (Lustre without ``flock``). Then saves run without a
    lock. They use names that no other save uses, and remove only files of the checkpoint that they replaced.
    So the last save counts and nothing is lost. The files of a killed save then stay.
"""

import os
from pathlib import Path

from zero_optim.checkpoint.files import try_lock
from zero_optim.errors import CheckpointError

LOCK = "save.lock"


class FolderLock:
    """The right to write into a checkpoint's folder, which is made if it does not exist.

    Args:
        folder: the checkpoint's.

    Attributes:
        keeps_out: False if the file system has no locks, so that other saves may be writing too.

    Raises:
        CheckpointError: another save holds it.
        OSError: the folder cannot be made or written to.
    """

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._path = folder / LOCK
        while True:
            flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
            self._descriptor = os.open(self._path, flags, 0o666)
            try:
                locked = try_lock(self._descriptor)
                if locked is False:
                    raise CheckpointError(
                        f"cannot write the checkpoint {folder}: another save into this folder is under way. "
                        "Give each job a folder of its own"
                    )
                current = self._is_in_place()
            except BaseException:
                os.close(self._descriptor)
                raise
            if current:
                self.keeps_out = locked is True
                return
            os.close(self._descriptor)  # its holder has just released it

    def _is_in_place(self) -> bool:
        try:
            there = self._path.lstat()
        except FileNotFoundError:
            return False
        return os.path.samestat(there, os.fstat(self._descriptor))

    def release(self) -> None:
        """Release the lock and remove the file."""
        try:
            if self._is_in_place():
                self._path.unlink(missing_ok=True)
        finally:
            os.close(self._descriptor)
