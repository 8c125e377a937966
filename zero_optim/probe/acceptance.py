"""Search for parameters and gradients that an optimizer class accepts, or what else it needs."""

import inspect
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from zero_optim.errors import message_of
from zero_optim.probe.subject import OptimizerUnderTest
from zero_optim.probe.traits import NEEDS_CLOSURE, NEEDS_SECOND_ORDER
from zero_optim.probe.trials import Feed, TrialRecord, TrialRun, record, start, starts_of

_MIXED = ((9, 13), (67,), (40,), (2, 3, 3, 3), (9, 13), (12, 5))
_NO_KERNELS = ((9, 13), (67,), (40,), (6, 11), (9, 13), (12, 5))
_MATRICES = ((9, 13), (6, 11), (8, 5), (8, 8), (9, 13), (12, 5))
_VECTORS = ((117,), (67,), (40,), (54,), (117,), (60,))

# Tried in this order; the first accepted one is used.
_FEEDS = (
    Feed(_MIXED),
    Feed(_MIXED, gaps=False),
    Feed(_NO_KERNELS),
    Feed(_MATRICES),
    Feed(_VECTORS),
    Feed(_MATRICES, sparse=True),
    Feed(_MIXED, num_groups=1),
    Feed(_MATRICES, num_groups=1),
)


def first_accepted(subject: OptimizerUnderTest) -> tuple[OptimizerUnderTest, TrialRecord] | str:
    """Record the first feed that the class accepts, all parameters together, or return why there is none."""
    errors: list[str] = []
    candidates = subject.candidates()
    for candidate in candidates:
        for feed in _FEEDS:
            try:
                return candidate, record(candidate, feed.with_groups(candidate))
            except Exception as error:  # noqa: BLE001 - the user's class may raise anything
                errors.append(first_line_of(error))
    return _why_untried(candidates[-1], errors)


def _why_untried(subject: OptimizerUnderTest, errors: Sequence[str]) -> str:
    for feed in (_FEEDS[0], replace(_FEEDS[0], num_groups=1), _FEEDS[3]):
        for step, needs in ((_step_with_closure, NEEDS_CLOSURE), (_step_with_graph, NEEDS_SECOND_ORDER)):
            try:
                step(start(subject, feed, starts_of(feed)))
            except Exception as error:  # noqa: BLE001
                errors = [*errors, first_line_of(error)]
            else:
                return needs
    asked = _needed_by_step(subject)
    if asked:
        return f"its step() needs {asked}, which only your own call of step() gives"
    return f"on small CPU tensors it raises {errors[0]}"


def _needed_by_step(subject: OptimizerUnderTest) -> str:
    try:
        step = start(subject, _FEEDS[0], starts_of(_FEEDS[0])).optimizer.step
        parameters = inspect.signature(step).parameters.values()
    except Exception:  # noqa: BLE001 - the reason is not an argument of step()
        return ""
    extra = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return ", ".join(p.name for p in parameters if p.default is p.empty and p.kind not in extra)


def _step_with_closure(run: TrialRun) -> None:
    leaves = [leaf for pieces in run.leaves.values() for leaf in pieces]

    def closure() -> Tensor:
        for leaf in leaves:
            leaf.grad = leaf.detach().clone()
        return torch.ones(())

    _call(run.optimizer, closure)


def _step_with_graph(run: TrialRun) -> None:
    leaves = [leaf for pieces in run.leaves.values() for leaf in pieces]
    loss = torch.stack([leaf.pow(4).sum() for leaf in leaves]).sum()
    for leaf, grad in zip(leaves, torch.autograd.grad(loss, leaves, create_graph=True), strict=True):
        leaf.grad = grad
    run.optimizer.step()
    for leaf in leaves:
        leaf.grad = None  # breaks the cycle through the graph


def _call(optimizer: Optimizer, closure: Callable[[], Any]) -> None:
    if "closure" not in inspect.signature(optimizer.step).parameters:
        raise TypeError("step() takes no closure")
    optimizer.step(closure=closure)  # by name: another argument may come before it


def first_line_of(error: Exception) -> str:
    """Return an error's name and first line."""
    first_line = (message_of(error).splitlines() or [""])[0]
    return f"{type(error).__name__}: {first_line}"
