"""Every hook on PyTorch's DDP: it registers, it trains, and it does what PyTorch's hook of that name does."""

import inspect
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import (
    default_hooks,
    post_localSGD_hook,
    powerSGD_hook,
    quantization_hooks,
)
from torch.nn.parallel import DistributedDataParallel

from pool import Ranks
from zero_optim import ZeroRedundancyOptimizer, hooks
from zero_optim.hooks import power_sgd
from zero_optim.hooks.quantize import dequantize, quantize


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


TRAINED = (
    ("allreduce", {}),
    ("fp16", {}),
    ("bf16", {}),
    ("quantize_tensor", {}),
    ("quantize_channel", {"group_size": 64}),
    ("power_sgd", {"rank": 2, "min_rate": 1.0}),
    ("power_sgd", {"rank": 2, "min_rate": 1.0, "wrap": "bf16", "log": True}),
    ("power_sgd", {"rank": 1, "start": 3, "error_feedback": False, "warm_start": False, "epsilon": 1e-8}),
    ("batched_power_sgd", {"rank": 1}),
    ("top_k", {"ratio": 0.1}),
    ("top_k", {"ratio": 0.2, "wrap": "fp16"}),
)


def check_training(as_views: bool) -> dict[str, tuple[float, float]]:
    losses = {}
    for name, options in TRAINED:
        state, hook = hooks.make_hook(name, **options)  # type: ignore[arg-type]
        model = ddp(state, hook, gradient_as_bucket_view=as_views)
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
        losses[f"{name} {options}"] = (sum(trace[:5]) / 5, sum(trace[-5:]) / 5)
    return losses


@pytest.mark.parametrize("as_views", [False, True], ids=["copies", "views"])
def test_every_hook_trains(ranks2: Ranks, as_views: bool) -> None:
    for losses in ranks2.run(check_training, as_views):
        for name, (first, last) in losses.items():
            assert last < 0.6 * first, (name, first, last)


def check_same_bits() -> None:
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


def renamed(hook: Any) -> Any:
    """PyTorch's bfloat16 hook, out of sight of the check that refuses it without CUDA."""

    def other(state: object, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        result: torch.futures.Future[torch.Tensor] = hook(state, bucket)
        return result

    return other


def test_hooks_give_the_same_bits_as_those_of_pytorch(ranks2: Ranks) -> None:
    ranks2.run(check_same_bits)


# PyTorch's quantization hooks need NCCL: they misread what gloo's futures hold. Their arithmetic is compared.
@pytest.mark.filterwarnings("ignore:.*torch.ao.quantization", "ignore:Please use quant_min and quant_max")
def test_quantization_gives_the_same_bits_as_that_of_pytorch() -> None:
    values = torch.randn(6, 512, generator=torch.Generator().manual_seed(0))
    values[1].abs_()
    values[2].abs_().neg_()
    values[3, 100:] = 0
    header, codes = quantize(values)
    observer = torch.ao.quantization.PerChannelMinMaxObserver()  # type: ignore[no-untyped-call]
    observer(values)
    scale, zero_point = observer.calculate_qparams()  # type: ignore[no-untyped-call]
    assert torch.equal(header, torch.stack([scale, zero_point.float()], dim=1))
    theirs = quantization_hooks._quantize_per_channel_backend(values, scale, zero_point.float())
    assert torch.equal(codes, theirs)
    restored = quantization_hooks._dequantize_per_channel_backend(theirs, scale, zero_point.float())
    assert torch.equal(dequantize(header, codes), restored)


def check_local_sgd_parity() -> None:
    singles = [dist.new_group([rank]) for rank in range(dist.get_world_size())]
    mine = singles[dist.get_rank()]
    for averaging in (True, False):
        a = ddp(hooks.PostLocalSGDState(None, mine, 2, averaging), hooks.post_localSGD_hook)
        state = post_localSGD_hook.PostLocalSGDState(dist.group.WORLD, mine, 2, averaging)
        b = ddp(state, post_localSGD_hook.post_localSGD_hook)
        for step in range(4):
            assert same(grads_after(a, step), grads_after(b, step)), step


def test_post_local_sgd_gives_the_same_bits_as_that_of_pytorch(ranks2: Ranks) -> None:
    ranks2.run(check_local_sgd_parity)


def check_power_sgd_parity(rank: int, feedback: bool) -> float:
    """From the same random Q, which PyTorch draws when compression starts; one bucket."""
    options: dict[str, Any] = {
        "matrix_approximation_rank": rank,
        "start_powerSGD_iter": 2,
        "min_compression_rate": 1.0,
        "use_error_feedback": feedback,
    }
    theirs = powerSGD_hook.PowerSGDState(None, **options)
    ours = hooks.PowerSGDState(None, **options)
    splits = []

    def spying(state: hooks.PowerSGDState, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        places, numel = state.register.places(bucket), bucket.buffer().numel()
        splits.append(power_sgd._by_parameter(state, places, numel))
        return hooks.powerSGD_hook(state, bucket)

    a = ddp(ours, spying, cap=25)
    b = ddp(theirs, powerSGD_hook.powerSGD_hook, cap=25)
    worst = 0.0
    for step in range(6):
        if step == 2:
            torch.manual_seed(np.random.RandomState(0).randint(1_000_000_000))
            for family in splits[-1].blocks:
                stack = torch.randn(len(family), family[0].columns, family[0].rank)
                for block, query in zip(family, stack, strict=True):
                    ours.queries[block.key] = query
        mine, other = grads_after(a, step), grads_after(b, step)
        if step < 2:
            assert same(mine, other)
        worst = max(worst, *(float((x - y).abs().max()) for x, y in zip(mine, other, strict=True)))
    assert ours.compression_stats() == theirs.compression_stats()
    return worst


@pytest.mark.parametrize(
    ("rank", "feedback", "tolerance"),
    [
        (4, False, 0.0),  # the same QR of the same sums
        (2, False, 1e-5),  # PyTorch uses Gram-Schmidt at ranks 1 and 2
        (4, True, 1e-5),  # the errors of single ranks differ, see the docs; their mean does not
    ],
)
def test_power_sgd_agrees_with_that_of_pytorch(
    ranks2: Ranks, rank: int, feedback: bool, tolerance: float
) -> None:
    for worst in ranks2.run(check_power_sgd_parity, rank, feedback):
        assert worst <= tolerance


def test_hooks_have_the_signature_that_ddp_asks_for() -> None:
    assert (
        hooks.bf16_compress_hook.__name__ != "bf16_compress_hook"
    )  # which PyTorch's DDP refuses without NCCL
    for name in hooks.hook_names():
        if name == "post_local_sgd":
            continue
        for options in ({}, {"wrap": "fp16"}, {"wrap": "bf16"}, {"log": True}):
            _, hook = hooks.make_hook(name, **options)  # type: ignore[arg-type]
            signature = inspect.signature(hook)
            assert signature.parameters["bucket"].annotation is dist.GradBucket
            assert signature.return_annotation == torch.futures.Future[torch.Tensor]
            assert hook.__name__ not in ("bf16_compress_hook", "bf16_compress_wrapper_hook")
            assert isinstance(hook.__qualname__, str)
