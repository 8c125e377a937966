"""How gradients find who takes them: hooks on the parameters, and the iteration under way.

Note [Passes that break off]
    The autograd engine keeps what it is to call at the end of a backward pass, and lets go of it when the
    pass ends, however it does. A token among what it keeps shows by its death that the pass is over. If
    its iteration is still under way then, an exception has ended the pass. Nothing is sent at that moment,
    which may be any; the next backward or forward pass finds the iteration, and ends it together with the
    other ranks.
"""

import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol

from torch import Tensor
from torch.utils.hooks import RemovableHandle

from zero_optim.ddp.iteration import Iteration
from zero_optim.ddp.reduction import Reduction


class Owner(Protocol):
    """Who decides what becomes of a backward pass, a `Reducer`."""

    def first_arrived(self, index: int) -> None:
        """Take a gradient that came while no iteration was under way."""
        ...

    def output_reached(self, witness: int | None) -> None:
        """Take note that a pass goes through an output, which depends on a parameter."""
        ...


class Token:
    """Alive as long as the engine keeps what it is to call at the end of a backward pass."""


class Inbox:
    """Where the parameters' hooks find who takes their gradients; they do not keep the reducer alive.

    Args:
        owner: who is asked when no iteration is under way.

    Attributes:
        iteration: the one under way.
        broken_off: one whose pass ended with an exception; see Note [Passes that break off].
    """

    def __init__(self, owner: Owner) -> None:
        self.owner = weakref.ref(owner)
        self.iteration: Iteration | None = None
        self.broken_off: Iteration | None = None
        self._watch: weakref.ref[Token] | None = None

    def begin(self, iteration: Iteration) -> Token:
        """Hand gradients to an iteration from now on.

        Returns:
            What the engine must keep until the pass ends.
        """
        self.iteration = iteration
        token, inbox = Token(), weakref.ref(self)

        def gone(watch: "weakref.ref[Token]") -> None:
            found = inbox()
            if found is not None and found._watch is watch and found.iteration is not None:
                found.broken_off, found.iteration = found.iteration, None

        self._watch = weakref.ref(token, gone)
        return token

    def clear(self) -> None:
        """Forget the iterations."""
        self.iteration = self.broken_off = self._watch = None


def hook_up(params: Sequence[Tensor], inbox: Inbox) -> list[RemovableHandle]:
    """Have every parameter tell an inbox of its gradients."""

    def hook_of(index: int) -> Callable[[Tensor], None]:
        def hook(_: Tensor) -> None:
            iteration = inbox.iteration
            if iteration is not None:
                iteration.arrived(index)
                return
            owner = inbox.owner()
            if owner is not None:
                owner.first_arrived(index)

        return hook

    handles = []
    for index, param in enumerate(params):
        untyped: Any = param
        handles.append(untyped.register_post_accumulate_grad_hook(hook_of(index)))
    return handles


def remove(handles: Iterable[RemovableHandle]) -> None:
    """Take hooks off again."""
    for handle in handles:
        handle.remove()


def output_hook(owner: Owner, witness: int | None) -> Callable[[Tensor], None]:
    """Make a hook for an output, which does not keep the owner.

    Args:
        owner: who is told that a pass goes through the output.
        witness: a parameter that the output depends on, None if none was found.
    """
    reference = weakref.ref(owner)

    def hook(_: Tensor) -> None:
        found = reference()
        if found is not None:
            found.output_reached(witness)

    return hook


def weakly(method: Callable[[int], Reduction]) -> Callable[[int], Reduction]:
    """Give a method that does not keep its object: a pass that broke off must not keep a reducer for ever."""
    reference = weakref.WeakMethod(method)

    def call(number: int) -> Reduction:
        found = reference()
        assert found is not None  # whoever launches holds the reducer
        return found(number)

    return call
