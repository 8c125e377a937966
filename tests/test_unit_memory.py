"""Views of parameters that somebody keeps can be read at any time, and a freed unit takes no memory."""

import copy
import sys
from collections.abc import Callable
from itertools import pairwise

import pytest
import torch
from torch import Tensor

from fully import Block, Tower, fully, loss_of, train, trains_alike
from pool import on_ranks
from process_memory import anonymous_nbytes
from zero_optim.ddp import unsharded
from zero_optim.shard.pages import FreePages, PagedMemory, UnitMemory

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="pages can be moved on Linux only")
CPU = torch.device("cpu")
MIB = 2**20


def memory(pages: FreePages, nbytes: int, dtype: torch.dtype = torch.float32) -> PagedMemory:
    made = pages.memory(nbytes // dtype.itemsize, dtype, CPU)
    assert isinstance(made, PagedMemory), "this system cannot move pages"
    return made


def waiting(nbytes: int) -> FreePages:
    """Make pages that wait, so many bytes."""
    pages = FreePages()
    made = memory(pages, nbytes)
    for _ in range(2):
        made.grow()
        made.free()
    assert pages.nbytes_waiting == nbytes
    return pages


@pytest.mark.parametrize("nbytes", [4, 4100, 3 * MIB])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.complex64, torch.float8_e5m2])
def test_freed_memory_shows_nan_and_a_view_shows_what_is_written_next(
    nbytes: int, dtype: torch.dtype
) -> None:
    nbytes *= dtype.itemsize
    made = memory(FreePages(), nbytes, dtype)
    view = made.flat.view(2, -1).t()
    for value in (1, 2):
        assert view.to(torch.complex64).isnan().all()
        made.grow()
        made.flat.copy_(torch.full(made.flat.shape, value))
        assert (view.to(torch.complex64) == value).all()
        made.free()
    assert view.to(torch.complex64).isnan().all()


@pytest.mark.parametrize("dtype", [torch.int64, torch.bool, torch.float8_e4m3fnuz])
def test_without_such_a_nan_it_shows_zero(dtype: torch.dtype) -> None:
    made = memory(FreePages(), 4096, dtype)
    made.grow()
    made.flat.view(torch.uint8).fill_(1)
    made.free()
    assert not made.flat.view(torch.uint8).any()


def test_what_is_written_to_freed_memory_is_lost_and_what_is_there_or_freed_already_stays() -> None:
    made = memory(FreePages(), 4096)
    view = made.flat[5:9]
    made.flat.fill_(3)
    made.free()
    made.grow()
    assert not (made.flat == 3).any()
    made.flat.fill_(3)
    made.grow()
    assert (made.flat == 3).all()
    made.free()
    made.free()
    assert made.flat.isnan().all()
    del made
    assert view.isnan().all()  # a view outlives what it was a view of


def test_pages_of_what_was_freed_go_to_what_is_needed_next() -> None:
    pages = waiting(8 * MIB)
    large, small = memory(pages, 8 * MIB), memory(pages, 3 * MIB)
    large.grow()
    large.flat.fill_(5)
    large.free()
    before = anonymous_nbytes()
    small.grow()
    assert (small.flat == 5).all()  # nothing was zeroed
    assert pages.nbytes_waiting == 5 * MIB
    assert anonymous_nbytes() - before < MIB


def test_no_more_pages_wait_than_were_in_use_at_once() -> None:
    pages = FreePages()
    made = [memory(pages, size * MIB) for size in range(1, 6)]
    for _ in range(3):
        for this, following in pairwise(made):
            this.grow()
            following.grow()
            this.free()
            live = sum(each.flat.nbytes for each in made if each.is_there)
            assert pages.nbytes_waiting + live <= 9 * MIB
        made[-1].free()


def test_what_was_needed_once_goes_back_to_the_system() -> None:
    pages = FreePages()
    made = [memory(pages, 4 * MIB) for _ in range(4)]
    before = anonymous_nbytes()
    for _ in range(2):
        for each in made[:1]:
            each.grow()
            each.free()
    for each in made:
        each.grow()
        each.flat.fill_(1)
    assert anonymous_nbytes() - before > 15 * MIB
    for each in made:
        each.free()
    assert pages.nbytes_waiting == 4 * MIB
    assert anonymous_nbytes() - before < 5 * MIB
    del made, each, pages
    assert anonymous_nbytes() - before < MIB


def test_pages_that_the_rest_of_a_period_does_not_need_go_back_to_the_system() -> None:
    pages = FreePages()
    made = [memory(pages, 4 * MIB) for _ in range(4)]
    for period in range(3):
        before = anonymous_nbytes()
        for each in made:  # a forward pass that keeps units
            each.grow()
            each.flat.fill_(1)
        for number, each in enumerate(reversed(made), 1):  # and the backward pass
            each.free()
            if period and number < 4:
                assert pages.nbytes_waiting == 0
                assert anonymous_nbytes() - before < (4 - number) * 4 * MIB + MIB


