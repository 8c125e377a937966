"""The ranks of a process group, and their collectives.

Ranks are group ranks, except here, in `sending`, and where `lanes` makes groups. All ranks call every
communicating method in one order.

Note [Rows at once]
    NCCL launches the broadcasts of a bucket with few owners at once. Those of many owners would grow with the
    number of ranks: there equal slices are gathered in place. gloo runs broadcasts side by side, in half of
    an all-gather's time or less.

Note [Agreements that meet]
    If a rank leaves out a call, different agreements may meet. If messages differ in length, gloo's own
    thread raises, which ends the process. So short messages travel in *frames* of one length that begin with
    the message's length: if that differs, every rank raises.
"""

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any, NoReturn, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor

from zero_optim.comm.backends import (
    Transport,
    backend_for,
    backends_of,
    device_for_small_tensors,
    devices_of,
    transport_of,
    unserved,
)
from zero_optim.comm.frames import SHORT, bytes_to_tensor, framed, met_otherwise, tensor_to_bytes, unframed
from zero_optim.comm.traffic import Phase, Timeout, Traffic, broadcast_nbytes, sum_nbytes
from zero_optim.comm.work_log import ActivityScope, GroupWorks, log_of
from zero_optim.comm.works import Work
from zero_optim.compat.autograd import start_as_one, timeout_of
from zero_optim.compat.streams import HostCopy, to_device
from zero_optim.errors import RankMismatchError, RemoteRankError, StalledError
from zero_optim.flow.pending import Pending, Waitable
from zero_optim.host.messages import OneHost, can_sum
from zero_optim.host.several_hosts import SeveralHosts

if TYPE_CHECKING:
    from zero_optim.comm.sending import Levels

RELEASED = (
    "detach() has released the process group: call rebind() on all ranks of a new one. Create again what "
    "belonged to the old group, such as comm hooks"
)

# Its name of PyTorch 2.13, or the one before, which warns since.
GATHER = "all_gather_single" if hasattr(dist, "all_gather_single") else "all_gather_into_tensor"

_Row: TypeAlias = tuple[int, Tensor]  # and its owner
_Slice: TypeAlias = tuple[Tensor, Tensor]  # of all ranks, and this rank's, there or elsewhere
_Slices: TypeAlias = Sequence[_Slice]


class Released:
    """The place of something that was released, as a process group; any use raises an error."""

    def __init__(self, error: str) -> None:
        self._error = error

    def __getattr__(self, name: str) -> NoReturn:
        if name.startswith("__"):  # Python asks for these itself
            raise AttributeError(name)
        raise RuntimeError(self._error)


