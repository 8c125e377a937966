"""State over all ranks of a mesh, whose replicas hold the parameters: owned once, gathered inside."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from fully import Tower, assert_alike, assert_equal, loss_of, state_of, whole
from meshes import mesh_of
from pool import Ranks, on_ranks
from test_mesh import (
    OVER_ALL,
    assert_equal_everywhere,
    built,
    train,
)
from zero_optim import RankMismatchError, RemoteRankError, ZeroRedundancyOptimizer, checkpoint
from zero_optim.ddp import FullyShardedDataParallel, PrecisionPolicy, full_state_dict, unsharded


class Orthogonal(torch.optim.SGD):
    """A class that needs whole matrices: a step goes along their singular vectors."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None and param.ndim == 2:
                    u, _, v = torch.linalg.svd(param.grad.double(), full_matrices=False)
                    param.grad = (u @ v).to(param.dtype)
        super().step(closure)


KINDS: dict[str, dict[str, Any]] = {
    "kept": {"units": "blocks", "reshard_after_forward": False},
    "a class for whole matrices": {"units": "blocks", "optimizer_class": Orthogonal},
    "rounded": {
        "units": "blocks",
        "mixed_precision": PrecisionPolicy(params=torch.bfloat16, gradients=torch.float32),
    },
}


def over_all(model: nn.Module, given: dict[str, Any], replicas: int = 2, stage: str = OVER_ALL) -> Any:
    options = dict(given)
    of_optimizer = {"optimizer_class": options.pop("optimizer_class", torch.optim.AdamW)}
    if options.get("units") == "blocks":
        options["units"] = [*model.blocks]  # type: ignore[arg-type,misc]
    return built(model, stage, mesh_of(replicas), of_optimizer, **options)


@on_ranks(4)
@pytest.mark.parametrize("kind", KINDS)
def test_training_gives_the_bits_of_state_in_each_replica(kind: str) -> None:
    """Train, evaluate, write and load: after each of it replicas hold what the owners have."""
    (wrapped, optimizer), (other, one) = (
        over_all(Tower(), KINDS[kind], stage=stage) for stage in (OVER_ALL, "fully")
    )
    for step in range(4):
        for each in (wrapped, other):
            if step == 2:
                with torch.no_grad(), unsharded(each.module):
                    each.module.first.weight.mul_(2)
            if step == 3:
                each.module.load_state_dict({name: value / 2 for name, value in state_of(each).items()})
        assert train(wrapped, optimizer, step, 1) == train(other, one, step, 1)
        with torch.no_grad():
            assert torch.equal(loss_of(wrapped, step), loss_of(other, step))
    assert_equal(state_of(wrapped), state_of(other))
    assert_equal_everywhere(wrapped.module)
    assert wrapped.units.nbytes_live() == 0


def shards_state(replicas: int) -> tuple[int, int, int]:
    """Give the elements of state of this rank, the bytes that it holds for its replica, and those of all."""
    model = Tower()
    nbytes = sum(param.nbytes for param in model.parameters())
    wrapped, optimizer = over_all(model, {"units": []}, replicas)
    train(wrapped, optimizer, steps=1)
    state = sum(value.numel() for entries in optimizer.state.values() for value in entries.values())
    optimizer.metrics()
    wrapped.metrics()
    train(wrapped, optimizer, 1, 1)
    inner = dist.get_world_size() // replicas
    reduced = nbytes * (inner - 1) / inner + nbytes / inner * (replicas - 1) / replicas
    sent = wrapped.metrics()["sent_bytes/reduce"]
    assert 0.9 * reduced < sent < 1.1 * reduced, (sent, reduced, nbytes)
    gathered = optimizer.metrics()["sent_bytes/gather"]
    assert gathered < 2 * nbytes, gathered
    held = wrapped.units.gathers.nbytes_held
    return state, held, nbytes


@pytest.mark.parametrize("replicas", [2, pytest.param(4, marks=pytest.mark.exhaustive)])
def test_a_rank_has_a_part_of_the_state_and_its_replicas_share_of_the_rest(
    ranks4: Ranks, replicas: int
) -> None:
    told = ranks4.run(shards_state, replicas)
    nbytes = told[0][2]
    elements = sum(state for state, _, _ in told)
    assert elements < 1.1 * 2 * nbytes / 4  # exp_avg and exp_avg_sq, of all ranks together
    for state, held, _ in told:
        assert state < 1.5 * elements / 4
        assert held < 1.5 * nbytes * (replicas - 1) / 4


