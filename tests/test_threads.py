"""A process whose wait was given up ends with its own exit status, and threads that cannot start are told."""

import subprocess
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from waiting import LIMIT
from zero_optim.comm.work_log import WorkLog
from zero_optim.health.directory import Directory
from zero_optim.health.peers import in_threads
from zero_optim.health.verdicts import Verdicts


def test_what_finds_no_thread_is_done_without(monkeypatch: pytest.MonkeyPatch) -> None:
    """So the watchdog answers and judges, and ranks are asked."""
    monkeypatch.setattr("threading.Thread.start", mock.Mock(side_effect=RuntimeError("no more threads")))
    assert in_threads({0: lambda: 5, 1: lambda: 6}, LIMIT) == {0: 5, 1: 6}
    verdicts = Verdicts(WorkLog(), Directory.__new__(Directory))
    with mock.patch.object(verdicts, "_complaint"), mock.patch.object(verdicts, "_complain") as complain:
        verdicts.look_at_wait(mock.Mock(timeout=1.0, group=mock.Mock(verdict=None)), 2.0)
    assert complain.called


LEAVES_OUT_A_STEP = """
import sys
import torch, torch.distributed as dist
from zero_optim import StalledError, ZeroRedundancyOptimizer
from zero_optim.ddp import DistributedDataParallel

rank = int(sys.argv[1])
dist.init_process_group("gloo", store=dist.FileStore(sys.argv[2], 2), rank=rank, world_size=2)
model = torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(4)))
optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, timeout=2)
model = DistributedDataParallel(model, timeout=2)
try:
    for number in range(6):
        model(torch.ones(2, 64)).sum().backward()
        if (rank, number) != (1, 2):
            optimizer.step()
except StalledError:
    sys.exit(7)
"""


@pytest.mark.slow
def test_a_process_whose_wait_was_given_up_ends_with_its_own_exit_status(tmp_path: Path) -> None:
    """What made the wait raise, breaking connections, was still under way, and ended the process (134)."""
    command, store = [sys.executable, "-c", LEAVES_OUT_A_STEP], str(tmp_path / "store")
    options: Any = {"stderr": subprocess.PIPE, "text": True}
    ranks = [subprocess.Popen([*command, str(rank), store], **options) for rank in range(2)]
    try:
        errors = [rank.communicate(timeout=150)[1] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
    assert [rank.returncode for rank in ranks] == [7, 7], errors
