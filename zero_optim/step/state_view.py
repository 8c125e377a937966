"""``optimizer.state`` as users read and write it: by parameter, with masters and averages.

Note [Writes to the state]
    Scripts clear, fill, move or replace ``optimizer.state``. If one local optimizer steps all parameters
    themselves, it is the class's dict, else an `OwnedStateView` that writes to it under the leaf. Clearing
    restarts masters and averages from the parameter's value; setting a master sets the parameter, which would
    win at the next step.
"""

from collections import defaultdict
from collections.abc import Callable, ItemsView, Iterator, Mapping, MutableMapping, Sequence, ValuesView
from dataclasses import dataclass
from operator import is_
from typing import Any

from torch import Tensor

from zero_optim.plan.pieces import Pieces, owned_by_text
from zero_optim.step.averages import EMA, WeightAverage
from zero_optim.step.leaves import MASTER, Leaves
from zero_optim.step.local import LocalOptimizer

States = Sequence[MutableMapping[Any, Any]]
_NONE = object()


@dataclass(frozen=True, slots=True)
class _Beside:
    """All masters, or all averages; ``prepare``, called before a write, raises if it is forbidden."""

    name: str
    tensors: Mapping[Tensor, Tensor]
    keeper: Leaves | WeightAverage
    prepare: Callable[[], None]

    def shown(self, param: Tensor) -> Tensor:
        return self.tensors[param].detach()

    def load(self, param: Tensor, entries: Mapping[str, Any]) -> None:
        """Copy an entry in, or restart without one; a tensor from here changes nothing."""
        value, own = entries.get(self.name), self.shown(param)
        if type(value) is Tensor and value.is_set_to(own):
            return
        values = self.keeper.taken_from({param: dict(entries)})
        self.prepare()
        self.keeper.load(values, [param])


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
        state: MutableMapping[Any, Any] | None = None,
        leaf: Any = None,  # noqa: ANN401 - the key in ``state``
        param: Any = None,  # noqa: ANN401 - whose master and average are beside
        beside: Sequence[_Beside] = (),
        owners: Pieces = (),
        names: Sequence[str] = (),
    ) -> None:
        self._state = {None: dict(entries or {})} if state is None else state
        self._key, self._param, self._owners, self._names = leaf, param, owners, names
        self._beside = {each.name: each for each in beside}

    @property
    def _own(self) -> MutableMapping[str, Any]:
        """The class's own entries; a read creates none, as some classes test for any."""
        own: MutableMapping[str, Any] = self._state.get(self._key, {})
        return own

    def __getitem__(self, name: str) -> Any:  # noqa: ANN401 - whatever the class keeps
        if name in self._beside:
            return self._beside[name].shown(self._param)
        if self._owners and name not in self._own:
            raise KeyError(
                f"no {name!r} on this rank: the parameter of shape {tuple(self._param.shape)} is "
                f"{owned_by_text(self._owners)}. Read it there, or by consolidate_state_dict() on all ranks"
            )
        return self._own[name]

    def __setitem__(self, name: str, value: object) -> None:
        if name in self._beside:
            self._beside[name].load(self._param, {name: value})
        else:
            self._state.setdefault(self._key, {})[name] = value

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
        for each in self._beside.values():
            each.load(self._param, {})
        self._own.clear()


class OwnedStateView(_View):
    """The state by parameter, where the class's dict is not all of it; writes reach the optimizers' dicts."""

    def __init__(
        self,
        states: States,
        local: LocalOptimizer,
        leaves: Leaves,
        average: WeightAverage,
        wait: Callable[[], None],
        pieces: Mapping[Tensor, Pieces],
    ) -> None:
        self._states = list(states)
        self._pieces = pieces  # of all parameters
        self._local = local
        self._leaves = leaves
        self._average = average
        self._wait = wait
        self._besides = [
            _Beside(MASTER, leaves.masters, leaves, self._prepare),
            _Beside(EMA, average.averages, average, self._prepare),
        ]

    def shows(self, states: States) -> bool:
        """Return whether this is a view of these same dicts."""
        return len(states) == len(self._states) and all(map(is_, states, self._states))

    def over_new_states(self, state: Mapping[Any, Any]) -> list[dict[Any, Any]]:
        """Return new states from a mapping that replaces this view, masters and averages included."""
        states: list[dict[Any, Any]] = [defaultdict(dict) for _ in self._states]
        view = OwnedStateView(states, self._local, self._leaves, self._average, self._wait, self._pieces)
        for key, value in state.items():
            view[key] = value
        for param in [param for param in view._kept_beside() if param not in state]:
            view._restart(param)
        return states

    def _beside(self, key: object) -> list[_Beside]:
        return [each for each in self._besides if isinstance(key, Tensor) and key in each.tensors]

    def _kept_beside(self) -> dict[Tensor, None]:
        return dict.fromkeys(param for each in self._besides for param in each.tensors)

    def _prepare(self) -> None:
        self._average.check_out()
        self._wait()

    def _restart(self, param: object) -> None:
        for each in self._beside(param):
            each.load(param, {})  # type: ignore[arg-type]

    def _place(self, key: object) -> Any:  # noqa: ANN401 - whatever the class takes
        return self._leaves.separate.get(key, key) if isinstance(key, Tensor) else key

    def _holding(self, place: object) -> list[MutableMapping[Any, Any]]:
        return [state for state in self._states if place in state]

    def _home(self, place: object) -> MutableMapping[Any, Any]:
        holding = self._holding(place)
        return holding[0] if holding else self._states[self._local.number_of(place)]

    def __getitem__(self, key: Any) -> Any:  # noqa: ANN401 - whatever the class keeps
        place, beside = self._place(key), self._beside(key)
        owners = () if key in self._leaves.owned else self._pieces.get(key, ())
        home = self._home(place)
        if not beside and not owners:
            return home[place]
        names = self._leaves.held.names.get(key, ()) if owners else ()
        return OwnedEntries(state=home, leaf=place, param=key, beside=beside, owners=owners, names=names)

    def __setitem__(self, key: Any, value: Any) -> None:  # noqa: ANN401 - whatever the class keeps
        place, beside = self._place(key), self._beside(key)
        if not isinstance(key, Tensor):
            # As a load does, which gives global entries to every optimizer.
            for state in self._holding(place) or self._states:
                state[place] = value
        elif not beside:
            self._home(place)[place] = value
        else:
            if not isinstance(value, Mapping):
                raise TypeError(
                    f"expected the state of a parameter to be a mapping, got {type(value).__name__}"
                )
            entries = dict(value)
            for each in beside:
                each.load(key, entries)
            names = [each.name for each in beside]
            own = {name: entry for name, entry in entries.items() if name not in names}
            if own or self._holding(place):
                self._home(place)[place] = own

    def __delitem__(self, key: Any) -> None:  # noqa: ANN401 - as above
        if key not in self:
            raise KeyError(key)
        self._restart(key)
        place = self._place(key)
        for state in self._holding(place):
            del state[place]

    def __bool__(self) -> bool:
        # DCP fills what is empty: Note [Steps that are none] in `state.views`.
        return any(self._states)

    def __contains__(self, key: object) -> bool:
        return bool(self._holding(self._place(key)) or self._beside(key))

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
            value = {**value, **{each.name: value[each.name].clone() for each in self._beside(key)}}
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
            self._restart(param)
        for state in self._states:
            state.clear()
