"""Odd models, and odd uses of models, that are fully sharded."""

import dataclasses
import gc
import weakref
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial
from types import MappingProxyType
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fully import Block, Tower, adamw, assert_alike, batch, both, fully, loss_of, train, trains_alike
from pool import Ranks, on_ranks
from waiting import wait_until
from zero_optim.ddp import DistributedDataParallel, fully_shard, fully_sharded, unsharded

CONTAINERS: list[Callable[[Any], nn.Module]] = [
    nn.ModuleList,
    lambda blocks: nn.Sequential(*blocks),
    lambda blocks: nn.ModuleDict({f"block{number}": block for number, block in enumerate(blocks)}),
]


@on_ranks(1)
def test_a_container_of_modules_stands_for_its_members() -> None:
    for container in CONTAINERS:
        model = Tower()
        model.blocks = container(model.blocks)
        wrapped, _ = fully(model, units=model.blocks)
        assert [unit.name for unit in wrapped.units.units[1:]] == [
            f"blocks.{name}" for name, _ in model.blocks.named_children()
        ]
    model = Tower()
    with pytest.raises(TypeError, match="got one, Block: put it in a list"):
        fully(model, units=model.blocks[0])


@on_ranks(1)
def test_a_module_that_is_never_called_itself_is_no_unit() -> None:
    model = nn.Sequential(nn.MultiheadAttention(16, 2))
    with pytest.raises(ValueError, match=r"out_proj is never called itself: the MultiheadAttention"):
        fully(model, units=[model[0].out_proj])


@dataclasses.dataclass(frozen=True)
class Parts:
    out: Tensor
    weight: Tensor


class Returning(Block):
    """Returns views of its parameters too, in some form."""

    def __init__(self, form: Any) -> None:
        super().__init__()
        self.form = form

    def forward(self, x: Tensor) -> Any:
        return self.form(super().forward(x), self.up.weight[:3])


class UsingViews(Tower):
    def __init__(self, form: Any) -> None:
        super().__init__()
        self.blocks, self.last = nn.ModuleList([Returning(form)]), nn.Identity()

    def __deepcopy__(self, memo: object) -> "UsingViews":
        return UsingViews(self.blocks[0].form)

    def forward(self, x: Tensor) -> Tensor:
        parts = self.blocks[0](self.first(x))
        out, weight = (parts.out, parts.weight) if isinstance(parts, Parts) else parts.values()
        return out @ weight.t()


def in_dict(out: Tensor, weight: Tensor) -> dict[str, Tensor]:
    return {"out": out, "weight": weight}


@on_ranks(2)
def test_a_view_of_a_parameter_is_copied_out_of_any_container_or_refused() -> None:
    for form in (Parts, in_dict):
        trains_alike(UsingViews(form))
    wrapped, _ = fully(UsingViews(lambda *parts: MappingProxyType(in_dict(*parts))))
    with pytest.raises(RuntimeError, match=r"blocks.0 returned a view of a parameter in a mappingproxy"):
        loss_of(wrapped, 0)
    assert wrapped.units.nbytes_live() == 0


class Adding(Block):
    def forward(self, x: Tensor) -> None:
        x += super().forward(x.clone())


