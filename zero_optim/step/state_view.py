"""``optimizer.state`` as users read and write it: by parameter, with masters and averages.

Note [Writes to the state]
    Scripts clear, fill, move or replace ``optimizer.state``. It is an `OwnedStateView`, which writes to the
    classes' dicts under the leaf. Clearing restarts masters and averages from the parameter's value; setting
    a master sets the parameter, which would win at the next step.
"""

from collections import defaultdict
from collections.abc import Callable, ItemsView, Iterator, Mapping, MutableMapping, Sequence, ValuesView
from operator import is_
from typing import Any

from torch import Tensor

from zero_optim.plan.pieces import Pieces, owned_by_text
from zero_optim.step.averages import EMA, WeightAverage
from zero_optim.step.leaves import MASTER, Leaves
from zero_optim.step.local import LocalStates

States = Sequence[MutableMapping[Any, Any]]
_NONE = object()


class _View(MutableMapping[Any, Any]):
    def __len__(self) -> int:
        return sum(1 for _ in self)

    def copy(self) -> dict[Any, Any]:
        """Return a dict with the same values."""
        return dict(self.items())

    def __repr__(self) -> str:
        return repr(self.copy())

    def __reduce__(self) -> tuple[type[dict[Any, Any]], tuple[dict[Any, Any]]]:
        """Copy and pickle as a dict of no optimizer."""
        return dict, (self.copy(),)


class OwnedEntries(_View):
    """One parameter's class entries, then master and average; of other ``owners`` none; or just a mapping.

    ``names``: of entries that owners hold of a DTensor. DCP asks for them, to load a flattened state.
    """

    def __init__(
        self,
        entries: Mapping[str, Any] | None = None,
        *,
        view: "OwnedStateView | None" = None,  # of which these are
        param: Any = None,  # noqa: ANN401 - the key in it
        owners: Pieces = (),
        names: Sequence[str] = (),
    ) -> None:
        self._view, self._param, self._owners, self._names = view, param, owners, names
        alone: tuple[Any, MutableMapping[Any, Any]] = None, {None: dict(entries or {})}
        self._place, self._state = alone if view is None else view.home(param)

    @property
    def _beside(self) -> dict[str, Tensor]:
        return {} if self._view is None else self._view.beside(self._param)

    @property
    def _own(self) -> MutableMapping[str, Any]:
        """The class's own entries; a read creates none, as some classes test for any."""
        own: MutableMapping[str, Any] = self._state.get(self._place, {})
        return own

    def __getitem__(self, name: str) -> Any:  # noqa: ANN401 - whatever the class keeps
        if name in self._beside:
            return self._beside[name]
        if self._owners and name not in self._own:
            raise KeyError(
                f"no {name!r} on this rank: the parameter of shape {tuple(self._param.shape)} is "
                f"{owned_by_text(self._owners)}. Read it there, or by consolidate_state_dict() on all ranks"
            )
        return self._own[name]

    def __setitem__(self, name: str, value: object) -> None:
        if self._view is not None and name in self._beside:
            self._view.set_beside(name, self._param, {name: value})
        else:
            self._state.setdefault(self._place, {})[name] = value

    def __delitem__(self, name: str) -> None:
        if name in self._beside:
            raise TypeError(
                f"'{name}' is kept as long as the optimizer (master_dtype, ema_decay) and cannot be taken "
                "out of the state of a parameter: clear the whole state of the parameter, and it starts "
                "again from the parameter's value"
            )
        del self._own[name]

    def __iter__(self) -> Iterator[str]:
        own = self._own or self._names
        return iter([*(name for name in own if name not in self._beside), *self._beside])

    def items(self) -> ItemsView[str, Any]:
        """Return what is here, without ``names`` of what is elsewhere."""
        return {name: self[name] for name in self if name in self._own or name in self._beside}.items()

    def values(self) -> ValuesView[Any]:
        """Return what is here."""
        return self.copy().values()

    def clear(self) -> None:
        """Drop the class's entries; the master and the average restart."""
        if self._view is not None:
            self._view.restart(self._param)
        self._own.clear()


