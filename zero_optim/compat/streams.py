"""Streams: work that an accelerator still does when the call has returned. The one place that asks for them.

On the CPU a call has done its work when it returns. There the functions here do nothing, or the plain thing.

Note [Streams]
    An accelerator does the work of one stream in order, and streams beside each other. `Work.wait` of an NCCL
    collective, and `Future.wait` of a future that has been set, make the *current stream* wait, not the CPU.
    (gloo's make the CPU wait too.) So whoever reads a tensor must do it on a stream that waits for the one
    that writes it. Memory is returned for the stream that it was allocated on: a tensor that another stream
    uses must be kept, or marked with `record_use`, until that stream has got there. A CPU that reads a value
    waits for all of that; `HostCopy` lets it look later.

Note [Asked by another thread]
    A thread that never chose a device asks CUDA for device 0: the first question makes a context there, of
    some 500 MiB, by each process of the host. So who asks uses the device of what is asked about. Nor may a
    thread ask while another one captures a graph: CUDA takes it for a mistake of the capture, which fails. It
    does not where the thread that asks says that captures of others do not concern it. PyTorch has no call
    for that, so the driver's is used.
"""

import ctypes
import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, TypeAlias

import torch
from torch import Tensor

from zero_optim.compat import private
from zero_optim.compat.memory import pinned_in_full

Stream: TypeAlias = Any  # torch.Stream of the device's own kind, such as torch.cuda.Stream
Event: TypeAlias = Any

_THREAD_LOCAL = 1  # CU_STREAM_CAPTURE_MODE_THREAD_LOCAL of cuda.h


@lru_cache
def _driver() -> Any:  # noqa: ANN401 - of ctypes
    try:
        return ctypes.CDLL("libcuda.so.1")
    except OSError:  # there is none, or it is another accelerator
        return None


@contextmanager
def _harmless_to_captures() -> Iterator[None]:
    """Let this thread call CUDA while others capture; see Note [Asked by another thread]."""
    exchange = getattr(_driver(), "cuThreadExchangeStreamCaptureMode", lambda _: 0)
    mode = ctypes.c_int(_THREAD_LOCAL)
    exchange(ctypes.byref(mode))  # which holds the mode of before then
    try:
        yield
    finally:
        exchange(ctypes.byref(mode))


@dataclass(frozen=True, slots=True)
class Accelerator:
    """The streams of one type of device.

    Args:
        module: PyTorch's module for it, such as ``torch.cuda``.
    """

    module: Any

    def current_stream(self, device: torch.device) -> Stream:
        """Return the stream that this thread uses on a device."""
        return self.module.current_stream(device)

    def is_capturing(self) -> bool:
        """Whether the current stream of this thread notes what it is given, for a graph."""
        asks = getattr(self.module, "is_current_stream_capturing", None)
        return asks is not None and bool(asks())

    @contextmanager
    def asking(self, device: torch.device) -> Iterator[None]:
        """Use a device on this thread to ask what it has done; see Note [Asked by another thread]."""
        with _harmless_to_captures(), self.module.device(device):
            yield

    def new_stream(self, device: torch.device) -> Stream:
        """Make a stream beside the others."""
        return self.module.Stream(device=device)

    @contextmanager
    def using(self, stream: Stream) -> Iterator[None]:
        """Use a stream, and its device, on this thread while the context lasts."""
        # The device first: on a thread that has none yet, PyTorch's stream context returns to device 0 when
        # it ends, by the call that makes a context there, of half a GB. Its device context does not.
        with self.module.device(stream.device), self.module.stream(stream):
            yield

    def recorded_event(self, device: torch.device) -> Event:
        """Make an event that happens when the current stream has done what it was given so far."""
        event = self.module.Event()
        event.record(self.current_stream(device))
        return event

    def record_use(self, tensor: Tensor) -> None:
        """Keep a tensor's memory until the current stream has done what it was given so far."""
        tensor.record_stream(self.current_stream(tensor.device))

    def host_tensor(self, like: Tensor) -> Tensor:
        """Make a tensor on the host to which copies run beside the CPU."""
        return torch.empty_like(like, device="cpu", pin_memory=True)

    def future(self, device: torch.device) -> torch.futures.Future[Tensor]:
        """Make a future that orders streams: who waits for it has its stream wait for the one that set it."""
        return torch.futures.Future(devices=[device])


