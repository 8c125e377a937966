"""The one list of PyTorch's private names that the library uses, by feature.

Note [Private names]
    A name is looked up at its first use: ``private.foreach_copy_(...)`` is ``torch._foreach_copy_``. A
    PyTorch without it loses one feature, whose first use raises and names it. Names of a class take the
    object first. Names of `INHERITED` are used on objects directly, after `require`.
"""

from inspect import getattr_static, isclass, isdatadescriptor, unwrap
from operator import attrgetter
from pkgutil import resolve_name
from typing import Any

import torch

WORKS_WITH = "2.8 to 2.15"  # versions of PyTorch

_C10D = "torch.distributed.distributed_c10d"
_DDP = "torch.nn.parallel.distributed.DistributedDataParallel"
_GROUP = "torch.distributed.ProcessGroup"

NAMES: dict[str, tuple[str, ...]] = {
    "copying many tensors in one call": ("torch._foreach_copy_", "torch._foreach_mul_"),
    "ema_decay=": ("torch._foreach_lerp_",),
    "clip_grad_norm_()": ("torch._foreach_norm",),
    "sparse gradients": ("torch.Tensor._indices", "torch.Tensor._values", "torch.Tensor._nnz"),
    "tensor subclasses": (
        "torch._C.DisableTorchFunctionSubclass",
        "torch.utils._python_dispatch.is_traceable_wrapper_subclass",
    ),
    "sharded gradients": (
        "torch.Tensor._make_wrapper_subclass",
        "torch._C._disabled_torch_function_impl",
    ),
    "offloaded gradients": ("torch._ops.OpOverload._schema",),
    "gradient scaling": ("torch._amp_foreach_non_finite_check_and_unscale_",),
    "hooks for the steps of all optimizers": (
        "torch.optim.optimizer._global_optimizer_pre_hooks",
        "torch.optim.optimizer._global_optimizer_post_hooks",
    ),
    "process groups": (f"{_GROUP}._device_types", f"{_GROUP}._get_backend"),
    "coalesced collectives": (f"{_GROUP}._start_coalescing", f"{_GROUP}._end_coalescing"),
    "more process groups": (
        "torch.distributed.ProcessGroupGloo._set_default_timeout",
        f"{_C10D}._new_process_group_helper",
        f"{_C10D}._world",
        f"{_C10D}._get_default_store",
    ),
    "hooks of the backward pass": (
        "torch._C._current_autograd_node",
        "torch._C._current_graph_task_id",
        "torch._C._will_engine_execute_node",
        "torch.autograd.Variable._execution_engine",
    ),
    "hooks on saved tensors": ("torch._C._autograd._saved_tensors_hooks_is_enabled",),
    "who shares memory": ("torch.UntypedStorage._cdata",),
    "DistributedDataParallel of zero_optim": (
        "torch.distributed._DEFAULT_FIRST_BUCKET_BYTES",
        "torch._C.Future",
    ),
    "broadcasting buffers": ("torch.distributed._broadcast_coalesced",),
    "models on the meta device": ("torch.autograd._unsafe_preserve_version_counter",),
    "zero-optim estimate": ("torch.utils._python_dispatch.TorchDispatchMode",),
}
OPTIONAL = (  # the library does without them
    "torch._C._autograd._top_saved_tensors_default_hooks",
    "torch._C._distributed_autograd._current_context",
    "torch._C._distributed_rpc._is_current_rpc_agent_set",
    "torch._C._storage_Use_Count",
    "torch._compile._disable_dynamo",
    "torch.autograd.profiler._is_profiler_enabled",
)
INHERITED: dict[str, tuple[str, ...]] = {
    "ZeroRedundancyOptimizer": (
        "torch.distributed.algorithms.join.Joinable._join_config",
        "torch.optim.Optimizer._optimizer_load_state_dict_post_hooks",
        "torch.optim.Optimizer._optimizer_load_state_dict_pre_hooks",
        "torch.optim.Optimizer._optimizer_step_post_hooks",
        "torch.optim.Optimizer._optimizer_step_pre_hooks",
        "torch.Tensor._cdata",
        "torch.Tensor._version",
    ),
    "FullyShardedDataParallel": (
        "torch.nn.Module._apply",
        "torch.nn.Module._buffers",
        "torch.nn.Module._forward_pre_hooks",
        "torch.nn.Module._modules",
        "torch.nn.Module._parameters",
    ),
    "DistributedDataParallel of zero_optim": (
        f"{_DDP}._check_sync_bufs_post_fwd",
        f"{_DDP}._comm_hooks",
        f"{_DDP}._ddp_init_helper",
        f"{_DDP}._match_all_reduce_for_bwd_pass",
        f"{_DDP}._match_unused_params_allreduce",
        f"{_DDP}._module_parameters",
        f"{_DDP}._passing_sync_batchnorm_handle",
        f"{_DDP}._post_forward",
        f"{_DDP}._register_builtin_comm_hook",
        f"{_DDP}._set_static_graph",
        f"{_DDP}._setup_in_backward_optimizers",
        f"{_DDP}._sync_buffers",
    ),
    "rebind() of a wrapper": (
        f"{_DDP}._build_debug_param_to_name_mapping",
        f"{_DDP}._build_params_for_reducer",
        f"{_DDP}._remove_autograd_hooks",
        f"{_DDP}._sync_module_buffers",
    ),
}


_FEATURES = {
    path.rpartition(".")[2].removeprefix("_"): (feature, path)
    for feature, paths in {**NAMES, "this": OPTIONAL}.items()
    for path in paths
}


def __getattr__(alias: str) -> Any:  # noqa: ANN401 - whatever PyTorch has
    if alias not in _FEATURES:
        raise AttributeError(f"{alias} is not in the list of private names")
    feature, path = _FEATURES[alias]
    value = globals()[alias] = _look_up(feature, path)
    return value


def require(feature: str) -> None:
    """Raise RuntimeError if names are missing that a feature uses on objects directly."""
    missing = [path for path in INHERITED[feature] if not _is_there(path)]
    if missing:
        raise _lacks(feature, ", ".join(missing))


def or_none(alias: str) -> Any:  # noqa: ANN401
    """Return what a name stands for; None if this PyTorch lacks it."""
    try:
        return __getattr__(alias)
    except RuntimeError:
        return None


def _look_up(feature: str, path: str) -> Any:  # noqa: ANN401
    if not _is_there(path):
        raise _lacks(feature, path)
    owner_path, _, name = path.rpartition(".")
    owner = resolve_name(owner_path)
    value: Any = getattr(owner, name, None)
    if not isclass(owner) or isclass(value) or isinstance(getattr_static(owner, name, None), staticmethod):
        return value
    if callable(value):  # a subclass may have its own
        return lambda target, *args, **options: getattr(target, name)(*args, **options)
    return attrgetter(name) if value is None or isdatadescriptor(value) else value


def _is_there(path: str) -> bool:
    """Return whether this PyTorch has a name, which a class may also declare or set when constructed."""
    owner_path, _, name = path.rpartition(".")
    try:
        owner = resolve_name(owner_path)
    except (AttributeError, ImportError):
        return False
    code = getattr(unwrap(getattr(owner, "__init__", owner.__class__)), "__code__", None)
    declared = getattr(owner, "__annotations__", ())
    return hasattr(owner, name) or name in declared or (code is not None and name in code.co_names)


def _lacks(feature: str, what: str) -> RuntimeError:
    return RuntimeError(
        f"{feature} needs {what}, which PyTorch {torch.__version__} does not have: "
        f"use PyTorch {WORKS_WITH}, or a newer zero-optim"
    )
