"""Private names of PyTorch that the library needs: checked at import, and most of them used from here.

Note [Private names]
    Each package lists the private names that it uses: `NEEDED` here, and in ``zero_optim.ddp`` and
    ``zero_optim.hooks``. So a missing name shows at import, with what to do, and not in the middle of a run.
    PyTorch 2.8.0 and 2.13.0 have all of them. Names that the library can do without are read with a default,
    and are not listed. A name may stay and mean something else. So what is called with arguments is in
    `CALLED`, with their names, by which alone they are handed in; and what `make_group` gets is looked at.

Note [No split communicators]
    If the default group was made with ``device_id=``, PyTorch makes every later NCCL communicator by
    splitting that of the default group: at once if the new group is given a device too, else with its first
    collective. All ranks of the default group have to take part in a split (``ncclCommSplit``); in
    `new_group` those that are no members do so by a call of their own. Here they do not know of the
    group, so that the members would wait for ever. Nor may a split run while the default group is used on
    another thread, which is when a lane is first used. So no device is handed in, and the source to split
    from is taken out of the options before there is a communicator. The members then make one as they do
    without ``device_id=``: by way of the store, under the group's own name.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from inspect import signature
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, _compile
from torch.autograd import Variable
from torch.autograd.graph import Node
from torch.distributed import distributed_c10d as c10d
from torch.distributed.algorithms.join import Joinable
from torch.optim import optimizer as torch_optimizer_module
from torch.utils import _python_dispatch

F = TypeVar("F", bound=Callable[..., Any])

WORKS_WITH = "2.8 to 2.13"  # versions of PyTorch

NEEDED: tuple[tuple[object, str], ...] = (
    (Tensor, "_cdata"),
    (Tensor, "_indices"),
    (Tensor, "_make_wrapper_subclass"),
    (Tensor, "_values"),
    (Tensor, "_version"),
    (torch.amp.GradScaler, "_check_inf_per_device"),
    (torch.amp.GradScaler, "_found_inf_per_device"),
    (torch.amp.GradScaler, "_get_scale_async"),
    (torch.amp.GradScaler, "_per_optimizer_states"),
    (dist.ProcessGroup, "_device_types"),
    (dist.ProcessGroup, "_end_coalescing"),
    (dist.ProcessGroup, "_get_backend"),
    (dist.ProcessGroup, "_start_coalescing"),
    (Joinable, "_join_config"),
    (torch.nn.Module, "_forward_pre_hooks"),
    (torch.ops.aten.copy_.default, "_schema"),
    (torch.optim.Optimizer, "_optimizer_load_state_dict_post_hooks"),
    (torch.optim.Optimizer, "_optimizer_load_state_dict_pre_hooks"),
    (torch_optimizer_module, "_global_optimizer_post_hooks"),
    (torch_optimizer_module, "_global_optimizer_pre_hooks"),
    (_compile, "_disable_dynamo"),
    (_python_dispatch, "is_traceable_wrapper_subclass"),
    (torch, "_amp_foreach_non_finite_check_and_unscale_"),
    (torch, "_foreach_lerp_"),
    (torch, "_foreach_norm"),
    (torch._C, "DisableTorchFunctionSubclass"),
    (Variable, "_execution_engine"),
    (getattr(Variable, "_execution_engine", None), "queue_callback"),
    (torch._C, "_current_autograd_node"),
    (torch._C, "_disabled_torch_function_impl"),
    (torch._C, "_current_graph_task_id"),
    (torch._C, "_will_engine_execute_node"),
    (torch, "_foreach_copy_"),
    (torch.autograd.profiler, "_is_profiler_enabled"),
    (torch._C._autograd, "_saved_tensors_hooks_is_enabled"),
    (torch.UntypedStorage, "_cdata"),
    (torch, "_foreach_mul_"),
    (c10d, "_get_default_store"),
    (c10d, "_new_process_group_helper"),
    (c10d, "_world"),
    *((getattr(c10d, "_world", None), name) for name in ("pg_map", "pg_group_ranks")),
)
CALLED: tuple[tuple[object, str, tuple[str, ...]], ...] = (
    (
        c10d,
        "_new_process_group_helper",
        (
            *("group_size", "group_rank", "global_ranks_in_group", "backend", "store", "group_name"),
            *("timeout", "group_desc"),
        ),
    ),
    (_compile, "_disable_dynamo", ("fn", "recursive")),
)


def missing_names(needed: Sequence[tuple[object, str]]) -> list[str]:
    """List the attributes, of (owner, attribute) pairs, that this PyTorch does not have.

    Some attributes exist on instances only. So what a class declares, or its constructor names, counts too.
    """
    return [name for owner, name in needed if not (hasattr(owner, name) or name in _set_by(owner))]


def _set_by(owner: object) -> tuple[str, ...]:
    code = getattr(getattr(owner, "__init__", None), "__code__", None)
    declared = tuple(getattr(owner, "__annotations__", ()))
    return declared if code is None else (*declared, *code.co_names)


def missing_arguments(called: Sequence[tuple[object, str, tuple[str, ...]]]) -> list[str]:
    """List what functions, of (owner, attribute, names of arguments), do not take in this PyTorch."""
    taken = {name: signature(getattr(owner, name)).parameters for owner, name, _ in called}
    return [f"{name}({each}=)" for _, name, given in called for each in given if each not in taken[name]]


def require(
    needed: Sequence[tuple[object, str]],
    what: str,
    called: Sequence[tuple[object, str, tuple[str, ...]]] = (),
) -> None:
    """Check at import that this PyTorch has the private names that we use, and takes our arguments.

    Raises:
        ImportError: some are missing; the message names them, and the versions that have them.
    """
    missing = missing_names(needed) or missing_arguments(called)
    if missing:
        raise ImportError(
            f"{what} needs {', '.join(missing)}, which PyTorch {torch.__version__} does not have: "
            f"use PyTorch {WORKS_WITH}, or a newer zero-optim"
        )


require(NEEDED, "zero_optim", CALLED)


def wraps_tensors(tensor: Tensor) -> bool:
    """Whether a tensor is made of other tensors: its class then defines ``__tensor_flatten__``."""
    return bool(_python_dispatch.is_traceable_wrapper_subclass(tensor))


def backward_number() -> int:
    """Return the number of the backward pass that this thread is in: in a hook, or in a callback at its end.

    -1 outside of any pass. If a pass runs another one (reentrant checkpointing), that has its own number.
    """
    return int(torch._C._current_graph_task_id())


def in_backward() -> bool:
    """Whether this thread is in a backward pass: in a hook, or in a callback at its end."""
    return backward_number() != -1


def in_outer_backward() -> bool:
    """Whether another backward pass runs this one; call it in a callback at the end of a pass."""
    return torch._C._current_autograd_node() is not None


def after_backward(callback: Callable[[], None]) -> None:
    """Call something when the current backward pass has computed every gradient.

    Call this from a hook of that pass, or from such a callback; a new callback runs after those queued
    before. For a pass on the CPU it runs on the thread that called ``backward()``. On an accelerator a thread
    of the engine may run it, with the caller's streams current, which wait for the gradients. What the
    callback raises, ``backward()`` raises.
    """
    engine: Any = Variable._execution_engine
    engine.queue_callback(callback)


def will_run(node: Node) -> bool:
    """Whether the current backward pass accumulates into the leaf of a node; call it in a hook of it."""
    try:
        return bool(torch._C._will_engine_execute_node(node))
    except RuntimeError:  # torch.autograd.grad was asked for this leaf, and accumulates nothing
        return False


# PyTorch can be built without RPC. Asking for the agent takes 50 ns; asking for the context takes some µs.
_has_rpc_agent: Any = getattr(
    getattr(torch._C, "_distributed_rpc", None), "_is_current_rpc_agent_set", lambda: False
)


def in_distributed_autograd() -> bool:
    """Whether this thread is in a context of ``torch.distributed.autograd``, which keeps gradients itself."""
    if not _has_rpc_agent():
        return False
    try:
        torch._C._distributed_autograd._current_context()
    except RuntimeError:
        return False
    return True


def runs_distributed_backward() -> bool:
    """Whether this process is in a backward pass of ``torch.distributed.autograd``, on whatever thread."""
    if not _has_rpc_agent():
        return False
    debug_info: Any = getattr(torch._C._distributed_autograd, "_get_debug_info", dict)
    return int(debug_info().get("num_current_backward_passes", 0)) > 0


def eager(function: F) -> F:
    """Keep a function that counts, waits or communicates out of ``torch.compile``, and what it calls.

    The function cannot be a bound method. `torch.compiler.disable` does the same, but it imports the
    compiler at once, which takes longer than importing the rest of PyTorch. A program that only launches
    ranks, or looks into a checkpoint, never needs it. Here the first call of any such function imports it, on
    whatever thread that is: the autograd engine's, where a hook makes the call.
    """
    disable: Any = _compile._disable_dynamo
    kept: F = disable(function)
    return kept


def eager_itself(function: F) -> F:
    """Keep a function out of ``torch.compile``, but not what it calls; otherwise as `eager`."""
    disable: Any = _compile._disable_dynamo
    kept: F = disable(function, recursive=False)
    return kept


_skip_code: Any = getattr(
    getattr(getattr(torch._C, "_dynamo", None), "eval_frame", None), "skip_code", lambda _: None
)


def untraced(function: F) -> F:
    """Keep one short function out of ``torch.compile``, at no cost when it is called; not what it calls.

    `eager` puts a wrapper around a function, which takes 1 µs at each call. This only marks the function, and
    does not import the compiler.
    """
    marked: Any = function
    marked._torchdynamo_disable = True  # where another function, which is compiled, calls it
    _skip_code(marked.__code__)  # where one that is not compiled calls it
    return function


_Gloo: Any = getattr(dist, "ProcessGroupGloo", ())  # PyTorch may be built without it
_autograd: Any = torch._C._autograd
_top_hooks: Any = getattr(_autograd, "_top_saved_tensors_default_hooks", lambda _: None)


def has_saved_tensors_hooks() -> bool:
    """Whether hooks on what autograd saves are active on this thread, or are not allowed now; takes 1 µs."""
    if not _autograd._saved_tensors_hooks_is_enabled():
        return True
    return _top_hooks(True) is not None


def timeout_of(group: dist.ProcessGroup) -> timedelta | None:
    """Return how long a collective of a group may take; None if it cannot be known."""
    for device in group._device_types:
        timeout = getattr(getattr(_bare(group._get_backend(device)), "options", None), "_timeout", None)
        if isinstance(timeout, timedelta):
            return timeout
    return None


def is_profiling() -> bool:
    """Whether a profiler is at work, on this thread or all; takes less than 0.1 µs."""
    return torch.autograd.profiler._is_profiler_enabled


def default_store() -> Any:  # noqa: ANN401 - a torch.distributed.Store
    """Return the store of the default group.

    Raises:
        ValueError: there is no default group.
    """
    return c10d._get_default_store()


def address_of_store(store: Any) -> tuple[str | None, int]:  # noqa: ANN401 - a torch.distributed.Store
    """Return host and port of what serves a store; None and 0 if nothing does, as with a file."""
    while hasattr(store, "underlying_store"):
        store = store.underlying_store
    return getattr(store, "host", None), int(getattr(store, "port", 0) or 0)


def make_group(ranks: Sequence[int], backend: str, name: str, timeout: timedelta | None) -> dist.ProcessGroup:
    """Make a process group with a given name. Its members call, and no other rank; communicates.

    `torch.distributed.new_group` takes no name. If only members call it, it derives the name from the number
    of groups in the process, which may differ: see Note [Lanes] in `zero_optim.comm.lanes`. See also
    Note [No split communicators].

    Args:
        ranks: global ranks of the members, by group rank; this process is one of them.
        backend: such as ``"gloo"``.
        name: the same on every member, never used before.
        timeout: of its collectives, and of waiting for the members; None for PyTorch's default. gloo waits
            for them here, NCCL with the first collective.

    Raises:
        RuntimeError: a member did not call in time, where the backend waits here.
    """
    world: Any = c10d._world
    make: Any = c10d._new_process_group_helper
    _, store = world.pg_map[dist.group.WORLD]
    made, *_ = make(
        group_size=len(ranks),
        group_rank=ranks.index(dist.get_rank()),
        global_ranks_in_group=list(ranks),
        backend=dist.Backend(backend),
        store=store,
        group_name=name,
        timeout=c10d.default_pg_timeout if timeout is None else timeout,
        group_desc="zero_optim",
    )
    if (made.size(), made.group_name) != (len(ranks), name):
        raise _changed(f"a group named {made.group_name} of {made.size()} ranks, not {name} of {len(ranks)}")
    _keep_whole(made)
    world.pg_group_ranks[made] = {rank: index for index, rank in enumerate(ranks)}
    group: dist.ProcessGroup = made
    return group


def _keep_whole(group: dist.ProcessGroup) -> None:
    """Let a new group make communicators of its own; see Note [No split communicators]."""
    for device in group._device_types:
        backend = _bare(group._get_backend(device))
        options: Any = getattr(backend, "options", None)
        if getattr(options, "split_from", None) is not None:
            options.split_from = None
            if backend.options.split_from is not None:
                raise _changed("the options of a group in a copy")


def _changed(what: str) -> RuntimeError:
    return RuntimeError(
        f"PyTorch {torch.__version__} gives {what}, so no process group can be made beside the one given: "
        f"use PyTorch {WORKS_WITH}, or a newer zero-optim"
    )


def aborts_of(group: dist.ProcessGroup) -> list[Callable[[], None]]:
    """List what ends all that a group has under way, by backend. gloo has no such call.

    What waits for it, a stream or the CPU, then goes on, with wrong values; the group cannot be used again.
    """
    backends = [_bare(group._get_backend(device)) for device in group._device_types]
    return [backend.abort for backend in backends if not isinstance(backend, _Gloo)]


def _bare(backend: Any) -> Any:  # noqa: ANN401 - PyTorch's class of backends has few of their attributes
    """Take a backend out of the wrapper that ``TORCH_DISTRIBUTED_DEBUG=DETAIL`` puts around it."""
    return getattr(backend, "wrapped_pg", backend)


def coalesces(group: dist.ProcessGroup, device: torch.device) -> bool:
    """Whether the backend for a device can take several collectives as one."""
    # A subclass of ProcessGroup does everything itself; PyTorch's `batch_isend_irecv` asks in the same way.
    return type(group) is dist.ProcessGroup and bool(group._get_backend(device).supports_coalescing)


@contextmanager
def coalesced(group: dist.ProcessGroup, device: torch.device) -> Iterator[list[dist.Work]]:
    """Start the asynchronous collectives of the body as one; only where `coalesces`.

    Yields:
        A list, empty at first. When the body ends it gets the handle for all of them. Those that the
        collectives themselves return are of no use.
    """
    works: list[dist.Work] = []
    start: Any = group._start_coalescing
    end: Any = group._end_coalescing
    start(device)
    try:
        yield works
    finally:  # else everything started later on the group would wait for the end
        work = end(device)
    if work is not None:
        works.append(work)


def copy_each(targets: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
    """Copy many tensors in one call."""
    foreach_copy: Any = torch._foreach_copy_
    foreach_copy(targets, sources)


def scale_each(tensors: Sequence[Tensor], factor: float) -> None:
    """Multiply many tensors in place in one call."""
    foreach_mul: Any = torch._foreach_mul_
    foreach_mul(tensors, factor)
