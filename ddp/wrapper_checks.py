"""What wrappers refuse: models that differ between ranks, and arguments that do not fit together."""

import inspect
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn import UninitializedParameter

from zero_optim.comm.agreement import agree, check_flags, failing_together, raise_together, take_group
from zero_optim.comm.collectives import RankGroup
from zero_optim.ddp.reducer.assignment import describe_params
from zero_optim.health.watchdog import check_patience, learn_addresses, patient, watch
from zero_optim.optimizer import ZeroRedundancyOptimizer
from zero_optim.plan.groups import names_text
from zero_optim.shard.places import is_freed
from zero_optim.state.options import did_you_mean

# Arguments that ranks need not have in common, such as a device of their own, or that are compared by name.
_NOT_COMPARED = ("self", "module", "device_ids", "device_mesh", "output_device", "process_group")

OPTIONS = (
    "broadcast_buffers",
    "device_ids",
    "dim",
    "find_unused_parameters",
    "init_sync",
    "on_stall",
    "output_device",
    "static_graph",
    "timeout",
)
_DELAYS = "every gradient is reduced in its bucket; use PyTorch's DistributedDataParallel for others"
REFUSED = {
    "batched_grad_copy": "gradients are copied as they come, so that they can be dropped",
    "bucket_cap_mb": "buckets are those of the optimizer: give it bucket_cap_mb",
    "bucket_cap_mb_list": "buckets are those of the optimizer: give it bucket_cap_mb",
    "check_reduction": "it has had no effect for long",
    "delay_all_reduce_named_params": _DELAYS,
    "device_mesh": "the ranks are those of the optimizer: give it process_group=mesh.get_group(), and a 2-D "
    "mesh of replicas by the name of mesh",
    "gradient_as_bucket_view": "gradients are views already on the owning rank, and the others have none",
    "mixed_precision": "use torch.autocast, PyTorch's DistributedDataParallel, or stage 3 with a "
    "PrecisionPolicy",
    "param_to_hook_all_reduce": _DELAYS,
    "skip_all_reduce_unused_params": "the ranks have to reduce the same buckets",
}
_KNOWN = {*OPTIONS, *REFUSED, *_NOT_COMPARED, "forward_sync_buffers"}  # of PyTorch's constructor
_SIGNATURE = inspect.signature(nn.parallel.DistributedDataParallel)

_PREFETCHES = "the next unit is always on its way while one is used; leave it out"
_IGNORES = "freeze these parameters and leave them out of the optimizer: they stay whole on every rank"
_OFFLOADS = 'offload="cpu" keeps what a rank owns on the CPU'

# Options of PyTorch's wrappers that `FullyShardedDataParallel` does not take.
REFUSED_FULLY = {
    **REFUSED,
    "auto_wrap_policy": "give the modules that are gathered together, or their classes, as units=",
    "backward_prefetch": _PREFETCHES,
    "cpu_offload": _OFFLOADS,
    "device_id": "move the model before its first forward pass; for one on the meta device give device=",
    "forward_prefetch": _PREFETCHES,
    "ignored_modules": _IGNORES,
    "ignored_params": _IGNORES,
    "ignored_states": _IGNORES,
    "limit_all_gathers": _PREFETCHES,
    "mp_policy": "give it as mixed_precision=",
    "offload_policy": _OFFLOADS,
    "param_init_fn": "give it as init=",
    "sharding_strategy": "parameters are sharded; reshard_after_forward=False keeps them whole until the "
    "backward pass (SHARD_GRAD_OP), and mesh= makes replicas (HYBRID_SHARD)",
    "sync_module_states": "every rank takes the values of rank 0; leave it out",
    "use_orig_params": "parameters are always the model's own; leave it out",
}


