"""A model of streams: the library's own code runs on the CPU as if tensors lay on an accelerator.

The values are real: each operator does its work at once, on the CPU, and collectives move their data over
gloo. What is modelled is the order: which stream an operator belongs to, which work of other streams has
ended for certain when it begins, which memory it reads and writes. Two uses of memory of which one writes,
and that no event orders, are a race, found whatever the timing was in this run. So is memory that returns to
the allocator while another stream may still use it. A race is reported with both stacks.

    with modelled_streams() as model:
        side = model.new_stream()
        ...

What is modelled as on CUDA:

- ``compat.streams``, by its seam `accelerator_of`: streams, events, contexts, ``record_use``, pinned copies,
  futures.
- Each operator (a `TorchDispatchMode`) is work of its thread's current stream. Threads begin with the default
  stream. What was asked for after the CPU had waited comes after what it waited for.
- Collectives run on a stream of their group, which waits for the current one; `Work.wait` makes the current
  stream wait. Its tensors are kept until then. Futures' callbacks have streams of their own.
- Memory belongs to the stream it was allocated on. When the last tensor goes, it may be used again by that
  stream at once. So it is with the memory of a storage that is emptied (`UntypedStorage.resize_`).
- `.item()`, `.tolist()`, `.nonzero()` and their like make the CPU wait for the current stream.

What is not:

- Autograd knows nothing of the streams: the backward pass runs on the stream that is current where it is
  called. `on_stream` moves a part of a model to another stream, in both passes, as autograd does on CUDA.
- What the CPU knows of streams goes from thread to thread by futures, `queue.SimpleQueue` and the start of a
  thread, not by locks. PyTorch's own C++ (its reducer, coalesced broadcasts of buffers) is seen as operators
  only.
- Only what this run asked for is checked, not what another order of threads would ask for.
"""

import queue
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d as c10d

from modelled.clocks import Clocks, Event, Stream
from modelled.collectives import Communicators
from modelled.futures import Future, record_use
from modelled.memory import Memory, Race
from modelled.operators import Accesses, Watching
from zero_optim.compat import streams


@dataclass(frozen=True, slots=True)
class _Module:
    """What ``torch.cuda`` is for CUDA."""

    clocks: Clocks

    def Stream(self, device: object = None) -> Stream:
        return self.clocks.new_stream()

    def Event(self, **_: object) -> Event:
        return Event(self.clocks)

    def current_stream(self, device: object = None) -> Stream:
        return self.clocks.current

    def device(self, device: object) -> AbstractContextManager[None]:
        return nullcontext()

    def stream(self, stream: Stream) -> AbstractContextManager[None]:
        return self.clocks.using(stream)


@dataclass(frozen=True, slots=True)
class ModelledAccelerator(streams.Accelerator):
    """The streams of the model, for ``compat.streams``."""

    accesses: Accesses

    def record_use(self, tensor: Tensor) -> None:
        record_use(self.accesses, tensor)

    def host_tensor(self, like: Tensor) -> Tensor:
        tensor = torch.empty_like(like, device="cpu")  # of the sizes and strides alone
        self.accesses.make(tensor, "pinned")
        return tensor

    def future(self, device: torch.device) -> Future:
        return Future(self.accesses)


class StreamsModel:
    """The model while it is there, see `modelled_streams`."""

    def __init__(self, *, is_nccl: bool) -> None:
        self.races: list[Race] = []  # each pair of stacks once
        self._reported: set[object] = set()
        self.clocks = Clocks()
        self._memory = Memory(self._report)
        self._accesses = Accesses(self.clocks, self._memory)
        self.watching = Watching(self._accesses)
        self.communicators = Communicators(self._accesses, self.watching, self._report, is_nccl=is_nccl)
        self.accelerator = ModelledAccelerator(_Module(self.clocks), self._accesses)

    def _report(self, race: Race) -> None:
        key = race.what, race.first.stack, race.second.stack
        if key not in self._reported:
            self._reported.add(key)
            self.races.append(race)

    def kind_of(self, tensor: Tensor) -> str:
        """Tell where a tensor is: "device", "host" or "pinned"; empty for one without elements."""
        block = self._accesses.block_of(tensor)
        return "" if block is None else block.kind

    def mixed(self) -> list[str]:
        """List operators on tensors of the device and of the host, which an accelerator would refuse.

        Only for programs whose inputs were made with ``device=``.
        """
        return [f"{name} from\n{stack}" for name, stack in self._accesses.mixed]

    def new_stream(self, name: str = "") -> Stream:
        return self.clocks.new_stream(name)

    @property
    def current_stream(self) -> Stream:
        return self.clocks.current

    def using(self, stream: Stream) -> AbstractContextManager[None]:
        return self.clocks.using(stream)

    def record_use(self, tensor: Tensor) -> None:
        record_use(self._accesses, tensor)

    def resizing(self, resize: Callable[..., Any]) -> Callable[..., Any]:
        return self._accesses.resizing(resize)

    def on_host(self, factory: Callable[..., Tensor]) -> Callable[..., Tensor]:
        return self._accesses.on_host(factory)

    def settle(self) -> list[Race]:
        """See to what was freed since, and give all that was found."""
        with self.clocks.lock:
            self._memory.collect()
        return self.races

    def on_stream(self, function: Callable[[Tensor], Tensor], stream: Stream) -> Callable[[Tensor], Tensor]:
        """Run a function, and its part of the backward pass, on another stream, as autograd does."""

        def there(value: Tensor) -> Tensor:
            main = self.clocks.current
            anchor = torch.zeros((), device=value.device, requires_grad=True)
            entered = _Switch.apply(value, anchor, self, stream, main)
            with self.clocks.using(stream):
                result = function(entered)
            return _Switch.apply(result, None, self, main, stream)

        stream.gets_memory_in_order = True  # it waits whenever something is to be done there
        return there

    def sum(self, branch: Tensor, other: Tensor) -> Tensor:
        """Add what came from another stream and something else.

        In the backward pass the other stream waits for the gradient made here. It does not wait for the
        backward pass of the other branch, though that may have been asked for before.
        """
        return _Sum.apply(branch, other, self)


