"""Optimizer classes whose step raises when told so."""

from typing import Any

import torch
import torch.distributed as dist


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
