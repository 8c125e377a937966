"""Whether the ranks of a test keep to sockets: with `--sockets`, or with the mark ``on_sockets``."""

import zero_optim

ALONE = False  # as the fixture ``through_sockets`` sets it, in the test process


def keep_to(alone: bool) -> None:
    """Keep the ranks of the default group to sockets, if so; all ranks call."""
    if alone:
        zero_optim.share_host_memory(False)
