"""All values of a unit as its owners keep them, where the model computes in another dtype."""

import torch
from torch import Tensor
from torch.nn import Parameter

from zero_optim.shard.units import UnitBucket


class WideBucket:
    """The parameters of a `UnitBucket` in the dtype that owners keep, for a state dict or a load.

    It is gathered like a bucket (`zero_optim.shard.gathers.start_gather`), in memory of its own. The
    parameters of the model stay as they are. Nothing here communicates.

    Args:
        bucket: of the unit.

    Attributes:
        values: for each parameter one that stands for it, once it was gathered.
    """

    def __init__(self, bucket: UnitBucket) -> None:
        self._bucket = bucket
        self._flat: Tensor | None = None
        self.values: dict[Tensor, Parameter] = {}
        self.params = bucket.params
        self.layout = bucket.layout
        self.label = f"{bucket.label}, as owners keep it"

    @property
    def device(self) -> torch.device:
        """See `ParamBucket`."""
        return self._bucket.device

    @property
    def nbytes(self) -> int:
        """The size of the flat tensor."""
        return self.layout.numel * self._bucket.row.element_size()

    @property
    def nbytes_to_gather(self) -> int:
        """See `ParamBucket`."""
        return self.nbytes

    def refresh(self) -> None:
        """See `UnitBucket.refresh`."""
        self._bucket.refresh()

    def fill(self) -> Tensor:
        """Make the flat tensor, with this rank's row in it.

        Raises:
            RuntimeError: a parameter was written to while it was freed, or is whole for somebody.
        """
        self.refresh()
        self._flat = self._bucket.flat_as_kept()
        return self._flat

    def settle(self, flat: Tensor) -> None:
        """Show the values, once the flat tensor has all rows."""
        views = zip(self.params, self._bucket.views(flat), strict=True)
        self.values = {param: Parameter(view, requires_grad=param.requires_grad) for param, view in views}

    def take_over(self) -> None:
        """Have the owner of each row keep what was written to the values; the parameters are freed."""
        assert self._flat is not None  # it was filled
        self._bucket.take_over(self._flat)
