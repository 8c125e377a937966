"""The backends of a process group, and what each can do. No communication.

Note [A new transport]
    `Transport` answers every question about a backend for one device type, as NCCL and unknown backends do. A
    new one is a subclass, with its name in `TRANSPORTS`. Texts of its errors belong beside those of others in
    this module. Names are also asked for in `comm.hosts` (a lane on gloo), `checkpoint.saving` (likewise),
    `compat.autograd` (whether NCCL is in a name), `estimate` (gloo on the CPU, else NCCL) and `run` (a GPU
    for each rank of NCCL). Collectives that start in another way get a branch in `collectives` or `sending`.

Note [Devices of a group]
    A group's name does not tell its backends: "undefined" after a plain ``init_process_group()`` is NCCL on a
    GPU host, gloo elsewhere. Its configuration (``cpu:gloo,cuda:nccl``) and the registered types do.

    The library's small tensors are on the CPU if it has a backend, so no CPU waits for a GPU; else with the
    parameters. The current device would be GPU 0 on all ranks of scripts with ``model.to(rank)``.
"""

import re
from collections.abc import Callable, Iterable, Iterator, KeysView, Mapping, Sequence, ValuesView
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, ClassVar, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn

from zero_optim.compat import private
from zero_optim.compat.autograd import backends_behind
from zero_optim.compat.streams import current_device, is_asynchronous

T = TypeVar("T")

ON_HOST = "gloo"  # the backend that every PyTorch has, for CPU tensors
# In what a backend raises where a rank does not come, and where it is gone.
_LATE = "imed out"
_CLOSED = (
    "onnection",
    "closed",
    "closure",
    "reset",
    "roken pipe",
    "o route to host",
    "nreachable",
    "gloo/trans",
)
# Such as "[…/gloo/transport/tcp/pair.cc:534]"; or what a wait raises after another one took too long.
_OF_GLOO = re.compile(r"\[[^\]]*\bgloo/[^\]]*:\d+\]|Application timeout caused pair closure")


@dataclass(frozen=True, slots=True)
class Transport:
    """A backend and a device whose tensors it sends; see Note [A new transport].

    ``runs_on_host``: collectives run on threads of the CPU, never on a stream. ``most_lanes``: groups side by
    side that one user gains by. ``is_tree``: broadcasts go along a tree, else a chain. ``cuts_by_timeout``: a
    receive that times out breaks the group's connections. ``shares_host_memory``: between ranks of one host
    its CPU tensors may go through memory, with its bits. ``row_nbytes``: of a message, from which on time
    grows with its bytes.
    """

    name: str
    device: torch.device

    runs_on_host: ClassVar[bool] = False
    most_lanes: ClassVar[int] = 1  # groups of NCCL gain nothing side by side, and may deadlock
    is_tree: ClassVar[bool] = False
    cuts_by_timeout: ClassVar[bool] = False
    shares_host_memory: ClassVar[bool] = False
    row_nbytes: ClassVar[int] = 2**20

    @property
    def late_on(self) -> torch.device | None:
        """The device, if it runs collectives while the CPU goes on."""
        return self.device if is_asynchronous(self.device) and not self.runs_on_host else None

    @property
    def lets_threads(self) -> bool:
        """Whether another thread may use lanes beside this group."""
        # What two threads start on MPS, which has no streams either, gets mixed up.
        return self.runs_on_host and self.device.type == "cpu" and not is_asynchronous(self.device)

    def sends_slices(self, num_owners: int) -> bool:
        """Whether a bucket with so many owners is gathered as equal slices, else by their broadcasts."""
        # Up to 4 are one launch; more grow with the ranks. gloo's all-gather takes twice their time, or more.
        return num_owners > 4 and not self.runs_on_host

    @property
    def sends_pairs(self) -> bool:
        """Whether ranks exchange tensors by sends in pairs, else by one all-to-all."""
        return self.runs_on_host and self.device.type == "cpu"

    @property
    def waits_on_host(self) -> bool:
        """Whether paired sends run side by side, and waits for them poll."""
        return self.runs_on_host and not is_asynchronous(self.device)


class _Gloo(Transport):
    __slots__ = ()
    runs_on_host = is_tree = cuts_by_timeout = shares_host_memory = True
    most_lanes = 8
    row_nbytes = 2**18


TRANSPORTS: dict[str, type[Transport]] = {"gloo": _Gloo}


@lru_cache  # a step asks several times
def transport_of(name: str, device: torch.device) -> Transport:
    """Return the transport of a backend, "" for none, for a device."""
    return TRANSPORTS.get(name, Transport)(name, device)


def devices_of(value: object) -> tuple[torch.device, ...]:
    """Return the devices of tensors, modules, parameter groups and collections of them, no generators."""
    # Tensors on the meta device have no memory, so nothing of theirs is sent.
    return tuple(dict.fromkeys(device for device in _devices_in(value) if device.type != "meta"))