@on_ranks(4)
def test_what_it_saves_loads_with_state_over_all_ranks_or_in_each_replica(tmp_path: Path) -> None:
    wrapped, optimizer = over_all(Tower(), {"units": "blocks"})
    train(wrapped, optimizer)
    checkpoint.save(tmp_path / "one", model=wrapped, optimizer=optimizer)
    state = full_state_dict(wrapped, ranks=[3])
    assert (state is not None) == (dist.get_rank() == 3)
    saved = whole(wrapped.module)
    optimizer.consolidate_state_dict(to=None)
    whole_state = copy.deepcopy(optimizer.state_dict())
    train(wrapped, optimizer, 3)
    other, stepped = over_all(Tower(), {})
    stepped.load_state_dict(whole_state)
    with unsharded(other.module):
        for param, value in zip(other.module.parameters(), saved, strict=True):
            param.data.copy_(value)
    train(other, stepped, 3)
    assert_alike(other.module, wrapped.module)
    for stage in (OVER_ALL, "fully"):
        loaded, stepped = built(Tower(), stage, mesh_of(2))
        checkpoint.load(tmp_path / "one", model=loaded, optimizer=stepped)
        train(loaded, stepped, 3)
        assert all(map(torch.equal, whole(loaded.module), whole(wrapped.module)))


@on_ranks(4)
def test_what_one_rank_does_alone_is_told_in_all_replicas() -> None:
    """Another learning rate, a step left out, one that raises: each is told on all ranks of all replicas."""
    rank = dist.get_rank()
    wrapped, optimizer = over_all(Tower(), {"units": "blocks"})
    train(wrapped, optimizer)
    optimizer.param_groups[0]["lr"] *= 1 + (rank == 3)
    with pytest.raises(RankMismatchError, match=r"lr of group 0: ranks 0, 1, 2 have 0\.01; rank 3 has 0\.02"):
        train(wrapped, optimizer, 3, 2)
    optimizer.param_groups[0]["lr"] = 0.01
    optimizer.zero_grad()
    train(wrapped, optimizer, 5, 1)
    optimizer.zero_grad()
    loss_of(wrapped, 6).backward()
    if rank != 2:
        optimizer.step()
    with pytest.raises(RankMismatchError, match="rank 2"):
        loss_of(wrapped, 7)


class Broken(torch.optim.AdamW):
    """Raises in a step of rank 3."""

    breaks = False

    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        if self.breaks:
            raise ValueError("no memory for this")
        return super().step(closure)


@on_ranks(4)
def test_a_step_that_raises_in_one_replica_is_heard_in_all() -> None:
    wrapped, optimizer = over_all(Tower(), {"units": "blocks", "optimizer_class": Broken})
    train(wrapped, optimizer)
    optimizer.zero_grad()
    loss_of(wrapped, 3).backward()
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(Broken, "breaks", dist.get_rank() == 3)
        if dist.get_rank() == 3:
            with pytest.raises(ValueError, match="no memory"):
                optimizer.step()
        else:
            optimizer.step()
    kind: type[Exception] = RemoteRankError if dist.get_rank() == 3 else ValueError
    with pytest.raises(kind, match=r"^rank 3(: no memory for this| failed with ValueError)"):
        loss_of(wrapped, 4)


@on_ranks(2)
def test_replicas_of_one_rank_hold_everything() -> None:
    """Replicas of one rank hold everything, and state is sharded over them."""
    plain = Tower()
    wrapped, optimizer = over_all(copy.deepcopy(plain), {"units": "blocks"})
    other = copy.deepcopy(plain)
    one = ZeroRedundancyOptimizer(other.parameters(), torch.optim.AdamW, lr=1e-2)
    fully = FullyShardedDataParallel(other, one, units=[*other.blocks])
    assert train(wrapped, optimizer) == train(fully, one)
    assert_alike(wrapped.module, other)


@on_ranks(4)
def test_the_optimizer_over_all_ranks_may_come_later() -> None:
    """Wrap over all ranks of the mesh, then build the optimizer, which takes the group of the model."""
    first, of_first = over_all(Tower(), {"units": "blocks"})
    model: Any = Tower()
    second: Any = FullyShardedDataParallel(
        model, mesh=mesh_of(2), process_group=dist.group.WORLD, units=[*model.blocks]
    )
    of_second = ZeroRedundancyOptimizer(second.parameters(), torch.optim.AdamW, lr=1e-2)
    assert of_second.ranks.size == of_first.ranks.size == 4
    assert train(first, of_first) == train(second, of_second)
    for one, other in zip(whole(first), whole(second), strict=True):
        assert torch.equal(one, other)
