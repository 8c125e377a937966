"""State of a model that FSDP2 shards: DTensors that DCP saves, reshards and loads, with equal bits."""

import copy
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    get_state_dict,
    set_optimizer_state_dict,
    set_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from fsdp2 import CLASSES, Tower, assert_equal, built, pair, shard, train_beside, whole
from pool import Ranks, on_ranks
from zero_optim import StateMismatchError, ZeroRedundancyOptimizer, checkpoint

# torch.distributed.checkpoint imports what PyTorch deprecates.
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")


def free() -> nn.Module:
    return Tower(frozen=False)


def trained(name: str) -> tuple[nn.Module, nn.Module, ZeroRedundancyOptimizer, Any]:
    """Return a sharded model and its twin, with an optimizer each, after two steps."""
    optimizer_class, options = CLASSES[name]
    model, twin, optimizer, plain = pair(free, optimizer_class, **options)
    train_beside(model, twin, optimizer, plain, range(2))
    return model, twin, optimizer, plain


def assert_equal_state(got: dict[Any, Any], expected: dict[Any, Any], model: nn.Module) -> None:
    """Compare the state of a sharded optimizer with that of the plain one, bit for bit."""
    params = list(model.parameters())
    assert got.keys() == expected.keys()
    for index, entries in expected.items():
        assert got[index].keys() == entries.keys()
        for name, value in entries.items():
            mine = got[index][name]
            if isinstance(value, Tensor) and value.dim():
                assert isinstance(mine, DTensor)
                if value.shape == params[index].shape:
                    assert mine.placements == params[index].placements
                assert torch.equal(mine.full_tensor(), value), (index, name)
            elif isinstance(value, Tensor):
                assert torch.equal(mine, value)
            else:
                assert mine == value or type(value) is list


@on_ranks(2, 3)
@pytest.mark.parametrize("name", CLASSES)
def test_the_state_of_a_class_is_that_of_the_unsharded_one_as_dtensors(name: str) -> None:
    model, _, optimizer, plain = trained(name)
    assert_equal_state(optimizer.state_dict()["state"], plain.state_dict()["state"], model)


@on_ranks(2, 3)
@pytest.mark.parametrize("name", CLASSES)
def test_a_state_dict_loads_into_a_new_optimizer(name: str) -> None:
    optimizer_class, options = CLASSES[name]
    model, twin, optimizer, plain = trained(name)
    again = ZeroRedundancyOptimizer(model.parameters(), optimizer_class, **options)
    again.load_state_dict(optimizer.state_dict())
    train_beside(model, twin, again, plain, range(2, 4))


def step_alike(model: nn.Module, twin: nn.Module, optimizer: Any, plain: Any) -> None:
    """Step both with drawn gradients; weights then have equal bits."""
    for number, (param, other) in enumerate(zip(model.parameters(), twin.parameters(), strict=True)):
        gradient = torch.randn(other.shape, generator=torch.Generator().manual_seed(number))
        param.grad, other.grad = shard_like(gradient, param), gradient.clone()
    optimizer.step()
    plain.step()
    assert_equal(model, twin)


def shard_like(gradient: Tensor, param: Tensor) -> Tensor:
    """The rows of a gradient, where its parameter is sharded."""
    if not isinstance(param, DTensor):
        return gradient
    rows, rank = gradient.chunk(dist.get_world_size()), dist.get_rank()
    here = rows[rank] if rank < len(rows) else gradient[:0]
    how = {"run_check": False, "shape": param.shape, "stride": param.stride()}
    return DTensor.from_local(here.clone(), param.device_mesh, param.placements, **how)


# Ways of DCP.
WAYS = {"DCP": StateDictOptions(), "DCP, flat": StateDictOptions(flatten_optimizer_state_dict=True)}


def optimizer_state(model: nn.Module, optimizer: Any, way: str) -> dict[str, Any]:
    weights, state = get_state_dict(model, optimizer, options=WAYS[way])
    return {"model": weights, "optimizer": state}


