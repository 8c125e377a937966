"""Signal handlers of Python use groups too, whatever call they have interrupted."""

import os
import signal
import threading
from pkgutil import resolve_name
from unittest import mock

import pytest
import torch

from stalling import outcomes
from test_host_memory import shared


def sum_in_a_handler(path: str) -> str:
    """A signal comes in a function for which the main thread has a lock; its handler sums too."""
    group, _ = shared()
    totals, left = list[float](), [signal.SIGUSR1]
    inner = resolve_name(f"zero_optim.host.{path}")

    def handler(*_: object) -> None:
        total = torch.ones(3)
        group.start_sum(total).wait()
        totals.append(float(total[0]))

    def interrupted(*args: object) -> object:
        if left and threading.current_thread() is threading.main_thread():
            signal.raise_signal(left.pop())
        return inner(*args)

    signal.signal(signal.SIGUSR1, handler)
    total = torch.full((2**20,), 2.0)
    with mock.patch(f"zero_optim.host.{path}", interrupted):
        group.start_sum(total).wait()
    return f"{totals} {total.sum() / 2**20}"


@pytest.mark.parametrize("path", ["channel.Outgoing.move", "channel.HostWork.end"])
def test_a_signal_handler_uses_the_group_whose_call_it_has_interrupted(path: str) -> None:
    assert [each.said for each in outcomes(2, sum_in_a_handler, path, limit=60.0)] == ["[2.0] 4.0"] * 2


def wait_amid_signals() -> str:
    """Signals end each sleep of rank 0 early, which waits for rank 1, which is killed."""
    group, memory = shared()
    pids = group.all_gather_json(os.getpid())
    if group.rank == 1:
        signal.pause()
    call = memory.sum_all(torch.ones(3))
    os.kill(pids[1], signal.SIGKILL)
    try:
        with mock.patch("zero_optim.host.segment.Segment.sleep"):
            call.wait()
    except RuntimeError as error:
        return str(error)
    return "summed"


def test_a_death_is_seen_amid_signals() -> None:
    assert outcomes(2, wait_amid_signals, limit=60.0)[0].said == (
        "Connection closed by peer: rank 1 of the group has ended"
    )
