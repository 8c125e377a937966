"""A rank's knowledge of the whole state."""

from typing import Any

from zero_optim.errors import NotConsolidatedError

WholeState = dict[Any, Any]


class Snapshot:
    """This rank's whole state, if current, and its age: Note [Whole state] in `zero_optim.state.dicts`.

    Attributes:
        untouched: nothing has changed the state since the optimizer was built.
        age: how often it was changed since: steps, loads and the like, which all ranks do together.
        steps: calls of step() on this rank, also skipped ones; going back restores the older count.
        is_torn: a step broke off half way: some parameters have taken it.
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
        """Note that a checkpoint has the state of some age."""
        self.saved = (token, age)

    def was_saved_as(self, token: str) -> bool:
        """Whether a checkpoint has this rank's state, or the rank is new."""
        return not self.is_torn and (self.age == 0 or self.saved == (token, self.age))

    def hold(self, whole: WholeState) -> None:
        """Keep the current whole state."""
        self._whole, self._was_held = whole, True

    def changed(self) -> None:
        """Note a change of the state, and drop the whole state."""
        self.age += 1
        self.drop()

    def drop(self) -> None:
        """Drop the whole state, which is no longer known."""
        self.untouched, self._whole = False, None

    def get(self, rank: int) -> WholeState:
        """Return the whole state, in new containers; NotConsolidatedError if absent or outdated."""
        if self._whole is None:
            call = f"call consolidate_state_dict(to={rank}) on all ranks"
            if self._was_held:
                raise NotConsolidatedError(
                    "the optimizer was stepped, loaded or given a group after the state was consolidated: "
                    f"{call} again"
                )
            raise NotConsolidatedError(f"rank {rank} holds only its own part of the state: {call} first")
        return {key: dict(value) if isinstance(value, dict) else value for key, value in self._whole.items()}
