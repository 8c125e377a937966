"""The data of freed parameters, and checks for writes to it: Note [Freed in place]. No communication."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from zero_optim.compat.streams import is_asynchronous


class ShownWhenFreed:
    """The data of one bucket's freed parameters: one NaN element each, expanded."""

    def __init__(self, params: list[Tensor], dtype: torch.dtype, device: torch.device) -> None:
        self._params = params
        self._elements = torch.empty(len(params), dtype=dtype, device=device)
        self._elements.copy_(shown_when_freed(self._elements.shape, dtype, device))
        self._octets = self._elements.view(torch.uint8).clone()
        pairs = zip(self._elements, params, strict=True)
        self.tensors = [element.expand(param.shape) for element, param in pairs]
        self._versions: list[int] = []  # of the parameters when they were freed

    def note_versions(self) -> None:
        """Store the parameters' versions; later changes are the user's writes."""
        self._versions = _versions(self._params)

    def was_written(self) -> bool:
        """Whether a parameter was written to since `note_versions`; a write to ``.data`` is reported once."""
        # Some writes in place do not notice that the elements have one place in memory.
        return self._versions != _versions(self._params) or self._has_other_values()

    def _has_other_values(self) -> bool:
        """Whether ``param.data`` was written to, which changes no version; not checked on a device."""
        octets = self._elements.view(torch.uint8)
        # On an asynchronous device the CPU would have to wait.
        if is_asynchronous(octets.device) or torch.equal(octets, self._octets):
            return False
        octets.copy_(self._octets)  # this is told once
        return True

    def is_viewed_by(self, tensor: Tensor) -> bool:
        """Whether a tensor is a view of a freed parameter's data."""
        address = tensor.data_ptr()
        return any(address == shown.data_ptr() for shown in self.tensors)


def _versions(params: list[Tensor]) -> list[int]:
    return [param._version for param in params]


def is_freed(tensor: Tensor) -> bool:
    """Whether a tensor is the data of a freed parameter; False for a single element."""
    return tensor.layout is torch.strided and tensor.numel() > 1 and not any(tensor.stride())


def shown_when_freed(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return the data of a freed parameter of this shape."""
    value = math.nan if dtype.is_floating_point or dtype.is_complex else 0
    return torch.full((), value, dtype=dtype, device=device).expand(tuple(shape))
