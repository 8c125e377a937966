"""Parameter names, from which a checkpoint's keys are made. So order and grouping may change."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DataParallel, DistributedDataParallel

from zero_optim.comm.backends import devices_of
from zero_optim.comm.collectives import RankGroup
from zero_optim.comm.mesh import RankMesh
from zero_optim.health.watchdog import patient
from zero_optim.optimizer import ZeroRedundancyOptimizer
from zero_optim.shard.freed import is_freed
from zero_optim.shard.unit_forms import KeptRows


@dataclass(frozen=True, slots=True)
class Objects:
    """The objects to save or to load; None for those that are not.

    Attributes:
        model: with or without wrappers.
        optimizer: the sharded optimizer.
        scheduler, scaler: anything with ``state_dict`` and ``load_state_dict``, equal on every rank.
        mesh: of the replicas that hold the same; None if the ranks of the optimizer are all.
    """

    model: nn.Module | None = None
    optimizer: ZeroRedundancyOptimizer | None = None
    scheduler: Any = None
    scaler: Any = None
    mesh: RankMesh | None = None

    def __post_init__(self) -> None:
        """Check the types."""
        if self.optimizer is not None and not isinstance(self.optimizer, ZeroRedundancyOptimizer):
            raise TypeError(
                f"expected optimizer to be a ZeroRedundancyOptimizer, got {type(self.optimizer).__name__}: "
                "checkpoints are written by the owners of the state"
            )
        if self.model is not None and not isinstance(self.model, nn.Module):
            raise TypeError(f"expected model to be a torch.nn.Module, got {type(self.model).__name__}")
        for name, value in self.others.items():
            if not all(
                callable(getattr(value, method, None)) for method in ("state_dict", "load_state_dict")
            ):
                raise TypeError(
                    f"expected {name} to have state_dict() and load_state_dict(), got {type(value).__name__}"
                )
        if self.model is not None:
            _check_owned(self.model, self.optimizer)
        if self.model is not None and self.optimizer is not None:
            self.optimizer.check_weights()  # the saved weights must be those that training continues with

    @contextmanager
    def left_freed(self) -> Iterator[dict[int, KeptRows]]:
        """Take state dicts of the model without communication, with parameters of units as they are.

        Yields:
            By the address of each parameter of a unit, what this rank keeps of it.
        """
        if self.optimizer is None:
            yield {}
            return
        with self.optimizer.leaving_freed() as kept:
            yield {param.data_ptr(): rows for param, rows in kept.items() if param.numel()}

    def model_state(self) -> dict[str, Any]:
        """Take the state dict of the model without wrappers; see `left_freed`. Empty without a model."""
        with self.left_freed():
            return {} if self.model is None else unwrapped(self.model).state_dict()

    @property
    def others(self) -> dict[str, Any]:
        """The objects that are equal on every rank, by section."""
        both = {"scheduler": self.scheduler, "scaler": self.scaler}
        return {name: value for name, value in both.items() if value is not None}

    def everyone(self, group: RankGroup) -> RankGroup:
        """Give all ranks that save or load.

        Args:
            group: those of the optimizer.
        """
        return group if self.mesh is None else self.mesh.everyone

    @property
    def device(self) -> torch.device | None:
        """The first device of the parameters that is not the CPU; None if there is none."""
        groups = self.optimizer.param_groups if self.optimizer is not None else ()
        return next((device for device in devices_of([groups, self.model]) if device.type != "cpu"), None)


def _check_owned(model: nn.Module, optimizer: ZeroRedundancyOptimizer | None) -> None:
    known = optimizer.pieces() if optimizer is not None else {}
    for name, param in model.named_parameters():
        if is_freed(param) and param not in known:
            raise ValueError(
                f"{name} is on its owners alone, as the model is fully sharded: give the optimizer too, "
                "which knows them"
            )


def group_of(model: object, optimizer: object, process_group: object, timeout: object = None) -> RankGroup:
    """Find the ranks that save or load. Wrong types are refused later, on all of them.

    Args:
        model: what is saved; None for none.
        optimizer: likewise.
        process_group: the ranks, None for those of the optimizer, or without one the default group.
        timeout: of waits, in seconds; None for the process group's own.

    Raises:
        ValueError: this process is not in the group.
    """
    if mesh_of(optimizer, process_group) is not None:
        process_group = None
    if isinstance(process_group, dist.ProcessGroup) or process_group is dist.GroupMember.NON_GROUP_MEMBER:
        params = optimizer.param_groups if isinstance(optimizer, ZeroRedundancyOptimizer) else ()
        found = RankGroup.of(cast("dist.ProcessGroup", process_group), [params, model])
    elif isinstance(optimizer, ZeroRedundancyOptimizer):
        found = optimizer.ranks.uncounted()
    else:
        found = RankGroup.of(None, model)
    return patient(found.during("checkpoint"), timeout)


def mesh_of(optimizer: object, process_group: object, timeout: object = None) -> RankMesh | None:
    """Find the replicas that save or load together; None if the ranks of `group_of` are all.

    Args:
        optimizer: what is saved; None for none.
        process_group: see `group_of`. That of the whole mesh stands for None; another is taken as it is.
        timeout: see `group_of`.
    """
    mesh = optimizer.mesh if isinstance(optimizer, ZeroRedundancyOptimizer) else None
    if mesh is None or process_group not in (None, mesh.everyone.process_group):
        return None
    groups = (mesh.everyone, mesh.inner, mesh.across)
    everyone, inner, across = (patient(group.uncounted().during("checkpoint"), timeout) for group in groups)
    return RankMesh(everyone, inner, across)


def check_group(process_group: object) -> None:
    """Check that this is a process group.

    Raises:
        TypeError: it is not.
    """
    if process_group is not None and not isinstance(process_group, dist.ProcessGroup):
        kind = type(process_group).__name__
        raise TypeError(
            f"expected process_group to be a process group or None, got {kind}: {process_group!r}"
        )


def unwrapped(model: nn.Module) -> nn.Module:
    """Remove the wrappers of DDP and ``torch.compile``, which add prefixes to the names."""
    while True:
        if isinstance(model, DistributedDataParallel | DataParallel):
            model = model.module
        elif isinstance(inner := getattr(model, "_orig_mod", None), nn.Module):
            model = inner
        else:
            return model


def positional(group: int, place: int) -> str:
    """Name a parameter that has no name."""
    return f"#{group}.{place}"


@dataclass(frozen=True, slots=True, eq=False)
class Names:
    """The names of an optimizer's parameters.

    Attributes:
        groups: the names of each group.
        named: False if the names are places.
        param: the parameter of each name.
    """

    groups: list[list[str]]
    named: bool
    param: dict[str, Tensor]

    @property
    def name(self) -> dict[Tensor, str]:
        """The name of each parameter."""
        return {param: name for name, param in self.param.items()}


def names_of(optimizer: ZeroRedundancyOptimizer, model: nn.Module | None) -> Names:
    """Name an optimizer's parameters: by the model, else by the names given to the optimizer, else by place.

    Raises:
        ValueError: only some have names, or two have the same.
    """
    in_model = (
        {param: name for name, param in unwrapped(model).named_parameters()} if model is not None else {}
    )
    groups, param_of, named = [], {}, set()
    for number, group in enumerate(optimizer.param_groups):
        told = group.get("param_names") or [None] * len(group["params"])
        names = []
        for place, param in enumerate(group["params"]):
            name = in_model.get(param, told[place])
            named.add(name is not None)
            names.append(positional(number, place) if name is None else name)
            if names[-1] in param_of:
                raise ValueError(f"two parameters of the optimizer are called {names[-1]}")
            param_of[names[-1]] = param
        groups.append(names)
    if len(named) > 1:
        raise ValueError(
            "some parameters of the optimizer have names and some have none: give the model they all "
            "belong to, or build the optimizer from model.named_parameters()"
        )
    return Names(groups, True in named, param_of)
