"""Restores what a load has changed: whether some state fits is only known when its object loads it."""

from collections.abc import Callable
from contextlib import suppress
from copy import deepcopy
from typing import Any

from torch import Tensor

from zero_optim.checkpoint.content import random_state, set_random_state
from zero_optim.checkpoint.names import Objects, unwrapped


class Undo:
    """Copies what a load will change, and restores it when it is called.

    Copies the parameters that the optimizer owns here, and what is not a tensor in the model. It does not
    copy the model's tensors, since the caller can check them before it changes them. Does not communicate.

    Args:
        objects: that are loaded into.
    """

    def __init__(self, objects: Objects) -> None:
        self._steps: list[Callable[[], None]] = []
        if objects.optimizer is not None:
            self._steps.append(objects.optimizer.core.remember())
        if objects.model is not None:
            model = unwrapped(objects.model)
            rest = {name: v for name, v in objects.model_state().items() if not isinstance(v, Tensor)}
            if rest:
                held = deepcopy(rest)

                def put_back() -> None:
                    with objects.left_freed():
                        _ignored(model.load_state_dict, held, strict=False)

                self._steps.append(put_back)
        self._steps += [_put_back(value) for value in objects.others.values()]
        self._device = objects.device
        self._random = random_state(self._device)

    def __call__(self) -> None:
        """Restore everything."""
        for step in reversed(self._steps):  # restoring a scheduler may write to its optimizer
            step()
        set_random_state(self._random, self._device)


def _put_back(value: Any) -> Callable[[], None]:  # noqa: ANN401 - torch has no one class of schedulers
    """Copy a scheduler or scaler: its state dict, for nested values, and its attributes."""
    held, attributes = deepcopy(value.state_dict()), dict(getattr(value, "__dict__", {}))

    def step() -> None:
        _ignored(value.load_state_dict, held)
        if attributes:
            value.__dict__.clear()
            value.__dict__.update(attributes)

    return step


def _ignored(call: Callable[..., Any], *args: object, **kwargs: object) -> None:
    """Call a function and ignore its error: the error that led to the undo is the one to report."""
    with suppress(Exception):
        call(*args, **kwargs)
