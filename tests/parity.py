"""One table of runs, stage x model x loop x option: each has the bits of the same run without sharding.

`choose_rows` takes rows so that every two entries that go together meet in one; `refusal` says which rows do
not exist, and why. The reference trains by the same code, with PyTorch's DDP (or sums made by hand, where
their order is another) and the plain optimizer class. It is made once in a worker process.
"""

from contextlib import nullcontext
from dataclasses import dataclass
from itertools import combinations, product
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel as TorchDdp

from fake_streams import fake_streams
from on_device import current_device
from parity_models import MODELS
from parity_reference import InRankOrder
from parity_runs import LOOPS, OPTIONS, STAGES, Row, Run, Stage
from training import HAS_MUON, TORCH
from zero_optim.ddp import DistributedDataParallel, FullyShardedDataParallel, unsharded
from zero_optim.plan.pieces import Piece, piece_of, rows_of
from zero_optim.step.partial import PartialGradient


def refusal(row: Row) -> str:
    """Why a row is no run; empty if it is one."""
    stage, loop, option = STAGES[row.stage], LOOPS[row.loop], OPTIONS[row.option]
    name, of_optimizer, is_sparse = row.loop, option.of_optimizer, row.model == "sparse"
    torchs = stage.wrapper is TorchDdp
    varies = row.model == "unused" or loop.leaves_out
    twice, joins = name == "graph gone through twice", name == "Join"
    rules = {
        "gradients are stepped before they are clipped or scaled": stage.overlaps and loop.clips,
        "the first of two passes would step already": stage.overlaps and twice,
        "nothing is sharded that could be cut": stage.plain and option.kind == "cuts",
        "only a wrapper that shards takes a mesh": option.kind == "mesh" and not stage.shards,
        "sharded gradients take no part in Join": joins and stage.to_owners,
        "gradients on owners are no views": stage.shards and row.option == "gradients as views",
        "PyTorch 2.8 does not sum complex numbers over gloo": TORCH == (2, 8) and row.model == "complex",
        "Adafactor, instead of Muon, takes its epsilon from the first dtype": not HAS_MUON
        and row.model == "dtypes"
        and option.kind == "classes",
        "PyTorch 2.8 broadcasts buffers of an evaluation before a backward pass needs them": TORCH == (2, 8)
        and row.model == "convolutions"
        and name == "ordinary",
        "PyTorch adds sparse gradients of several passes up in an order of its own": is_sparse
        and loop.skips_syncs
        and summed_by_hand(row),
        "several dtypes": row.model in ("dtypes", "complex") and "master_dtype" in of_optimizer,
        "PyTorch does not fuse, clamp or unscale complex numbers": row.model == "complex"
        and (name in ("clipped by value", "GradScaler") or "fused" in of_optimizer),
        "PyTorch does not clip sparse gradients": is_sparse and loop.clips,
        "norms of complex numbers differ in the last bit": row.model == "complex" and name == "clipped",
        "a mesh sums sparse gradients over all ranks at once": is_sparse and option.kind == "mesh",
        "sparse gradients are not cut": is_sparse and option.kind == "cuts",
        "the class takes no sparse gradients": is_sparse and (bool(of_optimizer) or option.kind == "classes"),
        "PyTorch's DDP reduces one pass for each forward pass": torchs and twice,
        "PyTorch's DDP fails without syncs": row.option == "static graph" and loop.skips_syncs,
        "PyTorch's DDP marks parameters twice": row.model == "reentrant checkpoints" and name == "freezing",
        "PyTorch's DDP has no shadow of these": torchs and joins and row.model in ("sparse", "unused"),
        "sums by hand need all gradients of all ranks": summed_by_hand(row)
        and (row.model == "unused" or joins),
        "DDP adds up more than two ranks in another order than sums by hand": twice
        and not stage.to_owners
        and option.size > 2,
        "the graph varies": row.option == "static graph" and varies,
    }
    return next((reason for reason, holds in rules.items() if holds), "")


