"""How the parameters of units are kept, and what a rank keeps of one. Nothing here communicates."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from zero_optim.shard.keeping import Keeping, RowKeeping
from zero_optim.shard.on_host import HostKeeping
from zero_optim.shard.unit_memory import FreePages


@dataclass(frozen=True, slots=True, eq=False)
class KeptRows:
    """What a rank keeps of a parameter of a unit."""

    stride: tuple[int, ...]  # of the parameter when it is whole, in elements
    rows: Tensor | None  # in memory that stays; None if it owns none


@dataclass(frozen=True, slots=True, eq=False)
class UnitForms:
    """How the parameters of units are kept."""

    compute_dtypes: Mapping[Tensor, torch.dtype] = field(default_factory=dict)  # if owners keep another one
    keeping: RowKeeping | None = None  # None for memory where the parameters are
    pages: FreePages = field(default_factory=FreePages)  # of the CPU, that flat tensors use in turn

    @property
    def files(self) -> Keeping | None:
        """Keeps them in files, if something does."""
        return self.keeping if isinstance(self.keeping, Keeping) else None

    @property
    def on_host(self) -> HostKeeping | None:
        """Keeps them on the host, for a model on an accelerator, if something does."""
        return self.keeping if isinstance(self.keeping, HostKeeping) else None

    def describe(self) -> str:
        """Describe where they are kept, for ranks to compare."""
        return "None" if self.keeping is None else '"cpu"' if self.on_host else "an Offload"

    def anew(self) -> "UnitForms":
        """Return the same for another optimizer, with files of its own."""
        return self if self.keeping is None else replace(self, keeping=self.keeping.anew())
