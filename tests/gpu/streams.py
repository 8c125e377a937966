"""Cases: work on several streams, and kernels that sleep wherever an order may be missing."""

from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook

from gpu.setting import Here, futures_work, layers_asleep
from overlap import Net, Setting, assert_same_params, inputs
from training import assert_same_bits
from zero_optim.comm.collectives import RankGroup
from zero_optim.comm.lanes import lanes_beside
from zero_optim.compat.streams import future_on
from zero_optim.ddp import ReduceScatterBucketer

NUM_STEPS = 6
LENGTHS = (1000, 40, 3000, 7, 900, 2500)  # some share a bucket, some are larger than one
CAP_MB = 0.02


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
        return inner(state, bucket)

    return sleeping_hook


def replaced(here: Here, wrapper: str) -> None:
    """``param.data`` is replaced between steps, as a swap of averages does it, while streams are behind."""
    setting = Setting(wrapper, model=lambda: Net().to(here.device), hook=lambda: (None, averaging(here)))
    runs = setting.build(overlap=False), setting.build(overlap=True)
    with layers_asleep(here, 0.5):
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
        hidden: Tensor = self.net(x)
        if self._beside is None:
            return self.side(hidden)
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
        "ours",
        model=lambda: Split(here).to(here.device),
        hook=lambda: (None, averaging(here)),
        options={"bucket_cap_mb": 25.0},  # one bucket, which both streams fill
    )
    (plain, one), (model, other) = setting.build(overlap=False), setting.build(overlap=True)
    _train(here, plain, one)
    outer = torch.cuda.Stream(here.device) if here.is_cuda else None
    if outer is not None:
        outer.wait_stream(torch.cuda.current_stream())
    with nullcontext() if outer is None else torch.cuda.stream(outer):
        _train(here, model, other)
    if outer is not None:
        torch.cuda.current_stream().wait_stream(outer)
    assert_same_params(model, plain)


def _train(here: Here, model: nn.Module, optimizer: Any) -> None:
    """Run an ordinary loop, with sleeping kernels between its parts. Nothing waits for the device."""
    for step in range(NUM_STEPS):
        optimizer.zero_grad(set_to_none=step % 3 != 2)
        here.sleep()
        model(inputs(step).to(here.device, non_blocking=True)).square().mean().backward()
        here.sleep()
        optimizer.step()
        here.sleep()


def chunks_of(number: int, rank: int) -> list[Tensor]:
    """Return the input of a rank to a call, which every rank can make for all."""
    generator, length = torch.Generator().manual_seed(1000 * number + rank), LENGTHS[number % len(LENGTHS)]
    return [torch.randn(length, generator=generator) for _ in range(dist.get_world_size())]


def summed(here: Here, num_streams: int) -> None:
    """Chunks come late, on streams in turns; free memory is overwritten. Sums are in the order of ranks."""
    streams = [torch.cuda.Stream(here.device) for _ in range(num_streams if here.is_cuda else 0)]
    bucketer = ReduceScatterBucketer(bucket_cap_mb=CAP_MB)
    rank, numbers = dist.get_rank(), range(3 * len(LENGTHS))
    calls = [[chunk.to(here.device) for chunk in chunks_of(number, rank)] for number in numbers]
    here.synchronize()
    sums: list[tuple[int, Tensor]] = []

    def keep(number: int, total: Tensor) -> None:
        sums.append((number, total * 1.0))  # the current stream has the sum

    for number, chunks in enumerate(calls):
        with torch.cuda.stream(streams[number % num_streams]) if streams else nullcontext():
            here.sleep()
            late = [chunk * 1.0 for chunk in chunks]  # made behind the kernel that sleeps
            bucketer.reduce_scatter_async(late, callback_fn=partial(keep, number))
            del late
            overwriting = [torch.full_like(chunk, torch.nan) for chunk in chunks]
            del overwriting
    bucketer.flush()
    here.synchronize()
    assert sorted(number for number, _ in sums) == list(numbers)
    for number, total in sums:
        first, *others = (chunks_of(number, sender)[rank] for sender in range(dist.get_world_size()))
        assert_same_bits([total.cpu()], [sum(others, first)], f"call {number}")


def lane_works(here: Here) -> None:
    """A group that the library makes for itself sends, also where there is one rank."""
    lease = lanes_beside(RankGroup.of(None, here.device))
    for lane in lease.groups:
        value = torch.ones(3, device=here.device)
        dist.all_reduce(value, group=lane.process_group)
        assert value.tolist() == [float(dist.get_world_size())] * 3