class _Switch(torch.autograd.Function):
    """Goes from one stream to another, and back in the backward pass."""

    @staticmethod
    def forward(
        ctx: Any, value: Tensor, anchor: Tensor | None, model: StreamsModel, to: Stream, back: Stream
    ) -> Tensor:
        ctx.model, ctx.to, ctx.back = model, to, back
        to.wait_stream(back)
        with model.using(to):
            model.record_use(value)
        return value.view_as(value)

    @staticmethod
    def backward(  # type: ignore[override]
        ctx: Any, grad: Tensor
    ) -> tuple[Tensor, Tensor | None, None, None, None]:
        made = getattr(grad, "made_at", None)
        if made is None:
            ctx.back.wait_stream(ctx.to)
        else:
            ctx.back.wait_event(made)
        ctx.model.clocks.current = ctx.back
        ctx.model.record_use(grad)
        zero = torch.zeros((), device=grad.device) if ctx.needs_input_grad[1] else None
        return grad, zero, None, None, None


class _Sum(torch.autograd.Function):
    """A sum whose gradient knows when it was made."""

    @staticmethod
    def forward(ctx: Any, branch: Tensor, other: Tensor, model: StreamsModel) -> Tensor:
        ctx.model = model
        return branch + other

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:  # type: ignore[override]
        grad.made_at = ctx.model.current_stream.record_event()  # type: ignore[attr-defined]
        return grad, grad, None


class _Queue:
    """A ``queue.SimpleQueue`` by which a thread learns what the other one had waited for."""

    def __init__(self, clocks: Clocks, kind: Callable[[], Any]) -> None:
        self._clocks = clocks
        self._queue: Any = kind()

    def put(self, item: object, *args: object, **kwargs: object) -> None:
        self._queue.put((dict(self._clocks.host.clock), item))

    def get(self, *args: Any, **kwargs: Any) -> Any:
        clock, item = self._queue.get(*args, **kwargs)
        with self._clocks.lock:
            self._clocks.host.see(clock)
        return item

    def put_nowait(self, item: object) -> None:
        self.put(item)

    def get_nowait(self) -> Any:
        return self.get(block=False)

    def empty(self) -> bool:
        return bool(self._queue.empty())

    def qsize(self) -> int:
        return int(self._queue.qsize())


@contextmanager
def modelled_streams(*, is_nccl: bool = False, checks: bool = True) -> Iterator[StreamsModel]:
    """Run code, on all threads started in it, on the model; AssertionError at the end if there were races.

    ``is_nccl``: two communicators that two threads use at the same time are an error.
    """
    model = StreamsModel(is_nccl=is_nccl)
    with ExitStack() as stack:
        _install(stack, model)
        stack.callback(setattr, model.watching, "is_on", False)
        stack.enter_context(model.watching.on_this_thread())
        yield model
    if checks:
        found = model.settle()
        assert not found, "\n".join(["the model of streams found races:", *map(str, found)])


def _install(stack: ExitStack, model: StreamsModel) -> None:
    original_of = streams.accelerator_of

    def accelerator_of(device: torch.device) -> streams.Accelerator | None:
        return model.accelerator if device.type == "cpu" else original_of(device)

    start, run = threading.Thread.start, threading.Thread.run

    def start_later(thread: threading.Thread) -> None:
        thread.known_to_starter = dict(model.clocks.host.clock)  # type: ignore[attr-defined]
        start(thread)

    def run_watched(thread: threading.Thread) -> None:
        with model.watching.on_this_thread():
            with model.clocks.lock:
                model.clocks.host.see(getattr(thread, "known_to_starter", {}))
            run(thread)

    run_backward = model.watching.in_backward(torch.autograd._engine_run_backward)  # type: ignore[attr-defined]
    simple_queue = queue.SimpleQueue
    for target, name, replacement in (
        (streams, "accelerator_of", accelerator_of),
        (torch.autograd, "_engine_run_backward", run_backward),
        (threading.Thread, "start", start_later),
        (threading.Thread, "run", run_watched),
        (torch.UntypedStorage, "resize_", model.resizing(torch.UntypedStorage.resize_)),
        (torch, "frombuffer", model.on_host(torch.frombuffer)),
        (torch, "from_numpy", model.on_host(torch.from_numpy)),
        (queue, "SimpleQueue", lambda: _Queue(model.clocks, simple_queue)),
    ):
        stack.enter_context(mock.patch.object(target, name, replacement))
    for name, replacement in model.communicators.replacements().items():
        for module in (dist, c10d):
            if hasattr(module, name):
                stack.enter_context(mock.patch.object(module, name, replacement))
