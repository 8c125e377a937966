"""What each operator of PyTorch reads and writes, and on which timeline.

Note [Which memory is the device's]
    Everything lies on the CPU, so the device of a tensor does not tell. What the library allocates names a
    device, taken from another tensor: that is memory of the modelled device, as is what was there before the
    model. A factory called without ``device=``, or with the text "cpu", makes memory of the host, as it would
    in a program for CUDA. What an operator makes of the host's tensors alone is the host's too; that work is
    the CPU's own, and is done when it returns. Where both meet, the device reads what the host has.
"""

import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from modelled.clocks import Clock, Clocks, Timeline
from modelled.memory import Access, Block, Kind, Memory, Stack, runs_of

# These make the CPU wait, since what they return has to be known, or has a size that has to be.
_WAITING = {"_local_scalar_dense", "equal", "masked_select", "nonzero"}
_WAITING |= {"unique_consecutive", "unique_dim", "_unique2"}
_READING = {"tolist", "numpy", "cpu", "__array__"}  # methods that do so without an operator
_NO_ACCESS = {"set_", "resize_", "detach_", "record_stream", "lift_fresh", "_unsafe_view", "_reshape_alias"}
_FACTORIES = {torch.arange, torch.as_tensor, torch.empty, torch.empty_strided, torch.eye, torch.full}
_FACTORIES |= {torch.linspace, torch.ones, torch.rand, torch.randint, torch.randn, torch.randperm}
_FACTORIES |= {torch.tensor, torch.zeros}


@cache
def _signature(operator: Any) -> tuple[tuple[tuple[str, bool, bool], ...], bool, bool]:
    """Read an operator's schema.

    Returns for each argument its name, whether it is written, and whether only its form matters; then whether
    the operator makes memory, and whether the CPU waits for it.
    """
    schema = operator._schema
    name = schema.name.split("::")[-1]
    of_form = name.endswith("_like") or name.startswith("new_") or name in _NO_ACCESS
    arguments = []
    for argument in schema.arguments:
        writes = argument.alias_info is not None and argument.alias_info.is_write and name not in _NO_ACCESS
        is_form = of_form or (argument.alias_info is not None and not argument.alias_info.is_write)
        arguments.append((argument.name, writes, is_form and not writes))
    makes = name not in _NO_ACCESS and any(result.alias_info is None for result in schema.returns)
    return tuple(arguments), makes, name in _WAITING


def tensors_in(value: object) -> Iterator[Tensor]:
    """Find the strided tensors in an argument."""
    if isinstance(value, Tensor):
        if value.layout is torch.strided:
            yield value
        elif value.layout is torch.sparse_coo:
            yield from (value._indices(), value._values())
    elif isinstance(value, list | tuple):
        for item in value:
            yield from tensors_in(item)


