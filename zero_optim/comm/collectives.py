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

Note [Two ranks of many]
    For a send by itself NCCL makes a communicator of the two ranks, which takes some hundred ms and MiB of
    the device, and stays. For sends that are started as one it uses that of the whole group. So here a send
    is always started so. It must not be the group's first call, since all ranks make the communicator.
    Whoever sends has agreed with all ranks before.
"""

import json
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from itertools import zip_longest

import torch
import torch.distributed as dist
from torch import Tensor

from zero_optim.comm.frames import framed, is_short, met_otherwise, unframed
from zero_optim.comm.ranks import Ranks
from zero_optim.comm.started import Work
from zero_optim.comm.traffic import Waitable, broadcast_nbytes, sum_nbytes
from zero_optim.comm.unended import SMALL, Paired
from zero_optim.comm.works import Record
from zero_optim.compat import private
from zero_optim.compat.engine import coalesced, coalesces, timeout_of
from zero_optim.compat.streams import (
    HostCopy,
    is_asynchronous,
    to_device,
)
from zero_optim.errors import RankMismatchError, RemoteRankError, StalledError


@dataclass(frozen=True, slots=True)
class RankGroup(Ranks):
    """The ranks of a process group, and what they do together."""

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
        self,
        handles: Sequence[Waitable | None],
        record: Record,
        device: torch.device,
    ) -> list[Waitable]:
        """Make works of handles that the backend gave for one record; for tensors on a device.

        Args:
            handles: as the backend gave them.
            record: of all of them.
            device: of the tensors.
        """
        is_late = is_asynchronous(device) and self.backend_of(device) != "gloo"
        late_on, looks_up = device if is_late else None, self.is_gloo_on_cpu(device)
        return [
            Work(handle, self.phase, record, late_on=late_on, looks_up=looks_up)
            for handle in handles
            if handle is not None
        ]

    def is_gloo_on_cpu(self, device: torch.device) -> bool:
        """Whether gloo sends tensors of a device that the CPU has finished; does not communicate.

        Waits for its collectives look up then: Note [Waits that nothing ends] in `unended`.
        """
        return self.backend_of(device) == "gloo" and not is_asynchronous(device)

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
            nbytes = private.indices(tensor).nbytes + private.values(tensor).nbytes
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
            RankMismatchError: on every rank: payloads differ in length, so ranks are in different calls. See
                Note [Agreements that meet] in `zero_optim.comm.frames`.
        """
        if self.size == 1 or not payload:
            return [payload] * self.size
        if not is_short(payload):
            return self._gathered(payload)
        payloads = unframed(self._gathered(framed(payload)))
        if payloads is None:
            raise self._met_otherwise()
        return payloads

    def _gathered(self, payload: bytes) -> list[bytes]:
        gathered = self.all_gather_rows(to_device(bytes_to_tensor(payload), self.device))
        return [tensor_to_bytes(row) for row in self.read(HostCopy(gathered))]

    def read(self, copy: HostCopy) -> Tensor:
        """Wait on the CPU for what a collective of these ranks has brought; does not communicate.

        Where an accelerator does the collective, this is where a rank stands if another one does not come.

        Args:
            copy: of what it has brought.

        Returns:
            The value, on the CPU.

        Raises:
            StalledError: the ranks gave up, so what came means nothing.
        """
        if copy.is_here:
            return copy.read()
        record = self.begin_work(by_all=False)
        with self.phase.held_up(), record.waiting():
            value = copy.read()
        if record.group.verdict is not None:
            raise record.group.verdict.error()
        return value

    def _met_otherwise(self) -> RankMismatchError:
        """Make what is raised where ranks are in different agreements; all ranks call. Communicates."""
        activity = self.works.log.activity
        inside = [mark.name for mark in list(activity.open.values())][:1]
        told = self.all_gather_bytes(json.dumps([dict(activity.counts), inside]).encode())
        return RankMismatchError(
            met_otherwise({rank: json.loads(each) for rank, each in zip(self.numbers, told, strict=True)})
        )

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
            record = self.begin_work()
            with self.phase.held_up(), record.waiting():
                self._gather(list(gathered.unbind()), mine, record)
        except StalledError:
            raise
        except RuntimeError as error:  # of the backend, whose text does not tell who waited for whom
            raise self.unanswered("the ranks could not agree", error) from error
        return gathered

    def _gather(self, rows: list[Tensor], mine: Tensor, record: Record) -> None:
        looks_up = self.is_gloo_on_cpu(mine.device)
        handle = dist.all_gather(rows, mine, group=self.process_group, async_op=looks_up)
        if isinstance(handle, dist.Work):
            record.group.wait_for(handle)

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
    ) -> tuple[Sequence[Waitable], list[Tensor]]:
        mine = pieces[self.rank]
        if lanes[0].backend_of(mine.device) != "gloo":
            return self._exchange_at_once(pieces, received, lanes[0]), received
        if mine.device.type != "cpu":
            return self._exchange_packed(pieces, received, lanes[0])
        self._count_exchange(lanes)
        others = [rank for rank in range(self.size) if rank != self.rank]
        sends, receives = ([(rank, of_rank[rank]) for rank in others] for of_rank in (pieces, received))
        return [self._start_paired(sends, receives, lanes)], received

    def start_parts(
        self, parts: Sequence[Sequence[Tensor]], lanes: "Sequence[RankGroup]", about: str = ""
    ) -> tuple[Waitable, Callable[[Tensor], tuple[Waitable, list[Tensor]]]]:
        """Start sending some parts to each rank, which receives one part of every rank at a time.

        All ranks call, where `is_gloo_on_cpu` holds.

        Args:
            parts: by receiving rank, in order; as the pieces of `exchange`.
            lanes: see `exchange`.
            about: likewise.

        Returns:
            The handle of all sends. And what starts to receive this rank's next part of every other rank: it
            is given its own part, and returns a handle, and the parts by sending rank.
        """
        lane = replace(lanes[0], phase=self.phase)
        record = lane.begin_work(about)
        tag = 1 + record.place % 2**30  # as parts of another exchange may be received in between
        self._count_exchange(lanes)
        rounds = (list(enumerate(some)) for some in zip_longest(*parts))
        sends = [
            (rank, part) for some in rounds for rank, part in some if rank != self.rank and part is not None
        ]
        with record.starting():
            sent = self._start_paired(sends, (), lanes, tag)
        self.phase.sent(sum(part.nbytes for _, part in sends))

        def receive(own: Tensor) -> tuple[Waitable, list[Tensor]]:
            into = [own if rank == self.rank else torch.empty_like(own) for rank in range(self.size)]
            with record.starting():
                others = ((rank, part) for rank, part in enumerate(into) if rank != self.rank)
                came = self._start_paired((), others, lanes, tag)
            return Work(came, self.phase, record, looks_up=True), into

        return Work(sent, self.phase, record, looks_up=True), receive

    def _count_exchange(self, lanes: "Sequence[RankGroup]") -> None:
        """Count all that an exchange begins on a lane as one collective; see `GroupWorks.apart`."""
        for lane in lanes[: self.size]:
            lane.works.apart -= 1

    def _start_paired(
        self,
        sends: Iterable[tuple[int, Tensor]],
        receives: Iterable[tuple[int, Tensor]],
        lanes: "Sequence[RankGroup]",
        tag: int = 0,
    ) -> Paired:
        """Start to send tensors to ranks, and to receive some, on the lanes of those that send."""
        lane, sends = lanes[self.rank % len(lanes)], list(sends)
        sent = _made([lane._isend(tensor, rank, tag) for rank, tensor in sends])
        came = _made([lanes[rank % len(lanes)]._irecv(tensor, rank, tag) for rank, tensor in receives])
        return Paired(sent, came, is_small=all(tensor.nbytes <= SMALL for _, tensor in sends))

    def spread_rows(
        self, rows: Sequence[tuple[int, Tensor]], lanes: "Sequence[RankGroup]", tag: int, about: str = ""
    ) -> list[Waitable]:
        """Start to send each row from its owner to the other ranks, where gloo sends it; all ranks call.

        As `broadcast_rows`, but rows of different tags never meet: gloo ends the process, from a thread of
        its own, where rows that meet differ in length. Owners send to all ranks themselves.

        Args:
            rows: (owner, 1-D tensor) in the same order on every rank, all on the CPU.
            lanes: groups of the same ranks. Owner r sends on lane r modulo their number.
            tag: the same on every rank, from 1 to 2**31 - 2. Where it is not, nothing arrives.
            about: what the rows belong to, for messages.

        Returns:
            The handle, for whoever reads the rows; none in a group of one.
        """
        if self.size == 1 or not rows:
            return []
        record, device = self.begin_work(about), rows[0][1].device
        octets = [(owner, row.view(torch.uint8)) for owner, row in rows]  # as `_broadcast` sends them
        others = [rank for rank in range(self.size) if rank != self.rank]
        sends = [(rank, row) for owner, row in octets if owner == self.rank for rank in others]
        self._count_exchange(lanes)
        with record.starting():
            handle = self._start_paired(sends, [pair for pair in octets if pair[0] != self.rank], lanes, tag)
        self.phase.sent(sum(row.nbytes for _, row in sends), len(rows))
        return self.works_of([handle], record, device)

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
        record = self.begin_work(by_all=False)
        with record.starting(), self._at_once(staged.device) as started:
            each = [self._isend(staged, rank) for rank in to]
        works = started or _made(each)
        self.phase.sent(staged.nbytes * len(works), len(works))
        with self.phase.held_up(), record.waiting():
            if self.is_gloo_on_cpu(staged.device):
                record.group.wait_for(Paired(works))
            else:
                for work in works:
                    work.wait()

    def recv(self, tensor: Tensor, source: int) -> None:
        """Fill a contiguous tensor with what ``source`` sends.

        Returns when it has arrived; for a tensor on an asynchronous device, only the current stream waits.
        """
        staged = tensor if tensor.device == self.device else torch.empty_like(tensor, device=self.device)
        with self.phase.held_up(), self.begin_work(by_all=False).waiting():
            with self._at_once(staged.device) as started:
                each = [self._irecv(staged, source)]
            for work in started or _made(each):
                work.wait()
        if tensor.device.type == "cpu" and staged is not tensor:
            tensor.copy_(self.read(HostCopy(staged)))
        elif staged is not tensor:
            tensor.copy_(staged)

    def start_send(self, tensor: Tensor, to: int) -> Waitable:
        """Start to send a contiguous tensor of the CPU on gloo; ``to`` calls `start_recv`.

        The handle has to be kept until the tensor was received, or the group has ended.
        """
        record = self.begin_work(by_all=False)
        with record.starting():
            handle = Paired(_made([self._isend(tensor, to)]))
        self.phase.sent(tensor.nbytes)
        return Work(handle, self.phase, record, looks_up=self.is_gloo_on_cpu(tensor.device))

    def start_recv(self, tensor: Tensor, source: int) -> Waitable:
        """Start to fill a contiguous tensor of the CPU, on gloo, with what ``source`` sends."""
        record = self.begin_work(by_all=False)
        with record.starting():
            (work,) = _made([self._irecv(tensor, source)])
        return Work(work, self.phase, record)

    def _at_once(self, device: torch.device) -> AbstractContextManager[list[dist.Work]]:
        """Start sends and receives as one, where the backend can; see Note [Two ranks of many]."""
        if coalesces(self.process_group, device):
            return coalesced(self.process_group, device)
        return nullcontext([])

    def _isend(self, tensor: Tensor, to: int, tag: int = 0) -> dist.Work | None:
        self.works.apart += 1
        return dist.isend(tensor, self._global(to), group=self.process_group, tag=tag)

    def _irecv(self, tensor: Tensor, source: int, tag: int = 0) -> dist.Work | None:
        self.works.apart += 1
        return dist.irecv(tensor, self._global(source), group=self.process_group, tag=tag)

    def _global(self, rank: int) -> int:
        return dist.get_global_rank(self.process_group, rank)


def _made(works: Iterable[dist.Work | None]) -> list[dist.Work]:
    """Give the handles, of which there are all: this process is a member of the group."""
    return [work for work in works if work is not None]


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
