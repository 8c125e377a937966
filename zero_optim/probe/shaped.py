"""Probes which entries a class's state has, and which have their parameter's shape."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from zero_optim.probe.subject import OptimizerUnderTest
from zero_optim.probe.trials import Feed, TrialRun, isolated, record

# Sizes of trial parameters: distinct, so that no other tensor of the state has the shape by chance.
_TRIAL_SIZES = (5, 3, 7, 2, 4, 6)
# Classes that factor state from 128 rows on, or from 4,096 elements, have other entries then.
_LARGE_SIZES = (128, 34, 3, 2, 5, 7)
_LARGE_VECTOR = (4352,)


@dataclass(slots=True)
class ShapedKeys:
    """The state entries with the parameter's shape, to check a loaded state dict.

    One step of a temporary optimizer shows them, for each number of dimensions and two sizes.
    """

    optimizer_class: Callable[..., Optimizer]
    defaults: dict[str, Any]
    _found: dict[int, dict[str, bool]] = field(default_factory=dict)

    def of(self, num_dims: int) -> frozenset[str]:
        """Return entries with the parameter's shape; none if the class cannot be tried."""
        return frozenset(name for name, is_shaped in self.entries(num_dims).items() if is_shaped)

    def entries(self, num_dims: int) -> dict[str, bool]:
        """Return for each entry whether it has the parameter's shape; see `of`."""
        if num_dims not in self._found:
            found: dict[str, bool] = {}
            if 0 < num_dims <= len(_TRIAL_SIZES):
                tried = [entries for shape in self._shapes(num_dims) if (entries := self._try(shape))]
                found = {k: all(entries.get(k) for entries in tried) for entries in tried for k in entries}
            self._found[num_dims] = found
        return self._found[num_dims]

    def _shapes(self, num_dims: int) -> list[tuple[int, ...]]:
        small, large = _TRIAL_SIZES[:num_dims], _LARGE_SIZES[:num_dims]
        if num_dims > 1:
            return [small, large]
        # Shampoo squares the length, which takes a minute: a long vector only where size makes a difference.
        differs = self._try(_TRIAL_SIZES[:2]) != self._try(_LARGE_SIZES[:2])
        return [small, _LARGE_VECTOR] if differs else [small]

    def _try(self, shape: tuple[int, ...]) -> dict[str, bool]:
        subject = OptimizerUnderTest.of(self.optimizer_class, self.defaults, ())
        feed = Feed((shape,), gaps=False, num_groups=1, num_steps=1)
        with isolated():
            for candidate in (subject, subject.without_switches()):
                for tried in (feed, replace(feed, sparse=True)):
                    try:
                        made = record(candidate, tried)
                    except Exception:  # noqa: BLE001 - a class that needs more than this is not checked
                        continue
                    return _shaped(made.run)
        return {}


def _shaped(run: TrialRun) -> dict[str, bool]:
    (param,), (entries, *_) = run.leaves[0], run.state_of(0)
    return {k: isinstance(value, Tensor) and value.shape == param.shape for k, value in entries.items()}
