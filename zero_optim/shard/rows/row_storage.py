"""Where a rank stores its rows and gradients: with the parameters, or in host memory of an accelerator.

Note [Kept on the host]
    With ``offload="cpu"`` what a rank owns lies in pinned host memory, and the optimizer steps on the CPU,
    which waits for copies only where rows or gradients are read. A device cannot add to host memory, so an
    earlier gradient returns to it, and the sum goes back.
"""

from collections.abc import Iterable, Iterator
from typing import ClassVar

import torch
from torch import Tensor

from zero_optim.compat.streams import HostCopy, LateCopies, host_memory, is_asynchronous


class RowStorage:
    """Stores rows and gradients in ordinary memory, on the parameters' device."""

    on_host: ClassVar[bool] = False
    description: ClassVar[str] = "None"  # for ranks to compare

    def new_row(self, values: Tensor) -> Tensor:
        """Return a 1-D row with these values."""
        return values

    def write(self, row: Tensor, values: Tensor) -> None:
        """Copy values to a row; the CPU waits if the row is on the host."""
        row.copy_(values)

    def read(self, row: Tensor, target: Tensor) -> None:
        """Start to copy a row to a tensor of any dtype on the parameters' device."""
        target.copy_(row)

    def brought(self, values: Tensor) -> Tensor:
        """Return values of the parameters' device where they can be compared with rows; the CPU waits."""
        return values

    def copies(self, tensors: Iterable[Tensor]) -> Iterator[Tensor]:
        """Return stored copies of tensors, valid after `wait`; in ordinary memory the tensors."""
        return iter(tensors)

    def add(self, stored: Tensor, tensor: Tensor) -> None:
        """Add a tensor to a stored one; the CPU does not wait."""
        stored.add_(tensor)

    def wait(self) -> None:
        """Block the CPU until stored tensors can be read and written."""


class HostStorage(RowStorage):
    """Stores rows and gradients of an accelerator in host memory: Note [Kept on the host]."""

    on_host = True
    description = '"cpu"'

    def __init__(self) -> None:
        self._copies = LateCopies()

    def wait(self) -> None:
        """See `RowStorage`."""
        self._copies.wait()

    def new_row(self, values: Tensor) -> Tensor:
        """See `RowStorage`."""
        row = host_memory(values)
        self.write(row, values)
        return row

    def write(self, row: Tensor, values: Tensor) -> None:
        """See `RowStorage`."""
        self.wait()
        row.copy_(values)

    def read(self, row: Tensor, target: Tensor) -> None:
        """See `RowStorage`."""
        self._copies.to_place(target, row)

    def brought(self, values: Tensor) -> Tensor:
        """See `RowStorage`."""
        return values.to("cpu") if values.is_sparse else HostCopy(values).read()

    def copies(self, tensors: Iterable[Tensor]) -> Iterator[Tensor]:
        """See `RowStorage`."""
        return map(self._copies.to_host, tensors)

    def add(self, stored: Tensor, tensor: Tensor) -> None:
        """See `RowStorage`."""
        total = torch.empty_like(tensor, dtype=stored.dtype)
        self._copies.to_place(total, stored)
        self._copies.to_place(stored, total.add_(tensor))


def storage_for(offload: object, params: Iterable[Tensor]) -> RowStorage:
    """Return where the rows of parameters are stored; ValueError if that cannot be."""
    if offload is None:
        return RowStorage()
    if not isinstance(offload, str) or offload != "cpu":
        raise ValueError(
            'expected offload to be "cpu", which keeps what a rank owns in host memory, or None, got '
            f"{offload!r}"
        )
    here = next((param.device for param in params if not is_asynchronous(param.device)), None)
    if here is not None:
        raise ValueError(
            f'offload="cpu" is for a model on an accelerator, and there are parameters on {here}: leave it '
            "out"
        )
    return HostStorage()
