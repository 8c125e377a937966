"""Checkpoints of cut parameters: each owner writes its rows, and a load reads the rows that it needs."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn

from cuts import cut_over
from pool import Ranks, on_ranks
from test_checkpoint import Run
from training import assert_same_value
from zero_optim import checkpoint
from zero_optim.checkpoint import data, manifest
from zero_optim.checkpoint.data import CheckpointReader

Whole = dict[str, Any]
KEY = "optimizer/state/embedding.weight/exp_avg"
BLOCK_NBYTES = 512  # half a page, so that the small parameters here have several


def all_of(run: Run) -> Whole:
    """The model and the whole state, on every rank."""
    run.optimizer.consolidate_state_dict(to=None)
    return {"model": copy.deepcopy(run.model.state_dict()), "optimizer": run.optimizer.state_dict()}


def saved(path: Path, cut: bool = True) -> Whole:
    run = Run(cut=cut)
    run.train(3)
    run.save(path)
    return all_of(run)


@on_ranks(2)
def test_each_owner_writes_its_rows_of_a_parameter_and_its_state(tmp_path: Path) -> None:
    saved(tmp_path / "one")
    content = manifest.read(tmp_path / "one")
    for key in ("model/embedding.weight", KEY):
        chunks = content.entries[key].chunks
        assert [chunk.rows[0] for chunk in chunks] == [0, 32]
        assert [content.files[chunk.file].rank for chunk in chunks] == [0, 1]
    assert len(content.entries[KEY.replace("exp_avg", "step")].chunks) == 1
    written = [file.nbytes for file in content.files.values()]
    assert max(written) < 1.1 * min(written)
    conv = CheckpointReader(tmp_path / "one").read_tensor("model/conv.weight")
    assert conv.shape == (32, 3, 3, 3)
    checkpoint.peek(tmp_path / "one")
    assert checkpoint.latest(tmp_path) == tmp_path / "one"


class Flattened(nn.Module):
    """Its state dict has a view of its weight in another form, whose rows are others."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(64, 16))
        self.register_state_dict_post_hook(_flatten)


def _flatten(module: nn.Module, state: dict[str, Any], _prefix: str, _metadata: object) -> None:
    state["weight"] = state["weight"].view(16, 64)


@on_ranks(2)
def test_a_view_of_a_cut_parameter_is_written_whole_and_read_by_every_owner(tmp_path: Path) -> None:
    path = tmp_path / "one"
    made = []
    for seed in (0, 1):
        torch.manual_seed(seed)
        model = Flattened()
        made.append((model, cut_over(model.parameters())))
    (model, optimizer), (other, fresh) = made
    checkpoint.save(path, model=model, optimizer=optimizer)
    assert len(manifest.read(path).entries["model/weight"].chunks) == 1
    checkpoint.load(path, model=other, optimizer=fresh)
    assert torch.equal(other.weight, model.weight)


# ---------------------------------------------------------------------- blocks


def save_in_blocks(path: Path, cut: bool) -> Whole:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(data, "BLOCK_NBYTES", BLOCK_NBYTES)
        return saved(path, cut)


def load_counted(path: Path, expected: Whole) -> tuple[int, int]:
    """Returns the bytes that were read, and those of what this rank owns."""
    run, read, real = Run(cut=True), 0, CheckpointReader.read

    def counting(reader: CheckpointReader, key: str, chunk: manifest.Chunk, *rest: Any) -> None:
        nonlocal read
        read += chunk.nbytes
        real(reader, key, chunk, *rest)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(CheckpointReader, "read", counting)
        checkpoint.load(path, model=run.model, optimizer=run.optimizer, random=False)
    assert_same_value(all_of(run), expected)
    rank, pieces = dist.get_rank(), run.optimizer.pieces()
    own = ((param, piece) for param, some in pieces.items() for piece in some if piece.owner == rank)
    rows = sum(p.nbytes * (piece.stop - piece.start) // max(1, len(p)) for p, piece in own if p.dim())
    return read, run.optimizer.state_nbytes() + rows


def test_a_rank_reads_the_blocks_that_have_its_rows(ranks2: Ranks, ranks4: Ranks, tmp_path: Path) -> None:
    expected = ranks2.run(save_in_blocks, tmp_path / "one", True)[0]
    entry = manifest.read(tmp_path / "one").entries[KEY]
    assert [chunk.nbytes for chunk in entry.chunks] == [BLOCK_NBYTES] * 8
    for read, own in ranks4.run(load_counted, tmp_path / "one", expected):
        assert read < own + 4096  # the buffers, blocks of the convolution


# ---------------------------------------------------------------------- through DCP


def for_dcp(run: Run) -> dict[str, Any]:
    return {"model": run.model, "optimizer": checkpoint.OptimizerState(run.optimizer, run.model)}


def dcp_save_run(path: Path, cut: bool) -> Whole:
    run = Run(cut=cut)
    run.train(3)
    dcp.save(for_dcp(run), checkpoint_id=path)
    return all_of(run)


def dcp_load_run(path: Path, cut: bool, expected: Whole) -> None:
    run = Run(cut=cut)
    dcp.load(for_dcp(run), checkpoint_id=path, planner=checkpoint.SafeLoadPlanner())
    found = all_of(run)
    assert_same_value(found["optimizer"]["state"], expected["optimizer"]["state"])
    assert_same_value(found["model"], expected["model"])


def test_dcp_saves_the_rows_of_each_owner_and_loads_other_ones(
    ranks2: Ranks, ranks4: Ranks, tmp_path: Path
) -> None:
    sizes = (False, ranks4, True), (True, ranks2, False), (True, ranks4, True)
    for saved_cut, ranks, cut in sizes:
        path = tmp_path / f"{saved_cut} {ranks.size} {cut}"
        ranks.run(dcp_load_run, path, cut, ranks2.run(dcp_save_run, path, saved_cut)[0])
    entry = dcp.FileSystemReader(path).read_metadata().state_dict_metadata[KEY.replace("/", ".")]
    assert sorted(chunk.offsets for chunk in entry.chunks) == [(0, 0), (32, 0)]
