"""``isinstance(optimizer, torch.distributed.optim.ZeroRedundancyOptimizer)`` holds for ours.

Public code asks that before it consolidates. PyTorch's class is abstract in the sense of `abc`, since
`Joinable` is: so ours can be made known to it as a subclass that inherits nothing.
"""

import warnings
from abc import ABCMeta


def make_known(kind: type) -> None:
    """Make a class count as PyTorch's ``ZeroRedundancyOptimizer``, where this PyTorch has one."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it compiles functions with torch.jit, which is deprecated
        try:
            from torch.distributed.optim import ZeroRedundancyOptimizer
        except ImportError:  # built without distributed optimizers
            return
    if isinstance(ZeroRedundancyOptimizer, ABCMeta):
        ZeroRedundancyOptimizer.register(kind)
