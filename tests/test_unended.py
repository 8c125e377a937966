"""A rank that was stopped while a collective was on its way, and goes on when the others have given up."""

import gc
import os
import re
import signal
import threading
import time
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

from pool import on_ranks
from stalling import TIMEOUT, Others, about_to_stall, linear, outcomes, sharded
from waiting import wait_until
from zero_optim.comm import sending, unended
from zero_optim.comm.collectives import RankGroup
from zero_optim.compat.engine import default_store
from zero_optim.errors import StalledError


def state_of(pid: int) -> str:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


def stay_for_the_other(folder: Path) -> None:
    """Let rank 1 go on; it is to hear why it was given up, not that rank 0 has exited meanwhile."""
    (folder / str(dist.get_rank())).touch()
    wait_until((folder / "1").exists)


def stop_in_a_sum(folder: Path) -> str:
    """Rank 1 is stopped while it waits for the other's part, and goes on when the other has given up."""
    optimizer = sharded(linear())  # so that somebody watches
    sums = dist.new_group()
    dist.barrier()
    about_to_stall()
    said = "came through"
    try:
        add(RankGroup.of(sums, [torch.device("cpu")]).within(TIMEOUT))
    except StalledError as error:
        said = str(error)
    stay_for_the_other(folder)
    dist.destroy_process_group(sums)
    del sums
    gc.collect()  # the end of the group waits for no thread
    assert optimizer is not None
    return said


def add(group: RankGroup) -> None:
    if dist.get_rank() == 1:
        _, work = group.start_sum(torch.ones(64))
        time.sleep(0.2)  # for gloo's thread to ask the other rank for its part; if it does not, all is well
        default_store().set("pid", str(os.getpid()))
        os.kill(os.getpid(), signal.SIGSTOP)
    else:
        pid = int(default_store().get("pid"))
        wait_until(lambda: state_of(pid) == "T")
        _, work = group.start_sum(torch.ones(64))
    work.wait()


def stop_in_an_agreement(folder: Path) -> str:
    """Likewise, in what ranks agree on."""
    optimizer = sharded(linear())
    others = dist.new_group()
    group = RankGroup.of(others, [torch.device("cpu")]).within(TIMEOUT)
    dist.barrier()
    about_to_stall()
    said = "came through"
    try:
        if dist.get_rank() == 1:
            threading.Thread(target=stop_soon, daemon=True).start()
        else:
            pid = int(default_store().get("pid"))
            wait_until(lambda: state_of(pid) == "T")
        group.all_gather_fixed(bytes(64))
    except StalledError as error:
        said = str(error)
    stay_for_the_other(folder)
    dist.destroy_process_group(others)
    del others, group
    gc.collect()
    assert optimizer is not None
    return said


def stop_soon() -> None:
    """Stop this process when its main thread waits."""
    time.sleep(0.5)
    default_store().set("pid", str(os.getpid()))
    os.kill(os.getpid(), signal.SIGSTOP)


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
            group.start_sum(total)[1].wait()
            assert torch.equal(total, torch.full((64,), 3.0))


def let_go_on(folder: Path, others: Others) -> None:
    wait_until((folder / "0").exists)
    others.kill(1, signal.SIGCONT)


def test_a_rank_that_was_stopped_in_a_collective_is_told_when_it_goes_on(tmp_path: Path) -> None:
    ended = outcomes(2, stop_in_a_sum, tmp_path, meanwhile=partial(let_go_on, tmp_path), limit=60.0)
    for outcome in ended:
        assert re.search("rank 1 does not answer", str(outcome.said)), ended


def stop_in_a_send(folder: Path, way: str) -> str:
    """Likewise, in what is sent from rank to rank: more than the system takes at once."""
    optimizer = sharded(linear())
    others = dist.new_group()
    group = RankGroup.of(others, [torch.device("cpu")]).within(TIMEOUT)
    dist.barrier()
    about_to_stall()
    said = "came through"
    try:
        send(group, way)
    except StalledError as error:
        said = str(error)
    stay_for_the_other(folder)
    dist.destroy_process_group(others)
    del others, group
    gc.collect()
    assert optimizer is not None
    return said


def send(group: RankGroup, way: str) -> None:
    large = torch.ones(2**20)
    if dist.get_rank() == 0:
        pid = int(default_store().get("pid"))
        wait_until(lambda: state_of(pid) == "T")
        sending.start_recv(group, large, 1).wait()
    elif way == "started before":
        work = sending.start_send(group, large, 0)
        time.sleep(0.2)  # for gloo to tell the other rank of it; if it does not, all is well
        default_store().set("pid", str(os.getpid()))
        os.kill(os.getpid(), signal.SIGSTOP)
        work.wait()
    else:
        threading.Thread(target=stop_soon, daemon=True).start()
        sending.send(group, large, 0)


@pytest.mark.parametrize("way", ["started before", "in the call"])
def test_a_rank_that_was_stopped_in_a_send_is_told_when_it_goes_on(tmp_path: Path, way: str) -> None:
    meanwhile = partial(let_go_on, tmp_path)
    for outcome in outcomes(2, stop_in_a_send, tmp_path, way, meanwhile=meanwhile, limit=60.0):
        assert re.search("rank 1 does not answer", str(outcome.said)), outcome
        assert outcome.exitcode == 0  # its end waits for no thread either


@on_ranks(2, forked=True)
def test_a_send_that_fails_raises_what_gloo_says() -> None:
    """The other rank is known to have ended when a send is waited for."""
    group = RankGroup.of(dist.new_group())
    if dist.get_rank() == 0:
        work = sending.start_send(group, torch.ones(2**20), 1)
        default_store().set("sent", "")
        with pytest.raises(RuntimeError, match=r"onnection|closed") as caught:
            work.wait()
        assert not isinstance(caught.value, StalledError)
    else:
        wait_until(lambda: default_store().check(["sent"]))
        group.works.cut()


def test_a_rank_that_was_stopped_in_an_agreement_does_not_hang_when_it_goes_on(tmp_path: Path) -> None:
    meanwhile = partial(let_go_on, tmp_path)
    first, second = outcomes(2, stop_in_an_agreement, tmp_path, meanwhile=meanwhile, limit=60.0)
    assert "rank 1 does not answer" in str(first.said)
    # What the other rank had sent may have come before it closed.
    assert second.said == "came through" or "rank 1 does not answer" in str(second.said), second


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