def as_lists(value: T) -> T:
    """Replace iterators by lists. Reading the result raises the iterator's error."""
    if not isinstance(value, Iterable):
        named = value.__name__ if isinstance(value, type) else type(value).__name__
        wrong = f"expected params first, such as model.parameters(), or groups of them; got {named}"
        return cast("T", _Broken(TypeError(wrong)))
    if not isinstance(value, Iterator | list | tuple):
        return value
    try:
        read: list[Any] = list(value)
    except Exception as error:  # noqa: BLE001 - raised where it is read, which all ranks do together
        return cast("T", _Broken(error))
    for place, each in enumerate(read):
        if isinstance(each, dict) and isinstance(each.get("params"), Iterator):
            read[place] = {**each, "params": as_lists(each["params"])}
    return cast("T", read)


class _Broken(Iterator[Any]):
    """An iterator that raises what another one raised, whenever it is read."""

    def __init__(self, error: Exception) -> None:
        self._error = error

    def __next__(self) -> Any:  # noqa: ANN401 - never returns
        raise self._error


def _devices_in(value: object) -> Iterator[torch.device]:
    if isinstance(value, torch.device):
        yield value
    elif isinstance(value, Tensor):
        yield value.device
    elif isinstance(value, nn.Module):
        yield from (param.device for param in value.parameters())
    elif isinstance(value, Mapping):
        yield from _devices_in(value.get("params"))
    elif isinstance(value, list | tuple | set | frozenset | KeysView | ValuesView):
        for part in value:
            yield from _devices_in(part)


def backends_of(group: dist.ProcessGroup) -> dict[str, str]:
    """Return the backend for each device type of a group, such as ``{"cpu": "gloo"}``."""
    configured = parse_config(dist.get_backend_config(group))
    registered = [device.type for device in private.device_types(group)]
    if not registered:  # a subclass of ProcessGroup does everything itself
        return configured
    name = str(dist.get_backend(group))
    # In the order of the configuration, as that of the types differs between processes.
    types = [*(kind for kind in configured if kind in registered), *sorted({*registered} - {*configured})]
    return {kind: configured.get(kind, name) for kind in types}


def parse_config(config: str) -> dict[str, str]:
    """Parse a configuration such as ``cpu:gloo,cuda:nccl``; skip parts without a device."""
    pairs = (part.partition(":") for part in config.lower().split(","))
    return {kind: name for kind, colon, name in pairs if colon}


def device_for_small_tensors(
    backends: Mapping[str, str], data: Sequence[torch.device], bound: torch.device | None = None
) -> torch.device:
    """Choose the device of small tensors; ``bound``: the group's ``device_id``. Note [Devices of a group]."""
    if "cpu" in backends or not backends:
        return torch.device("cpu")
    served = (device for device in (*data, bound) if device is not None and device.type in backends)
    device = next(served, None)
    return current_device(next(iter(backends))) if device is None else device


def backend_for(backends: Mapping[str, str], data: Sequence[torch.device]) -> str:
    """Name backends for some devices (none: all), as `init_process_group` takes them."""
    types = {device.type for device in data} & backends.keys() or backends.keys()
    needed = {kind: name for kind, name in backends.items() if kind in types}
    if len(set(needed.values())) == 1:
        return next(iter(needed.values()))
    return ",".join(f"{kind}:{name}" for kind, name in needed.items())


def unserved(backends: Mapping[str, str], data: Sequence[torch.device]) -> str | None:
    """Return the error text if a group lacks a backend for a device, or None."""
    missing = [device for device in data if device.type not in backends]
    if not missing or not backends:
        return None
    has = ",".join(f"{kind}:{name}" for kind, name in backends.items())
    kind = missing[0].type
    default = dist.Backend.default_device_backend_map.get(kind, "BACKEND")
    return (
        f"expected parameters on a device that the process group can send, got some on {missing[0]}, and the "
        f"group has no backend for {kind} tensors (it has {has}). Move the model to "
        f"{' or '.join(backends)} before, or make the group with one, such as "
        f'init_process_group("{has},{kind}:{default}")'
    )


def raised_by_backend(error: BaseException) -> bool:
    """Return whether a backend, or a future of it, raised the error; gloo's is recognized by its text."""
    return isinstance(error, dist.DistError) or _OF_GLOO.search(str(error)) is not None


def late_or_closed(text: str) -> tuple[bool, bool]:
    """Return whether the text of a backend's error tells of a timeout, and whether of a closed connection."""
    return _LATE in text, any(word in text for word in _CLOSED)


def aborts_of(group: dist.ProcessGroup) -> list[Callable[[], None]]:
    """Return the calls that abort a group's work, by backend; gloo has none. Streams get wrong values."""
    gloo: Any = getattr(dist, "ProcessGroupGloo", ())  # PyTorch may be built without it
    return [backend.abort for backend in backends_behind(group) if not isinstance(backend, gloo)]
