"""What DeepSpeed and FairScale save comes in, and training goes on with their bits; OSS loads ours."""

from argparse import Namespace
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import AdamW

from frameworks import as_torchrun_says
from pool import on_ranks
from test_checkpoint import once
from training import assert_same_bits
from zero_optim import ZeroRedundancyOptimizer, checkpoint, cli
from zero_optim.checkpoint import manifest, offline


class Net(nn.Module):
    """Parameters of several sizes, one of which does not train, and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.norm, self.last = nn.Linear(5, 3), nn.LayerNorm(3), nn.Linear(3, 7)
        self.first.bias.requires_grad_(False)
        self.register_buffer("scale", torch.ones(2))

    def forward(self, x: Tensor) -> Any:
        return self.last(self.norm(self.first(x))).float().square().sum()


def groups_of(model: nn.Module, one: bool = False) -> list[dict[str, Any]]:
    params = [param for param in model.parameters() if param.requires_grad]
    if one:
        return [{"params": params}]
    matrices = [param for param in params if param.ndim > 1]
    return [{"params": matrices}, {"params": [p for p in params if p.ndim == 1], "weight_decay": 0.0}]


def batch(step: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(4, 5, generator=torch.Generator().manual_seed(step)).to(dtype)


def engine_of(stage: int, dtype: torch.dtype, one: bool) -> Any:
    deepspeed: Any = import_module("deepspeed")
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # or it compiles for a minute
    config = {"train_micro_batch_size_per_gpu": 4, "zero_allow_untested_optimizer": True}
    config |= {
        "gradient_clipping": 0.0,
        "zero_force_ds_cpu_optimizer": False,
        "zero_optimization": {"stage": stage},
    }
    config |= {"bf16": {"enabled": dtype == torch.bfloat16}}
    model = Net()
    optimizer = AdamW(groups_of(model, one), lr=0.01)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
    return engine


def train_engine(engine: Any, dtype: torch.dtype, steps: range) -> list[Tensor]:
    for step in steps:
        engine.backward(engine(batch(step, dtype)))
        engine.step()
    params = list(engine.module.parameters())
    with import_module("deepspeed").zero.GatheredParameters(params):
        return [param.detach().clone() for param in params]


def train_ours(model: Any, optimizer: Any, dtype: torch.dtype, steps: range) -> list[Tensor]:
    for step in steps:
        model(batch(step, dtype)).backward()
        optimizer.step()
        optimizer.zero_grad()
    return [param.detach() for param in model.parameters()]


def to_universal(source: Path, out: Path) -> None:
    """What DeepSpeed's own script does, in this process."""
    module = import_module("deepspeed.checkpoint.ds_to_universal")
    flags = {"keep_temp_folder": False, "strict": True, "inject_missing_state": True}
    workers = {"num_extract_workers": 1, "num_merge_workers": 1}
    module.main(Namespace(input_folder=str(source), output_folder=str(out), **flags, **workers))


def checksums(path: Path) -> dict[str, list[int]]:
    entries = manifest.read(path).entries
    return {key: [chunk.crc32 for chunk in entry.chunks] for key, entry in entries.items()}


# Processes of its own, as DeepSpeed keeps groups of former ones.
@on_ranks(2, forked=True, timeout=500)
def test_checkpoints_of_deepspeed_come_in(tmp_path: Path) -> None:
    with as_torchrun_says():  # in one process group, which DeepSpeed keeps
        for stage, one in ((1, False), (2, False), (3, False), (3, True)):
            for dtype in (torch.float32, torch.bfloat16):
                comes_in(tmp_path / f"{stage}-{one}-{dtype}", stage, dtype, one)


def comes_in(path: Path, stage: int, dtype: torch.dtype, one: bool) -> None:
    engine = engine_of(stage, dtype, one)
    train_engine(engine, dtype, range(3))
    engine.save_checkpoint(str(path / "theirs"), client_state={"epoch": 4})

    def convert() -> None:
        args = ["convert", str(path / "theirs"), str(path / "ours"), "--to", "zero-optim"]
        assert cli.main(args) == 0
        to_universal(path / "theirs" / "global_step3", path / "universal")
        offline.convert(path / "universal", path / "of-universal", "zero-optim")
        assert checksums(path / "of-universal") == checksums(path / "ours")

    once(convert)
    model = Net().to(dtype)
    master = torch.float32 if dtype == torch.bfloat16 else None
    optimizer = ZeroRedundancyOptimizer(groups_of(model, one), AdamW, lr=0.5, master_dtype=master)
    extra = checkpoint.load(path / "ours", model=model, optimizer=optimizer)
    assert (extra["epoch"], extra["global_steps"]) == (4, 3)
    expected = train_engine(engine, dtype, range(3, 5))
    assert_same_bits(train_ours(model, optimizer, dtype, range(3, 5)), expected)


@on_ranks(2)
def test_oss_loads_what_is_converted_and_what_it_saves_comes_in(tmp_path: Path) -> None:
    oss: Any = import_module("fairscale.optim").OSS
    model = Net()
    theirs = oss(groups_of(model), AdamW, lr=0.01)
    train_ours(model, theirs, torch.float32, range(2))
    theirs.consolidate_state_dict(recipient_rank=0)

    def come_in() -> None:
        torch.save({"model": model.state_dict(), "optimizer": theirs.state_dict()}, tmp_path / "theirs.pt")
        offline.convert(tmp_path / "theirs.pt", tmp_path / "ours", "zero-optim")
        offline.convert(tmp_path / "ours", tmp_path / "back.pt", "torch")

    once(come_in)
    other = Net()
    own = ZeroRedundancyOptimizer(groups_of(other), AdamW, lr=0.5)
    checkpoint.load(tmp_path / "ours", model=other, optimizer=own)
    back = Net()
    again = oss(groups_of(back), AdamW, lr=0.5)
    content = torch.load(tmp_path / "back.pt", weights_only=True)
    back.load_state_dict(content["model"])
    again.load_state_dict(content["optimizer"])
    expected = train_ours(model, theirs, torch.float32, range(2, 4))
    assert_same_bits(train_ours(other, own, torch.float32, range(2, 4)), expected)
    assert_same_bits(train_ours(back, again, torch.float32, range(2, 4)), expected)
