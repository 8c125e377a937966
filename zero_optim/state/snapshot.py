"""What a rank knows of the whole state, and of which moment that is."""

from typing import Any

from zero_optim.errors import NotConsolidatedError

WholeState = dict[Any, Any]


class Snapshot:
    """What this rank knows of the whole state; see Note [Whole state] in `zero_optim.state.dicts`.

    Attributes:
        untouched: nothing has changed the state since the optimizer was built.
        age: how often it was changed since: steps, loads and the like, which all ranks do together.
        steps: calls of step() on this rank, skipped ones too; after going back as many less.
        is_torn: a step was given up half way: some parameters have taken it.
        saved: the token of the last checkpoint that was saved or loaded, and the age of its state.
    """

    def __init__(self, age: int = 0, steps: int = 0) -> None:
        self.untouched = age == 0
        self.age = age
        self.steps = steps
        self.is_torn = False
        self.saved: tuple[str, int] | None = None
        self._whole: WholeState | None = None
        self._was_held = False

    def note_saved(self, token: str, age: int) -> None:
        """Take note that the state of some age is in a checkpoint."""
        self.saved = (token, age)

    def was_saved_as(self, token: str) -> bool:
        """Whether what this rank holds, unless it is new, is what a checkpoint has."""
        return not self.is_torn and (self.age == 0 or self.saved == (token, self.age))

    def hold(self, whole: WholeState) -> None:
        """Keep a whole state that is the current one."""
        self._whole, self._was_held = whole, True

    def changed(self) -> None:
        """Note that the state has changed, and drop the whole state."""
        self.age += 1
        self.drop()

    def drop(self) -> None:
        """Drop the whole state, and be no longer sure of it."""
        self.untouched, self._whole = False, None

    def get(self, rank: int) -> WholeState:
        """Return the whole state, in new containers; raises if it is not on this rank, or an old one."""
        if self._whole is None:
            call = f"call consolidate_state_dict(to={rank}) on all ranks"
            if self._was_held:
                raise NotConsolidatedError(
                    "the optimizer was stepped, loaded or given a group after the state was consolidated: "
                    f"{call} again"
                )
            raise NotConsolidatedError(f"rank {rank} holds only its own part of the state: {call} first")
        return {key: dict(value) if isinstance(value, dict) else value for key, value in self._whole.items()}
