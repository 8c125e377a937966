"""For the tests of adapters: a small model, its data, and runs compared with those of DDP."""

import os
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn

NUM_SAMPLES = 24  # as many for each of 1, 2 and 3 ranks


class Block(nn.Module):
    """A unit of stage 3."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.inner = nn.Linear(width, width)
        self.norm = nn.LayerNorm(width)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = x + self.norm(self.inner(x).tanh())
        return out


class Net(nn.Module):
    """Maps eight features to four."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(8, width)
        self.blocks = nn.ModuleList([Block(width) for _ in range(3)])
        self.last = nn.Linear(width, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        out: Tensor = self.last(x)
        return out


def samples() -> tuple[Tensor, Tensor]:
    """Inputs and targets, equal on every rank."""
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(NUM_SAMPLES, 8, generator=generator)
    return inputs, torch.randn(NUM_SAMPLES, 4, generator=generator)


def whole(model: nn.Module) -> dict[str, Tensor]:
    """The model's state on every rank, also of a sharded one."""
    return {name: value.detach().clone() for name, value in model.state_dict().items()}


def assert_same(got: dict[str, Tensor], expected: dict[str, Tensor], *, to_the_bit: bool = True) -> None:
    """Compare two models."""
    assert list(got) == list(expected)
    for name, want in expected.items():
        if to_the_bit:
            assert torch.equal(got[name], want), name
        else:
            torch.testing.assert_close(got[name], want, rtol=1e-4, atol=1e-6)


@contextmanager
def as_torchrun_says() -> Iterator[None]:
    """Tell frameworks of the process group, which is there already, by the variables that torchrun sets."""
    rank, size = str(dist.get_rank()), str(dist.get_world_size())
    ranks = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size}
    threads = {"OMP_NUM_THREADS": str(torch.get_num_threads())}
    where: dict[str, Any] = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}  # not used
    with mock.patch.dict(os.environ, {**ranks, **threads, **where}):
        yield


def _sum_in_order(_: object, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
    size = dist.get_world_size()
    parts = [torch.empty_like(bucket.buffer()) for _ in range(size)]
    dist.all_gather(parts, bucket.buffer() * (1 / size))
    future = torch.futures.Future[Tensor]()
    future.set_result(sum(parts[1:], start=parts[0]))
    return future


@contextmanager
def sums_in_order(applies: bool) -> Iterator[None]:
    """Have PyTorch's DDP add up in the order of ranks, as owners do; otherwise only two ranks do."""
    construct = nn.parallel.DistributedDataParallel.__init__

    def constructed(wrapper: Any, *args: Any, **options: Any) -> None:
        construct(wrapper, *args, **options)
        wrapper.register_comm_hook(None, _sum_in_order)

    with (
        mock.patch.object(nn.parallel.DistributedDataParallel, "__init__", constructed)
        if applies
        else nullcontext()
    ):
        yield


@contextmanager
def fresh() -> Iterator[None]:
    """Accelerate, and Trainer by it, keep what they know of the process in classes."""
    from accelerate.state import AcceleratorState, GradientState

    with as_torchrun_says():
        try:
            yield
        finally:
            AcceleratorState._reset_state(reset_partial_state=True)
            GradientState._reset_state()
