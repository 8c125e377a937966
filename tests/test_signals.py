"""Signal handlers of Python run later, where a thread has a lock that they may want."""

import os
import signal
import threading
from collections.abc import Callable, Iterator
from pkgutil import resolve_name
from unittest import mock

import pytest
import torch

from stalling import outcomes
from test_host_memory import shared
from zero_optim.compat.signals import HandlersLater, wait_for


@pytest.fixture
def came() -> Iterator[list[int]]:
    """The signals whose handlers have run."""
    numbers = list[int]()
    before = {n: signal.getsignal(n) for n in (signal.SIGUSR1, signal.SIGUSR2, signal.SIGINT)}
    for number in (signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, lambda number, _: numbers.append(number))
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a runner of tests may ignore it
    yield numbers
    for number, handler in before.items():
        signal.signal(number, handler)


def test_a_handler_runs_at_the_end(came: list[int]) -> None:
    handler = signal.getsignal(signal.SIGUSR1)
    with HandlersLater():
        with HandlersLater():
            signal.raise_signal(signal.SIGUSR1)
        assert not came
    assert came == [signal.SIGUSR1]
    assert signal.getsignal(signal.SIGUSR1) is handler


def test_a_handler_that_raises_keeps_no_other_from_running(came: list[int]) -> None:
    def interrupt() -> None:
        with HandlersLater():
            for number in (signal.SIGUSR1, signal.SIGINT, signal.SIGUSR2):
                signal.raise_signal(number)

    with pytest.raises(KeyboardInterrupt):
        interrupt()
    assert sorted(came) == [signal.SIGUSR1, signal.SIGUSR2]


def test_a_handler_that_raises_while_others_are_set_back_leaves_these_at_work(came: list[int]) -> None:
    later = HandlersLater()
    later.__enter__()
    failing = mock.patch("zero_optim.compat.signals._set_handler", side_effect=KeyboardInterrupt)
    with pytest.raises(KeyboardInterrupt), failing:
        later.__exit__()
    signal.raise_signal(signal.SIGUSR1)
    assert came == [signal.SIGUSR1]


def test_a_child_that_another_thread_forks_has_handlers(came: list[int]) -> None:
    def fork() -> None:
        if (child := os.fork()) == 0:
            signal.raise_signal(signal.SIGUSR1)
            os._exit(len(came))
        statuses.append(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))

    statuses = list[int]()
    with HandlersLater():
        thread = threading.Thread(target=fork)
        thread.start()
        thread.join()
    assert (statuses, came) == ([1], [])


def test_an_event_is_waited_for_until_it_is_set_or_so_long() -> None:
    event = threading.Event()
    assert not wait_for(event, 0.01)
    event.set()
    assert wait_for(event)


def sum_in_a_handler(path: str) -> str:
    """A signal comes in a function for which the main thread has a lock; its handler sums too."""
    group, _ = shared()
    totals, left = list[float](), [signal.SIGUSR1]
    inner: Callable[..., object] = resolve_name(f"zero_optim.host.{path}")

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


@pytest.mark.parametrize("path", ["channel.Sender.push", "shared_memory._end_all"])
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
        with mock.patch("zero_optim.compat.futex.wait"):
            call.wait()
    except RuntimeError as error:
        return str(error)
    return "summed"


def test_a_death_is_seen_amid_signals() -> None:
    assert outcomes(2, wait_amid_signals, limit=60.0)[0].said == (
        "Connection closed by peer: rank 1 of the group has ended"
    )
