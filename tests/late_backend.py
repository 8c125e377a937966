"""A backend that lies in wait: collectives over gloo that run as late as they may.

gloo over loopback is so quick that a missing wait is seldom seen. Here a collective is only noted when it is
issued. It runs when somebody waits for it, or for a later one of its group. Otherwise it runs when its delay
is over, since peers may need it. Its inputs are read only then, and its outputs are NaN until then. So these
defects show in the results:

- an output is read before anybody has waited for it,
- an input is written before it was read,
- the order of collectives differs between ranks, and gloo's speed would have hidden that.

Delays come from a seed, by group and number of the collective. The results of right code do not depend on
them.

An all-reduce in place has one tensor for input and output. Every second one, by the seed, keeps its input
aside and shows NaN; the others leave it in the tensor, to be read late.
"""

import queue
import random
import threading
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from zero_optim.comm.backends import TRANSPORTS, Transport
from zero_optim.compat.streams import is_asynchronous

NAME = "late"
DELAYS = (0.0, 0.0, 0.001, 0.005, 0.02)  # seconds; nothing is decided by them
FOREVER = timedelta(0)  # what the callers of Work.wait hand in for no timeout of their own


@dataclass(frozen=True)
class Together:
    """Handles as one."""

    works: list[dist.Work]

    def wait(self) -> None:
        for work in self.works:
            work.wait()


@dataclass(eq=False)
class Operation:
    """A collective that was issued."""

    number: int
    delay: float
    prepare: Callable[[], None]
    start: Callable[[], dist.Work]
    future: "torch.futures.Future[None]"


class Line:
    """The collectives of one group, which two threads run."""

    def __init__(self, seed: str) -> None:
        self.random = random.Random(seed)
        self.num_issued = 0
        self._asked = 0
        self._change = threading.Condition()
        self._issued: queue.SimpleQueue[Operation | None] = queue.SimpleQueue()
        self._running: queue.SimpleQueue[tuple[Operation, dist.Work] | None] = queue.SimpleQueue()
        self._threads = [
            threading.Thread(target=target, name=f"{NAME} {target.__name__}", daemon=True)
            for target in (self._run, self._finish)
        ]
        for thread in self._threads:
            thread.start()

    def issue(self, start: Callable[[], dist.Work], prepare: Callable[[], None]) -> Operation:
        """Note a collective."""
        with self._change:
            self.num_issued += 1
            operation = Operation(
                self.num_issued, self.random.choice(DELAYS), prepare, start, torch.futures.Future()
            )
            self._issued.put(operation)
        return operation

    def ask(self, number: int) -> None:
        """Let everything run up to a collective."""
        with self._change:
            self._asked = max(self._asked, number)
            self._change.notify_all()

    def close(self) -> None:
        """Run what is left, and end the threads."""
        self.ask(self.num_issued)
        self._issued.put(None)
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join()

    def _run(self) -> None:
        while (operation := self._issued.get()) is not None:
            number = operation.number
            with self._change:
                self._change.wait_for(lambda n=number: self._asked >= n, operation.delay)
            try:
                operation.prepare()
                self._running.put((operation, operation.start()))
            except Exception as error:  # noqa: BLE001 - raised where it is waited for
                operation.future.set_exception(error)  # type: ignore[arg-type]
            del operation
        self._running.put(None)

    def _finish(self) -> None:
        # On a thread of its own: a send may wait for a receive that its peer issues behind a send.
        while (found := self._running.get()) is not None:
            operation, work = found
            try:
                work.wait()
            except Exception as error:  # noqa: BLE001 - raised where it is waited for
                operation.future.set_exception(error)  # type: ignore[arg-type]
            else:
                # Callbacks of the future run here, and may wait for other collectives.
                threading.Thread(target=operation.future.set_result, args=(None,), daemon=True).start()
            del found, operation, work


class LateWork(dist.Work):
    """The handle of a collective; waiting for it lets it run."""

    def __init__(self, operation: Operation, outputs: Sequence[Tensor], line: Line) -> None:
        super().__init__()
        self._operation = operation
        self._line = line
        self._future: torch.futures.Future[Any] = operation.future.then(
            lambda landed: (landed.value(), list(outputs))[1]
        )

    def wait(self, timeout: timedelta = FOREVER) -> bool:
        self._line.ask(self._operation.number)
        self._future.wait()
        return True

    def get_future(self) -> "torch.futures.Future[Any]":
        return self._future

    def is_completed(self) -> bool:
        return self._future.done()


class NamedGroup(dist.ProcessGroup):
    """What PyTorch asks of every group."""

    @property
    def group_name(self) -> str:
        return dist.distributed_c10d._world.pg_names[self]

    def _set_sequence_number_for_group(self) -> None:
        """Nothing to agree on: it counts from the first collective."""