def saves(folder: Path, name: str, way: str) -> None:
    model, twin, optimizer, plain = trained(name)
    if way in WAYS:
        dcp.save(optimizer_state(model, optimizer, way), checkpoint_id=folder / "saved")
    else:
        checkpoint.save(folder / "saved", model=model, optimizer=optimizer)
    if dist.get_rank() == 0:
        torch.save((twin.state_dict(), plain.state_dict()), folder / "plain.pt")


def loads_by_dcp(folder: Path, model: nn.Module, optimizer: Any, way: str) -> None:
    before = [whole(param.detach()).clone() for param in model.parameters()]
    state = optimizer_state(model, optimizer, way)
    for param, value in zip(model.parameters(), before, strict=True):
        assert torch.equal(whole(param.detach()), value)  # though DCP has stepped for the state
    dcp.load(state, checkpoint_id=folder)
    parts = {"model_state_dict": state["model"], "optim_state_dict": state["optimizer"]}
    set_state_dict(model, optimizer, **parts, options=WAYS[way])


def loads(folder: Path, name: str, way: str, is_sharded: bool = True) -> None:
    optimizer_class, options = CLASSES[name]
    model, twin, optimizer, plain = pair(free, optimizer_class, **options)
    if not is_sharded:
        model = built(free, 1)
        optimizer = ZeroRedundancyOptimizer(model.parameters(), optimizer_class, **options)
    if way in WAYS:
        loads_by_dcp(folder / "saved", model, optimizer, way)
    else:
        checkpoint.load(folder / "saved", model=model, optimizer=optimizer)
    weights, of_plain = torch.load(folder / "plain.pt", weights_only=False)
    twin.load_state_dict(weights)
    plain.load_state_dict(of_plain)
    assert_equal(model, twin)
    if way in WAYS:
        assert_equal_state(optimizer.state_dict()["state"], plain.state_dict()["state"], model)
    step_alike(model, twin, optimizer, plain)


@pytest.mark.parametrize("name", ["AdamW", "Adafactor", "Shampoo"])
@pytest.mark.parametrize("way", [*WAYS, "ours"])
def test_checkpoints_load_on_another_number_of_ranks_and_ours_without_fsdp2(
    ranks2: Ranks, ranks3: Ranks, tmp_path: Path, way: str, name: str
) -> None:
    ranks2.run(saves, tmp_path, name, way)
    ranks3.run(loads, tmp_path, name, way)
    if way == "ours":
        ranks2.run(loads, tmp_path, name, way, False)


@on_ranks(2)
@pytest.mark.parametrize("name", ["AdamW", "Adafactor"])
def test_copies_step_as_the_original_does(name: str) -> None:
    mesh, (optimizer_class, options) = init_device_mesh("cpu", (2,)), CLASSES[name]
    torch.manual_seed(0)
    params = [nn.Parameter(distribute_tensor(torch.randn(8, 4), mesh, [Shard(0)])) for _ in range(3)]
    optimizer = ZeroRedundancyOptimizer(params, optimizer_class, **options)
    copies: list[Any] = [(params, optimizer)]
    for number in range(3):
        for members, stepped in copies:
            for param in members:
                param.grad = torch.full_like(param, 0.5 + number)
            stepped.step()
        if not number:
            copies += copy.deepcopy(copies[0]), pickle.loads(pickle.dumps(copies[0]))
    expected, *others = [[param.to_local() for param in members] for members, _ in copies]
    for other in others:
        assert all(map(torch.equal, other, expected))


@on_ranks(2)
def test_the_state_of_plain_adamw_loads_and_the_other_way() -> None:
    model, twin, optimizer, plain = pair(free, torch.optim.AdamW, lr=0.01)
    other = torch.optim.AdamW(model.parameters(), lr=0.01)
    train_beside(model, twin, optimizer, plain, range(2))
    set_optimizer_state_dict(model, other, optim_state_dict=get_optimizer_state_dict(model, optimizer))
    train_beside(model, twin, other, plain, range(2, 3))
    set_optimizer_state_dict(model, optimizer, optim_state_dict=get_optimizer_state_dict(model, other))
    train_beside(model, twin, optimizer, plain, range(3, 5))


