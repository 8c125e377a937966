"""Runs tests that were written for the CPU on another device, as they are.

Note [Tests on a device]
    Inside `on_device` the tensors that a test makes without naming a device are on that device, and so are
    those of the layers that it builds. Values are drawn on the CPU, by the CPU's generators: batches are
    those of the CPU's run. Only a test's own calls are changed, and those of ``torch.nn``.
    ``torch.set_default_device`` would change the library's calls too, and so hide a ``device=`` that is
    missing there.

    A test that reads addresses, or pages of memory, or that names the CPU, is for the CPU alone.
"""

import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import FrameType
from typing import Any
from unittest.mock import patch

import torch
from torch import nn

_MAKE_TENSORS = (
    *("arange", "as_tensor", "empty", "eye", "full", "linspace", "ones", "rand", "randint", "randn"),
    *("randperm", "scalar_tensor", "tensor", "zeros"),
)
_TESTS, _LAYERS = str(Path(__file__).parent), str(Path(nn.__file__).parent)
_devices = [torch.device("cpu")]


def current_device() -> torch.device:
    """Return the device that tests run on."""
    return _devices[-1]


@contextmanager
def on_device(device: torch.device) -> Iterator[None]:
    """Run tests on a device, see Note [Tests on a device]; for all threads of this process.

    Args:
        device: which.
    """
    with ExitStack() as stack:
        for name in _MAKE_TENSORS if device.type != "cpu" else ():
            stack.enter_context(patch.object(torch, name, _moving(getattr(torch, name), device)))
        _devices.append(device)
        stack.callback(_devices.pop)
        yield


def _moving(make: Callable[..., Any], device: torch.device) -> Callable[..., Any]:
    def make_and_move(*args: Any, **kwargs: Any) -> Any:
        if kwargs.get("device") is not None or not _is_of_a_test(sys._getframe(1)):
            return make(*args, **kwargs)
        requires_grad = kwargs.pop("requires_grad", False)
        made = make(*args, **kwargs)
        if not made.is_meta:  # inside `torch.device("meta")`
            made = made.to(device, non_blocking=True)
        return made.requires_grad_() if requires_grad else made

    return make_and_move


def _is_of_a_test(frame: FrameType | None) -> bool:
    """Whether a test has made a call, by itself or by building a layer."""
    while frame is not None and frame.f_code.co_filename.startswith(_LAYERS):
        frame = frame.f_back
    return frame is not None and frame.f_code.co_filename.startswith(_TESTS)
