"""The global gradient norm: PyTorch's, to the bit, and equal on every rank."""

import math
from itertools import product
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn

from pool import Ranks, on_ranks
from training import make_params, set_grads, twin
from zero_optim import ZeroRedundancyOptimizer
from zero_optim.step import clip


def check_norm(norm_type: float, max_norm: float, foreach: bool | None, dtype: torch.dtype) -> None:
    params = make_params(dtype=dtype)
    mine = twin(params)
    sharded = ZeroRedundancyOptimizer(mine, torch.optim.SGD, lr=0.1)
    for own in (params, mine):
        set_grads(own, 0, scale=3.0)
        own[2].grad = None
    expected = nn.utils.clip_grad_norm_(params, max_norm, norm_type, foreach=foreach)
    got = sharded.clip_grad_norm_(max_norm, norm_type, foreach=foreach)
    case = norm_type, max_norm, foreach, dtype
    assert got.dtype == expected.dtype, case
    assert torch.equal(got, expected), (case, got, expected)
    for p, q in zip(mine, params, strict=True):
        assert p.grad is None if q.grad is None else torch.equal(p.grad, q.grad), case


@on_ranks(2)
@pytest.mark.parametrize("norm_type", [1.0, 2.0, math.inf, 3.0, 0.5, 0.0])
def test_norm_and_clipped_gradients_equal_pytorchs(norm_type: float) -> None:
    dtypes = (torch.float32, torch.bfloat16, torch.float64)
    for max_norm, foreach, dtype in product((1.0, 1e6), (None, False), dtypes):
        check_norm(norm_type, max_norm, foreach, dtype)
    with mock.patch.object(clip, "_sends_beside", return_value=True):  # norms stay on the device
        check_norm(norm_type, 1.0, None, torch.float32)


def check_owners_count() -> list[float]:
    """Gradients that differ between ranks: the owners' are stepped, so theirs count."""
    params = make_params()
    sharded = ZeroRedundancyOptimizer(params, torch.optim.SGD, lr=0.1)
    set_grads(params, dist.get_rank())
    owned = [p.grad for p in sharded.owned_parameters() if p.grad is not None]
    own = [sum(float(g.square().sum()) for g in owned)]
    return [float(sharded.clip_grad_norm_(0.1)), *own]


def test_every_rank_gets_the_norm_of_what_will_be_stepped(ranks_2_and_4: Ranks) -> None:
    results = ranks_2_and_4.run(check_owners_count)
    assert len({norm for norm, _ in results}) == 1
    assert math.isclose(results[0][0] ** 2, sum(squares for _, squares in results), rel_tol=1e-5)


@on_ranks(2)
def test_a_norm_that_is_not_finite_raises_on_every_rank_when_asked() -> None:
    params = make_params()
    sharded = ZeroRedundancyOptimizer(params, torch.optim.SGD, lr=0.1)
    assert sharded.clip_grad_norm_(1.0) == 0  # no gradient at all
    set_grads(params, 0)
    owned = sharded.owned_parameters()
    if dist.get_rank() == 1:
        assert owned[0].grad is not None
        owned[0].grad.fill_(math.inf)
    before = [p.grad.clone() for p in params if p.grad is not None]
    with pytest.raises(RuntimeError, match="of all gradients is inf"):
        sharded.clip_grad_norm_(1.0, error_if_nonfinite=True)
    assert all(torch.equal(a, p.grad) for a, p in zip(before, params, strict=True) if p.grad is not None)
    assert sharded.clip_grad_norm_(1.0).isinf()
    assert all(p.grad is None or not p.grad.isinf().any() for p in params)
