"""What an optimizer's state looks like, found by trying the user's class on small tensors."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

# Sizes of trial parameters: distinct, so that no other tensor of the state has the shape by chance.
_TRIAL_SIZES = (5, 3, 7, 2, 4, 6)


@dataclass(slots=True)
class ShapedKeys:
    """Which entries of a class's state have the shape of their parameter.

    A loaded state dict can be checked against this before the optimizer has any state of its own.
    Found by one step of a throwaway optimizer for each number of dimensions asked for; draws no
    random numbers and does not communicate.

    Args:
        optimizer_class: as given to `ZeroRedundancyOptimizer`.
        defaults: its keyword arguments.
    """

    optimizer_class: Callable[..., Optimizer]
    defaults: dict[str, Any]
    _found: dict[int, frozenset[str]] = field(default_factory=dict)

    def of(self, num_dims: int) -> frozenset[str]:
        """Name the entries with the parameter's shape; none where the class cannot be tried."""
        if num_dims not in self._found:
            self._found[num_dims] = self._try(num_dims) if 0 < num_dims <= len(_TRIAL_SIZES) else frozenset()
        return self._found[num_dims]

    def _try(self, num_dims: int) -> frozenset[str]:
        param = torch.linspace(-1, 1, torch.Size(_TRIAL_SIZES[:num_dims]).numel()).reshape(
            _TRIAL_SIZES[:num_dims]
        )
        param.requires_grad_().grad = torch.full_like(param, 0.5)
        try:
            trial = self.optimizer_class([param], **self.defaults)
            trial.step()
        except Exception:  # noqa: BLE001 - the class is the user's; one that needs more than this is not checked
            return frozenset()
        entries = trial.state.get(param, {})
        return frozenset(
            key for key, value in entries.items() if isinstance(value, Tensor) and value.shape == param.shape
        )
