"""Start collectives that follow other collectives, in the same order on every rank.

Note [Order of chained collectives]

A hook is called bucket by bucket, in the same order on every rank. So collectives that it starts at once are
in order. Collectives that it starts later, when a first one has ended, are not: gloo's threads run the
callbacks in the order in which collectives happen to end. But gloo pairs collectives by the order in which
each rank starts them on a process group. If one rank swaps two, wrong tensors are summed, or ranks hang.
Hence

- later collectives have their own process group, on which nothing else is started. On the given group, the
  reducer or the user may start something at any moment;
- there each waits for its turn. The hook hands out the turns, as the order is right there. A callback whose
  turn is open starts its collective and those that wait for the next turns. Any other callback leaves its
  collective and returns: no thread ever waits.

With NCCL and XCCL the callbacks run inside the hook, since their futures are done once work is queued on the
device. So everything is in order, and a second communicator would only add ways to deadlock: later
collectives use the given group.

Note [Callbacks own no process group]

A gloo thread must not drop the last reference to its own group. The group's end waits for its threads, and a
thread that waits for itself aborts the process ("Resource deadlock avoided"). This happens if a callback
holds a group: its result wakes the main thread, which may drop its reference first. So no callback here, nor
anything it holds, refers to a group, except weakly.

The groups made here are lanes, see `zero_optim.comm.lanes`. They live longer than the hook's state. So a
callback refers weakly to the lease: when the lease has ended, the lane may belong to another user.
"""

import threading
import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor

from zero_optim.comm.collectives import RankGroup
from zero_optim.comm.lanes import Lease, lease
from zero_optim.compat.streams import current_stream, future_on, using_stream
from zero_optim.hooks.bucket import TensorFuture

_QUEUED = ("nccl", "xccl")  # backends whose futures are done once their work is queued on the device


@dataclass(slots=True)
class Turnstile:
    """Runs functions in the order of the turns drawn for them, however late each one is handed in.

    A function must not raise: the turns after it would never come.
    """

    _drawn: int = 0
    _open: int = 0
    _running: bool = False
    _waiting: dict[int, Callable[[], None]] = field(default_factory=dict)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def draw(self) -> int:
        """Draw the next turn, a number."""
        with self._lock:
            turn, self._drawn = self._drawn, self._drawn + 1
        return turn

    def enter(self, turn: int, function: Callable[[], None]) -> None:
        """Hand in the function of a turn. It runs now, or in the call that opens its turn."""
        with self._lock:
            self._waiting[turn] = function
            if self._running:
                return
            self._running = True
        while (ready := self._next()) is not None:
            ready()

    def _next(self) -> Callable[[], None] | None:
        with self._lock:
            ready = self._waiting.pop(self._open, None)
            if ready is None:
                self._running = False
            else:
                self._open += 1
            return ready


@dataclass(frozen=True, slots=True)
class LaterStage:
    """Starts collectives that follow a first one, see Note [Order of chained collectives].

    Args:
        lease: of the one process group for them.
        turnstile: gives them their turns.
    """

    lease: Lease
    turnstile: Turnstile = field(default_factory=Turnstile)

    @classmethod
    def beside(cls, group: dist.ProcessGroup, device: torch.device) -> "LaterStage":
        """Make the stage for a hook's group. All ranks of the group call, and no others.

        Communicates, but not with NCCL and XCCL.

        Args:
            group: the group of the first collectives.
            device: where the buckets lie.

        Raises:
            RemoteRankError: a rank does not answer within the group's timeout, or has ended.
        """
        ranks = RankGroup.of(group, device)
        if ranks.backend_of(device) in _QUEUED:
            return cls(Lease.of(ranks))
        return cls(lease(ranks, 1, ranks.data_backend))

    def follow(
        self,
        first: TensorFuture,
        device: torch.device,
        prepare: Callable[[TensorFuture], object],
        start: Callable[[dist.ProcessGroup], TensorFuture],
        finish: Callable[[TensorFuture], Tensor],
    ) -> TensorFuture:
        """Chain a second collective to a first one; call this in the hook. No thread waits for either.

        Args:
            first: future of the first collective.
            device: where the tensors lie.
            prepare: called with ``first`` once it is done. Several threads may call it for several buckets.
            start: starts the second collective on the group that it is given. It is called in the order of
                the calls of this method, on the stream of ``prepare``.
            finish: called with the second future once it is done; returns the result.

        None of the three may hold a process group, see Note [Callbacks own no process group].

        Returns:
            A future with the result, or with what one of the three, or a collective, raised.
        """
        done, turnstile, weak_lease = future_on(device), self.turnstile, weakref.ref(self.lease)
        turn = turnstile.draw()

        def fail(error: Exception) -> None:
            held = weak_lease()
            if held is not None:
                held.abandon()
            done.set_exception(error)  # type: ignore[arg-type]  # annotated as a result, documented as an error

        def on_second(second: TensorFuture) -> None:
            try:
                done.set_result(finish(second))
            except Exception as error:  # noqa: BLE001 - raised where the result is waited for
                fail(error)

        def on_turn(stream: AbstractContextManager[object]) -> None:
            try:
                held = weak_lease()
                if held is None:
                    raise RuntimeError("the hook's state is gone while a bucket is under way: keep it")
                with stream:
                    start(held.groups[0].process_group).then(on_second)
            except Exception as error:  # noqa: BLE001 - raised where the result is waited for
                fail(error)

        def on_first(landed: TensorFuture) -> None:
            try:
                prepare(landed)
            except Exception as error:  # noqa: BLE001 - raised where the result is waited for
                turnstile.enter(turn, partial(fail, error))  # the later turns must not wait for ever
            else:
                turnstile.enter(turn, partial(on_turn, using_stream(device, current_stream(device))))

        first.then(on_first)
        # For C++ an exception set on a Python future is an ordinary value; one raised in a callback is not.
        return done.then(TensorFuture.value)