class InPlace(Tower):
    """Its units return nothing, and change their input."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Adding(), Adding()])

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            block(x)
        return self.last(x)


@on_ranks(2)
def test_units_may_change_their_input_and_return_nothing() -> None:
    trains_alike(InPlace())


def loss_in_unsharded(wrapped: Any, step: int) -> Tensor:
    with nullcontext() if isinstance(wrapped, DistributedDataParallel) else unsharded(wrapped):
        return loss_of(wrapped, step) + 0.1 * wrapped.module.blocks[1].up.weight.square().sum()


@on_ranks(2)
def test_a_loss_computed_in_unsharded_is_backpropagated_outside() -> None:
    trains_alike(Tower(), loss_in_unsharded)


@on_ranks(2)
def test_inference_mode_leaves_nothing_behind() -> None:
    (whole, one), (sharded, other) = both(Tower())
    for _ in range(2):
        with torch.inference_mode():
            assert torch.equal(sharded(batch(5)), whole(batch(5)))
        assert sharded.units.nbytes_live() == 0
        assert train(sharded, other) == train(whole, one)


class Interrupted(Tower):
    stops = False

    def forward(self, x: Tensor) -> Tensor:
        x = self.blocks[0](self.first(x))
        if self.stops:
            raise KeyboardInterrupt
        return self.last(self.blocks[1](x))


def is_interrupted(in_place: bool) -> None:
    whole, model = Interrupted(), Interrupted()
    wrapped = DistributedDataParallel(whole, find_unused_parameters=True)
    if in_place:
        called: Any = fully_shard(model, units=model.blocks, find_unused_parameters=True)
        optimizer, controller = adamw(model), fully_sharded(model)
    else:
        called, optimizer = fully(model, find_unused_parameters=True)
        controller = called
    for each, module, steps in ((wrapped, whole, adamw(wrapped)), (called, model, optimizer)):
        train(each, steps, 1)
        module.stops = True
        with pytest.raises(KeyboardInterrupt):
            each(batch(3))
        module.stops = False
        train(each, steps, 2)
    assert_alike(model, whole)
    assert controller.units.nbytes_live() == 0
    with torch.no_grad():
        called(batch(1))
    assert controller.units.nbytes_live() == 0


@pytest.mark.parametrize("in_place", [False, True])
def test_it_goes_on_after_an_interrupt(ranks2: Ranks, in_place: bool) -> None:
    ranks2.run(is_interrupted, in_place)


class Tied(Tower):
    """The outermost module reads a unit's parameter by itself."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.blocks[0](self.first(x))
        return x @ self.blocks[0].up.weight.t()


@on_ranks(2)
def test_a_training_pass_that_reads_a_freed_parameter_raises() -> None:
    wrapped, _ = fully(Tied())
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
    (whole, one), (sharded, other) = both(Generating())
    for _ in range(2):
        for how in (torch.no_grad, torch.enable_grad):
            with how():
                got = sharded.module.generate(batch(0), 3)
                assert torch.equal(got, whole.module.generate(batch(0), 3))
            if how is torch.no_grad:
                assert sharded.units.nbytes_live() == 0
        assert train(sharded, other) == train(whole, one)


# ---------------------- what modules keep aside, in attributes or anywhere else, may be used in the loss


KEPT: dict[str, Tensor] = {}  # what the modules below keep outside of themselves


class Keeping(Block):
    """Keeps a tensor aside: in an attribute, or in a dict that is no module's."""

    def __init__(self, where: str) -> None:
        super().__init__()
        self.where = where
        self.gate = nn.Linear(24, 2, bias=False)
        self.aux = torch.zeros(())

    def forward(self, x: Tensor) -> Tensor:
        out = super().forward(x)
        aux = self.gate(torch.tanh(self.down(torch.relu(self.up(x))))).square().mean()
        if self.where == "attribute":
            self.aux = aux
        else:
            KEPT["aux"] = aux
        return out


class Routed(Tower):
    def __init__(self, where: str) -> None:
        super().__init__()
        self.blocks[1] = Keeping(where)


def kept(model: Any, step: int) -> Tensor:
    out = model(batch(step))
    aux: Tensor = model.module.blocks[1].aux
    return out.square().mean() + (KEPT["aux"] if aux.grad_fn is None else aux)


def kept_alone(model: Any, step: int) -> Tensor:
    model(batch(step))
    return KEPT["aux"] + 2


CASES: dict[str, tuple[str, Callable[[Any, int], Tensor], dict[str, Any]]] = {
    "in an attribute": ("attribute", kept, {}),
    "elsewhere": ("elsewhere", kept, {}),
    "as the whole loss": ("elsewhere", kept_alone, {"find_unused_parameters": True}),
    "as the whole loss, units kept": (
        "elsewhere",
        kept_alone,
        {"find_unused_parameters": True, "of_fully": {"reshard_after_forward": 1}},
    ),
}