@dataclass(frozen=True, slots=True)
class RankGroup:
    """A process group with group ranks 0 … size-1, this process among them.

    ``device``: of the library's small tensors. ``data_devices``: of the parameters, if known. ``phase``:
    where traffic and waits are counted. ``is_released``: the process group was released.
    """

    process_group: dist.ProcessGroup
    rank: int
    size: int
    device: torch.device
    data_devices: tuple[torch.device, ...]
    backends: Mapping[str, str] = field(compare=False)
    works: GroupWorks = field(compare=False, repr=False)
    phase: Phase = field(default_factory=Phase, compare=False, repr=False)
    is_released: bool = field(default=False, compare=False, repr=False)
    _during: dict[object, "RankGroup"] = field(init=False, default_factory=dict, compare=False, repr=False)

    @classmethod
    def of(cls, process_group: dist.ProcessGroup | None, data: object = None) -> "RankGroup":
        """Build it for a process group (None: the default one) that sends ``data``; RuntimeError without."""
        world = dist.group.WORLD if dist.is_available() and dist.is_initialized() else None
        if world is None:
            raise RuntimeError(
                "no process group: call torch.distributed.init_process_group() before building the "
                "optimizer, and start the script with torchrun (one process is enough)"
            )
        group = world if process_group is None else process_group
        if dist.get_rank(group) < 0:
            raise ValueError(
                "this process is not a member of the process_group given: build it on members only"
            )
        devices, backends = devices_of(data), backends_of(group)
        small = device_for_small_tensors(backends, devices, getattr(group, "bound_device_id", None))
        ranks = tuple(dist.get_process_group_ranks(group))
        can_cut = transport_of(backends.get("cpu", ""), torch.device("cpu")).cuts_by_timeout
        works = log_of(world).of(group, ranks, timeout_of(group), can_cut=can_cut)
        return cls(group, dist.get_rank(group), len(ranks), small, devices, backends, works)

    def __deepcopy__(self, memo: object) -> "RankGroup":
        return replace(self, phase=replace(self.phase, traffic=Traffic()))

    def __reduce__(self) -> tuple[Callable[..., "RankGroup"], tuple[list[Tensor], Timeout]]:
        if self.is_released:
            raise TypeError("a detached optimizer cannot be pickled: save its owned_state() instead")
        if self.process_group is not dist.group.WORLD:
            raise TypeError("an optimizer over a sub-group cannot be pickled: save its state_dict() instead")
        # A tensor of each device, as torch.load(map_location=...) moves tensors, not devices.
        placed = [torch.zeros(1, device=device) for device in self.data_devices]
        return _default_group, (placed, self.phase.timeout)

    def release(self) -> "RankGroup":
        """Return a copy without the process group: communication raises."""
        nobody: Any = Released(RELEASED)
        return replace(self, process_group=nobody, is_released=True)

    def during(self, phase: str, *, is_exposed: bool | None = None) -> "RankGroup":
        """Return a copy that counts traffic and waits under one of `traffic.PHASES`."""
        known = self._during.get((phase, is_exposed))  # every step asks for two
        if known is None:
            exposed = self.phase.is_exposed if is_exposed is None else is_exposed
            known = replace(self, phase=replace(self.phase, name=phase, is_exposed=exposed))
            self._during[phase, is_exposed] = known
        return known

    def within(self, timeout: Timeout) -> "RankGroup":
        """Return a copy with another timeout."""
        return replace(self, phase=replace(self.phase, timeout=timeout))

    def uncounted(self) -> "RankGroup":
        """Return a copy with traffic that nobody reads."""
        return replace(self, phase=Phase(timeout=self.phase.timeout))

    @property
    def numbers(self) -> tuple[int, ...]:
        """Each rank's number in messages: in its mesh if any, else in the group."""
        return tuple(map(self.works.whole.index, self.works.ranks))

    def check_serves(self, data: object) -> None:
        """Raise ValueError for tensors whose device has no backend; a group of one takes all."""
        wrong = unserved(self.backends, devices_of(data)) if self.size > 1 else None
        if wrong is not None:
            raise ValueError(wrong)

    def transport(self, device: torch.device) -> Transport:
        """Return the transport for a device; its name is "" without a backend."""
        return transport_of(self.backends.get(device.type, ""), device)

    @property
    def data_backend(self) -> str:
        """The backends for the same data, as `init_process_group` takes them."""
        known = backend_for(self.backends, self.data_devices) if self.backends else ""
        return known or str(dist.get_backend(self.process_group))

    def doing(self, name: str) -> ActivityScope:
        """Return a context that records a call, such as ``step()``."""
        return ActivityScope(self.works.log.activity, name)

    def shared_memory(self, device: torch.device) -> OneHost | SeveralHosts | None:
        """Return what sends tensors of a device through memory, if the ranks have met and share it."""
        works = self.works
        return works.memory if device.type == "cpu" and works.log.shares_memory else None

    def levels(self, device: torch.device) -> "Levels | None":
        """Return the groups inside hosts and across, where a device's tensors go through these."""
        levels = self.works.levels
        return None if levels is None or self.transport(device).shares_host_memory else levels

    def begin_work(
        self, about: str = "", device: torch.device | None = None, *, runs_hook: bool = False
    ) -> Work:
        """Begin a work of the current phase; StalledError if given up.

        ``device``: whose backend runs it; None if that is not known, or it goes through memory.
        """
        if self.is_released:
            raise RuntimeError(RELEASED)
        if self.works.verdict is not None:
            raise self.works.verdict.error()
        if device is None:
            return Work(self.works, self.phase, about, runs_hook=runs_hook)
        transport = self.transport(device)
        return Work(self.works, self.phase, about, late_on=transport.late_on, polls=transport.waits_on_host)

    def broadcast_rows(
        self, rows: Iterable[_Row], about: str = "", heads: _Slice | None = None, tag: int = 0
    ) -> list[Waitable]:
        """Start broadcasts of (owner, 1-D tensor) pairs on a device; all ranks call: Note [Rows at once].

        ``heads``: for a short row of bytes of each rank, and this rank's: in place where memory is shared.
        There only heads come of ranks with another ``tag``.
        """
        listed = list(rows)
        if self.size == 1 or not (listed or heads is not None):
            return []
        device = listed[0][1].device if heads is None else heads[0].device
        memory = self.shared_memory(device)
        if memory is not None:
            before = [] if heads is None else list(enumerate(heads[0].unbind()))
            with self.begin_work(about) as work:
                work.take(handle := memory.spread_rows([*before, *listed], tag))
            self.phase.sent(handle.nbytes, len(listed) + (heads is not None))
            return [work]
        return self.gather_slices([] if heads is None else [heads], about, listed)

    def gather_slices(self, slices: _Slices, about: str = "", rows: Sequence[_Row] = ()) -> list[Waitable]:
        """Start all-gathers of (bytes of all, own slice or a copy of it), and broadcasts; all ranks call."""
        device = (rows[0][1] if rows else slices[0][0]).device
        with self.begin_work(about, device) as work:
            work.take(*(handles := self.start(device, slices, rows)))
        is_tree, size, rank = self.transport(device).is_tree, self.size, self.rank
        counts = (broadcast_nbytes(r.nbytes, (rank - o) % size, size, is_tree=is_tree) for o, r in rows)
        self.phase.sent(sum(counts) + sum(flat.nbytes - mine.nbytes for flat, mine in slices), len(handles))
        return [work]

    def start(self, device: torch.device, slices: _Slices, rows: Iterable[_Row]) -> list[dist.Work]:
        """Start all-gathers and broadcasts of bytes, as one where the backend can; for a `Work` of theirs.

        As bytes, because no backend knows every dtype (gloo lacks float8, NCCL lacks int16).
        """
        late: dict[str, Any] = {"group": self.process_group, "async_op": True}
        gather = getattr(dist, GATHER)
        starts: list[Callable[[], Any]] = [
            *(partial(gather, flat.view(-1), mine, **late) for flat, mine in slices),
            *(partial(dist.broadcast, row.view(torch.uint8), group_src=at, **late) for at, row in rows),
        ]
        if len(starts) < 2:
            return [start() for start in starts]
        return start_as_one(self.process_group, device, starts)

    def start_sum(self, tensor: Tensor, about: str = "") -> Pending[Tensor]:
        """Start a sum over all ranks, which is the value; in place if dense."""
        memory = self.shared_memory(tensor.device) if can_sum(tensor) else None
        handle: Any
        with self.begin_work(about, tensor.device if memory is None else None) as work:
            if memory is not None:
                handle = memory.sum_all(tensor)
            else:
                handle = dist.all_reduce(tensor, group=self.process_group, async_op=True)
            work.take(handle)
        nbytes = sum_nbytes(tensor, self.size) if memory is None else handle.nbytes
        self.phase.sent(nbytes, int(self.size > 1))

        def total(_: object) -> Tensor:
            # Waited for, not only asked for: so the memory is kept until the current stream has read it.
            return handle.get_future().wait()[0] if tensor.is_sparse else tensor

        return Pending([work], total, [tensor])

    def all_gather_json(self, value: object) -> list[Any]:
        """Gather JSON values, by rank. Two collectives."""
        return [json.loads(payload) for payload in self.all_gather_bytes(json.dumps(value).encode())]

    def all_gather_bytes(self, payload: bytes) -> list[bytes]:
        """Gather bytes of any length, by rank. Two collectives."""
        sizes = self.all_gather_fixed(len(payload).to_bytes(8, "little"))
        lengths = [int.from_bytes(size, "little") for size in sizes]
        padded = payload.ljust(max(lengths), b"\0")
        return [got[:length] for got, length in zip(self.all_gather_fixed(padded), lengths, strict=True)]

    def all_gather_fixed(self, payload: bytes) -> list[bytes]:
        """Gather bytes of equal length by rank, in one collective; RankMismatchError if short ones differ."""
        if self.size == 1 or not payload:
            return [payload] * self.size
        is_framed = len(payload) <= SHORT
        octets = bytes_to_tensor(framed(payload) if is_framed else payload)
        gathered = self.read(HostCopy(self.all_gather_rows(to_device(octets, self.device))))
        everyone = [tensor_to_bytes(row) for row in gathered]
        payloads = unframed(everyone) if is_framed else everyone
        if payloads is None:
            reports = self.all_gather_json(self.works.log.activity.report())
            raise RankMismatchError(met_otherwise(dict(zip(self.numbers, reports, strict=True))))
        return payloads

    def read(self, copy: HostCopy) -> Tensor:
        """Wait on the CPU for a collective's result; StalledError if the ranks gave up."""
        if copy.is_here:
            return copy.read()
        with self.phase, self.begin_work():
            value = copy.read()
        self.works.check()
        return value

    def all_gather_rows(self, mine: Tensor) -> Tensor:
        """Gather 1-D uint8 tensors of equal length, on `device`, as (ranks, length); a stream may wait."""
        if self.size == 1 or not mine.numel():
            return mine.expand(self.size, -1)
        try:
            return self.start_all_gather(mine).wait()
        except StalledError:
            raise
        except RuntimeError as error:  # of the backend, whose text does not tell who waited for whom
            limit = timeout_of(self.process_group)
            within = "the timeout" if limit is None else f"{limit.total_seconds():g} s"
            why = f"a rank has ended, or did not come within {within} ({error})"
            raise RemoteRankError(f"the ranks could not agree: {why}") from error

    def start_all_gather(self, mine: Tensor, about: str = "") -> Pending[Tensor]:
        """Start `all_gather_rows` in a group of several."""
        gathered = mine.new_empty(self.size, mine.numel())
        if isinstance(self.shared_memory(mine.device), OneHost):
            gathered[self.rank].copy_(mine)
            works = self.broadcast_rows([], about, (gathered, gathered[self.rank]))
        else:
            works = self.gather_slices([(gathered, mine)], about)
        return Pending(works, lambda _: gathered, [gathered])


def _default_group(data: list[Tensor], timeout: Timeout) -> RankGroup:
    return RankGroup.of(None, data).within(timeout)