def accelerator_of(device: torch.device) -> Accelerator | None:
    """Give the streams of a device; None for a device without streams."""
    if device.type in ("cpu", "meta"):
        return None
    module = torch.get_device_module(device)
    return Accelerator(module) if hasattr(module, "Stream") else None  # MPS does everything in one order


def current_device(kind: str) -> torch.device:
    """Return the device of a type that this thread uses where none is named."""
    index = getattr(torch.get_device_module(kind), "current_device", None)
    return torch.device(kind) if index is None else torch.device(kind, index())


def is_asynchronous(device: torch.device) -> bool:
    """Whether work may still be under way on a device when the call that asked for it has returned."""
    return accelerator_of(device) is not None


def current_stream(device: torch.device) -> Stream | None:
    """Return the stream that this thread uses on a device; None if the device has none."""
    accelerator = accelerator_of(device)
    return None if accelerator is None else accelerator.current_stream(device)


def asking(device: torch.device) -> AbstractContextManager[None]:
    """Let this thread, which uses no device itself, ask what one has done; nothing without streams."""
    accelerator = accelerator_of(device)
    return nullcontext() if accelerator is None else accelerator.asking(device)


def is_capturing(device: torch.device) -> bool:
    """Whether this thread captures a graph of what the device is to do; such work cannot be asked about."""
    accelerator = accelerator_of(device)
    return accelerator is not None and accelerator.is_capturing()


def using_stream(device: torch.device, stream: Stream | None) -> AbstractContextManager[Any]:
    """Use a stream of a device, and the device, on this thread; nothing for None."""
    accelerator = accelerator_of(device)
    if accelerator is None or stream is None:
        return nullcontext()
    return accelerator.using(stream)


def new_stream(device: torch.device) -> Stream | None:
    """Make a stream of a device, beside the others; None if the device has none."""
    accelerator = accelerator_of(device)
    return None if accelerator is None else accelerator.new_stream(device)


def recorded_event(device: torch.device) -> Event | None:
    """Make an event that happens when the current stream has done its work so far; None without streams."""
    accelerator = accelerator_of(device)
    return None if accelerator is None else accelerator.recorded_event(device)


def wait_for_event(device: torch.device, event: Event | None) -> None:
    """Let the current stream of a device wait for an event. The CPU does not wait."""
    stream = current_stream(device)
    if stream is not None and event is not None:
        stream.wait_event(event)


def record_use(*tensors: Tensor) -> None:
    """Keep the memory of tensors until the current stream has done its work so far; see Note [Streams]."""
    for tensor in tensors:
        accelerator = accelerator_of(tensor.device)
        if accelerator is not None:
            for part in _dense_parts(tensor):
                accelerator.record_use(part)


def _dense_parts(tensor: Tensor) -> tuple[Tensor, ...]:
    """Give the tensors that hold the memory of a tensor."""
    return (private.indices(tensor), private.values(tensor)) if tensor.is_sparse else (tensor,)


def to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """Bring a small tensor of the CPU to a device. The CPU does not wait for the copy."""
    accelerator = accelerator_of(device)
    if accelerator is None:
        return tensor.to(device)
    return accelerator.host_tensor(tensor).copy_(tensor).to(device, non_blocking=True)


def copy_to(place: Tensor, tensor: Tensor) -> None:
    """Copy a small tensor of the CPU to a place on a device. The CPU does not wait for the copy."""
    accelerator = accelerator_of(place.device)
    if accelerator is None:
        place.copy_(tensor)
    else:
        place.copy_(accelerator.host_tensor(tensor).copy_(tensor), non_blocking=True)


def future_on(device: torch.device) -> torch.futures.Future[Tensor]:
    """Make a future for a tensor on a device."""
    accelerator = accelerator_of(device)
    return torch.futures.Future() if accelerator is None else accelerator.future(device)


def brought_to(tensor: Tensor, device: torch.device) -> Tensor:
    """Bring a small tensor from anywhere; the CPU waits only if it has to come to the CPU."""
    if tensor.device == device:
        return tensor
    if tensor.device.type == "cpu":
        return to_device(tensor, device)
    return tensor.to(device, non_blocking=is_asynchronous(device))


