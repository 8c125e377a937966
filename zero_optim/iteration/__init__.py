"""One iteration of an optimizer: steps, clipping, steps during the backward pass, ``Join``."""

from zero_optim.iteration.iteration import Iteration

__all__ = ["Iteration"]
