"""Calls that change parameters: prepare, step own rows, gather even after an error; all ranks call.

A rank whose step raises gathers all the same, and its stamp tells the others. On the CPU they raise as the
gathers end, with that rank's number and message: a `RemoteRankError`, or an error of the same class if that
is a usual one. On an accelerator, or with lazy gathers, they raise in a later call.
"""

import weakref
from collections.abc import Callable, Collection, Mapping
from types import TracebackType
from typing import TypeVar

from torch import Tensor

from zero_optim.health.stamps import Call, Options, Replicas, Stamps
from zero_optim.health.unit_stamps import UnitStamps
from zero_optim.plan.option_values import OptionKey
from zero_optim.state.core import Core

T = TypeVar("T")


class _AtEnd:
    """A context that calls ``end`` with the body's error, or None."""

    __slots__ = ("_end",)

    def __init__(self, end: Callable[[BaseException | None], object]) -> None:
        self._end = end

    def __enter__(self) -> None:
        pass

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._end(error)


class Calls:
    """Makes calls, and sends their results to other ranks and replicas."""

    def __init__(self, core: Core) -> None:
        self._core = core
        self._replicas: Replicas | None = None

    def make(self, name: str, work: Callable[[], T], at_end: Callable[[], None] | None = None) -> T:
        """Prepare, change this rank's parameters in ``work``, then gather, and wait as the schedules say.

        ``at_end`` runs before the gather, also after an error.
        """
        self._core.check_attached()
        with self.telling_replicas(), self.whatever_happens(name, self._gather):
            try:
                self.prepare()
                self._core.check_gradients()
                return work()
            finally:
                if at_end is not None:
                    at_end()

    def prepare(self) -> None:
        """Check the parameters before a step, and apply the user's changes."""
        core = self._core
        core.check_weights()
        core.snapshot.changed()
        core.refresh()
        core.check_cuts(core.groups)
        core.follow_state()

    def _gather(self, call: Call) -> None:
        core = self._core
        core.sharding.gather(core.groups, call, frozen_too=core.owned.local.moves_frozen)

    def whatever_happens(self, name: str, end: Callable[[Call], None]) -> _AtEnd:
        """Return a context that calls ``end``, also after an error: the other ranks wait for it."""
        return _AtEnd(lambda error: end(Call(name, self._origins, error, self._replicas)))

    def _origins(self, options: Options) -> tuple[Collection[OptionKey], Collection[OptionKey]]:
        return self._core.owned.local.origins(options)

    # ------------------------------------------------------------------ replicas of a mesh, and units

    def let_go(self) -> None:
        """Forget the replicas."""
        self._replicas = None

    def join_replicas(self, replicas: Replicas) -> None:
        """Send errors of failed steps to the other replicas of a mesh, which hold no optimizer."""
        self._replicas = replicas

    def telling_replicas(self) -> _AtEnd:
        """Return a context that sends an exception, which all ranks here raise, to the other replicas."""
        return _AtEnd(self._tell)

    def _tell(self, error: BaseException | None) -> None:
        if error is not None and self._replicas is not None:
            self._replicas.tell(error)

    def unit_stamps(self, labels: Mapping[Tensor, str]) -> UnitStamps:
        """Return the stamps of units, as `UnitStamps`. No communication. Holds weak references only."""
        reference = weakref.ref(self)

        def call() -> Call:
            calls = reference()
            if calls is None:
                return Call("", lambda _: ((), ()))
            return Call("", calls._origins, replicas=calls._replicas)

        stamps = self._core.sharding.gathers.stamps or Stamps()  # the latter in a group of one
        return UnitStamps(labels, self._core.group, stamps, call)
