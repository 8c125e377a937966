"""The global gradient norm: PyTorch's, to the bit, and equal on every rank."""

import math
from itertools import product
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn

from pool import on_ranks
from training import make_params, pair_of, params_of, set_grads, sgd
from zero_optim.step import clip


def check_norm(norm_type: float, max_norm: float, foreach: bool | None, dtype: torch.dtype) -> None:
    plain, sharded = pair_of(torch.optim.SGD, make_params(dtype=dtype), lr=0.1)
    params, mine = params_of(plain), params_of(sharded)
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
@pytest.mark.parametrize("norm_type", [1.0, 2.0, math.inf, 0.0])
def test_norm_and_clipped_gradients_equal_pytorchs(norm_type: float) -> None:
    dtypes = (torch.float32, torch.bfloat16, torch.float64)
    for max_norm, foreach, dtype in product((1.0, 1e6), (None, False), dtypes):
        check_norm(norm_type, max_norm, foreach, dtype)
    with mock.patch.object(clip, "_sends_beside", return_value=True):  # norms stay on the device
        check_norm(norm_type, 1.0, None, torch.float32)


@on_ranks(2, 4)
def test_every_rank_gets_the_norm_of_what_will_be_stepped() -> None:
    """Gradients that differ between ranks: the owners' are stepped, so theirs count."""
    params = make_params()
    sharded = sgd(params)
    set_grads(params, dist.get_rank())
    owned = [p.grad for p in sharded.owned_parameters() if p.grad is not None]
    squares = torch.tensor(sum(float(g.square().sum()) for g in owned))
    norm = sharded.clip_grad_norm_(0.1)
    norms = [torch.zeros(()) for _ in range(dist.get_world_size())]
    dist.all_gather(norms, norm)
    dist.all_reduce(squares)
    assert len(set(map(float, norms))) == 1
    assert math.isclose(float(norm) ** 2, float(squares), rel_tol=1e-5)


@on_ranks(2)
def test_a_norm_that_is_not_finite_raises_on_every_rank_when_asked() -> None:
    params = make_params()
    sharded = sgd(params)
    assert sharded.clip_grad_norm_(1.0) == 0  # no gradient at all
    set_grads(params, 0)
    owned = sharded.owned_parameters()
    if dist.get_rank() == 1:
        owned[0].grad.fill_(math.inf)
    before = [p.grad.clone() for p in params if p.grad is not None]
    with pytest.raises(RuntimeError, match="of all gradients is inf"):
        sharded.clip_grad_norm_(1.0, error_if_nonfinite=True)
    assert all(torch.equal(a, p.grad) for a, p in zip(before, params, strict=True) if p.grad is not None)
    assert sharded.clip_grad_norm_(1.0).isinf()
    assert all(p.grad is None or not p.grad.isinf().any() for p in params)
