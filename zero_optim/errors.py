"""The exceptions of zero_optim, and what each one means.

    ZeroOptimError
    ├── RankMismatchError        ranks disagree about what they are about to do together
    ├── RemoteRankError          another rank failed with an exception this rank cannot rebuild
    │   ├── StalledError         ranks wait for one that does not come, has ended or is stopped
    │   ├── RankFailedError      a rank that was started here failed or was killed
    │   └── LaunchTimeoutError   ranks that were started here took too long
    ├── NotConsolidatedError     the whole state dict is needed, but is absent or out of date
    ├── LostStateError           nobody in a new process group holds the state of some parameters
    ├── StateMismatchError       a state dict does not fit this optimizer
    ├── CheckpointError          a checkpoint is incomplete or damaged, or could not be written
    └── ReductionError           gradients of a backward pass could not be reduced

Wrong arguments raise plain ``ValueError`` and ``TypeError``, as in ``torch.optim``.
"""

from typing import TypeVar

E = TypeVar("E", bound=BaseException)


class ZeroOptimError(Exception):
    """Base of every exception defined by zero_optim."""


class RankMismatchError(ZeroOptimError, RuntimeError):
    """Ranks have different parameters, options or calls; after a step parameters are equal on all ranks."""


class RemoteRankError(ZeroOptimError, RuntimeError):
    """Another rank failed. The message quotes its message; its traceback is in that rank's output."""


def message_of(error: BaseException) -> str:
    """Give the message of an exception, also of one whose own ``str()`` raises."""
    try:
        return str(error)
    except Exception:  # noqa: BLE001 - a class of the user's: what it raises here must not replace the reason
        return "<exception str() failed>"  # as tracebacks have it


def mark_remote(error: E) -> E:
    """Mark an exception as that of another rank, which this one only repeats; gives the exception."""
    error.__dict__["_is_remote"] = True
    return error


def is_remote(error: BaseException) -> bool:
    """Tell whether an exception is that of another rank, and this one only heard of it."""
    return isinstance(error, RemoteRankError) or "_is_remote" in error.__dict__


class StalledError(RemoteRankError):
    """Ranks waited for others that did not come in time, or have ended; raised on every rank that waits.

    The process group cannot be used any more.

    Attributes:
        missing: group ranks that were waited for.
    """

    def __init__(self, message: str, missing: tuple[int, ...] = ()) -> None:
        super().__init__(message)
        self.missing = missing


class RankFailedError(RemoteRankError):
    """A rank failed or was killed; the message begins with its own traceback.

    Attributes:
        rank: the rank that failed first.
    """

    def __init__(self, message: str, rank: int = -1) -> None:
        super().__init__(message)
        self.rank = rank


class LaunchTimeoutError(RemoteRankError, TimeoutError):
    """The ranks took too long; the message says where each one was."""


class NotConsolidatedError(ZeroOptimError, RuntimeError):
    """The whole optimizer state is not on this rank, or is out of date."""


class LostStateError(ZeroOptimError, RuntimeError):
    """State that an optimizer needs in a new process group is lost; raised on every rank of it."""


class StateMismatchError(ZeroOptimError, ValueError):
    """A state dict does not fit the parameters that it is loaded for."""


class ReductionError(ZeroOptimError, RuntimeError):
    """The gradients of a backward pass are incomplete or were not reduced; raised on every rank."""


class CheckpointError(ZeroOptimError, RuntimeError):
    """A checkpoint is incomplete or damaged, or could not be written; the message has the reason."""
