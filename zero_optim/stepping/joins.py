"""What an optimizer does inside ``Join``, beside ranks that ran out of inputs."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.algorithms.join import Join, Joinable, JoinHook

from zero_optim.plan.groups import ParamGroup
from zero_optim.plan.pieces import Pieces
from zero_optim.state.core import Core
from zero_optim.step.join import Status, exchange


class ShadowHook(JoinHook):
    """Answers each step of the active ranks, which must step once an iteration.

    Args:
        shadow: takes part in one step.
    """

    def __init__(self, shadow: Callable[[], None]) -> None:
        self._shadow = shadow

    def main_hook(self) -> None:
        """Shadow one iteration; ``Join`` calls it while some rank is still active."""
        self._shadow()


class Joins(Joinable):
    """What ``Join`` and the optimizer know of each other.

    Args:
        core: the parts of the optimizer.
    """

    def __init__(self, core: Core) -> None:
        super().__init__()
        self._core = core
        self._is_announced = False  # Join knows that this rank is active in this iteration
        self._given: list[Tensor] = []  # whose gradients came with a backward pass that this rank shadowed

    def let_go(self) -> None:
        """Begin anew: ranks that are new to the next group were in no ``Join``."""
        Joinable.__init__(self)  # PyTorch leaves the configuration as the last Join set it
        self._is_announced, self._given = False, []

    @property
    def config(self) -> Any:  # noqa: ANN401 - a private type of PyTorch
        """What ``Join`` sets on the optimizer while it is under way."""
        return self._join_config

    @config.setter
    def config(self, config: Any) -> None:  # noqa: ANN401 - as above
        self._join_config = config

    @property
    def under_way(self) -> bool:
        """Whether a ``Join`` is under way, so that ranks may run out of inputs."""
        return bool(self._join_config.enable)

    def join_hook(self, **kwargs: object) -> JoinHook:
        """Begin an epoch. The optimizer's own hook does the work."""
        self._is_announced = False
        return JoinHook()

    @property
    def join_device(self) -> torch.device:
        """Where ``Join`` places its own small tensors."""
        return self._core.group.device

    @property
    def join_process_group(self) -> dist.ProcessGroup:
        """The group over which ``Join`` counts active ranks."""
        return self._core.group.process_group

    def announce(self, *, steps: bool) -> None:
        """Tell ``Join``, once in each iteration, that this rank has not run out of inputs.

        Communicates inside ``Join`` alone, and only if this is the first object there.

        Args:
            steps: the call that ends the iteration is ``step()``; a norm may be taken before it.
        """
        if not self._is_announced:
            Join.notify_join_context(self)
        self._is_announced = self.under_way and not steps

    def end_step(self) -> None:
        """Wait for lazy gathers: ``Join`` ends with DDP's broadcast, which reads all parameters."""
        if self.under_way:
            self._core.sharding.under_way.wait()

    def refuse(self, failure: Exception) -> None:
        """Raise on every rank of ``Join``, where those that joined wait for a step; all active ranks call.

        Does nothing where the optimizer is not given to ``Join``, or no ``Join`` is under way.
        """
        if self.under_way:
            exchange(self._core.group, Status.NOTHING, failure=failure)

    def lendable(self, params: Sequence[Tensor]) -> tuple[Sequence[Tensor], list[Pieces], list[ParamGroup]]:
        """Return what lending gradients of some parameters takes."""
        return params, [self._core.sharding.pieces[param] for param in params], self._core.groups

    def drop_after_shadow(self, params: Sequence[Tensor]) -> None:
        """Have the gradients that a shadowed backward pass gave dropped after the next step shadowed."""
        self._given += params

    @contextmanager
    def borrowing(self) -> Iterator[None]:
        """Have the gradients of other ranks in the body, on a rank that has joined; does not communicate.

        Afterwards those are gone that were not there before. The others are zeros, in place, as they may be
        views of DDP's: they were zeros before, or are old, and the loop drops them before it uses them.
        """
        params, given = self._core.params, set(self._given)
        before = {param for param in params if param.grad is not None and param not in given}
        try:
            yield
        finally:
            self._given = []
            with torch.no_grad():
                for param in {*params, *given}:
                    if param.grad is not None and param in before:
                        param.grad.zero_()
                    else:
                        param.grad = None
