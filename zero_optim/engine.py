"""What the library needs of PyTorch's autograd engine and has no public name, checked when this is imported."""

from collections.abc import Callable, Sequence

import torch
from torch.autograd import Variable
from torch.autograd.graph import Node

_NEEDED: tuple[tuple[object, str], ...] = (
    (getattr(Variable, "_execution_engine", None), "queue_callback"),
    (torch._C, "_current_autograd_node"),
    (torch._C, "_current_graph_task_id"),
    (torch._C, "_will_engine_execute_node"),
)


def missing_names(needed: Sequence[tuple[object, str]]) -> list[str]:
    """List which of some (owner, attribute) pairs this PyTorch does not have."""
    return [name for owner, name in needed if not hasattr(owner, name)]


def require(needed: Sequence[tuple[object, str]], what: str) -> None:
    """Refuse to be imported beside a PyTorch that lacks private names we stand on.

    Raises:
        ImportError: some are missing; names them, and the versions that have them.
    """
    missing = missing_names(needed)
    if missing:
        raise ImportError(
            f"{what} needs {', '.join(missing)}, which PyTorch {torch.__version__} does not have: "
            "use PyTorch 2.8 to 2.13, or a newer zero-optim"
        )


require(_NEEDED, "zero_optim")


def backward_number() -> int:
    """Number the backward pass that this thread is inside of, in a hook or in a callback at its end.

    -1 outside of any. A pass that is run by another one, for reentrant checkpointing, has a number of its own.
    """
    return int(torch._C._current_graph_task_id())


def in_backward() -> bool:
    """Whether this thread is inside a backward pass, in a hook or in a callback at its end."""
    return backward_number() != -1


def in_outer_backward() -> bool:
    """Whether, in a callback at the end of a backward pass, another pass is under way that has run this one."""
    return torch._C._current_autograd_node() is not None


def after_backward(callback: Callable[[], None]) -> None:
    """Call something when the backward pass under way has computed every gradient.

    To be called from a hook of that pass, or from such a callback: then it comes after all others
    queued by then. Runs on the thread that called ``backward()``; on CUDA its stream is in step with
    the gradients by then. What it raises comes out of ``backward()``.
    """
    Variable._execution_engine.queue_callback(callback)  # type: ignore[no-untyped-call]


def will_run(node: Node) -> bool:
    """Tell, from a hook of a backward pass, whether that pass is going to run a node of its graph."""
    return bool(torch._C._will_engine_execute_node(node))
