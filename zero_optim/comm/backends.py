"""What a process group can send: which backend serves tensors of which device. Does not communicate.

Note [Devices of a group]
    A process group has a backend for each type of device whose tensors it can send. Its name does not tell
    which: "undefined" after a plain ``init_process_group()`` is NCCL alone on a GPU host, gloo alone on
    others. What tells is the group's configuration, such as ``cpu:gloo,cuda:nccl``, and which types are
    really registered.

    The library's own small tensors lie on the CPU where the group has a backend for it: then no CPU waits for
    a GPU. Otherwise they lie where the parameters lie. The current device would be another one in scripts
    that never set it (``model.to(rank)``): all ranks would use GPU 0, which NCCL refuses. How to send is
    decided by the backend that serves the tensor, not by the device: gloo takes CUDA tensors too (Note [gloo
    and CUDA] in `comm.sending`).
"""

import re
from collections.abc import Iterable, Iterator, KeysView, Mapping, Sequence, ValuesView
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn

from zero_optim.compat import private
from zero_optim.compat.streams import current_device

T = TypeVar("T")

_PLACELESS = "meta"  # tensors on it have no memory, so nothing of theirs is sent
# Such as "[…/gloo/transport/tcp/pair.cc:534]"; or what a wait raises after another one took too long.
_OF_GLOO = re.compile(r"\[[^\]]*\bgloo/[^\]]*:\d+\]|Application timeout caused pair closure")


def devices_of(given: object) -> tuple[torch.device, ...]:
    """List the devices of tensors, devices, modules, parameter groups, and nested collections, in order.

    Everything else, and what can be read only once (a generator), is left alone.
    """
    return tuple(dict.fromkeys(device for device in _found(given) if device.type != _PLACELESS))


def held(given: T) -> T:
    """Make parameters that can be read only once into some that can be read again.

    Raises nothing: what an iterator raises, the result raises when it is read.
    """
    if not isinstance(given, Iterable):
        named = given.__name__ if isinstance(given, type) else type(given).__name__
        broken: Any = _Broken(
            TypeError(f"expected params first, such as model.parameters(), or groups of them; got {named}")
        )
        return cast("T", broken)
    if not isinstance(given, Iterator | list | tuple):
        return given
    read: list[Any] = []
    kept: Any = read
    try:
        read.extend(given)
    except Exception as error:  # noqa: BLE001 - raised where it is read, which all ranks do together
        kept = _Broken(error)
    for place, each in enumerate(read):
        if isinstance(each, dict) and isinstance(each.get("params"), Iterator):
            read[place] = {**each, "params": held(each["params"])}
    result: T = kept
    return result


class _Broken(Iterator[Any]):
    """An iterator that raises what another one raised."""

    def __init__(self, error: Exception) -> None:
        self._error = error

    def __next__(self) -> Any:  # noqa: ANN401 - never returns
        raise self._error


def _found(given: object) -> Iterator[torch.device]:
    if isinstance(given, torch.device):
        yield given
    elif isinstance(given, Tensor):
        yield given.device
    elif isinstance(given, nn.Module):
        yield from (param.device for param in given.parameters())
    elif isinstance(given, Mapping):
        yield from _found(given.get("params"))
    elif isinstance(given, list | tuple | set | frozenset | KeysView | ValuesView):
        for part in given:
            yield from _found(part)


def backends_of(group: dist.ProcessGroup) -> dict[str, str]:
    """Return the backend for each type of device that a group can send, such as ``{"cpu": "gloo"}``."""
    configured = parse_config(dist.get_backend_config(group))
    registered = [device.type for device in private.device_types(group)]
    if not registered:  # a subclass of ProcessGroup does everything itself
        return configured
    name = str(dist.get_backend(group))
    # In the order of the configuration, as that of the types differs between processes.
    types = [*(kind for kind in configured if kind in registered), *sorted({*registered} - {*configured})]
    return {kind: configured.get(kind, name) for kind in types}


def parse_config(config: str) -> dict[str, str]:
    """Read a configuration such as ``cpu:gloo,cuda:nccl``; what names no device is left out."""
    pairs = (part.partition(":") for part in config.lower().split(","))
    return {kind: name for kind, colon, name in pairs if colon}


def device_for_small_tensors(
    backends: Mapping[str, str], data: Sequence[torch.device], bound: torch.device | None = None
) -> torch.device:
    """Choose where the library's own small tensors lie, see Note [Devices of a group].

    ``data``: devices of the parameters, if known; ``bound``: the device that the group was made for.
    """
    if "cpu" in backends or not backends:
        return torch.device("cpu")
    served = (device for device in (*data, bound) if device is not None and device.type in backends)
    found = next(served, None)
    return current_device(next(iter(backends))) if found is None else found


def backend_for(backends: Mapping[str, str], data: Sequence[torch.device]) -> str:
    """Name a backend that serves some devices, none for all, as `init_process_group` takes it."""
    types = {device.type for device in data} & backends.keys() or backends.keys()
    needed = {kind: name for kind, name in backends.items() if kind in types}
    if len(set(needed.values())) == 1:
        return next(iter(needed.values()))
    return ",".join(f"{kind}:{name}" for kind, name in needed.items())


def unserved(backends: Mapping[str, str], data: Sequence[torch.device]) -> str | None:
    """Say what is wrong if a group has no backend for one of some devices; None if it has."""
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
    """Whether a backend raised something, or a future of it.

    gloo raises plain `RuntimeError`, whose text survives callbacks of futures; others classes of `dist`.
    """
    return isinstance(error, dist.DistError) or _OF_GLOO.search(str(error)) is not None
