"""For the tests of adapters: a small model, its data, and runs compared with those of DDP."""

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn

from pool import Pool

Weights = dict[str, Tensor]
NUM_SAMPLES = 24  # as many for each of 1, 2 and 3 ranks


class Block(nn.Module):
    """A unit of stage 3."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.inner = nn.Linear(width, width)
        self.norm = nn.LayerNorm(width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.norm(self.inner(x).tanh())


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
        return self.last(x)


def samples() -> tuple[Tensor, Tensor]:
    """Inputs and targets, equal on every rank."""
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(NUM_SAMPLES, 8, generator=generator)
    return inputs, torch.randn(NUM_SAMPLES, 4, generator=generator)


def whole(model: nn.Module) -> Weights:
    """The model's state on every rank, also of a sharded one."""
    return {name: value.detach().clone() for name, value in model.state_dict().items()}


def assert_same(got: Weights, expected: Weights, *, to_the_bit: bool = True) -> None:
    """Compare two models."""
    assert list(got) == list(expected)
    for name, want in expected.items():
        if to_the_bit:
            assert torch.equal(got[name], want), name
        else:
            torch.testing.assert_close(got[name], want, rtol=1e-4, atol=1e-6)


def averages_in(state: Mapping[str, Any]) -> Weights:
    """Adam's averages in a state dict, by parameter."""
    return {f"{index}.exp_avg": state["state"][index]["exp_avg"] for index in sorted(state["state"])}


@dataclass
class Run:
    """A run of a framework: stage 0 is its own DDP with a plain optimizer. Each has a class of it."""

    stage: int
    epochs: int = 1
    saves: Path | None = None
    resumes: Path | None = None
    wrap: Mapping[str, Any] = field(default_factory=dict)
    options: Callable[[], dict[str, Any]] = dict  # of the framework, made anew for each run
    in_order: bool = False  # DDP adds up in the order of ranks, as owners do

    def weights(self) -> Weights:
        """Train, and return the weights."""
        raise NotImplementedError

    def saved(self, path: Path) -> Weights:
        """What a run has saved in files that DDP's runs have too."""
        raise NotImplementedError

    def of_ddp(self, in_order: bool = False) -> "Run":
        """The same with DDP."""
        return replace(self, stage=0, in_order=in_order)


def weights_of(run: Run) -> Weights:
    return run.weights()


def assert_as_ddp(run: Run, *, to_the_bit: bool = True) -> None:
    """Train on this rank and the others as with DDP."""
    assert_same(run.weights(), run.of_ddp().weights(), to_the_bit=to_the_bit)


def resumed(pool: Pool, path: Path, run: Run, size: int, then: Run) -> tuple[Weights, Weights]:
    """Train an epoch on two ranks, save, and train another with ``then`` on ``size`` ranks."""
    trained = pool.run(2, weights_of, replace(run, saves=path))[0]
    return trained, pool.run(size, weights_of, replace(then, epochs=2, resumes=path))[0]


def assert_resumes(pool: Pool, folder: Path, run: Run, size: int = 2, then: Run | None = None) -> None:
    """Save and resume as with DDP, whose file is in ``folder`` too."""
    then = then or run
    in_order = size > 2 and then.stage > 1
    expected = resumed(pool, folder / "ddp", run.of_ddp(), size, then.of_ddp(in_order))
    for got, want in zip(resumed(pool, folder / "zero", run, size, then), expected, strict=True):
        assert_same(got, want)
    assert_same(run.saved(folder / "zero"), run.of_ddp().saved(folder / "ddp"))


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
