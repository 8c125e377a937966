"""Cases: steps taken during the backward pass, with kernels that sleep wherever an order may be missing."""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from gpu.setting import Here, futures_work
from overlap import Net, Setting, assert_same_params, inputs
from zero_optim import ZeroRedundancyOptimizer
from zero_optim.compat.streams import future_on
from zero_optim.hooks import allreduce_hook

NUM_STEPS = 6


def waiting_hook(_: object, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
    """Average a bucket without the backend's futures: for gloo, where it gives none on CUDA."""
    buffer = bucket.buffer().div_(dist.get_world_size())
    dist.all_reduce(buffer)
    future = future_on(buffer.device)
    future.set_result(buffer)
    return future


def averaging(here: Here) -> Callable[[Any, Any], torch.futures.Future[Tensor]]:
    """Return a hook that averages, whose reduction begins behind a kernel that sleeps."""
    inner: Any = allreduce_hook if futures_work(here) else waiting_hook

    def sleeping_hook(state: object, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
        here.sleep()
        future: torch.futures.Future[Tensor] = inner(state, bucket)
        return future

    return sleeping_hook


def sleepy(here: Here) -> nn.Module:
    """Build a model whose forward and backward passes fall asleep in each layer."""

    def sleep(*_: object) -> None:
        here.sleep(0.5)

    def sleep_on_the_way_back(_: nn.Module, __: object, output: Tensor) -> None:
        if output.requires_grad:
            output.register_hook(sleep)  # type: ignore[no-untyped-call]

    model = Net().to(here.device)
    for module in model.modules():
        module.register_forward_pre_hook(sleep)
        module.register_forward_hook(sleep_on_the_way_back)
    return model


def train(here: Here, model: nn.Module, optimizer: Any) -> None:
    """Run an ordinary loop, with sleeping kernels between its parts. Nothing waits for the device."""
    for step in range(NUM_STEPS):
        optimizer.zero_grad(set_to_none=step % 3 != 2)
        here.sleep()
        model(inputs(step).to(here.device, non_blocking=True)).square().mean().backward()
        here.sleep()
        optimizer.step()
        here.sleep()


def overlapped(here: Here, wrapper: str, gradients: str, lazily: bool, as_views: bool) -> None:
    """`zero_step` on either DDP: the bits of the same run without it."""

    def adamw(model: nn.Module) -> ZeroRedundancyOptimizer:
        options = {"parameters_as_bucket_view": as_views, "bucket_cap_mb": 0.001, "lr": 0.01}
        return ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, **options)  # type: ignore[arg-type]

    setting = Setting(
        wrapper=wrapper,
        model=lambda: sleepy(here),
        optimizer=adamw,
        hook=lambda: (None, averaging(here)),
        zero={"gradients": gradients} if gradients == "owners" else {},
    )
    (plain, one), (model, other) = setting.build(overlap=False), setting.build(overlap=True)
    if lazily:
        other.gather_lazily(model)
    train(here, plain, one)
    train(here, model, other)
    other.wait_for_gathers()
    assert_same_params(model, plain)


def replaced(here: Here, wrapper: str) -> None:
    """``param.data`` is replaced between steps, as a swap of averages does it, while streams are behind."""
    setting = Setting(wrapper=wrapper, model=lambda: sleepy(here), hook=lambda: (None, averaging(here)))
    runs = setting.build(overlap=False), setting.build(overlap=True)
    for step in range(NUM_STEPS):
        for model, optimizer in runs:
            optimizer.zero_grad()
            for param in list(model.parameters())[step % 2 :: 2]:
                param.data = param.data * 1.5  # computed late, behind the kernel that sleeps
            model(inputs(step).to(here.device)).square().mean().backward()
            optimizer.step()
            here.sleep()
    assert_same_params(runs[1][0], runs[0][0])


class Split(nn.Module):
    """A model whose last layer runs on a stream of its own."""

    def __init__(self, here: Here) -> None:
        super().__init__()
        self.net = Net()
        self.side = nn.Linear(3, 3)
        self._here = here
        self._beside = torch.cuda.Stream(here.device) if here.is_cuda else None

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor
        hidden: Tensor = self.net(x)
        if self._beside is None:
            out = self.side(hidden)
            return out
        current = torch.cuda.current_stream()
        self._beside.wait_stream(current)
        hidden.record_stream(self._beside)
        with torch.cuda.stream(self._beside):
            self._here.sleep()
            out = self.side(hidden)
        current.wait_stream(self._beside)
        out.record_stream(current)
        return out


def in_streams(here: Here) -> None:
    """The loop on a stream of its own, and two streams in one model, each with a layer."""
    setting = Setting(
        wrapper="ours",
        model=lambda: Split(here).to(here.device),
        hook=lambda: (None, averaging(here)),
        options={"bucket_cap_mb": 25.0},  # one bucket, which both streams fill
    )
    (plain, one), (model, other) = setting.build(overlap=False), setting.build(overlap=True)
    train(here, plain, one)
    if here.is_cuda:
        outer = torch.cuda.Stream(here.device)
        outer.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(outer):
            train(here, model, other)
        torch.cuda.current_stream().wait_stream(outer)
    else:
        train(here, model, other)
    assert_same_params(model, plain)
