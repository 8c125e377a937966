"""The state of what a rank owns, as its users read and write it: by parameter, masters and averages in.

Note [Writes to the state]
    Scripts write to ``optimizer.state``: they clear it, fill it, move it, put another dict in its place.
    Where the local optimizer steps the parameters themselves, users see its own dict. Else they see an
    `OwnedStateView`, which writes to that dict under the leaf of the parameter. The entries of a parameter
    are the class's own dict where there is nothing more to show, else `OwnedEntries`.

    Masters and averages are no entries of that dict. They are always there, so they cannot be taken out. To
    clear the state of a parameter makes them start again from the parameter's value, as a state dict without
    them does when it is loaded. To set one writes its values; with a master, the parameter gets them too, as
    the parameter would count at the next step (Note [Masters and their parameters] in `step.leaves`).
"""

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from zero_optim.step.averages import EMA, WeightAverage
from zero_optim.step.leaves import MASTER, Leaves
from zero_optim.step.local import LocalOptimizer

States = Sequence[MutableMapping[Any, Any]]
_NONE = object()


@dataclass(frozen=True, slots=True)
class _Beside:
    """An entry that is kept beside the class's own: all masters, or all averages.

    Args:
        name: of the entry.
        tensors: parameter -> what is kept of it.
        keeper: keeps them.
        prepare: called before they are written to; raises if they must not be.
    """

    name: str
    tensors: Mapping[Tensor, Tensor]
    keeper: Leaves | WeightAverage
    prepare: Callable[[], None]

    def shown(self, param: Tensor) -> Tensor:
        """Give what users see: the tensor itself, without its connection to autograd."""
        return self.tensors[param].detach()

    def load(self, param: Tensor, entries: Mapping[str, Any]) -> None:
        """Take over a parameter's entry, or start again without one; entries it gave itself change nothing.

        Raises:
            StateMismatchError: it does not have the parameter's shape, or is no dense tensor.
            RuntimeError: the averages stand in the model.
        """
        given, own = entries.get(self.name), self.shown(param)
        if type(given) is Tensor and given.is_set_to(own):
            return
        taken = self.keeper.taken_from({param: dict(entries)})
        self.prepare()
        self.keeper.load(taken, [param])


class OwnedEntries(MutableMapping[str, Any]):
    """The entries of one parameter: the class's own as they are now, then the master and the average.

    Made of some mapping, as tools do that rebuild what they are given, it is just a mapping with these items.
    """

    def __init__(self, entries: Mapping[str, Any] | None = None) -> None:
        self._state: MutableMapping[Any, Any] = {None: dict(entries or {})}
        self._key: Any = None
        self._beside: dict[str, _Beside] = {}
        self._param: Any = None

    @classmethod
    def of(
        cls, state: MutableMapping[Any, Any], leaf: Tensor, param: Tensor, beside: Sequence[_Beside]
    ) -> "OwnedEntries":
        """Show the entries that a state has for a leaf, and what is kept of its parameter beside them."""
        made = cls()
        made._state, made._key, made._param = state, leaf, param
        made._beside = {kept.name: kept for kept in beside}
        return made

    @property
    def _own(self) -> MutableMapping[str, Any]:
        """The class's own entries. Reading makes none: some classes ask whether a parameter has any."""
        found: MutableMapping[str, Any] = self._state.get(self._key, {})
        return found

    def __getitem__(self, name: str) -> Any:  # noqa: ANN401 - whatever the class keeps
        return self._beside[name].shown(self._param) if name in self._beside else self._own[name]

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
        return iter([*(name for name in self._own if name not in self._beside), *self._beside])

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def clear(self) -> None:
        """Forget the class's own entries; the master and the average start again."""
        for kept in self._beside.values():
            kept.load(self._param, {})
        self._own.clear()

    def copy(self) -> dict[str, Any]:
        """Copy it, as a dict has a method for: a dict with the same values."""
        return dict(self)

    def __reduce__(self) -> tuple[type[dict[str, Any]], tuple[dict[str, Any]]]:
        """Copy and pickle as a dict: the copy belongs to no optimizer."""
        return dict, (dict(self),)

    def __repr__(self) -> str:
        return repr(dict(self))


