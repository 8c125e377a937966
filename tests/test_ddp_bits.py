"""The bits of PyTorch's wrapper on two to four ranks, where sums round as places in a bucket have it."""

from itertools import product
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as TorchDdp

from ddp_pairs import KNOWN, Pair, assert_same, batch
from pool import on_ranks
from zero_optim import ZeroRedundancyOptimizer
from zero_optim.ddp import DistributedDataParallel
from zero_optim.errors import ReductionError
from zero_optim.hooks import zero_step

SMALL: dict[str, Any] = {"bucket_cap_mb": 0.002}  # several buckets
VIEWS, STATIC, UNUSED = (
    {name: True} for name in ("gradient_as_bucket_view", "static_graph", "find_unused_parameters")
)
LISTED = {"bucket_cap_mb_list": [0.002, 0.004]}
OPTIONS: tuple[dict[str, Any], ...] = (
    {},
    SMALL,
    SMALL | VIEWS,
    SMALL | STATIC,
    STATIC | VIEWS,
    SMALL | STATIC | UNUSED,
    SMALL | UNUSED,
    SMALL | UNUSED | {"skip_all_reduce_unused_params": True},
    LISTED,
    {"batched_grad_copy": True},
)


class Layers(nn.Module):
    """Twelve gradients, or more; layers are used in another order than that of registration."""

    def __init__(self, width: int = 16, spares: int = 0) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(6))
        self.spares = nn.ModuleList(nn.Linear(3, 5) for _ in range(spares))
        self.width = width

    def forward(self, x: Tensor) -> Tensor:
        for index in (0, 3, 1, 2, 5, 4):
            x = self.layers[index](x).tanh()
        return x


def loss_of(model: nn.Module, number: int) -> Tensor:
    return model(batch(number, 5, model.module.width)).square().mean()


def assert_buckets_of_pytorch(pair: Pair, options: dict[str, Any]) -> None:
    own, theirs = pair.ours.reducer.own, pair.theirs._get_ddp_logging_data()  # type: ignore[no-untyped-call]
    assert own.has_rebuilt == ("static_graph" in options or "find_unused_parameters" not in options)
    if own.has_rebuilt:
        told = theirs["rebuilt_per_bucket_param_indices"].split(",")
        indices = [[int(index) for index in part.split()] for part in told]
        assert [bucket.indices for bucket in own.assignment.buckets] == indices, options


@on_ranks(4)
@pytest.mark.filterwarnings("ignore:You passed find_unused_parameters=true:UserWarning")  # PyTorch's advice
def test_every_option_gives_the_bits_of_pytorchs_wrapper_in_every_pass() -> None:
    for members in (2, 3, 4):
        group = dist.new_group(list(range(members)))
        for options in OPTIONS if dist.get_rank() < members else ():
            if KNOWN.issuperset(options):  # this PyTorch has it
                uses_all = not {"static_graph", "find_unused_parameters"} & options.keys()
                pair = Pair.of(Layers(spares=0 if uses_all else 2), process_group=group, **options)
                pair.train(loss_of, 4, (members, options))
                assert_buckets_of_pytorch(pair, options)


@on_ranks(3)
def test_large_gradients_have_the_bits_of_pytorchs_wrapper() -> None:
    """More than a megabyte for each part of the ring, so that there are more parts."""
    Pair.of(Layers(640)).train(loss_of, 3)


# ---------------------------------------------------------------------- gradients without a value


class NoGradient(torch.autograd.Function):
    """Takes a parameter, and has no gradient for it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, unused: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return grads[0], None


class Undefined(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer, self.odd = nn.Linear(3, 3), nn.Parameter(torch.ones(4))
        self.is_defined = False

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.layer(x)
        return y + self.odd.sum() if self.is_defined else NoGradient.apply(y, self.odd)


def stepped(wrapper: type[TorchDdp] | None, overlap: bool, **options: Any) -> Undefined:
    net = Undefined()
    model: nn.Module = net if wrapper is None else wrapper(net, **options)
    optimizer = (
        ZeroRedundancyOptimizer(net.parameters(), torch.optim.AdamW, lr=0.1, weight_decay=0.5)
        if overlap
        else torch.optim.AdamW(net.parameters(), lr=0.1, weight_decay=0.5)
    )
    if overlap:
        model.register_comm_hook(None, zero_step(optimizer))  # type: ignore[operator, arg-type]
    for _ in range(3):
        optimizer.zero_grad()
        model(torch.ones(2, 3)).sum().backward()
        assert net.odd.grad is None, (wrapper, overlap, options)
        optimizer.step()
    return net


@on_ranks(2)
def test_a_parameter_whose_gradient_is_undefined_on_every_rank_has_none() -> None:
    plain = stepped(None, overlap=False)
    assert torch.equal(plain.odd, torch.ones(4))
    for options, wrapper in product((UNUSED, STATIC), (DistributedDataParallel, TorchDdp)):
        net = stepped(wrapper, overlap=True, gradient_as_bucket_view=True, **options)
        for got, expected in zip(net.parameters(), plain.parameters(), strict=True):
            assert_same(got.detach(), expected.detach(), (wrapper, options))


@on_ranks(2)
def test_a_static_graph_refuses_a_gradient_that_was_undefined_when_it_was_learnt() -> None:
    """On one rank, where it would stay as it came, not reduced."""
    model = DistributedDataParallel(Undefined(), static_graph=True)
    net = model.module
    model(torch.ones(2, 3)).sum().backward()
    model.zero_grad()
    net.is_defined = dist.get_rank() == 1
    with pytest.raises(ReductionError, match=r"rank 1: .*There were more gradients .*for odd"):
        model(torch.ones(2, 3)).sum().backward()


# ---------------------------------------------------------------------- word of a failure


def fail(_: Tensor) -> None:
    raise ZeroDivisionError


def backward(model: nn.Module, dtype: torch.dtype, value: float = 1.0) -> None:
    model.zero_grad()
    model(torch.full((1, 3), value, dtype=dtype)).abs().sum().backward()


def backward_and_check(model: DistributedDataParallel, dtype: torch.dtype) -> None:
    backward(model, dtype)
    model.check_finished()


@on_ranks(2)
def test_a_failure_is_told_from_gradients_that_are_nan() -> None:
    dtypes = (torch.bfloat16, torch.float32, torch.complex64)
    rank = dist.get_rank()
    for dtype, deferred in product(dtypes, (False, True)):  # deferred: as on CUDA
        net = nn.Linear(3, 3, bias=False, dtype=dtype)
        # PyTorch 2.8 cannot broadcast complex parameters on gloo, and ranks have the same anyway.
        model = DistributedDataParallel(net, init_sync=False)
        model.reducer.own.defers_reports = deferred
        for number in range(3):
            backward(model, dtype, float("nan") if rank == number else 1.0)
            assert bool(net.weight.grad.isnan().all()) == (number < dist.get_world_size()), dtype
        handle = net.weight.register_hook(fail) if rank == 1 else None
        with pytest.raises(ZeroDivisionError if handle else ReductionError):
            backward_and_check(model, dtype)
        if handle is not None:
            handle.remove()
            with pytest.raises(ReductionError, match="rank 1: a backward pass ended with"):
                model.check_finished()
        backward(model, dtype)
        assert bool(net.weight.grad.isfinite().all())
