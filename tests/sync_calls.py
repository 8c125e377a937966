"""Finds the calls by which the CPU would wait for an accelerator, in a run on the CPU.

`cpu_as_accelerator` has the library take CPU tensors for those of a device with streams. `recorded` lists the
calls that would wait there, with their stacks: reading an element, comparing, counting, copying to the host,
copying from memory that is not pinned.

    with cpu_as_accelerator():
        ...  # build the model and the optimizer, and train until buckets are what they stay
        with recorded() as calls:
            model(inputs).sum().backward()
            optimizer.step()
    assert not calls, texts(calls)

Only tensors made by ``torch.tensor(...)`` without a device or for ``"cpu"``, and copies for the host that
`zero_optim.compat.streams` makes, are taken to lie on the host. Reading these, or what is made of them alone,
is no wait. `Event.synchronize` is none either if a backward pass has begun since the event was recorded: by
then the accelerator has other work to do while the CPU waits. Operations inside PyTorch's C++ code are seen
on the thread that records, Python methods of tensors on every thread.
"""

import threading
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from zero_optim.compat import streams

with warnings.catch_warnings():  # it scripts functions, of which calls that are replaced are none
    warnings.simplefilter("ignore")
    import torch.distributed.optim

READS = (
    "__bool__",
    "__float__",
    "__int__",
    "__index__",
    "cpu",
    "equal",
    "item",
    "nonzero",
    "numpy",
    "tolist",
)
OPERATIONS = (
    torch.ops.aten._local_scalar_dense,
    torch.ops.aten.allclose,
    torch.ops.aten.equal,
    torch.ops.aten.is_nonzero,
    torch.ops.aten.masked_select,
    torch.ops.aten.nonzero,
    torch.ops.aten._unique2,
)


@dataclass(frozen=True)
class SyncCall:
    """A call that would wait: its name, and where it was made."""

    name: str
    stack: str


def texts(calls: Sequence[SyncCall]) -> str:
    """Say, for the message of an assertion, what was called from where."""
    return "\n".join(f"{call.name}:\n{call.stack}" for call in calls)


@dataclass
class _Recording:
    calls: list[SyncCall] = field(default_factory=list)
    local: threading.local = field(default_factory=threading.local)

    def note(self, name: str) -> None:
        """Add a call, unless it is made by one that was added or looked at already."""
        if not getattr(self.local, "is_inside", False):
            stack = [frame for frame in traceback.extract_stack() if frame.filename != __file__]
            self.calls.append(SyncCall(name, "".join(traceback.format_list(stack[-8:]))))

    @contextmanager
    def inside(self) -> Iterator[None]:
        before = getattr(self.local, "is_inside", False)
        self.local.is_inside = True
        try:
            yield
        finally:
            self.local.is_inside = before


_recordings: list[_Recording] = []  # those under way; one at most
_num_backwards = [0]  # that have begun, while `counting_backwards`


def _lies_on_host(tensor: Tensor) -> bool:
    base = tensor if tensor._base is None else tensor._base
    return bool(getattr(tensor, "lies_on_host", False) or getattr(base, "lies_on_host", False))


def on_host(tensor: Tensor) -> Tensor:
    """Take a tensor, and views of it, to lie on the host."""
    tensor.lies_on_host = True  # type: ignore[attr-defined]
    return tensor


# ---------------------------------------------------------------------- an accelerator that does nothing


class Event:
    """An event that never passes by itself."""

    def __init__(self) -> None:
        self._made_in = _num_backwards[0]

    def record(self, _: object = None) -> None:
        self._made_in = _num_backwards[0]

    def wait(self, _: object = None) -> None:
        pass

    def query(self) -> bool:
        return False  # so that what depends on it shows

    def synchronize(self) -> None:
        if _recordings and self._made_in == _num_backwards[0]:
            _recordings[-1].note("Event.synchronize")


class _Stream:
    device = torch.device("cpu")

    def wait_event(self, event: object) -> None:
        pass

    def wait_stream(self, stream: object) -> None:
        pass

    def record_event(self, event: object = None) -> object:
        return event or Event()

    def synchronize(self) -> None:
        if _recordings:
            _recordings[-1].note("Stream.synchronize")


def _module() -> Any:
    stream = _Stream()
    return SimpleNamespace(
        Event=Event,
        Stream=lambda device: _Stream(),
        current_stream=lambda device: stream,
        device=lambda device: nullcontext(),
        stream=lambda stream: nullcontext(),
    )


