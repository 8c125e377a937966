"""The positions and forms of parameters in a flat tensor.

Note [A storage for each parameter]
    Savers treat parameters with one storage as tied (safetensors), and ``torch.save(param)`` writes the whole
    storage. So each parameter has its own, exactly its slice of the flat tensor, made by DLPack in bytes, as
    it lacks some dtypes. `InPlaceValues.receive` tells autograd of a gather. The storage cannot be resized,
    and on CUDA its ``record_stream`` does nothing. A parameter moved to shared memory gets other memory.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.utils.dlpack import from_dlpack, to_dlpack  # type: ignore[attr-defined]

from zero_optim.compat.streams import is_asynchronous
from zero_optim.plan.layout import Layout
from zero_optim.plan.strides import dense_strides


class Form(NamedTuple):
    """A parameter's shape, strides, dtype and device when planned, the same on every rank."""

    dtype: torch.dtype
    device: torch.device
    size: torch.Size
    stride: tuple[int, ...]

    @classmethod
    def of(cls, param: Tensor) -> "Form":
        """Read the form of a parameter."""
        return cls(param.dtype, param.device, param.shape, dense_strides(param))

    def fits(self, param: Tensor) -> bool:
        """Whether a parameter can be copied to its position; strides may differ."""
        return (self.dtype, self.device, self.size) == (param.dtype, param.device, param.shape)

    def check(self, param: Tensor) -> None:
        """Raise if a parameter no longer fits."""
        if not self.fits(param):
            raise RuntimeError(
                f"a parameter became {param.dtype} {tuple(param.shape)} on {param.device}; when the "
                f"optimizer was built it was {self.dtype} {tuple(self.size)} on {self.device}. Convert or "
                "move the model first, then build the optimizer"
            )


def with_own_storages(flat: Tensor, forms: Sequence[Form], layout: Layout) -> list[Tensor]:
    """View each parameter's slice of ``flat``, with its own storage: Note [A storage for each parameter]."""
    octets, size = flat.view(torch.uint8), flat.element_size()
    return [_over(octets[at * size :], form) for form, at in zip(forms, layout.offsets(), strict=True)]


def _over(octets: Tensor, form: Form) -> Tensor:
    """Make a tensor over the first bytes of ``octets``, whose storage ends with it."""
    empty = torch.empty(0, dtype=form.dtype, device=form.device)
    nbytes = form.size.numel() * empty.element_size()
    if nbytes == 0:
        return empty.reshape(form.size)
    storage = from_dlpack(to_dlpack(octets[:nbytes])).untyped_storage()
    return empty.set_(storage, 0, form.size, form.stride)


def can_be_views(params: Sequence[Tensor]) -> bool:
    """Whether parameters can become views of a flat tensor with own storages."""
    device = params[0].device
    if device.type == "cpu" and any(param.untyped_storage().is_shared() for param in params):
        return False  # other processes use them where they are
    try:
        byte = torch.zeros(1, dtype=torch.uint8, device=device)
        return _over(byte, Form.of(byte)).data_ptr() == byte.data_ptr()
    except (BufferError, NotImplementedError, RuntimeError, TypeError, ValueError):
        return False  # the device has no DLPack


def zero_padding(flat: Tensor, layout: Layout, start: int = 0) -> None:
    """Zero the padding, which is sent, of a flat tensor or its row at ``start``; leave the rest."""
    at, stop = start, start + flat.numel()
    for row in layout.rows:
        for extent in row.extents if start <= row.start and row.stop <= stop else ():
            if extent.offset > at:
                flat[at - start : extent.offset - start].zero_()
            at = extent.end
    flat[at - start :].zero_()


def is_freed(tensor: Tensor) -> bool:
    """Whether a tensor is the data of a freed parameter; False for a single element."""
    return tensor.layout is torch.strided and tensor.numel() > 1 and not any(tensor.stride())


def shown_when_freed(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return the data of a freed parameter of this shape."""
    value = math.nan if dtype.is_floating_point or dtype.is_complex else 0
    return torch.full((), value, dtype=dtype, device=device).expand(tuple(shape))


class FreedParams:
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
        self._versions = [param._version for param in self._params]

    def was_written(self) -> bool:
        """Whether a parameter was written to since `note_versions`; on accelerators not if by ``.data``."""
        # Some writes in place do not notice that the elements have one place in memory.
        if self._versions != [param._version for param in self._params]:
            return True
        octets = self._elements.view(torch.uint8)
        if is_asynchronous(octets.device) or torch.equal(octets, self._octets):  # else the CPU would wait
            return False
        octets.copy_(self._octets)  # this is told once
        return True
