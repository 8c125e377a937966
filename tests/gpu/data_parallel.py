"""Cases: our `DistributedDataParallel`, optimizer and hooks beside PyTorch's, bit for bit."""

import copy

import torch
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel as TorchDistributedDataParallel

from ddp_pairs import SMALL_MB, Pair, mlp, mlp_loss
from gpu.setting import Here, need_futures
from training import assert_same_bits
from zero_optim import ZeroRedundancyOptimizer
from zero_optim.ddp import DistributedDataParallel
from zero_optim.hooks import allreduce_hook, bf16_compress_hook, fp16_compress_hook

HOOKS = {
    "allreduce": (allreduce_hook, default_hooks.allreduce_hook),
    "bf16": (bf16_compress_hook, default_hooks.bf16_compress_hook),
    "fp16": (fp16_compress_hook, default_hooks.fp16_compress_hook),
}


def hook(here: Here, name: str) -> None:
    """A hook of ours gives the same on either DDP, and the same as PyTorch's on PyTorch's."""
    need_futures(here)
    from test_ddp_hooks import renamed  # else the check of the CPU refuses bfloat16

    ours, theirs = HOOKS[name]
    net = mlp().to(here.device)
    both = Pair.of(copy.deepcopy(net), bucket_cap_mb=SMALL_MB)
    for model in both:
        model.register_comm_hook(None, ours)
    both.train(mlp_loss, 6, name)
    models = [TorchDistributedDataParallel(copy.deepcopy(net), bucket_cap_mb=SMALL_MB) for _ in range(2)]
    models[0].register_comm_hook(None, ours)
    models[1].register_comm_hook(None, renamed(theirs))
    for number in range(4):
        grads = []
        for model in models:
            model.zero_grad()
            mlp_loss(model, number).backward()
            grads.append([p.grad for p in model.parameters() if p.grad is not None])
        assert_same_bits(*grads, number)


def sharded_training(here: Here, autocast: bool) -> None:
    """Our DDP and optimizer beside PyTorch's DDP and ``torch.optim``, clipped, perhaps under autocast."""
    devices = {"device_ids": [here.device.index]} if here.is_cuda else {}
    theirs_model, model = (
        kind(mlp().to(here.device), bucket_cap_mb=SMALL_MB, **devices)
        for kind in (TorchDistributedDataParallel, DistributedDataParallel)
    )
    plain = torch.optim.AdamW(theirs_model.parameters(), lr=0.05)
    sharded = ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, lr=0.05)
    dtype = torch.float16 if here.is_cuda else torch.bfloat16
    scalers = [torch.amp.GradScaler(here.device.type, init_scale=2.0**8, enabled=autocast) for _ in range(2)]
    for number in range(6):
        for net, optimizer, scaler in ((theirs_model, plain, scalers[0]), (model, sharded, scalers[1])):
            optimizer.zero_grad()
            with torch.autocast(here.device.type, dtype, enabled=autocast):
                loss = mlp_loss(net, number)
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            if optimizer is sharded:
                sharded.clip_grad_norm_(0.5)
            else:
                nn.utils.clip_grad_norm_(net.parameters(), 0.5)
            scaler.step(optimizer)
            scaler.update()
        assert_same_bits(list(model.parameters()), list(theirs_model.parameters()), number)
