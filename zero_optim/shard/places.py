"""The places of parameters in a flat tensor, and the form that they have there. Nothing here communicates.

Note [A storage for each parameter]
    Savers such as those of safetensors and accelerate treat parameters with one storage as tied, and keep one
    of them. ``torch.save(param)`` writes the whole storage. So each parameter of a bucket has its own. It
    comes from DLPack: a capsule of a slice of the flat tensor becomes a tensor with its own storage, exactly
    as long as the slice. This tensor keeps the flat tensor's memory alive. The slice has the dtype bytes,
    since DLPack does not know every dtype; the tensor gets its dtype afterwards. Autograd cannot see that a
    gather into the flat tensor changes a parameter, so `ParamBucket.settle` tells it.

    Such a storage cannot be resized: it would reach into the next parameter's memory. It can move to shared
    memory (by ``share_memory_``, or when it is sent to another process): then PyTorch puts other memory into
    the same storage. Such a parameter stays there, and gathers copy it.

    On CUDA the memory belongs to the flat tensor's block of the caching allocator. ``param.record_stream``
    does nothing, as for every tensor whose memory does not come from that allocator directly. The block is
    reused when the last parameter of the bucket is gone. Streams need no care here: the capsule is made and
    used at once, and nothing is read. PyTorch makes a CUDA handle for another process only of what begins a
    block of the allocator, by its source. So such a parameter can hardly be sent to one;
    ``parameters_as_bucket_view=False`` avoids that. No GPU has been asked yet.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.utils.dlpack import from_dlpack, to_dlpack  # type: ignore[attr-defined]

from zero_optim.plan.layout import Layout
from zero_optim.plan.memory import dense_strides


class Form(NamedTuple):
    """The form of a parameter when it was planned: the same on every rank, whatever happens to it later."""

    dtype: torch.dtype
    device: torch.device
    size: torch.Size
    stride: tuple[int, ...]

    @classmethod
    def of(cls, param: Tensor) -> "Form":
        """Read the form of a parameter."""
        return cls(param.dtype, param.device, param.shape, dense_strides(param))

    def fits(self, param: Tensor) -> bool:
        """Whether a parameter can still be copied to its place; its strides may differ by now."""
        return (self.dtype, self.device, self.size) == (param.dtype, param.device, param.shape)

    def check(self, param: Tensor) -> None:
        """Refuse a parameter that no longer fits."""
        if not self.fits(param):
            raise RuntimeError(
                f"a parameter became {param.dtype} {tuple(param.shape)} on {param.device}; when the "
                f"optimizer was built it was {self.dtype} {tuple(self.size)} on {self.device}. Convert or "
                "move the model first, then build the optimizer"
            )


def _starts(layout: Layout) -> list[int]:
    """Tell where each parameter begins. The extents of a cut one follow each other, so its first one says."""
    first: dict[int, int] = {}
    for row in layout.rows:
        for extent in row.extents:
            first.setdefault(extent.param, extent.offset)
    return [first[param] for param in range(len(layout.numels))]


def views_in(flat: Tensor, forms: Sequence[Form], layout: Layout) -> list[Tensor]:
    """View each parameter's place in ``flat`` with the parameter's shape and memory format."""
    starts = _starts(layout)
    return [flat.as_strided(form.size, form.stride, at) for form, at in zip(forms, starts, strict=True)]


def with_own_storages(flat: Tensor, forms: Sequence[Form], layout: Layout) -> list[Tensor]:
    """Like `views_in`, but each view has its own storage. See Note [A storage for each parameter]."""
    octets, size = flat.view(torch.uint8), flat.element_size()
    return [_over(octets[at * size :], form) for form, at in zip(forms, _starts(layout), strict=True)]


def _over(octets: Tensor, form: Form) -> Tensor:
    """Make a tensor of some form over the first of some bytes. Its storage ends where the tensor does."""
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
