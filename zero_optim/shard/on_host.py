"""Storage for an accelerator model's rows in host memory.

Note [Kept on the host]
    With ``offload="cpu"`` a rank's rows, gradients, state, masters and averages lie in pinned host memory,
    and the optimizer steps on the CPU, which waits for copies only where rows (`Leaves.rows`,
    `UnitBucket.kept`) or gradients (`PartialGradient.piece`) are read. A device cannot add to host memory, so
    an earlier gradient returns to it, and the sum goes back.
"""

from collections.abc import Iterable, Iterator

import torch
from torch import Tensor

from zero_optim.compat.streams import HostCopy, LateCopies, host_memory


class HostKeeping:
    """Stores rows and gradients in host memory: Note [Kept on the host]."""

    def __init__(self) -> None:
        self._copies = LateCopies()

    def anew(self) -> "HostKeeping":
        """See `RowKeeping`."""
        return HostKeeping()

    def reserve_rows(self, nbytes: Iterable[int]) -> None:
        """See `RowKeeping`; reserves nothing."""

    def wait(self) -> None:
        """See `RowKeeping`."""
        self._copies.wait()

    # ------------------------------------------------------------------ rows

    def new_row(self, values: Tensor) -> Tensor:
        """See `RowKeeping`."""
        row = host_memory(values)
        self.write(row, values)
        return row

    def write(self, row: Tensor, values: Tensor) -> None:
        """See `RowKeeping`; the CPU waits."""
        self.wait()
        row.copy_(values)

    def read(self, row: Tensor, target: Tensor) -> None:
        """See `RowKeeping`; only starts the copy."""
        self._copies.to_place(target, row)

    def keep(self, tensors: Iterable[Tensor]) -> None:
        """See `RowKeeping`; tensors stay here."""

    def brought(self, values: Tensor) -> Tensor:
        """See `RowKeeping`; the CPU waits."""
        return values.to("cpu") if values.is_sparse else HostCopy(values).read()

    # ------------------------------------------------------------------ gradients

    def copies(self, tensors: Iterable[Tensor]) -> Iterator[Tensor]:
        """See `RowKeeping`; valid after `wait`."""
        return map(self._copies.to_host, tensors)

    def add(self, kept: Tensor, tensor: Tensor) -> None:
        """See `RowKeeping`; the CPU does not wait."""
        total = torch.empty_like(tensor, dtype=kept.dtype)
        self._copies.to_place(total, kept)
        self._copies.to_place(kept, total.add_(tensor))
