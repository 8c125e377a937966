"""Our wrapper and PyTorch's: equal models, the same batches, gradients compared bit for bit."""

import copy
import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel as TorchDistributedDataParallel
from torch.utils.checkpoint import checkpoint

from zero_optim.ddp import DistributedDataParallel

Loss = Callable[[nn.Module], Tensor]
KNOWN = frozenset(inspect.signature(TorchDistributedDataParallel.__init__).parameters)
SMALL_MB = 0.0002  # a capacity that gives small models several buckets


def batch(number: int, *shape: int, rank: int | None = None) -> Tensor:
    """Random numbers, different for each batch and rank."""
    rank = dist.get_rank() if rank is None else rank
    return torch.randn(*shape, generator=torch.Generator().manual_seed(1000 * number + rank))


def mlp(width: int = 8, depth: int = 4, seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    layers = [layer for _ in range(depth) for layer in (nn.Linear(width, width), nn.Tanh())]
    return nn.Sequential(*layers, nn.Linear(width, 3))


def mlp_loss(net: nn.Module, number: int, rank: int | None = None) -> Tensor:
    x, device = batch(number, 5, 8, rank=rank), next(net.parameters()).device
    return net(x if x.device == device else x.to(device)).square().mean()


def settled(value: Any) -> Future[Any]:
    """A future that is done."""
    future: Future[Any] = Future()
    future.set_result(value)
    return future


class WithBuffers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.norm, self.head = nn.BatchNorm1d(8), nn.Linear(8, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.norm(x))


class WithSpare(nn.Module):
    """A layer is used by no rank."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.trunk, self.spare, self.head = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.trunk(x))


class Recomputed(nn.Module):
    """A part is recomputed in the backward pass, as often as it says."""

    def __init__(self, times: int = 1, reentrant: bool = True) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.other = nn.Linear(8, 8), nn.Linear(8, 8)
        self.times, self.reentrant = times, reentrant

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for _ in range(self.times):
            x = checkpoint(self.other, x, use_reentrant=self.reentrant)
        return x


@dataclass
class Pair:
    """Two wrappers around copies of one model."""

    ours: DistributedDataParallel
    theirs: TorchDistributedDataParallel

    @classmethod
    def of(cls, net: nn.Module, **options: Any) -> "Pair":
        return cls(
            DistributedDataParallel(copy.deepcopy(net), **options),
            TorchDistributedDataParallel(copy.deepcopy(net), **options),
        )

    def __iter__(self) -> Iterator[TorchDistributedDataParallel]:
        return iter((self.ours, self.theirs))

    def backward(self, loss: Loss, where: object = "", tolerance: float = 0.0) -> None:
        """Run both forward and backward, and compare."""
        for model in self:
            loss(model).backward()
        self.compare(where, tolerance)

    def train(self, loss: Callable[[nn.Module, int], Tensor], steps: int, where: object = "") -> None:
        """Run plain SGD on both and compare every gradient. Gradients are set to None or to zero in turns."""
        optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in self]
        for number in range(steps):
            for optimizer in optimizers:
                optimizer.zero_grad(set_to_none=number % 3 != 2)
            self.backward(lambda model, number=number: loss(model, number), (where, number))  # type: ignore[misc]
            for optimizer in optimizers:
                optimizer.step()

    def compare(self, where: object = "", tolerance: float = 0.0) -> None:
        ours, theirs = dict(self.ours.named_parameters()), dict(self.theirs.named_parameters())
        assert list(ours) == list(theirs)
        for name, param in ours.items():
            assert_same(param.grad, theirs[name].grad, (where, name), tolerance)


def assert_same(got: Tensor | None, expected: Tensor | None, where: object, tolerance: float = 0.0) -> None:
    """Compare two gradients: values, dtype, layout and strides."""
    if expected is None or got is None:
        assert got is expected, where
        return
    assert (got.dtype, got.layout, got.shape) == (expected.dtype, expected.layout, expected.shape), where
    if got.is_sparse:
        got, expected = got.to_dense(), expected.to_dense()
    assert got.stride() == expected.stride(), (where, got.stride(), expected.stride())
    if tolerance:
        torch.testing.assert_close(got, expected, rtol=tolerance, atol=tolerance, msg=str(where))
    else:
        assert torch.equal(got, expected), (where, (got - expected).abs().max())


def averaged(net: nn.Module, loss: Callable[[nn.Module, int], Tensor], size: int) -> dict[str, Tensor]:
    """Average the gradients that each rank computes alone; on two ranks bit for bit those of a reduction."""
    sums: dict[str, Tensor] = {}
    for rank in range(size):
        single = copy.deepcopy(net)
        single.zero_grad()
        loss(single, rank).backward()
        for name, param in single.named_parameters():
            if param.grad is not None:
                part = param.grad * (1 / size)
                sums[name] = sums[name] + part if name in sums else part
    return sums


def of_batch(number: int) -> Callable[[nn.Module, int], Tensor]:
    """The loss of one batch, of a model and a rank."""
    return lambda net, rank: mlp_loss(net, number, rank)


def assert_averaged(
    net: nn.Module,
    clean: nn.Module,
    loss: Callable[[nn.Module, int], Tensor],
    where: object = "",
    *,
    size: int = 2,
    tolerance: float = 0.0,
) -> None:
    """Gradients are the averages of what each rank computes alone on a clean copy."""
    expected = averaged(clean, loss, size)
    for name, param in net.named_parameters():
        assert_same(param.grad, expected.get(name), (where, name), tolerance)


def check_average(model: nn.Module, clean: nn.Module, number: int, where: object = "") -> None:
    """Run an iteration whose gradients have to be the averages over all ranks."""
    model.zero_grad()
    mlp_loss(model, number).backward()
    net, size = getattr(model, "module", model), dist.get_world_size()
    tolerance = 0.0 if size == 2 else 1e-6  # sums in another order
    assert_averaged(net, clean, of_batch(number), (where, number), size=size, tolerance=tolerance)
