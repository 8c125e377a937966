"""A rank that was stopped while a collective was on its way, and goes on when the others have given up."""

import gc
import os
import signal
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from processes import stat
from stalling import TIMEOUT, Others, about_to_stall, linear, outcomes, sharded
from waiting import wait_until
from zero_optim.comm import sending
from zero_optim.comm.collectives import RankGroup
from zero_optim.compat import private
from zero_optim.errors import StalledError
from zero_optim.flow.pending import Waitable


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
    private.get_default_store().set("pid", str(os.getpid()))
    os.kill(os.getpid(), signal.SIGSTOP)


def stop_soon() -> None:
    """Stop this process when its main thread waits."""

    def wait_and_stop() -> None:
        time.sleep(0.5)
        stop()

    threading.Thread(target=wait_and_stop, daemon=True).start()


def wait_until_the_other_is_stopped() -> None:
    pid = int(private.get_default_store().get("pid"))
    wait_until(lambda: stat(pid)[0] == "T")


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


def in_a_send(group: RankGroup) -> None:
    large = torch.ones(2**20)  # more than the system takes at once
    if dist.get_rank() == 0:
        wait_until_the_other_is_stopped()
        sending.recv(group, large, 1)
    else:
        stop_soon()
        sending.send(group, large, 0)


WAYS = {way.__name__: way for way in (in_a_sum, in_a_send)}


def let_go_on(folder: Path, others: Others) -> None:
    wait_until((folder / "0").exists)
    others.kill(1, signal.SIGCONT)


@pytest.mark.parametrize("way", WAYS)
def test_a_rank_that_was_stopped_is_told_when_it_goes_on(tmp_path: Path, way: str) -> None:
    first, second = outcomes(2, stop_in, way, tmp_path, meanwhile=partial(let_go_on, tmp_path), limit=60.0)
    assert "rank 1 does not answer" in str(first.said)
    assert "rank 1 does not answer" in str(second.said), second
    if way == "in_a_send":
        assert (first.exitcode, second.exitcode) == (0, 0)  # their end waits for no thread either
