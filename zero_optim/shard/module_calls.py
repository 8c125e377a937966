"""Calls of modules, seen by hooks: modules wait for their parameters, and units are freed, at these moments.

Note [A call inside a call]
    A module may call itself, and only the outermost call of a model is a forward pass. Hooks count calls. But
    PyTorch runs no hook when a Ctrl-C ends a call: ``always_call`` is for an `Exception`. A notebook keeps
    the traceback, and with it the frames and what they refer to. Only the interpreter knows which calls are
    running. So the stack is searched, but only where the count says that the model calls itself.
"""

import inspect
import sys
from traceback import walk_stack
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from torch import nn

from zero_optim.compat.autograd import eager

if TYPE_CHECKING:
    from torch.utils.hooks import RemovableHandle

C = TypeVar("C", bound="ModuleCalls")


class Call(NamedTuple):
    """A call of a module, which is under way."""

    module: nn.Module
    is_pass: bool  # of the model, in no other of its calls
    handled: BaseException | None  # by the caller, as it calls


class ModuleCalls:
    """Hooks on modules of a model, which call the methods of a subclass."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.under_way: list[Call] = []  # the outermost first
        self.clock = 0  # counts where calls begin and end
        self.handles: list[RemovableHandle] = []

    @classmethod
    def on(cls: type[C], module: nn.Module) -> C | None:
        """Return the first of this class with hooks on a module; None if there is none."""
        owners = (getattr(hook, "__self__", None) for hook in module._forward_pre_hooks.values())
        return next((owner for owner in owners if isinstance(owner, cls)), None)

    def watch(self, module: nn.Module, *, ends: bool) -> None:
        """Register the hooks of a module, in front of others; those behind, and the count, if ``ends``."""
        before = self._begin if ends else self._notice
        self.handles.append(module.register_forward_pre_hook(before, prepend=True, with_kwargs=True))
        if ends:
            self.handles.append(module.register_forward_hook(self._end, always_call=True))

    @eager
    def _notice(self, module: nn.Module, args: Any, kwargs: Any) -> None:  # noqa: ANN401 - the user's
        self.before_forward(module, (args, kwargs))

    @eager
    def _begin(self, module: nn.Module, args: Any, kwargs: Any) -> Any:  # noqa: ANN401
        is_pass, changed = module is self.model, None
        if is_pass and any(call.module is module for call in self.under_way):
            is_pass = _num_calls(module) == 1
        if is_pass:
            self.under_way.clear()  # a Ctrl-C has ended what is left
            changed = self.begin_pass(args, kwargs)
        self.clock += 1
        self.under_way.append(Call(module, is_pass, sys.exc_info()[1]))
        self.before_forward(module, changed or (args, kwargs))
        return changed

    @eager
    def _end(self, module: nn.Module, _: object, output: Any) -> Any:  # noqa: ANN401
        calls = self.under_way
        if not (calls and calls[-1].module is module) and all(call.module is not module for call in calls):
            return output  # a hook in front, or `begin_pass`, has raised
        while (call := calls.pop()).module is not module:
            pass  # a Ctrl-C has ended those inside this one
        self.clock += 1
        return self.after_forward(call, output, raised=sys.exc_info()[1] is not call.handled)

    def begin_pass(self, args: Any, kwargs: Any) -> Any:  # noqa: ANN401
        """Begin a forward pass, before the model's call is under way; return other arguments, or None."""

    def before_forward(self, module: nn.Module, inputs: object) -> None:
        """Do what a call of a module needs; `after_forward` follows also if it raises."""

    def after_forward(self, call: Call, output: object, *, raised: bool) -> object:
        """Return the output of a call that is over, or another; what ``raised`` has none."""
        return output


def _num_calls(module: nn.Module) -> int:
    """Count the running calls of a module in this thread: Note [A call inside a call]."""
    frames = [frame for frame, _ in walk_stack(inspect.currentframe())]
    calls = [frame.f_locals for frame in frames if frame.f_code.co_name == "_call_impl"]
    return sum(names.get("self") is module for names in calls)
