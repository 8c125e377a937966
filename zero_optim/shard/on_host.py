"""Storage for an accelerator model's rows in host memory. No communication.

Note [Kept on the host]
    With ``offload="cpu"`` a rank's rows, gradients, state, masters and averages lie in pinned host memory,
    and the optimizer steps on the CPU. The device holds whole units and gradients being reduced. Copies run
    beside the CPU, which waits for them only where somebody reads rows (`Leaves.rows`, `UnitBucket.kept`) or
    a gradient (`PartialGradient.piece`), mostly in the step. A device cannot add to host memory, so an
    earlier gradient returns to the device, and the sum goes back.
"""

from collections.abc import Iterable, Iterator

import torch
from torch import Tensor

from zero_optim.compat.streams import HostCopy, LateCopies, host_memory


class HostKeeping:
    """Stores rows and gradients in host memory; see Note [Kept on the host]."""

    def __init__(self) -> None:
        self._copies = LateCopies()

    def anew(self) -> "HostKeeping":
        """Return an empty one."""
        return HostKeeping()

    def reserve_rows(self, nbytes: Iterable[int]) -> None:
        """Do nothing: host memory is not reserved."""

    def wait(self) -> None:
        """Block the CPU until stored tensors can be read and written."""
        self._copies.wait()

    # ------------------------------------------------------------------ rows

    def new_row(self, values: Tensor) -> Tensor:
        """Allocate a 1-D row with these device values."""
        row = host_memory(values)
        self.write(row, values)
        return row

    def write(self, row: Tensor, values: Tensor) -> None:
        """Copy device or host values to a row; the CPU waits."""
        self.wait()
        row.copy_(values)

    def read(self, row: Tensor, target: Tensor) -> None:
        """Start copying a row to the device."""
        self._copies.to_place(target, row)

    def keep(self, tensors: Iterable[Tensor]) -> None:
        """Do nothing: tensors stay in host memory."""

    def brought(self, values: Tensor) -> Tensor:
        """Return host copies of device values; the CPU waits."""
        return values.to("cpu") if values.is_sparse else HostCopy(values).read()

    # ------------------------------------------------------------------ gradients

    def copies(self, tensors: Iterable[Tensor]) -> Iterator[Tensor]:
        """Start copying device tensors; the copies are valid after `wait`."""
        return map(self._copies.to_host, tensors)

    def add(self, kept: Tensor, tensor: Tensor) -> None:
        """Add a device tensor to a stored one; the CPU does not wait."""
        total = torch.empty_like(tensor, dtype=kept.dtype)
        self._copies.to_place(total, kept)
        self._copies.to_place(kept, total.add_(tensor))
