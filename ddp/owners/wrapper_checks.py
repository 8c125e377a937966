"""What wrappers of sharded models refuse: options, modules and optimizers that do not fit."""

import inspect
from collections.abc import Mapping

import torch.distributed as dist
from torch import nn

from zero_optim.ddp.reducer.report import names_text
from zero_optim.optimizer import ZeroRedundancyOptimizer

OPTIONS = (
    "broadcast_buffers",
    "device_ids",
    "dim",
    "find_unused_parameters",
    "init_sync",
    "mixed_precision",
    "on_stall",
    "output_device",
    "static_graph",
    "timeout",
)
REFUSED = {
    "batched_grad_copy": "gradients are copied as they come, so that they can be dropped",
    "bucket_cap_mb": "buckets are those of the optimizer: give it bucket_cap_mb",
    "bucket_cap_mb_list": "buckets are those of the optimizer: give it bucket_cap_mb",
    "check_reduction": "it has had no effect for long",
    "delay_all_reduce_named_params": "every gradient goes to its owner, and none can be averaged elsewhere",
    "device_mesh": "the ranks are those of the optimizer: give it process_group=mesh.get_group(), and a 2-D "
    "mesh of replicas by the name of mesh",
    "gradient_as_bucket_view": "an owner's gradients are views already, and nobody else has whole ones",
    "param_to_hook_all_reduce": "every gradient goes to its owner, and none can be averaged elsewhere",
    "skip_all_reduce_unused_params": "the ranks have to reduce the same buckets",
}


def check_arguments(
    wrapper: type, accumulate: object, options: Mapping[str, object], refused: Mapping[str, str]
) -> None:
    """Raise TypeError for an option that a wrapper does not take, ValueError for a wrong ``accumulate``.

    ``refused`` says what to do in the place of an option of PyTorch's.
    """
    if accumulate not in ("owner", "local"):
        raise ValueError(f'expected accumulate to be "owner" or "local", got {accumulate!r}')
    for name in options:
        if name in refused:
            raise TypeError(f"{wrapper.__name__} takes no {name}: {refused[name]}")
        if name not in OPTIONS:
            arguments = inspect.signature(wrapper).parameters.values()
            keywords = {argument.name for argument in arguments if argument.kind is argument.KEYWORD_ONLY}
            raise TypeError(f"expected options among {', '.join(sorted({*OPTIONS, *keywords}))}, got {name}")


def check_group(optimizer: ZeroRedundancyOptimizer, process_group: dist.ProcessGroup | None) -> None:
    """Refuse another process group than the optimizer's."""
    if process_group is not None and process_group is not optimizer.ranks.process_group:
        raise ValueError(
            "process_group is another group than that of the optimizer, whose ranks own the gradients: leave "
            "it out, or give both the same"
        )


def check_module(module: object) -> None:
    """Refuse what is no module, or reduces gradients itself."""
    if not isinstance(module, nn.Module):
        raise TypeError(f"expected a module to wrap, got {type(module).__name__}")
    if any(isinstance(each, nn.parallel.DistributedDataParallel) for each in module.modules()):
        raise ValueError(
            "the module is, or contains, a DistributedDataParallel, which reduces gradients itself: wrap "
            "what is inside of it, its .module"
        )


def check_optimizer(module: nn.Module, optimizer: ZeroRedundancyOptimizer) -> None:
    """Refuse an optimizer that lacks parameters of the module, or waits for a comm hook."""
    if optimizer.core.inputs.options.overlap_with_ddp:
        raise ValueError(
            "the optimizer has overlap_with_ddp=True, and would wait for a comm hook that steps it: leave "
            "that out"
        )
    known = optimizer.pieces()
    ignored = getattr(module, "_ddp_params_and_buffers_to_ignore", ())
    unknown = [
        name
        for name, param in module.named_parameters()
        if param.requires_grad and name not in ignored and param not in known
    ]
    if unknown:
        raise ValueError(
            f"the optimizer does not have {names_text(unknown)}, so nobody owns the gradients: add them to "
            "it, or freeze them (requires_grad=False) before wrapping"
        )
