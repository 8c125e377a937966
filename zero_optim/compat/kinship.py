"""Makes ``isinstance(optimizer, torch.distributed.optim.ZeroRedundancyOptimizer)`` true for our class.

Public code tests this before it consolidates. PyTorch's class has the metaclass `abc.ABCMeta`, through
`Joinable`, so ours can be registered as a subclass and inherits nothing.
"""

import warnings
from abc import ABCMeta


def make_known(kind: type) -> None:
    """Register a class as a subclass of PyTorch's ``ZeroRedundancyOptimizer``, if that exists."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the import compiles functions with torch.jit, which is deprecated
        try:
            from torch.distributed.optim import ZeroRedundancyOptimizer
        except ImportError:  # built without distributed optimizers
            return
    if isinstance(ZeroRedundancyOptimizer, ABCMeta):
        ZeroRedundancyOptimizer.register(kind)
