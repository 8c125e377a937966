"""For `scale.py`: collectives of a fake process group with results; counts of them and of launches."""

import contextlib
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

# Operators that start no kernel and no copy; Adam reads its steps, on the CPU; freed parameters are compared
# with what they were on the CPU alone.
_NO_LAUNCH = """view as_strided slice select split unbind expand detach alias narrow t transpose permute
unsqueeze squeeze split_with_sizes chunk _unsafe_view empty new_empty empty_like empty_strided
new_empty_strided lift_fresh promote_types _local_scalar_dense equal"""
VIEWS = frozenset(_NO_LAUNCH.split())
RECEIVING = ("all_to_all", "reduce_scatter")


_weakref: Any = StorageWeakRef


class Done(dist.Work):
    """A collective that is over, with a result, which those of a fake group lack."""

    def __init__(self, result: object) -> None:
        super().__init__()
        self._future: torch.futures.Future[object] = torch.futures.Future()
        self._future.set_result(result)

    def wait(self, *_: object) -> bool:
        """Return at once."""
        return True

    def get_future(self) -> torch.futures.Future[Any]:
        """Return the result."""
        return self._future


class Wire:
    """Collectives as if all ranks had the same, in few operators: the fake group copies rank by rank.

    Counts them, and the bytes that reductions received and that live.
    """

    def __init__(self) -> None:
        self.collectives: Counter[str] = Counter()
        self.received = 0
        self._living: dict[Any, int] = {}
        self._token = torch.zeros(1)
        self._start = dist.all_reduce

    @contextlib.contextmanager
    def instead(self) -> Iterator[None]:
        """Take the place of PyTorch's functions."""
        one = ["all_gather_into_tensor", "reduce_scatter_tensor", "all_to_all_single"]
        one += ["all_gather_single", "reduce_scatter_single"]
        ways: dict[str, Any] = dict.fromkeys(filter(dist.__dict__.__contains__, one), self._one)
        ways |= {
            "all_reduce": lambda _, tensor: [tensor],
            "all_gather": self._rows,
            "all_to_all": self._lists,
        }
        with contextlib.ExitStack() as patches:
            for name, way in ways.items():
                patches.enter_context(patch.object(dist, name, partial(self._run, name, way)))
            yield

    def _run(self, name: str, way: Callable[..., Any], *args: Any, **named: Any) -> Done | None:  # noqa: ANN401
        keys = ("output_tensor", "output", "input_tensor", "input")
        tensors = [*args, *(named[key] for key in keys if key in named)]
        self.collectives[name] += 1
        with _disable_current_modes():
            result = way(name, *tensors[: 1 if name == "all_reduce" else 2])
            self._start(self._token)
        return Done(result) if named.get("async_op") else None

    def _one(self, name: str, out: Tensor, mine: Tensor) -> Tensor:
        many, few = (out, mine) if out.numel() > mine.numel() else (mine, out)
        if few.numel() and many.numel() % few.numel() == 0:
            rows = many.view(-1, few.numel())
            if many is out and len(rows) > 1:
                rows[1:].copy_(few)
            if rows.data_ptr() != few.data_ptr():  # else in place
                rows[0].copy_(few) if many is out else few.copy_(rows[0])
        else:
            out.zero_()
        if name.startswith(RECEIVING):
            self._receive([out])
        return out

    def _rows(self, _: str, out: list[Tensor], mine: Tensor) -> list[Tensor]:
        torch._foreach_copy_(out, [mine] * len(out))
        return out

    def _lists(self, _: str, out: list[Tensor], __: list[Tensor]) -> list[Tensor]:
        torch._foreach_zero_(out)
        self._receive(out)
        return out

    def _receive(self, tensors: list[Tensor]) -> None:
        for tensor in tensors:
            storage = tensor.untyped_storage()
            self._living[_weakref(storage)] = storage.nbytes()
        self._living = {ref: nbytes for ref, nbytes in self._living.items() if not ref.expired()}
        self.received = max(self.received, sum(self._living.values()))


class Count(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts launches, and collectives that `Wire` does not replace."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.collectives: Counter[str] = Counter()
        self.launches = 0

    def __torch_dispatch__(self, func: Any, _: Any, args: Any = (), kwargs: Any = None) -> Any:  # noqa: ANN401
        """Count an operator and run it; PyTorch calls."""
        name = func.overloadpacket.__name__
        if func.namespace in ("c10d", "_c10d_functional"):
            self.collectives[name] += not name.startswith("wait")
        elif func.namespace == "aten" and name not in VIEWS and not name.startswith(("sym_", "is_")):
            self.launches += 1
        return func(*args, **(kwargs or {}))
