"""Collectives that answer other collectives, launched in the same order on every rank.

Note [Order of chained collectives]

A hook is called bucket by bucket, in the same order on every rank, so what it launches right away is in
order. What it launches later, when a first collective has landed, is not: gloo's worker threads run the
callbacks as collectives happen to end. And gloo pairs up collectives by the order in which each rank launches
them on a process group, so a swap on one rank adds up the wrong tensors, or hangs. Hence

- later collectives have a process group of their own, on which nobody else launches anything. On the group
  that was given, the reducer or the user may launch something at any moment;
- there each waits for its turn. Turns are handed out in the hook, where the order is right. The callback that
  finds its turn open launches its collective and those waiting behind it; others leave theirs and go: no
  thread ever waits.

With NCCL the callbacks run inside the hook, since its futures count as done once work is queued on the GPU.
Everything is in order already, and a second communicator would only add ways to deadlock: later collectives
use the group that was given.

Note [Callbacks own no process group]

The last reference to a gloo group must not be dropped by one of its own threads: the group's end waits for
its threads, and a thread that waits for itself aborts the process ("Resource deadlock avoided"). A callback
that holds a group does that when the main thread, woken up by the callback's result, is the quicker one to
let go of the group. So no callback here, nor anything it holds, refers to a group, except weakly.

The groups made here are lanes, see `zero_optim.comm.lanes`, which live on when the hook's state is gone. So a
callback refers weakly to the lease: when that has ended, the lane may be another user's.
"""

import threading
import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor

from zero_optim.comm.collectives import RankGroup
from zero_optim.comm.lanes import Lease, lease
from zero_optim.hooks.bucket import TensorFuture
from zero_optim.hooks.exchange import future_on


@dataclass(slots=True)
class Turnstile:
    """Runs functions in the order of the turns drawn for them, however late each one comes.

    A function must not raise: the turns behind it would never come.
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
        """Hand in the function of a turn: it is run now, or by whoever opens its turn."""
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
    """Where collectives that follow a first one are launched, see Note [Order of chained collectives].

    Args:
        lease: of the one process group for them.
        turnstile: whose turns they take.
    """

    lease: Lease
    turnstile: Turnstile = field(default_factory=Turnstile)

    @classmethod
    def beside(cls, group: dist.ProcessGroup, device: torch.device) -> "LaterStage":
        """Make the stage for a hook's group. All ranks of the group call, and they alone; communicates.

        Args:
            group: the group of the first collectives.
            device: where the buckets lie.

        Raises:
            RemoteRankError: a rank does not answer within the group's timeout, or has ended.
        """
        ranks = RankGroup.of(group)
        if device.type == "cuda" and "cuda:nccl" in dist.get_backend_config(group):
            return cls(Lease.of(ranks))
        return cls(lease(ranks, 1, dist.get_backend(group)))

    def follow(
        self,
        first: TensorFuture,
        device: torch.device,
        prepare: Callable[[TensorFuture], object],
        launch: Callable[[dist.ProcessGroup], TensorFuture],
        finish: Callable[[TensorFuture], Tensor],
    ) -> TensorFuture:
        """Chain a second collective to a first one; to be called in the hook. No thread waits for either.

        Args:
            first: of the first collective.
            device: where the tensors lie.
            prepare: called with ``first`` once it is done, maybe on several threads for several buckets.
            launch: launches the second collective on the group it is given; called in the order of the calls
                of this method, on the CUDA stream of ``prepare``.
            finish: called with the second future once it is done; gives the result.

        None of the three may hold a process group, see Note [Callbacks own no process group].

        Returns:
            A future with the result, or with what any of the three, or a collective, raised.
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
            except Exception as error:  # noqa: BLE001 - raised by whoever waits for the result
                fail(error)

        def on_turn(stream: AbstractContextManager[object]) -> None:
            try:
                held = weak_lease()
                if held is None:
                    raise RuntimeError("the hook's state is gone while a bucket is under way: keep it")
                with stream:
                    launch(held.groups[0].process_group).then(on_second)
            except Exception as error:  # noqa: BLE001 - raised by whoever waits for the result
                fail(error)

        def on_first(landed: TensorFuture) -> None:
            try:
                prepare(landed)
            except Exception as error:  # noqa: BLE001 - raised by whoever waits for the result
                turnstile.enter(turn, partial(fail, error))  # those behind must not wait for ever
            else:
                turnstile.enter(turn, partial(on_turn, _stream_here(device)))

        first.then(on_first)
        # To C++ an exception set on a Python future is a value like others; raised in a callback it is not.
        return done.then(TensorFuture.value)


def _stream_here(device: torch.device) -> AbstractContextManager[object]:
    """Give a context in which the CUDA stream is the one that is current now."""
    if device.type != "cuda":
        return nullcontext()
    stream: AbstractContextManager[object] = torch.cuda.stream(torch.cuda.current_stream(device))
    return stream
