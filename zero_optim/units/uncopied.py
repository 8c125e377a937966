"""A base class for parts of a fully sharded model that must not be copied. No communication."""

from typing import NoReturn


class Uncopied:
    """Refuses copies, which would gather in the original's place."""

    __slots__ = ()

    def __reduce__(self) -> NoReturn:
        """Refuse to be copied or pickled."""
        raise RuntimeError(
            "a fully sharded model and its optimizer cannot be copied or pickled: no rank holds the "
            "parameters. Save model.state_dict(), or use zero_optim.checkpoint.save. For averages, as "
            "AveragedModel makes them, give the optimizer ema_decay"
        )
