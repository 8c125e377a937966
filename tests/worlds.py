"""Default process groups one after the other in one process, for tests of what outlives them."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path

import torch.distributed as dist

LIMIT = timedelta(seconds=300)  # more than a call of the pool may take: nothing waits so long


def leave() -> int:
    """Leave the pool's own group, together; gives the rank in it."""
    rank = dist.get_rank()
    dist.barrier()
    dist.destroy_process_group()
    return rank


def enter(folder: Path, name: str, rank: int, size: int) -> None:
    """Make a default group, with a store of its own."""
    store = dist.FileStore(str(folder / name), size)  # type: ignore[attr-defined]
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=LIMIT)


@contextmanager
def world(folder: Path, name: str, rank: int, ranks: Sequence[int]) -> Iterator[None]:
    """Let some ranks of the pool be a default group, numbered in this order.

    Args:
        folder: for the store.
        name: of the group, which no other has.
        rank: of this process in the pool.
        ranks: of the members in the pool.
    """
    enter(folder, name, ranks.index(rank), len(ranks))
    try:
        yield
        dist.barrier()  # a rank that still sends fails if the other side has closed
    finally:
        dist.destroy_process_group()
