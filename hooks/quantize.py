"""Hooks that send gradients in 8 bits, by an all-gather, since sums of 8-bit numbers do not fit into 8 bits.

Each rank maps its own values affinely to 0 … 255 (Jacob et al., *Quantization and Training of Neural Networks
for Efficient Integer-Arithmetic-Only Inference*, CVPR 2018, arXiv:1712.05877, section 2.1). It sends them
with scale and zero point, and sums in float32 what all ranks sent. Gradients with few bits come from Seide et
al., *1-Bit Stochastic Gradient Descent and its Application to Data-Parallel Distributed Training of Speech
DNNs*, Interspeech 2014. A scale for each group of values comes from QSGD (Alistarh et al., NeurIPS 2017,
arXiv:1610.02132, section 4). Values are rounded to the nearest code: the same numbers always give the same
bits, and the error is at most half a scale.
"""

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional

from zero_optim.compat.streams import record_use
from zero_optim.hooks.bucket import GradBucket, TensorFuture, dense_buffer
from zero_optim.hooks.exchange import group_of, start_all_gather

LEVELS = 255  # the largest code
GROUP_SIZE = 512  # elements that share a scale, as in QSGD's experiments


def quantization_pertensor_hook(
    state: dist.ProcessGroup | None, bucket: GradBucket
) -> torch.futures.Future[torch.Tensor]:
    """Average a bucket quantized to 8 bits with one scale: 1 byte for each element, and 8 for the bucket.

    One all-gather, so each rank receives the bytes of all. All ranks of the group call.

    Args:
        state: the process group; None stands for the default one.
        bucket: dense gradients of any floating dtype.
    """
    buffer = dense_buffer(bucket, "quantization_pertensor_hook")
    return _average_quantized(group_of(state), buffer, max(buffer.numel(), 1))


def quantization_perchannel_hook(
    state: dist.ProcessGroup | None, bucket: GradBucket, group_size: int = GROUP_SIZE
) -> torch.futures.Future[torch.Tensor]:
    """Average a bucket quantized to 8 bits with a scale for each group of neighbours.

    A scale fits few values better than many. 1 byte for each element and 8 for each group, by one all-gather.
    All ranks of the group call.

    Args:
        state: the process group; None stands for the default one.
        bucket: dense gradients of any floating dtype.
        group_size: elements that share a scale.

    Raises:
        ValueError: ``group_size`` is below 1.
    """
    if group_size < 1:
        raise ValueError(
            f"expected a group_size of at least 1 element, got {group_size}: {GROUP_SIZE} is usual"
        )
    return _average_quantized(
        group_of(state), dense_buffer(bucket, "quantization_perchannel_hook"), group_size
    )


def _average_quantized(group: dist.ProcessGroup, buffer: Tensor, group_size: int) -> TensorFuture:
    num_groups = -(-buffer.numel() // group_size)
    padded = functional.pad(buffer.float(), (0, num_groups * group_size - buffer.numel()))
    scales, codes = quantize(padded.view(num_groups, group_size))
    # Scales and codes are bytes in one row: a second collective would have to wait for the first.
    row = torch.cat([scales.view(-1).view(torch.uint8), codes.view(-1)])

    def average(landed: TensorFuture) -> Tensor:
        record_use(buffer)
        rows, total = landed.value(), torch.zeros_like(buffer, dtype=torch.float32)
        # One rank after the other, in the same order on every rank, so that all get the same bits.
        for received in rows.unbind(0):
            header = received[: scales.nbytes].clone().view(torch.float32).view(num_groups, 2)
            values = dequantize(header, received[scales.nbytes :].view(num_groups, group_size))
            total += values.view(-1)[: buffer.numel()]
        return buffer.copy_(total / len(rows))

    return start_all_gather(group, row).then(average)


def quantize(
    values: Tensor,  # (groups, size) float32
) -> tuple[Tensor, Tensor]:  # (groups, 2) float32, (groups, size) uint8
    """Quantize each row to ``code = round(value / scale) + zero_point``. Zeros stay exact.

    Returns:
        Scale and zero point of each row; the codes. `dequantize` gives infinities or NaNs for a row that had
        some.
    """
    if values.numel() == 0:
        return values.new_zeros(len(values), 2), values.to(torch.uint8)
    low, high = values.aminmax(dim=1, keepdim=True)
    low, high = low.clamp(max=0), high.clamp(min=0)
    # At least the smallest normal number: rows of zeros need a scale too. A larger minimum would round
    # gradients of 1e-6 to zero.
    scale = ((high - low) / LEVELS).clamp(min=torch.finfo(torch.float32).tiny)
    zero_point = (-torch.round(low / scale)).clamp(0, LEVELS)
    codes = (torch.round(values / scale) + zero_point).clamp(0, LEVELS)
    return torch.cat([scale, zero_point], dim=1), codes.to(torch.uint8)


def dequantize(
    header: Tensor,  # (groups, 2) float32
    codes: Tensor,  # (groups, size) uint8
) -> Tensor:  # (groups, size) float32
    """Undo `quantize` up to rounding."""
    return (codes.float() - header[:, 1:]) * header[:, :1]
