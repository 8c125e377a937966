"""A rank that was stopped while a collective was on its way, and goes on when the others have given up."""

import gc
import os
import signal
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from pool import on_ranks
from stalling import TIMEOUT, Others, about_to_stall, linear, outcomes, sharded
from waiting import wait_until
from zero_optim.comm import sending, unended
from zero_optim.comm.collectives import RankGroup
from zero_optim.comm.traffic import Waitable
from zero_optim.comm.unended import Paired
from zero_optim.compat.engine import default_store
from zero_optim.errors import StalledError


def state_of(pid: int) -> str:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


def stay_for_the_other(folder: Path) -> None:
    """Let rank 1 go on; it is to hear why it was given up, not that rank 0 has exited meanwhile."""
    (folder / str(dist.get_rank())).touch()
    wait_until((folder / "1").exists)


def stop_in(way: str, folder: Path) -> str:
    """Rank 1 is stopped while it waits for the other, and goes on when the other has given up."""
    optimizer = sharded(linear())  # so that somebody watches
    others = dist.new_group()
    group = RankGroup.of(others, [torch.device("cpu")]).within(TIMEOUT)
    dist.barrier()
    about_to_stall()
    said = "came through"
    try:
        WAYS[way](group)
    except StalledError as error:
        said = str(error)
    stay_for_the_other(folder)
    dist.destroy_process_group(others)
    del others, group
    gc.collect()  # the end of the group waits for no thread
    assert optimizer is not None
    return said


def stop() -> None:
    default_store().set("pid", str(os.getpid()))
    os.kill(os.getpid(), signal.SIGSTOP)


def stop_soon() -> None:
    """Stop this process when its main thread waits."""

    def wait_and_stop() -> None:
        time.sleep(0.5)
        stop()

    threading.Thread(target=wait_and_stop, daemon=True).start()


def wait_until_the_other_is_stopped() -> None:
    pid = int(default_store().get("pid"))
    wait_until(lambda: state_of(pid) == "T")


def stop_behind(start: Callable[[], Waitable]) -> Waitable:
    """Rank 1 is stopped once gloo's thread has turned to the other rank; if it has not, all is well."""
    if dist.get_rank() == 1:
        work = start()
        time.sleep(0.2)
        stop()
        return work
    wait_until_the_other_is_stopped()
    return start()


def in_a_sum(group: RankGroup) -> None:
    stop_behind(lambda: group.start_sum(torch.ones(64))).wait()


def in_an_agreement(group: RankGroup) -> None:
    stop_soon() if dist.get_rank() == 1 else wait_until_the_other_is_stopped()
    group.all_gather_fixed(bytes(64))


def started(group: RankGroup, large: Tensor, sender: int) -> Waitable:
    """Start to send from one rank, or to receive there."""
    other, is_sender = 1 - dist.get_rank(), dist.get_rank() == sender
    start = sending._isend if is_sender else sending._irecv
    work = group.begin_work("", large.device if is_sender else None)
    with work.starting():
        works = sending._started([start(group, large, other)])
        work.take(*([Paired(works)] if is_sender else works))
    return work


def in_a_started_send(group: RankGroup) -> None:
    large = torch.ones(2**20)
    stop_behind(lambda: started(group, large, 1)).wait()


def in_a_send(group: RankGroup) -> None:
    large = torch.ones(2**20)  # more than the system takes at once
    if dist.get_rank() == 0:
        wait_until_the_other_is_stopped()
        sending.recv(group, large, 1)
    else:
        stop_soon()
        sending.send(group, large, 0)


WAYS = {way.__name__: way for way in (in_a_sum, in_an_agreement, in_a_started_send, in_a_send)}


@on_ranks(2)
def test_a_wait_that_looks_up_many_times_brings_the_sum() -> None:
    group = RankGroup.of(None, [torch.device("cpu")])
    with patch.object(unended, "LOOK", timedelta(milliseconds=1)):
        for late in range(2):
            total = torch.full((64,), float(dist.get_rank() + 1))
            if dist.get_rank() == late:
                wait_until(lambda late=late: default_store().check([f"waits {late}"]))
                time.sleep(0.05)
            else:
                default_store().set(f"waits {late}", "")
            group.start_sum(total).wait()
            assert torch.equal(total, torch.full((64,), 3.0))


def let_go_on(folder: Path, others: Others) -> None:
    wait_until((folder / "0").exists)
    others.kill(1, signal.SIGCONT)


@pytest.mark.parametrize("way", WAYS)
def test_a_rank_that_was_stopped_is_told_when_it_goes_on(tmp_path: Path, way: str) -> None:
    first, second = outcomes(2, stop_in, way, tmp_path, meanwhile=partial(let_go_on, tmp_path), limit=60.0)
    assert "rank 1 does not answer" in str(first.said)
    # What the other rank had sent in an agreement may have come before it closed.
    came = way == "in_an_agreement" and second.said == "came through"
    assert came or "rank 1 does not answer" in str(second.said), second
    if "send" in way:
        assert (first.exitcode, second.exitcode) == (0, 0)  # their end waits for no thread either


@on_ranks(2, forked=True)
def test_a_send_that_fails_raises_what_gloo_says() -> None:
    """The other rank is known to have ended when a send is waited for."""
    group = RankGroup.of(dist.new_group())
    if dist.get_rank() == 0:
        work = started(group, torch.ones(2**20), 0)
        default_store().set("sent", "")
        with pytest.raises(RuntimeError, match=r"onnection|closed") as caught:
            work.wait()
        assert not isinstance(caught.value, StalledError)
    else:
        wait_until(lambda: default_store().check(["sent"]))
        group.works.cut()


class JustEnded:
    """A handle whose first wait runs out of time just before the collective ends, well or with an error."""

    def __init__(self, error: str = "") -> None:
        self.error = error
        self.waits = 0

    def wait(self, timeout: timedelta | None = None) -> bool:
        self.waits += 1
        if self.waits == 1:
            raise RuntimeError("Operation timed out!")
        if self.error:
            raise RuntimeError(self.error)
        return True

    def is_completed(self) -> bool:
        return True


def test_what_ends_just_when_a_look_has_run_out_of_time_has_not_failed() -> None:
    ended: Any = JustEnded()
    assert unended.wait_and_poll(ended, lambda: False)
    failed: Any = JustEnded("connection closed")
    with pytest.raises(RuntimeError, match="connection closed"):
        unended.wait_and_poll(failed, lambda: False)
