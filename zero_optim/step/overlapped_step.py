"""The state of a step that is taken while the backward pass still runs, and what it refuses.

Note [Phases of an overlapped step]
    The first bucket of a backward pass makes an `OverlappedStep`. It is in ``Phase.BACKWARD`` until the
    pass ends, then in ``Phase.WAITING`` until ``step()`` drops it, or the next backward pass replaces it.
    If that pass finds it in ``Phase.BACKWARD``, the pass before broke off.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum

from torch import Tensor

from zero_optim.plan.groups import ParamGroup, params_of


class Phase(Enum):
    """Where an overlapped step stands."""

    BACKWARD = "the backward pass runs, and buckets are stepped"
    WAITING = "the backward pass has ended, and step() has not been called"


@dataclass(slots=True, eq=False)
class OverlappedStep:
    """One step that is taken during a backward pass. See Note [Phases of an overlapped step].

    Attributes:
        num_passes: backward passes that were reduced since ``step()``, this one included.
        lends: ranks may have joined, see `zero_optim.step.join`: ``step()`` lends them gradients for what is
            left to it.
        phase: where it stands.
        has_failed: a backward pass raised, so that some parameters may not have been stepped.
        stepped: parameters that were stepped, whoever owns them.
        seen: gradients as they were when the pass ended: parameter, identity, version.
        told: what the stamps of the step before have told, to be raised when the pass has ended.
    """

    num_passes: int
    lends: bool
    phase: Phase = Phase.BACKWARD
    has_failed: bool = False
    stepped: dict[Tensor, None] = field(default_factory=dict)
    seen: list[tuple[Tensor, int, int]] = field(default_factory=list)
    told: Exception | None = None

    def end_backward(self, *, is_final: bool, failed: bool) -> None:
        """Note that the backward pass has ended.

        Args:
            is_final: gradients are those that ``step()`` would find; a change from now on comes too late.
            failed: the pass raises, here.
        """
        self.phase = Phase.WAITING
        self.num_passes -= failed
        self.has_failed |= failed
        if is_final:
            self.seen = [(p, id(p.grad), p.grad._version) for p in self.stepped if p.grad is not None]

    def check_asked(self, late: str) -> None:
        """Refuse what came too late for this step (``late`` names it), several passes, changed gradients."""
        if late:
            raise RuntimeError(
                f"the step was taken during the backward pass, too early for {late}: leave it out, or "
                "leave out zero_step (overlap_with_ddp). bfloat16 needs no GradScaler"
            )
        self.check_passes()
        self.check_gradients()

    def fail(self) -> None:
        """Note that the backward pass raises after all, since another rank failed in it."""
        self.num_passes -= not self.has_failed
        self.has_failed = True

    def check_passes(self) -> None:
        """Refuse a second backward pass before ``step()``."""
        if self.num_passes > 1:
            raise RuntimeError(
                f"{self.num_passes} backward passes were reduced before step(), and each was stepped with "
                "the gradients added up so far. Put all but the last backward pass of a step under no_sync()"
            )

    def check_gradients(self) -> None:
        """Refuse gradients that were changed after they were used, or some that are gone.

        If all are gone, that is ``zero_grad()``.
        """
        num_gone = sum(param.grad is None for param, _, _ in self.seen)
        is_changed = any(
            param.grad is not None and (id(param.grad) != identity or param.grad._version != version)
            for param, identity, version in self.seen
        )
        if is_changed or 0 < num_gone < len(self.seen):
            what = "changed, clipped or unscaled perhaps," if is_changed else "taken from some parameters"
            raise RuntimeError(
                f"gradients were {what} after the step had been taken with them during the backward pass. "
                "That cannot have an effect: leave it out, or leave out zero_step (overlap_with_ddp)"
            )

    def rest(self, groups: Sequence[ParamGroup]) -> list[Tensor]:
        """List what ``step()`` has yet to step: what trains or has a gradient; the same on every rank."""
        left = [param for param in params_of(groups) if param not in self.stepped]
        return [param for param in left if param.requires_grad or param.grad is not None]
