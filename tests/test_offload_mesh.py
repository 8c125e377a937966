"""Files for what a rank keeps, with state over all ranks of a mesh: copies of other rows are there too."""

import copy
import errno
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from fully import BUDGET, Tower, adamw, assert_alike, assert_equal, loss_of, state_of, train
from meshes import mesh_of
from modelled import modelled_streams
from pool import on_ranks
from test_mesh import assert_equal_everywhere
from test_offload import assert_same_state
from zero_optim import RemoteRankError, checkpoint
from zero_optim.ddp import FullyShardedDataParallel, Offload, unsharded
from zero_optim.shard import row_gathers
from zero_optim.shard.mapped import PAGE


def over_all(model: nn.Module, folder: Path | str | None, *, first: bool = True) -> Any:
    """Wrap a copy of a model over a mesh whose ranks share the state, with the optimizer first or last."""
    own, mesh = copy.deepcopy(model), mesh_of(2)
    options: dict[str, Any] = {"units": [*own.blocks], "mesh": mesh}  # type: ignore[misc]
    options["offload"] = Offload(folder, BUDGET) if isinstance(folder, Path) else folder
    if first:
        optimizer = adamw(own)
        return FullyShardedDataParallel(own, optimizer, **options), optimizer
    wrapped = FullyShardedDataParallel(own, **options)
    return wrapped, adamw(wrapped)


@on_ranks(2, slow=4)
def test_copies_of_the_rows_of_other_replicas_are_in_files(tmp_path: Path) -> None:
    model = Tower(width=48)
    (plain, one), (kept, other) = over_all(model, None), over_all(model, tmp_path)
    for round_ in range(2):
        assert train(kept, other, 2) == train(plain, one, 2), round_
        for wrapped in (plain, kept):
            with torch.no_grad(), unsharded(wrapped.module):
                wrapped.module.first.weight.mul_(2)
    assert_alike(kept.module, plain.module)
    assert_same_state(one, other)
    assert_equal_everywhere(kept.module)
    copies = [each for column in kept.units.gathers._columns.values() for each in column._copies.values()]
    large = [each for each in copies if each.nbytes >= PAGE]
    assert large
    assert all(other.core.inputs.store.files._memory.holds(each) for each in large)
    assert kept.units.nbytes_live() == 0


@on_ranks(2)
@pytest.mark.not_late("the model of streams has collectives of its own")
def test_copies_are_on_the_host_where_rows_are() -> None:
    model = Tower()
    plain, one = over_all(model, None)
    with modelled_streams(checks=False) as streams:
        kept, other = over_all(model, "cpu")
        for step in range(4):
            other.zero_grad()
            loss_of(kept, step).backward()
            other.step()
        state = state_of(kept)
        columns = kept.units.gathers._columns.values()
        places = {streams.kind_of(each) for column in columns for each in column._copies.values()}
        assert places == {"pinned"}, places
        streams.current_stream.synchronize()
        races = streams.settle()
        assert not races, str(races[0])
    train(plain, one, 4)
    assert_equal(state, state_of(plain))


@on_ranks(2)
def test_an_optimizer_that_comes_later_and_checkpoints_keep_them_there(tmp_path: Path) -> None:
    model, saved = Tower(width=48), tmp_path / "saved"
    (plain, one), (kept, other) = over_all(model, None, first=False), over_all(model, tmp_path, first=False)
    train(kept, other, 2)
    train(plain, one, 2)
    checkpoint.save(saved, model=kept, optimizer=other)
    train(kept, other, 2)
    checkpoint.load(saved, model=kept, optimizer=other)
    assert_alike(plain, kept)
    other.consolidate_state_dict(to=None)
    one.load_state_dict(other.state_dict())
    assert_same_state(one, other)
    assert train(kept, other, 2) == train(plain, one, 2)


@on_ranks(2, forked=True)
def test_a_disk_too_small_for_the_copies_is_told_on_every_rank(tmp_path: Path) -> None:
    model = Tower(width=48)
    is_first = dist.get_rank() == 0
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(row_gathers._Column, "nbytes_to_keep", lambda _: [2**60 if is_first else 1])
        with pytest.raises((OSError, RemoteRankError), match="expected to reserve") as told:
            over_all(model, tmp_path)
    assert not is_first or getattr(told.value, "errno", None) == errno.ENOSPC
