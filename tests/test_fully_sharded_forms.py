"""A wrapper before its optimizer takes every form of units: dtypes and meshes, also together."""

from collections.abc import Collection
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from fully import NARROW, Tower, adamw, assert_alike, assert_equal, batch, on_meta, state_of, train
from meshes import mesh_of
from pool import on_ranks
from zero_optim import RankMismatchError, ZeroRedundancyOptimizer, checkpoint
from zero_optim.ddp import DistributedDataParallel, FullyShardedDataParallel, fully_shard, unsharded


def forms(names: Collection[str]) -> dict[str, Any]:
    """Options of the wrapper, by name."""
    given: dict[str, Any] = {}
    if "dtypes" in names:
        given["mixed_precision"] = NARROW
    if "mesh" in names:
        given["mesh"] = mesh_of(2)
    return given


def adam(params: Any, name: str = "AdamW", **options: Any) -> ZeroRedundancyOptimizer:
    given = {"lr": 1e-2, "ema_decay": 0.9} | options
    return ZeroRedundancyOptimizer(params, getattr(torch.optim, name), **given)


def before(names: Collection[str], name: str = "AdamW") -> tuple[Any, ZeroRedundancyOptimizer]:
    """Build the optimizer, then the wrapper."""
    model, given = Tower(width=48), forms(names)
    ranks = {"process_group": given["mesh"].get_group(1)} if "mesh" in given else {}
    optimizer = adam(model.parameters(), name, **ranks)
    return FullyShardedDataParallel(model, optimizer, units=[*model.blocks], **given), optimizer


def after(names: Collection[str], name: str = "AdamW") -> tuple[Any, ZeroRedundancyOptimizer]:
    """Build the wrapper, then the optimizer."""
    model = on_meta(Tower, 48) if "meta" in names else Tower(width=48)
    given = forms(names) | {"units": [*model.blocks]}
    wrapped: Any = (FullyShardedDataParallel if "wrapper" in names else fully_shard)(model, **given)
    saved = state_of(wrapped)
    optimizer = adam(wrapped.parameters(), name)
    assert_equal(state_of(wrapped), saved)  # the values that owners keep have moved, unrounded
    return wrapped, optimizer


def assert_same_states(first: Any, later: Any) -> None:
    """The state dicts of two models, with their optimizers, have the same names, dtypes and bits."""
    (model, one), (other, two) = first, later
    state = state_of(model)
    assert {value.dtype for value in state.values()} == {torch.float32}
    assert_equal(state_of(other), state)
    for param, twin in zip(one.param_groups[0]["params"], two.param_groups[0]["params"], strict=True):
        assert one.pieces()[param] == two.pieces()[twin]
        assert_equal(two.state.get(twin, {}), one.state.get(param, {}))


def trains_as_optimizer_first(names: Collection[str], name: str) -> None:
    first, later = before(names, name), after(names, name)
    assert_same_states(first, later)
    assert train(*first, steps=4, most=0.5) == train(*later, steps=4, most=0.5)
    assert_same_states(first, later)


SOME = [
    ("AdamW", ["wrapper", "dtypes"]),
    ("Adafactor", ["dtypes", "meta"]),  # takes no cuts: owners change
]


@on_ranks(2)
@pytest.mark.parametrize(("name", "names"), SOME)
def test_a_wrapper_before_its_optimizer_trains_to_the_bits_of_one_behind_it(
    name: str, names: list[str]
) -> None:
    trains_as_optimizer_first(names, name)


ON_MESHES = [
    ("AdamW", ["wrapper", "mesh"]),
    ("AdamW", ["mesh", "dtypes", "meta"]),
    pytest.param("Adafactor", ["wrapper", "mesh", "dtypes"], marks=pytest.mark.exhaustive),
    pytest.param("Adafactor", ["mesh", "meta"], marks=pytest.mark.exhaustive),
]


