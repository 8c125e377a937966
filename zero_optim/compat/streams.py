"""Streams of accelerators, used only through here.

Note [Streams]
    `Work.wait` of NCCL, and `Future.wait` of a future that has been set, make the *current stream* wait, not
    the CPU. So read a tensor on a stream that waits for its writer. Memory is returned for the stream that
    allocated it: keep a tensor that another stream uses, or mark it with `record_use`.

Note [Asked by another thread]
    A thread without a device queries CUDA for device 0, which makes a context there of some 500 MiB. So a
    query uses the device of what it asks about. CUDA fails a capture of a graph if another thread queries,
    unless that declares, by a call of the driver, that others' captures do not concern it.
"""

import ctypes
import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, TypeAlias

import torch
from torch import Tensor

from zero_optim.compat import private
from zero_optim.compat.memory import pinned_in_full

Stream: TypeAlias = Any  # torch.Stream of the device's own kind, such as torch.cuda.Stream
Event: TypeAlias = Any


@lru_cache
def _driver() -> Any:  # noqa: ANN401 - of ctypes
    try:
        return ctypes.CDLL("libcuda.so.1")
    except OSError:  # there is none, or it is another accelerator
        return None


@dataclass(frozen=True, slots=True)
class Accelerator:
    """A device type with streams; ``module`` is PyTorch's, such as ``torch.cuda``."""

    module: Any

    def record_use(self, tensor: Tensor) -> None:
        """Keep a tensor's memory until the current stream has done its present work."""
        tensor.record_stream(self.module.current_stream(tensor.device))

    def host_tensor(self, like: Tensor) -> Tensor:
        """Allocate a pinned host tensor, for copies beside the CPU."""
        return torch.empty_like(like, device="cpu", pin_memory=True)

    def future(self, device: torch.device) -> torch.futures.Future[Tensor]:
        """Return a future whose waiters' streams wait for the stream that set it."""
        return torch.futures.Future(devices=[device])


def accelerator_of(device: torch.device) -> Accelerator | None:
    """Return what a device with streams has; None for a device without."""
    return None if device.type in ("cpu", "meta") else _accelerator_of(device)


@lru_cache  # what a device is does not change; dynamo warns where it traces this
def _accelerator_of(device: torch.device) -> Accelerator | None:
    module = torch.get_device_module(device)
    # MPS does everything in one order; its Stream of PyTorch 2.15 knows no events, and there is no `device`.
    return Accelerator(module) if hasattr(module, "Stream") and hasattr(module, "device") else None


def current_device(kind: str) -> torch.device:
    """Return this thread's current device of a type."""
    index = getattr(torch.get_device_module(kind), "current_device", None)
    return torch.device(kind) if index is None else torch.device(kind, index())


def is_asynchronous(device: torch.device) -> bool:
    """Return whether calls on a device return before their work is done."""
    return accelerator_of(device) is not None


def current_stream(device: torch.device) -> Stream | None:
    """Return this thread's current stream on a device; None without streams."""
    accelerator = accelerator_of(device)
    return None if accelerator is None else accelerator.module.current_stream(device)


@contextmanager
def asking(device: torch.device) -> Iterator[None]:
    """Let a thread that uses no device query one: Note [Asked by another thread]; nothing without streams."""
    accelerator = accelerator_of(device)
    if accelerator is None:
        yield
        return
    exchange = getattr(_driver(), "cuThreadExchangeStreamCaptureMode", lambda _: 0)
    mode = ctypes.c_int(1)  # CU_STREAM_CAPTURE_MODE_THREAD_LOCAL of cuda.h
    exchange(ctypes.byref(mode))  # which holds the mode of before then
    try:
        with accelerator.module.device(device):
            yield
    finally:
        exchange(ctypes.byref(mode))


def is_capturing(device: torch.device) -> bool:
    """Return whether this thread captures a graph on the device; its work cannot be queried."""
    accelerator = accelerator_of(device)
    module = None if accelerator is None else accelerator.module
    return bool(getattr(module, "is_current_stream_capturing", bool)())


@contextmanager
def using_stream(device: torch.device, stream: Stream | None) -> Iterator[None]:
    """Use a stream and its device on this thread; does nothing for None."""
    accelerator = accelerator_of(device)
    if accelerator is None or stream is None:
        yield
        return
    # The device first: on a thread that has none yet, PyTorch's stream context returns to device 0 when it
    # ends, and makes a context there, of half a GB. Its device context does not.
    with accelerator.module.device(stream.device), accelerator.module.stream(stream):
        yield


def recorded_event(device: torch.device) -> Event | None:
    """Record an event on the current stream; None without streams."""
    accelerator = accelerator_of(device)
    if accelerator is None:
        return None
    event = accelerator.module.Event()
    event.record(accelerator.module.current_stream(device))
    return event


def wait_for_event(device: torch.device, event: Event | None) -> None:
    """Let the current stream of a device wait for an event. The CPU does not wait."""
    stream = current_stream(device)
    if stream is not None and event is not None:
        stream.wait_event(event)


