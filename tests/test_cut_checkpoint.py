"""Checkpoints of cut parameters: each owner writes its rows, and a load reads the rows that it needs."""

import copy
import inspect
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.optim import Optimizer

import cuts
from cuts import ONE_A_BUCKET, cutting
from pool import Ranks, on_ranks
from test_checkpoint import flip, once
from training import assert_same_state, params_of
from zero_optim import CheckpointError, StateMismatchError, ZeroRedundancyOptimizer, checkpoint
from zero_optim.checkpoint import data, manifest, offline, reader
from zero_optim.checkpoint.data import read_run
from zero_optim.checkpoint.stateful import RowsToSave
from zero_optim.step.averages import EMA
from zero_optim.step.leaves import MASTER

Whole = dict[str, Any]


class Net(nn.Module):
    """Parameters of several forms, one of them tied, and buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(64, 16)
        self.conv = nn.Conv2d(1, 32, 3, padding=1).to(memory_format=torch.channels_last)
        self.norm = nn.BatchNorm2d(32)
        self.head = nn.Linear(16, 64)
        self.head.weight = self.embed.weight
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, tokens: Tensor) -> Tensor:
        seen = self.norm(self.conv(self.embed(tokens)[:, None]))
        mixed: Tensor = self.head(seen.mean(1)) * self.scale
        return mixed


def over(model: nn.Module, *, cut: bool, **options: Any) -> ZeroRedundancyOptimizer:
    if not cut:
        return ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, cuts=False, **options)
    with cutting():
        optimizer = ZeroRedundancyOptimizer(
            model.parameters(), torch.optim.AdamW, bucket_cap_mb=ONE_A_BUCKET, **options
        )
    assert dist.get_world_size() == 1 or any(len(pieces) > 1 for pieces in optimizer.pieces().values())
    return optimizer


def training(
    *, cut: bool, seed: int = 0, lr: float = 0.01, **options: Any
) -> tuple[Net, ZeroRedundancyOptimizer]:
    torch.manual_seed(seed)
    model = Net()
    return model, over(model, cut=cut, lr=lr, **options)


def train(model: Net, optimizer: ZeroRedundancyOptimizer, steps: range) -> None:
    for step in steps:
        tokens = torch.randint(64, (4, 5), generator=torch.Generator().manual_seed(step))
        optimizer.zero_grad()
        model(tokens).square().mean().backward()
        optimizer.step()


def all_of(model: Net, optimizer: ZeroRedundancyOptimizer) -> Whole:
    """The model and the whole state, on every rank."""
    optimizer.consolidate_state_dict(to=None)
    return {"model": copy.deepcopy(model.state_dict()), "optimizer": optimizer.state_dict()}


def assert_same(got: Whole, expected: Whole) -> None:
    assert_same_state(got["optimizer"], expected["optimizer"])
    assert list(got["model"]) == list(expected["model"])
    for name, value in expected["model"].items():
        assert torch.equal(got["model"][name], value), name


OPTIONS: dict[str, dict[str, Any]] = {"plain": {}, "ema": {"ema_decay": 0.5}}


def save_run(path: Path, cut: bool, kind: str, steps: int = 3) -> tuple[Whole, Whole]:
    """Save after some steps; return everything then, and some steps later."""
    model, optimizer = training(cut=cut, **OPTIONS[kind])
    train(model, optimizer, range(steps))
    saved = all_of(model, optimizer)
    checkpoint.save(path, model=model, optimizer=optimizer, extra={"step": steps})
    train(model, optimizer, range(steps, steps + 2))
    return saved, all_of(model, optimizer)


def load_run(path: Path, cut: bool, kind: str, saved: Whole, later: Whole, steps: int = 3) -> None:
    model, optimizer = training(cut=cut, seed=1, lr=0.5, **OPTIONS[kind])
    assert checkpoint.load(path, model=model, optimizer=optimizer) == {"step": steps}
    assert_same(all_of(model, optimizer), saved)
    train(model, optimizer, range(steps, steps + 2))
    assert_same(all_of(model, optimizer), later)


@pytest.mark.parametrize("kind", OPTIONS)
def test_a_checkpoint_is_loaded_with_other_cuts_and_ranks(
    ranks1: Ranks, ranks2: Ranks, ranks4: Ranks, tmp_path: Path, kind: str
) -> None:
    runs = {cut: ranks2.run(save_run, tmp_path / f"cut-{cut}", cut, kind)[0] for cut in (True, False)}
    assert_same(runs[True][0], runs[False][0])
    assert_same(runs[True][1], runs[False][1])
    for ranks, saved_cut, cut in ((ranks2, True, False), (ranks4, True, True), (ranks1, False, True)):
        ranks.run(load_run, tmp_path / f"cut-{saved_cut}", cut, kind, *runs[saved_cut])


@on_ranks(2)
def test_a_checkpoint_before_the_first_step_has_no_state_and_is_loaded(tmp_path: Path) -> None:
    saved, later = save_run(tmp_path / "new", True, "plain", 0)
    for cut in (False, True):
        load_run(tmp_path / "new", cut, "plain", saved, later, 0)


def test_each_owner_writes_its_rows_of_a_parameter_and_its_state(ranks2: Ranks, tmp_path: Path) -> None:
    ranks2.run(save_run, tmp_path / "one", True, "plain")
    content = manifest.read(tmp_path / "one")
    for key in ("model/embed.weight", "optimizer/state/embed.weight/exp_avg"):
        chunks = content.entries[key].chunks
        assert [chunk.offsets for chunk in chunks] == [(0, 0), (32, 0)]
        assert [content.files[chunk.file].rank for chunk in chunks] == [0, 1]
    assert len(content.entries["optimizer/state/embed.weight/step"].chunks) == 1
    assert content.version == 2
    written = [file.nbytes for file in content.files.values()]
    assert max(written) < 1.1 * min(written)
    assert reader.CheckpointReader(tmp_path / "one").read_tensor("model/conv.weight").shape == (32, 1, 3, 3)
    checkpoint.peek(tmp_path / "one")
    assert checkpoint.latest(tmp_path) == tmp_path / "one"


def test_the_offline_tools_join_rows(ranks2: Ranks, tmp_path: Path) -> None:
    saved, _ = ranks2.run(save_run, tmp_path / "one", True, "plain")[0]
    offline.consolidate(tmp_path / "one", tmp_path / "state.pt")
    state = torch.load(tmp_path / "state.pt", weights_only=True)
    for index, entries in saved["optimizer"]["state"].items():
        for name, value in entries.items():
            assert torch.equal(state["state"][index][name], value)
            assert state["state"][index][name].stride() == value.stride()
    offline.consolidate(tmp_path / "one", tmp_path / "weights.pt", weights=True)
    weights = torch.load(tmp_path / "weights.pt", weights_only=True)
    assert all(torch.equal(weights[name], value) for name, value in saved["model"].items())
    offline.reshard(tmp_path / "one", tmp_path / "three", 3)
    assert all(len(entry.chunks) == 1 for entry in manifest.read(tmp_path / "three").entries.values())


@on_ranks(2)
def test_a_save_in_the_background_has_the_rows_of_its_moment(tmp_path: Path) -> None:
    path = tmp_path / "one"
    model, optimizer = training(cut=True)
    train(model, optimizer, range(2))
    saved = all_of(model, optimizer)
    pending = checkpoint.save_async(path, model=model, optimizer=optimizer)
    train(model, optimizer, range(2, 4))
    pending.wait()
    checkpoint.load(path, model=model, optimizer=optimizer)
    assert_same(all_of(model, optimizer), saved)


def masters_over(model: nn.Module, cut: bool) -> ZeroRedundancyOptimizer:
    return over(model, cut=cut, lr=0.01, master_dtype=torch.float32, ema_decay=0.5)


def step_once(model: nn.Module, optimizer: Optimizer, step: int) -> None:
    generator = torch.Generator().manual_seed(step)
    for param in model.parameters():
        param.grad = torch.randn(param.shape, generator=generator).to(param.dtype)
    optimizer.step()


@on_ranks(2)
def test_masters_and_averages_of_cut_parameters_are_saved_and_loaded(tmp_path: Path) -> None:
    path = tmp_path / "one"
    runs = []
    for cut in (True, False):
        torch.manual_seed(0)
        model = nn.Linear(16, 64).bfloat16()
        runs.append((model, masters_over(model, cut)))
        for step in range(2):
            step_once(*runs[-1], step)
    (model, optimizer), (plain, whole) = runs
    for each in (optimizer, whole):
        each.consolidate_state_dict(to=None)
    assert_same_state(optimizer.state_dict(), whole.state_dict())
    assert set(optimizer.state_dict()["state"][0]) >= {MASTER, EMA}
    checkpoint.save(path, model=model, optimizer=optimizer)
    for cut in (True, False):
        fresh = nn.Linear(16, 64).bfloat16()
        loaded = masters_over(fresh, cut)
        checkpoint.load(path, model=fresh, optimizer=loaded)
        loaded.consolidate_state_dict(to=None)
        assert_same_state(loaded.state_dict(), whole.state_dict())
        again = masters_over(nn.Linear(16, 64).bfloat16(), cut)
        again.load_state_dict(whole.state_dict())
        again.consolidate_state_dict(to=None)
        assert_same_state(again.state_dict(), whole.state_dict())
        for step in range(2, 4):
            step_once(fresh, loaded, step)
        runs.append((fresh, loaded))
    for step in range(2, 4):
        step_once(plain, whole, step)
    for fresh, _ in runs[2:]:
        assert torch.equal(fresh.weight, plain.weight)
    wrong = copy.deepcopy(whole)
    wrong.consolidate_state_dict(to=None)
    state = wrong.state_dict()
    state["state"][0][MASTER] = state["state"][0][MASTER][:32]
    with pytest.raises(StateMismatchError, match=f"'{MASTER}' has shape"):
        optimizer.load_state_dict(state)


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
        made.append((model, over(model, cut=True)))
        assert len(made[-1][1].pieces()[model.weight]) == 2
    (model, optimizer), (other, fresh) = made
    checkpoint.save(path, model=model, optimizer=optimizer)
    assert len(manifest.read(path).entries["model/weight"].chunks) == 1
    checkpoint.load(path, model=other, optimizer=fresh)
    assert torch.equal(other.weight, model.weight)


@on_ranks(2)
def test_damage_in_one_piece_is_found_and_nothing_is_changed(tmp_path: Path) -> None:
    path = tmp_path / "one"
    model, optimizer = training(cut=True)
    train(model, optimizer, range(2))
    before = all_of(model, optimizer)
    checkpoint.save(path, model=model, optimizer=optimizer)
    chunk = manifest.read(path).entries["optimizer/state/embed.weight/exp_avg"].chunks[1]
    once(lambda: flip(path / chunk.file, chunk.start))
    other, fresh = training(cut=True, seed=1)
    untouched = all_of(other, fresh)
    with pytest.raises(CheckpointError, match=r"embed.weight/exp_avg in .*: its checksum is wrong"):
        checkpoint.load(path, model=other, optimizer=fresh)
    assert_same(all_of(other, fresh), untouched)
    assert checkpoint.latest(path) is None
    assert_same(all_of(model, optimizer), before)


BLOCK_NBYTES = 512  # half a page, so that the small parameters of this test have several


def save_in_blocks(path: Path, cut: bool) -> tuple[Whole, Whole]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(data, "BLOCK_NBYTES", BLOCK_NBYTES)
        return save_run(path, cut, "plain")


def load_counted(path: Path, cut: bool, saved: Whole) -> tuple[int, int]:
    """Returns the bytes that were read, and those of what this rank owns."""
    model, optimizer = training(cut=cut, seed=1)
    read = 0

    def counting(folder: Path, chunk: manifest.Chunk, key: str, *rest: Any) -> None:
        nonlocal read
        read += chunk.nbytes if key != "its header" else 0
        read_run(folder, chunk, key, *rest)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(data, "read_run", counting)
        checkpoint.load(path, model=model, optimizer=optimizer, random=False)
    assert_same(all_of(model, optimizer), saved)
    rank = dist.get_rank()
    pieces = ((p, piece) for p, found in optimizer.pieces().items() for piece in found if piece.owner == rank)
    rows = sum(p.nbytes * (piece.stop - piece.start) // max(1, piece.stop) for p, piece in pieces if p.dim())
    return read, optimizer.state_nbytes() + rows


@pytest.mark.parametrize("saved_cut", [True, False])
def test_a_rank_reads_the_blocks_that_have_its_rows(
    ranks2: Ranks, ranks4: Ranks, tmp_path: Path, saved_cut: bool
) -> None:
    saved, _ = ranks2.run(save_in_blocks, tmp_path / "one", saved_cut)[0]
    entry = manifest.read(tmp_path / "one").entries["optimizer/state/embed.weight/exp_avg"]
    assert [chunk.nbytes for chunk in entry.chunks] == [BLOCK_NBYTES] * 8
    for read, own in ranks4.run(load_counted, tmp_path / "one", True, saved):
        assert read < own + 4096  # the buffers, blocks of the convolution


def test_blocks_of_one_file_are_mapped_together(ranks2: Ranks, tmp_path: Path) -> None:
    saved, _ = ranks2.run(save_in_blocks, tmp_path / "one", False)[0]
    opened = reader.CheckpointReader(tmp_path / "one")
    embedding = opened.map_tensor("model/embed.weight")
    assert torch.equal(embedding, saved["model"]["embed.weight"])
    entry = opened.manifest.entries["model/embed.weight"]
    assert len(entry.chunks) == 8
    assert embedding.untyped_storage().nbytes() == entry.nbytes
    flip(tmp_path / "one" / entry.chunks[5].file, entry.chunks[5].start)
    with pytest.raises(CheckpointError, match=r"embed\.weight"):
        reader.CheckpointReader(tmp_path / "one").map_tensor("model/embed.weight")


# ---------------------------------------------------------------------- through DCP


def dcp_save_run(path: Path, cut: bool) -> Whole:
    model, optimizer = training(cut=cut)
    train(model, optimizer, range(3))
    state = {"model": model, "optimizer": checkpoint.OptimizerState(optimizer, model)}
    dcp.save(state, storage_writer=checkpoint.Writer(path))
    return all_of(model, optimizer)


def dcp_load_run(path: Path, cut: bool, saved: Whole) -> None:
    model, optimizer = training(cut=cut, seed=1)
    state = {"model": model, "optimizer": checkpoint.OptimizerState(optimizer, model)}
    dcp.load(state, storage_reader=checkpoint.Reader(path), planner=checkpoint.SafeLoadPlanner())
    found = all_of(model, optimizer)
    for index, entries in saved["optimizer"]["state"].items():
        for name, value in entries.items():
            assert torch.equal(found["optimizer"]["state"][index][name], value), (index, name)
    assert all(torch.equal(found["model"][name], value) for name, value in saved["model"].items())


@pytest.mark.not_late("PyTorch's DCP asks a group which devices it serves, and one in Python cannot say")
def test_dcp_saves_the_rows_of_each_owner_and_loads_other_ones(
    ranks2: Ranks, ranks4: Ranks, tmp_path: Path
) -> None:
    for saved_cut, ranks, cut in ((True, ranks2, False), (False, ranks4, True), (True, ranks4, True)):
        path = tmp_path / f"{saved_cut} {ranks.size} {cut}"
        saved = ranks2.run(dcp_save_run, path, saved_cut)[0]
        ranks.run(dcp_load_run, path, cut, saved)
    entry = manifest.read(path).entries["optimizer.state.embed.weight.exp_avg"]
    assert [chunk.offsets for chunk in entry.chunks] == [(0, 0), (32, 0)]


@on_ranks(2)
@pytest.mark.not_late("PyTorch's DCP asks a group which devices it serves, and one in Python cannot say")
def test_dcp_saves_rows_in_the_background(tmp_path: Path) -> None:
    path = tmp_path / "one"
    model, optimizer = training(cut=True)
    train(model, optimizer, range(2))
    saved = all_of(model, optimizer)
    state = {"model": model, "optimizer": checkpoint.OptimizerState(optimizer, model)}
    lane = dist.new_group(backend="gloo")
    if "async_stager" not in inspect.signature(dcp.async_save).parameters:  # PyTorch 2.8: see the docs
        with pytest.raises(TypeError, match=r"cannot be staged by this stager.*use dcp\.save"):
            dcp.async_save(state, storage_writer=checkpoint.Writer(path), process_group=lane)
        return
    pending = dcp.async_save(state, storage_writer=checkpoint.Writer(path), process_group=lane)
    train(model, optimizer, range(2, 3))
    pending.result()
    dcp_load_run(path, True, saved)


def test_rows_for_dcp_keep_what_they_are_when_they_are_copied() -> None:
    rows = RowsToSave.of(torch.arange(6.0).view(2, 3), (5, 3), 2)
    for copied in (rows, rows.clone(), rows.to(torch.device("cpu"), copy=True)):
        (item,) = copied.__create_write_items__("w", copied)
        assert item.tensor_data.chunk.offsets == torch.Size((2, 0))
        assert item.tensor_data.size == torch.Size((5, 3))
        shard = copied.__get_tensor_shard__(item.index)
        assert type(shard) is Tensor
        assert torch.equal(shard, torch.arange(6.0).view(2, 3))
    with pytest.raises(TypeError, match="cuts=False"):
        torch.zeros(2, 3).copy_(rows)


# ---------------------------------------------------------------------- as people use it


def big(*, cut: bool, seed: int = 0) -> tuple[nn.Sequential, ZeroRedundancyOptimizer]:
    """A model whose embedding is larger than all the rest: the planner itself cuts it."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Embedding(4096, 64), nn.Linear(64, 64), nn.LayerNorm(64))
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, cuts=cut, lr=0.01)
    assert cut == any(len(pieces) > 1 for pieces in optimizer.pieces().values())
    return model, optimizer


