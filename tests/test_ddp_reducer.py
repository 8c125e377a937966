"""`Reducer` without any wrapper."""

import re
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from ddp_pairs import assert_averaged, assert_same, batch, check_average, mlp, mlp_loss
from pool import on_ranks
from zero_optim.ddp import Reducer, ReducerOptions
from zero_optim.ddp.reducer.graph import tensors_in
from zero_optim.errors import RankMismatchError

SMALL = (500,)


@on_ranks(2)
def test_every_backward_pass_leaves_averages_until_the_reducer_is_closed() -> None:
    for view in (False, True):
        net, clean = mlp(), mlp()
        options = ReducerOptions(bucket_caps_nbytes=SMALL, gradient_as_bucket_view=view)
        reducer = Reducer(net.named_parameters(), options=options)
        for number in range(4):
            check_average(net, clean, number, view)
        reducer.close()
        net.zero_grad()
        mlp_loss(net, 9).backward()
        mlp_loss(clean, 9).backward()
        for param, other in zip(net.parameters(), clean.parameters(), strict=True):
            assert_same(param.grad, other.grad, "this rank's own after close()")


class Parts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second, self.spare = (nn.Linear(8, 8) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.second, self.first(x), use_reentrant=True)


@on_ranks(2)
def test_prepare_looks_at_outputs() -> None:
    """With `prepare` a bucket of unused parameters is launched first, and reentrant checkpointing works."""
    net, clean = Parts(), Parts()
    options = ReducerOptions(bucket_caps_nbytes=SMALL, find_unused_parameters=True)
    reducer = Reducer(net.named_parameters(), options=options)
    for number in range(3):
        net.zero_grad()
        out = net(batch(number, 5, 8).requires_grad_())
        reducer.prepare({"out": [out]})
        out.square().mean().backward()
        loss = lambda net, rank, n=number: net(batch(n, 5, 8, rank=rank).requires_grad_()).square().mean()  # noqa: E731
        assert_averaged(net, clean, loss, number, tolerance=1e-6)
    reducer.close()


@on_ranks(2)
def test_arguments_are_checked_on_every_rank() -> None:
    rank, net = dist.get_rank(), mlp()
    with pytest.raises(ValueError, match="at least one parameter"):
        Reducer([])
    with pytest.raises(TypeError, match=r"expected parameters or \(name, parameter\) pairs, got str"):
        Reducer(["weight"] if rank else net.parameters())  # type: ignore[list-item, arg-type]
    with pytest.raises(ValueError, match=re.escape("0.weight gets no gradient")):
        Reducer([("0.weight", net[0].weight.detach())])
    with pytest.raises(
        RankMismatchError, match=r"what the reducer was given: rank 0 has 8.bias .*rank 1 has nothing more"
    ):
        Reducer(list(net.named_parameters())[: 10 - rank])


@dataclass
class Output:
    main: Tensor
    rest: dict[str, Any] = field(default_factory=dict)


def test_a_container_that_holds_itself_is_looked_into_once() -> None:
    value: list[Any] = [torch.zeros(1)]
    value.append({"again": value, "more": [value, value]})
    output = Output(torch.zeros(2))
    output.rest["output"] = output
    assert [tensor.numel() for tensor in tensors_in(value)] == [1]
    assert [tensor.numel() for tensor in tensors_in(output)] == [2]
