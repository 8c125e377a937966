"""Sharded checkpoints: what is saved loads, on any number of ranks, and training goes on bit for bit."""

import random
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from cuts import ONE_A_BUCKET, cutting
from pool import Pool, on_ranks
from training import assert_same_bits, set_grads
from zero_optim import StateMismatchError, ZeroRedundancyOptimizer, checkpoint

CLASSES: dict[str, tuple[Any, dict[str, Any]]] = {
    "AdamW": (torch.optim.AdamW, {"lr": 0.01}),
    "momentum": (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9}),
    "Adafactor": (torch.optim.Adafactor, {"lr": 0.01}),
}


class Net(nn.Module):
    """Parameters of several shapes, a buffer, tied weights, a memory format, and state that is no tensor."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(64, 16)
        self.head = nn.Linear(16, 64, bias=False)
        self.head.weight = self.embedding.weight
        self.conv = nn.Conv2d(3, 32, 3).to(memory_format=torch.channels_last)
        self.norm = nn.BatchNorm1d(16)
        self.scale = nn.Parameter(torch.randn(()))
        self.frozen = nn.Parameter(torch.randn(5), requires_grad=False)
        self.counted = 0

    def get_extra_state(self) -> int:
        return self.counted

    def set_extra_state(self, state: int) -> None:
        self.counted = state


class Run:
    """A model with everything that belongs to its training."""

    def __init__(self, kind: str = "AdamW", *, cut: bool = False, **options: Any) -> None:
        self.model = Net()
        optimizer_class, defaults = CLASSES[kind]
        options = {**defaults, **({"bucket_cap_mb": ONE_A_BUCKET} if cut else {}), **options}
        with cutting() if cut else nullcontext():
            self.optimizer = ZeroRedundancyOptimizer(self.model.parameters(), optimizer_class, **options)
        is_cut = any(len(pieces) > 1 for pieces in self.optimizer.pieces().values())
        assert is_cut == (cut and dist.get_world_size() > 1)
        self.scheduler = torch.optim.lr_scheduler.MultiStepLR(self.optimizer, milestones=[2, 4], gamma=0.5)
        self.step = 0

    def train(self, until: int) -> None:
        while self.step < until:
            set_grads(list(self.model.parameters()), self.step)
            self.optimizer.step()
            self.scheduler.step()
            self.model.norm.running_mean += 0.25
            self.model.counted += 1
            self.step += 1

    def save(self, path: Path, **options: Any) -> None:
        checkpoint.save(path, **self.parts(), extra={"step": self.step}, **options)

    def load(self, path: Path) -> None:
        self.step = checkpoint.load(path, **self.parts())["step"]

    def parts(self) -> dict[str, Any]:
        return {"model": self.model, "optimizer": self.optimizer, "scheduler": self.scheduler}

    def bits(self) -> list[Tensor]:
        state = self.model.state_dict()
        return [v.clone() if isinstance(v, Tensor) else torch.tensor(v) for v in state.values()]


def flip(path: Path, place: int = -1) -> None:
    """Turn one bit of a file."""
    content = bytearray(path.read_bytes())
    content[place] ^= 1
    path.write_bytes(content)


def once(work: Callable[[], object]) -> None:
    """Do something on rank 0 while no other rank does anything."""
    dist.barrier()
    if dist.get_rank() == 0:
        work()
    dist.barrier()


def disturb(model: nn.Module) -> None:
    for tensor in [*model.parameters(), *model.buffers()]:
        tensor.data.fill_(7)


class Resharded(NamedTuple):
    """A number of ranks that save, and one that loads; whether they cut parameters; where it is saved."""

    first: int
    second: int
    kind: str = "AdamW"
    cut: tuple[bool, bool] = (False, False)
    then: tuple[tuple[str, Any], ...] = ()
    at: int = 3


def save_and_go_on(path: Path, case: Resharded) -> list[Tensor]:
    run = Run(case.kind, cut=case.cut[0])
    run.train(case.at)
    run.save(path)
    run.train(6)
    return run.bits()


def resume(path: Path, case: Resharded) -> list[Tensor]:
    run = Run(case.kind, cut=case.cut[1], **dict(case.then))
    disturb(run.model)
    run.load(path)
    assert run.step == run.model.counted == run.scheduler.last_epoch == case.at
    assert run.model.head.weight is run.model.embedding.weight
    run.train(6)
    return run.bits()


OTHER = (("cost", "matmul"), ("bucket_cap_mb", 1e-4))
PACKED = (("parameters_as_bucket_view", False),)
RESHARDED = {
    "whole": Resharded(1, 3),
    "packed": Resharded(2, 2, "momentum", then=PACKED),
    "other buckets": Resharded(3, 2, "Adafactor", then=OTHER),
    "cut to other cuts": Resharded(2, 4, cut=(True, True)),
    "cut to whole": Resharded(4, 1, "momentum", cut=(True, False)),
    "whole to cut": Resharded(1, 4, "momentum", cut=(False, True)),
    "new to cut": Resharded(2, 2, at=0, cut=(False, True)),
}


@pytest.mark.parametrize("case", RESHARDED.values(), ids=RESHARDED)
def test_a_run_saved_on_some_ranks_goes_on_bit_for_bit_on_others(
    pool: Pool, tmp_path: Path, case: Resharded
) -> None:
    expected, *others = pool.run(case.first, save_and_go_on, tmp_path / "one", case)
    for other in [*others, *pool.run(case.second, resume, tmp_path / "one", case)]:
        assert_same_bits(other, expected)


def masters_and_averages(path: Path, load: bool, cut: bool) -> list[Tensor]:
    torch.set_default_dtype(torch.bfloat16)
    run = Run(cut=cut, master_dtype=torch.float32, ema_decay=0.5)
    if load:
        disturb(run.model)
        run.load(path)
    else:
        run.train(3)
        run.save(path)
    run.train(5)
    bits = run.bits()
    with run.optimizer.averaged_weights():
        for go in (run.save, run.load):  # the averages would be taken for the weights
            with pytest.raises(RuntimeError, match="leave averaged_weights"):
                go(path)
        checkpoint.save(path.parent / "averaged", model=run.model)
        return bits + run.bits()


@pytest.mark.parametrize("cut", [False, True])
def test_masters_and_averages_travel_along(pool: Pool, tmp_path: Path, cut: bool) -> None:
    expected = pool.run(2, masters_and_averages, tmp_path / "one", False, cut)
    for got in pool.run(3, masters_and_averages, tmp_path / "one", True, False):
        assert_same_bits(got, expected[0])


def draws() -> list[float]:
    return [random.random(), float(np.random.rand()), float(torch.rand(()))]


@on_ranks(2)
def test_random_state_of_each_rank_and_the_scaler_come_back(tmp_path: Path) -> None:
    path = tmp_path / "one"
    rank = dist.get_rank()
    random.seed(rank)
    np.random.seed(rank)
    torch.manual_seed(rank)
    random.gauss(0, 1)  # leaves half a pair behind
    run = Run()
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    scaler.scale(torch.ones(()))
    scaler.update(32.0)
    checkpoint.save(path, optimizer=run.optimizer, model=run.model, scaler=scaler)
    expected = draws()
    draws()
    other = torch.amp.GradScaler("cpu")
    assert checkpoint.load(path, optimizer=run.optimizer, model=run.model, scaler=other) is None
    assert draws() == expected
    assert other.state_dict() == scaler.state_dict()
    before = draws()
    checkpoint.load(path, model=run.model, random=False)
    assert draws() != before


EXTRA = {
    "position": (3, 2**70, -1.5, float("inf"), None, True, "x/y", b"\0\xff", 1 + 2j, torch.bfloat16),
    "nested": [{1: "int key", "1": "str key"}, {"a/b": torch.arange(3), "a": {"b": torch.zeros(2, 0)}}],
    "array": np.arange(4, dtype=np.uint16),
    "sparse": torch.eye(3).to_sparse(),
    "strided": torch.arange(6.0).view(2, 3).t(),
    "device": torch.device("cpu"),
}


@on_ranks(2)
def test_extra_values_of_any_plain_kind_come_back(tmp_path: Path) -> None:
    checkpoint.save(tmp_path / "one", extra=EXTRA)
    got = checkpoint.load(tmp_path / "one")
    for key in ("position", "device"):
        assert got[key] == EXTRA[key]
    assert got["nested"][0] == EXTRA["nested"][0]  # type: ignore[index]
    assert torch.equal(got["nested"][1]["a/b"], torch.arange(3))
    assert got["nested"][1]["a"]["b"].shape == (2, 0)
    assert (got["array"].dtype, got["array"].tolist()) == (np.uint16, [0, 1, 2, 3])
    assert torch.equal(got["sparse"].to_dense(), torch.eye(3))
    assert got["strided"].stride() == (1, 3)
    assert torch.equal(got["strided"], EXTRA["strided"])  # type: ignore[arg-type]


@on_ranks(2)
def test_order_and_grouping_of_parameters_may_change(tmp_path: Path) -> None:
    path = tmp_path / "one"
    model = Net()
    named = [(name, param) for name, param in model.named_parameters() if param.requires_grad]
    groups = [{"params": named[:2], "lr": 0.1}, {"params": named[2:], "lr": 0.2, "weight_decay": 0.5}]
    one = ZeroRedundancyOptimizer(groups, torch.optim.AdamW, betas=(0.5, 0.6))
    for step in range(2):
        set_grads(list(model.parameters()), step)
        one.step()
    checkpoint.save(path, model=model, optimizer=one)
    other = Net()
    params = dict(reversed([pair for pair in other.named_parameters() if pair[1].requires_grad]))
    last = [params.pop(named[-1][0])]
    two = ZeroRedundancyOptimizer(
        [{"params": last}, {"params": params.values(), "lr": 0.7}], torch.optim.AdamW
    )
    checkpoint.load(path, model=other, optimizer=two)
    assert (two.param_groups[0]["lr"], two.param_groups[0]["weight_decay"]) == (0.2, 0.5)
    assert two.param_groups[1]["lr"] == 0.7  # the saved groups of its members disagree
    assert two.param_groups[1]["betas"] == (0.5, 0.6)
    assert two.param_groups[1]["weight_decay"] == 0.01
    by_name = dict(model.named_parameters())
    ones, twos = set(one.owned_parameters()), set(two.owned_parameters())
    state = {name: one.state[param] for name, param in by_name.items() if param in ones}
    for name, param in other.named_parameters():
        assert torch.equal(param, by_name[name])
        if name in state and param in twos:
            assert torch.equal(two.state[param]["exp_avg"], state[name]["exp_avg"])


@on_ranks(2)
def test_what_does_not_fit_is_named_on_every_rank_and_changes_nothing(tmp_path: Path) -> None:
    path = tmp_path / "one"
    run = Run()
    run.train(1)
    run.save(path)
    other = Run()
    other.model.conv = nn.Conv2d(3, 5, 3)
    other.model.extra = nn.Linear(2, 2)
    other.optimizer = ZeroRedundancyOptimizer(other.model.parameters(), torch.optim.AdamW)
    before = other.bits()
    with pytest.raises(StateMismatchError) as caught:
        checkpoint.load(path, model=other.model, optimizer=other.optimizer)
    for part in (
        "conv.weight (32, 3, 3, 3) and (5, 3, 3, 3)",
        "conv.bias (32,) and (5,)",
        "as for a larger vocabulary, write weights and state to files with zero-optim consol",
        "model entries that the checkpoint lacks (2): extra.weight, extra.bias",
        "parameters that the checkpoint lacks (2): extra.weight, extra.bias",
    ):
        assert part in str(caught.value)
    assert_same_bits(other.bits(), before)
    with pytest.raises(StateMismatchError, match=r"no scaler; it has extra, model, optimizer, scheduler"):
        checkpoint.load(path, scaler=torch.amp.GradScaler("cpu"))
    with pytest.raises(StateMismatchError, match="give the model as well"):
        checkpoint.load(path, optimizer=run.optimizer)
    run.load(path)
    run.train(2)


class WithInt8(torch.optim.SGD):
    """Keeps state of a dtype that torch.optim would cast as it loads, a global entry, and numbers."""

    def step(self, closure: Any = None) -> Any:
        self.state["count"] = self.state.get("count", 0) + 1
        for group in self.param_groups:
            for p in group["params"]:
                code = self.state[p].get("code", torch.zeros(p.shape, dtype=torch.int8))
                self.state[p] = {"code": code + 1, "steps": self.state[p].get("steps", 0) + 1, "none": None}
        return super().step(closure)


@on_ranks(2)
def test_state_keeps_its_dtypes_and_global_entries(tmp_path: Path) -> None:
    path = tmp_path / "one"
    runs = []
    for _ in range(2):
        run = Run()
        run.optimizer = ZeroRedundancyOptimizer(
            run.model.parameters(), WithInt8, lr=0.1, assume_separable=True
        )
        run.scheduler = torch.optim.lr_scheduler.StepLR(run.optimizer, 1)
        runs.append(run)
    one, two = runs
    one.train(3)
    checkpoint.save(path, model=one.model, optimizer=one.optimizer)
    checkpoint.load(path, model=two.model, optimizer=two.optimizer)
    assert two.optimizer.state["count"] == 3
    for p in two.optimizer.owned_parameters():
        entries = two.optimizer.state[p]
        assert entries["code"].dtype == torch.int8
        assert entries["code"].unique().tolist() == [3]
        assert (entries["steps"], entries["none"]) == (3, None)


@on_ranks(2)
def test_a_save_in_the_background_is_a_snapshot(tmp_path: Path) -> None:
    run = Run(cut=True)
    run.train(2)
    expected = run.bits()
    pending = checkpoint.save_async(tmp_path / "a", **run.parts(), extra={"step": 2})
    run.train(5)  # goes on, on the default group, while the save communicates on its own
    second = checkpoint.save_async(tmp_path / "b", **run.parts(), extra={"step": 5})
    assert pending.done()  # one at a time
    later = run.bits()
    second.wait()
    for name, bits, step in (("a", expected, 2), ("b", later, 5)):
        other = Run(cut=True)
        other.load(tmp_path / name)
        assert other.step == step
        assert_same_bits(other.bits(), bits)
    assert checkpoint.latest(tmp_path) == tmp_path / "b"


def read_nbytes() -> int:
    """Bytes this process has read so far, by the kernel's count."""
    return int(Path("/proc/self/io").read_text().split()[1])


