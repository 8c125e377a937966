"""How gradients find who takes them: hooks on the parameters, and the backward pass under way.

Note [Passes that break off]
    The autograd engine keeps what it is to call at the end of a backward pass, and lets go of it when the
    pass ends, however it does. A token among what it keeps shows by its death that the pass is over. If
    the engine has not called by then, an exception has ended the pass. Nothing is sent at that moment, which
    may be any; the next backward or forward pass finds the one that broke off, and ends it together with
    the other ranks.
"""

import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol

from torch import Tensor
from torch.utils.hooks import RemovableHandle

from zero_optim.compat.engine import after_backward
from zero_optim.ddp.backward_pass import BackwardPass, Phase
from zero_optim.ddp.bucket import ReducerBucket
from zero_optim.ddp.reduction import Launch, Reduction


class Owner(Protocol):
    """Who decides what becomes of a backward pass, a `Reducer`."""

    def first_arrived(self, index: int) -> None:
        """Take a gradient that came while no backward pass was under way."""
        ...

    def output_reached(self, witness: int | None) -> None:
        """Take note that a pass goes through an output, which depends on a parameter."""
        ...


class Inbox:
    """Where the parameters' hooks find who takes their gradients; they do not keep the reducer alive.

    Args:
        owner: who is asked when no backward pass is under way. When it goes, the hooks go.
        params: these get hooks.

    Attributes:
        current: the backward pass that is running, or has broken off and was not ended yet.
    """

    def __init__(self, owner: Owner, params: Sequence[Tensor]) -> None:
        self.current: BackwardPass | None = None
        self._owner = weakref.ref(owner)
        handles = []
        for index, param in enumerate(params):
            untyped: Any = param
            handles.append(untyped.register_post_accumulate_grad_hook(self._hook_of(index)))
        self._finalizer = weakref.finalize(owner, _remove, handles)

    @property
    def is_running(self) -> bool:
        """Whether a backward pass is running."""
        return self.current is not None and self.current.phase is Phase.RUNNING

    def pop_broken_off(self) -> BackwardPass | None:
        """Give, once, the pass that has broken off, if one has."""
        current = self.current
        if current is None or current.phase is not Phase.BROKEN_OFF:
            return None
        self.current = None
        return current

    def close(self) -> None:
        """Take the hooks off; a second call does nothing."""
        self._finalizer()

    def _hook_of(self, index: int) -> Callable[[Tensor], None]:
        running = Phase.RUNNING  # found faster here

        def hook(_: Tensor) -> None:
            current = self.current
            if current is not None and current.phase is running:
                current.arrived(index)
                return
            owner = self._owner()
            if owner is not None:
                owner.first_arrived(index)

        return hook


def _remove(handles: Iterable[RemovableHandle]) -> None:
    for handle in handles:
        handle.remove()


class _Token:
    """Alive as long as the engine keeps what it is to call at the end of a backward pass."""


def when_backward_ends(finish: Callable[[], None], broke_off: Callable[[], None]) -> None:
    """Have one of two functions called when the backward pass under way is over; from one of its hooks.

    Args:
        finish: called when every gradient has been computed, as by `after_backward`.
        broke_off: called if it never comes to that, see Note [Passes that break off].
    """
    token = _Token()
    watch = weakref.finalize(token, broke_off)
    watch.atexit = False

    def end(_: _Token = token) -> None:
        watch.detach()
        finish()

    after_backward(end)


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


def weakly(method: Launch) -> Launch:
    """Give a method that does not keep its object: a pass that broke off must not keep a reducer for ever."""
    reference = weakref.WeakMethod(method)

    def call(bucket: ReducerBucket, number: int, is_last: bool) -> Reduction:
        found = reference()
        assert found is not None  # whoever launches holds the reducer
        return found(bucket, number, is_last)

    return call
