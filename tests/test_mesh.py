"""Over a mesh gradients are averaged over all ranks, and everything is sharded inside each replica."""

import copy
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.join import Join
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.nn.parallel import DistributedDataParallel as TorchDdp

from breaking import Breaks
from fully import Tower, assert_alike, assert_equal_everywhere, batch, loss_of, whole
from fully import train as train_on
from meshes import mesh_of
from pool import on_ranks
from streams_runs import assert_ordered, pass_again
from zero_optim import RankMismatchError, ReductionError, RemoteRankError, ZeroRedundancyOptimizer
from zero_optim.ddp import DistributedDataParallel, FullyShardedDataParallel, ShardedDataParallel

STAGES: dict[str, Any] = {"gradients": ShardedDataParallel, "fully": FullyShardedDataParallel}


def built(
    model: nn.Module, stage: str, mesh: DeviceMesh, of_optimizer: dict[str, Any] | None = None, **options: Any
) -> tuple[Any, ZeroRedundancyOptimizer]:
    given = {"optimizer_class": torch.optim.AdamW, "lr": 1e-2, **(of_optimizer or {})}
    given["process_group"] = mesh["shard"].get_group()
    optimizer = ZeroRedundancyOptimizer(model.parameters(), **given)
    return STAGES[stage](model, optimizer, mesh=mesh, **options), optimizer


def train(wrapped: Any, optimizer: Any, first: int = 0, steps: int = 3) -> list[float]:
    return train_on(wrapped, optimizer, range(first, first + steps))


@on_ranks(2)
def test_one_replica_is_no_mesh_and_replicas_of_one_rank_are_ddp() -> None:
    model = Tower()
    (wrapped, optimizer), other = built(copy.deepcopy(model), "fully", mesh_of(1)), copy.deepcopy(model)
    one = ZeroRedundancyOptimizer(other.parameters(), torch.optim.AdamW, lr=1e-2)
    assert train(wrapped, optimizer) == train(FullyShardedDataParallel(other, one), one)
    assert_alike(wrapped.module, other)
    alone, optimizer = built(copy.deepcopy(model), "fully", mesh_of(2))
    ddp = DistributedDataParallel(copy.deepcopy(model))
    assert train(alone, optimizer) == train(ddp, torch.optim.AdamW(ddp.parameters(), lr=1e-2))
    assert_alike(alone.module, ddp.module)


