"""What modules find in the place of their parameters while a state dict is made or loaded.

Note [Loads that replace parameters]
    PyTorch has three ways to load a parameter. It copies into the one that is there; it puts the tensor of
    the state dict in its place (``assign=True``); or it swaps what both are
    (``torch.__future__.set_swap_module_params_on_conversion``). With the last two, neither the optimizer nor
    the unit would see what was loaded, and the module would be left with a parameter that nobody steps. So
    while it loads, a module finds stand-ins: parameters with the memory of the whole ones. Afterwards it
    has its own again. What replaced a stand-in is copied.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module, Parameter


class StandIns:
    """Stand in for some parameters of one module; see Note [Loads that replace parameters].

    Args:
        module: the module.
        places: the memory of each stand-in, by the parameter it stands for; others stay as they are.

    Attributes:
        places: as given, of the module's own parameters, by their names.
    """

    def __init__(self, module: Module, places: Mapping[Tensor, Tensor]) -> None:
        untyped: Any = module._parameters
        self._own: dict[str, Any] = untyped
        self._hidden = {name: param for name, param in self._own.items() if param in places}
        self.places = {name: places[param].detach() for name, param in self._hidden.items()}
        for name, param in self._hidden.items():
            self._own[name] = Parameter(self.places[name], requires_grad=param.requires_grad)

    @torch.no_grad()
    def end(self, *, written: bool) -> None:
        """Have the module find its own parameters again; a second call does nothing.

        Args:
            written: something was loaded: it is in the places afterwards.
        """
        hidden, self._hidden = self._hidden, {}
        for name, param in hidden.items():
            loaded, place = self._own[name], self.places[name]
            self._own[name] = param
            if written and loaded is not None and loaded.data_ptr() != place.data_ptr():
                place.copy_(loaded)