@on_ranks(2)
@pytest.mark.parametrize("name", ["AdamW", "Adafactor"])
@pytest.mark.parametrize("form", ["full_state_dict", "flatten_optimizer_state_dict"])
def test_a_full_or_flattened_state_dict_is_given_and_loads(form: str, name: str) -> None:
    optimizer_class, options = CLASSES[name]
    model, twin, optimizer, plain = trained(name)
    how = StateDictOptions(**{form: True})
    state = get_optimizer_state_dict(model, optimizer, options=how)
    again = ZeroRedundancyOptimizer(model.parameters(), optimizer_class, **options)
    if form == "flatten_optimizer_state_dict":  # as dcp.load asks for what it fills
        get_optimizer_state_dict(model, again, options=how)
        for param in model.parameters():  # owners' names are listed everywhere, their values are not read
            assert list(again.state[param])
            assert all(isinstance(value, Tensor) for value in again.state[param].values())
            repr(again.state[param])
    set_optimizer_state_dict(model, again, optim_state_dict=state, options=how)
    train_beside(model, twin, again, plain, range(2, 4))


@on_ranks(2)
@pytest.mark.parametrize("name", ["AdamW", "Adafactor"])
def test_the_state_of_the_unsharded_class_loads(name: str) -> None:
    optimizer_class, options = CLASSES[name]
    model, twin, _, plain = trained(name)
    for source in (None, 1):
        again = ZeroRedundancyOptimizer(model.parameters(), optimizer_class, **options)
        has_it = source in (None, dist.get_rank())
        again.load_state_dict(plain.state_dict() if has_it else None, source)
        train_beside(model, twin, again, plain, range(2, 4))


@on_ranks(2)
@pytest.mark.parametrize("name", ["AdamW", "Adafactor"])
def test_a_new_optimizer_whose_own_empty_state_was_loaded_is_still_filled(name: str) -> None:
    """As Accelerate does in `prepare()`."""
    optimizer_class, options = CLASSES[name]
    model, twin, optimizer, plain = trained(name)
    saved = get_optimizer_state_dict(model, optimizer)
    for source in (None, 1):
        again = ZeroRedundancyOptimizer(model.parameters(), optimizer_class, **options)
        empty = again.state_dict()
        again.load_state_dict(empty if source in (None, dist.get_rank()) else None, source)
        assert len(get_optimizer_state_dict(model, again)["state"]) == len(saved["state"])
    set_optimizer_state_dict(model, again, optim_state_dict=saved)
    train_beside(model, twin, again, plain, range(2, 4))


@on_ranks(2)
def test_a_state_that_cannot_be_loaded_or_consolidated_is_refused() -> None:
    _, _, optimizer, _ = pair(free, torch.optim.AdamW, lr=0.01)
    state = optimizer.state_dict()
    optimizer.step()
    with pytest.raises(RuntimeError, match="call state_dict\\(\\) on all ranks"):
        optimizer.consolidate_state_dict()
    with pytest.raises(RuntimeError, match="cannot be detached"):
        optimizer.detach()
    other = ZeroRedundancyOptimizer(built(free).parameters(), torch.optim.AdamW)
    model = shard(built(free))
    model(torch.ones(2, 9)).sum().backward()
    trained = ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW)
    trained.step()
    state = trained.state_dict()
    with pytest.raises(StateMismatchError, match="the state dict has DTensors"):
        other.load_state_dict(state)


class Numbered(torch.optim.SGD):
    """Keeps state without names, as heavyball does."""

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for param in group["params"]:
                self.state[param][0] = {"step": torch.ones(())}
        return super().step(closure)


@on_ranks(2)
def test_state_without_names_is_refused_where_dcp_would_lose_it() -> None:
    model, _, optimizer, _ = pair(free, Numbered, lr=0.1)
    model(torch.ones(2, 9)).sum().backward()
    optimizer.step()
    with pytest.raises(TypeError, match=r"has an entry 0, .* save and load it with zero_optim\.checkpoint"):
        get_optimizer_state_dict(model, optimizer)
