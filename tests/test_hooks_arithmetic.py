"""Every hook against a plain computation of its formula, on a bucket like DDP's, and against PyTorch's."""

import inspect
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel

from overlap import BUCKET_CAP_MB, WRAPPERS, Net, adamw, assert_same_params, loss_of
from pool import on_ranks
from test_ddp_hooks import renamed
from zero_optim.hooks import (
    allreduce_hook,
    bf16_compress_hook,
    bf16_compress_wrapper,
    fp16_compress_hook,
    fp16_compress_wrapper,
)

SHAPES = ((6, 5), (7,), (4, 3, 2, 2), (), (8, 8))
HALF = {torch.float16: 2.0**-10, torch.bfloat16: 2.0**-7}  # largest relative error of a rounding, doubled
ALL_HOOKS: dict[str, Any] = {
    "allreduce": allreduce_hook,
    "fp16": fp16_compress_hook,
    "bf16": bf16_compress_hook,
    "in fp16": fp16_compress_wrapper(allreduce_hook),
    "in bf16": bf16_compress_wrapper(allreduce_hook),
}


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


def grads_of(params: Sequence[Tensor], rank: int) -> list[Tensor]:
    """Fixed gradients, different on each rank, which every rank can make for all."""
    generator = torch.Generator().manual_seed(rank)
    return [torch.randn(p.shape, generator=generator).to(p.dtype) for p in params]


def flat_grads(params: Sequence[Tensor]) -> list[Tensor]:
    """The flat gradients of every rank."""
    ranks = range(dist.get_world_size())
    return [torch.cat([grad.reshape(-1) for grad in grads_of(params, rank)]) for rank in ranks]


def run_hook(hook: Callable[..., Any], state: object, params: Sequence[Tensor]) -> Tensor:
    result = hook(state, FakeBucket(params, grads_of(params, dist.get_rank()))).wait()
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


def mean_of(flats: list[Tensor]) -> Tensor:
    return torch.stack(flats).sum(0) / len(flats)


@on_ranks(2, 4)
def test_averages_are_those_of_plain_arithmetic() -> None:
    size, rank = dist.get_world_size(), dist.get_rank()
    params = make_params()
    exact = [Tensor.round(flat * 64) / 64 for flat in flat_grads(params)]  # sums of these are exact
    bucket = FakeBucket(params, [exact[rank]])
    result = allreduce_hook(None, bucket).wait()  # type: ignore[arg-type]
    assert torch.equal(result, mean_of(exact))
    assert result.data_ptr() == bucket.buffer().data_ptr()
    for hook, wrapper, dtype in (
        (fp16_compress_hook, fp16_compress_wrapper, torch.float16),
        (bf16_compress_hook, bf16_compress_wrapper, torch.bfloat16),
    ):
        result = run_hook(hook, None, params)
        expected = mean_of(flat_grads(params))
        # Each of the `size` summands is rounded once, and so is each partial sum, all below 4.
        assert (result - expected).abs().max() <= 2 * size * HALF[dtype] * 4 / size
        assert not torch.equal(result, expected)
        rounded = [(flat.to(dtype) / size) for flat in flat_grads(params)]
        if size == 2:  # more summands may be added in any order
            assert torch.equal(result, (rounded[0] + rounded[1]).float())
        assert torch.equal(run_hook(wrapper(allreduce_hook), None, params), result)


