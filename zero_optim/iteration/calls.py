"""Calls that change parameters: prepare, step own rows, gather even after an error; all ranks call."""

import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import TypeVar

from zero_optim.health.stamps import Call, Origins
from zero_optim.health.unit_stamps import UnitStamps
from zero_optim.plan.option_values import Plain
from zero_optim.state.core import Core

T = TypeVar("T")


class Calls:
    """Makes calls, and sends their results to other ranks and replicas."""

    def __init__(self, core: Core) -> None:
        self._core = core
        self._tell_replicas: Callable[[BaseException], None] | None = None

    def make(self, name: str, work: Callable[[], T], at_end: Callable[[], None] | None = None) -> T:
        """Prepare, change this rank's parameters in ``work``, then gather.

        ``name``: of the call, such as ``step()``. ``at_end`` runs before the gather, also after an error.
        """
        core = self._core
        core.check_attached()

        def gather(call: Call) -> None:
            with self.mirrored():
                core.sharding.gather(core.groups, call, frozen_too=core.owned.local.moves_frozen)

        with self.telling_replicas(), self.whatever_happens(name, gather):
            try:
                self.prepare()
                core.check_sparse(core.sparse_cut_params())
                return work()
            finally:
                if at_end is not None:
                    at_end()

    @contextmanager
    def whatever_happens(self, name: str, end: Callable[[Call], None]) -> Iterator[None]:
        """Call ``end`` after the body, also after an error: the other ranks wait for it."""
        call = Call(name, self._origins, None)
        try:
            yield
        except BaseException as error:
            call = call._replace(failure=error)
            raise
        finally:
            end(call)
            del call  # has the error, whose traceback has this frame: together they would keep the group

    @contextmanager
    def mirrored(self) -> Iterator[None]:
        """Mirror the state after the body, also after an error, which other ranks may not have."""
        try:
            yield
        except BaseException:
            with suppress(RuntimeError):  # the first error tells more
                self._core.mirror_state()
            raise
        self._core.mirror_state()

    def prepare(self) -> None:
        """Check the parameters before a step, and apply the user's changes."""
        core = self._core
        core.check_weights()
        if core.is_mirrored and core.mirror.last_age != core.snapshot.age:
            core.mirror_state()
        core.snapshot.changed()
        core.sharding.refresh(core.groups)
        core.check_cuts(core.groups)
        core.follow_state()

    def _origins(self, options: Sequence[Mapping[str, Plain]]) -> Origins:
        return Origins(*self._core.owned.local.origins(options))

    # ------------------------------------------------------------------ replicas of a mesh, and units

    def let_go(self) -> None:
        """Forget the replicas."""
        self._tell_replicas = None

    def tell_replicas_by(self, tell: Callable[[BaseException], None]) -> None:
        """Set ``tell``, called with a failed step's error for the other replicas of a mesh.

        ``tell`` must not hold the optimizer.
        """
        self._tell_replicas = tell
        stamps = self._core.sharding.gathers.stamps
        if stamps is not None:
            stamps.tell = tell
            stamps.numbers = self._core.group.numbers

    @contextmanager
    def telling_replicas(self) -> Iterator[None]:
        """Send an exception, which all ranks here raise, to the other replicas of a mesh."""
        try:
            yield
        except BaseException as error:
            if self._tell_replicas is not None:
                self._tell_replicas(error)
            raise

    def unit_stamps(self) -> UnitStamps:
        """Return the stamps that unit gathers send. No communication. Holds weak references only."""
        gathers, reference = self._core.sharding.gathers, weakref.ref(self)

        def origins(options: Sequence[Mapping[str, Plain]]) -> Origins:
            calls = reference()
            return Origins((), ()) if calls is None else calls._origins(options)

        def tell(error: Exception) -> None:
            calls = reference()
            if calls is not None and calls._tell_replicas is not None:
                calls._tell_replicas(error)

        return UnitStamps(lambda: gathers.stamps, self._core.group, origins, tell)
