"""Ranks make sure, before anything is built, that they all wrap the same model with the same arguments."""

from typing import Any

from torch import nn

from zero_optim.comm.agreement import agree, failing_together
from zero_optim.comm.collectives import RankGroup
from zero_optim.comm.watchdog import check_patience, learn_addresses, patient, watch
from zero_optim.ddp.assignment import describe_params
from zero_optim.ddp.mixed_precision import Precision

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


def agree_on_model(given: dict[str, Any], user: object, timeout: object, on_stall: object) -> None:
    """Make sure that all ranks wrap the same model; all ranks call. Communicates.

    Args:
        given: the arguments of PyTorch's constructor, by name.
        user: what is built.
        timeout: see `ZeroRedundancyOptimizer`.
        on_stall: likewise.

    Raises:
        TypeError: on every rank: there is no module to wrap, or see `Precision.of`.
        ValueError: on every rank: see `Precision.of`.
        RankMismatchError: on every rank: models or arguments differ; names the first difference.
    """
    module, process_group = given["module"], given.get("process_group")
    if process_group is None and given.get("device_mesh") is not None:
        process_group = given["device_mesh"].get_group(mesh_dim=0)
    group = patient(RankGroup.of(process_group, module), timeout)
    watch(user, group, on_stall)
    with group.doing(f"{type(user).__name__}()"):
        _agree(group, given, timeout, on_stall)
    learn_addresses(group)


def _agree(group: RankGroup, given: dict[str, Any], timeout: object, on_stall: object) -> None:
    module = given["module"]
    with failing_together(group):
        if not isinstance(module, nn.Module):
            raise TypeError(f"expected a module to wrap, got {type(module).__name__}")
        check_patience(timeout, on_stall)
        group.check_serves(list(module.parameters()))
        Precision.of(given)
        ignored = getattr(module, "_ddp_params_and_buffers_to_ignore", ())
        params = describe_params(pair for pair in module.named_parameters() if pair[0] not in ignored)
        delayed = [name for name, _ in given.get("delay_all_reduce_named_params") or ()]
        options = {key: given[key] for key in given if key not in _NOT_COMPARED}
        limits = f"timeout={timeout}, on_stall={on_stall}"
        items = [f"arguments {options}, delayed: {delayed}, {limits}", *params]
    agree(group, items, "the model to wrap")
