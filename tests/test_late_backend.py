"""The backend that lies in wait: it finds waits that are missing, and right code does not notice it."""

from collections.abc import Callable
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.join import Join
from torch.nn import parallel

import late_backend
from ddp_pairs import SMALL_MB, Pair, mlp, mlp_loss
from forked import fork_context
from parity import assert_row
from parity_runs import Row
from pool import Pool, RankError, Ranks
from test_checkpoint import Resharded, resume, save_and_go_on
from training import assert_same_bits
from zero_optim import ZeroRedundancyOptimizer
from zero_optim.comm.works import Work
from zero_optim.ddp import (
    DistributedDataParallel,
    FullyShardedDataParallel,
    ShardedDataParallel,
    unsharded,
)
from zero_optim.hooks import zero_step

EVERY_SEED = (1, 2)


@pytest.fixture(scope="module", params=EVERY_SEED, ids=lambda seed: f"seed {seed}")
def late_pool(request: pytest.FixtureRequest) -> Any:
    with Pool(fork_context(), request.param) as pool:
        yield pool


@pytest.fixture
def late2(late_pool: Pool) -> Ranks:
    return Ranks(late_pool, 2)


# ---------------------------------------------------------------------- the backend itself


def outputs_without_a_wait() -> list[bool]:
    rank = dist.get_rank()
    tensor = torch.full((3,), float(rank))
    received = [torch.zeros(1), torch.zeros(1)]
    with patch.object(late_backend, "DELAYS", (30.0,)):  # so that only a wait lets them run
        works = [
            dist.broadcast(tensor, 0, async_op=True),
            dist.all_gather(received, torch.ones(1), async_op=True),
        ]
    seen = [bool(tensor.isnan().all()), bool(received[1 - rank].isnan().all())]
    for work in works:
        work.wait()
    return [*seen, tensor.tolist() == [0.0] * 3, torch.cat(received).tolist() == [1.0, 1.0]]


def an_input_written_too_early() -> float:
    tensor = torch.full((1,), 5.0)
    with patch.object(late_backend, "DELAYS", (30.0,)):  # so that only a wait lets it run
        work = dist.broadcast(tensor, 0, async_op=True)
    if dist.get_rank() == 0:
        tensor.fill_(7.0)
    work.wait()
    return tensor.item()


def exchanged_in_both_directions() -> list[float]:
    mine, other = dist.get_rank(), 1 - dist.get_rank()
    received = torch.empty(300_000)
    works = [dist.isend(torch.full((300_000,), float(mine)), other), dist.irecv(received, other)]
    for work in works:
        work.wait()
    total = torch.ones(1)
    future = dist.all_reduce(total, async_op=True).get_future().then(lambda landed: landed.value()[0] * 10)
    dist.barrier()
    return [received[0].item(), received[-1].item(), future.wait().item()]


def joined_with_other_collectives() -> float:
    layer = nn.Linear(1, 1)
    model = parallel.DistributedDataParallel(layer)
    with Join([model], divide_by_initial_world_size=False):  # so that DDP waits for the count of ranks
        loss = model(torch.full((1, 1), 1.0 + 2 * dist.get_rank())).sum()
        for _ in range(10):
            dist.all_reduce(torch.ones(1))
        loss.backward()
    assert layer.weight.grad is not None
    return layer.weight.grad.item()


def steps_on_a_thread() -> bool:
    model = nn.Linear(4, 4)
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.SGD, lr=0.1)
    return optimizer.iteration.overlap().takes_thread


def tried() -> list[object]:
    joined = joined_with_other_collectives()  # PyTorch's Join may keep a handle in C++ alone
    return [
        outputs_without_a_wait(),
        an_input_written_too_early(),
        exchanged_in_both_directions(),
        joined,
        steps_on_a_thread(),
    ]


def test_outputs_are_nan_until_somebody_waits_inputs_are_read_late_and_all_else_works(late2: Ranks) -> None:
    first, second = late2.run(tried)
    assert first == [[False, True, True, True], 7.0, [1.0, 1.0, 20.0], 2.0, True]
    assert second == [[True, True, True, True], 7.0, [0.0, 0.0, 20.0], 2.0, True]


# ---------------------------------------------------------------------- one test of each kind


def trains_as_pytorchs_wrapper() -> None:
    Pair.of(mlp(), bucket_cap_mb=SMALL_MB).train(mlp_loss, 4)


SELECTION: dict[str, tuple[Callable[..., None], tuple[object, ...]]] = {
    "DDP": (trains_as_pytorchs_wrapper, ()),
    **{
        stage: (assert_row, (Row(stage, "gpt", "ordinary", "plain"),))
        for stage in ("views", "lazy", "overlap", "gradients", "fully")
    },
}


one_seed = pytest.mark.parametrize("late_pool", [1], ids=["seed 1"], indirect=True)