@dataclass(frozen=True)
class _Accelerator(streams.Accelerator):
    """Streams that exist, and do everything at once."""

    module: Any = field(default_factory=_module)

    def record_use(self, tensor: Tensor) -> None:
        pass

    def host_tensor(self, like: Tensor) -> Tensor:
        return on_host(torch.empty_like(like))

    def future(self, device: torch.device) -> "torch.futures.Future[Tensor]":
        return torch.futures.Future()


@contextmanager
def cpu_as_accelerator() -> Iterator[None]:
    """Have the library take the CPU for a device with streams."""
    accelerator = _Accelerator()
    with patch.object(streams, "accelerator_of", lambda _: accelerator), counting_backwards(), _marking():
        yield


@contextmanager
def _marking() -> Iterator[None]:
    """Mark what `torch.tensor` makes on the host, and take note where it makes something on the device."""
    original = torch.tensor

    def tensor(*args: Any, **kwargs: Any) -> Tensor:
        with ExitStack() as stack:
            for recording in _recordings:
                stack.enter_context(recording.inside())
            made = original(*args, **kwargs)
        if _is_host(kwargs.get("device")):
            return on_host(made)
        for recording in _recordings:
            recording.note("torch.tensor(..., device=)")
        return made

    with patch.object(torch, "tensor", tensor):
        yield


def num_backwards() -> int:
    """How many backward passes have begun, of those that were counted."""
    return _num_backwards[0]


@contextmanager
def counting_backwards() -> Iterator[None]:
    """Count backward passes; only once if entered again inside."""
    if hasattr(torch.autograd.backward, "counts"):
        yield
        return
    original = torch.autograd.backward

    def backward(*args: Any, **kwargs: Any) -> None:
        _num_backwards[0] += 1
        original(*args, **kwargs)

    backward.counts = True  # type: ignore[attr-defined]
    with patch.object(torch.autograd, "backward", backward):
        yield


def _is_host(device: object) -> bool:
    return device is None or (isinstance(device, str) and device == "cpu")


# ---------------------------------------------------------------------- recording


@contextmanager
def recorded() -> Iterator[list[SyncCall]]:
    """List the calls that would wait, made in this context on any thread."""
    recording = _Recording()
    with ExitStack() as stack:
        for name in READS:
            stack.enter_context(_patched(Tensor, name, _reading(recording, name)))
        stack.enter_context(_patched(Tensor, "to", lambda original: _moving(recording, original)))
        stack.enter_context(_marking())
        stack.enter_context(patch.object(torch, "equal", _reading(recording, "equal")(torch.equal)))
        stack.enter_context(_Operations(recording))
        _recordings.append(recording)
        stack.callback(_recordings.pop)
        yield recording.calls


@contextmanager
def _patched(owner: type, name: str, wrap: Callable[[Any], Any]) -> Iterator[None]:
    """Replace a method that the class may have from its base."""
    is_own, original = name in vars(owner), getattr(owner, name)
    setattr(owner, name, wrap(original))
    try:
        yield
    finally:
        if is_own:
            setattr(owner, name, original)
        else:
            delattr(owner, name)


def _reading(recording: _Recording, name: str) -> Callable[[Any], Any]:
    def wrap(original: Any) -> Any:
        def read(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
            if not _lies_on_host(tensor):
                recording.note(name)
            with recording.inside():
                return original(tensor, *args, **kwargs)

        return read

    return wrap


def _moving(recording: _Recording, original: Any) -> Any:
    def to(tensor: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        targets = [*args[:1], kwargs.get("device")]
        names_device = any(isinstance(target, torch.device | str) for target in targets)
        if names_device and _lies_on_host(tensor) and not kwargs.get("non_blocking"):
            recording.note("to(device) of memory that is not pinned")
        elif "cpu" in map(str, targets) and not _lies_on_host(tensor):
            recording.note("to('cpu')")
        moved: Tensor = original(tensor, *args, **kwargs)
        return moved.detach().clone() if names_device and moved is tensor and _lies_on_host(tensor) else moved

    return to


class _Operations(TorchDispatchMode):
    """Sees what reaches the kernels, from C++ too."""

    def __init__(self, recording: _Recording) -> None:
        super().__init__()
        self._recording = recording

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        operation = func.overloadpacket
        reads = operation in OPERATIONS or (operation is torch.ops.aten.index and _has_mask(args))
        if reads and not _lies_on_host(args[0]):
            self._recording.note(str(func))
        result = func(*args, **(kwargs or {}))
        tensors = [value for value in args if isinstance(value, Tensor)]
        if isinstance(result, Tensor) and tensors and all(map(_lies_on_host, tensors)):
            on_host(result)  # made of what lies there
        return result


def _has_mask(args: Sequence[Any]) -> bool:
    return any(index is not None and index.dtype in (torch.bool, torch.uint8) for index in args[1])
