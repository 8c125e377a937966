"""A few elements of gradients, by which ranks notice that nobody averaged them.

Note [Gradients that nobody averaged]
    PyTorch's DDP does not say which gradients it reduced. So each step reads an element of the next two (some
    5 µs), and the stamp's digest tells whether ranks read the same; on an accelerator, in the next step.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from zero_optim.compat.streams import HostCopy, is_asynchronous
from zero_optim.health.stamps import Sampled
from zero_optim.plan.groups import ParamGroup, params_of, short_names

_NUM_READ = 2
_STRIDE = 2654435761  # spreads the places of elements; a prime


class GradientSamples:
    """Reads elements of gradients, of others in each step, and of the same on every rank."""

    def __init__(self) -> None:
        self._number = 0  # of steps
        self._named: list[tuple[str, Tensor]] = []
        self._copies: list[tuple[str, HostCopy]] = []  # of the last step, on an accelerator

    def take(
        self, groups: Sequence[ParamGroup], num_params: int, read: Callable[[HostCopy], Tensor]
    ) -> Sampled:
        """Return elements of some gradients by parameter; ``read`` waits for those of the last step."""
        if len(self._named) != num_params:
            self._named = list(zip(short_names(groups), params_of(groups), strict=True))
        earlier, self._copies = self._copies, []
        sampled: Sampled = {name: str(read(copy).item()) for name, copy in earlier}
        number, self._number = self._number, self._number + 1
        for index in {(number * _NUM_READ + place) % len(self._named) for place in range(_NUM_READ)}:
            name, param = self._named[index]
            grad = param.grad
            if type(grad) is not Tensor or grad.layout is not torch.strided or not grad.numel():
                sampled[name] = None  # no gradient, a part of one, or a sparse one
                continue
            element = grad.detach()[tuple(number * _STRIDE % size for size in grad.shape)]
            if is_asynchronous(grad.device):
                self._copies.append((name, HostCopy(element)))
            else:
                sampled[name] = str(element.item())
        return sampled
