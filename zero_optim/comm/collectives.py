"""The few collectives that zero_optim uses, each written once.

Only here, and where `lanes` makes groups, are ranks global: everywhere else a rank is a group rank. All ranks
of the group must call every method that communicates, in the same order, except `send` and `recv`, which
concern those that send and receive. If a rank does not come, gloo raises after the group's timeout. NCCL's
watchdog then ends the process instead, so that errors promised for this case are not seen there.

Note [Rows at once]
    Where a backend can take several collectives as one (NCCL, XCCL), all broadcasts of a bucket are one
    launch: without that, each is a kernel of its own with its own latency, one after the other on NCCL's
    stream. An all-gather would be one launch too. But it takes one tensor of each rank, and an owner may have
    several spans in a bucket; and where all rows have one length, PyTorch's gathers them into a copy of the
    whole bucket, and copies them out. Broadcasts write in place. gloo has no such thing: there all broadcasts
    are started, and its threads work on them side by side.

Note [gloo and CUDA]
    gloo brings CUDA tensors to the host by itself in its collectives, on streams and threads of its own. In
    `isend` and `irecv` it does not: it takes the pointer for one to host memory. So on gloo CUDA tensors
    are exchanged by an all-to-all, and `send` and `recv` go by way of the device of small tensors, which on
    gloo is the CPU. gloo's all-to-all knows few dtypes and no list of tensors, hence one tensor of bytes.
    CPU tensors are sent piece by piece, which takes no second copy of them.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor

from zero_optim.comm.backends import (
    backend_for,
    backends_of,
    device_for_small_tensors,
    devices_of,
    unserved,
)
from zero_optim.comm.traffic import Phase, Traffic, Waitable, broadcast_nbytes, sum_nbytes
from zero_optim.comm.works import Doing, GroupWorks, Record, Work, log_of
from zero_optim.compat.engine import coalesced, coalesces, timeout_of
from zero_optim.compat.streams import (
    Event,
    HostCopy,
    is_asynchronous,
    record_use,
    recorded_event,
    to_device,
    wait_for_event,
)
from zero_optim.errors import RemoteRankError, StalledError


@dataclass(slots=True)
class Pending:
    """Collectives that have been started. It keeps the tensors they use until somebody has waited for them.

    Each stream that needs the result waits. The first one waits for the collectives, and on it ``then`` is
    called; any other one waits for the first. The caller takes care that only one thread waits at a time.

    Args:
        works: handles of the collectives, in the order in which they were started.
        tensors: what the collectives read or write; at least one, all on one device.
        then: called once, on the thread and the stream that waits first, behind all of them.

    Attributes:
        is_unclaimed: nobody has waited yet.
    """

    works: Sequence[Waitable]
    tensors: list[Tensor]
    then: Callable[[], None]
    is_unclaimed: bool = field(default=True, init=False)
    _behind: tuple[torch.device, Event] | None = field(default=None, init=False)

    def wait(self) -> bool:
        """Let the current stream, on the CPU the caller, wait for all of them, and for ``then``.

        Returns:
            Whether all is known to be over, so that no stream needs to wait any more. On the CPU it is.
        """
        if not self.is_unclaimed:
            return self._wait_behind()
        self.is_unclaimed = False
        tensors, self.tensors, works, self.works = self.tensors, [], self.works, ()
        for work in works:
            work.wait()
        self.then()
        self.then = _nothing  # and let go of what it keeps
        device = tensors[0].device
        record_use(*tensors)  # perhaps made on another stream, to which their memory goes back
        event = recorded_event(device)
        self._behind = None if event is None else (device, event)
        return event is None

    def _wait_behind(self) -> bool:
        if self._behind is not None:
            device, event = self._behind
            if event.query():
                self._behind = None
            else:
                wait_for_event(device, event)
        return self._behind is None


def _nothing() -> None:
    """Do nothing: the work is done."""


class _LetGo:
    """Stands where a process group was, so that nothing keeps that; whatever is asked of it raises."""

    def __getattr__(self, name: str) -> NoReturn:
        if name.startswith("__"):  # Python asks for these itself
            raise AttributeError(name)
        raise RuntimeError(LET_GO)


LET_GO = (
    "the process group was let go by detach(): call rebind(), on all ranks of a new one. What was made for "
    "the one before, such as comm hooks, has to be made again"
)


@dataclass(frozen=True, slots=True)
class RankGroup:
    """A process group as its members see it: group ranks 0 … size-1, this process among them.

    Args:
        process_group: the group, the default group or a part of it.
        rank: group rank of this process.
        size: number of ranks.
        device: where the library's own small tensors lie, see Note [Devices of a group] in
            `zero_optim.comm.backends`.
        data_devices: where the parameters lie; empty where nothing is known of them.
        backends: what serves each type of device, such as ``{"cpu": "gloo", "cuda": "nccl"}``.
        works: the works of the process group on this process.
        phase: where what is sent is counted, and the waits.
    """

    process_group: dist.ProcessGroup
    rank: int
    size: int
    device: torch.device
    data_devices: tuple[torch.device, ...]
    backends: Mapping[str, str] = field(compare=False)
    works: GroupWorks = field(compare=False, repr=False)
    phase: Phase = field(default_factory=Phase, compare=False, repr=False)

    def __deepcopy__(self, memo: object) -> "RankGroup":
        """Return the same ranks, as a process group cannot be copied. A copy's traffic counts from zero."""
        return replace(self, phase=replace(self.phase, traffic=Traffic()))

    def __reduce__(
        self,
    ) -> tuple[Callable[..., "RankGroup"], tuple[list[Tensor], float | None]]:
        """Pickle the default group as "the default group", with the timeout; no other can be found again.

        Raises:
            TypeError: the group is not the default one, or was let go.
        """
        if self.is_let_go:
            raise TypeError("a detached optimizer cannot be pickled: save its owned_state() instead")
        if self.process_group is not dist.group.WORLD:
            raise TypeError("an optimizer over a sub-group cannot be pickled: save its state_dict() instead")
        # A tensor of each device, to come to where the parameters come: torch.load(map_location=...) moves
        # tensors, not devices.
        placed = [torch.zeros(1, device=device) for device in self.data_devices]
        return _default_group, (placed, self.phase.timeout)

    def let_go(self) -> "RankGroup":
        """Give the same without the process group: rank and size are known, what communicates raises."""
        nobody: Any = _LetGo()
        return replace(self, process_group=nobody)

    @property
    def is_let_go(self) -> bool:
        """Whether the process group was let go."""
        return isinstance(self.process_group, _LetGo)

    @classmethod
    def of(cls, process_group: dist.ProcessGroup | None, data: object = None) -> "RankGroup":
        """Make one for a process group, as this process sees it. Does not communicate.

        Args:
            process_group: None stands for the default group.
            data: what is to be sent: parameters, modules, devices, or collections of them, see `devices_of`;
                None where nothing is known. Nothing in it is refused here, see `check_serves`.

        Raises:
            RuntimeError: torch.distributed is not initialised.
            ValueError: this process is not a member.
        """
        if not dist.is_available() or not dist.is_initialized():
            raise RuntimeError(
                "no process group: call torch.distributed.init_process_group() before building the "
                "optimizer, and start the script with torchrun (one process is enough)"
            )
        group = dist.group.WORLD if process_group is None else process_group
        if group is None or dist.get_rank(group) < 0:
            raise ValueError(
                "this process is not a member of the process_group given: build it on members only"
            )
        devices, backends = devices_of(data), backends_of(group)
        small = device_for_small_tensors(backends, devices, getattr(group, "bound_device_id", None))
        world = dist.group.WORLD
        assert world is not None  # torch.distributed is initialised
        ranks, can_cut = tuple(dist.get_process_group_ranks(group)), backends.get("cpu") == "gloo"
        works = log_of(world).of(group, ranks, timeout_of(group), can_cut=can_cut)
        return cls(group, dist.get_rank(group), len(ranks), small, devices, backends, works)

    def during(self, phase: str, *, is_exposed: bool | None = None) -> "RankGroup":
        """Give the same ranks, with what is sent and waited for counted under the name of a phase.

        Args:
            phase: one of `zero_optim.comm.traffic.PHASES`.
            is_exposed: callers wait; None to leave it as it is.
        """
        is_exposed = self.phase.is_exposed if is_exposed is None else is_exposed
        return replace(self, phase=replace(self.phase, name=phase, is_exposed=is_exposed))

    def within(self, timeout: float | None) -> "RankGroup":
        """Give the same ranks, whose waits are given up after some seconds; None for the group's timeout."""
        return replace(self, phase=replace(self.phase, timeout=timeout))

    def doing(self, name: str) -> Doing:
        """Give a context in which this process does something, which other ranks hear of if they miss it.

        Args:
            name: such as ``step()``.
        """
        return Doing(self.works.log.activity, name)

    def begin_work(self, about: str = "") -> Record:
        """Begin a work of the current phase, see `GroupWorks.begin`.

        Raises:
            RuntimeError: the process group was let go.
        """
        if self.is_let_go:
            raise RuntimeError(LET_GO)
        return self.works.begin(self.phase, about)

    def uncounted(self) -> "RankGroup":
        """Give the same ranks, with traffic that nobody reads."""
        return replace(self, phase=Phase(timeout=self.phase.timeout))

    def check_serves(self, data: object) -> None:
        """Refuse tensors on a device that the group cannot send. Does not communicate.

        A group of one sends nothing, and takes all.

        Raises:
            ValueError: there are some; names the device, what the group has, and what to do.
        """
        wrong = unserved(self.backends, devices_of(data)) if self.size > 1 else None
        if wrong is not None:
            raise ValueError(wrong)

    def backend_of(self, device: torch.device) -> str:
        """Name the backend that sends tensors of a device; "" if none does."""
        return self.backends.get(device.type, "")

    @property
    def data_backend(self) -> str:
        """What a group beside this one needs to send the same data, as `init_process_group` takes it."""
        known = backend_for(self.backends, self.data_devices) if self.backends else ""
        return known or str(dist.get_backend(self.process_group))

    def broadcast_rows(self, rows: Iterable[tuple[int, Tensor]], about: str = "") -> list[Waitable]:
        """Start the broadcast of each row from its owner, and wait for none. All ranks call.

        Measured on gloo, broadcasts by the owners take a third of the time of an all-gather of the same
        bytes. Nor do they need rows of equal length. See Note [Rows at once].

        Args:
            rows: (owner, 1-D tensor) in the same order on every rank, all on one device. The broadcast reads
                the owner's tensor and writes the others.
            about: what the rows belong to, for messages.

        Returns:
            Their handles: one for each row, or one for all; none in a group of one.
        """
        listed = list(rows) if self.size > 1 else []
        if not listed:
            return []
        device, record = listed[0][1].device, self.begin_work(about)
        with record.starting():
            handles = self._start_rows(listed, device)
        nbytes = sum(self._nbytes_sent(row, owner) for owner, row in listed)
        self.phase.sent(nbytes, len(handles))
        return self.works_of(handles, record, device)

    def _start_rows(
        self, rows: Sequence[tuple[int, Tensor]], device: torch.device
    ) -> Sequence[dist.Work | None]:
        if len(rows) < 2 or not coalesces(self.process_group, device):
            return [self._broadcast(row, owner) for owner, row in rows]
        with coalesced(self.process_group, device) as started:
            for owner, row in rows:
                self._broadcast(row, owner)
        return started

    def works_of(
        self, handles: Sequence[Waitable | None], record: Record, device: torch.device
    ) -> list[Waitable]:
        """Make works of handles that the backend gave for one record; for tensors on a device."""
        is_late = is_asynchronous(device) and self.backend_of(device) != "gloo"
        return [Work(handle, self.phase, record, is_late=is_late) for handle in handles if handle is not None]

    def _nbytes_sent(self, row: Tensor, source: int) -> int:
        behind, is_gloo = (self.rank - source) % self.size, self.backend_of(row.device) == "gloo"
        return broadcast_nbytes(row.nbytes, behind, self.size, is_gloo=is_gloo)

    def _broadcast(self, tensor: Tensor, source: int) -> dist.Work | None:
        # As bytes, because no backend knows every dtype (gloo lacks float8, NCCL lacks int16).
        row = tensor.view(torch.uint8)
        work: dist.Work | None = dist.broadcast(
            row, self._global(source), group=self.process_group, async_op=True
        )
        return work

    def start_sum(self, tensor: Tensor, about: str = "") -> tuple[dist.Work, Waitable]:
        """Start a sum over all ranks, in place for dense tensors. All ranks call.

        Args:
            tensor: what is summed.
            about: what it belongs to, for messages.

        Returns:
            The backend's handle, for its result; and the work, to wait for.
        """
        self.count_sum(tensor)
        record = self.begin_work(about)
        with record.starting():
            handle = dist.all_reduce(tensor, group=self.process_group, async_op=True)
        assert isinstance(handle, dist.Work)  # a member's asynchronous collective always gives a handle
        return handle, self.works_of([handle], record, tensor.device)[0]

    def count_sum(self, tensor: Tensor) -> None:
        """Count a sum of a tensor over all ranks, which the caller starts."""
        if self.size > 1 and tensor.is_sparse:
            nbytes = tensor._indices().nbytes + tensor._values().nbytes
            self.phase.sent((self.size - 1) * nbytes)
        elif self.size > 1:
            self.phase.sent(sum_nbytes(tensor.nbytes, self.size))

    def all_gather_bytes(self, payload: bytes) -> list[bytes]:
        """Return the payloads of all ranks, by rank. They may differ in length. Two collectives."""
        lengths = [
            int.from_bytes(size, "little")
            for size in self.all_gather_fixed(len(payload).to_bytes(8, "little"))
        ]
        padded = payload.ljust(max(lengths), b"\0")
        return [got[:length] for got, length in zip(self.all_gather_fixed(padded), lengths, strict=True)]

    def all_gather_fixed(self, payload: bytes) -> list[bytes]:
        """Return the payloads of all ranks, which must have equal length. One collective.

        Raises:
            RemoteRankError: a rank has ended, or did not come within the group's timeout.
        """
        if self.size == 1 or not payload:
            return [payload] * self.size
        gathered = self.all_gather_rows(to_device(bytes_to_tensor(payload), self.device))
        return [tensor_to_bytes(row) for row in HostCopy(gathered).read()]

    def all_gather_rows(self, mine: Tensor) -> Tensor:
        """Gather the tensors of all ranks, which must have equal length. One collective.

        If `device` is asynchronous, the CPU waits neither for this nor for what makes the tensor.

        Args:
            mine: 1-D, uint8, on `device`.

        Returns:
            Shape (number of ranks, length), on `device`.

        Raises:
            RemoteRankError: a rank has ended, or did not come within the group's timeout.
        """
        if self.size == 1 or not mine.numel():
            return mine.expand(self.size, -1)
        gathered = mine.new_empty(self.size, mine.numel())
        self.phase.sent((self.size - 1) * mine.nbytes)
        try:
            with self.phase.held_up(), self.begin_work().waiting():
                dist.all_gather(list(gathered.unbind()), mine, group=self.process_group)
        except StalledError:
            raise
        except RuntimeError as error:  # of the backend, whose text does not tell who waited for whom
            raise self.unanswered("the ranks could not agree", error) from error
        return gathered

    def unanswered(self, what: str, error: RuntimeError) -> RemoteRankError:
        """Make the error for a collective that a rank did not take part in.

        Args:
            what: what came of it, as the message begins.
            error: what the backend raised.
        """
        limit = timeout_of(self.process_group)
        within = "the timeout" if limit is None else f"{limit.total_seconds():g} s"
        return RemoteRankError(f"{what}: a rank has ended, or did not come within {within} ({error})")

    def exchange(
        self, pieces: Sequence[Tensor], lanes: "Sequence[RankGroup]", about: str = ""
    ) -> tuple[list[Waitable], list[Tensor]]:
        """Start sending one piece to each rank, and receiving one from each; all ranks call.

        Args:
            pieces: by receiving rank; 1-D, contiguous, of one dtype. The piece for this rank is not sent.
                Rank r's piece has the same length on every rank.
            lanes: groups of the same ranks. One gloo group is not reliably full duplex, so on gloo each
                sender gets its own lane, modulo their number. See also Note [gloo and CUDA].
            about: what the pieces belong to, for messages.

        Returns:
            The handles; the pieces received, by sending rank, complete for whoever has waited for all
            handles. This rank's own piece is the tensor given.
        """
        mine = pieces[self.rank]
        received = [mine if rank == self.rank else torch.empty_like(mine) for rank in range(self.size)]
        if self.size == 1:
            return [], received
        lane = replace(lanes[0], phase=self.phase)  # it counts for whoever exchanges
        record = lane.begin_work(about)
        with record.starting():
            works, received = self._start_exchange(pieces, received, lanes)
        nbytes = sum(piece.nbytes for rank, piece in enumerate(pieces) if rank != self.rank)
        self.phase.sent(nbytes)
        return lane.works_of(works, record, mine.device), received

    def _start_exchange(
        self, pieces: Sequence[Tensor], received: list[Tensor], lanes: "Sequence[RankGroup]"
    ) -> tuple[list[dist.Work], list[Tensor]]:
        mine = pieces[self.rank]
        if lanes[0].backend_of(mine.device) != "gloo":
            return self._exchange_at_once(pieces, received, lanes[0]), received
        if mine.device.type != "cpu":
            return self._exchange_packed(pieces, received, lanes[0])
        works: list[dist.Work | None] = []
        for rank in range(self.size):
            if rank != self.rank:
                there, back = lanes[self.rank % len(lanes)], lanes[rank % len(lanes)]
                works.append(dist.isend(pieces[rank], self._global(rank), group=there.process_group))
                works.append(dist.irecv(received[rank], self._global(rank), group=back.process_group))
        return [work for work in works if work is not None], received

    def _exchange_at_once(
        self, pieces: Sequence[Tensor], received: list[Tensor], lane: "RankGroup"
    ) -> list[dist.Work]:
        own = pieces[self.rank][:0]  # this rank's piece stays where it is
        sent = [own if rank == self.rank else piece for rank, piece in enumerate(pieces)]
        into = [own if rank == self.rank else piece for rank, piece in enumerate(received)]
        work = dist.all_to_all(into, sent, group=lane.process_group, async_op=True)
        assert isinstance(work, dist.Work)  # async_op=True on a member always returns a handle
        return [work]

    def _exchange_packed(
        self, pieces: Sequence[Tensor], received: list[Tensor], lane: "RankGroup"
    ) -> tuple[list[dist.Work], list[Tensor]]:
        """Exchange as one tensor each way, and as bytes: see Note [gloo and CUDA]."""
        own = pieces[self.rank]
        sent = [own[:0] if rank == self.rank else piece for rank, piece in enumerate(pieces)]
        into = [own[:0] if rank == self.rank else piece for rank, piece in enumerate(received)]
        packed = torch.cat(sent).view(torch.uint8)
        came = torch.empty(sum(part.nbytes for part in into), dtype=torch.uint8, device=own.device)
        there, back = ([part.nbytes for part in parts] for parts in (sent, into))
        work = dist.all_to_all_single(came, packed, back, there, group=lane.process_group, async_op=True)
        assert isinstance(work, dist.Work)  # async_op=True on a member always returns a handle
        arrived = torch.split(came.view(own.dtype), [part.numel() for part in into])
        return [work], [own if rank == self.rank else part for rank, part in enumerate(arrived)]

    def send(self, tensor: Tensor, *to: int) -> None:
        """Send a contiguous tensor to some ranks, which must call `recv`.

        Returns when all have read it; where `device` is asynchronous, only the current stream waits for that.
        """
        staged = tensor.to(self.device)
        record = self.begin_work()
        with record.starting():
            works = [dist.isend(staged, self._global(rank), group=self.process_group) for rank in to]
        self.phase.sent(staged.nbytes * len(works), len(works))
        with self.phase.held_up(), record.waiting():
            for work in works:
                assert work is not None  # this process is a member
                work.wait()

    def recv(self, tensor: Tensor, source: int) -> None:
        """Fill a contiguous tensor with what ``source`` sends.

        Returns when it has arrived; for a tensor on an asynchronous device, only the current stream waits.
        """
        staged = tensor if tensor.device == self.device else torch.empty_like(tensor, device=self.device)
        with self.phase.held_up(), self.begin_work().waiting():
            dist.recv(staged, self._global(source), group=self.process_group)
        if staged is not tensor:
            tensor.copy_(staged)

    def start_send(self, tensor: Tensor, to: int) -> Waitable:
        """Start to send a contiguous tensor of the CPU on gloo; ``to`` calls `start_recv`.

        The handle has to be kept until the tensor was received, or the group has ended.
        """
        record = self.begin_work()
        with record.starting():
            work = dist.isend(tensor, self._global(to), group=self.process_group)
        assert work is not None  # this process is a member
        self.phase.sent(tensor.nbytes)
        return Work(work, self.phase, record)

    def start_recv(self, tensor: Tensor, source: int) -> Waitable:
        """Start to fill a contiguous tensor of the CPU, on gloo, with what ``source`` sends."""
        record = self.begin_work()
        with record.starting():
            work = dist.irecv(tensor, self._global(source), group=self.process_group)
        assert work is not None  # likewise
        return Work(work, self.phase, record)

    def _global(self, rank: int) -> int:
        return dist.get_global_rank(self.process_group, rank)


def _default_group(data: Sequence[Tensor], timeout: float | None) -> RankGroup:
    return RankGroup.of(None, data).within(timeout)


def bytes_to_tensor(payload: bytes) -> Tensor:
    """Copy bytes into a 1-D uint8 tensor on the CPU."""
    return (
        torch.frombuffer(bytearray(payload), dtype=torch.uint8)
        if payload
        else torch.empty(0, dtype=torch.uint8)
    )


def tensor_to_bytes(tensor: Tensor) -> bytes:
    """Copy a 1-D uint8 tensor into bytes."""
    return tensor.cpu().numpy().tobytes()


def ranks_text(ranks: Sequence[int]) -> str:
    """Name some ranks in a message: "rank 1", "ranks 0, 2"."""
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"
