"""timm: its optimizer factory and the calls of its training loop, beside DDP and the plain optimizer."""

import sys
import types
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
from classes import module_named
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from frameworks import Net, assert_same, samples, whole
from pool import on_ranks
from zero_optim import ZeroRedundancyOptimizer
from zero_optim.ddp import FullyShardedDataParallel, ShardedDataParallel


def timm_modules() -> Any:
    """Import parts of timm without its models, which need a torchvision built for this PyTorch."""
    optim = module_named("timm.optim")
    if "timm.utils" not in sys.modules:
        sys.modules["timm.utils"] = types.ModuleType("timm.utils")
        folders = sys.modules["timm"].__path__
        sys.modules["timm.utils"].__path__ = [str(Path(folder, "utils")) for folder in folders]
    return optim, import_module("timm.utils.cuda"), import_module("timm.scheduler.cosine_lr")


def trained(stage: int, opt: str, clips: bool) -> dict[str, torch.Tensor]:
    """Train with the calls of timm's train.py; stage 0 is as timm has it."""
    optim, utils, scheduler = timm_modules()
    model: nn.Module = Net()
    if not stage:
        wrapped = DistributedDataParallel(model)
        optimizer: Any = optim.create_optimizer_v2(model, opt, lr=1e-2, weight_decay=0.05)
    else:
        groups = optim.param_groups_weight_decay(model, 0.05)
        optimizer = ZeroRedundancyOptimizer(groups, partial(optim.create_optimizer_v2, opt=opt), lr=1e-2)
        wrap = {1: lambda model, _: DistributedDataParallel(model), 2: ShardedDataParallel}
        wrapped = wrap.get(stage, FullyShardedDataParallel)(model, optimizer)
    schedule = scheduler.CosineLRScheduler(optimizer, t_initial=4, warmup_t=1, t_in_epochs=False)
    scaler = utils.NativeScaler(device="cpu")
    inputs, targets = (part.chunk(6) for part in samples())
    for number in range(6):
        rank = torch.distributed.get_rank()
        at, last = (number + rank) % 6, number % 2 == 1
        loss = nn.functional.mse_loss(wrapped(inputs[at]), targets[at]) / 2
        if stage < 2:
            clip = {"clip_grad": 0.1, "parameters": model.parameters()} if clips else {}
            scaler(loss, optimizer, need_update=last, **clip)
        else:
            scaler(loss, optimizer, need_update=False)
            if last:
                if clips:
                    scaler._scaler.unscale_(optimizer)
                    optimizer.clip_grad_norm_(0.1)
                scaler._scaler.step(optimizer)
                scaler._scaler.update()
        if last:
            optimizer.zero_grad()
            schedule.step_update(num_updates=number)
    return whole(wrapped.module)


@on_ranks(2)
@pytest.mark.parametrize("opt", ["adamw", "sgd", "lion", "adopt"])
def test_the_factory_and_the_scaler_of_timm_train_at_stage_1_with_equal_bits(opt: str) -> None:
    assert_same(trained(1, opt, clips=True), trained(0, opt, clips=True))


@on_ranks(2)
@pytest.mark.parametrize("clips", [True, False])
@pytest.mark.parametrize("stage", [2, 3])
def test_stages_2_and_3_train_with_its_scaler(stage: int, clips: bool) -> None:
    assert_same(trained(stage, "adamw", clips), trained(0, "adamw", clips), to_the_bit=False)
