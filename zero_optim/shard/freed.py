"""What parameters show while they are freed, and whether somebody has written to it.

See Note [Freed in place] in `zero_optim.shard.units`. Nothing here communicates.
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from zero_optim.compat.streams import is_asynchronous


class ShownWhenFreed:
    """What the parameters of one bucket show while they are freed: an element for each, NaN, expanded."""

    def __init__(self, params: list[Tensor], dtype: torch.dtype, device: torch.device) -> None:
        self._params = params
        self._elements = torch.empty(len(params), dtype=dtype, device=device)
        self._elements.copy_(shown_when_freed(self._elements.shape, dtype, device))
        self._octets = self._elements.view(torch.uint8).clone()
        pairs = zip(self._elements, params, strict=True)
        self.tensors = [element.expand(param.shape) for element, param in pairs]
        self._versions: list[int] = []  # of the parameters when they were freed

    def note_versions(self) -> None:
        """Note the versions that the parameters have now: what comes later is somebody's write."""
        self._versions = _versions(self._params)

    def was_written(self) -> bool:
        """Whether somebody has written to a parameter since `note_versions`; of some writes it tells once."""
        # Some writes in place do not notice that the elements have one place in memory.
        return self._versions != _versions(self._params) or self._has_other_values()

    def _has_other_values(self) -> bool:
        """Whether somebody has written to ``param.data``, which changes no version; unknown of a device."""
        octets = self._elements.view(torch.uint8)
        # On an asynchronous device the CPU would have to wait.
        if is_asynchronous(octets.device) or torch.equal(octets, self._octets):
            return False
        octets.copy_(self._octets)  # this is told once
        return True

    def is_viewed_by(self, tensor: Tensor) -> bool:
        """Whether a tensor is a view of what a parameter shows."""
        address = tensor.data_ptr()
        return any(address == shown.data_ptr() for shown in self.tensors)


def _versions(params: list[Tensor]) -> list[int]:
    return [param._version for param in params]


def is_freed(tensor: Tensor) -> bool:
    """Whether a tensor is what a freed parameter shows; not known of a single element."""
    return tensor.layout is torch.strided and tensor.numel() > 1 and not any(tensor.stride())


def shown_when_freed(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Make what a freed parameter of some form shows."""
    value = math.nan if dtype.is_floating_point or dtype.is_complex else 0
    return torch.full((), value, dtype=dtype, device=device).expand(tuple(shape))
