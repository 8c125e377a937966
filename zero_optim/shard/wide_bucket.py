"""A bucket of rows in the dtype that its owners keep. No communication."""

from collections.abc import Collection

import torch
from torch import Tensor

from zero_optim.shard.bucket import Bucket
from zero_optim.shard.row_bucket import RowBucket


class WideBucket(Bucket):
    """The same bucket in the owners' dtype, gathered beside its parameters for a state dict or a load."""

    def __init__(self, bucket: RowBucket) -> None:
        super().__init__(
            bucket.params,
            bucket.layout,
            bucket.rank,
            f"{bucket.label}, as owners keep it",
            slices=bucket.slices,
            dtype=bucket.row.values.dtype,
            as_views=False,
        )
        self.schedule = bucket.schedule
        self.values: dict[Tensor, Tensor] = {}
        self.needs_gather = True
        self._bucket = bucket
        self._flat: Tensor | None = None

    def fill(self) -> Tensor:
        """Return the flat tensor with this rank's row; raises as `RowBucket.refresh`."""
        self._bucket.refresh()
        self._flat = torch.zeros(self.layout.numel, dtype=self.dtype, device=self.device)
        self._bucket.row.read(self._flat[self._bucket.row.span])
        return self._flat

    def receive(self, flat: Tensor, changed: Collection[Tensor] | None = None) -> None:
        """Set `values` after all rows have come."""
        self.values = dict(zip(self.params, self.views(flat), strict=True))

    def take_written(self) -> None:
        """Copy written values into the owners' rows; the parameters are freed."""
        assert self._flat is not None  # it was filled
        self._bucket.write_row(self._flat[self._bucket.row.span])