class HostCopy:
    """A copy for the CPU, which need not wait for it at once, and waits once.

    Args:
        *tensors: one tensor; or several of one dtype, 1-D, from any devices, which are copied one after the
            other into one. They are read by the current stream; later work of that stream may change them.
    """

    def __init__(self, *tensors: Tensor) -> None:
        self._events: list[Event] = []
        devices = dict.fromkeys(tensor.device for tensor in tensors)
        found = [accelerator for device in devices if (accelerator := accelerator_of(device)) is not None]
        if not found:
            copies = [tensor.detach().to("cpu", copy=True) for tensor in tensors]
            self._value = copies[0] if len(copies) == 1 else torch.cat(copies)
            return
        sizes = [tensor.numel() for tensor in tensors]
        whole = torch.empty(sum(sizes), dtype=tensors[0].dtype, device="cpu")  # is never touched: only a form
        self._value = found[0].host_tensor(tensors[0] if len(tensors) == 1 else whole)
        places = [self._value] if len(tensors) == 1 else torch.split(self._value, sizes)
        for place, tensor in zip(places, tensors, strict=True):
            place.copy_(tensor.detach(), non_blocking=True)
        self._events = [event for device in devices if (event := recorded_event(device)) is not None]

    @property
    def is_here(self) -> bool:
        """Whether the value is known to have come, so that nobody waits for it."""
        return not self._events

    def read(self) -> Tensor:
        """Wait on the CPU until the value has come, and give it, on the CPU."""
        events, self._events = self._events, []
        for event in events:
            event.synchronize()
        return self._value


class LateCopies:
    """Copies between a device and memory of the host, for which the CPU waits when it uses that memory.

    Each thread may start them, and wait. On a device without streams they are done at once.
    """

    def __init__(self) -> None:
        self._events: dict[tuple[torch.device, Stream], Event] = {}  # the last one of each stream
        self._lock = threading.Lock()

    def to_host(self, tensor: Tensor) -> Tensor:
        """Start to copy a tensor of a device to new memory of the host; later work may change it."""
        accelerator = accelerator_of(tensor.device)
        if accelerator is None:
            return tensor.detach().to("cpu", copy=True)
        place = accelerator.host_tensor(tensor)
        place.copy_(tensor.detach(), non_blocking=True)
        record_use(tensor)  # perhaps made on another stream, to which its memory goes back
        self._note(tensor.device)
        return place

    def to_place(self, place: Tensor, tensor: Tensor) -> None:
        """Start to copy a tensor of the host to a place on a device, or the other way round.

        Each may have a dtype of its own; it is converted on the device.

        Args:
            place: where to.
            tensor: of as many elements. Memory of the host is that of `to_host` or `host_memory`.
        """
        device = tensor.device if place.device.type == "cpu" else place.device
        beside = is_asynchronous(device)
        if place.dtype != tensor.dtype and place.device == device:
            tensor = tensor.to(device, non_blocking=beside)
        place.copy_(tensor, non_blocking=beside)
        if beside:
            record_use(tensor)
            self._note(device)

    def _note(self, device: torch.device) -> None:
        with self._lock:
            self._events[device, current_stream(device)] = recorded_event(device)

    def wait(self) -> None:
        """Wait on the CPU until all that were started so far are done."""
        if self._events:
            with self._lock:
                for event in self._events.values():
                    event.synchronize()
                self._events.clear()


def host_memory(like: Tensor) -> Tensor:
    """Make memory of the host, to stay for long, for copies that run beside the CPU.

    Args:
        like: 1-D, on the device.

    Returns:
        A tensor of its form; it takes no more memory than that.
    """
    accelerator = accelerator_of(like.device)
    if accelerator is None:
        return torch.empty_like(like, device="cpu")
    in_full = pinned_in_full(like, accelerator.module)
    return accelerator.host_tensor(like) if in_full is None else in_full


class StreamBeside:
    """A stream of one's own on each device, made when it is first used."""

    def __init__(self) -> None:
        self._streams: dict[torch.device, Stream | None] = {}

    def using(self, device: torch.device) -> AbstractContextManager[Any]:
        """Use it, and its device, on this thread; nothing on a device without streams."""
        if device not in self._streams:
            self._streams[device] = new_stream(device)
        return using_stream(device, self._streams[device])

    def join(self) -> None:
        """Let the current stream of each device wait for what the stream beside it was given so far."""
        for device, stream in self._streams.items():
            with using_stream(device, stream):
                event = recorded_event(device)
            wait_for_event(device, event)
