"""A bucket for tests of hooks without DDP, which is shown to be like DDP's own."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel

from pool import on_ranks

SHAPES = ((6, 5), (7,), (4, 3, 2, 2), (), (8, 8))


class FakeBucket:
    """Parameters, and gradients for them in one flat tensor."""

    def __init__(
        self, params: Sequence[Tensor], grads: Sequence[Tensor], index: int = 0, is_last: bool = True
    ) -> None:
        self._params = list(params)
        self._buffer = torch.cat([grad.reshape(-1) for grad in grads])
        self._index = index
        self._is_last = is_last

    def index(self) -> int:
        return self._index

    def buffer(self) -> Tensor:
        return self._buffer

    def set_buffer(self, tensor: Tensor) -> None:
        self._buffer = tensor

    def gradients(self) -> list[Tensor]:
        parts = torch.split(self._buffer, [param.numel() for param in self._params])
        return [part.view(param.shape) for part, param in zip(parts, self._params, strict=True)]

    def parameters(self) -> list[Tensor]:
        return self._params

    def is_last(self) -> bool:
        return self._is_last


def make_params(
    shapes: Sequence[tuple[int, ...]] = SHAPES, dtype: torch.dtype = torch.float32
) -> list[Tensor]:
    return [torch.zeros(shape, dtype=dtype) for shape in shapes]


def grads_of(params: Sequence[Tensor], rank: int, step: int = 0) -> list[Tensor]:
    """Fixed gradients, different on each rank, which every rank can make for all."""
    generator = torch.Generator().manual_seed(1000 * step + rank)
    return [torch.randn(p.shape, generator=generator).to(p.dtype) for p in params]


def flat_grads(params: Sequence[Tensor], step: int = 0, size: int | None = None) -> list[Tensor]:
    """The flat gradients of every rank."""
    ranks = range(dist.get_world_size() if size is None else size)
    return [torch.cat([grad.reshape(-1) for grad in grads_of(params, rank, step)]) for rank in ranks]


def run_hook(
    hook: Callable[..., Any], state: object, params: Sequence[Tensor], step: int = 0, rank: int | None = None
) -> Tensor:
    """Give one bucket with this rank's gradients to a hook, and wait."""
    grads = grads_of(params, dist.get_rank() if rank is None else rank, step)
    result = hook(state, FakeBucket(params, grads)).wait()
    assert isinstance(result, Tensor)
    return result


def describe(bucket: Any) -> tuple[Any, ...]:
    buffer, grads = bucket.buffer(), bucket.gradients()
    assert [grad.shape for grad in grads] == [param.shape for param in bucket.parameters()]
    assert torch.equal(torch.cat([grad.reshape(-1) for grad in grads]), buffer)
    grads[0].fill_(3)
    assert buffer[0] == 3  # gradients are views
    bucket.set_buffer(buffer.half())
    assert bucket.gradients()[0].dtype == torch.float16
    bucket.set_buffer(buffer)
    return buffer.dtype, buffer.shape, bucket.index(), bucket.is_last()


@on_ranks(2)
def test_the_bucket_of_these_tests_is_like_that_of_ddp() -> None:
    model = DistributedDataParallel(nn.Linear(4, 3))
    seen: list[Any] = []

    def hook(state: None, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        params = list(model.parameters())
        assert all(any(a is b for b in params) for a in bucket.parameters())  # the same objects
        fake = FakeBucket(bucket.parameters(), bucket.gradients(), bucket.index(), bucket.is_last())
        seen.append((describe(bucket), describe(fake)))
        return default_hooks.allreduce_hook(None, bucket)  # type: ignore[arg-type]

    model.register_comm_hook(None, hook)
    model(torch.ones(1, 4)).sum().backward()
    assert seen
    assert all(real == fake for real, fake in seen)