@on_ranks(2, slow=4)
def test_a_rank_reads_its_own_shard_and_little_more(tmp_path: Path) -> None:
    path = tmp_path / "one"
    model = nn.Sequential(*(nn.Linear(256, 512) for _ in range(12)))
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW)
    set_grads(list(model.parameters()), 0)
    optimizer.step()
    checkpoint.save(path, model=model, optimizer=optimizer)
    own = optimizer.state_nbytes() + sum(p.nbytes for p in optimizer.owned_parameters())
    checkpoint.load(path, model=model, optimizer=optimizer)  # imports, connections
    before = read_nbytes()
    checkpoint.load(path, model=model, optimizer=optimizer)
    assert own <= read_nbytes() - before <= 1.1 * own


@on_ranks(2)
def test_state_of_another_class_is_refused_and_that_of_other_options_is_not(tmp_path: Path) -> None:
    def build(optimizer_class: Any, **options: Any) -> dict[str, Any]:
        model = nn.Linear(4, 4)
        return {
            "model": model,
            "optimizer": ZeroRedundancyOptimizer(model.parameters(), optimizer_class, **options),
        }

    for number, (saved, here, text) in enumerate(
        [
            (
                (torch.optim.AdamW, {}),
                (torch.optim.SGD, {"lr": 0.1}),
                "exp_avg, exp_avg_sq, which SGD has not",
            ),
            ((torch.optim.AdamW, {"amsgrad": True}), (torch.optim.Adam, {}), None),
        ]
    ):
        parts, other = build(saved[0], **saved[1]), build(here[0], **here[1])
        set_grads(list(parts["model"].parameters()), 0)
        parts["optimizer"].step()
        checkpoint.save(tmp_path / str(number), **parts)
        with nullcontext() if text is None else pytest.raises(StateMismatchError, match=text):
            checkpoint.load(tmp_path / str(number), **other)
