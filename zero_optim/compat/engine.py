"""PyTorch's private functions as the library uses them; their names are in `zero_optim.compat.private`.

Note [No split communicators]
    If the default group was made with ``device_id=``, PyTorch makes every later NCCL communicator by
    splitting that of the default group (``ncclCommSplit``), in which all ranks of the default group have to
    take part. Here those that are no members do not know of the group, so the members would wait for ever.
    Nor may a split run while the default group is used on another thread, which is when a lane is first used.
    So no device is handed in, and the source to split from is taken out of the options before there is a
    communicator. The members then make one by way of the store, as they do without ``device_id=``.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.graph import Node
from torch.distributed import distributed_c10d as c10d

from zero_optim.compat import private

F = TypeVar("F", bound=Callable[..., Any])


def wraps_tensors(tensor: Tensor) -> bool:
    """Whether a tensor is made of other tensors: its class then defines ``__tensor_flatten__``."""
    return bool(private.is_traceable_wrapper_subclass(tensor))


def backward_number() -> int:
    """Return the number of the backward pass that this thread is in: in a hook, or in a callback at its end.

    -1 outside of any pass. If a pass runs another one (reentrant checkpointing), that has its own number.
    """
    return int(private.current_graph_task_id())


def in_backward() -> bool:
    """Whether this thread is in a backward pass: in a hook, or in a callback at its end."""
    return backward_number() != -1


def in_outer_backward() -> bool:
    """Whether another backward pass runs this one; call it in a callback at the end of a pass."""
    return private.current_autograd_node() is not None


def after_backward(callback: Callable[[], None]) -> None:
    """Call something when the current backward pass has computed every gradient.

    Call this from a hook of that pass, or from such a callback; a new callback runs after those queued
    before. For a pass on the CPU it runs on the thread that called ``backward()``. On an accelerator a thread
    of the engine may run it, with the caller's streams current, which wait for the gradients. What it raises,
    ``backward()`` raises.
    """
    private.execution_engine.queue_callback(callback)


def will_run(node: Node) -> bool:
    """Whether the current backward pass accumulates into the leaf of a node; call it in a hook of it."""
    try:
        return bool(private.will_engine_execute_node(node))
    except RuntimeError:  # torch.autograd.grad was asked for this leaf, and accumulates nothing
        return False


# PyTorch can be built without RPC. Asking for the agent takes 50 ns; asking for the context takes some µs.
_has_rpc_agent: Any = private.or_none("is_current_rpc_agent_set") or (lambda: False)


def in_distributed_autograd() -> bool:
    """Whether this thread is in a context of ``torch.distributed.autograd``, which keeps gradients itself."""
    if not _has_rpc_agent():
        return False
    try:
        private.current_context()
    except RuntimeError:
        return False
    return True


def runs_distributed_backward() -> bool:
    """Whether this process is in a backward pass of ``torch.distributed.autograd``, on whatever thread."""
    if not _has_rpc_agent():
        return False
    debug_info: Any = private.or_none("get_debug_info") or dict
    return int(debug_info().get("num_current_backward_passes", 0)) > 0


# `torch.compiler.disable` does the same, but imports the compiler at once, which takes longer than importing
# the rest of PyTorch, and which a program that only launches ranks or looks into a checkpoint never needs.
_disable: Any = private.or_none("disable_dynamo") or torch.compiler.disable


def eager(function: F) -> F:
    """Keep a function that counts, waits or communicates out of ``torch.compile``, and what it calls.

    The function cannot be a bound method. The first call of any such function imports the compiler.
    """
    disabled: F = _disable(function)
    return disabled


def eager_itself(function: F) -> F:
    """Keep a function out of ``torch.compile``, but not what it calls; otherwise as `eager`."""
    disabled: F = _disable(function, recursive=False)
    return disabled


_skip_code: Any = private.or_none("skip_code") or (lambda _: None)


def untraced(function: F) -> F:
    """Keep one short function, not what it calls, out of ``torch.compile``, without the 1 µs of `eager`."""
    marked: Any = function
    marked._torchdynamo_disable = True  # where another function, which is compiled, calls it
    _skip_code(marked.__code__)  # where one that is not compiled calls it
    return function


_top_hooks: Any = private.or_none("top_saved_tensors_default_hooks") or (lambda _: None)


def has_saved_tensors_hooks() -> bool:
    """Whether hooks on what autograd saves are active on this thread, or are not allowed now; takes 1 µs."""
    return not private.saved_tensors_hooks_is_enabled() or _top_hooks(True) is not None


def timeout_of(group: dist.ProcessGroup) -> timedelta | None:
    """Return how long a collective of a group may take; None if it cannot be known."""
    for backend in _backends(group):
        timeout = getattr(getattr(backend, "options", None), "_timeout", None)
        if isinstance(timeout, timedelta):
            return timeout
    return None


def is_profiling() -> bool:
    """Whether a profiler is at work, on this thread or all; takes less than 0.1 µs."""
    return getattr(torch.autograd.profiler, "_is_profiler_enabled", False)


def default_store() -> Any:  # noqa: ANN401 - a torch.distributed.Store
    """Return the store of the default group; ValueError if there is no default group."""
    return private.get_default_store()


def address_of_store(store: Any) -> tuple[str | None, int]:  # noqa: ANN401 - a torch.distributed.Store
    """Return host and port of what serves a store; None and 0 if nothing does, as with a file."""
    while hasattr(store, "underlying_store"):
        store = store.underlying_store
    return getattr(store, "host", None), int(getattr(store, "port", 0) or 0)


def make_group(ranks: Sequence[int], backend: str, name: str, timeout: timedelta | None) -> dist.ProcessGroup:
    """Make a process group with a given name. Its members call, and no other rank; communicates.

    `torch.distributed.new_group` takes no name. If only members call it, it derives the name from the number
    of groups in the process, which may differ between ranks. See Note [No split communicators].

    Args:
        ranks: global ranks of the members, by group rank; this process is one of them.
        backend: such as ``"gloo"``.
        name: the same on every member, never used before.
        timeout: of its collectives, and of waiting for the members; None for PyTorch's default. gloo waits
            for them here and raises RuntimeError if one does not come, NCCL with the first collective.
    """
    world: Any = private.world
    _, store = world.pg_map[dist.group.WORLD]
    group, *_ = private.new_process_group_helper(
        group_size=len(ranks),
        group_rank=ranks.index(dist.get_rank()),
        global_ranks_in_group=list(ranks),
        backend=dist.Backend(backend),
        store=store,
        group_name=name,
        timeout=c10d.default_pg_timeout if timeout is None else timeout,
        group_desc="zero_optim",
    )
    if (group.size(), group.group_name) != (len(ranks), name):
        size = f"{group.size()} ranks, not {name} of {len(ranks)}"
        raise _changed(f"a group named {group.group_name} of {size}")
    for made in _backends(group):  # Note [No split communicators]
        options: Any = getattr(made, "options", None)
        if getattr(options, "split_from", None) is not None:
            options.split_from = None
            if made.options.split_from is not None:
                raise _changed("the options of a group in a copy")
    world.pg_group_ranks[group] = {rank: index for index, rank in enumerate(ranks)}
    result: dist.ProcessGroup = group
    return result


def _changed(what: str) -> RuntimeError:
    return RuntimeError(
        f"PyTorch {torch.__version__} gives {what}, so no process group can be made beside the one given: "
        f"use PyTorch {private.WORKS_WITH}, or a newer zero-optim"
    )


def aborts_of(group: dist.ProcessGroup) -> list[Callable[[], None]]:
    """List what ends all that a group has under way, by backend. gloo has no such call.

    What waits for it, a stream or the CPU, then goes on, with wrong values; the group cannot be used again.
    """
    gloo: Any = getattr(dist, "ProcessGroupGloo", ())  # PyTorch may be built without it
    return [backend.abort for backend in _backends(group) if not isinstance(backend, gloo)]


def _backends(group: dist.ProcessGroup) -> list[Any]:
    """List a group's backends, without the wrappers of ``TORCH_DISTRIBUTED_DEBUG=DETAIL``."""
    backends = [private.get_backend(group, device) for device in private.device_types(group)]
    return [getattr(backend, "wrapped_pg", backend) for backend in backends]


def coalesces(group: dist.ProcessGroup, device: torch.device) -> bool:
    """Whether the backend for a device can take several collectives as one."""
    # A subclass of ProcessGroup does everything itself; PyTorch's `batch_isend_irecv` asks in the same way.
    return type(group) is dist.ProcessGroup and bool(private.get_backend(group, device).supports_coalescing)


@contextmanager
def coalesced(group: dist.ProcessGroup, device: torch.device) -> Iterator[list[dist.Work]]:
    """Start the asynchronous collectives of the body as one; only where `coalesces`.

    Yields:
        A list, which gets the handle for all of them when the body ends. The handles that the collectives
        return are of no use.
    """
    works: list[dist.Work] = []
    private.start_coalescing(group, device)
    try:
        yield works
    finally:  # else everything started later on the group would wait for the end
        work = private.end_coalescing(group, device)
    if work is not None:
        works.append(work)


def copy_each(targets: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
    """Copy many tensors in one call."""
    private.foreach_copy_(targets, sources)


def scale_each(tensors: Sequence[Tensor], factor: float) -> None:
    """Multiply many tensors in place in one call."""
    private.foreach_mul_(tensors, factor)
