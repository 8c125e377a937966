"""Every hook on PyTorch's DDP: it registers, it trains, and it does what PyTorch's hook of that name does."""

import inspect
from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel

from pool import Ranks, on_ranks
from zero_optim import ZeroRedundancyOptimizer, hooks


def make_model() -> nn.Module:
    torch.manual_seed(5)
    return nn.Sequential(nn.Linear(12, 24), nn.Tanh(), nn.Linear(24, 16), nn.Tanh(), nn.Linear(16, 4))


def loss_of(model: nn.Module, step: int) -> Tensor:
    generator = torch.Generator().manual_seed(10 * step + dist.get_rank())
    inputs = torch.randn(16, 12, generator=generator)
    loss: Tensor = (model(inputs) - inputs[:, :4]).square().mean()
    return loss


def ddp(state: object, hook: Any, cap: float = 0.001, **options: Any) -> DistributedDataParallel:
    model = DistributedDataParallel(make_model(), bucket_cap_mb=cap, **options)
    model.register_comm_hook(state, hook)
    return model


def grads_after(model: DistributedDataParallel, step: int) -> list[Tensor]:
    model.zero_grad()
    loss_of(model, step).backward()
    return [param.grad.clone() for param in model.parameters() if param.grad is not None]


def same(a: Sequence[Tensor], b: Sequence[Tensor]) -> bool:
    return len(a) == len(b) > 0 and all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


TRAINED = {
    "allreduce": hooks.allreduce_hook,
    "fp16": hooks.fp16_compress_hook,
    "bf16": hooks.bf16_compress_hook,
    "in fp16": hooks.fp16_compress_wrapper(hooks.allreduce_hook),
    "in bf16": hooks.bf16_compress_wrapper(hooks.allreduce_hook),
}


def check_training(as_views: bool) -> dict[str, tuple[float, float]]:
    losses = {}
    for name, hook in TRAINED.items():
        model = ddp(None, hook, gradient_as_bucket_view=as_views)
        optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.Adam, lr=0.01)
        trace = []
        for step in range(40):
            optimizer.zero_grad(set_to_none=not as_views)
            loss = loss_of(model, step)
            loss.backward()
            optimizer.step()
            trace.append(float(loss.detach()))
        for param in model.parameters():  # the same on every rank
            other = param.detach().clone()
            dist.broadcast(other, 0)
            assert torch.equal(other, param), name
        losses[name] = (sum(trace[:5]) / 5, sum(trace[-5:]) / 5)
    return losses


@pytest.mark.parametrize("as_views", [False, True], ids=["copies", "views"])
def test_every_hook_trains(ranks2: Ranks, as_views: bool) -> None:
    for losses in ranks2.run(check_training, as_views):
        for name, (first, last) in losses.items():
            assert last < 0.6 * first, (name, first, last)


def renamed(hook: Any) -> Any:
    """PyTorch's bfloat16 hook, out of sight of the check that refuses it without CUDA."""

    def other(state: object, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        result: torch.futures.Future[torch.Tensor] = hook(state, bucket)
        return result

    return other


@on_ranks(2)
def test_hooks_give_the_same_bits_as_those_of_pytorch() -> None:
    pairs = (
        (hooks.allreduce_hook, default_hooks.allreduce_hook),
        (hooks.fp16_compress_hook, default_hooks.fp16_compress_hook),
        (
            hooks.fp16_compress_wrapper(hooks.allreduce_hook),
            default_hooks.fp16_compress_wrapper(default_hooks.allreduce_hook),
        ),
        (hooks.bf16_compress_hook, renamed(default_hooks.bf16_compress_hook)),
        (
            hooks.bf16_compress_wrapper(hooks.allreduce_hook),
            renamed(default_hooks.bf16_compress_wrapper(default_hooks.allreduce_hook)),
        ),
    )
    for ours, theirs in pairs:
        a, b = ddp(None, ours), ddp(None, theirs)
        for step in range(3):
            assert same(grads_after(a, step), grads_after(b, step)), (ours, step)
    plain, ours_plain = DistributedDataParallel(make_model()), ddp(None, hooks.allreduce_hook)
    assert same(grads_after(ours_plain, 0), grads_after(plain, 0))


def test_hooks_have_the_signature_that_ddp_asks_for() -> None:
    assert (
        hooks.bf16_compress_hook.__name__ != "bf16_compress_hook"
    )  # which PyTorch's DDP refuses without NCCL
    for hook in TRAINED.values():
        signature = inspect.signature(hook)
        assert signature.parameters["bucket"].annotation is dist.GradBucket
        assert signature.return_annotation == torch.futures.Future[torch.Tensor]
        assert hook.__name__ not in ("bf16_compress_hook", "bf16_compress_wrapper_hook")
        assert isinstance(hook.__qualname__, str)
