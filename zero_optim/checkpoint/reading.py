"""What a rank has read of a checkpoint: tensors by key, and the values that are put together from them."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from zero_optim.checkpoint.storage import CheckpointReader, Rows
from zero_optim.checkpoint.values import Json, unpack
from zero_optim.comm.encoding import Nested
from zero_optim.plan.memory import strides_of_rows


class Read:
    """What this rank has read.

    Args:
        reader: of the checkpoint.
        wanted: the tensors to read, by key, which is done at once; and of each the rows.
    """

    def __init__(self, reader: CheckpointReader, wanted: Mapping[str, Rows]) -> None:
        self.values = reader.manifest.values
        self._entries = reader.manifest.entries
        self._tensors = {key: reader.read_tensor(key, rows) for key, rows in wanted.items()}

    def value(self, key: str) -> Nested:
        """Put a value together."""
        return unpack(self.values[key], self.tensor)

    def packed(self, value: Json) -> Nested:
        """Put a value together that is part of another."""
        return unpack(value, self.tensor)

    def tensor(self, key: str, strides: Sequence[int]) -> Tensor:
        """Give a tensor, or what was read of it, with the strides it was saved with."""
        tensor, shape = self._tensors[key], self._entries[key].shape
        if tuple(tensor.shape) != shape:
            strides = strides_of_rows(strides, shape[0], tensor.shape)
        return with_strides(tensor, strides)

    def blank(self, key: str) -> Tensor:
        """Allocate what another rank has read."""
        entry = self._entries[key]
        assert entry.dtype is not None  # a tensor's
        return torch.empty(entry.shape, dtype=entry.dtype)

    def __getitem__(self, key: str) -> Tensor:
        return self._tensors[key]


def with_strides(tensor: Tensor, strides: Sequence[int]) -> Tensor:
    """Lay a tensor out with some strides, which are dense; copies only if it is laid out otherwise."""
    if tensor.stride() == tuple(strides) or tensor.numel() == 0:
        return tensor
    return torch.empty_strided(tensor.shape, strides, dtype=tensor.dtype).copy_(tensor)