class OwnedStateView(_View):
    """The state by parameter; writes reach the optimizers' dicts."""

    def __init__(
        self,
        states: States,
        of_local: LocalStates,
        leaves: Leaves,
        average: WeightAverage,
        wait: Callable[[], None],
        pieces: Mapping[Tensor, Pieces],
    ) -> None:
        self._states = list(states)
        self._pieces = pieces  # of all parameters
        self._of_local = of_local  # where each optimizer is found
        self._leaves = leaves
        self._average = average
        self._wait = wait
        self._besides: dict[str, tuple[Mapping[Tensor, Tensor], Leaves | WeightAverage]] = {
            MASTER: (leaves.masters, leaves),
            EMA: (average.averages, average),
        }

    def shows(self, states: States) -> bool:
        """Return whether this is a view of these same dicts."""
        return len(states) == len(self._states) and all(map(is_, states, self._states))

    def over_new_states(self, state: Mapping[Any, Any]) -> list[dict[Any, Any]]:
        """Return new states from a mapping that replaces this view, masters and averages included."""
        states: list[dict[Any, Any]] = [defaultdict(dict) for _ in self._states]
        view = OwnedStateView(states, self._of_local, self._leaves, self._average, self._wait, self._pieces)
        for key, value in state.items():
            view[key] = value
        for param in [param for param in view._kept_beside() if param not in state]:
            view.restart(param)
        return states

    def beside(self, key: object) -> dict[str, Tensor]:
        """Return a parameter's master and average, by name, as far as there are any."""
        if not isinstance(key, Tensor):
            return {}
        return {name: each[key].detach() for name, (each, _) in self._besides.items() if key in each}

    def _kept_beside(self) -> dict[Tensor, None]:
        return dict.fromkeys(param for tensors, _ in self._besides.values() for param in tensors)

    def set_beside(self, name: str, param: Tensor, entries: Mapping[str, Any]) -> None:
        """Copy a master or average in, or restart it without one; a tensor from here changes nothing."""
        (tensors, keeper), value = self._besides[name], entries.get(name)
        if type(value) is Tensor and value.is_set_to(tensors[param].detach()):
            return
        values = keeper.taken_from({param: dict(entries)})
        self._average.check_out()
        self._wait()
        keeper.load(values, [param])

    def restart(self, param: Any) -> None:  # noqa: ANN401 - whatever is a key
        """Restart a parameter's master and average, if there are any."""
        for name in self.beside(param):
            self.set_beside(name, param, {})

    def _place(self, key: object) -> Any:  # noqa: ANN401 - whatever the class takes
        return self._leaves.separate.get(key, key) if isinstance(key, Tensor) else key

    def _holding(self, place: object) -> list[MutableMapping[Any, Any]]:
        return [state for state in self._states if place in state]

    def home(self, key: object) -> tuple[Any, MutableMapping[Any, Any]]:
        """Return the key in a class's state, and the state that has it or would."""
        place = self._place(key)
        holding = self._holding(place)
        return place, holding[0] if holding else self._states[self._of_local.number_of(place)]

    def __getitem__(self, key: Any) -> Any:  # noqa: ANN401 - whatever the class keeps
        owners = () if key in self._leaves.owned else self._pieces.get(key, ())
        if not owners and not self.beside(key):
            place, home = self.home(key)
            return home[place]
        names = self._leaves.held.names.get(key, ()) if owners else ()
        return OwnedEntries(view=self, param=key, owners=owners, names=names)

    def __setitem__(self, key: Any, value: Any) -> None:  # noqa: ANN401 - whatever the class keeps
        beside, (place, home) = self.beside(key), self.home(key)
        if not isinstance(key, Tensor):
            # As a load does, which gives global entries to every optimizer.
            for state in self._holding(place) or self._states:
                state[place] = value
        elif not beside:
            home[place] = value
        else:
            if not isinstance(value, Mapping):
                raise TypeError(
                    f"expected the state of a parameter to be a mapping, got {type(value).__name__}"
                )
            entries = dict(value)
            for name in beside:
                self.set_beside(name, key, entries)
            own = {name: entry for name, entry in entries.items() if name not in beside}
            if own or place in home:
                home[place] = own

    def __delitem__(self, key: Any) -> None:  # noqa: ANN401 - as above
        if key not in self:
            raise KeyError(key)
        self.restart(key)
        place = self._place(key)
        for state in self._holding(place):
            del state[place]

    def __bool__(self) -> bool:
        # DCP fills what is empty: Note [Steps that are none] in `state.views`.
        return any(self._states)

    def __contains__(self, key: object) -> bool:
        return bool(self._holding(self._place(key)) or self.beside(key))

    def __iter__(self) -> Iterator[Any]:
        param_of = {leaf: param for param, leaf in self._leaves.separate.items()}
        keys = [key for state in self._states for key in state]
        shown = [param_of.get(key, key) if isinstance(key, Tensor) else key for key in keys]
        return iter(list(dict.fromkeys([*shown, *self._kept_beside()])))

    # MutableMapping's own versions would find a value for every key, and never be empty.

    def get(self, key: Any, default: Any = None) -> Any:  # noqa: ANN401 - as above
        """Return a parameter's entries, or ``default``; creates none."""
        if key not in self:
            return default
        return self[key]

    def setdefault(self, key: Any, default: Any = None) -> Any:  # noqa: ANN401 - as above
        """Return a parameter's entries, after setting them if there are none."""
        if key not in self:
            self[key] = default
        return self[key]

    def pop(self, key: Any, default: Any = _NONE) -> Any:  # noqa: ANN401 - as above
        """Remove and return an item; copies the tensors that restart."""
        if key not in self:
            if default is not _NONE:
                return default
            raise KeyError(key)
        value = self[key]
        if isinstance(value, OwnedEntries):
            value = {**value, **{name: own.clone() for name, own in self.beside(key).items()}}
        del self[key]
        return value

    def popitem(self) -> tuple[Any, Any]:
        """Remove and return the last item with more than a master or average."""
        for key in reversed(list(self)):
            if self._holding(self._place(key)):
                return key, self.pop(key)
        raise KeyError("popitem(): the state has no entries but masters and averages, which stay")

    def clear(self) -> None:
        """Drop all entries of the classes; masters and averages restart."""
        for param in self._kept_beside():
            self.restart(param)
        for state in self._states:
            state.clear()
