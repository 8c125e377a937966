"""Where a fully sharded model keeps things for good: in files, as `Offload` says, or on the CPU."""

import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from zero_optim.compat.streams import is_asynchronous
from zero_optim.shard.keeping import FileKeeping, HostKeeping, RowKeeping
from zero_optim.shard.mapped import MappedMemory, why_not_here


@dataclass(frozen=True, slots=True)
class Offload:
    """Keep what a rank owns in mapped files: its rows of parameters and gradients, their state and averages.

    For parameters on the CPU, on Linux. The files have no names, can be read by nobody else, and are gone
    when the process ends, however it does. Ranks of one machine may use the same folder.

    Args:
        folder: an existing folder on a disk; not one in memory (tmpfs), where nothing would be gained.
        budget: how many bytes of that a rank may have resident at a time, while it is trained. At least what
            one parameter takes while it is stepped. What units take while they are whole comes on top.

    Raises:
        TypeError: an argument is of the wrong kind.
        ValueError: the folder does not exist, or the budget is not above 0.
    """

    folder: str | os.PathLike[str]
    budget: int

    def __post_init__(self) -> None:
        """Check the arguments."""
        if not isinstance(self.folder, str | os.PathLike):
            raise TypeError(f"expected folder to be a path, got {self.folder!r}")
        if type(self.budget) is not int:
            raise TypeError(f"expected budget to be a number of bytes, got {self.budget!r}")
        if self.budget <= 0:
            raise ValueError(f"expected budget to be above 0 bytes, got {self.budget}")
        if not Path(self.folder).is_dir():
            raise ValueError(f"expected folder to be an existing folder, got {os.fspath(self.folder)!r}")


def keeping_for(offload: object, params: Iterable[Tensor]) -> RowKeeping:
    """Return what keeps the rows of the units' parameters."""
    if offload is None:
        return RowKeeping()
    if offload == "cpu":
        here = next((param.device for param in params if not is_asynchronous(param.device)), None)
        if here is not None:
            raise ValueError(
                f'offload="cpu" is for a model on an accelerator, and there are parameters on {here}: leave '
                "it out, or give an Offload, which keeps things in files"
            )
        return HostKeeping()
    if not isinstance(offload, Offload):
        raise TypeError(f'expected offload to be an Offload, "cpu" or None, got {offload!r}')
    elsewhere = next((param.device for param in params if param.device.type != "cpu"), None)
    if elsewhere is not None:
        raise ValueError(
            f"an Offload keeps parameters of the CPU in files, and these are on {elsewhere}: give "
            'offload="cpu" to keep them on the CPU'
        )
    reason = why_not_here()
    if reason is not None:
        raise ValueError(f"offload is not possible here: {reason}")
    return FileKeeping(MappedMemory(Path(offload.folder)), offload.budget)
