"""Refuses sparse gradients of cut parameters if the class does not bear them. No communication."""

from collections.abc import Callable, Collection, Sequence

import torch
from torch import Tensor

from zero_optim.plan.groups import ParamGroup, options_of, param_names
from zero_optim.step.local import LocalOptimizer


def check_sparse_rows(
    groups: Sequence[ParamGroup],
    params: Collection[Tensor],
    local: LocalOptimizer,
    dtype_of: Callable[[Tensor], torch.dtype],
) -> None:
    """Raise ValueError unless probes gave equal bits for rows of these parameters' sparse gradients."""
    concerned, names = set(params), iter(param_names(groups))
    for number, group in enumerate(groups):
        for param in group["params"]:
            name = next(names)
            if param not in concerned:
                continue
            built = local.of_group(number)
            reason = built.why_not_sparse_rows(options_of(group), dtype_of(param))
            if reason is not None:
                raise ValueError(
                    f"the gradient of {name} is sparse, and the parameter is cut: several ranks own rows of "
                    f"it. {built.spec.name} with these options does not bear that ({reason}). Build the "
                    'optimizer with cuts=False, or keep this group whole: {"params": [...], "cuts": False}'
                )
