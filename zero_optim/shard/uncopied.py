"""What of a fully sharded model refuses to be copied. Nothing here communicates."""

from typing import NoReturn


class Uncopied:
    """Part of a fully sharded model or its optimizer: a copy would gather in the place of the original."""

    __slots__ = ()

    def __reduce__(self) -> NoReturn:
        """Refuse to be copied or pickled."""
        raise RuntimeError(
            "a fully sharded model and its optimizer cannot be copied or pickled: no rank holds the "
            "parameters. Save model.state_dict(), or use zero_optim.checkpoint.save. For averages, as "
            "AveragedModel makes them, give the optimizer ema_decay"
        )
