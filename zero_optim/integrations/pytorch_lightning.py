"""The strategies ``zero1``, ``zero2`` and ``zero3`` of ``pytorch_lightning``, registered on import."""

from pytorch_lightning.strategies import DDPStrategy, StrategyRegistry

from zero_optim.integrations.lightning_strategy import ZeroMixin, register


class ZeroStrategy(ZeroMixin, DDPStrategy):
    """Trains at a stage of ZeRO; arguments are those of `ZeroMixin` and of ``DDPStrategy``."""


register(StrategyRegistry, ZeroStrategy)