class Uneven(nn.Module):
    """Rank 3 alone uses one layer, nobody another; a buffer counts, and an embedding is sparse."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.table = nn.Embedding(8, 6, sparse=True)
        self.first, self.by_one, self.by_none = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 6)
        self.register_buffer("count", torch.zeros(1))

    def forward(self, step: int) -> Tensor:
        rank = dist.get_rank()
        self.seen = self.count.clone()
        self.count.add_(1 + rank)
        x = self.first(self.table(torch.tensor([step, rank, 2 * rank, 7])))
        return (self.by_one(x) if rank == 3 else x).square().mean()


@on_ranks(4)
def test_ranks_of_all_replicas_agree_about_buffers_and_unused_parameters() -> None:
    plain = Uneven()
    given = {"optimizer_class": torch.optim.SGD, "lr": 0.1}
    wrapped, optimizer = built(
        copy.deepcopy(plain), "gradients", mesh_of(2), given, find_unused_parameters=True
    )
    ddp = TorchDdp(plain, find_unused_parameters=True)
    one = torch.optim.SGD(ddp.parameters(), lr=0.1)
    for step in range(3):
        for each, steps in ((wrapped, optimizer), (ddp, one)):
            steps.zero_grad()
            each(step).backward()
            assert each.module.seen == step  # rank 0's
            assert each.module.by_none.weight.grad is None
            steps.step()
    assert_equal_everywhere(wrapped.module)
    for got, want in zip(whole(wrapped.module), whole(plain), strict=True):
        torch.testing.assert_close(got, want)  # sums have another order


@on_ranks(4)
def test_a_rank_that_lacks_gradients_is_named_in_every_replica() -> None:
    wrapped, optimizer = built(Uneven(), "gradients", mesh_of(2), {"optimizer_class": torch.optim.SGD})
    with pytest.raises(ReductionError, match=r"ranks 0, 1, 2: no gradient for by_one.*rank 3: no gradient"):
        wrapped(0).backward()
    assert all(param.grad is None for param in wrapped.parameters())
    del optimizer


def built_over(model: nn.Module, group: Any, lr: float = 0.1, **options: Any) -> ZeroRedundancyOptimizer:
    return ZeroRedundancyOptimizer(model.parameters(), torch.optim.SGD, group, lr=lr, **options)


@on_ranks(4)
def test_what_does_not_fit_together_is_refused_on_every_rank() -> None:
    mesh, world = mesh_of(2), dist.get_world_size()
    inner = mesh["shard"].get_group()
    turned = DeviceMesh("cpu", [[0, 2], [3, 1]])
    of_one = init_device_mesh("cpu", (world,))
    rank = dist.get_rank()
    wrong: list[tuple[type[Exception], str, Any, dict[str, Any]]] = [
        (TypeError, "expected mesh to be a torch DeviceMesh, got str", inner, {"mesh": "2x2"}),
        (ValueError, "expected a mesh of 2 dimensions", inner, {"mesh": of_one}),
        (ValueError, "rise along rows and columns", inner, {"mesh": turned}),
        (
            TypeError,
            "rank 3: expected units" if rank < 3 else "expected units",
            inner,
            {"mesh": mesh, "units": 3},
        ),
    ]
    for kind, words, group, options in wrong:
        model = Tower()
        if "units" in options and rank < 3:
            options["units"] = "auto"
        with pytest.raises(kind, match=words):
            FullyShardedDataParallel(model, built_over(model, group), **options)
    over_all = r"one row of the mesh .* ranks \[0, 1, 2, 3\]: .* all its ranks, leave out mesh"
    for wrap in STAGES.values():
        model = Tower()
        with pytest.raises(ValueError, match=over_all):
            wrap(model, built_over(model, None), mesh=mesh)
    for lr, cuts, words in ((0.1 * (rank > 1) + 0.1, True, "lr=0.1.*lr=0.2"), (0.1, rank > 1, "cuts")):
        for wrap in STAGES.values():
            model = Tower()
            with pytest.raises(RankMismatchError, match=f"(?s)the optimizers of the replicas.*{words}"):
                wrap(model, built_over(model, inner, lr=lr, cuts=cuts), mesh=mesh)
    wrapped, optimizer = built(Tower(), "gradients", mesh)
    assert not any("parameter parameter" in item for item in optimizer.core.describe())
    with pytest.raises(RuntimeError, match=r"ShardedDataParallel takes no part in Join: .* stage 1"):
        Join([wrapped])
    wrapped.detach()
    with pytest.raises(RuntimeError, match="wrap the module anew, with a new mesh"):
        wrapped.rebind()


@on_ranks(4)
def test_streams_wait_for_the_sums_across_replicas() -> None:
    assert_ordered(is_nccl=False, sharded={}, replicas=2, after=pass_again)


@on_ranks(4)
@pytest.mark.parametrize("stage", STAGES)
def test_replicas_that_go_different_ways_are_told(stage: str) -> None:
    """What one replica does alone is found in the next backward pass of all."""
    is_second, others = dist.get_rank() > 1, "of replica 0, {} of replica 1"
    wrapped, optimizer = built(Tower(), stage, mesh_of(2))
    train(wrapped, optimizer)
    optimizer.param_groups[0]["lr"] *= 1 + is_second
    with pytest.raises(RankMismatchError, match=r"lr of group 0: 0\.01 in replica 0, 0\.02 in replica 1"):
        loss_of(wrapped, 3).backward()
    optimizer.param_groups[0]["lr"] = 0.01
    if is_second:
        optimizer.step()
    optimizer.zero_grad()
    with pytest.raises(RankMismatchError, match=f"steps taken: 3 {others.format(4)}"):
        loss_of(wrapped, 4).backward()


def assert_goes_on(wrapped: Any, optimizer: ZeroRedundancyOptimizer) -> None:
    """Whoever has heard goes on together."""
    optimizer.zero_grad()
    wrapped.module.load_state_dict(Tower().state_dict())
    train(wrapped, optimizer, 5)
    optimizer.wait_for_gathers()
    assert_equal_everywhere(wrapped.module)


@on_ranks(4)
@pytest.mark.parametrize(("stage", "lazily"), [("gradients", False), ("gradients", True), ("fully", False)])
def test_a_step_that_fails_in_one_replica_is_named_in_the_others(stage: str, lazily: bool) -> None:
    """One rank raises in its step, and nobody goes on but the other replica."""
    rank, model = dist.get_rank(), Tower()
    given = {"optimizer_class": Breaks, "gather_lazily": model if lazily else None}
    wrapped, optimizer = built(model, stage, mesh_of(2), given)
    train(wrapped, optimizer)
    loss_of(wrapped, 3).backward()
    optimizer.optim.breaks = True
    hears = rank == 1 or (rank == 0 and stage == "gradients" and not lazily)
    error = ArithmeticError if rank else RemoteRankError
    with pytest.raises(error, match="no such root") if hears else nullcontext():
        optimizer.step()
    optimizer.optim.breaks = False
    if (stage == "fully" and rank < 2) or (lazily and rank == 0):  # heard in the next forward pass
        with pytest.raises(Exception, match="ArithmeticError"):
            wrapped(batch(4))
    if rank > 1:
        loss = loss_of(wrapped, 4)
        with pytest.raises(RemoteRankError, match=r"failed in replica 0 of the mesh: .*ArithmeticError"):
            loss.backward()
    assert_goes_on(wrapped, optimizer)


@on_ranks(4)
@pytest.mark.parametrize("stage", ["gradients", "fully"])
def test_a_rank_that_differs_from_its_replica_is_called_by_its_number_in_the_mesh(stage: str) -> None:
    """The last rank has another rate than the other one of its replica, and all hear of it."""
    wrapped, optimizer = built(Tower(), stage, mesh_of(2))
    train(wrapped, optimizer)
    rank, rate = dist.get_rank(), optimizer.param_groups[0]["lr"]
    loss_of(wrapped, 3).backward()
    optimizer.param_groups[0]["lr"] = 2 * rate if rank == 3 else rate
    differ = pytest.raises(RankMismatchError, match=r"rank 2 has 0\.01; rank 3 has 0\.02")
    with differ if rank > 1 and stage == "gradients" else nullcontext():
        optimizer.step()
    if rank < 2:
        loss = loss_of(wrapped, 4)
        with pytest.raises(RemoteRankError, match=r"failed in replica 1 of the mesh: .*rank 3 has"):
            loss.backward()
    elif stage == "fully":
        with differ:
            wrapped(batch(4))
    optimizer.param_groups[0]["lr"] = rate
    assert_goes_on(wrapped, optimizer)
