"""What goes wrong is said on every rank, by name, with what to do; and training goes on after it."""

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel.distributed import _MixedPrecision

from ddp_pairs import SMALL_MB, Recomputed, assert_averaged, batch, check_average, mlp, mlp_loss, of_batch
from fully import whole
from parity_models import Words
from parity_runs import STAGES, Row, Run, Stage
from pool import on_ranks
from training import assert_same_bits
from zero_optim import ZeroRedundancyOptimizer
from zero_optim.compat.autograd import after_backward
from zero_optim.ddp import DistributedDataParallel, ShardedDataParallel
from zero_optim.ddp.reducer import inbox
from zero_optim.errors import RankMismatchError, ReductionError

# ---------------------------------------------------------------------- models


def reorder(layer: nn.Module) -> None:
    layer._parameters = dict(reversed(layer._parameters.items()))  # type: ignore[assignment]


def transpose(layer: nn.Linear) -> None:
    layer.weight.data = layer.weight.data.t()


DIFFERENCES: dict[Callable[[nn.Sequential], object], str] = {
    lambda net: reorder(net[2]): "2.bias (8,)",
    lambda net: net.append(nn.Linear(3, 3)): "rank 0 has nothing more; rank 1 has 9.weight (3, 3)",
    lambda net: net[2].weight.requires_grad_(False): "2.weight (8, 8) torch.float32, strides (8, 1), frozen",
    lambda net: transpose(net[2]): "2.weight (8, 8) torch.float32, strides (1, 8)",
}


@on_ranks(2)
def test_models_that_differ_are_named_on_every_rank() -> None:
    rank = dist.get_rank()
    for change, message in DIFFERENCES.items():
        net = mlp()
        if rank == 1:
            change(net)
        with pytest.raises(RankMismatchError, match="ranks disagree about the model to wrap") as caught:
            DistributedDataParallel(net)
        assert message in str(caught.value), str(caught.value)
        assert "rank 0" in str(caught.value)
        assert "rank 1" in str(caught.value)
    with pytest.raises(RankMismatchError, match="bucket_cap_mb"):
        DistributedDataParallel(mlp(), bucket_cap_mb=1 + rank)
    with pytest.raises(TypeError, match="expected a module to wrap, got int"):
        DistributedDataParallel(mlp() if rank else 3)  # type: ignore[arg-type]
    with pytest.raises(RuntimeError, match=r"doesn't have any parameter that requires a gradient"):
        DistributedDataParallel(mlp().requires_grad_(False))
    DistributedDataParallel(mlp(), device_ids=None if rank else [])  # each rank may name its own device


@on_ranks(2)
def test_mixed_precision_is_refused_with_what_serves_instead() -> None:
    policy = _MixedPrecision(torch.bfloat16)
    with pytest.raises(Exception, match="takes no mixed_precision: use"):
        DistributedDataParallel(mlp(), mixed_precision=policy if dist.get_rank() else None)
    net = mlp()
    optimizer = ZeroRedundancyOptimizer(net.parameters(), torch.optim.SGD, lr=0.1)
    with pytest.raises(TypeError, match=r"ShardedDataParallel takes no mixed_precision: use torch\.autocast"):
        ShardedDataParallel(net, optimizer, mixed_precision=policy)


@on_ranks(2)
def test_optimizers_on_parameters_are_refused() -> None:
    net = mlp()
    net[0].weight._in_backward_optimizers = []  # what PyTorch's _apply_optimizer_in_backward leaves
    model = DistributedDataParallel(net)
    with pytest.raises(RuntimeError, match=r"zero_optim\.hooks\.zero_step"):
        mlp_loss(model, 0)


# ---------------------------------------------------------------------- backward passes


@on_ranks(2)
def test_a_second_gradient_is_reported_with_its_likely_causes() -> None:
    model = DistributedDataParallel(Recomputed(2), bucket_cap_mb=SMALL_MB)
    message = r"every rank: Expected to mark a variable ready only once\. A second .* other\."
    for _ in range(2):
        model.zero_grad()
        with pytest.raises(ReductionError, match=message) as caught:
            mlp_loss(model, 0).backward()
        for part in ("other.bias", "other.weight", "use_reentrant=False", "static_graph=True"):
            assert part in str(caught.value), part
        assert "first" not in str(caught.value).replace("after the first was", "")