@on_ranks(4)
@pytest.mark.parametrize(("name", "names"), ON_MESHES)
def test_over_a_mesh_too(name: str, names: list[str]) -> None:
    trains_as_optimizer_first(names, name)


# ---------------------------------------------------------------------- what the optimizer is built from


class Tied(nn.Module):
    """Modules of two units that share a weight, and a module whose parameters do not train."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Linear(8, 8) for _ in range(3)])
        self.blocks[2].weight = self.blocks[0].weight
        self.blocks[1].requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


@on_ranks(2)
def test_a_meta_model_gets_its_first_values_in_the_dtype_that_owners_keep() -> None:
    torch.manual_seed(3)
    want = Tied().state_dict()
    model = on_meta(Tied)
    torch.manual_seed(3)
    wrapped = FullyShardedDataParallel(model, units=[*model.blocks], mixed_precision=NARROW)
    assert_equal(state_of(wrapped), want)


@on_ranks(2)
def test_frozen_parameters_that_the_optimizer_lacks_become_whole_in_the_dtype_of_the_policy() -> None:
    models: list[tuple[Any, ZeroRedundancyOptimizer]] = []
    for is_first in (True, False):
        torch.manual_seed(3)
        model = Tied()
        params = [param for param in model.parameters() if param.requires_grad]
        optimizer = adam(params) if is_first else None
        wrapped = FullyShardedDataParallel(
            model, optimizer, units=[*model.blocks], mixed_precision=NARROW, guards_reads=False
        )
        models.append((wrapped, optimizer or adam(params)))
    for (wrapped, _), twin in zip(models, reversed(models), strict=True):
        assert wrapped.module.blocks[1].weight.dtype == torch.bfloat16
        assert_alike(wrapped.module.blocks[1], twin[0].module.blocks[1])
    assert train(*models[0]) == train(*models[1])
    assert_equal(state_of(models[0][0]), state_of(models[1][0]))


@on_ranks(2)
def test_what_is_loaded_before_the_optimizer_is_built_is_not_rounded() -> None:
    wrapped = FullyShardedDataParallel(Tower(width=48), **forms(["dtypes"]))
    state = {key: value + 0.001 for key, value in state_of(wrapped).items()}
    wrapped.module.load_state_dict(state)
    with unsharded(wrapped), torch.no_grad():
        wrapped.module.last.bias.fill_(0.5)
    state["last.bias"].fill_(0.5)
    with torch.no_grad():
        assert wrapped(batch(0)).isfinite().all()
    wrapped(batch(0)).sum().backward()  # for the owners until then
    wrapped.zero_grad()
    optimizer = adam(wrapped.parameters())
    assert_equal(state_of(wrapped), state)
    train(wrapped, optimizer)


@on_ranks(4)
def test_checkpoints_of_a_mesh_take_an_optimizer_that_came_later(tmp_path: Path) -> None:
    saved, names = tmp_path / "saved", ["mesh", "dtypes", "wrapper", "meta"]
    wrapped, optimizer = after(names)
    train(wrapped, optimizer)
    checkpoint.save(saved, model=wrapped, optimizer=optimizer)
    first, again = before(["dtypes"]), after(names)
    for model, steps in (first, again):
        checkpoint.load(saved, model=model, optimizer=steps)
    assert_equal(state_of(first[0]), state_of(wrapped))
    assert train(*again) == train(wrapped, optimizer)


# ---------------------------------------------------------------------- what is refused


@on_ranks(2)
def test_a_later_optimizer_that_does_not_fit_the_forms_is_refused_and_changes_nothing() -> None:
    """What cannot be is refused on every rank, and another optimizer takes over."""
    model = Tower(width=48)
    want = state_of(model)
    given: Any = {"mixed_precision": NARROW, "units": [*model.blocks]}
    with pytest.raises(ValueError, match=r'expected offload to be "cpu", .* or None, got .*scratch'):
        FullyShardedDataParallel(model, **given, offload="/scratch")  # type: ignore[arg-type]
    assert not any(param.isnan().any() for param in model.parameters())
    wrapped = FullyShardedDataParallel(model, **given)
    with pytest.raises(ValueError, match="another process group"):
        ZeroRedundancyOptimizer(wrapped.parameters(), torch.optim.SGD, process_group=dist.new_group())
    assert_equal(state_of(wrapped), want)
    train(wrapped, ZeroRedundancyOptimizer(wrapped.parameters(), torch.optim.SGD, lr=1e-2))


class Failing(torch.optim.AdamW):
    """Cannot be built on the last rank."""

    def __init__(self, params: Any, lr: float = 1e-2) -> None:
        super().__init__(params, lr=lr)
        if dist.get_rank() == 3:
            raise ArithmeticError("on purpose")


@on_ranks(4)
def test_replicas_refuse_a_mesh_or_a_later_optimizer_together() -> None:
    model = Tower()
    with pytest.raises(TypeError, match="expected mesh to be a torch DeviceMesh, got str"):
        FullyShardedDataParallel(model, mesh="2x2")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="expected a mesh of 2 dimensions"):
        FullyShardedDataParallel(model, mesh=init_device_mesh("cpu", (4,)))
    some = [mesh_of(2), mesh_of(4)]
    with pytest.raises(RankMismatchError, match=r"rank 3 has mesh=None"):
        FullyShardedDataParallel(model, mesh=None if dist.get_rank() == 3 else some[0])
    with pytest.raises(RankMismatchError, match=r"has mesh=\[\[0\], \[1\]"):
        FullyShardedDataParallel(model, mesh=some[dist.get_rank() // 3])
    with pytest.raises(ValueError, match="expected an optimizer over one row of the mesh"):
        FullyShardedDataParallel(model, mesh=some[0], process_group=some[0].get_group(0))
    wrapped = FullyShardedDataParallel(model, mesh=some[0])
    with pytest.raises(RankMismatchError, match="optimizers of the replicas"):  # in one replica alike
        adam(wrapped.parameters(), lr=0.1 * (1 + dist.get_rank() // 2))
    with pytest.raises(Exception, match="on purpose"):
        ZeroRedundancyOptimizer(wrapped.parameters(), Failing, lr=1e-2)
    train(wrapped, adamw(wrapped))


@on_ranks(2)
def test_parameters_that_another_wrapper_has_taken_are_refused() -> None:
    half = on_meta(Tower)
    with pytest.raises(ValueError, match=r"last\.weight has no values after init"):
        FullyShardedDataParallel(
            half, init=lambda module: None if module is half.last else module.reset_parameters()
        )
    with pytest.raises(ValueError, match="whose wrapping broke off"):  # it would train NaN
        FullyShardedDataParallel(half)
    model = Tower()
    wrapped = FullyShardedDataParallel(model)
    other = nn.Sequential(nn.Linear(2, 2), nn.Linear(8, 48))
    other[1].weight = model.first.weight
    with pytest.raises(ValueError, match="some parameters are those of another fully sharded model"):
        FullyShardedDataParallel(other)
    train(wrapped, adamw(wrapped))


@on_ranks(2)
def test_a_wrapper_that_raises_leaves_the_model_as_it_was() -> None:
    model, want = Tower(), Tower()
    with pytest.raises(TypeError, match="expected options among"):
        FullyShardedDataParallel(model, bogus=1)
    whole, other = DistributedDataParallel(want), DistributedDataParallel(model)  # an ordinary one again
    assert train(other, adamw(other)) == train(whole, adamw(whole))
    from_meta = on_meta(Tower)
    with pytest.raises(TypeError, match="expected options among"):
        FullyShardedDataParallel(from_meta, bogus=1)
    assert all(param.is_meta for param in from_meta.parameters())
    torch.manual_seed(1)
    assert_equal(state_of(FullyShardedDataParallel(from_meta)), state_of(Tower()))