def record_use(*tensors: Tensor) -> None:
    """Keep tensors' memory until the current stream has done its present work; see Note [Streams]."""
    for tensor in tensors:
        accelerator = accelerator_of(tensor.device)
        if accelerator is not None:
            is_sparse = tensor.is_sparse
            for part in (private.indices(tensor), private.values(tensor)) if is_sparse else (tensor,):
                accelerator.record_use(part)


def to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """Copy a small tensor to a device; the CPU waits only for a copy to the CPU."""
    if tensor.device == device:
        return tensor
    copy = torch.empty_like(tensor, device=device)
    copy_to(copy, tensor)
    return copy


def copy_to(place: Tensor, tensor: Tensor) -> None:
    """Copy a small tensor into a device tensor. The CPU does not wait."""
    accelerator = accelerator_of(place.device)
    if accelerator is not None and tensor.device.type == "cpu":
        tensor = accelerator.host_tensor(tensor).copy_(tensor)
    place.copy_(tensor, non_blocking=accelerator is not None)


def future_on(device: torch.device) -> torch.futures.Future[Tensor]:
    """Return a future for a tensor on a device."""
    accelerator = accelerator_of(device)
    return torch.futures.Future() if accelerator is None else accelerator.future(device)


class HostCopy:
    """A copy of a tensor, or of several 1-D ones joined, for the CPU, which waits for it later, once."""

    def __init__(self, *tensors: Tensor) -> None:
        self._events: list[Event] = []
        devices = dict.fromkeys(tensor.device for tensor in tensors)
        accelerator = next(filter(None, map(accelerator_of, devices)), None)
        if accelerator is None:
            copies = [tensor.detach().to("cpu", copy=True) for tensor in tensors]
            self._value = copies[0] if len(copies) == 1 else torch.cat(copies)
            return
        sizes = [tensor.numel() for tensor in tensors]
        whole = torch.empty(sum(sizes), dtype=tensors[0].dtype, device="cpu")  # is never touched: only a form
        self._value = accelerator.host_tensor(tensors[0] if len(tensors) == 1 else whole)
        places = [self._value] if len(tensors) == 1 else torch.split(self._value, sizes)
        for place, tensor in zip(places, tensors, strict=True):
            place.copy_(tensor.detach(), non_blocking=True)
        self._events = [event for device in devices if (event := recorded_event(device)) is not None]

    @property
    def is_here(self) -> bool:
        """Whether the value is known to be complete, so that nobody waits."""
        return not self._events

    def read(self) -> Tensor:
        """Wait on the CPU, and return the value there."""
        events, self._events = self._events, []
        for event in events:
            event.synchronize()
        return self._value


class LateCopies:
    """Copies between device and host, for which the CPU waits before it uses the host memory. Thread-safe."""

    def __init__(self) -> None:
        self._events: dict[tuple[torch.device, Stream], Event] = {}  # the last one of each stream
        self._lock = threading.RLock()  # a signal handler may copy too

    def to_host(self, tensor: Tensor) -> Tensor:
        """Start to copy a device tensor to new host memory; later work may change it."""
        accelerator = accelerator_of(tensor.device)
        assert accelerator is not None
        place = accelerator.host_tensor(tensor)
        self.to_place(place, tensor.detach())
        return place

    def to_place(self, place: Tensor, tensor: Tensor) -> None:
        """Start to copy between a device, which converts dtypes, and memory of `to_host` or `host_memory`."""
        device = tensor.device if place.device.type == "cpu" else place.device
        if place.dtype != tensor.dtype and place.device == device:
            tensor = tensor.to(device, non_blocking=True)
        place.copy_(tensor, non_blocking=True)
        record_use(tensor)  # perhaps made on another stream, to which its memory goes back
        with self._lock:
            self._events[device, current_stream(device)] = recorded_event(device)

    def wait(self) -> None:
        """Wait on the CPU for all copies started so far."""
        if self._events:
            with self._lock:
                for event in self._events.values():
                    event.synchronize()
                self._events.clear()


def host_memory(like: Tensor) -> Tensor:
    """Allocate lasting host memory of exactly the size of a 1-D tensor of an accelerator."""
    accelerator = accelerator_of(like.device)
    assert accelerator is not None
    in_full = pinned_in_full(like, accelerator.module)
    return accelerator.host_tensor(like) if in_full is None else in_full


class StreamBeside:
    """One extra stream on each device, made at its first use."""

    def __init__(self) -> None:
        self._streams: dict[torch.device, Stream | None] = {}

    def using(self, device: torch.device) -> AbstractContextManager[Any]:
        """Use it and its device on this thread; does nothing without streams."""
        if device not in self._streams:
            accelerator = accelerator_of(device)
            self._streams[device] = None if accelerator is None else accelerator.module.Stream(device=device)
        return using_stream(device, self._streams[device])

    @contextmanager
    def behind(self, device: torch.device) -> Iterator[None]:
        """As `using`, after the extra stream waits for the current one's present work."""
        here = recorded_event(device)
        with self.using(device):
            wait_for_event(device, here)
            yield

    def join(self) -> None:
        """Let the current stream of each device wait for the extra one's present work."""
        for device, stream in self._streams.items():
            with using_stream(device, stream):
                event = recorded_event(device)
            wait_for_event(device, event)