@on_ranks(2)
def test_a_static_graph_that_changes_is_reported() -> None:
    model = DistributedDataParallel(Recomputed(), static_graph=True, bucket_cap_mb=SMALL_MB)
    net: Any = model.module
    for first, then, how in ((1, 0, "fewer"), (1, 2, "more")):
        net.times = first
        mlp_loss(model, 0).backward()
        net.times = then
        with pytest.raises(
            ReductionError, match=rf"There were {how} gradients .*other\.(bias|weight), other\.(bias|weight)"
        ) as caught:
            mlp_loss(model, 1).backward()
        assert "Leave static_graph out" in str(caught.value)
    net.times = 1
    check_average(model, copy.deepcopy(net), 2)


class Hidden(nn.Module):
    """Has something that the loss uses, and the output does not show."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.shown, self.hidden = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        self.kept = self.hidden(x)
        return self.shown(x)


@on_ranks(2)
def test_a_parameter_that_the_output_does_not_show_is_reduced() -> None:
    """The engine tells what will run, so that even this is right."""
    net = Hidden()
    model = DistributedDataParallel(net, find_unused_parameters=True, bucket_cap_mb=SMALL_MB)
    clean = Hidden()

    def loss(wrapped: nn.Module, net: Hidden, rank: int) -> Tensor:
        return wrapped(batch(0, 4, 8, rank=rank)).sum() + net.kept.square().sum()

    for _ in range(2):
        model.zero_grad()
        loss(model, net, dist.get_rank()).backward()
        assert_averaged(net, clean, lambda module, rank: loss(module, module, rank), tolerance=1e-6)  # type: ignore[arg-type]


class Interrupted(Exception):
    """Raised in the middle of a backward pass."""


def interrupt(_: Tensor) -> None:
    raise Interrupted


def backward_and_check(model: DistributedDataParallel, number: int) -> None:
    mlp_loss(model, number).backward()
    model._check_reducer_finalized()  # type: ignore[no-untyped-call]


def check_exception(where: int, ranks: list[int], options: dict[str, Any], deferred: bool) -> None:
    rank = dist.get_rank()
    net = mlp()
    model, clean = DistributedDataParallel(net, bucket_cap_mb=SMALL_MB, **options), mlp()
    model.reducer.own.defers_reports = deferred
    for number in range(3):  # in the first pass too, before buckets are rebuilt
        model.zero_grad()
        if rank in ranks:
            handle = net[where].weight.register_hook(interrupt)
            with pytest.raises(Interrupted):
                mlp_loss(model, number).backward()
            handle.remove()
            with pytest.raises(ReductionError, match="a backward pass ended with an exception") as caught:
                model.check_finished() if deferred else mlp_loss(model, number)
        else:
            with pytest.raises(ReductionError, match="a backward pass ended with an exception") as caught:
                backward_and_check(model, number)
        names = "every rank" if len(ranks) == 2 else f"rank {ranks[0]}"
        assert f"{names}: a backward pass" in str(caught.value)
        check_average(model, clean, 10 + number, (where, ranks, options, number))


@on_ranks(2)
def test_an_exception_in_a_backward_pass_reaches_every_rank_and_training_goes_on() -> None:
    for where, ranks, options in (
        (8, [0], {}),
        (4, [0, 1], {"gradient_as_bucket_view": True}),
        (0, [0], {"find_unused_parameters": True}),
        (8, [1], {"static_graph": True}),
    ):
        check_exception(where, ranks, options, deferred=False)
    check_exception(4, [1], {}, deferred=True)


LATE = (
    "an earlier backward pass cannot be used. "
    r"rank 0: no gradient for other\.weight, other\.bias\. Every .*They were handed out"
)


@on_ranks(2)
def test_a_report_is_read_one_pass_later_where_the_cpu_would_wait() -> None:
    """Where reading makes the CPU wait, as on CUDA, what went wrong is read one pass later."""
    model, clean = DistributedDataParallel(Recomputed()), Recomputed()
    model.reducer.own.defers_reports = True
    net: Any = model.module
    for _ in range(2):
        net.times = dist.get_rank()
        mlp_loss(model, 0).backward()
        net.times = 1
        if dist.get_rank() == 0:
            model(torch.ones(1, 8))  # a forward pass more or less reads nothing more
        check_average(model, clean, 1)
        with pytest.raises(ReductionError, match=LATE):
            mlp_loss(model, 0)
        check_average(model, clean, 1)
    model.check_finished()


@on_ranks(2)
def test_a_pass_that_broke_off_is_told_one_pass_later_on_every_rank() -> None:
    """The rank whose pass broke off must not raise before the others do."""
    rank, clean = dist.get_rank(), mlp()
    net = mlp()
    model = DistributedDataParallel(net, bucket_cap_mb=SMALL_MB, gradient_as_bucket_view=True)
    model.reducer.own.defers_reports = True
    mlp_loss(model, 0).backward()
    if rank == 1:
        handle = net[4].weight.register_hook(interrupt)
        with pytest.raises(Interrupted):
            mlp_loss(model, 1).backward()
        handle.remove()
    else:
        mlp_loss(model, 1).backward()
    model.zero_grad(set_to_none=False)
    mlp_loss(model, 2).backward()
    assert_averaged(net, clean, of_batch(2), tolerance=1e-6)
    with pytest.raises(ReductionError, match="rank 1: a backward pass ended with an exception"):
        mlp_loss(model, 3)
    check_average(model, clean, 4)


# ---------------------------------------------------------------------- sparse gradients


@on_ranks(2)
def test_gradients_of_the_wrong_layout_are_reported() -> None:
    words = batch(0, 4, 8)
    for sparse, came, expected in ((False, "sparse", "dense"), (True, "dense", "sparse")):
        net = Words()
        net.table.sparse = sparse
        model = DistributedDataParallel(net)
        net.table.sparse = not sparse
        message = f"a {came} gradient where a {expected} one was expected, for table.weight. .*sparse=True"
        for _ in range(2):
            model.zero_grad()
            with pytest.raises(ReductionError, match=message):
                model(words).sum().backward()
        net.table.sparse = sparse
        model.zero_grad()
        model(words).sum().backward()
        assert net.table.weight.grad.is_sparse == sparse


# ---------------------------------------------------------------------- passes that the engine still keeps
# On an accelerator the engine may let go of a pass when the next one runs. Here a list keeps it till then.


@contextmanager
def kept() -> Iterator[list[Callable[[], None]]]:
    """Keep what the engine is to call."""
    callbacks: list[Callable[[], None]] = []

    def keep(callback: Callable[[], None]) -> None:
        callbacks.append(callback)
        after_backward(callback)

    with mock.patch.object(inbox, "after_backward", keep):
        yield callbacks


def built(kind: str) -> Run:
    """A run that takes a step, and whose backward pass does something in its middle."""
    stages = {"whole": Stage(DistributedDataParallel), "gradients": STAGES["gradients"]}
    row = Row(stage=kind, model="tower", loop="ordinary", option="plain")
    return Run.of(row, stages.get(kind, STAGES["fully"]))


def step(run: Run, number: int) -> None:
    run.optimizer.zero_grad()
    run.loss(number).backward()
    run.optimizer.step()


@on_ranks(2)
@pytest.mark.parametrize(
    ("kind", "fails_on"),
    [
        ("whole", (0,)),
        ("gradients", (0,)),
        ("parameters", (0, 1)),  # on one rank alone marks of units differ
    ],
)
def test_a_pass_that_broke_off_is_told_of_in_the_next_forward_pass_though_the_engine_still_keeps_it(
    kind: str, fails_on: tuple[int, ...]
) -> None:
    expected, run = built(kind), built(kind)
    for number in range(3):
        step(expected, number)
    step(run, 0)
    fails_here, acts = dist.get_rank() in fails_on, list[Callable[[], None]]()

    def fail() -> None:
        if fails_here:
            raise ValueError("the user's")

    def in_backward(*args: Any) -> None:
        args[-1].register_hook(lambda _: acts[-1]())  # half of the gradients have come

    run.net.blocks[1].register_forward_hook(in_backward)
    with kept() as callbacks:
        acts.append(fail)
        run.optimizer.zero_grad()
        loss = run.loss(1)
        with pytest.raises(ValueError if fails_here else ReductionError, match=r"user's|ended with an exc"):
            loss.backward()
        if fails_here:
            with pytest.raises(ReductionError, match="ended with an exception"):
                run.loss(1)
        acts.append(callbacks.clear)  # only now, while the next pass runs
        step(run, 1)
        acts.append(lambda: None)
        step(run, 2)
    assert kind != "parameters" or run.model.units.nbytes_live() == 0
    assert_same_bits(whole(run.model), whole(expected.model))
