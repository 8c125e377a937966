"""Values that all ranks take from rank 0: when a model is wrapped, and of buffers before a forward pass."""

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from zero_optim.comm.collectives import RankGroup
from zero_optim.compat import private
from zero_optim.ddp.wrapper_checks import ignored_names
from zero_optim.plan.strides import dense_strides, in_order_of_memory

_AT_ONCE = 16  # broadcasts under way
_BUFFERS_AT_ONCE = 250 * 2**20  # bytes, as in PyTorch's DDP


@torch.no_grad()
def take_values_of_first(group: RankGroup, tensors: Iterable[Tensor]) -> None:
    """Give tensors the values of rank 0, in place; all ranks call, and it communicates."""
    dense = [tensor.detach() for tensor in tensors if tensor.numel() and group.size > 1]
    for device in dict.fromkeys(tensor.device for tensor in dense):
        there = [tensor for tensor in dense if tensor.device == device]
        for start in range(0, len(there), _AT_ONCE):
            some = there[start : start + _AT_ONCE]
            rows = [in_order_of_memory(tensor, dense_strides(tensor)) for tensor in some]
            for work in group.broadcast_rows([(0, row) for row in rows], "the values of rank 0"):
                work.wait()
            for tensor, row in zip(some, rows, strict=True):
                if row.data_ptr() != tensor.data_ptr():
                    tensor.copy_(row.as_strided(tensor.shape, dense_strides(tensor)))


def seen_buffers(module: nn.Module) -> list[Tensor]:
    """List the buffers of a module without ignored ones."""
    ignored = ignored_names(module)
    return [buffer for name, buffer in module.named_buffers() if name not in ignored]


@torch.no_grad()
def send_buffers(module: nn.Module, group: RankGroup) -> None:
    """Give every rank the buffers of the first; all ranks call."""
    buffers = seen_buffers(module)
    if not buffers:
        return
    sending = group.during("buffers").begin_work()
    with sending, private.unsafe_preserve_version_counter(tuple(buffers)):
        private.broadcast_coalesced(group.process_group, buffers, _BUFFERS_AT_ONCE, 0)
