"""Measures what a fully sharded model has in memory. Does not communicate."""

from typing import Any

from torch import Tensor, nn

from zero_optim.ddp import FullyShardedDataParallel


class UnitMeter:
    """Notes, while it is there, how many bytes of whole units a model has at most.

    It looks before each module is called, and when each gradient comes: then the unit in use is whole, and
    the next one may be on its way.

    Args:
        model: which is measured.

    Attributes:
        kept_nbytes: of parameters that this rank keeps for good.
    """

    def __init__(self, model: FullyShardedDataParallel) -> None:
        self._units = model.units
        buckets = [bucket for unit in self._units.units for bucket in unit.buckets]
        self.kept_nbytes = sum(bucket.row.nbytes for bucket in buckets)
        self._peak = 0
        modules, trained = model.module.modules(), model.module.parameters()
        self._hooks = [module.register_forward_pre_hook(self._called) for module in modules]
        tensors: list[Any] = [param for param in trained if param.requires_grad]
        self._hooks += [param.register_hook(self._came) for param in tensors]

    def _called(self, module: nn.Module, inputs: object) -> None:
        self._look()

    def _came(self, gradient: Tensor) -> None:
        self._look()

    def _look(self) -> None:
        self._peak = max(self._peak, self._units.nbytes_live())

    def stop(self) -> int:
        """Look no longer.

        Returns:
            The most bytes that units took at once, beside what this rank keeps for good.
        """
        for hook in self._hooks:
            hook.remove()
        return self._peak
