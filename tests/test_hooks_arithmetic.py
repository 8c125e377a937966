"""Every hook against a plain computation of its formula from the gradients of all ranks."""

import math

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from pool import Ranks
from test_hooks_bucket import FakeBucket, flat_grads, grads_of, make_params, run_hook
from zero_optim.hooks import (
    TopKState,
    allreduce_hook,
    bf16_compress_hook,
    bf16_compress_wrapper,
    fp16_compress_hook,
    fp16_compress_wrapper,
    make_hook,
    noop_hook,
    quantization_perchannel_hook,
    quantization_pertensor_hook,
    topk_hook,
)

HALF = {torch.float16: 2.0**-10, torch.bfloat16: 2.0**-7}  # largest relative error of a rounding, doubled


def mean_of(flats: list[Tensor]) -> Tensor:
    return torch.stack(flats).sum(0) / len(flats)


def check_averages() -> None:
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
    assert torch.equal(run_hook(noop_hook, None, params), flat_grads(params)[rank])


def test_averages_are_those_of_plain_arithmetic(ranks_2_and_4: Ranks) -> None:
    ranks_2_and_4.run(check_averages)


def dequantized(flat: Tensor, group_size: int) -> Tensor:
    """What is left of a tensor after 8 bits, group by group, in plain Python arithmetic."""
    out = torch.empty_like(flat)
    for start in range(0, len(flat), group_size):
        piece = flat[start : start + group_size]
        # A group is filled up with zeros, and zero is always within its range.
        low, high = torch.clamp(piece.min(), max=0), torch.clamp(piece.max(), min=0)
        scale = (high - low) / 255
        zero_point = -torch.round(low / scale)
        codes = (torch.round(piece / scale) + zero_point).clamp(0, 255)
        out[start : start + group_size] = (codes - zero_point) * scale
    return out


def check_quantization() -> None:
    size = dist.get_world_size()
    params = make_params(((30, 41), (17,)))
    flats = flat_grads(params)
    _, small_groups = make_hook("quantize_channel", group_size="64")
    for hook, group_size in (
        (quantization_pertensor_hook, len(flats[0])),
        (quantization_perchannel_hook, 512),
        (small_groups, 64),
    ):
        total = torch.zeros_like(flats[0])
        for flat in flats:
            total += dequantized(flat, group_size)
        result = run_hook(hook, None, params)
        assert torch.equal(result, total / size)
        worst = max(float(flat.max() - flat.min()) for flat in flats) / 255 / 2
        assert (result - mean_of(flats)).abs().max() <= worst * 1.001
    # Tiny gradients keep their resolution, zeros stay zeros, NaNs arrive everywhere.
    tiny = [grad * 1e-12 for grad in grads_of(params, dist.get_rank())]
    result = quantization_pertensor_hook(None, FakeBucket(params, tiny)).wait()  # type: ignore[arg-type]
    assert (result - mean_of(flats) * 1e-12).abs().max() < 1e-13
    zeros = FakeBucket(params, [torch.zeros_like(p) for p in params])
    assert not quantization_perchannel_hook(None, zeros).wait().any()  # type: ignore[arg-type]
    if dist.get_rank() == 1:
        tiny[0][0, 0] = math.inf
    result = quantization_perchannel_hook(None, FakeBucket(params, tiny)).wait()  # type: ignore[arg-type]
    assert not result[:512].isfinite().any()
    assert result[512:].isfinite().all()


def test_quantized_averages_are_those_of_plain_arithmetic(ranks_2_and_4: Ranks) -> None:
    ranks_2_and_4.run(check_quantization)


