"""Every hook against a plain computation of its formula from the gradients of all ranks."""

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from pool import on_ranks
from test_hooks_bucket import FakeBucket, flat_grads, make_params, run_hook
from zero_optim.hooks import (
    allreduce_hook,
    bf16_compress_hook,
    bf16_compress_wrapper,
    fp16_compress_hook,
    fp16_compress_wrapper,
)

HALF = {torch.float16: 2.0**-10, torch.bfloat16: 2.0**-7}  # largest relative error of a rounding, doubled


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


ALL_HOOKS = {
    "allreduce": allreduce_hook,
    "fp16": fp16_compress_hook,
    "bf16": bf16_compress_hook,
    "in fp16": fp16_compress_wrapper(allreduce_hook),
    "in bf16": bf16_compress_wrapper(allreduce_hook),
}


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
            flats = flat_grads(params, size=size)
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
def test_sparse_gradients_are_averaged_by_allreduce_and_refused_by_others() -> None:
    indices = torch.tensor([[dist.get_rank(), 3]])
    grad = torch.sparse_coo_tensor(indices, torch.ones(2, 4), (5, 4))
    params = make_params(((5, 4),))
    bucket = FakeBucket(params, [torch.zeros(1)])
    for hook in [*ALL_HOOKS.values()][1:]:
        bucket.set_buffer(grad)
        with pytest.raises(ValueError, match=r"dense.*sparse_coo in bucket 0.*allreduce_hook"):
            hook(None, bucket)
    bucket.set_buffer(grad)
    dense = allreduce_hook(None, bucket).wait().to_dense()  # type: ignore[arg-type]
    assert torch.equal(dense[:, 0], torch.tensor([0.5, 0.5, 0.0, 1.0, 0.0]))
