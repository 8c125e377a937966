"""What a rank owns of a model on an accelerator, kept in memory of the host. Nothing here communicates.

Note [Kept on the host]
    With ``offload="cpu"`` a rank's rows, reduced gradients, state, masters and averages are in memory of
    the host, and the optimizer steps on the CPU. The device has the units that are whole and the gradients
    on their way.

    Host memory is pinned, so copies run beside the CPU. The CPU waits for the copies under way whenever
    somebody asks for rows (`Leaves.rows`, `UnitBucket.kept`) or a gradient (`PartialGradient.piece`): as a
    rule in the step, which waits for the end of the backward pass all the same. A device cannot add to what
    is on the host. So a gradient of before comes to the device, and the sum goes back, without a wait of
    the CPU.
"""

from collections.abc import Iterable, Iterator

import torch
from torch import Tensor

from zero_optim.compat.streams import HostCopy, LateCopies, host_memory


class HostKeeping:
    """Keeps rows and gradients in memory of the host; see Note [Kept on the host]."""

    def __init__(self) -> None:
        self._copies = LateCopies()

    def anew(self) -> "HostKeeping":
        """Make another one."""
        return HostKeeping()

    def reserve_rows(self, nbytes: Iterable[int]) -> None:
        """Reserve nothing: memory of the host is not reserved."""

    def wait(self) -> None:
        """Wait on the CPU until what is kept can be read and written."""
        self._copies.wait()

    # ------------------------------------------------------------------ rows

    def new_row(self, values: Tensor) -> Tensor:
        """Make a row, 1-D, with some values of the device."""
        row = host_memory(values)
        self.write(row, values)
        return row

    def write(self, row: Tensor, values: Tensor) -> None:
        """Copy values, of the device or of the host, to a row; the CPU waits."""
        self.wait()
        row.copy_(values)

    def read(self, row: Tensor, target: Tensor) -> None:
        """Start to copy a row to the device."""
        self._copies.to_place(target, row)

    def keep(self, tensors: Iterable[Tensor]) -> None:
        """Leave tensors where they are kept already."""

    def brought(self, values: Tensor) -> Tensor:
        """Return values of the device where they can be compared with rows; the CPU waits."""
        return values.to("cpu") if values.is_sparse else HostCopy(values).read()

    # ------------------------------------------------------------------ gradients

    def copies(self, tensors: Iterable[Tensor]) -> Iterator[Tensor]:
        """Start to copy tensors of the device; they must not be read before `wait`."""
        return map(self._copies.to_host, tensors)

    def add(self, kept: Tensor, tensor: Tensor) -> None:
        """Add a tensor of the device to one that is kept; the CPU does not wait."""
        total = torch.empty_like(tensor, dtype=kept.dtype)
        self._copies.to_place(total, kept)
        self._copies.to_place(kept, total.add_(tensor))
