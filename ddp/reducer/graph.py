"""Which parameters a forward pass can give a gradient to: a walk over the autograd graph."""

import dataclasses
from collections import deque
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence, Set
from copy import copy
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import Node, get_gradient_edge
from torch.utils.hooks import RemovableHandle

from zero_optim.compat.autograd import will_run


def tensors_in(value: object) -> list[Tensor]:
    """List the tensors in an output: in nested containers and dataclasses, not in other objects."""
    found = list[Tensor]()
    seen: dict[int, object] = {}  # by id; a container may hold itself
    stack = [value]
    while stack:
        item = stack.pop()
        if isinstance(item, Tensor):
            found.append(item)
        elif isinstance(item, str | bytes) or id(item) in seen:
            continue
        else:
            seen[id(item)] = item
            if isinstance(item, Mapping):
                stack.extend(item.values())
            elif isinstance(item, list | tuple | Set):
                stack.extend(item)
            elif dataclasses.is_dataclass(item) and not isinstance(item, type):
                stack.extend(getattr(item, field.name, None) for field in dataclasses.fields(item))
    return found


def replaced(value: object, by: Callable[[Tensor], Tensor]) -> Any:  # noqa: ANN401 - as the value
    """Replace the tensors in an output; builds its containers anew."""
    if isinstance(value, Tensor):
        return by(value)
    if isinstance(value, dict):
        like = copy(value)  # of its class
        for key, part in value.items():
            like[key] = replaced(part, by)  # some classes forbid update()
        return like
    if isinstance(value, list | tuple):
        parts = [replaced(part, by) for part in value]
        return type(value)(*parts) if hasattr(value, "_fields") else type(value)(parts)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        replica: Any = copy(value)
        for field in dataclasses.fields(value):
            if hasattr(value, field.name):
                object.__setattr__(replica, field.name, replaced(getattr(value, field.name), by))
        return replica
    return value


def on_gradient(tensor: Tensor, hook: Callable[[Tensor], None]) -> RemovableHandle:
    """Call a hook with a tensor's gradient, before autograd adds it to another."""
    untyped: Any = tensor
    handle: RemovableHandle = untyped.register_hook(hook)
    return handle


def nearest(output: Tensor, leaves: Container[int]) -> Tensor | None:
    """Return the nearest of the leaves, by id, behind an output."""
    assert output.grad_fn is not None  # asked for by the caller
    for node in _nodes_behind([output.grad_fn]):
        leaf: Tensor | None = getattr(node, "variable", None)  # of one that accumulates
        if id(leaf) in leaves:
            return leaf
    return None


def _nodes_behind(nodes: Iterable[Node]) -> Iterator[Node]:
    """Yield some nodes and those that run after them in a backward pass, each once, the nearest first."""
    seen = set(nodes)  # holds the nodes' Python halves too, so that each node stays one object
    queue = deque(seen)
    while queue:
        node = queue.popleft()
        yield node
        for following, _ in node.next_functions:
            if following is not None and following not in seen:
                seen.add(following)
                queue.append(following)


def accumulates(leaf: Tensor) -> bool:
    """Whether the running backward pass gives a leaf a gradient; for one of its hooks."""
    return leaf.requires_grad and will_run(get_gradient_edge(leaf).node)


class UnusedSearch:
    """Collects which parameters the next backward pass can reach."""

    def __init__(self) -> None:
        self._leaves: set[int] | None = None  # by id, that were reached; None before the first look
        self._is_complete = True  # no node was written in Python: it may run a backward pass of its own

    def look(self, outputs: Iterable[Tensor]) -> None:
        """Walk the graph from outputs of a forward pass to leaves, a microsecond a node."""
        leaves = self._leaves = self._leaves or set()
        nodes: list[Node] = []
        for output in outputs:
            if output.grad_fn is not None:
                nodes.append(output.grad_fn)
            elif output.requires_grad:
                leaves.add(id(output))
        for node in _nodes_behind(nodes):
            variable = getattr(node, "variable", None)  # the nodes that accumulate into a leaf have one
            if variable is not None:
                leaves.add(id(variable))
            is_written_in_python = isinstance(node, torch.autograd.function.BackwardCFunction)
            self._is_complete = self._is_complete and not is_written_in_python

    def pop_unused(self, params: Sequence[Tensor]) -> list[int]:
        """Return the parameters without a gradient in the running pass; for its hooks, once."""
        leaves, is_complete = self._leaves, self._is_complete
        self._leaves, self._is_complete = None, True
        if leaves is None or not is_complete:
            return []
        doubtful = [index for index, param in enumerate(params) if id(param) not in leaves]
        # The loss may depend on more than the output shows; the engine knows, but only of its own pass.
        return [index for index in doubtful if not accumulates(params[index])]