@on_ranks(2)
def test_an_embedding_that_is_cut_by_itself_travels_everywhere(tmp_path: Path) -> None:
    path = tmp_path / "one"
    model, optimizer = big(cut=True)
    plain = copy.deepcopy(model)
    reference = torch.optim.AdamW(plain.parameters(), lr=0.01)
    for step in range(2):
        step_once(model, optimizer, step)
        step_once(plain, reference, step)
    optimizer.consolidate_state_dict(to=None)
    assert_same_state(optimizer.state_dict(), reference.state_dict())
    checkpoint.save(path, model=model, optimizer=optimizer)
    for cut in (True, False):
        other, fresh = big(cut=cut, seed=1)
        checkpoint.load(path, model=other, optimizer=fresh)
        fresh.consolidate_state_dict(to=None)
        assert_same_state(fresh.state_dict(), reference.state_dict())
        assert all(torch.equal(p, q) for p, q in zip(other.parameters(), plain.parameters(), strict=True))
        dealt = big(cut=cut, seed=1)[1]
        dealt.load_state_dict(reference.state_dict() if dist.get_rank() == 0 else None, src=0)
        dealt.consolidate_state_dict(to=None)
        assert_same_state(dealt.state_dict(), reference.state_dict())


@on_ranks(2)
@pytest.mark.parametrize("version", range(1, manifest.VERSION + 1))
def test_rows_are_read_from_checkpoints_of_every_version(version: int) -> None:
    path = Path(__file__).parent / "data" / f"checkpoint-{version}"
    model = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cuts, "ALIGNMENT", 4)
        optimizer = over(model, cut=True, lr=0.5, ema_decay=0.5)
    assert len(optimizer.pieces()[model[0].weight]) == 2
    assert checkpoint.load(path, model=model, optimizer=optimizer) == {"step": 7, "at": (1, 2.5)}
    for number, param in enumerate(model.parameters()):
        expected = torch.arange(param.numel(), dtype=torch.float32).view_as(param) + 10 * number
        assert torch.equal(param, expected)
    optimizer.consolidate_state_dict(to=None)
    for number, entries in optimizer.state_dict()["state"].items():
        assert entries["exp_avg"].unique().tolist() == [number + 0.5]
        assert entries["exp_avg"].shape == entries[EMA].shape == params_of(optimizer)[number].shape
