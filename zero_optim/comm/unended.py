"""Waits for gloo's sends, which poll whether the group was given up.

Note [Waits that nothing ends]
    gloo forgets a send for good if the connection closes just when its thread begins to write. Then no wait
    raises. So a wait polls every `LOOK` seconds, and raises one poll after the group was given up. A gloo
    thread still hangs, and the group's end would wait for it, so the group is never freed.

Note [Sends that nothing ends]
    A send's timeout breaks the connections of a group that may be well. So a thread waits for it without a
    limit, and the caller for the thread (`Paired`) and for receives, which are never forgotten. Sends of up
    to `SMALL` bytes save the thread, of some 50 µs: in trials 512 KiB came through, and 1 MiB was forgotten.
"""

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta

import torch.distributed as dist

from zero_optim.compat.threads import start_thread
from zero_optim.flow.pending import Pending

LOOK = timedelta(seconds=1)
SMALL = 2**16


@dataclass(frozen=True, slots=True, eq=False)
class Paired:
    """gloo's sends and receives as one handle: Note [Sends that nothing ends]."""

    sends: Sequence[dist.Work]
    receives: Sequence[dist.Work] = ()
    is_small: bool = False

    def wait(self) -> None:
        """Wait for all, without polling."""
        for work in (*self.sends, *self.receives):
            work.wait()

    def is_completed(self) -> bool:
        """Return whether somebody has waited for all."""
        return all(work.is_completed() for work in (*self.sends, *self.receives))


def wait_and_poll(handle: dist.Work | Paired, is_given_up: Callable[[], bool]) -> bool:
    """Wait for gloo's collective or sends; False if the group was given up and they do not end."""
    if isinstance(handle, Paired):
        return _wait_for_pairs(handle, is_given_up)
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


def _wait_for_pairs(handle: Paired, is_given_up: Callable[[], bool]) -> bool:
    if handle.is_small:
        handle.wait()
        return True
    sent = Pending(handle.sends, list)

    def wait() -> None:
        with suppress(RuntimeError):  # the caller raises it
            sent.wait()

    try:
        thread = start_thread(wait, "zero_optim sends")
    except RuntimeError:  # Python ends, as under a save for which nobody waits
        handle.wait()
        return True
    for work in handle.receives:
        work.wait()
    was_given_up = False
    thread.join(LOOK.total_seconds())
    while thread.is_alive():
        if was_given_up:
            return False
        was_given_up = is_given_up()
        thread.join(LOOK.total_seconds())
    sent.wait()
    return True
