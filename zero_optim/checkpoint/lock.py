"""One save at a time into a folder.

Note [Locks]
    A lock that is a file's mere existence would be left by a killed process and block for ever. So the file
    is locked with ``flock``, which ends with the process that holds it; the file itself may stay, and means
    nothing then. Who releases removes it first. So whoever has locked it looks whether the file is still the
    one in the folder, and begins anew if it is not.

    On NFS, Linux passes the lock on to the server, and hosts keep each other out; mounted with ``nolock`` or
    ``local_lock`` they do not. Some file systems refuse (Lustre without ``flock``): then saves go on without
    a lock, use names that no other save uses, and remove only files of the checkpoint they have replaced, so
    that the last one counts and nothing is lost. What a killed save has left stays there in that case.
"""

import os
from pathlib import Path

from zero_optim.checkpoint.files import try_lock
from zero_optim.errors import CheckpointError

LOCK = "save.lock"


class FolderLock:
    """The right to write into a checkpoint's folder, which is made if it is not there.

    Args:
        folder: the checkpoint's.

    Attributes:
        keeps_out: False where the file system has no locks, so that others may be writing too.

    Raises:
        CheckpointError: another save has it.
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
        """Let others write; the file is removed."""
        try:
            if self._is_in_place():
                self._path.unlink(missing_ok=True)
        finally:
            os.close(self._descriptor)
