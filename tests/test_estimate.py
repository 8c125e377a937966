"""What `zero_optim.estimate` computes is what ranks take: equal at rest, and close at the peak."""

import gc
import json
import sys
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from optimizer_cases import BITWISE, CASES
from parity_models import MODELS
from pool import Pool, on_ranks
from test_sharded_memory import LivingStorages
from training import params_of
from zero_optim import ZeroRedundancyOptimizer, cli
from zero_optim.ddp import DistributedDataParallel, FullyShardedDataParallel, ShardedDataParallel
from zero_optim.estimate import estimate

AdamW = torch.optim.AdamW
ALL = partial(pytest.param, marks=pytest.mark.exhaustive)
NBYTES = ("parameters", "state", "ddp_buckets", "gradients", "rest", "peak")


def stepped(optimizer: ZeroRedundancyOptimizer) -> ZeroRedundancyOptimizer:
    for param in params_of(optimizer):
        param.grad = torch.ones_like(param) if param.requires_grad else None
    optimizer.step()
    return optimizer


@on_ranks(2)
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("master", [None, torch.float64])
def test_state_and_parameters_are_those_counted_on_each_rank(name: str, master: torch.dtype | None) -> None:
    torch.manual_seed(0)
    model = MODELS[name]()
    told = estimate(model, AdamW, 2, 1, master_dtype=master)[dist.get_rank()]
    rows = estimate(model, AdamW, 2, 3)[dist.get_rank()]
    optimizer = stepped(ZeroRedundancyOptimizer(model.parameters(), AdamW, master_dtype=master))
    assert told.state == optimizer.state_nbytes()
    assert told.parameters == sum(bucket.nbytes for bucket in optimizer.core.engine.buckets)
    if master is None and name != "sparse":
        model = MODELS[name]()
        wrapped = FullyShardedDataParallel(model, ZeroRedundancyOptimizer(model.parameters(), AdamW))
        buckets = [bucket for unit in wrapped.units.units for bucket in unit.buckets]
        own = [bucket.values.row for bucket in buckets]
        assert rows.parameters == sum((row.span.stop - row.span.start) * row.values.itemsize for row in own)


class Layers(nn.Sequential):
    def __init__(self, bias: bool = True) -> None:
        super().__init__(nn.Linear(96, 160, bias), nn.Linear(160, 32, bias), nn.Linear(32, 32, bias=False))


QUICK = ("torch.optim.Adafactor", "torch.optim.SGD", "torch_optimizer.Lamb", "torch_optimizer.Shampoo")
CLASSES = [
    pytest.param(name, marks=() if name in QUICK else pytest.mark.slow)
    for name in BITWISE
    if name != "torch.optim.SparseAdam"  # takes sparse gradients alone
]


@on_ranks(2)
@pytest.mark.parametrize("name", CLASSES)
def test_state_is_that_of_the_class(name: str) -> None:
    torch.manual_seed(0)
    case = CASES[name]
    for options in case.options:
        model = Layers(bias="Muon" not in name)
        told = estimate(model, case.optimizer_class, 2, **options)[dist.get_rank()]
        known: dict[str, Any] = {"allow_unsaved": True, **options}
        optimizer = ZeroRedundancyOptimizer(model.parameters(), case.optimizer_class, **known)
        assert told.state == stepped(optimizer).state_nbytes()


