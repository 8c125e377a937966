"""How an optimizer steps."""

from zero_optim.stepping.steps import Stepping

__all__ = ["Stepping"]
