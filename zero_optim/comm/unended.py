"""Waits for what gloo sends, which look up now and then.

Note [Waits that nothing ends]
    gloo forgets a send, for good, if the connection turns out to be closed just when its own thread begins
    to write. It happens where the other rank had asked for the data before it closed: above all to a process
    that was stopped while a collective was on its way, and goes on when the others have given up; seldom
    where a rank is killed. The wait for such a collective raises nothing, and to break the connections
    (Note [Waits that end] in `zero_optim.comm.works`) does not help, as they are broken. It ends with the
    timeout of the process group, 30 minutes as a rule.

    So a wait for a collective returns each `LOOK` seconds to see whether the group was given up, and raises
    the verdict if it was given up a look ago. For collectives that does no harm: only the caller's wait ends.
    A wait that is over sooner costs nothing more.

    A thread of gloo still hangs in the collective then. The end of the group would wait for that thread, and
    the end of the process for the group. So the group is kept for ever, with its threads; they go with the
    process.

    What is sent from rank to rank is forgotten likewise. There a wait that takes too long breaks the
    connections of a group that may be well. So it is made without a limit, on a thread of its own, and the
    caller waits for that thread (`Paired`). A thread whose send was forgotten stays until the timeout of the
    group, and holds nobody up. A receive is never forgotten: its wait is made by the caller, meanwhile, so
    that little is waited for afterwards. To start the thread takes some 50 µs, 200 on a busy host. So pieces
    of gradients up to `SMALL` bytes are waited for without it: the system takes that at once. In trials up to
    512 KiB came through, and 1 MiB was forgotten.
"""

import _thread  # as its threads start in a third less of the time
import ctypes
from collections.abc import Callable, Sequence
from datetime import timedelta

import torch.distributed as dist

LOOK = timedelta(seconds=1)
SMALL = 2**16


class Paired:
    """What gloo sends from rank to rank, and receives, as one handle. See Note [Waits that nothing ends].

    Args:
        sends: handles of the sends. They are kept.
        receives: handles of the receives.
        is_small: each send has `SMALL` bytes at most, so none is forgotten.
    """

    __slots__ = ("_is_small", "_receives", "_sends")

    def __init__(
        self, sends: Sequence[dist.Work], receives: Sequence[dist.Work] = (), *, is_small: bool = False
    ) -> None:
        self._is_small = is_small
        self._sends = sends
        self._receives = receives

    def wait(self) -> None:
        """Wait for all of them, and do not look up.

        Raises:
            RuntimeError: one has failed.
        """
        for work in (*self._sends, *self._receives):
            work.wait()

    def is_completed(self) -> bool:
        """Tell whether somebody has waited for all of them."""
        return all(work.is_completed() for work in (*self._sends, *self._receives))

    def wait_and_look_up(self, is_given_up: Callable[[], bool]) -> bool:
        """Wait for all of them; as `wait_and_look_up`."""
        if self._is_small:
            self.wait()
            return True
        over, failures = _thread.allocate_lock(), list[RuntimeError]()
        over.acquire()

        def wait() -> None:
            try:
                for work in self._sends:
                    work.wait()
            except RuntimeError as error:
                failures.append(error)
            finally:
                over.release()

        _thread.start_new_thread(wait, ())
        for work in self._receives:
            work.wait()
        was_given_up = False
        while not over.acquire(timeout=LOOK.total_seconds()):
            if was_given_up:
                return False
            was_given_up = is_given_up()
        if failures:
            try:
                raise failures[0]
            finally:
                failures.clear()  # the error refers to this frame
        return True


def wait_and_look_up(handle: dist.Work | Paired, is_given_up: Callable[[], bool]) -> bool:
    """Wait for a collective or sends of gloo. See Note [Waits that nothing ends].

    Args:
        handle: of the collective; not of a single send or receive.
        is_given_up: whether its group was given up.

    Returns:
        Whether it has ended; False if its group was given up, and it does not end.

    Raises:
        RuntimeError: it failed.
    """
    if isinstance(handle, Paired):
        return handle.wait_and_look_up(is_given_up)
    while True:
        was_given_up = is_given_up()  # asked before: breaking the connections has the time of the wait
        try:
            handle.wait(LOOK)
        except RuntimeError:
            if handle.is_completed():  # it failed; or it has ended since the wait ran out of time
                handle.wait()
                return True
            if was_given_up:
                return False
        else:
            return True


def keep_for_ever(group: dist.ProcessGroup) -> None:
    """Let a process group live until the process ends, whoever lets go of it."""
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(group))
