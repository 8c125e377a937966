"""Waits for collectives of gloo, which look up now and then.

Note [Waits that nothing ends]
    gloo forgets a send, for good, if the connection turns out to be closed just when its own thread begins
    to write. It happens where the other rank had asked for the data before it closed: above all to a process
    that was stopped while a collective was on its way, and goes on when the others have given up; seldom
    where a rank is killed. The wait for such a collective raises nothing, and to break the connections
    (Note [Waits that end] in `zero_optim.comm.works`) does not help, as they are broken. It ends with the
    timeout of the process group, 30 minutes as a rule.

    So a wait for a collective returns each `LOOK` seconds to see whether the group was given up, and raises
    the verdict if it was given up a look ago. For collectives that does no harm: only the caller's wait ends.
    For what is sent from rank to rank a wait that takes too long breaks the connections, so these wait as
    they always did. A wait that is over sooner costs nothing more.

    A thread of gloo still hangs in the collective then. The end of the group would wait for that thread, and
    the end of the process for the group. So the group is kept for ever, with its threads; they go with the
    process.
"""

import ctypes
from collections.abc import Callable
from datetime import timedelta

import torch.distributed as dist

LOOK = timedelta(seconds=1)


def wait_and_look_up(handle: dist.Work, is_given_up: Callable[[], bool]) -> bool:
    """Wait for a collective of gloo. See Note [Waits that nothing ends].

    Args:
        handle: of the collective; not of a send or receive.
        is_given_up: whether its group was given up.

    Returns:
        Whether it has ended; False if its group was given up, and it does not end.

    Raises:
        RuntimeError: it failed.
    """
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
