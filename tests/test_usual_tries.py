"""What users of PyTorch try first works, or is answered with what to do."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from fully import Block, Tower, adamw
from pool import on_ranks
from training import make_params
from zero_optim import ZeroRedundancyOptimizer, checkpoint
from zero_optim.ddp import FullyShardedDataParallel, ShardedDataParallel


@on_ranks(2)
def test_what_is_no_optimizer_class_is_answered_with_what_to_give() -> None:
    params = make_params()
    built = torch.optim.AdamW(make_params())
    for given, words in (
        ("AdamW", r"a class such as torch\.optim\.AdamW, .* got str: 'AdamW'"),
        (built, r"got an optimizer, AdamW: give the class, AdamW, and its options by name"),
    ):
        wrong: Any = given
        with pytest.raises(TypeError, match=words):
            ZeroRedundancyOptimizer(params, wrong, lr=0.1)
        with pytest.raises(TypeError, match=words):
            ZeroRedundancyOptimizer([{"params": params, "optimizer_class": wrong}], torch.optim.SGD, lr=0.1)
    with pytest.raises(TypeError, match=r"got float \(options are given by name: lr=0\.001\)"):
        ZeroRedundancyOptimizer(params, torch.optim.AdamW, 1e-3)  # type: ignore[arg-type]
    ZeroRedundancyOptimizer(params, torch.optim.AdamW, lr=0.1)


@on_ranks(2)
def test_a_load_before_the_first_save_is_told_that_there_is_none(tmp_path: Path) -> None:
    optimizer = ZeroRedundancyOptimizer(make_params(), torch.optim.SGD, lr=0.1)
    newest: Any = checkpoint.latest(tmp_path)
    assert newest is None
    with pytest.raises(TypeError, match="no complete checkpoint, as before the first save"):
        checkpoint.load(newest, optimizer=optimizer)


@on_ranks(1)
def test_units_are_given_by_class_or_by_a_function() -> None:
    for units in (Block, [Block], {Block}, (Block, nn.LayerNorm)):
        model = Tower()
        wrapped = FullyShardedDataParallel(model, adamw(model), units=units)
        names = [unit.name for unit in wrapped.units.units[1:]]
        assert [name for name in names if not name.endswith("norm")] == ["blocks.0", "blocks.1", "blocks.2"]
        assert ("blocks.1.norm" in names) == (units == (Block, nn.LayerNorm))
    model = Tower()
    wrapped = FullyShardedDataParallel(model, adamw(model), units=lambda module: isinstance(module, Block))
    assert [unit.name for unit in wrapped.units.units[1:]] == ["blocks.0", "blocks.1", "blocks.2"]
    other = Tower()
    with pytest.raises(ValueError, match="no module of the model is a Conv2d, which was given as a unit"):
        FullyShardedDataParallel(other, adamw(other), units=[nn.Conv2d])


FSDPS: dict[str, str] = {
    "auto_wrap_policy": "takes no auto_wrap_policy: give the modules .* as units=",
    "sharding_strategy": "mesh= makes replicas",
    "cpu_offload": 'offload="cpu" keeps what a rank owns on the CPU',
    "mp_policy": "give it as mixed_precision=",
    "sync_module_states": "the values of rank 0",
    "shards": "expected options among accumulate, .*device, .*mesh, .*process_group, .*units, got shards",
}


@on_ranks(1)
def test_options_of_pytorchs_fsdp_are_answered_with_ours() -> None:
    model = Tower()
    optimizer = adamw(model)
    for name, words in FSDPS.items():
        for given in (optimizer, None):
            with pytest.raises(TypeError, match=words):
                FullyShardedDataParallel(model, given, **{name: None})
    with pytest.raises(TypeError, match=r"expected options among accumulate, .*, got auto_wrap_policy"):
        ShardedDataParallel(model, optimizer, auto_wrap_policy=None)


@on_ranks(1)
def test_a_module_that_is_wrapped_already_is_refused() -> None:
    for inner in (nn.parallel.DistributedDataParallel, ShardedDataParallel):
        for outer in (ShardedDataParallel, FullyShardedDataParallel):
            model = Tower()
            optimizer = adamw(model)
            wrapped = inner(model, optimizer) if inner is ShardedDataParallel else inner(model)
            with pytest.raises(ValueError, match=r"wrap what is inside of it, its \.module"):
                outer(nn.Sequential(wrapped), optimizer)