class Accesses:
    """Notes uses of memory on the timeline that does them."""

    def __init__(self, clocks: Clocks, memory: Memory) -> None:
        self.clocks = clocks
        self.memory = memory
        self.mixed: list[tuple[str, Stack]] = []  # operators on tensors of the device and of the host
        self.stash: dict[object, Sequence[Tensor]] = {}  # of collectives that nobody has waited for

    def on(
        self,
        by: Timeline,
        what: str,
        read: Iterable[Tensor],
        written: Iterable[Tensor],
        stack: Stack | None = None,
    ) -> None:
        """Note work of a timeline, which the calling thread asks for now."""
        with self.clocks.lock:
            by.see(self.clocks.host.clock)
            access = self._access(by, what, stack or Stack.here())
            for tensor in read:
                self._touch(tensor, access(False), by.clock)
            for tensor in written:
                self._touch(tensor, access(True), by.clock)

    @staticmethod
    def _access(by: Timeline, what: str, stack: Stack) -> Callable[[bool], Access]:
        tick = by.tick()
        return lambda writes: Access(what, writes, by, tick, stack)

    def _touch(self, tensor: Tensor, access: Access, clock: Clock) -> None:
        block = self.block_of(tensor)
        if block is not None:
            self.memory.touch(block, runs_of(tensor), access, clock)

    def block_of(self, tensor: Tensor) -> Block | None:
        """Find a tensor's memory; None if it has no elements."""
        if tensor.numel() == 0 or tensor.data_ptr() == 0:
            return None
        return self.memory.block_of(tensor, self.clocks.default)[0]

    def allocated(self, tensor: Tensor) -> Block | None:
        """Note that the current stream gets memory for a tensor; returns it, or None if it is known."""
        if tensor.numel() == 0 or tensor.data_ptr() == 0:
            return None
        stream = self.clocks.current

        def access() -> Access:
            stream.see(self.clocks.host.clock)
            return Access("the allocation", True, stream, stream.tick(), Stack.here())

        block, is_new = self.memory.block_of(tensor, stream, access)
        return block if is_new else None

    def resizing(self, resize: Callable[..., Any]) -> Callable[..., Any]:
        """Note that a storage is emptied, or gets memory of the current stream; no operator does that."""

        def resize_noted(storage: torch.UntypedStorage, nbytes: int) -> Any:
            was_empty = storage.nbytes() == 0
            with self.clocks.lock:
                if nbytes == 0 and not was_empty:
                    self.memory.empty(storage)
                result = resize(storage, nbytes)
                if was_empty and nbytes:
                    self.allocated(torch.empty(0, dtype=torch.uint8).set_(storage))
            return result

        return resize_noted

    def make(self, tensor: Tensor, kind: Kind) -> None:
        """Take a tensor, which nobody has used, for one on the device or on the host."""
        with self.clocks.lock:
            block = self.block_of(tensor)
            if block is not None:
                block.become(kind)
                block.owner = self.clocks.current

    def on_host(self, factory: Callable[..., Tensor]) -> Callable[..., Tensor]:
        """Take what a factory gives for memory of the host; PyTorch shows calls of it to no mode."""

        def noted(*args: Any, **kwargs: Any) -> Tensor:
            result = factory(*args, **kwargs)
            with self.clocks.lock:
                self.allocated(result)
                self.make(result, "host")
            return result

        return noted

    def note_copy(self, source: Tensor, result: Tensor) -> None:
        """Note a copy of memory of the host to the device, which the current stream makes."""
        with self.clocks.lock:
            self.make(result, "device")
            pinned, staged = ([source], []) if self._kind(source) == "pinned" else ([], [source])
            self.on(self.clocks.host, "Tensor.to", staged, [])
            self.on(self.clocks.current, "Tensor.to", pinned, [result])

    def host_reads(self, tensors: Sequence[Tensor], what: str) -> None:
        """Note that the CPU reads values: it waits for the current stream, unless they lie on the host."""
        with self.clocks.lock:
            of_device = [tensor for tensor in tensors if self.is_of_device(tensor)]
            self.on(self.clocks.host, what, [t for t in tensors if not self.is_of_device(t)], [])
            if of_device:
                self.on(self.clocks.current, what, of_device, [])
                self.wait_on_host()

    def wait_on_host(self) -> None:
        """Let the CPU wait for the current stream."""
        self.clocks.host.see(self.clocks.current.clock)

    def is_of_device(self, tensor: Tensor) -> bool:
        block = self.block_of(tensor)
        return block is not None and block.kind == "device"

    def operator(
        self,
        operator: Any,
        arguments: Sequence[tuple[str, bool, bool, Tensor]],
        outputs: object,
        *,
        non_blocking: bool = False,
    ) -> None:
        """Note what an operator has done; ``arguments`` as of `_signature`, with the tensor."""
        _, makes, waits = _signature(operator)
        read = [tensor for _, writes, is_form, tensor in arguments if not writes and not is_form]
        written = [tensor for _, writes, _, tensor in arguments if writes]
        with self.clocks.lock:
            new = list(self._new(outputs)) if makes else []
            used = [block for block in map(self.block_of, [*read, *written]) if block is not None]
            self._note_mixed(operator, [*read, *written])
            forms = [tensor for _, _, is_form, tensor in arguments if is_form] if makes and not used else []
            near = used or [block for block in map(self.block_of, forms) if block is not None]
            if near and all(block.kind != "device" for block in near):
                by: Timeline = self.clocks.host
                for block in new:
                    block.become("host")
            else:
                by = self.clocks.current
                staged = [tensor for tensor in read if self._kind(tensor) == "host"]
                if staged:  # is read before the call returns
                    self.on(self.clocks.host, str(operator), staged, [])
                    read = [tensor for tensor in read if self._kind(tensor) != "host"]
            if not (read or written or new):
                return
            self.on(by, str(operator), read, [*written])
            for block in new:
                access = Access(str(operator), True, by, by.clock.get(by.number, 0), Stack.here())
                self.memory.touch(block, [(block.start, block.stop)], access, by.clock)
            if by is self.clocks.current:
                self._reach_host(operator, written, waits, non_blocking)

    def _note_mixed(self, operator: Any, used: Sequence[Tensor]) -> None:
        """Note an operator on tensors of the device and of the host: on an accelerator it raises.

        Copies are such operators. A tensor without dimensions may be the host's.
        """
        name = operator._schema.name.split("::")[-1]
        of_host = [tensor for tensor in used if tensor.dim() and self._kind(tensor) != "device"]
        if of_host and name not in ("copy_", "_to_copy") and any(map(self.is_of_device, used)):
            self.mixed.append((name, Stack.here()))

    def _reach_host(self, operator: Any, written: Sequence[Tensor], waits: bool, non_blocking: bool) -> None:
        """See to work of a stream whose result the CPU gets."""
        for tensor in written:
            block = self.block_of(tensor)
            if block is not None and block.kind == "pinned" and operator._schema.name == "aten::copy_":
                waits = waits or not non_blocking
            if block is not None and block.kind == "host":
                if operator._schema.name == "aten::copy_":
                    waits = True  # to memory that is not pinned: the call returns when it is done
                else:
                    block.kind = "device"
        if waits:
            self.wait_on_host()

    def _kind(self, tensor: Tensor) -> str:
        block = self.block_of(tensor)
        return "device" if block is None else block.kind

    def _new(self, outputs: object) -> Iterator[Block]:
        for tensor in tensors_in(outputs):
            block = self.allocated(tensor)
            if block is not None:
                yield block


