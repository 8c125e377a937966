"""Rows of a tensor in the forms that ``torch.distributed.checkpoint`` (DCP) takes: to be saved, to be loaded.

DCP asks an object which part of a whole it holds: by methods with names of their own, which its planners
look for. So the state of a cut parameter is saved as one tensor, of which each owner writes its rows.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

from zero_optim.checkpoint.data import blank
from zero_optim.checkpoint.safetensors import Box, rows_box


class RowsToLoad:
    """Memory for rows of a tensor of which DCP loads a part.

    Args:
        shape: of the whole tensor.
        dtype: of its elements.
        start, stop: the rows.

    Attributes:
        rows: on the CPU, contiguous.
    """

    def __init__(self, shape: Sequence[int], dtype: torch.dtype, start: int, stop: int) -> None:
        self._box = rows_box("", dtype, shape, start, stop)
        self.rows = blank(self._box.sizes, dtype)

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        """Say to DCP which part it is."""
        return [_chunk(self._box)]


class RowsToSave(Tensor):
    """Rows of a tensor, which DCP saves as a part of it.

    It shares the memory of the rows. What copies it for a save in the background keeps what it is.
    """

    _box: Box

    @staticmethod
    def of(rows: Tensor, shape: Sequence[int], start: int) -> "RowsToSave":
        """Name rows a part of a tensor.

        Args:
            rows: a plain dense tensor.
            shape: of the whole.
            start: the first row.
        """
        made = rows.detach().as_subclass(RowsToSave)
        made._box = rows_box("", rows.dtype, shape, start, start + rows.shape[0])
        return made

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:  # noqa: ANN401 - whatever the function returns
        """Run a function of PyTorch; refuse to copy the rows to a tensor that would take them for a whole.

        Raises:
            TypeError: they would be.
        """
        if func is Tensor.copy_ and not isinstance(args[0], cls):
            raise TypeError(
                "rows of a cut parameter's state cannot be staged by this stager, which would save them as a "
                "whole tensor: use dcp.save, checkpoint.save_async, or an optimizer built with cuts=False"
            )
        run: Callable[..., Any] = super().__torch_function__
        result = run(func, types, args, kwargs or {})
        source = args[0] if args else None
        if isinstance(result, cls) and isinstance(source, cls):
            result._box = source._box
        return result

    def __create_write_items__(self, fqn: str, _object: object) -> list[WriteItem]:
        """Say to DCP what to write."""
        chunk = _chunk(self._box)
        about = TensorProperties.create_from_tensor(self.as_subclass(Tensor))
        data = TensorWriteData(chunk, about, torch.Size(self._box.shape))
        return [WriteItem(MetadataIndex(fqn, chunk.offsets), WriteItemType.SHARD, tensor_data=data)]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        """Say to DCP which part it is."""
        return [_chunk(self._box)]

    def __get_tensor_shard__(self, _index: MetadataIndex) -> Tensor:
        """Give DCP the rows."""
        return self.as_subclass(Tensor)


def _chunk(box: Box) -> ChunkStorageMetadata:
    return ChunkStorageMetadata(torch.Size(box.offsets), torch.Size(box.sizes))