@one_seed
@pytest.mark.parametrize("kind", SELECTION)
def test_training_has_the_same_bits_late(late2: Ranks, kind: str) -> None:
    check, args = SELECTION[kind]
    late2.run(check, *args)


@one_seed
def test_a_checkpoint_saved_and_loaded_late_goes_on_with_the_same_bits(late2: Ranks, tmp_path: Path) -> None:
    saved = late2.run(save_and_go_on, tmp_path / "one", Resharded(2, 2))
    resumed = late2.run(resume, tmp_path / "one", Resharded(2, 2))
    for want, got in zip(saved, resumed, strict=True):
        assert_same_bits(got, want)


# ---------------------------------------------------------------------- planted defects are found


def build(kind: str) -> tuple[nn.Module, nn.Module, ZeroRedundancyOptimizer]:
    """A small model, the wrapper that trains it, and the optimizer."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 1))
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, lr=0.05, bucket_cap_mb=0.0005)
    if kind == "sharded":
        return model, ShardedDataParallel(model, optimizer), optimizer
    if kind == "fully":
        return model, FullyShardedDataParallel(model, optimizer, units=[model[2], model[4]]), optimizer
    ddp = DistributedDataParallel(model, bucket_cap_mb=0.0005)
    if kind == "overlap":
        ddp.register_comm_hook(None, zero_step(optimizer))
    if kind == "owners":
        ddp.register_comm_hook(None, zero_step(optimizer, gradients="owners"))
    if kind == "lazy":
        optimizer.gather_lazily(model)
    return model, ddp, optimizer


def train(kind: str) -> list[Tensor]:
    """Trains a small model for some steps, and returns its parameters."""
    model, wrapper, optimizer = build(kind)
    generator = torch.Generator().manual_seed(dist.get_rank())
    for _ in range(5):
        optimizer.zero_grad()
        wrapper(torch.randn(4, 6, generator=generator)).square().mean().backward()
        optimizer.step()
    optimizer.wait_for_gathers()
    with unsharded(model) if kind == "fully" else nullcontext():
        return [param.detach().clone() for param in model.parameters()]


def trained_right(kind: str) -> bool:
    """Whether parameters are finite, and the same on both ranks."""
    params = torch.cat([param.flatten() for param in train(kind)])
    other = params.clone()
    dist.broadcast(other, 0)
    return bool(params.isfinite().all() and torch.equal(params, other))


KINDS = ["plain", "overlap", "owners", "lazy", "sharded", "fully"]


def planted(phase: str) -> Callable[..., Any]:
    """Give what takes the place of `Work.wait`, and does not wait for works of a phase."""
    right = Work.wait

    def wait(work: Work, timeout: float | None = None) -> Any:
        return None if work.phase.name == phase else right(work, timeout)

    return wait


def trained_without_waits(kind: str, phase: str) -> bool:
    # Not found only if each of many gathers were late to be read by as much.
    delays = patch.object(late_backend, "DELAYS", (0.05,))
    with delays, patch.object(Work, "wait", planted(phase)):
        return trained_right(kind)


@pytest.mark.parametrize("kind", KINDS)
def test_a_missing_wait_for_gathers_is_found(late2: Ranks, kind: str) -> None:
    with suppress(RankError):  # found as well: stamps are garbage
        assert late2.run(trained_without_waits, kind, "gather") != [True, True]


@one_seed
@pytest.mark.parametrize("kind", KINDS)
def test_nothing_is_found_where_no_wait_is_missing(late2: Ranks, kind: str) -> None:
    """So it is no fault of the planting itself that is found."""
    assert late2.run(trained_without_waits, kind, "no phase") == [True, True]


def a_hook_that_does_not_wait(state: object, bucket: Any) -> "torch.futures.Future[Tensor]":
    buffer = bucket.buffer().div_(dist.get_world_size())
    state.append(dist.all_reduce(buffer, async_op=True))  # type: ignore[attr-defined]
    done: torch.futures.Future[Tensor] = torch.futures.Future()
    done.set_result(buffer)
    return done


def train_with_a_hook_that_does_not_wait() -> bool:
    model, works = nn.Linear(4, 4), []
    ddp = DistributedDataParallel(model)
    ddp.register_comm_hook(works, a_hook_that_does_not_wait)
    with patch.object(late_backend, "DELAYS", (30.0,)):  # so that only a wait lets it run
        ddp(torch.full((1, 4), 1.0 + 2 * dist.get_rank())).sum().backward()
    right = torch.equal(model.weight.grad, torch.full((4, 4), 2.0))
    for work in works:
        work.wait()
    return right


def test_a_hook_that_does_not_wait_is_found(late2: Ranks) -> None:
    assert late2.run(train_with_a_hook_that_does_not_wait) == [False, False]