OVERLAPS = "overlap", "overlap, torch's DDP", "overlap, no thread"
MORE_ROWS = [
    Row("overlap", "tower", "Join", "cuts"),
    Row("overlap at the end", "tower", "ordinary", "plain"),
    Row("overlap, torch's DDP", "tower", "Join", "cuts"),
    Row("overlap, lazy", "tower", "ordinary", "cuts"),
    Row("overlap", "tower", "ordinary", "cuts, masters, averages"),
    Row("overlap", "unused", "ordinary", "cuts"),
    Row("overlap", "tower", "ordinary", "cuts, four ranks"),
    Row("overlap, no thread, torch's DDP", "tower", "ordinary", "cuts"),
    Row("our DDP alone", "tower", "no_sync", "gradients as views"),
    Row("our DDP alone", "tower", "adding", "gradients as views"),
    Row("our DDP alone", "tower", "adding", "static graph"),
    Row("our DDP alone", "sparse", "no_sync", "gradients as views"),
    Row("our DDP alone", "sparse", "freezing", "plain"),
    Row("overlap", "sparse", "ordinary", "gradients as views"),
    *(
        Row(stage, "complex", "ordinary", "static graph")
        for stage in STAGES
        if "torch's" in stage and TORCH != (2, 8)
    ),
    *(
        Row(stage, "complex", "freezing", "plain")  # of those frozen one is complex
        for stage in ("overlap", "overlap, torch's DDP")
    ),
    *(Row(stage, "dtypes", "ordinary", "static graph") for stage in STAGES if "overlap" in stage),
    *(Row(stage, "tower", "adding", "gradients as views") for stage in OVERLAPS),
    *(Row(stage, "sparse", "ordinary", "plain") for stage in OVERLAPS),
    Row("views", "tower", "ordinary", "mesh"),  # state in pairs, beside DDP over all
    Row("gradients", "tower", "adding", "four ranks"),
    Row("gradients", "tower", "no_sync", "four ranks"),
    Row("fully", "adapters of a frozen base", "ordinary", "optimizer without the base"),
    Row("fully, lazy", "tower", "ordinary", "plain"),
    *(Row(f"fully, {how} stay", "gpt", "clipped", "plain") for how in ("units", "two units")),
    *(
        Row(f"fully, {how} stay", "reentrant checkpoints", "ordinary", "plain")
        for how in ("units", "two units")
    ),
    Row("fully, wrapped first", "reentrant checkpoints", "GradScaler", "cuts"),
    Row("fully, wrapped first", "many tiny", "clipped", "mesh"),
    Row("fully, wrapped first", "convolutions", "ordinary", "momentum, averages"),
    Row("fully, wrapped first", "dtypes", "scheduled", "plain"),
    Row("fully, wrapped first", "tied", "freezing", "mesh"),
]


def choose_rows() -> list[Row]:
    """A few rows in which all pairs of entries meet: of all candidates the one with most new pairs."""
    where: dict[Any, list[Row]] = {}
    stages, options = (
        [name for name, each in table.items() if not each.on_request] for table in (STAGES, OPTIONS)
    )
    for row in map(Row._make, product(stages, MODELS, LOOPS, options)):
        if not refusal(row):
            for pair in pairs(row):
                where.setdefault(pair, []).append(row)
    missing = dict.fromkeys(where)
    rows = []
    while missing:
        candidates = where[next(iter(missing))]
        rows.append(max(candidates, key=lambda row: sum(pair in missing for pair in pairs(row))))
        for pair in pairs(rows[-1]):
            missing.pop(pair, None)
    return sorted({*rows, *MORE_ROWS})


def pairs(row: Row) -> list[Any]:
    return list(combinations(enumerate(row), 2))


@dataclass
class Trace:
    """What a run leaves: answers of its loop; parameters, averages, state and gradients."""

    answers: list[Any]
    params: list[Tensor]
    averages: list[Tensor]
    entries: list[dict[str, Any]]
    grads: list[Tensor | None]
    pieces: list[Piece | None]  # the rows that this rank owns


def play(row: Row, stage: Stage) -> Trace:
    run = Run.of(row, stage)
    LOOPS[row.loop].train(run)
    optimizer, params = run.optimizer, list(run.net.parameters())
    grads = [p.grad for p in params]
    if not stage.plain:
        optimizer.wait_for_gathers()

    def values() -> list[Tensor]:
        with unsharded(run.net) if stage.wrapper is FullyShardedDataParallel else nullcontext():
            return [p.detach().clone() for p in params]

    found, averages = values(), []
    if "ema_decay" in OPTIONS[row.option].of_optimizer:
        with optimizer.averaged_weights():
            averages = values()
        assert_same(values(), found, "put back")
    if stage.plain:
        return Trace(run.answers, found, averages, optimizer.entries(), grads, [])
    if stage.wrapper is FullyShardedDataParallel:
        assert run.model.units.nbytes_live() == 0
    optimizer.consolidate_state_dict(to=None)
    state = optimizer.state_dict()["state"]
    pieces = optimizer.pieces()
    entries = [state.get(index, {}) for index in range(len(pieces))]
    owned = [piece_of(pieces.get(p, ()), optimizer.ranks.rank) for p in params]
    return Trace(run.answers, found, averages, entries, grads, owned)


