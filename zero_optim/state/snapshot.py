"""This rank's whole state, brought to one place, and the age of its part."""

from copy import copy
from typing import Any

from zero_optim.errors import NotConsolidatedError


class Snapshot:
    """This rank's whole state, if current: Note [Whole state]. ``age`` is equal on all ranks, not steps."""

    def __init__(self, age: int = 0) -> None:
        self.untouched = age == 0
        self.age = age
        self.steps = 0
        self.is_torn = False
        self._whole: dict[Any, Any] | None = None
        self._was_held = False
        self._was_new = False

    def hold(self, whole: dict[Any, Any]) -> None:
        """Keep the current whole state."""
        self._whole, self._was_held = whole, True

    def at(self, age: int, steps: int) -> "Snapshot":
        """Return it for state of some age; of another age, or of none, it has no whole state."""
        snapshot = copy(self) if age and age == self.age else Snapshot(age)
        snapshot.steps = steps
        return snapshot

    def count_step(self) -> None:
        """Count a call of ``step()``."""
        self.steps += 1

    def tear(self) -> None:
        """Record that a step broke off, perhaps before any: some parameters have taken it, others not."""
        self.is_torn = self.age > 0

    def changed(self, *, is_new: bool = False) -> None:
        """Note a change of the state, and drop the whole state; not if a new optimizer stays new."""
        if is_new and self.untouched:
            return
        self.age += 1
        self.drop()

    def drop(self, is_new: bool = False) -> None:
        """Drop the whole state, which is no longer known; of a new optimizer: Note [Steps that are none]."""
        self.untouched, self._whole, self._was_new = False, None, is_new

    @property
    def may_be_collected(self) -> bool:
        """Whether the whole state is absent, and not because the optimizer is new."""
        return self._whole is None and not self._was_new

    def get(self, rank: int) -> dict[Any, Any]:
        """Return the whole state, in new containers; NotConsolidatedError if absent or outdated."""
        if self._whole is None:
            call = f"call consolidate_state_dict(to={rank}) on all ranks"
            if self._was_new:
                raise NotConsolidatedError(
                    "a new optimizer has no state that torch.distributed.checkpoint could fill: to load, "
                    "call set_optimizer_state_dict with the whole state on every rank and no options, or "
                    f"dcp.load with zero_optim.checkpoint.OptimizerState; to save, {call} first"
                )
            if self._was_held:
                raise NotConsolidatedError(
                    "the optimizer was stepped, loaded or given a group after the state was consolidated: "
                    f"{call} again"
                )
            raise NotConsolidatedError(
                f"the state is on its owners, and rank {rank} has not collected it: {call} first. For "
                "Accelerate and others, which ask for it themselves, zero_optim.integrations has classes and "
                "callbacks that do"
            )
        return {key: dict(value) if isinstance(value, dict) else value for key, value in self._whole.items()}
