"""What of a fully sharded model refuses to be copied. Nothing here communicates."""

from typing import NoReturn


class Uncopied:
    """A part of a fully sharded model, or of its optimizer: where it is copied or pickled, that raises.

    A copy would have this rank's rows, and gather in the place of the model that it was copied from.
    """

    __slots__ = ()

    def __reduce__(self) -> NoReturn:
        """Refuse; ``copy`` and ``pickle`` call it.

        Raises:
            RuntimeError: always.
        """
        raise RuntimeError(
            "a fully sharded model and its optimizer cannot be copied or pickled: no rank holds the "
            "parameters. Save model.state_dict(), or use zero_optim.checkpoint.save. For averages, as "
            "AveragedModel makes them, give the optimizer ema_decay"
        )
