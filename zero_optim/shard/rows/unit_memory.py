"""The memory of a flat tensor, which is there only while a unit is whole. No communication.

Note [Storages that are resized]
    Pages that moved from a freed unit to the next one (mremap) took the same peak, so storages are resized.
    Two ranks, a GPT of 53 MiB, MiB with moved pages and with resized storages: 163 and 163 (resharded), 175
    and 175 (kept) after `return_freed_memory`; 186 and 202, 214 and 201 where glibc keeps freed blocks. New
    pages are zeroed: after the call an iteration takes 387 instead of 260 ms, with huge pages 277, so these
    are asked for.
"""

import torch
from torch import Tensor

from zero_optim.compat.memory import ask_for_huge_pages, give_back_pages
from zero_optim.compat.streams import record_use


class UnitMemory:
    """The memory of one flat tensor, which PyTorch empties and grows: Note [Storages that are resized]."""

    def __init__(self, numel: int, dtype: torch.dtype, device: torch.device) -> None:
        self.flat: Tensor = torch.empty(numel, dtype=dtype, device=device)
        self._nbytes = self.flat.nbytes
        self.is_there = True

    def grow(self) -> None:
        """Allocate uninitialized memory unless present."""
        storage = self.flat.untyped_storage()
        if storage.nbytes() != self._nbytes:
            storage.resize_(self._nbytes)
            ask_for_huge_pages(self.flat)
        self.is_there = True

    def free(self) -> None:
        """Give the memory to PyTorch's allocator, behind the current stream; RuntimeError if it is shared."""
        storage = self.flat.untyped_storage()
        if self.flat.device.type == "cpu" and storage.is_shared():
            raise RuntimeError(
                "the memory of a fully sharded model's parameters was replaced, as share_memory() does: "
                "share a copy of them"
            )
        if self.is_there:
            record_use(self.flat)  # perhaps it came on another stream, to which the memory goes back
        if storage.resizable():
            storage.resize_(0)
        else:  # a NumPy array may show it
            give_back_pages(self.flat)
        self.is_there = False
