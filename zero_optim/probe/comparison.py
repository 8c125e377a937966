"""Compare a trial of an optimizer class with the first one, and say in words what differs; for `probe`."""

from collections.abc import Callable, Mapping
from typing import TypeAlias

import numpy as np
import torch
from torch import Tensor

from zero_optim.probe.acceptance import first_line_of
from zero_optim.probe.sameness import same, same_pieces
from zero_optim.probe.subject import OptimizerUnderTest, from_hashable, to_hashable
from zero_optim.probe.trials import TrialRecord, TrialRun, start, step_whole

StepRun: TypeAlias = Callable[[TrialRun, int, Mapping[int, Tensor | None]], None]


def difference(
    subject: OptimizerUnderTest,
    made: TrialRecord,
    how: str,
    begin: Callable[[], TrialRun],
    step_run: StepRun = step_whole,
    *,
    with_state: bool = True,
) -> str | None:
    """Repeat a trial with the recorded gradients, and say what differs from the record; None if equal.

    ``with_state=False`` leaves out the state of parameters, and what belongs to none.
    """
    try:
        run = begin()
        differs = _first_difference(made, run, step_run)
        if differs is None and with_state:
            differs = state_difference(made, run)
        if differs is None:
            differs = _group_difference(subject, made, run)
    except Exception as error:  # noqa: BLE001 - the first trial did not raise, so this is a difference
        return f"{how}, it raises {first_line_of(error)}"
    return None if differs is None else f"{how}, {differs}"


def _first_difference(made: TrialRecord, run: TrialRun, step_run: StepRun) -> str | None:
    for step, gradients in enumerate(made.gradients):
        step_run(run, step, {index: gradients[index] for index in run.leaves})
        for index in run.leaves:
            got, expected = run.bits(index), made.values[step + 1][index]
            if got != expected:
                how_much = _how_much(got, expected, made.feed.dtype)
                return f"{_param_text(made, index)} differed after step {step + 1}, {how_much}"
    return None


def _param_text(made: TrialRecord, index: int) -> str:
    return f"the parameter of shape {made.feed.shape(index)}"


def _how_much(got: bytes, expected: bytes, dtype: torch.dtype) -> str:
    """Say how large a difference is, to tell rounding from another algorithm."""
    a, b = (torch.frombuffer(bytearray(bits), dtype=dtype).double().numpy() for bits in (got, expected))
    with np.errstate(all="ignore"):
        apart = float(np.nanmax(np.abs(a - b) / np.maximum(np.abs(b), 1e-30), initial=0.0))
    return f"by {apart:.1e} of its value at most"


def state_difference(made: TrialRecord, run: TrialRun) -> str | None:
    """Compare the final state of each parameter, and the state that belongs to no parameter."""
    for index in run.leaves:
        (whole,) = made.run.leaves[index]
        if not same_pieces(made.run.state_of(index)[0], run.state_of(index), whole.shape):
            return f"the state of {_param_text(made, index)} differed"
    if same(made.run.global_state(), run.global_state()):
        return None
    return "the state that belongs to no parameter differed"


def _group_difference(subject: OptimizerUnderTest, made: TrialRecord, run: TrialRun) -> str | None:
    """Compare the final group entries. Caches, which may hold anything (RAdam's buffer), do not count.

    An entry is a cache if the class gives equal results with this trial's entry before every step.
    """
    differing = []
    both = zip(made.run.optimizer.param_groups, run.optimizer.param_groups, strict=True)
    for number, (mine, other) in enumerate(both):
        keys = sorted((mine.keys() | other.keys()) - {"params"}, key=str)
        differing += [
            (number, key, other.get(key)) for key in keys if not same(mine.get(key), other.get(key))
        ]
    if not differing:
        return None
    entries = [(number, key, to_hashable(value)) for number, key, value in differing]

    def step_run(again: TrialRun, step: int, gradients: Mapping[int, Tensor | None]) -> None:
        for number, key, value in entries:
            again.optimizer.param_groups[number][key] = from_hashable(value)
        step_whole(again, step, gradients)

    again = start(subject, made.feed, made.starts)
    if _first_difference(made, again, step_run) is None and state_difference(made, again) is None:
        return None
    return f"the group's entry '{differing[0][1]}' differed"