@on_ranks(4)
def test_every_hook_works_with_any_dtype_group_and_with_empty_gradients() -> None:
    """Every hook, every dtype, in the whole group, a part of it, and alone; then empty buckets."""
    rank, size = dist.get_rank(), dist.get_world_size()
    pairs = [dist.new_group(ranks) for ranks in ([0, 1], [2, 3])]
    singles = [dist.new_group([r]) for r in range(size)]
    groups = (
        (None, range(size)),
        (pairs[rank // 2], range(rank // 2 * 2, rank // 2 * 2 + 2)),
        (singles[rank], [rank]),
    )
    for dtype, tolerance in (
        (torch.float64, 1e-2),
        (torch.float32, 1e-2),
        (torch.float16, 3e-2),
        (torch.bfloat16, 6e-2),
    ):
        params = make_params(((8, 4), (5,), (), (4, 4)), dtype)
        for group, members in groups:
            flats = flat_grads(params)
            expected = mean_of([flats[r].double() for r in members])
            for name, hook in ALL_HOOKS.items():
                result = run_hook(hook, group, params)
                assert result.dtype == dtype
                error = (result.double() - expected).abs().max()
                assert error < tolerance, (name, dtype, len(members), error)
                empty = make_params(((0,), (3, 0)), dtype)
                assert run_hook(hook, group, empty).numel() == 0, name


# PyTorch says so once a process, wherever a sparse tensor is first made, also in its collectives.
@on_ranks(2)
@pytest.mark.filterwarnings("ignore:Sparse invariant checks are implicitly disabled")
def test_hooks_in_16_bits_refuse_sparse_and_complex_gradients_which_allreduce_averages() -> None:
    indices = torch.tensor([[dist.get_rank(), 3]])
    grad = torch.sparse_coo_tensor(indices, torch.ones(2, 4), (5, 4))
    params = make_params(((5, 4),))
    bucket: Any = FakeBucket(params, [torch.zeros(1)])
    wave = torch.full((3,), 1j * dist.get_rank())
    refused = ((grad, "torch.sparse_coo"), (wave, r"torch\.complex64"))
    for hook in [*ALL_HOOKS.values()][1:]:
        for value, kind in refused:
            bucket.set_buffer(value)
            with pytest.raises(ValueError, match=rf"dense.*got {kind} in bucket 0.*allreduce_hook"):
                hook(None, bucket)
    bucket.set_buffer(grad)
    dense = allreduce_hook(None, bucket).wait().to_dense()
    assert torch.equal(dense[:, 0], torch.tensor([0.5, 0.5, 0.0, 1.0, 0.0]))
    bucket.set_buffer(wave)
    assert torch.equal(allreduce_hook(None, bucket).wait(), torch.full((3,), 0.5j))


# ---------------------------------------------------------------------- beside PyTorch's hooks of these names

PAIRS = (
    (allreduce_hook, None),
    (allreduce_hook, default_hooks.allreduce_hook),
    (fp16_compress_hook, default_hooks.fp16_compress_hook),
    (ALL_HOOKS["in fp16"], default_hooks.fp16_compress_wrapper(default_hooks.allreduce_hook)),
    (bf16_compress_hook, renamed(default_hooks.bf16_compress_hook)),
    (ALL_HOOKS["in bf16"], renamed(default_hooks.bf16_compress_wrapper(default_hooks.allreduce_hook))),
)


def trained(wrapper: str, hook: Any, options: dict[str, Any]) -> nn.Module:
    """A model that was trained with a hook; None for no hook."""
    model = WRAPPERS[wrapper](Net(), bucket_cap_mb=BUCKET_CAP_MB, **options)
    if hook is not None:
        model.register_comm_hook(None, hook)
    optimizer = adamw(model)
    for step in range(8):
        optimizer.zero_grad(set_to_none=not options)
        loss_of(model, step).backward()
        optimizer.step()
    return model


@on_ranks(2)
@pytest.mark.parametrize("options", [{}, {"gradient_as_bucket_view": True}], ids=["copies", "views"])
def test_training_has_the_bits_of_pytorchs_hooks(options: dict[str, Any]) -> None:
    for ours, theirs in PAIRS:
        expected = trained("torch", theirs, options)
        for wrapper in WRAPPERS:
            assert_same_params(trained(wrapper, ours, options), expected, (wrapper, ours))


def test_hooks_have_the_signature_that_ddp_asks_for() -> None:
    for hook, _ in PAIRS:
        signature = inspect.signature(hook)
        assert signature.parameters["bucket"].annotation is dist.GradBucket
        assert signature.return_annotation == torch.futures.Future[torch.Tensor]
        # These names PyTorch's DDP refuses without NCCL.
        assert hook.__name__ not in ("bf16_compress_hook", "bf16_compress_wrapper_hook")
        assert isinstance(hook.__qualname__, str)
