"""The exceptions of zero_optim, and what each one means.

    ZeroOptimError
    ├── RankMismatchError        ranks disagree about what they are about to do together
    ├── RemoteRankError          another rank failed with an exception this rank cannot rebuild
    ├── NotConsolidatedError     a whole state dict was asked for that is absent or stale
    ├── StateMismatchError       a state dict that does not fit this optimizer
    ├── CheckpointError          a checkpoint that is incomplete or damaged, or could not be written
    └── ReductionError           gradients of a backward pass that could not be reduced

Wrong arguments raise plain ``ValueError`` and ``TypeError``, as in ``torch.optim``.
"""


class ZeroOptimError(Exception):
    """Base of every exception defined by zero_optim."""


class RankMismatchError(ZeroOptimError, RuntimeError):
    """Ranks of one process group were given different parameters, options or calls."""


class RemoteRankError(ZeroOptimError, RuntimeError):
    """A different rank failed; its message is quoted, its traceback is in that rank's output."""


class NotConsolidatedError(ZeroOptimError, RuntimeError):
    """The whole optimizer state is not on this rank, or not any longer the present one."""


class StateMismatchError(ZeroOptimError, ValueError):
    """A state dict does not belong to the parameters it is being loaded for."""


class ReductionError(ZeroOptimError, RuntimeError):
    """The gradients of a backward pass are incomplete or were not reduced; raised on every rank."""


class CheckpointError(ZeroOptimError, RuntimeError):
    """A checkpoint is incomplete or damaged, or could not be written; the message has the reason."""
