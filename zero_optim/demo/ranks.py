"""This process as a rank: its number, its device, and sums over all ranks."""

import os
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from zero_optim.demo.config import Device
from zero_optim.run.host import num_cores, use_loopback


@dataclass(frozen=True, slots=True)
class Ranks:
    """This rank among the others.

    Attributes:
        rank: of this process, over all hosts.
        world_size: ranks in the run.
        device: where this rank computes.
    """

    rank: int
    world_size: int
    device: torch.device

    @property
    def backend(self) -> str:
        """The backend for communication between ranks."""
        return "nccl" if self.device.type == "cuda" else "gloo"

    def mean(self, value: Tensor) -> float:
        """Average a scalar over ranks; all ranks call."""
        return self.total(value.detach()).item() / self.world_size

    def total(self, value: Tensor) -> Tensor:
        """Sum over ranks, in place; all ranks call."""
        dist.all_reduce(value)
        return value

    def collect(self, *numbers: int) -> list[list[int]]:
        """Return every rank's numbers, by rank; all ranks call, with the same count of numbers."""
        mine = torch.tensor(numbers, dtype=torch.int64, device=self.device)
        everyone = [torch.empty_like(mine) for _ in range(self.world_size)]
        dist.all_gather(everyone, mine)
        return [theirs.tolist() for theirs in everyone]


def join(device: Device, meeting: str | None = None) -> Ranks:
    """Enter the default process group; all ranks call. Ranks of one host stay on its loopback interface.

    Args:
        device: where to compute.
        meeting: path of a new file in which the ranks of one host find each other. None uses the store that
            the environment names, as torchrun sets it.
    """
    local_rank, local_world_size = int(os.environ["LOCAL_RANK"]), int(os.environ["LOCAL_WORLD_SIZE"])
    _share_cores(local_world_size)
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    if local_world_size == world_size:
        use_loopback()
    found: dict[str, Any] = {}
    if meeting is not None:
        store = dist.FileStore(meeting, world_size)  # type: ignore[attr-defined]
        found = {"store": store, "rank": rank, "world_size": world_size}
    kind = choose_device(device, local_world_size)
    if kind == "cuda":
        here = torch.device("cuda", local_rank)
        torch.cuda.set_device(here)
        dist.init_process_group("nccl", device_id=here, **found)
    else:
        here = torch.device("cpu")
        dist.init_process_group("gloo", **found)
    return Ranks(rank, world_size, here)


def _share_cores(local_world_size: int) -> None:
    if "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(max(1, num_cores() // local_world_size))


def choose_device(asked: Device, local_world_size: int) -> str:
    """Return "cuda" or "cpu"; the same on every host only if the hosts are alike.

    Raises:
        ValueError: ``asked`` is "cuda", and this host has fewer GPUs than ranks.
    """
    usable = torch.cuda.is_available() and dist.is_nccl_available()
    num_gpus = torch.cuda.device_count() if usable else 0
    if asked == "cuda" and num_gpus < local_world_size:
        raise ValueError(
            f"--device cuda needs a GPU for each of {local_world_size} ranks, this host has {num_gpus}"
        )
    return "cuda" if asked != "cpu" and num_gpus >= local_world_size else "cpu"
