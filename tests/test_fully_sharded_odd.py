"""Odd models, and odd uses of models, that are fully sharded."""

import dataclasses
from collections.abc import Callable
from types import MappingProxyType
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from pool import Ranks, on_ranks
from test_fully_sharded import Block, Tower, adamw, batch
from test_fully_sharded_models import assert_alike, both, loss_of, train, trains_alike
from zero_optim.ddp import (
    DistributedDataParallel,
    FullyShardedDataParallel,
    fully_shard,
    fully_sharded,
    unsharded,
)


class Named(Tower):
    """Its blocks are in a container of modules."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        blocks = [*self.blocks]
        if kind == "dict":
            self.blocks: Any = nn.ModuleDict({f"block{n}": block for n, block in enumerate(blocks)})
        elif kind == "sequential":
            self.blocks = nn.Sequential(*blocks)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks.values() if isinstance(self.blocks, nn.ModuleDict) else self.blocks:
            x = block(x)
        return self.last(x)


@on_ranks(2)
def test_a_container_of_modules_stands_for_its_members() -> None:
    for kind in ("list", "dict", "sequential"):
        model = Named(kind)
        wrapped = FullyShardedDataParallel(model, adamw(model), units=model.blocks)
        assert [unit.name for unit in wrapped.units.units[1:]] == [
            f"blocks.{name}" for name, _ in model.blocks.named_children()
        ]
    model = Tower()
    with pytest.raises(TypeError, match="got one, Block: put it in a list"):
        FullyShardedDataParallel(model, adamw(model), units=model.blocks[0])


class Attending(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.first = nn.Linear(8, 16)
        self.layers = nn.TransformerEncoder(
            nn.TransformerEncoderLayer(16, 2, 32, 0.0, batch_first=True), 2, enable_nested_tensor=False
        )
        self.last = nn.Linear(16, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.layers(self.first(x)[None]))


@on_ranks(2)
def test_attention_reads_its_projection_without_a_call() -> None:
    (whole, one), (fully, other) = both(Attending(), units=lambda _: "auto")  # type: ignore[arg-type,return-value]
    assert len(fully.units.units) > 3
    assert train(fully, other, loss_of) == train(whole, one, loss_of)
    for wrapped in (fully, whole):
        wrapped.eval()
    with torch.no_grad():
        assert torch.equal(fully(batch(1)), whole(batch(1)))
    model = Attending()
    inner = model.layers.layers[0].self_attn.out_proj
    with pytest.raises(ValueError, match=r"out_proj is never called itself: the MultiheadAttention"):
        FullyShardedDataParallel(model, adamw(model), units=[inner])


@dataclasses.dataclass(frozen=True)
class Parts:
    out: Tensor
    weight: Tensor


class Returning(Block):
    """Returns views of its parameters too, in some form."""

    def __init__(self, form: Any) -> None:
        super().__init__(24)
        self.form = form

    def forward(self, x: Tensor) -> Any:
        return self.form(super().forward(x), self.up.weight[:3])


class UsingViews(nn.Module):
    def __init__(self, form: Any) -> None:
        super().__init__()
        torch.manual_seed(4)
        self.first = nn.Linear(8, 24)
        self.blocks = nn.ModuleList([Returning(form)])

    def __deepcopy__(self, memo: object) -> "UsingViews":
        return UsingViews(self.blocks[0].form)

    def forward(self, x: Tensor) -> Tensor:
        parts = self.blocks[0](self.first(x))
        out, weight = (parts.out, parts.weight) if isinstance(parts, Parts) else parts.values()
        return out @ weight.t()


def in_dict(out: Tensor, weight: Tensor) -> dict[str, Tensor]:
    return {"out": out, "weight": weight}


def in_proxy(out: Tensor, weight: Tensor) -> Any:
    return MappingProxyType({"out": out, "weight": weight})


@on_ranks(2)
def test_a_view_of_a_parameter_is_copied_out_of_any_container_or_refused() -> None:
    for form in (Parts, in_dict):
        trains_alike(UsingViews(form))
    (fully, _) = both(UsingViews(in_proxy))[1]
    with pytest.raises(RuntimeError, match=r"blocks.0 returned a view of a parameter in a mappingproxy"):
        loss_of(fully, 0)
    assert fully.units.nbytes_live() == 0


class InPlace(nn.Module):
    """Its units return nothing, and change their input."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.first = nn.Linear(8, 24)
        self.blocks = nn.ModuleList([Adding(), Adding()])

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            block(x)
        return x