@on_ranks(2)
def test_a_tensor_that_a_unit_kept_aside_is_used_in_the_loss() -> None:
    for where, loss, options in CASES.values():
        trains_alike(Routed(where), loss, **options)
        KEPT.clear()


class Detaching(Block):
    """Reads a weight in the backward pass when all gradients of the unit have come."""

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(nn.functional.linear(x, self.down.weight.detach()[:, :24]))
        return super().forward(x)


class Stopping(Tower):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Detaching() for _ in range(2)])


@on_ranks(2)
def test_a_unit_is_read_after_all_its_gradients_have_come() -> None:
    trains_alike(Stopping())


def twice_by_what_is_kept(model: Any, step: int) -> Tensor:
    loss = model(batch(step)).square().mean()
    loss.backward(retain_graph=True)
    return KEPT["aux"] + 0 * loss.detach()


@on_ranks(2)
def test_what_was_kept_has_a_backward_pass_of_its_own() -> None:
    of_fully = {"accumulate": "owner"}
    trains_alike(Routed("elsewhere"), twice_by_what_is_kept, find_unused_parameters=True, of_fully=of_fully)
    KEPT.clear()


class Overwriting(Block):
    """Writes to what autograd saved."""

    def forward(self, x: Tensor) -> Tensor:
        y = torch.exp(self.up(x))
        out = super().forward(x) + y.sum()
        y.detach().add_(1)
        return out


@on_ranks(2)
def test_writes_to_what_autograd_saved_are_noticed() -> None:
    model = Tower()
    model.blocks[0] = Overwriting()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        fully(model)[0](batch(0)).sum().backward()
    wrapped, optimizer = fully(Routed("elsewhere"), find_unused_parameters=True)
    kept(wrapped, 0).backward(retain_graph=True)
    optimizer.step()
    with pytest.raises(RuntimeError, match=r"modified by an inplace operation.*A step or a load counts"):
        KEPT["aux"].backward()
    train(wrapped, optimizer, loss_of=kept)
    KEPT.clear()


class Deriving(Block):
    """Uses derivatives inside its forward pass."""

    def forward(self, x: Tensor) -> Tensor:
        slope: Tensor = torch.func.grad(lambda y: torch.sin(y).sum())(x.detach())
        return super().forward(x + slope)


@on_ranks(2)
def test_without_the_guard_modules_use_torch_func() -> None:
    model = Tower()
    model.blocks[1] = Deriving()
    want = (both(model)[0][0])(batch(0))
    wrapped, _ = fully(model, guards_reads=False)
    out = wrapped(batch(0))
    assert torch.equal(out, want)
    out.sum().backward()


def are_gone(objects: Sequence[weakref.ref[Any]]) -> bool:
    gc.collect()
    return all(each() is None for each in objects)


@on_ranks(2)
def test_a_model_that_nobody_needs_is_let_go_also_without_a_backward_pass() -> None:
    for goes_back in (True, False):
        wrapped, optimizer = fully(Routed("attribute"))
        buckets = [weakref.ref(bucket) for unit in wrapped.units.units for bucket in unit.buckets]
        loss = kept(wrapped, 0)  # saves what operations have computed themselves, too
        if goes_back:
            loss.backward()
            optimizer.step()
        del optimizer, wrapped, loss
        # What autograd's nodes held is garbage only when these have gone; and another thread may be about to
        # let go of what it has waited for.
        wait_until(partial(are_gone, buckets))
        assert [bucket() for bucket in buckets] == [None] * len(buckets)


def with_hooks(model: nn.Module, step: int) -> Tensor:
    with torch.autograd.graph.saved_tensors_hooks(torch.clone, lambda tensor: tensor):
        return loss_of(model, step)


def kept_in_checkpoints(model: Any, step: int) -> Tensor:
    model.module.how = "not reentrant"
    return kept(model, step)


@on_ranks(2)
def test_hooks_of_others_are_left_alone() -> None:
    trains_alike(Tower(), with_hooks)
    trains_alike(Routed("elsewhere"), kept_in_checkpoints)
    KEPT.clear()
