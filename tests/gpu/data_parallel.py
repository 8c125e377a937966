"""Cases: our `DistributedDataParallel` and hooks beside PyTorch's, bit for bit."""

import copy
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel as TorchDistributedDataParallel
from torch.nn.parallel.distributed import _MixedPrecision
from torch.utils.checkpoint import checkpoint

from ddp_pairs import SMALL_MB, Pair, batch, mlp, mlp_loss
from gpu.setting import Here, need_futures
from training import assert_same_bits
from zero_optim import ZeroRedundancyOptimizer
from zero_optim.ddp import DistributedDataParallel
from zero_optim.hooks import allreduce_hook, bf16_compress_hook, fp16_compress_hook


class Deep(nn.Module):
    """Layers of which one may be left out, and one is computed again in the backward pass."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(7)
        self.tokens = nn.Embedding(11, 8)
        self.norm = nn.LayerNorm(8)
        self.first = nn.Linear(8, 8)
        self.spare = nn.Linear(8, 8)
        self.last = nn.Linear(8, 3)

    def forward(self, x: Tensor, with_spare: bool, again: bool) -> Tensor:
        rows = torch.arange(x.shape[0], device=x.device) * 3 % 11
        hidden = self.norm(x + self.tokens(rows))
        hidden = checkpoint(self.first, hidden, use_reentrant=False) if again else self.first(hidden)
        out: Tensor = self.last(hidden + self.spare(hidden) if with_spare else hidden.tanh())
        return out


def pair(here: Here, module: nn.Module, **options: Any) -> Pair:
    """Both wrappers around copies of a model on the device."""
    if options.pop("names_device", False) and here.is_cuda:
        options["device_ids"] = [here.device.index]
    return Pair.of(module.to(here.device), bucket_cap_mb=SMALL_MB, **options)


def gradients(here: Here, options: dict[str, Any]) -> None:
    """Training with plain SGD; gradients compared after every backward pass."""

    def loss(model: nn.Module, number: int) -> Tensor:
        here.sleep()
        return mlp_loss(model, number)

    pair(here, mlp(), **options).train(loss, 5)


def unused(here: Here, options: dict[str, Any], again: bool) -> None:
    """Parameters that some passes leave out, and activations computed again."""
    varies = options.get("find_unused_parameters", False)

    def loss(model: nn.Module, number: int) -> Tensor:
        x = batch(number, 5, 8).to(here.device)
        out: Tensor = model(x, not varies or number % 2 == 0, again)
        return out.square().mean()

    pair(here, Deep(), **options).train(loss, 5)


def precision(here: Here, param: torch.dtype, reduce: torch.dtype | None, sharded: bool) -> None:
    """``mixed_precision``, against the same arithmetic by hand."""
    from test_ddp_mixed_precision import assert_equal_grads, by_hand

    asked = _MixedPrecision(param, reduce)
    net = mlp().to(here.device)
    twin = copy.deepcopy(net)
    model = DistributedDataParallel(net, mixed_precision=asked, bucket_cap_mb=SMALL_MB)
    one = torch.optim.AdamW(twin.parameters(), lr=0.1)
    other: torch.optim.Optimizer = torch.optim.AdamW(net.parameters(), lr=0.1)
    if sharded:
        other = ZeroRedundancyOptimizer(net.parameters(), torch.optim.AdamW, lr=0.1)
    for number in range(4):
        other.zero_grad(set_to_none=number % 3 != 2)
        mlp_loss(model, number).backward()
        expected = by_hand(twin, number, asked)
        assert_equal_grads(net, expected, number)
        for name, p in twin.named_parameters():
            p.grad = expected[name]
        one.step()
        other.step()
        assert_same_bits(list(net.parameters()), list(twin.parameters()), number)


HOOKS = {"allreduce": allreduce_hook, "bf16": bf16_compress_hook, "fp16": fp16_compress_hook}


def hook_on_both(here: Here, name: str) -> None:
    """A hook of ours gives the same on either DDP."""
    need_futures(here)
    both = pair(here, mlp())
    for model in both:
        model.register_comm_hook(None, HOOKS[name])
    both.train(mlp_loss, 6, name)


def hook_beside_torchs(here: Here, name: str) -> None:
    """A hook of ours, and PyTorch's of the same name, on PyTorch's DDP."""
    need_futures(here)
    from test_hooks_training import renamed

    theirs = {
        "allreduce": default_hooks.allreduce_hook,
        "fp16": default_hooks.fp16_compress_hook,
        "bf16": renamed(default_hooks.bf16_compress_hook),
    }[name]
    net = mlp().to(here.device)
    models = [TorchDistributedDataParallel(copy.deepcopy(net), bucket_cap_mb=SMALL_MB) for _ in range(2)]
    models[0].register_comm_hook(None, HOOKS[name])
    models[1].register_comm_hook(None, theirs)
    for number in range(4):
        grads = []
        for model in models:
            model.zero_grad()
            mlp_loss(model, number).backward()
            grads.append([p.grad for p in model.parameters() if p.grad is not None])
        assert_same_bits(*grads, number)


def sharded_training(here: Here, autocast: bool) -> None:
    """Our DDP and optimizer beside PyTorch's DDP and ``torch.optim``, clipped, perhaps under autocast."""
    theirs_model, model = (
        TorchDistributedDataParallel(mlp().to(here.device), bucket_cap_mb=SMALL_MB),
        DistributedDataParallel(mlp().to(here.device), bucket_cap_mb=SMALL_MB),
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
