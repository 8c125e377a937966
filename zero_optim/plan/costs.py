"""Cost functions of parameters' steps, from shapes alone."""

from collections.abc import Callable
from typing import Literal

from torch import Tensor

Cost = Callable[[Tensor], float]
CostName = Literal["numel", "matmul"]

# Memory bounds an elementwise step. On one CPU core, one element takes about as long as this many
# floating-point operations of a matrix product.
_FLOPS_AN_ELEMENT = 100
_NEWTON_SCHULZ_STEPS = 5  # Muon's default


def numel_cost(param: Tensor) -> float:
    """Return the cost of an elementwise step, in floating-point operations that take as long."""
    return _FLOPS_AN_ELEMENT * param.numel()


def matmul_cost(param: Tensor) -> float:
    """Return the cost of a step of Muon: an iteration on m x n (m <= n) takes 4 m^2 n + 2 m^3 operations."""
    if param.dim() < 2 or param.numel() == 0:
        return numel_cost(param)
    short, long = sorted((param.shape[0], param.numel() // param.shape[0]))
    return numel_cost(param) + _NEWTON_SCHULZ_STEPS * (4 * short**2 * long + 2 * short**3)


def cost_named(cost: CostName | Cost) -> Cost:
    """Return a cost function by name, or the callable itself."""
    if callable(cost):
        return cost
    named: dict[str, Cost] = {"numel": numel_cost, "matmul": matmul_cost}
    if cost not in named:
        raise ValueError(
            f"expected cost to be one of {sorted(named)} or a function of a parameter, got {cost!r}"
        )
    return named[cost]