def trained(stage: str, model: str = "tower", loop: str = "ordinary", option: str = "plain") -> list[Tensor]:
    """Train a model of the table; gives its parameters, whole."""
    return play(Row(stage, model, loop, option), STAGES[stage]).params


def batches() -> dict[str, list[Row]]:
    """The rows of each stage and number of ranks; they share a call of the ranks."""
    rows: dict[str, list[Row]] = {}
    for row in choose_rows():
        rows.setdefault(f"{row.stage}, {OPTIONS[row.option].size} ranks", []).append(row)
    return rows


def assert_rows(rows: list[Row]) -> None:
    for row in rows:
        try:
            assert_row(row)
        except Exception as error:
            raise AssertionError(f"in the row {row}: {error}") from error


def assert_row(row: Row) -> None:
    """The run of a row has the bits of its reference; called on every rank."""
    want, stage = reference(row), STAGES[row.stage]
    with fake_streams() if stage.inline else nullcontext():
        got = play(row, stage)
    assert repr(got.answers) == repr(want.answers), f"{got.answers} and {want.answers}"
    assert_same(got.params, want.params)
    if row.loop == "Join" and dist.get_rank() != 1:
        return  # a plain optimizer knows nothing of the steps after its rank's last input
    assert_same(got.averages, want.averages)
    assert_same(got.entries, want.entries)
    for index, (mine, other) in enumerate(zip(got.grads, want.grads, strict=True)):
        if isinstance(mine, PartialGradient):
            piece = got.pieces[index]
            assert (mine.piece is None) == (piece is None)
            assert other is not None
            assert piece is None or torch.equal(mine.piece, rows_of(other, piece)), index
        elif mine is not None or not stage.to_owners:
            assert_same(mine, other, f"gradient {index}")


def assert_same(got: Any, want: Any, where: str = "") -> None:
    """Compare nested values bit for bit, dense tensors with their strides; whole states lie on the CPU."""
    if isinstance(want, dict):
        got, want = sorted(got.items()), sorted(want.items())
    if isinstance(want, Tensor) and isinstance(got, Tensor):
        if not (got.is_sparse or want.is_sparse):
            assert got.stride() == want.stride(), where
        got, want = (value.detach().cpu().to_dense().nan_to_num() for value in (got, want))
        assert got.dtype == want.dtype, where
        assert torch.equal(got, want), (where, got, want)
    elif isinstance(want, list | tuple):
        assert len(got) == len(want), where
        for index, (mine, other) in enumerate(zip(got, want, strict=True)):
            assert_same(mine, other, f"{where}.{index}")
    else:
        assert got == want, where


_references: dict[tuple[object, ...], Trace] = {}


def summed_by_hand(row: Row) -> bool:
    """Whether PyTorch's DDP sums in another order, or not at all."""
    stage = STAGES[row.stage]
    if row.loop == "graph gone through twice" or OPTIONS[row.option].kind == "hosts":
        return True
    return stage.to_owners and (
        OPTIONS[row.option].size > 2 or (stage.shards and LOOPS[row.loop].adds_on_owners)
    )


def reference(row: Row) -> Trace:
    """The run without sharding, made once in a process."""
    wrapper: Any = InRankOrder if summed_by_hand(row) else TorchDdp
    if row.model in ("sparse", "unused") and row.loop == "Join":
        wrapper = DistributedDataParallel  # PyTorch's cannot
    key = (wrapper, *row[1:], current_device().type, dist.get_world_size())
    is_known = torch.tensor(key in _references, dtype=torch.int32)
    dist.all_reduce(is_known, dist.ReduceOp.MIN)  # a process may have been replaced
    if not is_known:
        _references[key] = play(row, Stage(wrapper, plain=True))
    return _references[key]