class OwnedStateView(MutableMapping[Any, Any]):
    """The state by parameter where the local optimizer's own dict is not all; writes go through to it.

    Like ``torch.optim``'s dict, it makes empty entries for a parameter that is asked for and has none.

    Args:
        states: the state of each local optimizer: leaf -> entries; global entries have keys of their own.
        local: tells which of them a leaf belongs to.
        leaves: what is stepped for the parameters.
        average: averages kept.
        wait: waits until nothing reads the parameters any more, called before one is written to.
    """

    def __init__(
        self,
        states: States,
        local: LocalOptimizer,
        leaves: Leaves,
        average: WeightAverage,
        wait: Callable[[], None],
    ) -> None:
        self._states = list(states)
        self._local = local
        self._leaves = leaves
        self._average = average
        self._wait = wait

    def shows(self, states: States) -> bool:
        """Whether it shows these very states."""
        return len(states) == len(self._states) and all(
            a is b for a, b in zip(states, self._states, strict=True)
        )

    def over_new_states(self, given: Mapping[Any, Any]) -> list[dict[Any, Any]]:
        """Make states of what a user put in the place of this one.

        Masters and averages take over what is among it, or start again.

        Args:
            given: parameter -> entries, and global entries.

        Raises:
            TypeError: the entries of a parameter are no mapping; or what `__setitem__` raises.
        """
        made: list[dict[Any, Any]] = [defaultdict(dict) for _ in self._states]
        view = OwnedStateView(made, self._local, self._leaves, self._average, self._wait)
        for key, value in given.items():
            view[key] = value
        for param in [param for param in view._kept_beside() if param not in given]:
            view._restart(param)
        return made

    def _besides(self) -> list[_Beside]:
        return [
            _Beside(MASTER, self._leaves.masters, self._leaves, self._prepare),
            _Beside(EMA, self._average.averages, self._average, self._prepare),
        ]

    def _beside(self, key: object) -> list[_Beside]:
        return [kept for kept in self._besides() if isinstance(key, Tensor) and key in kept.tensors]

    def _kept_beside(self) -> dict[Tensor, None]:
        return dict.fromkeys([*self._leaves.masters, *self._average.averages])

    def _prepare(self) -> None:
        self._average.check_out()
        self._wait()

    def _restart(self, param: object) -> None:
        for kept in self._beside(param):
            kept.load(param, {})  # type: ignore[arg-type]

    def _place(self, key: object) -> Any:  # noqa: ANN401 - whatever the class takes
        return self._leaves.separate.get(key, key) if isinstance(key, Tensor) else key

    def _holding(self, place: object) -> list[MutableMapping[Any, Any]]:
        return [state for state in self._states if place in state]

    def _home(self, place: object) -> MutableMapping[Any, Any]:
        """Find the state that a leaf or a key of the class belongs to."""
        number = self._local.number_of(place) if isinstance(place, Tensor) else 0
        return next(iter(self._holding(place)), self._states[number])

    def __getitem__(self, key: Any) -> Any:  # noqa: ANN401 - whatever the class keeps
        place, beside = self._place(key), self._beside(key)
        home = self._home(place)
        return OwnedEntries.of(home, place, key, beside) if beside else home[place]

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
            for kept in beside:
                kept.load(key, entries)
            names = [kept.name for kept in beside]
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

    def __contains__(self, key: object) -> bool:
        return bool(self._holding(self._place(key)) or self._beside(key))

    def __iter__(self) -> Iterator[Any]:
        param_of = {leaf: param for param, leaf in self._leaves.separate.items()}
        keys = [key for state in self._states for key in state]
        shown = [param_of.get(key, key) if isinstance(key, Tensor) else key for key in keys]
        return iter(list(dict.fromkeys([*shown, *self._kept_beside()])))

    def __len__(self) -> int:
        return sum(1 for _ in self)

    # What MutableMapping makes of the methods above would find a value for every key, and never be empty.

    def get(self, key: Any, default: Any = None) -> Any:  # noqa: ANN401 - as above
        """Give the entries of a parameter, or ``default`` without making any."""
        if key not in self:
            return default
        return self[key]

    def setdefault(self, key: Any, default: Any = None) -> Any:  # noqa: ANN401 - as above
        """Give the entries of a parameter, after setting them if there are none."""
        if key not in self:
            self[key] = default
        return self[key]

    def pop(self, key: Any, default: Any = _NONE) -> Any:  # noqa: ANN401 - as above
        """Take out what is there under a key, copied as far as it starts again."""
        if key not in self and default is not _NONE:
            return default
        if key not in self:
            raise KeyError(key)
        value = self[key]
        if isinstance(value, OwnedEntries):
            value = {**value, **{kept.name: value[kept.name].clone() for kept in self._beside(key)}}
        del self[key]
        return value

    def popitem(self) -> tuple[Any, Any]:
        """Take out the last item that can be, which is none that has a master or an average alone."""
        for key in reversed(list(self)):
            if self._holding(self._place(key)):
                return key, self.pop(key)
        raise KeyError("popitem(): the state has no entries but masters and averages, which stay")

    def clear(self) -> None:
        """Forget all entries of the classes; masters and averages start again."""
        for param in self._kept_beside():
            self._restart(param)
        for state in self._states:
            state.clear()

    def copy(self) -> dict[Any, Any]:
        """Copy it, as a dict has a method for: a dict with the same values."""
        return dict(self)

    def __repr__(self) -> str:
        return repr(dict(self))
