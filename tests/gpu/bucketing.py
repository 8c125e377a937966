"""Cases: `ReduceScatterBucketer`, whose exchanges go over a process group of its own."""

from contextlib import nullcontext
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor

from gpu.setting import Here
from training import assert_same_bits
from zero_optim.comm.collectives import RankGroup
from zero_optim.comm.lanes import lanes_beside
from zero_optim.ddp import ReduceScatterBucketer

LENGTHS = (1000, 40, 3000, 7, 900, 2500)  # some share a bucket, some are larger than one
CAP_MB = 0.02
NUM_CALLS = 3 * len(LENGTHS)


def chunks_of(number: int, rank: int) -> list[Tensor]:
    """Return the input of a rank to a call, which every rank can make for all."""
    generator = torch.Generator().manual_seed(1000 * number + rank)
    length = LENGTHS[number % len(LENGTHS)]
    return [torch.randn(length, generator=generator) for _ in range(dist.get_world_size())]


def sum_in_rank_order(number: int) -> Tensor:
    total, *others = (chunks_of(number, sender)[dist.get_rank()] for sender in range(dist.get_world_size()))
    for other in others:
        total = total + other
    return total


def summed(here: Here, num_streams: int) -> None:
    """Chunks come late, on streams in turns; free memory is overwritten. Sums are in the order of ranks."""
    streams = [torch.cuda.Stream(here.device) for _ in range(num_streams if here.is_cuda else 0)]
    bucketer = ReduceScatterBucketer(bucket_cap_mb=CAP_MB)
    given = [[chunk.to(here.device) for chunk in chunks_of(n, dist.get_rank())] for n in range(NUM_CALLS)]
    here.synchronize()
    sums: list[tuple[int, Tensor]] = []

    def keep(number: int, total: Tensor) -> None:
        sums.append((number, total * 1.0))  # the current stream has the sum

    for number, chunks in enumerate(given):
        with torch.cuda.stream(streams[number % num_streams]) if streams else nullcontext():
            here.sleep()
            late = [chunk * 1.0 for chunk in chunks]  # made behind the kernel that sleeps
            bucketer.reduce_scatter_async(late, callback_fn=partial(keep, number))
            del late
            overwriting = [torch.full_like(chunk, torch.nan) for chunk in chunks]
            del overwriting
    bucketer.flush()
    here.synchronize()
    assert sorted(number for number, _ in sums) == list(range(NUM_CALLS))
    for number, total in sums:
        assert_same_bits([total.cpu()], [sum_in_rank_order(number)], f"call {number}")


def lane_works(here: Here) -> None:
    """A group that the library makes for itself sends, also where there is one rank."""
    lease = lanes_beside(RankGroup.of(None, here.device))
    for lane in lease.groups:
        value = torch.ones(3, device=here.device)
        dist.all_reduce(value, group=lane.process_group)
        assert value.tolist() == [float(dist.get_world_size())] * 3
