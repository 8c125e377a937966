"""What a load changes can be put back, as only its own class can tell whether some of it fits."""

from collections.abc import Callable
from contextlib import suppress
from copy import deepcopy
from typing import Any

from torch import Tensor

from zero_optim.checkpoint.content import random_state, set_random_state
from zero_optim.checkpoint.names import Objects, unwrapped


class Undo:
    """Takes note of what is about to be loaded into, and puts it back when it is called.

    Copies the parameters that the optimizer owns here and what is no tensor in the model; the model's tensors
    are the caller's business, as they can be checked before they are changed. Does not communicate.

    Args:
        objects: that are loaded into.
    """

    def __init__(self, objects: Objects) -> None:
        self._steps: list[Callable[[], None]] = []
        if objects.optimizer is not None:
            self._steps.append(objects.optimizer.remember())
        if objects.model is not None:
            model = unwrapped(objects.model)
            rest = {name: v for name, v in model.state_dict().items() if not isinstance(v, Tensor)}
            if rest:
                held = deepcopy(rest)
                self._steps.append(lambda: _ignored(model.load_state_dict, held, strict=False))
        self._steps += [_put_back(value) for value in objects.others.values()]
        self._device = objects.device
        self._random = random_state(self._device)

    def __call__(self) -> None:
        """Put everything back."""
        for step in reversed(self._steps):  # a scheduler that is put back may write to its optimizer
            step()
        set_random_state(self._random, self._device)


def _put_back(value: Any) -> Callable[[], None]:  # noqa: ANN401 - torch has no one class of schedulers
    """Take note of a scheduler or scaler: its state dict, for what is nested, and its attributes."""
    held, attributes = deepcopy(value.state_dict()), dict(getattr(value, "__dict__", {}))

    def step() -> None:
        _ignored(value.load_state_dict, held)
        if attributes:
            value.__dict__.clear()
            value.__dict__.update(attributes)

    return step


def _ignored(call: Callable[..., Any], *args: object, **kwargs: object) -> None:
    """Call what may refuse: the error that made us put things back is the one to be told."""
    with suppress(Exception):
        call(*args, **kwargs)