class LateGroup(NamedGroup):
    """A process group whose collectives run late."""

    def __init__(self, rank: int, size: int, gloo: Any, seed: str) -> None:
        super().__init__(rank, size)
        self._gloo = gloo
        self._line = Line(seed)
        # The handles of one number each, to the end. In Join, PyTorch's DDP keeps the handle of the count of
        # ranks in C++ alone. Without its half in Python, a wait for it is that of the base class, for ever.
        self._kept: list[LateWork] = []
        weakref.finalize(self, self._line.close)

    # ------------------------------------------------------------------ issuing

    def _issue(
        self,
        start: Callable[[], dist.Work],
        outputs: Sequence[Tensor],
        prepare: Callable[[], None] = lambda: None,
    ) -> LateWork:
        work = LateWork(self._line.issue(start, prepare), outputs, self._line)
        if sum(tensor.numel() for tensor in outputs) == 1:
            self._kept.append(work)
        return work

    def _issue_in_place(self, start: Callable[[], dist.Work], tensors: Sequence[Tensor]) -> LateWork:
        if self._line.random.random() < 0.5 or any(tensor.is_sparse for tensor in tensors):
            return self._issue(start, tensors)
        kept = [tensor.detach().clone() for tensor in tensors]
        poison(tensors)

        def restore() -> None:
            for tensor, value in zip(tensors, kept, strict=True):
                tensor.data.copy_(value)

        return self._issue(start, tensors, restore)

    # ------------------------------------------------------------------ torch.distributed's calls

    def broadcast(self, tensors: list[Tensor], opts: Any) -> LateWork:
        if opts.rootRank != self.rank():
            poison(tensors)
        return self._issue(lambda gloo=self._gloo: gloo.broadcast(tensors, opts), tensors)

    def allreduce(self, tensors: list[Tensor] | Tensor, opts: Any = None) -> LateWork:
        # PyTorch's DDP gives one tensor, and no options, in Join.
        tensors = [tensors] if isinstance(tensors, Tensor) else tensors
        opts = dist.AllreduceOptions() if opts is None else opts
        return self._issue_in_place(lambda gloo=self._gloo: gloo.allreduce(tensors, opts), tensors)

    def allreduce_coalesced(self, tensors: list[Tensor], opts: Any) -> LateWork:
        return self._issue_in_place(lambda gloo=self._gloo: gloo.allreduce_coalesced(tensors, opts), tensors)

    def reduce(self, tensors: list[Tensor], opts: Any) -> LateWork:
        return self._issue(lambda gloo=self._gloo: gloo.reduce(tensors, opts), tensors)

    def allgather(self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any = None) -> LateWork:
        opts = dist.AllgatherOptions() if opts is None else opts
        flat = [tensor for each in outputs for tensor in each]
        poison(flat)
        return self._issue(lambda gloo=self._gloo: gloo.allgather(outputs, inputs, opts), flat)

    def all_gather_single(self, output: Tensor, given: Tensor, opts: Any = None) -> LateWork:
        opts = dist.AllgatherOptions() if opts is None else opts
        kept = given.clone() if _overlap(output, given) else given
        poison([output])
        return self._issue(lambda gloo=self._gloo: gloo._allgather_base(output, kept, opts), [output])

    _allgather_base = all_gather_single  # its name before PyTorch 2.13

    def alltoall(self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None) -> LateWork:
        own = self.rank()
        poison([tensor for rank, tensor in enumerate(outputs) if rank != own])

        def start(gloo: Any = self._gloo) -> Any:
            works = []
            for rank, (output, given) in enumerate(zip(outputs, inputs, strict=True)):
                if rank != own:
                    works += [gloo.send([given], rank, 0), gloo.recv([output], rank, 0)]
                elif output is not given:
                    output.data.copy_(given)
            return Together(works)

        return self._issue(start, outputs)

    def all_to_all_single(
        self, output: Tensor, given: Tensor, received: list[int], sent: list[int], opts: Any = None
    ) -> LateWork:
        outputs, inputs = (
            list(tensor.split(lengths or [tensor.numel() // self.size()] * self.size()))
            for tensor, lengths in ((output, received), (given, sent))
        )
        return self.alltoall(outputs, inputs, opts)

    alltoall_base = all_to_all_single  # its name before PyTorch 2.13

    def send(self, tensors: list[Tensor], target: int, tag: int) -> LateWork:
        return self._issue(lambda gloo=self._gloo: gloo.send(tensors, target, tag), [])

    def recv(self, tensors: list[Tensor], source: int, tag: int) -> LateWork:
        poison(tensors)
        return self._issue(lambda gloo=self._gloo: gloo.recv(tensors, source, tag), tensors)

    def barrier(self, opts: Any = None) -> LateWork:
        opts = dist.BarrierOptions() if opts is None else opts
        return self._issue(lambda gloo=self._gloo: gloo.barrier(opts), [])

    # ------------------------------------------------------------------ about the group

    def getBackendName(self) -> str:
        return NAME

    def _get_sequence_number_for_group(self) -> int:
        return self._line.num_issued


def _overlap(one: Tensor, other: Tensor) -> bool:
    return one.untyped_storage().data_ptr() == other.untyped_storage().data_ptr()


def poison(tensors: Sequence[Tensor]) -> None:
    """Fill tensors with NaN, or the byte of which NaN is made. ``data``: no version counter may notice."""
    for tensor in tensors:
        if tensor.is_floating_point() or tensor.is_complex():
            tensor.data.fill_(float("nan"))
        else:
            tensor.data.fill_(True if tensor.dtype == torch.bool else torch.iinfo(tensor.dtype).max)


class LateTransport(Transport):
    """Threads and lanes as on gloo; exchanges as elsewhere."""

    __slots__ = ()
    most_lanes = 8

    @property
    def lets_threads(self) -> bool:
        return not is_asynchronous(self.device)


def register(seed: int) -> None:
    """Make the backend known in this process, to torch.distributed and to us, with the delays of a seed."""
    TRANSPORTS[NAME] = LateTransport

    def create(store: Any, rank: int, size: int, timeout: timedelta) -> LateGroup:
        options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
        options._timeout = timeout
        options._devices = [dist.ProcessGroupGloo.create_default_device()]  # type: ignore[attr-defined]
        gloo = dist.ProcessGroupGloo(store, rank, size, options)  # type: ignore[attr-defined]
        return LateGroup(rank, size, gloo, f"{seed} {rank}")

    if NAME not in dist.Backend.backend_list:
        dist.Backend.register_backend(NAME, create, devices=["cpu"])
    else:
        dist.Backend._plugins[NAME.upper()] = dist.Backend._BackendPlugin(create, False)  # type: ignore[attr-defined]
