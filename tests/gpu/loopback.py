"""A late loopback: a group of several ranks of which one process pretends to be the first.

Note [Late loopback]
    A collective waits for the current stream, sleeps on a stream of its group for as long as a link of
    `BANDWIDTH` takes, and only then reads its inputs and writes its outputs. Outputs are NaN until then. The
    other ranks send what this one sends; those that broadcast send a constant. So the numbers mean nothing,
    but a run with sleep and one without have the same, unless a wait is missing.

    On the CPU a collective runs when somebody waits for it, or for a later one of its group.

    To time what a rank itself does, collectives are skipped but for the smallest.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor

from gpu.costs import only_own_stamps
from gpu.setting import Here, fake_store
from sync_calls import cpu_as_accelerator

NAME = "loopback"
BANDWIDTH = 10e9  # bytes a second
LATENCY = 50e-6
CONSTANT = 0x3C  # each byte of what other ranks broadcast: a float of 0.011
MOST_RUN = 2**12  # bytes of a collective that is not skipped


Kind = Literal["early", "late", "skipped"]


@dataclass
class Switch:
    """How collectives run from now on; of those that are skipped small ones run."""

    kind: Kind


class Line:
    """Runs the collectives of a group in order."""

    def __init__(self, here: Here, switch: Switch) -> None:
        self.here = here
        self.switch = switch
        self.stream = torch.cuda.Stream(here.device) if here.is_cuda else None
        self._waiting: list[Callable[[], None]] = []  # on the CPU
        self._num_run = 0

    def issue(self, run: Callable[[], None], tensors: Sequence[Tensor]) -> "Work":
        """Begin a collective."""
        nbytes = [tensor.nbytes for tensor in tensors]
        if self.switch.kind == "skipped" and max(nbytes, default=0) > MOST_RUN:
            return Work(self, 0, None)
        if self.stream is None:
            self._waiting.append(run)
            work = Work(self, self._num_run + len(self._waiting), None)
            if self.switch.kind != "late":
                self.run_until(work.number)
            return work
        self.stream.wait_stream(torch.cuda.current_stream(self.here.device))
        with torch.cuda.stream(self.stream):
            if self.switch.kind == "late":
                self.here.sleep(1e3 * (LATENCY + sum(nbytes) / BANDWIDTH))
            run()
            for tensor in tensors:
                if tensor.is_cuda:
                    tensor.record_stream(self.stream)
            event = torch.cuda.Event()
            event.record()
        return Work(self, 0, event)

    def run_until(self, number: int) -> None:
        """Run what was begun, up to a collective."""
        while self._num_run < number:
            self._num_run += 1
            self._waiting.pop(0)()


class Work(dist.Work):
    """The handle of a collective."""

    def __init__(self, line: Line, number: int, event: torch.cuda.Event | None) -> None:
        super().__init__()
        self._line, self.number, self._event = line, number, event
        self.outputs: list[Tensor] = []

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        if self._event is None:
            self._line.run_until(self.number)
        else:
            self._event.wait()
        return True

    def is_completed(self) -> bool:
        if self._event is not None:
            return bool(self._event.query())
        self._line.run_until(self.number)
        return True

    def get_future(self) -> "torch.futures.Future[Any]":
        if self._event is None:
            self.wait()
            future: torch.futures.Future[Any] = torch.futures.Future()
            future.set_result(self.outputs)
            return future
        future = torch.futures.Future(devices=[self._line.here.device])
        with torch.cuda.stream(self._line.stream):
            future.set_result(self.outputs)
        return future


class Loopback(dist.ProcessGroup):
    """The group; see Note [Late loopback]."""

    def __init__(self, rank: int, size: int, line: Line) -> None:
        super().__init__(rank, size)
        self._line = line
        self._number = 0

    def _issue(self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], run: Callable[[], None]) -> Work:
        self._number += 1
        if self._line.switch.kind != "skipped":
            poison(outputs)
        work = self._line.issue(run, [*outputs, *inputs])
        work.outputs = list(outputs)
        return work

    def _copied(self, outputs: Sequence[Tensor], mine: Tensor) -> Callable[[], None]:
        def run() -> None:
            for output in outputs:
                _fit(output.data, mine.data)

        return run

    def broadcast(self, tensors: list[Tensor], opts: Any) -> Work:
        if opts.rootRank == self.rank():
            return self._issue([], tensors, lambda: None)

        def run() -> None:
            for tensor in tensors:
                _fill(tensor)

        return self._issue(tensors, [], run)

    def allreduce(self, tensors: list[Tensor] | Tensor, opts: Any = None) -> Work:
        tensors = [tensors] if isinstance(tensors, Tensor) else tensors
        adds = opts is None or opts.reduceOp == dist.ReduceOp.SUM
        kept = [tensor.detach().clone() for tensor in tensors]

        def run() -> None:
            for tensor, value in zip(tensors, kept, strict=True):
                tensor.data.copy_(value.mul_(self.size()) if adds and value.dtype != torch.bool else value)

        return self._issue(tensors, kept, run)

    allreduce_coalesced = allreduce

    def reduce(self, tensors: list[Tensor], opts: Any) -> Work:
        if opts.rootRank == self.rank():
            return self.allreduce(tensors, opts)
        return self._issue([], tensors, lambda: None)

    def allgather(self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any = None) -> Work:
        return self._issue(outputs[0], inputs, self._copied(outputs[0], inputs[0]))

    def _allgather_base(self, output: Tensor, given: Tensor, opts: Any = None) -> Work:
        rows = list(output.view(self.size(), -1))
        return self._gathered(rows, given)

    def _gathered(self, rows: list[Tensor], given: Tensor) -> Work:
        """Gather rows of one tensor, in which the given one may lie."""
        mine = given if given.data_ptr() != rows[self.rank()].data_ptr() else given.clone()
        return self._issue(rows, [mine], self._copied(rows, mine))

    def _reduce_scatter_base(self, output: Tensor, given: Tensor, opts: Any = None) -> Work:
        adds = opts is None or opts.reduceOp == dist.ReduceOp.SUM
        kept = given.detach().clone()

        def run() -> None:
            mine = kept.view(self.size(), -1)[self.rank()]
            _fit(output.data, mine.mul_(self.size()) if adds else mine)

        return self._issue([output], [kept], run)

    all_gather_single, reduce_scatter_single = _allgather_base, _reduce_scatter_base  # since PyTorch 2.13

    def alltoall(self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None) -> Work:
        mine = inputs[self.rank()]
        received = [each for each in outputs if each.data_ptr() != mine.data_ptr()]
        return self._issue(received, inputs, self._copied(received, mine))

    def alltoall_base(
        self, output: Tensor, given: Tensor, there: list[int], back: list[int], opts: Any = None
    ) -> Work:
        size = self.size()
        outputs = output.split(there or [output.shape[0] // size] * size)
        inputs = given.split(back or [given.shape[0] // size] * size)
        return self.alltoall([*outputs], [*inputs])

    all_to_all_single = alltoall_base

    def send(self, tensors: list[Tensor], target: int, tag: int) -> Work:
        return self._issue([], tensors, lambda: None)

    def recv(self, tensors: list[Tensor], source: int, tag: int) -> Work:
        def run() -> None:
            for tensor in tensors:
                _fill(tensor)

        return self._issue(tensors, [], run)

    def barrier(self, opts: Any = None) -> Work:
        return self._issue([], [], lambda: None)

    @property
    def group_name(self) -> str:
        return dist.distributed_c10d._world.pg_names[self]

    def getBackendName(self) -> str:
        return NAME

    def _set_sequence_number_for_group(self) -> None:
        """Nothing to agree on: it counts from the first collective."""

    def _get_sequence_number_for_group(self) -> int:
        return self._number


def poison(tensors: Sequence[Tensor]) -> None:
    """Fill tensors with NaN, or the byte of which NaN is made. ``data``: no version counter may notice."""
    for tensor in tensors:
        if tensor.is_floating_point() or tensor.is_complex():
            tensor.data.fill_(float("nan"))
        else:
            tensor.data.fill_(True if tensor.dtype == torch.bool else torch.iinfo(tensor.dtype).max)


def _fill(tensor: Tensor) -> None:
    tensor.data.view(torch.uint8).fill_(CONSTANT) if tensor.is_contiguous() else tensor.data.fill_(1)


def _fit(output: Tensor, mine: Tensor) -> None:
    """Copy as much as fits, and zeros behind."""
    flat, sent = output.view(-1), mine.reshape(-1)
    common = min(flat.numel(), sent.numel())
    flat[:common].copy_(sent[:common])
    flat[common:].zero_()


@contextmanager
def looped(here: Here, world: int, kind: Kind) -> Iterator[Switch]:
    """Have the default group be a late loopback of ``world`` ranks."""
    store = fake_store()
    switch = Switch(kind)

    def create(store: Any, rank: int, size: int, timeout: timedelta) -> Loopback:
        return Loopback(rank, size, Line(here, switch))

    if NAME not in dist.Backend.backend_list:
        dist.Backend.register_backend(NAME, create, devices=["cpu", "cuda"])
    else:
        dist.Backend._plugins[NAME.upper()] = dist.Backend._BackendPlugin(create, False)  # type: ignore[attr-defined]
    with ExitStack() as stack:
        stack.enter_context(only_own_stamps())
        if not here.is_cuda:
            stack.enter_context(cpu_as_accelerator())
        dist.init_process_group(f"{here.device.type}:{NAME}", store=store, rank=0, world_size=world)
        try:
            yield switch
            here.synchronize()
        finally:
            dist.destroy_process_group()