class Watching:
    """The two modes that see what a thread does; entered on every thread while the model is there."""

    def __init__(self, accesses: Accesses) -> None:
        self._accesses = accesses
        self._quiet = threading.local()
        self.is_on = True

    @property
    def sees(self) -> bool:
        return self.is_on and not getattr(self._quiet, "depth", 0)

    @contextmanager
    def looking_away(self) -> Iterator[None]:
        """Do something on this thread that is no work of the program."""
        self._quiet.depth = getattr(self._quiet, "depth", 0) + 1
        try:
            yield
        finally:
            self._quiet.depth -= 1

    @contextmanager
    def on_this_thread(self) -> Iterator[None]:
        with _Operators(self, self._accesses), _Functions(self, self._accesses):
            yield

    def in_backward(self, run: Callable[..., Any]) -> Callable[..., Any]:
        """Watch what hooks do: the mode is off in what ``backward()``, which it is shown, calls."""

        def run_watched(*args: Any, **kwargs: Any) -> Any:
            with _Functions(self, self._accesses):
                return run(*args, **kwargs)

        return run_watched


class _Operators(TorchDispatchMode):
    """Sees every operator, those of the backward pass too."""

    def __init__(self, watching: Watching, accesses: Accesses) -> None:
        super().__init__()
        self._watching = watching
        self._accesses = accesses

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if not self._watching.sees or not func._schema.name.startswith("aten::"):
            return func(*args, **kwargs)
        described, _, _ = _signature(func)
        arguments = []
        for place, (name, writes, is_form) in enumerate(described):
            value = args[place] if place < len(args) else kwargs.get(name)
            if isinstance(value, Tensor | list | tuple):
                arguments += [(name, writes, is_form, tensor) for tensor in tensors_in(value)]
        outputs = func(*args, **kwargs)
        late = (args[2] if len(args) > 2 else kwargs.get("non_blocking")) is True
        self._accesses.operator(func, arguments, outputs, non_blocking=late)
        return outputs


class _Functions(TorchFunctionMode):
    """Sees which memory is the host's, and values that the CPU reads without an operator."""

    def __init__(self, watching: Watching, accesses: Accesses) -> None:
        super().__init__()
        self._watching = watching
        self._accesses = accesses

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if not self._watching.sees:
            return func(*args, **kwargs)
        name = getattr(func, "__name__", "")
        to_host = name == "to" and any(_names_host(value) for value in (*args[1:], kwargs.get("device")))
        if (name in _READING or to_host) and isinstance(args[0], Tensor):
            self._accesses.host_reads(list(tensors_in(args[0])), f"Tensor.{name}")
        if name == "pin_memory":
            result = args[0].clone()
            self._accesses.make(result, "pinned")
            return result
        to_device = name == "to" and any(isinstance(v, torch.device) for v in (*args[1:], *kwargs.values()))
        if to_device and not self._accesses.is_of_device(args[0]):
            with self._watching.looking_away():
                result = func(*args, **{**kwargs, "copy": True})
            self._accesses.note_copy(args[0], result)
            return result
        result = func(*args, **kwargs)
        if func in _FACTORIES and isinstance(result, Tensor):
            self._made(result, kwargs.get("device"))
        return result

    def _made(self, tensor: Tensor, device: object) -> None:
        with self._accesses.clocks.lock:
            self._accesses.allocated(tensor)  # that of `torch.tensor` is not seen as an operator
            if device is None or _names_host(device):
                self._accesses.make(tensor, "host")


def _names_host(device: object) -> bool:
    return isinstance(device, str) and device == "cpu"
