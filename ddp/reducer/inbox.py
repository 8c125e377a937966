"""Hooks on the parameters, which pass gradients to the current backward pass.

Note [Passes that break off]
    The autograd engine drops its final callbacks when a pass ends, and a token in the callback dies. If the
    engine has not called it by then, an exception has ended the pass. Nothing is sent at that moment, which
    may be any; the next pass finds the one that broke off.
"""

from collections.abc import Callable, Collection, Container, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, ParamSpec, TypeVar
from weakref import WeakMethod, ref

from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from zero_optim.compat import private
from zero_optim.compat.autograd import after_backward
from zero_optim.ddp.reducer.backward_pass import BackwardPass, Phase
from zero_optim.ddp.reducer.graph import accumulates, nearest, on_gradient
from zero_optim.ddp.reducer.report import REPLACED, SWAPPED
from zero_optim.shard.engine import Engine

P = ParamSpec("P")
T = TypeVar("T")


@dataclass(frozen=True, slots=True, eq=False)
class Ties:
    """What ties a reducer to a wrapper, an optimizer and units; `weakly` makes the functions."""

    engine: Engine  # runs the rows of the buckets
    wanted: Callable[[bool], bool | None]  # whether to reduce a pass, by whether it was expected
    module: nn.Module = field(default_factory=nn.Module)  # may lose parameters; those of others stay
    coming: Callable[[int], None] | None = None  # called before a pass has its first gradient
    follow: Callable[[int], None] | None = None  # called with a parameter's place when its gradient came
    begin: Callable[[BackwardPass], None] | None = None  # may hold its buckets: Note [Places of launches]
    last: Collection[Tensor] = ()  # whose buckets are launched last, where parameters may be unused


class Inbox:
    """The parameters' hooks, which keep it alive, and the current backward pass."""

    def __init__(self, params: Sequence[Tensor], take_first: Callable[[int], None], ties: Ties) -> None:
        # Autograd holds this object where no collector of garbage looks, so it must not hold the model.
        self._module, self._members = ref(ties.module), set(ties.module.parameters())
        self.current: BackwardPass | None = None  # runs, or has broken off and was not ended yet
        self.handles: list[RemovableHandle] = []
        self._params = params
        self._tensors = list(map(private.cdata, params))
        running, follow, coming = Phase.RUNNING, ties.follow, ties.coming  # found faster here

        def came(index: int, _: Tensor) -> None:
            current = self.current
            if current is not None and current.phase is running:
                current.came(index)
            else:
                take_first(index)
            if follow is not None:
                follow(index)

        def comes(begin: Callable[[int], None], index: int, _: Tensor) -> None:
            current = self.current
            if current is None or current.phase is not running:
                begin(index)

        for index, param in enumerate(params):
            untyped: Any = param
            if not param.requires_grad:  # the model is only evaluated
                continue
            self.handles.append(untyped.register_post_accumulate_grad_hook(partial(came, index)))
            if coming is not None:
                self.handles.append(on_gradient(param, partial(comes, coming, index)))

    def use(self, current: BackwardPass | None) -> None:
        """Give gradients to a pass that begins; None when it has ended."""
        self.current = current

    def lost(self, calls: Sequence[int]) -> dict[int, str]:
        """Say why parameters get no gradient any more, by place."""
        if all(calls):
            return {}
        module = self._module()
        lost, there = dict[int, str](), set() if module is None else set(module.parameters())
        has_new = any(param.requires_grad for param in there.difference(self._members))
        for index, (param, was, num) in enumerate(zip(self._params, self._tensors, calls, strict=True)):
            if not num and private.cdata(param) != was:  # a swap of tensors took its hooks
                lost[index] = SWAPPED
            elif not num and has_new and param not in there:
                lost[index] = REPLACED
        return lost

    @property
    def running(self) -> BackwardPass | None:
        """The backward pass that is running."""
        current = self.current
        return current if current is not None and current.phase is Phase.RUNNING else None


def remove(handles: Sequence[RemovableHandle]) -> None:
    """Remove hooks; a second call does nothing."""
    for handle in handles:
        handle.remove()


def announce_backward(
    outputs: Iterable[Tensor], index_of: Container[int], reached: Callable[[], None]
) -> None:
    """Call `reached` when a backward pass goes through an output to a parameter, by id."""
    for output in outputs:
        if output.grad_fn is not None:
            on_gradient(output, partial(_output_reached, nearest(output, index_of), reached))


def _output_reached(witness: Tensor | None, reached: Callable[[], None], _: Tensor) -> None:
    # torch.autograd.grad goes through outputs too, but gives no parameter its gradient.
    if witness is None or accumulates(witness):
        reached()


class _Token:
    """Calls ``broke_off`` when it dies, unless that is None; cheaper than `weakref.finalize`."""

    broke_off: Callable[[], None] | None = None  # of one that dynamo makes, which traces this

    def __init__(self, broke_off: Callable[[], None]) -> None:
        self.broke_off = broke_off

    def __del__(self) -> None:
        if self.broke_off is not None:
            self.broke_off()


def when_backward_ends(finish: Callable[[], None], broke_off: Callable[[], None]) -> None:
    """From a hook: call ``finish`` at the end of the pass, or ``broke_off`` if that never comes."""
    after_backward(partial(_end, _Token(broke_off), finish))


def _end(token: _Token, finish: Callable[[], None]) -> None:
    token.broke_off = None
    finish()


def weakly(method: Callable[P, T]) -> Callable[P, T | None]:
    """Return a callable that does not keep the method's object alive; it returns None once that is gone."""
    reference = WeakMethod(method)

    def call(*args: P.args, **kwargs: P.kwargs) -> T | None:
        method = reference()
        return None if method is None else method(*args, **kwargs)

    return call
