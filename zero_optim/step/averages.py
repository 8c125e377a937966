"""Moving averages of the owned parameters; `EMA` is their entry in state dicts."""

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from zero_optim.compat import private
from zero_optim.step.leaves import Leaves, entries_named

EMA = "zero_optim.ema"  # no class has an entry of that name


class WeightAverage:
    """A moving average of this rank's rows or masters (Polyak, Juditsky, 1992); ``decay`` None keeps none."""

    def __init__(self, decay: float | None, leaves: Leaves) -> None:
        if decay is not None and type(decay) not in (int, float):
            raise TypeError(f"expected ema_decay to be a number or None, got {decay!r}")
        if decay is not None and not 0 <= decay < 1:
            raise ValueError(f"expected ema_decay from 0 to below 1, got {decay}")
        self._decay = decay
        self._leaves = leaves
        self._swapped: dict[Tensor, Tensor] | None = None  # own values, while the averages stand in
        self._has_moved = False
        self.averages: dict[Tensor, Tensor] = {}

    def add(self, params: Iterable[Tensor]) -> None:
        """Start averages at the present values."""
        if self._decay is not None:
            self.averages.update({param: self._leaves.copied_value(param) for param in params})

    def begin_anew(self) -> None:
        """Restart averages at the present values, unless a step or load changed them."""
        if not self._has_moved:
            self._leaves.follow_values(self.averages)
            self.add(list(self.averages))

    def check_out(self) -> None:
        """Raise RuntimeError while the averages are in the model."""
        if self._swapped is not None:
            raise RuntimeError("the model holds the averaged weights: leave averaged_weights() first")

    def update(self, params: Iterable[Tensor] | None = None) -> None:
        """Move all averages, or some, towards their parameters."""
        assert self._decay is not None  # there are averages
        chosen = self.averages if params is None else params
        averaged = [param for param in chosen if param in self.averages]
        if averaged:
            self._has_moved = True
            values = [self._leaves.value(param) for param in averaged]
            with torch.no_grad():
                private.foreach_lerp_([self.averages[param] for param in averaged], values, 1 - self._decay)

    def check_swap_in(self) -> None:
        """Raise RuntimeError if there are no averages, or if the model holds them already."""
        if self._decay is None:
            raise RuntimeError("no averages are kept: build the optimizer with ema_decay=…")
        self.check_out()

    @torch.no_grad()
    def swap_in(self) -> None:
        """Copy the averages into the parameters and save the parameters' values."""
        self._swapped = {param: self._leaves.rows(param).detach().clone() for param in self.averages}
        for param, average in self.averages.items():
            self._leaves.rows(param).copy_(average)

    @torch.no_grad()
    def swap_out(self) -> None:
        """Restore the parameters' own values."""
        for param, value in (self._swapped or {}).items():
            self._leaves.rows(param).copy_(value)
        self._swapped = None

    def taken_from(self, entries: Mapping[Tensor, dict[str, Any]]) -> dict[Tensor, Tensor]:
        """Return the averages in loaded entries; StateMismatchError if one does not fit."""
        return entries_named(EMA, self.averages, entries)

    def load(self, saved_averages: Mapping[Tensor, Tensor], params: Iterable[Tensor] | None = None) -> None:
        """Copy loaded averages in, all or some; a missing one restarts from the parameter."""
        self._has_moved = True
        for param in self.averages if params is None else params:
            average, saved = self.averages[param], saved_averages.get(param)
            average.copy_(self._leaves.value(param).detach() if saved is None else saved)
