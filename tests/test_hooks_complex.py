"""Complex parameters, whose gradients PyTorch's DDP gives a hook as real numbers, twice as many."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.join import Join
from torch.optim import SGD

from overlap import WRAPPERS, loss_of
from pool import Ranks, on_ranks
from zero_optim import ZeroRedundancyOptimizer
from zero_optim.hooks import (
    allreduce_hook,
    bf16_compress_hook,
    reduce_to_owners,
    zero_step,
)

both_wrappers = pytest.mark.parametrize("wrapper", WRAPPERS)


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


Registering = Callable[[Any, ZeroRedundancyOptimizer], object]


def to_owners(model: Any, optimizer: ZeroRedundancyOptimizer) -> None:
    model.register_comm_hook(None, reduce_to_owners(optimizer))


def averaging(model: Any, optimizer: ZeroRedundancyOptimizer) -> None:
    model.register_comm_hook(None, allreduce_hook)


def stepping(model: Any, optimizer: ZeroRedundancyOptimizer) -> None:
    model.register_comm_hook(None, zero_step(optimizer, ddp=model))


def stepping_owners(model: Any, optimizer: ZeroRedundancyOptimizer) -> None:
    model.register_comm_hook(None, zero_step(optimizer, gradients="owners"))


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
@pytest.mark.parametrize("register", [to_owners, averaging, stepping, stepping_owners])
def test_complex_parameters_are_trained_with_the_bits_of_ddp(wrapper: str, register: Registering) -> None:
    uneven = can_broadcast()
    (whole, one), (hooked, other) = built(wrapper if uneven else "ours"), built(wrapper)
    register(hooked, other)
    for model, optimizer in ((whole, one), (hooked, other)):
        with Join([model, optimizer], enable=uneven):
            for number in range(2 + uneven * dist.get_rank()):
                optimizer.zero_grad()
                loss_of(model, number).backward()
                optimizer.step()
    for (name, want), param in zip(whole.named_parameters(), hooked.parameters(), strict=True):
        assert torch.equal(param, want), name


def refuses() -> None:
    model = WRAPPERS["ours"](Turned(), find_unused_parameters=True, init_sync=False)
    model.register_comm_hook(None, bf16_compress_hook)
    with pytest.raises(ValueError, match=r"real numbers, got torch\.complex64 in bucket"):
        loss_of(model, 0).backward()


# PyTorch's DDP gives a hook the real numbers, of which half of the bits are enough.
def test_hooks_in_16_bits_refuse_complex_gradients(ranks2: Ranks) -> None:
    ranks2.run(refuses)