def torch_arguments(module: nn.Module, args: Iterable[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Name the arguments of PyTorch's constructor: all that we know, others unless they are the default."""
    parameters = _SIGNATURE.parameters
    known = {name: value for name, value in kwargs.items() if name in parameters}
    bound = _SIGNATURE.bind(module, *args, **known)
    bound.apply_defaults()
    named = {**bound.arguments, **kwargs}
    return {
        name: value
        for name, value in named.items()
        if name in _KNOWN or name not in parameters or value is not parameters[name].default
    }


def agree_on_model(
    arguments: dict[str, Any], user: object, timeout: object, on_stall: object, *, may_be_freed: bool = False
) -> None:
    """Check that all ranks wrap the same model, or only ``init_sync=False``; all ranks call. Communicates."""
    module, mesh = arguments["module"], arguments.get("device_mesh")
    process_group = arguments.get("process_group")
    take_group(process_group)
    if mesh is not None and not isinstance(mesh, DeviceMesh):
        raise_together(TypeError(f"expected device_mesh to be a DeviceMesh, or None, got {mesh!r}"))
    if process_group is None and mesh is not None:
        process_group = mesh.get_group(mesh_dim=0)
    group = patient(RankGroup.of(process_group, [param for _, param in seen_params(module)]), timeout)
    watch(user, group, on_stall)
    with group.doing(f"{type(user).__name__}()"):
        _agree(group, arguments, timeout, on_stall, may_be_freed=may_be_freed)
    learn_addresses(group)


def _agree(
    group: RankGroup, arguments: dict[str, Any], timeout: object, on_stall: object, *, may_be_freed: bool
) -> None:
    module, syncs = arguments["module"], arguments.get("init_sync", True)
    pairs = seen_params(module)
    params = [param for _, param in pairs]
    with failing_together(group):
        _check_is_module(module)
        check_patience(timeout, on_stall)
        check_flags(init_sync=syncs)
        for name in ("mixed_precision", "delay_all_reduce_named_params", "param_to_hook_all_reduce"):
            if arguments.get(name) is not None:
                raise TypeError(f"zero_optim.ddp.DistributedDataParallel takes no {name}: {REFUSED[name]}")
        for name in sorted(arguments.keys() - _KNOWN):
            what = did_you_mean(name, _KNOWN) or (
                f": leave it out, or use the DistributedDataParallel of PyTorch {torch.__version__} if that "
                "takes it"
            )
            raise TypeError(f"zero_optim.ddp.DistributedDataParallel takes no {name}{what}")
        if any(isinstance(param, UninitializedParameter) for param in params):
            raise RuntimeError(
                "Modules with uninitialized parameters can't be used with `DistributedDataParallel`. Run a "
                "dummy forward pass to correctly initialize the modules"
            )
        if not may_be_freed and any(param.is_meta for param in params):
            raise ValueError(
                "a part of the model is on the meta device, which has no values: move it by to_empty() and "
                "set its values before the optimizer is built, or use FullyShardedDataParallel, which does so"
            )
        _check_devices(params, arguments.get("device_ids"), arguments.get("output_device"))
        if not may_be_freed and any(map(is_freed, params)):
            raise ValueError(
                "the model, or a part of it, is fully sharded already: each rank keeps only a part of its "
                "parameters"
            )
        items = [f"init_sync={syncs}"]
        if syncs:
            group.check_serves(params)
            options = {key: arguments[key] for key in arguments if key not in _NOT_COMPARED}
            limits = f"timeout={timeout}, on_stall={on_stall}"
            items += [f"arguments {options}, {limits}", *describe_params(pairs)]
    agree(group, items, "the model to wrap")


def _check_is_module(module: object) -> None:
    if not isinstance(module, nn.Module):
        raise TypeError(f"expected a module to wrap, got {type(module).__name__}")


def _check_devices(params: Sequence[Tensor], device_ids: object, output_device: object) -> None:
    """Refuse what PyTorch's constructor would refuse on this rank alone."""
    if device_ids is not None and not isinstance(device_ids, Sequence):
        raise TypeError(f"expected device_ids to be a list of one device, or None, got {device_ids!r}")
    if device_ids is not None and len(device_ids) > 1:
        raise ValueError(f"device_ids can only be None or contain a single element, got {device_ids}")
    devices = {param.device for param in params}
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


def ignored_names(module: nn.Module) -> Sequence[str]:
    """Return the names of parameters and buffers that PyTorch's DDP was told to ignore."""
    names: Sequence[str] = getattr(module, "_ddp_params_and_buffers_to_ignore", ())
    return names


def seen_params(module: object) -> list[tuple[str, Tensor]]:
    """List (name, parameter) pairs without ignored ones, which may not be touched; empty for no module."""
    if not isinstance(module, nn.Module):
        return []
    ignored = ignored_names(module)
    return [pair for pair in module.named_parameters() if pair[0] not in ignored]


def frozen_params(module: nn.Module) -> list[tuple[str, Tensor]]:
    """List those of `seen_params` that require no gradient."""
    return [pair for pair in seen_params(module) if not pair[1].requires_grad]


def sparse_names(module: nn.Module) -> set[str]:
    """Return the names of parameters with sparse gradients, as PyTorch's DDP finds them."""
    return {
        own
        for name, layer in module.named_modules()
        if isinstance(layer, nn.Embedding | nn.EmbeddingBag) and layer.sparse
        for own, _ in layer.named_parameters(name, recurse=False)
    }


def check_wrapping(
    wrapper: type, module: nn.Module, accumulate: object, options: Iterable[str], refused: Mapping[str, str]
) -> None:
    """Refuse what a sharding wrapper does not take, with the reasons for the ``refused`` options."""
    if accumulate not in ("owner", "local"):
        raise ValueError(f'expected accumulate to be "owner" or "local", got {accumulate!r}')
    for name in options:
        if name in refused:
            raise TypeError(f"{wrapper.__name__} takes no {name}: {refused[name]}")
        if name not in OPTIONS:
            arguments = inspect.signature(wrapper).parameters.values()
            keywords = {argument.name for argument in arguments if argument.kind is argument.KEYWORD_ONLY}
            known = sorted({*OPTIONS, *keywords})
            raise TypeError(
                f"expected options among {', '.join(known)}, got {name}{did_you_mean(name, known)}"
            )
    _check_is_module(module)
    if any(isinstance(each, nn.parallel.DistributedDataParallel) for each in module.modules()):
        raise ValueError(
            "the module is, or contains, a DistributedDataParallel, which reduces gradients itself: wrap "
            "what is inside of it, its .module"
        )


def check_optimizer(module: nn.Module, optimizer: ZeroRedundancyOptimizer, process_group: object) -> None:
    """Refuse an optimizer of another group, without all parameters, or that waits for a comm hook."""
    if process_group is not None and process_group is not optimizer.ranks.process_group:
        raise ValueError(
            "process_group is another group than that of the optimizer, whose ranks own the gradients: leave "
            "it out, or give both the same"
        )
    if optimizer.core.inputs.options.overlap_with_ddp:
        raise ValueError(
            "the optimizer has overlap_with_ddp=True, and would wait for a comm hook that steps it: leave "
            "that out"
        )
    pieces = optimizer.pieces()
    unknown = [name for name, param in seen_params(module) if param.requires_grad and param not in pieces]
    if unknown:
        raise ValueError(
            f"the optimizer does not have {names_text(unknown)}, so no rank owns their gradients: add them "
            "to it, or freeze them (requires_grad=False) before wrapping"
        )
