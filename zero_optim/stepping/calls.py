"""A call that changes parameters: prepare, step own rows, gather whatever happened; all ranks make it."""

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
    """Makes calls, and tells other ranks and replicas what happened in them.

    Args:
        core: the parts of the optimizer.
    """

    def __init__(self, core: Core) -> None:
        self._core = core
        self._tell_replicas: Callable[[BaseException], None] | None = None

    def run(self, name: str, work: Callable[[], T], settle: Callable[[], None] | None = None) -> T:
        """Prepare, have the local optimizer change this rank's parameters, then gather.

        Args:
            name: of the call, such as ``step()``.
            work: changes the leaves, and the parameters with them.
            settle: called after it, also if it was not reached.
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
                if settle is not None:
                    settle()

    @contextmanager
    def whatever_happens(self, name: str, end: Callable[[Call], None]) -> Iterator[None]:
        """End a call when the body has ended, also where it raises: the other ranks wait for this one."""
        call = self._call(name)
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
        """Mirror the state when the body has ended, also where it raises: on other ranks it may not."""
        try:
            yield
        except BaseException:
            with suppress(RuntimeError):  # the first error tells more
                self._core.mirror_state()
            raise
        self._core.mirror_state()

    def prepare(self) -> None:
        """Get ready for a step: look at the parameters, and at what was changed from outside."""
        core = self._core
        core.check_weights()
        if core.is_mirrored and core.mirror.tells_of != core.snapshot.age:
            core.mirror_state()
        core.snapshot.changed()
        core.sharding.refresh(core.groups)
        core.check_cuts(core.groups)
        core.follow_state()

    # ------------------------------------------------------------------ what others are told

    def _call(self, name: str) -> Call:
        core = self._core
        return Call(name, lambda options: Origins(*core.owned.local.origins(options)), None)

    def let_go(self) -> None:
        """Forget the replicas of the group that ends."""
        self._tell_replicas = None

    def tell_replicas_by(self, tell: Callable[[BaseException], None]) -> None:
        """Have the other replicas of a mesh told what all ranks of this one raise, as a step has failed.

        Args:
            tell: tells them; does not keep the optimizer.
        """
        self._tell_replicas = tell
        stamps = self._core.sharding.gathers.stamps
        if stamps is not None:
            stamps.tell = tell
            stamps.numbers = self._core.group.numbers

    @contextmanager
    def telling_replicas(self) -> Iterator[None]:
        """Tell the other replicas of a mesh, if any, of an exception that all ranks of this one hear of."""
        try:
            yield
        except BaseException as error:
            if self._tell_replicas is not None:
                self._tell_replicas(error)
            raise

    def unit_stamps(self) -> UnitStamps:
        """Return the stamps that gathers of units send. No communication. Holds weak references only."""
        gathers, known = self._core.sharding.gathers, weakref.ref(self)

        def origins(options: Sequence[Mapping[str, Plain]]) -> Origins:
            calls = known()
            return Origins((), ()) if calls is None else calls._call("").origins(options)

        def tell(error: Exception) -> None:
            calls = known()
            if calls is not None and calls._tell_replicas is not None:
                calls._tell_replicas(error)

        return UnitStamps(lambda: gathers.stamps, self._core.group, origins, tell)
