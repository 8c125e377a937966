"""Lightning's strategies ``zero1``, ``zero2``, ``zero3`` for ``lightning.pytorch``, registered on import."""

from lightning.pytorch.strategies import DDPStrategy, StrategyRegistry

from zero_optim.integrations.lightning_strategy import ZeroMixin, register


class ZeroStrategy(ZeroMixin, DDPStrategy):
    """Trains at a stage of ZeRO; arguments are those of `ZeroMixin` and of ``DDPStrategy``."""


register(StrategyRegistry, ZeroStrategy)
