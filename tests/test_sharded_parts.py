"""Partial gradients: what reads one raises, what changes each element alone works on the rows."""

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from zero_optim.plan.pieces import Piece
from zero_optim.step.partial import PartialGradient

PIECES = (Piece(0, 0, 2), Piece(2, 2, 5))


def partial(piece: Tensor | None) -> tuple[nn.Parameter, PartialGradient]:
    param = nn.Parameter(torch.zeros(5, 3))
    param.grad = PartialGradient(param, PIECES, piece, "layer.weight")
    assert isinstance(param.grad, PartialGradient)
    return param, param.grad


@pytest.mark.parametrize(
    "read",
    [
        lambda grad: grad.norm(),
        lambda grad: grad[0],
        lambda grad: grad.cpu().view(-1),
        lambda grad: torch.zeros(5, 3).copy_(grad),
        lambda grad: grad.mul_(torch.ones(5, 3)),
        lambda grad: torch._foreach_norm([torch.ones(2), grad]),
        lambda grad: torch.stack([grad, grad]),
    ],
)
def test_what_reads_a_partial_gradient_raises(read: Callable[[Tensor], object]) -> None:
    for piece in (None, torch.ones(3, 3)):
        _, grad = partial(piece)
        with pytest.raises(RuntimeError, match=r"layer\.weight.*owned by rank 0 \(rows 0 to 1\), rank 2"):
            read(grad)


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (lambda grad: grad.mul_(0.5), 0.5),
        (lambda grad: grad.zero_(), 0.0),
        (lambda grad: grad.clamp_(max=0.1), 0.1),
        (lambda grad: grad.detach_().requires_grad_(False), 1.0),
        (lambda grad: torch._foreach_mul_([torch.ones(2), grad], [3.0, 2.0]), 2.0),
    ],
)
def test_what_changes_each_element_alone_works_on_the_rows_that_are_here(
    change: Callable[[Tensor], object], expected: float
) -> None:
    rows = torch.ones(3, 3)
    for piece in (None, rows):
        _, grad = partial(piece)
        change(grad)
    assert torch.equal(rows, torch.full((3, 3), expected))


def test_a_scaler_unscales_the_rows_that_are_here_and_finds_their_infinities() -> None:
    rows, plain = torch.ones(3, 3), torch.full((2,), 8.0)
    for piece, found in ((None, 0.0), (rows, 0.0), (torch.full((3, 3), float("inf")), 1.0)):
        _, grad = partial(piece)
        flag = torch.zeros(1)
        torch._amp_foreach_non_finite_check_and_unscale_([grad, plain], flag, torch.tensor(0.5))
        assert flag.item() == found
    assert torch.equal(rows, torch.full((3, 3), 0.5))
    assert torch.equal(plain, torch.full((2,), 1.0))


def test_a_partial_gradient_shows_what_it_is_and_takes_no_memory() -> None:
    param, grad = partial(torch.ones(3, 3))
    assert "layer.weight: (5, 3), torch.float32, cpu, owned by rank 0" in repr(grad)
    assert "3 rows here" in str(grad)
    assert grad.data_ptr() == 0
    assert (grad.shape, grad.dtype, grad.device) == (param.shape, param.dtype, param.device)
    copied: Any = copy.deepcopy(grad)
    copied.zero_()
    assert torch.equal(grad.piece if grad.piece is not None else torch.empty(0), torch.ones(3, 3))
    with pytest.raises(RuntimeError, match="pickle of the gradient"):
        pickle.dumps(grad)


def test_autograd_cannot_add_to_a_partial_gradient() -> None:
    param, grad = partial(None)
    with pytest.raises(RuntimeError, match=r"add_ of the gradient .* needs elements"):
        (param * 2).sum().backward()
    assert param.grad is grad
