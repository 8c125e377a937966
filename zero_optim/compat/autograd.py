"""PyTorch's private functions as the library uses them; names in `zero_optim.compat.private`.

Note [No split communicators]
    If the default group was made with ``device_id=``, PyTorch splits later NCCL communicators off its own, in
    which all ranks must take part, and no thread may use the default group. So we pass no device, and clear
    the source of the split before a communicator exists. Members then make one through the store.

    The NCCL of PyTorch 2.15 binds every group to a device and splits at once, unless asked to wait for the
    first collective (``lazy_init``). We ask so, and pass the default group's device: else it guesses one.
"""

import math
import sys
import warnings
from abc import ABCMeta
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from functools import cache, partial
from types import FunctionType
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.graph import Node
from torch.distributed import distributed_c10d as c10d

from zero_optim.compat import private

F = TypeVar("F", bound=Callable[..., Any])


def wraps_tensors(tensor: Tensor) -> bool:
    """Return whether a tensor is made of others: its class defines ``__tensor_flatten__``."""
    return bool(private.is_traceable_wrapper_subclass(tensor))


NO_BACKWARD = -1


def backward_number() -> int:
    """Return the number of this thread's backward pass, in a hook or final callback; or `NO_BACKWARD`."""
    return int(private.current_graph_task_id())


def in_backward() -> bool:
    """Return whether this thread is in a backward pass: in a hook or a final callback."""
    return bool(private.current_graph_task_id() != NO_BACKWARD)


def in_outer_backward() -> bool:
    """Return, in a final callback, whether another backward pass runs this one."""
    return private.current_autograd_node() is not None


def after_backward(callback: Callable[[], object]) -> None:
    """Call ``callback``, after earlier ones, when the current backward pass has computed every gradient.

    On an accelerator maybe on an engine's thread, with the caller's streams, which wait for the gradients.
    ``backward()`` raises its errors.
    """
    private.execution_engine.queue_callback(callback)


def will_run(node: Node) -> bool:
    """Return, in a hook, whether the current backward pass accumulates into a node's leaf."""
    try:
        return bool(private.will_engine_execute_node(node))
    except RuntimeError:  # torch.autograd.grad was asked for this leaf, and accumulates nothing
        return False


# PyTorch can be built without RPC. Asking for the agent takes 50 ns; asking for the context takes some µs.
_has_rpc_agent: Any = private.or_none("is_current_rpc_agent_set") or (lambda: False)


def in_distributed_autograd() -> bool:
    """Return whether this thread is in a ``torch.distributed.autograd`` context, with its own gradients."""
    if not _has_rpc_agent():
        return False
    try:
        private.current_context()
    except RuntimeError:
        return False
    return True


def eager(function: F) -> F:
    """Exclude a function and its callees from ``torch.compile``; not for bound methods."""
    # `torch.compiler.disable` does the same, but imports the compiler, which takes longer than all the rest.
    disable: Any = private.or_none("disable_dynamo") or torch.compiler.disable
    return cast("F", disable(function))


def untraced(function: F) -> F:
    """Exclude a short function, not its callees, from ``torch.compile``, without the 1 µs of `eager`."""
    marked: Any = function
    marked._torchdynamo_disable = True
    return function


_top_hooks: Any = private.or_none("top_saved_tensors_default_hooks") or (lambda _: None)


def has_saved_tensors_hooks() -> bool:
    """Return whether this thread has saved-tensor hooks, or they are forbidden; takes 1 µs."""
    return not private.saved_tensors_hooks_is_enabled() or _top_hooks(True) is not None


def timeout_of(group: dist.ProcessGroup) -> timedelta | None:
    """Return the timeout of a group's collectives; None if unknown."""
    for backend in backends_behind(group):
        timeout = getattr(getattr(backend, "options", None), "_timeout", None)
        if isinstance(timeout, timedelta):
            return timeout
    return None


# Whether a profiler is active on this thread or all; takes less than 0.1 µs.
is_profiling: Callable[[], bool] = partial(getattr, torch.autograd.profiler, "_is_profiler_enabled", False)


def address_of_store() -> tuple[str | None, int]:
    """Return host and port of the default group's store; None and 0 without one, as for a file."""
    store = private.get_default_store()
    while hasattr(store, "underlying_store"):
        store = store.underlying_store
    return getattr(store, "host", None), int(getattr(store, "port", 0) or 0)