class Deep(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(*(nn.Linear(256, 256) for _ in range(24)))


class Nested(nn.Module):
    """Blocks with units inside of each other, an embedding and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.head = nn.Embedding(512, 128), nn.Linear(128, 512)
        self.blocks = nn.Sequential(
            *(
                nn.Sequential(nn.LayerNorm(128), nn.Linear(128, 512), nn.ReLU(), nn.Linear(512, 128))
                for _ in range(8)
            )
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.blocks(self.tokens(x[:, :2].long())))


def peak_of(stage: int, kind: type[nn.Module], options: dict[str, Any]) -> int:
    """The most that lives in a training step, in bytes."""
    cap = {"bucket_cap_mb": 0.5}
    with LivingStorages(()) as living:
        model = kind()
        optimizer = ZeroRedundancyOptimizer(model.parameters(), AdamW, **cap)
        wrappers = {1: DistributedDataParallel, 2: ShardedDataParallel, 3: FullyShardedDataParallel}
        wrapped = wrappers[stage](model, *([optimizer] if stage > 1 else []), **options)
        for _ in range(3):
            living.peak = 0
            wrapped(torch.ones(1, 256)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            gc.collect()
    return living.peak


@pytest.mark.slow
@pytest.mark.parametrize("kind", [Deep, Nested])
@pytest.mark.parametrize(("size", "stage"), [(2, 1), (2, 2), (2, 3), ALL(4, 2), ALL(4, 3)])
def test_the_peak_is_within_five_percent_of_what_is_measured(
    pool: Pool, size: int, stage: int, kind: type[nn.Module]
) -> None:
    for view in (False, True) if stage == 1 else (False,):
        options: dict[str, Any] = {"gradient_as_bucket_view": True} if view else {}
        measured = pool.run(size, peak_of, stage, kind, options)
        told = estimate(kind(), AdamW, size, stage, bucket_cap_mb=0.5, **options)
        for rank, peak in enumerate(measured):
            assert abs(told[rank].peak / peak - 1) < 0.05, (told[rank], peak)


def test_ranks_share_what_a_stage_shards_and_an_accelerator_steps_all_at_once() -> None:
    with torch.device("meta"):
        model = nn.Sequential(*(nn.Linear(4096, 4096, bias=False) for _ in range(64)))
    layer = 4 * 4096**2
    of = {stage: estimate(model, AdamW, 8, stage)[0] for stage in range(4)}
    in_layers = {
        stage: [round(getattr(rank, name) / layer) for name in NBYTES[:4]] for stage, rank in of.items()
    }
    assert in_layers == {0: [64, 128, 64, 64], 1: [64, 16, 64, 64], 2: [64, 16, 0, 8], 3: [8, 16, 0, 8]}
    assert estimate(model, AdamW, 8, 1, device="cuda")[0].step == 8 * layer
    assert of[1].step < layer


def test_what_cannot_be_estimated_is_refused() -> None:
    for stage, num_ranks in ((4, 1), (1, 0)):
        with pytest.raises(ValueError, match=r"expected a stage of \(0, 1, 2, 3\) and at least 1 rank"):
            estimate(Layers(), AdamW, num_ranks, stage)
    with pytest.raises(ValueError, match="LBFGS cannot be tried"):
        estimate(Layers(), torch.optim.LBFGS)


def lines_of(capsys: pytest.CaptureFixture[str], *arguments: str) -> list[str]:
    assert cli.main(["estimate", *arguments]) == 0
    return capsys.readouterr().out.splitlines()


def test_the_command_prints_a_table_or_json(capsys: pytest.CaptureFixture[str]) -> None:
    model = "test_estimate:Layers"
    head, columns, *rows = lines_of(capsys, model, "--ranks", "2", "4")
    assert head == "21,696 parameters, AdamW: GiB a rank, without activations"
    assert " ".join(columns.split()) == "stage ranks parameters state ddp buckets gradients rest peak"
    assert [row.split()[:2] for row in rows] == [[stage, ranks] for stage in "0123" for ranks in "24"]
    more = f"{model} --stages 3 --units Linear --optimizer torch.optim:SGD --device cpu --json".split()
    (row,) = json.loads("\n".join(lines_of(capsys, *more, "--options", '{"momentum": 0.9}')))
    told = max(
        estimate(Layers(), torch.optim.SGD, 8, 3, units=[nn.Linear], momentum=0.9), key=lambda rank: rank.peak
    )
    assert row == {"stage": 3, "ranks": 8, **{name: getattr(told, name) for name in NBYTES}}


def test_the_command_takes_a_config_of_transformers(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    class Auto:
        @staticmethod
        def from_pretrained(path: str) -> Any:
            return json.loads(Path(path).read_text())

        @staticmethod
        def from_config(config: Any) -> nn.Module:
            return nn.Linear(config["hidden_size"], config["hidden_size"])

    package: Any = ModuleType("transformers")
    package.AutoConfig = package.AutoModelForCausalLM = Auto
    monkeypatch.setitem(sys.modules, "transformers", package)
    (tmp_path / "config.json").write_text('{"hidden_size": 3}')
    assert lines_of(capsys, str(tmp_path / "config.json"))[0].startswith("12 parameters, ")
