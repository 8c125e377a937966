"""What is saved or loaded, by which ranks, under which names; and how a load is undone."""

import random
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from copy import deepcopy
from dataclasses import dataclass, field
from typing import Any, NamedTuple, cast

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DataParallel, DistributedDataParallel

from zero_optim.comm.backends import devices_of
from zero_optim.comm.collectives import RankGroup
from zero_optim.comm.mesh import RankMesh
from zero_optim.dtensor.placement import chunks_of, is_dtensor, local_rows
from zero_optim.health.watchdog import patient
from zero_optim.optimizer import ZeroRedundancyOptimizer
from zero_optim.plan.pieces import Pieces
from zero_optim.plan.strides import contiguous_strides
from zero_optim.shard.places import is_freed, shown_when_freed
from zero_optim.shard.rows.row_values import KeptRows, left_freed


@dataclass(frozen=True, slots=True, eq=False)
class Members:
    """The ranks that save or load: those of the optimizer, and a mesh if there are replicas of them."""

    group: RankGroup
    mesh: RankMesh | None = None

    @classmethod
    def of(cls, model: object, optimizer: object, process_group: object, timeout: object) -> "Members":
        """Take a process group, else the optimizer's with its replicas, else the default; unchecked."""
        sharded = optimizer if isinstance(optimizer, ZeroRedundancyOptimizer) else None
        mesh = sharded.core.mesh if sharded is not None else None
        if mesh is not None and process_group in (None, mesh.everyone.process_group):
            process_group, groups = None, (mesh.everyone, mesh.inner, mesh.across)
            mesh = RankMesh(*(patient(each.uncounted().during("checkpoint"), timeout) for each in groups))
        else:
            mesh = None
        if isinstance(process_group, dist.ProcessGroup) or process_group is dist.GroupMember.NON_GROUP_MEMBER:
            params = () if sharded is None else sharded.param_groups
            group = RankGroup.of(cast("dist.ProcessGroup", process_group), [params, model])
        else:
            group = RankGroup.of(None, model) if sharded is None else sharded.ranks.uncounted()
        return cls(patient(group.during("checkpoint"), timeout), mesh)

    @property
    def everyone(self) -> RankGroup:
        """All ranks, of all replicas."""
        return self.group if self.mesh is None else self.mesh.everyone


def check_group(given: object) -> None:
    """Check that this is a process group or None."""
    if given is not None and not isinstance(given, dist.ProcessGroup):
        kind = type(given).__name__
        raise TypeError(f"expected process_group to be a process group or None, got {kind}: {given!r}")


class HeldRows(NamedTuple):
    """A DTensor of a model: a tensor of its shape without memory, this rank's rows, and those of each."""

    stands_in: Tensor
    kept: KeptRows
    pieces: Pieces


@dataclass(frozen=True, slots=True)
class Objects:
    """The objects to save or to load; None for those that are not. The model may have wrappers."""

    model: nn.Module | None = None
    optimizer: ZeroRedundancyOptimizer | None = None
    scheduler: Any = None
    scaler: Any = None
    held: dict[str, HeldRows] = field(init=False, default_factory=dict)  # DTensors of the model, by name

    def __post_init__(self) -> None:
        """Check the types, and that the optimizer knows what is sharded."""
        if self.optimizer is not None and not isinstance(self.optimizer, ZeroRedundancyOptimizer):
            raise TypeError(
                f"expected optimizer to be a ZeroRedundancyOptimizer, got {type(self.optimizer).__name__}: "
                "checkpoints are written by the owners of the state"
            )
        if self.model is not None and not isinstance(self.model, nn.Module):
            raise TypeError(f"expected model to be a torch.nn.Module, got {type(self.model).__name__}")
        for name, value in self.others.items():
            if not all(callable(getattr(value, call, None)) for call in ("state_dict", "load_state_dict")):
                raise TypeError(
                    f"expected {name} to have state_dict() and load_state_dict(), got {type(value).__name__}"
                )
        self._find_held()
        known = self.optimizer.pieces() if self.optimizer is not None else {}
        for name, param in self.model.named_parameters() if self.model is not None else ():
            if is_freed(param) and param not in known:
                raise ValueError(
                    f"each rank has only a part of {name}, as the model is fully sharded: pass optimizer= "
                    "too, which knows the parts"
                )
        if self.model is not None and self.optimizer is not None:
            self.optimizer.core.check_weights()  # those that are saved must be those that train
            for bucket in self.optimizer.core.sharding.row_buckets:
                bucket.values.refresh()

    def _find_held(self) -> None:
        """Look for DTensors of the model; ValueError if they are not cut by rows over all ranks."""
        fsdp: Any = sys.modules.get("torch.distributed.fsdp")  # loading it takes a second
        for module in () if self.model is None or fsdp is None else self.model.modules():
            if isinstance(module, fsdp.FSDPModule):
                module.reshard()  # or parameters are others
        first: dict[Tensor, HeldRows] = {}
        named = [] if self.model is None else unwrapped(self.model).named_parameters(remove_duplicate=False)
        for name, param in named:
            if not is_dtensor(param):
                continue
            mesh, _, dim, rows = chunks_of(param, name)
            if dim != 0 or mesh.ndim > 1:
                raise ValueError(
                    f"{name} has placements {param.placements} on {mesh}: zero_optim.checkpoint takes rows "
                    "on a mesh of one dimension; use torch.distributed.checkpoint, as docs/fsdp2.md shows"
                )
            if param not in first:
                stands_in = shown_when_freed(param.shape, param.dtype, param.device)
                kept = KeptRows(contiguous_strides(param.shape), local_rows(param))
                first[param] = HeldRows(stands_in, kept, rows)
            self.held[name] = first[param]

    @contextmanager
    def left_freed(self) -> Iterator[dict[int, KeptRows]]:
        """Use state dicts of the model without communication; yields the rows of freed ones by address."""
        buckets = [] if self.optimizer is None else self.optimizer.core.sharding.row_buckets
        with left_freed(buckets) as rows_of:
            every = rows_of | {each.stands_in: each.kept for each in self.held.values()}
            yield {param.data_ptr(): rows for param, rows in every.items() if param.numel()}

    def model_state(self) -> dict[str, Any]:
        """Take the state dict of the model without wrappers; see `left_freed`. Empty without a model.

        Of DTensors it has what stands for them, see `HeldRows`.
        """
        with self.left_freed():
            state = {} if self.model is None else unwrapped(self.model).state_dict()
        return {name: self.held[name].stands_in if name in self.held else state[name] for name in state}

    def load_extra_state(self, state: Mapping[str, Any]) -> None:
        """Load entries of the model's state dict that are no tensors."""
        if self.model is not None and state:
            with self.left_freed():
                unwrapped(self.model).load_state_dict(state, strict=False)

    @property
    def others(self) -> dict[str, Any]:
        """The objects that are equal on every rank, by section."""
        both = {"scheduler": self.scheduler, "scaler": self.scaler}
        return {name: value for name, value in both.items() if value is not None}

    @property
    def device(self) -> torch.device | None:
        """The first device of the parameters that is not the CPU; None if there is none."""
        groups = self.optimizer.param_groups if self.optimizer is not None else ()
        return next((device for device in devices_of([groups, self.model]) if device.type != "cpu"), None)


