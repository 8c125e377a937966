"""Checks before construction that all ranks wrap the same model with the same arguments."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn import UninitializedParameter

from zero_optim.comm.agreement import agree, check_flags, failing_together, raise_together, ranks_of
from zero_optim.comm.collectives import RankGroup
from zero_optim.ddp.precision.precision import PrecisionPolicy
from zero_optim.ddp.reducer.assignment import describe_params
from zero_optim.health.watchdog import check_patience, learn_addresses, patient, watch
from zero_optim.shard.places import is_freed

# Arguments that ranks need not have in common, such as a device of their own, or that are compared by name.
_NOT_COMPARED = (
    "self",
    "module",
    "delay_all_reduce_named_params",
    "device_ids",
    "device_mesh",
    "output_device",
    "param_to_hook_all_reduce",
    "process_group",
)


def agree_on_model(
    given: dict[str, Any], user: object, timeout: object, on_stall: object, *, may_be_freed: bool = True
) -> None:
    """Check that all ranks wrap the same model; all ranks call. Communicates.

    With ``init_sync=False`` compares only that flag, and checks devices. ``given`` are the arguments of
    PyTorch's constructor by name; ``user`` is the wrapper under construction.
    """
    module, process_group, mesh = given["module"], given.get("process_group"), given.get("device_mesh")
    ranks_of(process_group)
    if mesh is not None and not isinstance(mesh, DeviceMesh):
        raise_together(TypeError(f"expected device_mesh to be a DeviceMesh, or None, got {mesh!r}"))
    if process_group is None and mesh is not None:
        process_group = mesh.get_group(mesh_dim=0)
    group = patient(RankGroup.of(process_group, [param for _, param in seen_params(module)]), timeout)
    watch(user, group, on_stall)
    with group.doing(f"{type(user).__name__}()"):
        _agree(group, given, timeout, on_stall, may_be_freed=may_be_freed)
    learn_addresses(group)


def _agree(
    group: RankGroup, given: dict[str, Any], timeout: object, on_stall: object, *, may_be_freed: bool
) -> None:
    module, syncs = given["module"], given.get("init_sync", True)
    with failing_together(group):
        if not isinstance(module, nn.Module):
            raise TypeError(f"expected a module to wrap, got {type(module).__name__}")
        check_patience(timeout, on_stall)
        check_flags(init_sync=syncs)
        if any(isinstance(param, UninitializedParameter) for _, param in seen_params(module)):
            raise RuntimeError(
                "Modules with uninitialized parameters can't be used with `DistributedDataParallel`. Run a "
                "dummy forward pass to correctly initialize the modules"
            )
        _check_devices(module, given.get("device_ids"), given.get("output_device"))
        if not may_be_freed:
            refuse_freed(module)
        items = [f"init_sync={syncs}", *(_described(group, given, timeout, on_stall) if syncs else ())]
    agree(group, items, "the model to wrap")


def _described(group: RankGroup, given: dict[str, Any], timeout: object, on_stall: object) -> list[str]:
    """Describe what ranks must have in common; raises if it is invalid."""
    pairs = seen_params(given["module"])
    group.check_serves([param for _, param in pairs])
    PrecisionPolicy.of_ddp(given)
    params = describe_params(pairs)
    delayed = [name for name, _ in given.get("delay_all_reduce_named_params") or ()]
    delayed_by = "no parameter" if given.get("param_to_hook_all_reduce") is None else "a parameter"
    options = {key: given[key] for key in given if key not in _NOT_COMPARED}
    limits = f"timeout={timeout}, on_stall={on_stall}"
    return [f"arguments {options}, delayed: {delayed} by {delayed_by}, {limits}", *params]


def _check_devices(module: nn.Module, device_ids: object, output_device: object) -> None:
    """Refuse what PyTorch's constructor would refuse on this rank alone."""
    if device_ids is not None and not isinstance(device_ids, Sequence):
        raise TypeError(f"expected device_ids to be a list of one device, or None, got {device_ids!r}")
    if device_ids is not None and len(device_ids) > 1:
        raise ValueError(f"device_ids can only be None or contain a single element, got {device_ids}")
    devices = {param.device for _, param in seen_params(module)}
    is_on_one = len(devices) == 1 and next(iter(devices)).type != "cpu"
    if (device_ids or output_device) and not (device_ids and is_on_one):
        raise ValueError(
            "DistributedDataParallel device_ids and output_device arguments only work with the parameters on "
            f"one accelerator, and both given: got device_ids {device_ids}, output_device {output_device}, "
            f"and parameters on {', '.join(sorted(map(str, devices)))}. Leave them out"
        )
    for each in (*(device_ids or ()), output_device):
        if each is not None:  # that is the current device
            torch.device(each)


def seen_params(module: object) -> list[tuple[str, Tensor]]:
    """List (name, parameter) pairs without ignored ones; empty for what is no module.

    Ignored parameters may be of a kind that must not be touched, such as `ShardedTensor`.
    """
    if not isinstance(module, nn.Module):
        return []
    ignored = getattr(module, "_ddp_params_and_buffers_to_ignore", ())
    return [pair for pair in module.named_parameters() if pair[0] not in ignored]


def refuse_freed(module: object) -> None:
    """Raise ValueError for a model that is fully sharded, or has such a part."""
    if any(is_freed(param) for _, param in seen_params(module)):
        raise ValueError(
            "the model is fully sharded already, or a part of it: its parameters are on their owners alone"
        )
