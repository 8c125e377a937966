"""Steps and backward passes that raise when told so."""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


class BreaksAnywhere(torch.optim.SGD):
    """SGD whose step raises where it is told so."""

    breaks = False

    def fails(self) -> bool:
        return self.breaks

    def step(self, closure: Any = None) -> Any:
        if self.fails():
            raise ArithmeticError("no such root")
        return super().step(closure)


class Breaks(BreaksAnywhere):
    """SGD whose step raises on rank 1 when told so."""

    def fails(self) -> bool:
        return self.breaks and dist.get_rank() == 1


class Stops(torch.autograd.Function):
    """Raises in its backward pass while ``place`` is its own."""

    place = ""

    @staticmethod
    def forward(ctx: Any, x: Tensor, place: str) -> Tensor:
        ctx.place = place
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        if Stops.place == ctx.place:
            raise ArithmeticError("on purpose")
        return grad, None


def in_backward_of(place: str, x: Tensor) -> Tensor:
    """Return a copy of a tensor whose backward pass may raise."""
    return Stops.apply(x, place)  # type: ignore[no-any-return]
