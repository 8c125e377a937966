"""Complex parameters, one of them unused; PyTorch's DDP gives a hook their gradients as real numbers."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.optim import SGD

from overlap import WRAPPERS, both_wrappers, loss_of
from pool import on_ranks
from zero_optim import ZeroRedundancyOptimizer
from zero_optim.hooks import reduce_to_owners, zero_step


class Turned(nn.Module):
    """Three complex parameters, one of which is not used, between real ones."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.into, self.out = nn.Linear(18, 4), nn.Linear(4, 2)
        self.turn = nn.Parameter(torch.randn(4, 4, dtype=torch.complex64).t())
        self.shift = nn.Parameter(torch.randn(4, dtype=torch.complex64))
        self.idle = nn.Parameter(torch.randn(5, dtype=torch.complex64))

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.into(x.flatten(1)).to(torch.complex64) @ self.turn * (1 + 2j) + self.shift
        out: Tensor = self.out(hidden.real * hidden.imag)
        return out


HOOKS: dict[str, Callable[[ZeroRedundancyOptimizer], Any]] = {
    "to owners": reduce_to_owners,
    "averaging": lambda optimizer: allreduce_hook,
    "stepping": zero_step,
    "stepping, owners": partial(zero_step, gradients="owners"),
}


def can_broadcast() -> bool:
    """Whether this PyTorch can broadcast complex numbers on gloo; 2.8 refuses before it communicates."""
    try:
        dist.broadcast(torch.zeros(1, dtype=torch.complex64), 0)
    except RuntimeError as error:
        if "Invalid scalar type" not in str(error):
            raise
        return False
    return True


def built(wrapper: str) -> tuple[Any, ZeroRedundancyOptimizer]:
    # PyTorch 2.8 cannot broadcast complex parameters on gloo, and ranks have the same anyway.
    model = WRAPPERS[wrapper](Turned(), find_unused_parameters=True, init_sync=False, bucket_cap_mb=0.0001)
    return model, ZeroRedundancyOptimizer(model.parameters(), SGD, lr=0.1, momentum=0.9)


@on_ranks(2)
@both_wrappers
def test_complex_parameters_are_trained_with_the_bits_of_ddp(wrapper: str) -> None:
    runs = {name: built(wrapper) for name in HOOKS}
    for name, (model, optimizer) in runs.items():
        model.register_comm_hook(None, HOOKS[name](optimizer))
    whole = built(wrapper if can_broadcast() else "ours")
    for model, optimizer in (whole, *runs.values()):
        for number in range(2):
            optimizer.zero_grad()
            loss_of(model, number).backward()
            optimizer.step()
    for name, (model, _) in runs.items():
        for (param, want), mine in zip(whole[0].named_parameters(), model.parameters(), strict=True):
            assert torch.equal(mine, want), (name, param)
