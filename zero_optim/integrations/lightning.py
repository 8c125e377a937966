"""Lightning: the strategies ``zero1``, ``zero2`` and ``zero3``, registered when this module is imported.

``configure_optimizers`` returns a `ZeroRedundancyOptimizer`; module and trainer stay as they are otherwise.
For the package ``lightning.pytorch``; `zero_optim.integrations.pytorch_lightning` is for the other one.
"""

from lightning.pytorch.strategies import DDPStrategy, StrategyRegistry

from zero_optim.integrations.lightning_strategy import ZeroMixin, register


class ZeroStrategy(ZeroMixin, DDPStrategy):
    """Trains at a stage of ZeRO; arguments are those of `ZeroMixin` and of ``DDPStrategy``."""


register(StrategyRegistry, ZeroStrategy)
