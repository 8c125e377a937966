"""The bytes of a class's state, and of what its step takes meanwhile, for parameters of any size."""

import inspect
import math
import weakref
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from zero_optim.comm.encoding import inner_tensors
from zero_optim.compat import private
from zero_optim.probe.trials import isolated

_SMALL = 2**18  # elements of a parameter that is tried as it is


class StepBytes:
    """Steps a parameter of a shape: on the meta device, or a smaller one on the CPU; remembered."""

    def __init__(self, optimizer_class: Any, options: Mapping[str, Any], device: str) -> None:  # noqa: ANN401
        takes = "foreach" in inspect.signature(optimizer_class).parameters and device != "cpu"
        self.at_once = takes and options.get("foreach") is not False and not options.get("fused")
        self._build = partial(optimizer_class, **options, **({"foreach": True} if self.at_once else {}))
        self._known: dict[tuple[tuple[int, ...], torch.dtype], tuple[int, int]] = {}

    def bytes_of(self, shape: tuple[int, ...], dtype: torch.dtype) -> tuple[int, int]:
        """Return the bytes of the state, and what the step takes beside."""
        if (shape, dtype) not in self._known:
            try:
                self._known[shape, dtype] = self._step(shape, dtype, "meta")
            except Exception:  # noqa: BLE001 - it reads values, such as a norm, or takes sparse gradients alone
                is_small = math.prod(shape) <= _SMALL
                small = shape if is_small else tuple(min(length, 128) for length in shape)
                larger = math.prod(shape) / max(1, math.prod(small))
                state, step = self._step(small, dtype, "cpu")
                self._known[shape, dtype] = int(state * larger), int(step * larger)
        return self._known[shape, dtype]

    def _step(self, shape: tuple[int, ...], dtype: torch.dtype, device: str) -> tuple[int, int]:
        with isolated():
            param = Parameter(torch.ones(shape, dtype=dtype, device=device))
            param.grad = torch.ones_like(param)
            optimizer = self._build([{"params": [param]}])
            optimizer.step()
            state = _storages(inner_tensors(dict(optimizer.state[param])))
            with _Living({*state, *_storages([param, param.grad])}) as living:
                optimizer.step()
        return sum(state.values()), living.peak


def _storages(tensors: Sequence[Tensor]) -> dict[int, int]:
    storages = [tensor.untyped_storage() for tensor in tensors]
    return {private.cdata(storage): storage.nbytes() for storage in storages}


class _Living(private.TorchDispatchMode):  # type: ignore[misc]
    """Counts the bytes of what operators have made and somebody holds, but for known storages."""

    def __init__(self, known: set[int]) -> None:
        super().__init__()
        self.peak, self._known, self._made = 0, known, dict[int, weakref.ref[Tensor]]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # noqa: ANN401
        made = func(*args, **(kwargs or {}))
        every = made if isinstance(made, list | tuple) else [made]
        self._made.update((id(each), weakref.ref(each)) for each in every if type(each) is Tensor)
        living = _storages([tensor for ref in self._made.values() if (tensor := ref()) is not None])
        self.peak = max(self.peak, sum(size for key, size in living.items() if key not in self._known))
        return made
