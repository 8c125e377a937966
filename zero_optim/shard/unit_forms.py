"""How and where a unit's parameters are stored. No communication."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from zero_optim.shard.keeping import Keeping, RowKeeping
from zero_optim.shard.on_host import HostKeeping
from zero_optim.shard.unit_memory import FreePages


@dataclass(frozen=True, slots=True, eq=False)
class KeptRows:
    """This rank's part of a unit's parameter."""

    stride: tuple[int, ...]  # of the parameter when it is whole, in elements
    rows: Tensor | None  # in memory that stays; None if it owns none


@dataclass(frozen=True, slots=True, eq=False)
class UnitForms:
    """Compute dtypes, free pages and storage of units."""

    compute_dtypes: Mapping[Tensor, torch.dtype] = field(default_factory=dict)  # if owners keep another one
    keeping: RowKeeping | None = None  # None for memory where the parameters are
    pages: FreePages = field(default_factory=FreePages)  # of the CPU, that flat tensors use in turn

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

    def anew(self) -> "UnitForms":
        """Return the same for another optimizer, with new files."""
        return self if self.keeping is None else replace(self, keeping=self.keeping.anew())
