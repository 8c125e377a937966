"""The places of parameters in a flat tensor, and the form that they have there. Nothing here communicates.

Note [A storage for each parameter]
    Savers such as safetensors' treat parameters with one storage as tied, and ``torch.save(param)`` writes
    the whole storage. So each parameter of a bucket has its own, exactly as long as its slice of the flat
    tensor: it comes from DLPack, in bytes, as DLPack does not know every dtype, and keeps the flat tensor's
    memory alive. Autograd cannot see that a gather into the flat tensor changes a parameter, so
    `ParamBucket.settle` tells it.

    Such a storage cannot be resized. It can move to shared memory (``share_memory_``, or when it is sent to
    another process): PyTorch puts other memory into the same storage, the parameter stays there, and
    gathers copy it. On CUDA the block belongs to the flat tensor and is reused when the last parameter is
    gone; ``record_stream`` of a parameter does nothing, and it can hardly be sent to another process
    (``parameters_as_bucket_view=False``).

Note [Memory that is touched late]
    Padding is sent, so it is zeroed. To zero the whole flat tensor would have all of it resident beside the
    parameters that are about to move in, one after the other, while each gives back the memory that it had.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.utils.dlpack import from_dlpack, to_dlpack  # type: ignore[attr-defined]

from zero_optim.plan.layout import Layout
from zero_optim.plan.memory import dense_strides


class Form(NamedTuple):
    """The form of a parameter when it was planned, the same on every rank."""

    dtype: torch.dtype
    device: torch.device
    size: torch.Size
    stride: tuple[int, ...]

    @classmethod
    def of(cls, param: Tensor) -> "Form":
        """Read the form of a parameter."""
        return cls(param.dtype, param.device, param.shape, dense_strides(param))

    def fits(self, param: Tensor) -> bool:
        """Whether a parameter can be copied to its place; its strides may differ by now."""
        return (self.dtype, self.device, self.size) == (param.dtype, param.device, param.shape)

    def check(self, param: Tensor) -> None:
        """Refuse a parameter that no longer fits."""
        if not self.fits(param):
            raise RuntimeError(
                f"a parameter became {param.dtype} {tuple(param.shape)} on {param.device}; when the "
                f"optimizer was built it was {self.dtype} {tuple(self.size)} on {self.device}. Convert or "
                "move the model first, then build the optimizer"
            )


def views_in(flat: Tensor, forms: Sequence[Form], layout: Layout) -> list[Tensor]:
    """View each parameter's place in ``flat`` with the parameter's shape and memory format."""
    starts = layout.offsets()
    return [flat.as_strided(form.size, form.stride, at) for form, at in zip(forms, starts, strict=True)]


def with_own_storages(flat: Tensor, forms: Sequence[Form], layout: Layout) -> list[Tensor]:
    """Like `views_in`, but each view has its own storage. See Note [A storage for each parameter]."""
    octets, size = flat.view(torch.uint8), flat.element_size()
    return [_over(octets[at * size :], form) for form, at in zip(forms, layout.offsets(), strict=True)]


def _over(octets: Tensor, form: Form) -> Tensor:
    """Make a tensor over the first of some bytes, with a storage that ends where the tensor does."""
    empty = torch.empty(0, dtype=form.dtype, device=form.device)
    nbytes = form.size.numel() * empty.element_size()
    if nbytes == 0:
        return empty.reshape(form.size)
    storage = from_dlpack(to_dlpack(octets[:nbytes])).untyped_storage()
    return empty.set_(storage, 0, form.size, form.stride)


def can_be_views(params: Sequence[Tensor]) -> bool:
    """Whether parameters may move into a flat tensor, and each can have its own storage there."""
    device = params[0].device
    if device.type == "cpu" and any(param.is_shared() for param in params):  # type: ignore[no-untyped-call]
        return False  # other processes use them where they are
    try:
        byte = torch.zeros(1, dtype=torch.uint8, device=device)
        return _over(byte, Form.of(byte)).data_ptr() == byte.data_ptr()
    except (BufferError, NotImplementedError, RuntimeError, TypeError, ValueError):
        return False  # the device has no DLPack


def zero_padding(flat: Tensor, layout: Layout, start: int = 0) -> None:
    """Zero what belongs to no parameter in elements ``[start, start + len(flat))`` of a bucket's flat tensor.

    ``flat`` is all of it, or one row.
    """
    at, stop = start, start + flat.numel()
    for row in layout.rows:
        for extent in row.extents if start <= row.start and row.stop <= stop else ():
            if extent.offset > at:
                flat[at - start : extent.offset - start].zero_()
            at = extent.end
    flat[at - start :].zero_()
