"""How and where owners keep the parameters of units. No communication."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from zero_optim.plan.layout import Layout
from zero_optim.shard.freed import is_freed
from zero_optim.shard.keeping import Keeping, RowKeeping
from zero_optim.shard.on_host import HostKeeping
from zero_optim.shard.pages import FreePages
from zero_optim.shard.row_bucket import UnitBucket


@dataclass(frozen=True, slots=True, eq=False)
class Store:
    """A `RowStore`: the parameters of units by unit number, their compute dtypes, free pages and storage."""

    units: dict[Tensor, int] = field(default_factory=dict)
    compute_dtypes: Mapping[Tensor, torch.dtype] = field(default_factory=dict)  # if owners keep another one
    keeping: RowKeeping | None = None  # None for memory where the parameters are
    pages: FreePages = field(default_factory=FreePages)  # of the CPU, that flat tensors use in turn

    def bucket(self, params: list[Tensor], layout: Layout, rank: int, label: str = "") -> UnitBucket:
        """See `RowStore`."""
        dtype = self.compute_dtypes.get(params[0])
        return UnitBucket(params, layout, rank, label, dtype=dtype, keeping=self.keeping, pages=self.pages)

    def freed(self) -> set[Tensor]:
        """See `RowStore`."""
        return set(filter(is_freed, self.units))

    @property
    def files(self) -> Keeping | None:
        """The storage in files, or None."""
        return self.keeping if isinstance(self.keeping, Keeping) else None

    @property
    def on_host(self) -> HostKeeping | None:
        """The storage on the host of an accelerator's model, or None."""
        return self.keeping if isinstance(self.keeping, HostKeeping) else None

    def describe(self) -> str:
        """Describe the storage as text for ranks to compare."""
        return "None" if self.keeping is None else '"cpu"' if self.on_host else "an Offload"

    def anew(self) -> "Store":
        """Return the same for another optimizer, with new files."""
        return self if self.keeping is None else replace(self, keeping=self.keeping.anew())