def check_top_k(ratio: float, feedback: bool) -> None:
    size, rank, steps = dist.get_world_size(), dist.get_rank(), 5
    params = make_params()
    state = TopKState(ratio=ratio, use_error_feedback=feedback)
    errors = [torch.zeros_like(flat) for flat in flat_grads(params)]
    sent = torch.zeros_like(errors[0])
    for step in range(steps):
        kept = []
        for error, flat in zip(errors, flat_grads(params, step), strict=True):
            work = error + flat if feedback else flat
            top = work.abs().topk(math.ceil(ratio * len(work))).indices
            kept.append(torch.zeros_like(work).index_copy(0, top, work[top]))
            error.copy_(work - kept[-1])
        total = torch.zeros_like(sent)
        for one in kept:
            total += one
        result = run_hook(topk_hook, state, params, step)
        assert torch.equal(result, total / size), step
        sent += result
        mine = torch.cat([state.errors.parts[number] for number in sorted(state.errors.parts)] or [sent[:0]])
        assert not feedback or torch.equal(mine, errors[rank])
    if feedback:  # nothing is lost: what was sent and what is kept are all gradients together
        gradients = sum(mean_of(flat_grads(params, step)) for step in range(steps))
        torch.testing.assert_close(sent + mean_of(errors), gradients)


@pytest.mark.parametrize(("ratio", "feedback"), [(0.1, True), (0.1, False), (1.0, True), (1e-9, True)])
def test_top_k_is_that_of_plain_arithmetic_and_loses_nothing(
    ranks: Ranks, ratio: float, feedback: bool
) -> None:
    ranks.run(check_top_k, ratio, feedback)


def check_top_k_overflow() -> None:
    params = make_params()
    state = TopKState(ratio=0.1)
    grads = grads_of(params, dist.get_rank())
    if dist.get_rank() == 1:
        for grad in grads:
            grad.fill_(math.nan)
    assert not topk_hook(state, FakeBucket(params, grads)).wait().isfinite().all()  # type: ignore[arg-type]
    assert run_hook(topk_hook, state, params, step=1).isfinite().all()


def test_top_k_shows_an_overflow_to_all_and_does_not_remember_it(ranks2: Ranks) -> None:
    ranks2.run(check_top_k_overflow)


ALL_HOOKS = (
    ("allreduce", {}),
    ("fp16", {}),
    ("bf16", {}),
    ("quantize_tensor", {}),
    ("quantize_channel", {"group_size": 16}),
    ("power_sgd", {"rank": 4, "min_rate": 0.01}),
    ("batched_power_sgd", {"rank": 64}),
    ("top_k", {"ratio": 1.0}),
    ("post_local_sgd", {"start": 100}),
)


def check_dtypes_and_groups() -> None:
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
            for name, options in ALL_HOOKS:
                state, hook = make_hook(name, group, **options)  # type: ignore[arg-type]
                result = run_hook(hook, state, params)
                assert result.dtype == dtype
                error = (result.double() - expected).abs().max()
                assert error < (0.05 if "quantize" in name else tolerance), (name, dtype, len(members), error)
                empty = make_params(((0,), (3, 0)), dtype)
                assert run_hook(hook, state, empty).numel() == 0, name
                if "power" in name or "top" in name or "post" in name:
                    assert state.iteration == 2


def test_every_hook_works_with_any_dtype_group_and_with_empty_gradients(ranks4: Ranks) -> None:
    ranks4.run(check_dtypes_and_groups)


def check_sparse() -> None:
    indices = torch.tensor([[dist.get_rank(), 3]])
    grad = torch.sparse_coo_tensor(indices, torch.ones(2, 4), (5, 4))
    params = make_params(((5, 4),))
    bucket = FakeBucket(params, [torch.zeros(1)])
    for name, options in ALL_HOOKS[1:-1]:
        bucket.set_buffer(grad)
        state, hook = make_hook(name, None, **options)  # type: ignore[arg-type]
        with pytest.raises(ValueError, match=r"dense.*sparse_coo in bucket 0.*allreduce_hook"):
            hook(state, bucket)
    bucket.set_buffer(grad)
    dense = allreduce_hook(None, bucket).wait().to_dense()  # type: ignore[arg-type]
    assert torch.equal(dense[:, 0], torch.tensor([0.5, 0.5, 0.0, 1.0, 0.0]))


# PyTorch says so once a process, wherever a sparse tensor is first made, also in its collectives.
@pytest.mark.filterwarnings("ignore:Sparse invariant checks are implicitly disabled")
def test_sparse_gradients_are_averaged_by_allreduce_and_refused_by_others(ranks2: Ranks) -> None:
    ranks2.run(check_sparse)