def unwrapped(model: nn.Module) -> nn.Module:
    """Remove the wrappers of DDP and ``torch.compile``, which add prefixes to the names."""
    while True:
        if isinstance(model, DistributedDataParallel | DataParallel):
            model = model.module
        elif isinstance(inner := getattr(model, "_orig_mod", None), nn.Module):
            model = inner
        else:
            return model


@dataclass(frozen=True, slots=True, eq=False)
class Names:
    """The names of an optimizer's parameters, by group; places if not ``named``."""

    groups: list[list[str]]
    named: bool
    param: dict[str, Tensor]

    @property
    def name(self) -> dict[Tensor, str]:
        """The name of each parameter."""
        return {param: name for name, param in self.param.items()}


def positional(group: int, place: int) -> str:
    """Name a parameter that has no name."""
    return f"#{group}.{place}"


def names_of(
    optimizer: ZeroRedundancyOptimizer, model: nn.Module | None = None, *, by_place: bool = False
) -> Names:
    """Name an optimizer's parameters: by the model, else by the names that it was given, else by place."""
    in_model = {} if model is None else {param: name for name, param in unwrapped(model).named_parameters()}
    groups, param_of, named = list[list[str]](), dict[str, Tensor](), set()
    for number, group in enumerate(optimizer.param_groups):
        own = group.get("param_names") or [None] * len(group["params"])
        groups.append([])
        for place, param in enumerate(group["params"]):
            name = None if by_place else in_model.get(param, own[place])
            named.add(name is not None)
            name = positional(number, place) if name is None else name
            if name in param_of:
                raise ValueError(f"two parameters of the optimizer are called {name}")
            groups[-1].append(name)
            param_of[name] = param
    if len(named) > 1:
        raise ValueError(
            "some parameters of the optimizer have names and some have none: give the model they all "
            "belong to, or build the optimizer from model.named_parameters()"
        )
    return Names(groups, True in named, param_of)


def random_state(device: torch.device | None) -> dict[str, Any]:
    """Copy the random states of Python, numpy, PyTorch's CPU, and of a CUDA device, else the current one."""
    kind, internal, gauss = random.getstate()
    state: dict[str, Any] = {
        "python": (kind, torch.tensor(internal, device="cpu"), gauss),
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


def undo_of(objects: Objects) -> ExitStack:
    """Copy what a load changes before the optimizer, which undoes its own; closing the result restores it."""
    undo, device = ExitStack(), objects.device  # what is added last is restored first
    undo.callback(set_random_state, random_state(device), device)
    if objects.optimizer is not None:
        objects.optimizer.wait_for_gathers()  # and for steps of a backward pass that broke off
        for group in objects.optimizer.param_groups:  # a scheduler may write to them
            undo.callback(_put_back, group, dict(group))
    rest = {name: value for name, value in objects.model_state().items() if not isinstance(value, Tensor)}
    if rest:
        undo.callback(_load_again, objects.load_extra_state, deepcopy(rest))
    for value in objects.others.values():
        attributes = getattr(value, "__dict__", {})
        if attributes:
            undo.callback(_put_back, attributes, dict(attributes))
        undo.callback(_load_again, value.load_state_dict, deepcopy(value.state_dict()))
    return undo


def _load_again(load: Callable[[Any], object], state: object) -> None:
    with suppress(Exception):  # the error that led to the undo is the one to report
        load(state)


def _put_back(mapping: dict[str, Any], before: dict[str, Any]) -> None:
    mapping.clear()
    mapping.update(before)
