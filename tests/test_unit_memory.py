"""A freed unit takes no memory, and views of its parameters show them again when it is whole."""

import sys
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from fully import Block, Tower, fully, loss_of, train
from pool import on_ranks
from process_memory import anonymous_nbytes
from zero_optim.ddp import unsharded
from zero_optim.shard.rows.unit_memory import UnitMemory

CPU = torch.device("cpu")
MIB = 2**20
on_linux = pytest.mark.skipif(sys.platform != "linux", reason="reads resident memory in /proc")


def memory(nbytes: int) -> UnitMemory:
    return UnitMemory(nbytes // 4, torch.float32, CPU)


@on_linux
def test_freed_memory_goes_back_to_the_system_even_if_an_array_of_numpy_views_it() -> None:
    made = memory(64 * MIB)  # above the largest block that the C library keeps
    view = made.flat.numpy()[:8]
    for value in (1, 2):
        before = anonymous_nbytes()
        made.grow()
        made.flat.fill_(value)
        assert (view == value).all()
        assert anonymous_nbytes() - before > 60 * MIB
        made.free()
        assert anonymous_nbytes() - before < MIB


KEPT: dict[str, Tensor] = {}
FORMS: dict[str, Callable[[Tensor], Tensor]] = {
    "row": lambda weight: weight[0],
    "detached": lambda weight: weight.detach(),
    "transposed": lambda weight: weight.t(),
    "of numpy": lambda weight: torch.from_numpy(weight.detach().numpy()),
}


class Keeping(Block):
    """Keeps views of a parameter."""

    def forward(self, x: Tensor) -> Tensor:
        KEPT.update((name, form(self.up.weight)) for name, form in FORMS.items())
        return super().forward(x)


@on_ranks(2)
def test_views_that_somebody_keeps_show_the_parameters_when_the_unit_is_whole_again() -> None:
    model = Tower()
    model.blocks[0] = Keeping()
    wrapped, optimizer = fully(model)
    loss = loss_of(wrapped, 0)
    weight = model.blocks[0].up.weight
    assert weight.isnan().all()
    loss.backward()
    optimizer.step()
    with unsharded(model):
        for name, form in FORMS.items():
            assert torch.equal(KEPT[name], form(weight))
    train(wrapped, optimizer, 2)
    KEPT.clear()


@on_ranks(2)
def test_sharing_whole_parameters_is_refused() -> None:
    model = Tower()
    wrapped, _ = fully(model)
    message = "memory of a fully sharded model's parameters was replaced"
    with pytest.raises(RuntimeError, match=message), unsharded(wrapped):
        model.blocks[0].up.weight.data.share_memory_()  # type: ignore[no-untyped-call]
