"""Lazy gathers: each module waits for its own parameters in its forward pass."""

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from zero_optim.compat.autograd import in_backward
from zero_optim.flow.schedule import Moment
from zero_optim.shard.engine import Engine
from zero_optim.shard.module_calls import Call, ModuleCalls
from zero_optim.shard.task import Task


class LazyGather(ModuleCalls):
    """Forward hooks that make each module wait for the gathers of its own parameters.

    Some modules read a child's parameters without calling it. So the first forward pass waits for everything;
    later the nearest ancestor that was called then waits. Passes without gradients wait for everything.
    """

    def __init__(self, model: nn.Module, engine: Engine) -> None:
        super().__init__(model)
        self._engine = engine
        self._params = frozenset(model.parameters())
        self._called: set[nn.Module] = set()
        self._needs: dict[nn.Module, list[Tensor]] | None = None
        for module in model.modules():
            self.watch(module, ends=module is model)
            self.handles.append(module.register_state_dict_pre_hook(self.wait))  # type: ignore[no-untyped-call]
            self.handles.append(module.register_load_state_dict_pre_hook(self.wait))  # type: ignore[no-untyped-call]
        engine.read_by(self._params, lazily=True)

    def remove(self) -> None:
        """Wait for pending gathers and remove the hooks; steps wait for their gathers again."""
        self._engine.under_way.wait()
        if self.handles:
            self._engine.read_by(self._params, lazily=False)
        while self.handles:
            self.handles.pop().remove()

    def wait(self, *_: object) -> None:
        """Wait for all gathers; also a state-dict hook, hence the arguments."""
        self._engine.under_way.wait()

    def before_forward(self, module: nn.Module, inputs: object) -> None:
        """Wait for the parameters that a module's forward pass needs; raise what failed, when all is here."""
        if self._needs is None:
            self._called.add(module)
        engine = self._engine
        if not engine.under_way:
            return
        buckets = engine.buckets
        if self._needs is not None and torch.is_grad_enabled():
            # A module that was not called in the first forward pass may read anything below it.
            needs = self._needs[module] if module in self._needs else module.parameters()
            buckets = engine.buckets_of(needs)
        engine.on(Moment.BEFORE_FORWARD, buckets, Task())
        if not engine.under_way and not in_backward():  # one that recomputes has to end in good order
            engine.raise_failures()

    def after_forward(self, call: Call, output: object, *, raised: bool) -> object:
        """Find out, after the first forward pass, which parameters each module needs."""
        if self._needs is None and not raised:
            self._needs = {module: [] for module in self._called}
            self._assign(self.model, self.model, self._needs)
        return output

    def _assign(self, module: nn.Module, caller: nn.Module, needs: dict[nn.Module, list[Tensor]]) -> None:
        caller = module if module in self._called else caller
        needs[caller].extend(module.parameters(recurse=False))
        for child in module.children():
            self._assign(child, caller, needs)


def check_reader(model: object, params: Iterable[Tensor]) -> None:
    """Raise unless ``model`` is None or a module with some of the optimizer's parameters."""
    if model is None:
        return
    if not isinstance(model, nn.Module):
        raise TypeError(
            "expected gather_lazily to be the model whose forward passes wait for parameters, as in "
            f"gather_lazily=model, or None, got {model!r}"
        )
    if frozenset(model.parameters()).isdisjoint(params):
        raise ValueError(
            f"expected gather_lazily to be a model with parameters of the optimizer, but this "
            f"{type(model).__name__} has none of them: give the model whose parameters it was built over"
        )
