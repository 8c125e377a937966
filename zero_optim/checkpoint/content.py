"""What each rank writes to a checkpoint: the state and parameters that it owns, and its part of the rest."""

import random
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any
from zlib import crc32

import numpy as np
import torch
from torch import Tensor, nn

from zero_optim.checkpoint.data import bytes_of
from zero_optim.checkpoint.names import Names, Objects, names_of, unwrapped
from zero_optim.checkpoint.values import Json, key_of, pack
from zero_optim.comm.collectives import RankGroup
from zero_optim.comm.wire import all_copied_to_cpu
from zero_optim.optimizer import ZeroRedundancyOptimizer
from zero_optim.plan.groups import options_of
from zero_optim.plan.partition import assign_owners

MODEL, OPTIMIZER, STATE, EVERYWHERE, RANDOM, EXTRA = (
    "model", "optimizer", "optimizer/state", "optimizer/everywhere", "random", "extra",
)  # fmt: skip


@dataclass(slots=True)
class RankContent:
    """What one rank writes.

    Attributes:
        values: packed, by key.
        tensors: by key.
    """

    values: dict[str, Json] = field(default_factory=dict)
    tensors: dict[str, Tensor] = field(default_factory=dict)

    def add(self, key: str, value: object) -> None:
        """Add a nested value with its tensors."""
        self.values[key], tensors = pack(key, value, key)
        self.tensors.update(tensors)

    def staged(self) -> "RankContent":
        """Copy the tensors into CPU memory, so that training may change them; see `all_copied_to_cpu`."""
        copies = all_copied_to_cpu(list(self.tensors.values()))
        return RankContent(self.values, dict(zip(self.tensors, copies, strict=True)))


def collect(group: RankGroup, objects: Objects, extra: object) -> tuple[RankContent, list[str]]:
    """List what this rank writes. Does not communicate.

    Of tensors it reads only those that all ranks share, for their checksums; the CPU waits for these.

    Returns:
        The content, and descriptions of what must be equal on every rank.
    """
    part, shared = RankContent(), RankContent()
    about: list[str] = []
    if objects.model is not None:
        about = _add_model(part, group, objects.model, objects.optimizer)
    if objects.optimizer is not None:
        _add_optimizer(part, shared, objects.optimizer, names_of(objects.optimizer, objects.model))
    for name, value in objects.others.items():
        shared.add(name, value.state_dict())
    shared.add(EXTRA, extra)
    part.add(key_of(RANDOM, str(group.rank)), random_state(objects.device))
    if group.rank == 0:
        part.values.update(shared.values)
        part.tensors.update(shared.tensors)
    return part, [*about, *_described(shared)]


def _described(shared: RankContent) -> list[str]:
    """Describe what must be equal on every rank, without state that a rank has for itself."""
    values = [f"{key}: {value}" for key, value in shared.values.items() if key != EVERYWHERE]
    sums = [
        f"{key}: tensor with checksum {crc32(bytes_of(tensor))}"
        for key, tensor in shared.tensors.items()
        if not key.startswith(EVERYWHERE)
    ]
    return values + sums


def _add_model(
    part: RankContent, group: RankGroup, model: nn.Module, optimizer: ZeroRedundancyOptimizer | None
) -> list[str]:
    """Add what this rank writes of the model. Returns descriptions that must be equal on all ranks."""
    packed = RankContent()
    packed.add(MODEL, unwrapped(model).state_dict())
    writers = tensor_owners(packed.tensors, optimizer, group.size)
    if group.rank == 0:
        part.values.update(packed.values)
    part.tensors.update({key: t for key, t in packed.tensors.items() if writers[key] == group.rank})
    tensors = [
        f"{key}: {str(t.dtype).removeprefix('torch.')} {tuple(t.shape)}" for key, t in packed.tensors.items()
    ]
    return [f"a model of class {type(unwrapped(model)).__qualname__}", *tensors]


def tensor_owners(
    tensors: Mapping[str, Tensor], optimizer: ZeroRedundancyOptimizer | None, num_ranks: int
) -> dict[str, int]:
    """Choose which rank writes or reads each tensor of a model: its owner, or any rank if it has none.

    Returns:
        The same on every rank.
    """
    owners = optimizer.owners() if optimizer is not None else {}
    of_memory = {param.data_ptr(): owner for param, owner in owners.items() if param.numel()}
    chosen = {key: of_memory[t.data_ptr()] for key, t in tensors.items() if t.data_ptr() in of_memory}
    loads = [0.0] * num_ranks
    for key, rank in chosen.items():
        loads[rank] += tensors[key].nbytes
    rest = [key for key in tensors if key not in chosen]
    (ranks,) = assign_owners([[tensors[key].nbytes for key in rest]], num_ranks, loads)
    return {**chosen, **dict(zip(rest, ranks, strict=True))}


def _add_optimizer(
    part: RankContent, shared: RankContent, optimizer: ZeroRedundancyOptimizer, names: Names
) -> None:
    groups = []
    for number, (group, members) in enumerate(zip(optimizer.param_groups, names.groups, strict=True)):
        key = key_of(OPTIMIZER, "options", str(number))
        shared.add(key, options_of(group))
        groups.append({"names": members, "options": shared.values.pop(key)})
    shared.values[OPTIMIZER] = {
        "named": names.named,
        "groups": groups,
        "params": {
            name: [str(p.dtype).removeprefix("torch."), list(p.shape)] for name, p in names.param.items()
        },
    }
    name_of, everywhere = names.name, {}
    for key, value in optimizer.owned_state().items():
        if isinstance(key, Tensor):
            part.add(f"{STATE}/{key_of(name_of[key])}", value)
        else:
            everywhere[key] = value
    shared.add(EVERYWHERE, everywhere)


def random_state(device: torch.device | None) -> dict[str, Any]:
    """Copy this process's random states: Python's, numpy's, PyTorch's of the CPU and of one CUDA device.

    Args:
        device: of the parameters; None, or a device that is not CUDA, stands for the current CUDA device.
    """
    kind, internal, gauss = random.getstate()
    state: dict[str, Any] = {
        "python": (kind, torch.tensor(internal), gauss),
        "numpy": np.random.get_state(),
        "torch": torch.get_rng_state(),
    }
    if torch.cuda.is_available() and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        state["cuda"] = torch.cuda.get_rng_state(_cuda(device))
    return state


def set_random_state(state: Mapping[str, Any], device: torch.device | None) -> None:
    """Restore the random states that `random_state` copied, for the same device or another one."""
    kind, internal, gauss = state["python"]
    random.setstate((kind, tuple(internal.tolist()), gauss))
    np.random.set_state(state["numpy"])
    torch.set_rng_state(state["torch"])
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"], _cuda(device))


def _cuda(device: torch.device | None) -> torch.device:
    return device if device is not None and device.type == "cuda" else torch.device("cuda")
