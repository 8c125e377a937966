"""How gradients find who takes them: hooks on the parameters, and the backward pass under way.

Note [Passes that break off]
    The autograd engine keeps what it is to call at the end of a backward pass, and lets go of it when the
    pass ends, however it does. A token among what it keeps shows by its death that the pass is over. If
    the engine has not called by then, an exception has ended the pass. Nothing is sent at that moment, which
    may be any; the next backward or forward pass finds the one that broke off, and ends it together with
    the other ranks.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, ParamSpec
from weakref import WeakMethod

from torch import Tensor
from torch.autograd.graph import Node
from torch.utils.hooks import RemovableHandle

from zero_optim.compat.engine import after_backward
from zero_optim.ddp.reducer.backward_pass import BackwardPass, Phase

P = ParamSpec("P")


class Inbox:
    """Where the parameters' hooks find who takes their gradients.

    Args:
        params: these get hooks, which keep the inbox.
        take_first: takes the gradient of a parameter, by its place, when no backward pass is under way;
            made by `weakly`.

    Attributes:
        current: the backward pass that is running, or has broken off and was not ended yet.
        handles: of the hooks.
        follower: told of each gradient, by its parameter's place, when it was taken; made by `weakly`.
    """

    def __init__(self, params: Sequence[Tensor], take_first: Callable[[int], None]) -> None:
        self.current: BackwardPass | None = None
        self.handles: list[RemovableHandle] = []
        self.follower: Callable[[int], None] | None = None
        self._take_first = take_first
        self._params = params
        self._tensors = [_tensor_of(param) for param in params]
        for index, param in enumerate(params):
            untyped: Any = param
            self.handles.append(untyped.register_post_accumulate_grad_hook(self._hook_of(index)))

    def announce(self, coming: Callable[[int], None]) -> None:
        """Have a parameter's place told before autograd adds a gradient, while no backward pass is under way.

        Args:
            coming: told, with ``torch.autograd.grad`` too; made by `weakly`.
        """
        for index, param in enumerate(self._params):
            untyped: Any = param
            self.handles.append(untyped.register_hook(self._early_hook_of(index, coming)))

    def swapped(self, calls: Sequence[int]) -> list[int]:
        """List the parameters that are other tensors by now: a swap has taken the hooks away.

        Args:
            calls: how many gradients each has got: only those without one are looked at.
        """
        if all(calls):
            return []
        given = enumerate(zip(self._params, self._tensors, calls, strict=True))
        return [index for index, (param, was, num) in given if not num and _tensor_of(param) != was]

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

    def _early_hook_of(self, index: int, coming: Callable[[int], None]) -> Callable[[Tensor], None]:
        running = Phase.RUNNING  # found faster here

        def hook(_: Tensor) -> None:
            current = self.current
            if current is None or current.phase is not running:
                coming(index)

        return hook

    def _hook_of(self, index: int) -> Callable[[Tensor], None]:
        running = Phase.RUNNING  # found faster here

        def hook(_: Tensor) -> None:
            current = self.current
            if current is not None and current.phase is running:
                current.arrived(index)
            else:
                self._take_first(index)
            if self.follower is not None:
                self.follower(index)

        return hook


def remove(handles: Sequence[RemovableHandle]) -> None:
    """Take hooks off; a second call does nothing."""
    for handle in handles:
        handle.remove()


def _tensor_of(param: Tensor) -> int:
    """Tell the tensor behind a Python object."""
    untyped: Any = param
    found: int = untyped._cdata
    return found


class _Token:
    """Alive as long as the engine keeps what it is to call at the end of a backward pass.

    `weakref.finalize` would do the same, but each of them takes as long as the hooks of ten gradients.

    Args:
        broke_off: called when it dies, unless it was set to None.
    """

    __slots__ = ("broke_off",)

    def __init__(self, broke_off: Callable[[], None]) -> None:
        self.broke_off: Callable[[], None] | None = broke_off

    def __del__(self) -> None:
        if self.broke_off is not None:
            self.broke_off()


def when_backward_ends(finish: Callable[[], None], broke_off: Callable[[], None]) -> None:
    """Have one of two functions called when the backward pass under way is over; from one of its hooks.

    Args:
        finish: called when every gradient has been computed, as by `after_backward`.
        broke_off: called if it never comes to that, see Note [Passes that break off].
    """
    after_backward(partial(_end, _Token(broke_off), finish))


def _end(token: _Token, finish: Callable[[], None]) -> None:
    token.broke_off = None
    finish()


def output_hook(reached: Callable[[Node | None], None], witness: Node | None) -> Callable[[Tensor], None]:
    """Make a hook for an output of a forward pass.

    Args:
        reached: told that a backward pass goes through the output; made by `weakly`.
        witness: accumulates into a parameter that the output depends on, None if none was found.
    """

    def hook(_: Tensor) -> None:
        reached(witness)

    return hook


def weakly(method: Callable[P, None]) -> Callable[P, None]:
    """Give a method that does not keep its object, and does nothing once that has gone.

    Parameters and outputs, which hold the hooks, may live longer than what reduces.
    """
    return partial(_call_if_there, WeakMethod(method))


def _call_if_there(
    reference: WeakMethod[Callable[P, None]],
    *args: P.args,
    **kwargs: P.kwargs,
) -> None:
    found = reference()
    if found is not None:
        found(*args, **kwargs)