class Adding(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(24, 48), nn.Linear(48, 24)

    def forward(self, x: Tensor) -> None:
        x += self.down(torch.relu(self.up(x.clone())))


@on_ranks(2)
def test_units_may_change_their_input_and_return_nothing() -> None:
    trains_alike(InPlace())


@on_ranks(2)
def test_a_loss_computed_in_unsharded_is_backpropagated_outside() -> None:
    (whole, one), (fully, other) = both(Tower())
    for wrapped, optimizer in ((whole, one), (fully, other)):
        for step in range(2):
            optimizer.zero_grad()
            if wrapped is fully:
                with unsharded(fully):
                    loss = loss_of(wrapped, step) + 0.1 * wrapped.module.blocks[1].up.weight.square().sum()
            else:
                loss = loss_of(wrapped, step) + 0.1 * wrapped.module.blocks[1].up.weight.square().sum()
            loss.backward()
            optimizer.step()
    assert_alike(fully.module, whole.module)


@on_ranks(2)
def test_inference_mode_leaves_nothing_behind() -> None:
    (whole, one), (fully, other) = both(Tower())
    with torch.inference_mode():
        for step in range(2):
            assert torch.equal(fully(batch(step)), whole(batch(step)))
    assert train(fully, other, loss_of) == train(whole, one, loss_of)
    with torch.inference_mode():
        assert torch.equal(fully(batch(5)), whole(batch(5)))
    assert fully.units.nbytes_live() == 0
    assert train(fully, other, loss_of) == train(whole, one, loss_of)


class Interrupted(Tower):
    stops = False

    def forward(self, x: Tensor) -> Tensor:
        x = self.blocks[0](self.first(x))
        if self.stops:
            raise KeyboardInterrupt
        return self.last(self.blocks[1](x))


def is_interrupted() -> None:
    (whole, one), (fully, other) = both(Interrupted(), find_unused_parameters=True)
    for wrapped, optimizer in ((whole, one), (fully, other)):
        train(wrapped, optimizer, loss_of, 1)
        wrapped.module.stops = True
        with pytest.raises(KeyboardInterrupt):
            wrapped(batch(3))
        wrapped.module.stops = False
        train(wrapped, optimizer, loss_of, 2)
    assert_alike(fully.module, whole.module)
    assert fully.units.nbytes_live() == 0
    with torch.no_grad():
        fully(batch(1))
    assert fully.units.nbytes_live() == 0


def is_interrupted_in_place() -> None:
    whole, model = Interrupted(), Interrupted()
    model.load_state_dict(whole.state_dict())
    wrapped = DistributedDataParallel(whole, find_unused_parameters=True)
    fully_shard(model, units=model.blocks, find_unused_parameters=True)
    for called, module, optimizer in ((wrapped, whole, adamw(wrapped)), (model, model, adamw(model))):
        train(called, optimizer, loss_of, 1)
        module.stops = True
        with pytest.raises(KeyboardInterrupt):
            called(batch(3))
        module.stops = False
        train(called, optimizer, loss_of, 2)
    assert_alike(model, whole)
    assert fully_sharded(model).units.nbytes_live() == 0


@pytest.mark.parametrize("check", [is_interrupted, is_interrupted_in_place])
def test_it_goes_on_after_an_interrupt(ranks2: Ranks, check: Callable[[], None]) -> None:
    ranks2.run(check)


class Tied(Tower):
    """The outermost module reads a unit's parameter by itself."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.blocks[0](self.first(x))
        return x @ self.blocks[0].up.weight.t()


@on_ranks(2)
def test_a_training_pass_that_reads_a_freed_parameter_raises() -> None:
    model = Tied()
    wrapped = FullyShardedDataParallel(model, adamw(model), units=model.blocks)
    with pytest.raises(RuntimeError, match=r"blocks.0 of shape \(24, 96\) is used by another module while"):
        loss_of(wrapped, 0)


class Generating(Tower):
    def generate(self, x: Tensor, count: int) -> Tensor:
        for _ in range(count):
            out = self(x)
            x = torch.cat([x[:, 3:], out], 1)
        for block in self.blocks:
            block(self.first(x))
        return x


@on_ranks(2)
def test_methods_call_the_model_in_a_loop() -> None:
    (whole, one), (fully, other) = both(Generating())
    for _ in range(2):
        for how in (torch.no_grad, torch.enable_grad):
            with how():
                got = fully.module.generate(batch(0), 3)
                assert torch.equal(got, whole.module.generate(batch(0), 3))
            if how is torch.no_grad:
                assert fully.units.nbytes_live() == 0
        assert train(fully, other, loss_of) == train(whole, one, loss_of)
