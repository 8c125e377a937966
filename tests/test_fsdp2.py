"""Any optimizer class on a model that FSDP2 shards: the bits of the unsharded class on FSDP2's gradients."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from fsdp2 import (
    CLASSES,
    MUON,
    Tower,
    backward,
    built,
    pair,
    recipes,
    shard,
    take_gradients,
    train_beside,
    whole,
)
from pool import on_ranks
from training import needs_muon
from zero_optim import RankMismatchError, ZeroRedundancyOptimizer

NO_BIAS = partial(Tower, bias=False)


@on_ranks(2, 3, 4)
@pytest.mark.parametrize("name", CLASSES)
def test_a_class_has_the_bits_of_the_unsharded_one(name: str) -> None:
    optimizer_class, options = CLASSES[name]
    train_beside(*pair(Tower, optimizer_class, **options))


@needs_muon
@on_ranks(1, 2, 3, 4)
def test_muon_has_the_bits_of_the_unsharded_one() -> None:
    train_beside(*pair(NO_BIAS, MUON, lr=0.02))


@on_ranks(2)
def test_a_class_that_steps_rows_alone_sends_nothing() -> None:
    model, twin, optimizer, plain = pair(Tower, torch.optim.AdamW, lr=0.01)
    optimizer.metrics()
    train_beside(model, twin, optimizer, plain)
    assert recipes(optimizer) == {"rows"}
    assert optimizer.metrics()["collectives/total"] == 0
    param = model.layers[0].weight
    assert optimizer.state[param]["exp_avg"].shape == param.to_local().shape


class Many(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(64, 96, bias=False) for _ in range(60)])

    def forward(self, x: Tensor) -> Tensor:
        return torch.stack([layer(x) for layer in self.layers]).sum(0)


def once(model: nn.Module, _: int) -> None:
    model(torch.ones(2, 64)).square().mean().backward()


@on_ranks(2, 3)
def test_a_step_of_many_parameters_takes_four_collectives() -> None:
    model, twin, optimizer, plain = pair(Many, torch.optim.Adafactor, lr=0.01)
    assert recipes(optimizer) == {"whole"}
    assert len(optimizer.core.engine.buckets) == 2
    optimizer.metrics()
    train_beside(model, twin, optimizer, plain, range(1), once)
    assert optimizer.metrics()["collectives/total"] == 4


class Breaks(torch.optim.Adafactor):
    """Fails on rank 1 in the step of which it is told, of those to come."""

    calls_left = -1

    def step(self, closure: Any = None) -> Any:
        Breaks.calls_left -= 1
        if dist.get_rank() == 1 and Breaks.calls_left == 0:
            raise ValueError("it is broken")
        return super().step(closure)


@on_ranks(2, 3)
@pytest.mark.parametrize("bucket", [1, 2])
def test_an_error_in_the_step_of_any_bucket_of_one_rank_raises_on_all(bucket: int) -> None:
    Breaks.calls_left = -1
    model = shard(built(Many))
    optimizer = ZeroRedundancyOptimizer(model.parameters(), Breaks, bucket_cap_mb=0.1, lr=0.01)
    assert len(optimizer.core.engine.buckets) > 3
    once(model, 0)
    Breaks.calls_left = bucket
    with pytest.raises(ValueError, match="it is broken"):
        optimizer.step()
    values = [whole(param.detach()).clone() for param in model.parameters()]
    assert all(value.isfinite().all() for value in values)
    optimizer.step()


@on_ranks(2, 3)
def test_many_small_buckets_give_the_same_bits() -> None:
    model, twin = shard(built(Many)), built(Many)
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.Adafactor, bucket_cap_mb=0.1, lr=0.01)
    train_beside(model, twin, optimizer, torch.optim.Adafactor(twin.parameters(), lr=0.01), range(2), once)


@on_ranks(2)
def test_owners_are_balanced_by_cost() -> None:
    model = shard(built(Many))
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.Adafactor, cost="matmul")
    assert optimizer.explain().balance == 1.0


@on_ranks(2)
def test_several_classes_share_an_optimizer() -> None:
    def groups(model: nn.Module, **of_matrices: Any) -> list[dict[str, Any]]:
        params = list(model.parameters())
        matrices = [p for p in params if p.ndim == 2]
        return [{"params": matrices, **of_matrices}, {"params": [p for p in params if p.ndim != 2]}]

    model, twin = shard(built(Tower)), built(Tower)
    own = groups(model, optimizer_class=torch.optim.Adafactor, lr=0.05)
    optimizer = ZeroRedundancyOptimizer(own, torch.optim.AdamW, lr=0.01)
    matrices, others = groups(twin)
    plain = torch.optim.Adafactor([matrices], lr=0.05), torch.optim.AdamW([others], lr=0.01)
    for step in range(3):
        backward(model, step)
        take_gradients(twin, model)
        optimizer.step()
        for each in plain:
            each.step()
        for param, other in zip(model.parameters(), twin.parameters(), strict=True):
            assert torch.equal(whole(param), other)
    assert recipes(optimizer) == {"rows", "whole"}


def load_halves(model: nn.Module) -> None:
    model.load_state_dict({name: tensor * 0.5 for name, tensor in model.state_dict().items()})


HALVE: dict[str, Callable[[Any], object]] = {
    "in place": lambda model: [param.mul_(0.5) for param in model.parameters()],
    "foreach": lambda model: torch._foreach_mul_([param.to_local() for param in model.parameters()], 0.5),
    "data": lambda model: [param.data.mul_(0.5) for param in model.parameters()],
    "load": load_halves,
}


@on_ranks(2)
@pytest.mark.parametrize("write", HALVE)
def test_what_the_user_writes_to_shards_is_trained_on(write: str) -> None:
    model, twin, optimizer, plain = pair(Tower, torch.optim.Adafactor, lr=0.05)
    train_beside(model, twin, optimizer, plain, range(2))
    with torch.no_grad():
        HALVE[write](model)
        for other in twin.parameters():
            other.mul_(0.5)
    train_beside(model, twin, optimizer, plain, range(2, 4))


@on_ranks(2, 3)
def test_a_rank_that_cannot_begin_lets_no_rank_step() -> None:
    model, _, optimizer, _ = pair(Tower, torch.optim.Adafactor, lr=0.05)
    backward(model, 0)
    before = [whole(param.detach()).clone() for param in model.parameters()]
    param: Any = model.layers[0].weight
    grad = param.grad
    if dist.get_rank() == 1:
        param.grad = DTensor.from_local(torch.ones(7, 9), grad.device_mesh, [Replicate()], run_check=False)
    with pytest.raises(TypeError, match="expected a DTensor placed as the parameter"):
        optimizer.step()
    param.grad = grad
    for param, value in zip(model.parameters(), before, strict=True):
        assert torch.equal(whole(param.detach()), value)
    optimizer.step()


@on_ranks(2)
def test_a_gradient_that_one_rank_lacks_is_refused_before_the_step() -> None:
    model, _, optimizer, _ = pair(Tower, torch.optim.Adafactor, lr=0.05)
    backward(model, 0)
    if dist.get_rank() == 1:
        model.layers[0].weight.grad = None
    with pytest.raises(RankMismatchError, match="rank 1 has no gradient of parameter 0 of group 0"):
        optimizer.step()


@on_ranks(2)
def test_options_that_differ_raise_on_every_rank() -> None:
    model, _, optimizer, _ = pair(Tower, torch.optim.Adafactor, lr=0.05)
    optimizer.param_groups[0]["lr"] = 0.1 + dist.get_rank()
    backward(model, 0)
    with pytest.raises(RankMismatchError, match="lr"):
        optimizer.step()


@on_ranks(2)
def test_a_placement_without_a_rule_or_a_model_without_values_is_refused_by_name() -> None:
    mesh = init_device_mesh("cpu", (2,))
    param = nn.Parameter(distribute_tensor(torch.ones(4, 4), mesh, [Replicate()]))
    with pytest.raises(ValueError, match=r"parameter 0 of group 0 has placements \(Replicate"):
        ZeroRedundancyOptimizer([param], torch.optim.AdamW)
    model = shard(built(Tower))
    with pytest.raises(ValueError, match="gather_lazily needs parameters"):
        ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, gather_lazily=model)
    with torch.device("meta"):
        model = shard(Tower())
    with pytest.raises(TypeError, match=r"model\.to_empty"):
        ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW)
    model.to_empty(device="cpu").load_state_dict(shard(built(Tower)).state_dict())
    optimizer, twin = ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW), built(Tower)
    train_beside(model, twin, optimizer, torch.optim.AdamW(twin.parameters()))


@on_ranks(4)
def test_two_sharded_dimensions_are_refused_by_name() -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    layer = nn.Linear(4, 4, bias=False)
    layer.weight = nn.Parameter(distribute_tensor(torch.ones(4, 4), mesh["tp"], [Shard(0)]))
    fully_shard(layer, mesh=mesh["dp"])
    with pytest.raises(ValueError, match="_StridedShard"):
        ZeroRedundancyOptimizer(layer.parameters(), torch.optim.AdamW)


@on_ranks(2)
def test_columns_go_to_owners() -> None:
    mesh = init_device_mesh("cpu", (2,))
    values = torch.randn(3, 5, generator=torch.Generator().manual_seed(0))
    param = nn.Parameter(distribute_tensor(values.clone(), mesh, [Shard(1)]))
    twin = nn.Parameter(values.clone())
    optimizer = ZeroRedundancyOptimizer([param], torch.optim.AdamW)
    plain = torch.optim.AdamW([twin])
    for step in range(3):
        twin.grad = torch.randn(3, 5, generator=torch.Generator().manual_seed(step))
        param.grad = distribute_tensor(twin.grad, mesh, [Shard(1)])
        optimizer.step()
        plain.step()
        assert torch.equal(param.full_tensor(), twin)
