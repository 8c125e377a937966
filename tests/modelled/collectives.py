"""Collectives: their data moves at once, over gloo; in the model they end late.

As with NCCL, a collective runs on a stream of its group. It begins when the stream that asked for it has
come so far, and ``Work.wait`` makes the current stream wait, not the CPU. The tensors are kept until
somebody has waited for the handle, or, as the watchdog of NCCL does it, until it has ended.

All ranks must start the collectives of a communicator in one order. Ranks tell each other of each one, by the
store, before its data move: in another order NCCL's kernels would wait for each other for ever, and gloo's
calls may, or not.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import wraps
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d as c10d

from modelled.clocks import Clock, Stream
from modelled.futures import Future
from modelled.memory import Access, Race, Stack
from modelled.operators import Accesses, Watching

_Tensors = Sequence[Tensor]
_Function = Callable[..., Any]


class Work(dist.Work):
    """The handle of a collective; ``real`` still moves the data, or is None."""

    def __init__(
        self, accesses: Accesses, clock: Clock, kept: _Tensors, result: list[Tensor], real: dist.Work | None
    ) -> None:
        super().__init__()
        self._accesses = accesses
        self._clock = clock
        self._key = object()
        accesses.stash[self._key] = kept
        self._result = result
        self._real = real

    def _finish(self) -> None:
        if self._real is not None:
            self._real.wait()
            self._real = None

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        self._finish()
        with self._accesses.clocks.lock:
            self._accesses.clocks.current.see(self._clock)
        self._accesses.stash.pop(self._key, None)
        return True

    def synchronize(self) -> None:
        self.wait()

    def is_completed(self) -> bool:
        with self._accesses.clocks.lock:
            return self._accesses.clocks.host.sees(self._clock)

    def get_future(self) -> Future:
        self._finish()
        future = Future(self._accesses)
        future.complete(self._result, self._clock)
        return future


@dataclass(frozen=True, slots=True)
class _Shape:
    """What a collective reads and writes, and gives as its result: functions of its bound arguments."""

    reads: Callable[[dict[str, Any]], _Tensors]
    writes: Callable[[dict[str, Any]], _Tensors]


def _nothing(_: dict[str, Any]) -> _Tensors:
    return []


def _one(name: str) -> Callable[[dict[str, Any]], _Tensors]:
    return lambda given: [given[name]]


def _all(name: str) -> Callable[[dict[str, Any]], _Tensors]:
    return lambda given: list(given[name])


def _is_source(given: dict[str, Any]) -> bool:
    group = given.get("group") or dist.group.WORLD
    if given.get("group_src") is not None:
        return bool(dist.get_rank(group) == given["group_src"])
    return bool(dist.get_rank() == given["src"])


_SHAPES = {
    "all_reduce": _Shape(_one("tensor"), _one("tensor")),
    "broadcast": _Shape(
        lambda given: [given["tensor"]] if _is_source(given) else [],
        lambda given: [] if _is_source(given) else [given["tensor"]],
    ),
    "all_gather": _Shape(_one("tensor"), _all("tensor_list")),
    "all_gather_into_tensor": _Shape(_one("input_tensor"), _one("output_tensor")),
    "all_gather_single": _Shape(_one("input_tensor"), _one("output_tensor")),  # its name since PyTorch 2.13
    "all_to_all": _Shape(_all("input_tensor_list"), _all("output_tensor_list")),
    "all_to_all_single": _Shape(_one("input"), _one("output")),
    "isend": _Shape(_one("tensor"), _nothing),
    "irecv": _Shape(_nothing, _one("tensor")),
}


def _named(name: str, given: dict[str, Any], tensors: _Tensors) -> str:
    """Say what a collective is, in words that are the same on all ranks."""
    if name in _ALWAYS_ASYNC:
        return "a part of an exchange between all ranks"
    source = "" if name != "broadcast" else f" from {given.get('src')}, {given.get('group_src')}"
    size = "" if name.startswith("all_to_all") else f" of {sum(map(Tensor.numel, tensors))} elements"
    return f"{name}{size}{source}"


_ALWAYS_ASYNC = "isend", "irecv"


class Communicators:
    """Runs collectives in the model; ``report`` is called with races.

    With NCCL, communicators that are in use at the same time must be used in one order on all ranks; so two
    threads must not use two of them unless events order it. Sends and receives have their place among these.
    """

    def __init__(
        self, accesses: Accesses, watching: Watching, report: Callable[[Race], None], *, is_nccl: bool
    ) -> None:
        self._accesses = accesses
        self._watching = watching
        self._report = report
        self._is_nccl = is_nccl
        self._streams: dict[str, Stream] = {}
        self.num_started: dict[str, int] = {}  # collectives of this rank, by group
        self._place = ""  # of this model, in the store
        self._last: dict[str, tuple[Access, int]] = {}  # by group, with the thread

    def replacements(self) -> dict[str, _Function]:
        """Give the functions to put in the place of those of ``torch.distributed``, by name."""
        return {
            name: self._replacement(name, shape) for name, shape in _SHAPES.items() if hasattr(c10d, name)
        }

    def _replacement(self, name: str, shape: _Shape) -> _Function:
        original = getattr(c10d, name)
        inner = getattr(original, "__wrapped__", original)
        names = inner.__code__.co_varnames[: inner.__code__.co_argcount]

        @wraps(original)
        def replacement(*args: Any, **kwargs: Any) -> Any:
            if not self._watching.sees:
                return original(*args, **kwargs)
            given = dict(zip(names, args, strict=False)) | kwargs
            group = given.get("group") or dist.group.WORLD
            if dist.get_rank(group) < 0:
                return original(*args, **kwargs)
            read, written = shape.reads(given), shape.writes(given)
            if self._is_nccl or name not in _ALWAYS_ASYNC:
                self._tell(_named(name, given, [*read, *written]), group)
            clock = self._run(name, group, read, written)
            real = self._move(name, original, given, group)
            work = Work(self._accesses, clock, [*read, *written], list(written) or list(read), real)
            if name in _ALWAYS_ASYNC or given.get("async_op"):
                return work
            work.wait()
            return None

        return replacement

    def _tell(self, what: str, group: dist.ProcessGroup) -> None:
        """Compare a collective with what other ranks have started in its place; the later rank raises."""
        key, rank, store = str(group.group_name), dist.get_rank(group), c10d._get_default_store()
        with self._watching.looking_away():
            if not self._place:
                self._place = f"model {store.add(f'models of {dist.get_rank()}', 1)}"
            number = self.num_started[key] = self.num_started.get(key, 0) + 1
            place = f"{self._place}, group {key}, collective {number}"
            store.set(f"{place}, rank {rank}", f"{what}\n{Stack.here()}")
            for other in range(dist.get_world_size(group)):
                theirs = f"{place}, rank {other}"
                if other == rank or not store.check([theirs]):
                    continue
                told = store.get(theirs).decode()
                if told.partition("\n")[0] != what:
                    raise AssertionError(
                        f"{place} is on rank {rank} {what}\n{Stack.here()}\n  and on rank {other} {told}"
                    )

    def _run(self, name: str, group: dist.ProcessGroup, read: _Tensors, written: _Tensors) -> Clock:
        """Put a collective onto the stream of its group; returns the clock of its end."""
        clocks = self._accesses.clocks
        with clocks.lock:
            key = str(group.group_name)
            stream = self._streams.setdefault(key, clocks.new_stream(f"the stream of group {key}"))
            current = clocks.current
            current.see(clocks.host.clock)
            stream.see(current.clock)
            for tensor in (*read, *written):
                block = self._accesses.block_of(tensor)
                if block is not None and block.kind == "host":
                    block.kind = "device"
            self._accesses.on(stream, f"dist.{name}", read, written)
            access = Access(f"dist.{name}", True, stream, stream.clock[stream.number], Stack.here())
            self._check_order(key, access, stream)
            return dict(stream.clock)

    def _check_order(self, key: str, access: Access, stream: Stream) -> None:
        """Refuse communicators that two threads use at once: ranks may differ in which is first."""
        thread = self._accesses.clocks.host.number
        for other, (last, by) in self._last.items():
            if self._is_nccl and other != key and by != thread and not last.ended_before(stream.clock):
                self._report(Race("two threads use two communicators in no certain order:", last, access))
        self._last[key] = access, thread

    def _move(self, name: str, original: _Function, given: dict[str, Any], group: Any) -> dist.Work | None:
        """Move the data; that of `isend` and `irecv` may move until the handle is waited for."""
        with self._watching.looking_away():
            if name == "all_to_all":
                _exchange(given["output_tensor_list"], given["input_tensor_list"], group)
                return None
            if name in _ALWAYS_ASYNC:
                return original(**given)
            original(**{**given, "async_op": False})
            return None


def _exchange(outputs: _Tensors, inputs: _Tensors, group: dist.ProcessGroup) -> None:
    """Do what gloo does not have: ``all_to_all``."""
    rank, works = dist.get_rank(group), []
    for other in range(dist.get_world_size(group)):
        if other == rank:
            outputs[rank].copy_(inputs[rank])
        else:
            peer = dist.get_global_rank(group, other)
            works += [c10d.isend(inputs[other], peer, group), c10d.irecv(outputs[other], peer, group)]
    for work in works:
        if work is not None:
            work.wait()