def make_group(
    ranks: Sequence[int], backend: str, name: str, timeout: timedelta | None, patience: float = math.inf
) -> dist.ProcessGroup:
    """Make a process group of global ``ranks`` with a new name; only its members call; communicates.

    `torch.distributed.new_group` counts groups for a name, and counts may differ between ranks. gloo waits
    for members here, at most ``patience`` seconds, and raises RuntimeError without them; NCCL waits at the
    first collective. See Note [No split communicators].
    """
    lasting = within = c10d.default_pg_timeout if timeout is None else timeout
    if torch.__version__ >= "2.13":  # gloo's of before keeps the first timeout
        within = timedelta(seconds=min(patience, lasting.total_seconds()))
    world: Any = private.world
    _, store = world.pg_map[dist.group.WORLD]
    apart, device = _apart(backend, within)
    group, *_ = private.new_process_group_helper(
        group_size=len(ranks),
        group_rank=ranks.index(dist.get_rank()),
        global_ranks_in_group=list(ranks),
        backend=dist.Backend(backend),
        store=store,
        group_name=name,
        backend_options=apart,
        timeout=within,
        device_id=device,
        group_desc="zero_optim",
    )
    if (group.size(), group.group_name) != (len(ranks), name):
        size = f"{group.size()} ranks, not {name} of {len(ranks)}"
        raise _changed(f"a group named {group.group_name} of {size}")
    for one in backends_behind(group):  # Note [No split communicators]
        options: Any = getattr(one, "options", None)
        if getattr(options, "split_from", None) is not None:
            options.split_from = None
            if one.options.split_from is not None:
                raise _changed("the options of a group in a copy")
        if within != lasting:
            private.set_default_timeout(one, lasting)
    world.pg_group_ranks[group] = {rank: index for index, rank in enumerate(ranks)}
    result: dist.ProcessGroup = group
    return result


def _apart(backend: str, timeout: timedelta) -> tuple[Any, torch.device | None]:
    """Return options and device of a group that is not split off; see Note [No split communicators]."""
    world: Any = dist.group.WORLD
    legacy: Any = getattr(dist, "ProcessGroupNCCL", None)
    if "nccl" not in backend or not hasattr(getattr(legacy, "Options", None), "lazy_init"):
        return None, None
    options = legacy.Options()
    options._timeout, options.lazy_init = timeout, True
    is_legacy = any(isinstance(each, legacy) for each in backends_behind(world))  # it connects what is bound
    return options, None if is_legacy else world.bound_device_id


def _changed(what: str) -> RuntimeError:
    return RuntimeError(
        f"PyTorch {torch.__version__} gives {what}, so no further process group can be created: "
        f"use PyTorch {private.WORKS_WITH}, or a newer zero-optim"
    )


def backends_behind(group: dist.ProcessGroup) -> list[Any]:
    """Return a group's backends without the wrappers of ``TORCH_DISTRIBUTED_DEBUG=DETAIL``."""
    backends = [private.get_backend(group, device) for device in private.device_types(group)]
    return [getattr(backend, "wrapped_pg", backend) for backend in backends]


def coalesces(group: dist.ProcessGroup, device: torch.device) -> bool:
    """Return whether a device's backend can start several collectives as one."""
    # A subclass of ProcessGroup does everything itself; PyTorch's `batch_isend_irecv` asks in the same way.
    return type(group) is dist.ProcessGroup and bool(private.get_backend(group, device).supports_coalescing)


def start_as_one(
    group: dist.ProcessGroup, device: torch.device, starts: Sequence[Callable[[], Any]]
) -> list[dist.Work]:
    """Start collectives as one where the backend can, else each; return their handles."""
    if not coalesces(group, device):
        return [start() for start in starts]
    private.start_coalescing(group, device)
    try:
        for start in starts:
            start()
    finally:  # else everything started later on the group would wait for the end
        work = private.end_coalescing(group, device)
    return [] if work is None else [work]


_passes: list[list[Callable[[], None]]] = []  # that a rank which has joined shadows


@contextmanager
def shadowed_pass() -> Iterator[None]:
    """Call what the body gives to `after_pass` at the end, as autograd does in a backward pass."""
    calls = list[Callable[[], None]]()
    _passes.append(calls)
    try:
        yield
    finally:
        _passes.pop()
        for call in calls:
            call()


def after_pass(call: Callable[[], None]) -> None:
    """Call at the end of a shadowed pass; at once outside of one."""
    if _passes:
        _passes[-1].append(call)
    else:
        call()


@cache  # once a process, and not on import: PyTorch's package brings its functional optimizers and sympy
def register_with_pytorch(kind: type) -> None:
    """Register a class as PyTorch's ``ZeroRedundancyOptimizer``, for ``isinstance`` in public code."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the import compiles functions with torch.jit, which is deprecated
        try:
            from torch.distributed.optim import ZeroRedundancyOptimizer
        except ImportError:  # built without distributed optimizers
            return
    for each in vars(sys.modules[ZeroRedundancyOptimizer.__module__]).values():
        if isinstance(each, FunctionType) and each.__defaults__:  # or they keep the default group for ever
            found = (None if isinstance(given, dist.ProcessGroup) else given for given in each.__defaults__)
            each.__defaults__ = tuple(found)
    if isinstance(ZeroRedundancyOptimizer, ABCMeta):
        ZeroRedundancyOptimizer.register(kind)
