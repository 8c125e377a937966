"""What modules keep aside, in attributes or anywhere else, may be used in the loss."""

import gc
import weakref
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fully import Block, Tower, batch, both, fully, loss_of, train, trains_alike
from pool import on_ranks
from waiting import wait_until

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