def test_pages_wait_for_what_a_period_needs_after_it_has_freed_some() -> None:
    pages = FreePages()
    one, two = memory(pages, 4 * MIB), memory(pages, 3 * MIB)
    waiting = []
    for _ in range(3):
        one.grow()
        two.grow()
        two.free()
        waiting.append(pages.nbytes_waiting)
        two.grow()
        two.free()
        waiting.append(pages.nbytes_waiting)
        one.free()
    assert waiting[2:] == [3 * MIB, 0] * 2  # from the second period on it is known


def test_while_units_come_in_another_order_than_before_nothing_waits() -> None:
    pages = FreePages()
    made = [memory(pages, size * MIB) for size in (2, 3, 4)]
    for order in ((0, 1, 2), (2, 0, 1), (1, 2, 0)):
        for number in order:
            made[number].grow()
        for number in order[:2]:
            made[number].free()
            assert pages.nbytes_waiting == 0
        made[order[2]].free()


def test_a_period_that_never_ends_takes_no_more_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("zero_optim.shard.pages._MOST_NOTED", 6)
    pages = FreePages()
    stays, comes = memory(pages, 2 * MIB), memory(pages, 2 * MIB)
    stays.grow()
    for _ in range(20):
        comes.grow()
        comes.free()
    assert len(pages._period.in_use) == 6
    stays.free()
    assert pages.nbytes_waiting == 0
    for _ in range(2):  # periods after it
        comes.grow()
        comes.free()
        assert pages.nbytes_waiting == 2 * MIB


@pytest.mark.parametrize("nbytes", [3 * MIB, 2 * MIB, 64 * 2**10])
def test_what_is_large_begins_where_huge_pages_can(nbytes: int) -> None:
    pages = FreePages()
    made = [memory(pages, nbytes) for _ in range(3)]
    for _ in range(3):
        for each in made:
            each.grow()
            each.flat.fill_(1)
        for each in made:
            each.free()
        starts = [each.flat.data_ptr() for each in made] + [source for _, source in pages._waiting]
        if nbytes >= 2 * MIB:
            assert not any(start % (2 * MIB) for start in starts)


def test_pages_that_cannot_be_moved_are_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    pages = waiting(MIB)
    made = memory(pages, MIB)
    monkeypatch.setattr(pages._system, "mremap", lambda *_: -1 % 2**64)
    for _ in range(2):
        made.grow()
        made.flat.fill_(1)
        made.free()
        assert made.flat.isnan().all()
        assert pages.nbytes_waiting == 0


def test_where_the_system_cannot_move_pages_storages_are_emptied(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("zero_optim.shard.pages.page_moves", lambda: None)
    made = FreePages().memory(1024, torch.float32, CPU)
    assert type(made) is UnitMemory
    made.free()
    assert made.flat.untyped_storage().nbytes() == 0
    made.grow()
    assert made.flat.fill_(1).sum() == 1024


def test_memory_that_was_shared_is_refused() -> None:
    made = memory(FreePages(), 4096)
    made.grow()
    made.flat.share_memory_()  # type: ignore[no-untyped-call]
    with pytest.raises(RuntimeError, match="was replaced, as share_memory"):
        made.free()


def test_a_copy_has_pages_of_its_own() -> None:
    assert copy.deepcopy(waiting(MIB)).nbytes_waiting == 0


# ---------------------------------------------------------------------- in a model

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
def test_views_that_somebody_keeps_show_nan_while_the_unit_is_freed() -> None:
    model = Tower()
    model.blocks[0] = Keeping()
    wrapped, optimizer = fully(model)
    loss = loss_of(wrapped, 0)
    weight = model.blocks[0].up.weight
    for read in (torch.sum, torch.Tensor.tolist, torch.clone, lambda view: view @ view.t()):
        for view in KEPT.values():
            assert torch.as_tensor(read(view)).isnan().all()
    loss.backward()
    optimizer.step()
    with unsharded(model):
        for name, form in FORMS.items():
            assert torch.equal(KEPT[name], form(weight))
    train(wrapped, optimizer, 2)
    KEPT["of numpy"].zero_()  # is lost
    with unsharded(model):
        assert weight.all()
    KEPT["detached"].zero_()
    with pytest.raises(RuntimeError, match="was written to"), unsharded(model):
        pass
    KEPT.clear()


@on_ranks(2)
def test_models_train_alike_where_storages_are_emptied() -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("zero_optim.shard.pages.page_moves", lambda: None)
        trains_alike(Tower())


@on_ranks(2)
def test_sharing_whole_parameters_is_refused() -> None:
    model = Tower()
    wrapped, _ = fully(model)
    message = "memory of a fully sharded model's parameters was replaced"
    with pytest.raises(RuntimeError, match=message), unsharded(wrapped):
        model.blocks[0].up.weight.data.share_memory_()  # type: ignore[no-untyped-call]
