"""The bits of PyTorch's wrapper on three and four ranks, where sums round as places in a bucket have it."""

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

CAP_MB = 0.002  # several buckets

OPTIONS: dict[str, dict[str, Any]] = {
    "defaults": {},
    "small buckets": {"bucket_cap_mb": CAP_MB},
    "views": {"bucket_cap_mb": CAP_MB, "gradient_as_bucket_view": True},
    "static graph": {"bucket_cap_mb": CAP_MB, "static_graph": True},
    "static graph, views": {"static_graph": True, "gradient_as_bucket_view": True},
    "static graph, find unused": {
        "bucket_cap_mb": CAP_MB,
        "static_graph": True,
        "find_unused_parameters": True,
    },
    "find unused": {"find_unused_parameters": True},
    "find unused, small buckets": {"bucket_cap_mb": CAP_MB, "find_unused_parameters": True},
    "list of capacities": {"bucket_cap_mb_list": [CAP_MB, 2 * CAP_MB]},
    "list, find unused": {"bucket_cap_mb_list": [CAP_MB, 2 * CAP_MB], "find_unused_parameters": True},
}


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
    net = model.module
    assert isinstance(net, Layers)
    loss: Tensor = model(batch(number, 5, net.width)).square().mean()
    return loss


def train(pair: Pair, steps: int, where: object) -> None:
    for number in range(steps):
        for model in pair:
            model.zero_grad(set_to_none=number != 3)
        pair.backward(lambda model, n=number: loss_of(model, n), (where, number))  # type: ignore[misc]


def places(model: nn.Module) -> list[list[int]]:
    """Parameters of each bucket of PyTorch's wrapper, once rebuilt."""
    data = model._get_ddp_logging_data()  # type: ignore[operator]
    told = data["rebuilt_per_bucket_param_indices"]
    return [[int(index) for index in part.split()] for part in told.split(",")]


@on_ranks(4)
@pytest.mark.filterwarnings("ignore:You passed find_unused_parameters=true:UserWarning")  # PyTorch's advice
@pytest.mark.parametrize("members", [3, 4])
def test_every_option_gives_the_bits_of_pytorchs_wrapper_in_every_pass(members: int) -> None:
    group = dist.new_group(list(range(members)))
    if dist.get_rank() >= members:
        return
    for name, options in OPTIONS.items():
        if not KNOWN.issuperset(options):
            continue  # this PyTorch does not have it
        uses_all = "find" not in name and "static" not in name
        pair = Pair.of(Layers(spares=0 if uses_all else 2), process_group=group, **options)
        before = [bucket.nbytes for bucket in pair.ours.reducer.own.assignment.buckets]
        theirs = pair.theirs._get_ddp_logging_data()["bucket_sizes"]  # type: ignore[no-untyped-call]
        assert before == [int(size) for size in theirs.split(", ")], name
        train(pair, 6, (members, name))
        own = pair.ours.reducer.own
        if own.history.has_rebuilt:
            assert [bucket.indices for bucket in own.assignment.buckets] == places(pair.theirs), name


@on_ranks(4)
@pytest.mark.parametrize("members", [3, 4])
def test_large_gradients_have_the_bits_of_pytorchs_wrapper(members: int) -> None:
    """More than a megabyte for each part of the ring, so that there are more parts."""
    group = dist.new_group(list(range(members)))
    if dist.get_rank() < members:
        train(Pair.of(Layers(640), process_group=group), 3, members)


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
    for options in ({"find_unused_parameters": True}, {"static_graph": True}):
        for view in (False, True):
            for wrapper in (DistributedDataParallel, TorchDdp):
                for overlap in (False, True):
                    net = stepped(wrapper, overlap, gradient_as_bucket_view=view, **options)
                    for got, expected in zip(net.parameters(), plain.parameters(), strict=True):
                        assert_same(got.detach(), expected.detach(), (wrapper, options, view, overlap))


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


@on_ranks(2, slow=4)
def test_a_failure_is_told_from_gradients_that_are_nan_in_every_dtype() -> None:
    dtypes = (torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64)
    rank = dist.get_rank()
    for dtype, deferred in product(dtypes, (False, True)):  # deferred: as on CUDA
        net = nn.Linear(3, 3, bias=False, dtype=dtype)
        # PyTorch 2.8 cannot broadcast complex parameters on gloo, and ranks have the same anyway.
        model = DistributedDataParallel(net, init_sync=False)
        model.reducer.own.defers_reports = deferred
        for number in range(3):
            backward(model, dtype, float("nan") if rank == number else 1.0)
            assert net.weight.grad is not None
            assert bool(net.weight.grad.isnan().all()) == (number < dist.get_world_size()), dtype
        handle = net.weight.register_hook(fail) if rank == 1 else None
        with pytest.raises(ZeroDivisionError if handle else ReductionError):
            backward_and_check(model, dtype)
        if handle is not None:
            handle.remove()
            with pytest.raises(ReductionError, match="rank 1: a backward pass ended with"):
                model.check_finished()
        backward(model, dtype)
        assert net.weight.grad is not None
        assert bool(net.weight.grad.isfinite().all())
