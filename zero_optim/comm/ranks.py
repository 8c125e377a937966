"""The ranks of a process group as this process sees them, and what it notes of their works."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NoReturn, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from zero_optim.comm.activity import Doing
from zero_optim.comm.backends import (
    backend_for,
    backends_of,
    device_for_small_tensors,
    devices_of,
    unserved,
)
from zero_optim.comm.traffic import Phase, Traffic
from zero_optim.comm.works import GroupWorks, Record, log_of
from zero_optim.compat.engine import timeout_of

R = TypeVar("R", bound="Ranks")


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
class Ranks:
    """A process group as its members see it: group ranks 0 … size-1, this process among them.

    Does not communicate; `zero_optim.comm.collectives.RankGroup` does.

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

    def __deepcopy__(self: R, memo: object) -> R:
        """Return the same ranks, as a process group cannot be copied. A copy's traffic counts from zero."""
        return replace(self, phase=replace(self.phase, traffic=Traffic()))

    def __reduce__(self: R) -> tuple[Callable[..., R], tuple[type[R], list[Tensor], float | None]]:
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
        return _default_group, (type(self), placed, self.phase.timeout)

    def let_go(self: R) -> R:
        """Give the same without the process group: rank and size are known, what communicates raises."""
        nobody: Any = _LetGo()
        return replace(self, process_group=nobody)

    @property
    def is_let_go(self) -> bool:
        """Whether the process group was let go."""
        return isinstance(self.process_group, _LetGo)

    @property
    def numbers(self) -> tuple[int, ...]:
        """What messages call each rank: its number in the mesh that the group is part of, or in it."""
        return tuple(map(self.works.whole.index, self.works.ranks))

    @classmethod
    def of(cls: type[R], process_group: dist.ProcessGroup | None, data: object = None) -> R:
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

    def during(self: R, phase: str, *, is_exposed: bool | None = None) -> R:
        """Give the same ranks, with what is sent and waited for counted under the name of a phase.

        Args:
            phase: one of `zero_optim.comm.traffic.PHASES`.
            is_exposed: callers wait; None to leave it as it is.
        """
        is_exposed = self.phase.is_exposed if is_exposed is None else is_exposed
        return replace(self, phase=replace(self.phase, name=phase, is_exposed=is_exposed))

    def within(self: R, timeout: float | None) -> R:
        """Give the same ranks, whose waits are given up after some seconds; None for the group's timeout."""
        return replace(self, phase=replace(self.phase, timeout=timeout))

    def doing(self, name: str) -> Doing:
        """Give a context in which this process does something, which other ranks hear of if they miss it.

        Args:
            name: such as ``step()``.
        """
        return Doing(self.works.log.activity, name)

    def begin_work(self, about: str = "", *, by_all: bool = True) -> Record:
        """Begin a work of the current phase, see `GroupWorks.begin`.

        Raises:
            RuntimeError: the process group was let go.
        """
        if self.is_let_go:
            raise RuntimeError(LET_GO)
        return self.works.begin(self.phase, about, by_all=by_all)

    def uncounted(self: R) -> R:
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


def _default_group(kind: type[R], data: list[Tensor], timeout: float | None) -> R:
    return kind.of(None, data).within(timeout)
