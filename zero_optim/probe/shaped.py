"""Probes a class's state entries, and which have their parameter's shape."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from zero_optim.probe.subject import OptimizerUnderTest
from zero_optim.probe.trials import Feed, Shape, isolated, recorded

# Distinct sizes, so that no other tensor of the state has the shape by chance.
_TRIAL_SIZES = (5, 3, 7, 2, 4, 6)
# For classes that factor state from 128 rows, or from 4,096 elements.
_LARGE_SIZES = (128, 34, 3, 2, 5, 7)
_LARGE_VECTOR = (4352,)


def state_entries(
    optimizer_class: Callable[..., Optimizer], options: Mapping[str, Any], num_dims: int
) -> dict[str, bool]:
    """Return whether each state entry of parameters with so many dimensions has their shape.

    Steps a temporary optimizer for two sizes. Empty if the class cannot be tried. A vector is long only if
    the size makes a difference: Shampoo squares the length, which takes a minute.
    """
    if not 0 < num_dims <= len(_TRIAL_SIZES):
        return {}
    subject = OptimizerUnderTest.of(optimizer_class, options, ())
    shapes = [_TRIAL_SIZES[:num_dims], _LARGE_SIZES[:num_dims]]
    if num_dims == 1:
        differs = _try(subject, _TRIAL_SIZES[:2]) != _try(subject, _LARGE_SIZES[:2])
        shapes[1:] = [_LARGE_VECTOR] if differs else []
    tried = [entries for shape in shapes if (entries := _try(subject, shape))]
    return {name: all(entries.get(name) for entries in tried) for entries in tried for name in entries}


def _try(subject: OptimizerUnderTest, shape: Shape) -> dict[str, bool]:
    feed = Feed((shape,), gaps=False, num_groups=1, num_steps=1)
    with isolated():
        for candidate in subject.candidates():
            for each in (feed, replace(feed, sparse=True)):
                trial = recorded(candidate, each)
                if trial is not None:
                    (param,), (entries, *_) = trial.run.leaves[0], trial.run.state_of(0)
                    return {
                        name: isinstance(value, Tensor) and value.shape == param.shape
                        for name, value in entries.items()
                    }
    return {}
