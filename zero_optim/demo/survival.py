"""The launcher of ``--survive``: it starts the ranks, and if one dies, it names those that go on.

It is in the place of `elastic.launch`, which ends all ranks when one dies. How a run ends is the same: Note
[How a run ends] in `zero_optim.demo.elastic`.
"""

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

from zero_optim.demo.config import RunConfig
from zero_optim.demo.elastic import WORKER, describe, first_failed, importing_from, signals_raise
from zero_optim.demo.failing import only_heard
from zero_optim.demo.meeting import Meeting, Round
from zero_optim.errors import RankFailedError
from zero_optim.run.host import CAUSE

_POLL = 0.05  # seconds
_GRACE = 3.0  # seconds: a rank that raises because another one has died may be seen before that one
_END = 5.0  # seconds for a rank to end when asked

Processes = dict[int, "subprocess.Popen[bytes]"]


def launch(config: RunConfig) -> None:
    """Run ``config.nproc`` ranks until those that are left have trained to the end. None runs afterwards.

    Raises:
        RankFailedError: a rank raised, or all have died.
        InterruptedRunError: a signal arrived.
    """
    with signals_raise(), tempfile.TemporaryDirectory(prefix="zero-optim-") as folder:
        meeting = Meeting(Path(folder))
        with _started(config, meeting) as processes:
            _judge(_watch_over(config, meeting, processes), meeting, processes)


@contextmanager
def _started(config: RunConfig, meeting: Meeting) -> Iterator[Processes]:
    """Start the ranks, and end all of them, however the body ends."""
    processes: Processes = {}
    code = importing_from(sys.path, WORKER)
    command = [sys.executable, "-c", code, config.to_json(), str(os.getpid()), str(meeting.folder)]
    size = str(config.nproc)
    try:
        for number in range(config.nproc):
            rank = str(number)
            named = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size}
            named["TORCHELASTIC_ERROR_FILE"] = str(meeting.failure(number))
            processes[number] = subprocess.Popen(command, env=os.environ | named, start_new_session=True)
        yield processes
    finally:
        _end(processes)


def _end(processes: Processes) -> None:
    for process in processes.values():
        process.terminate()  # does nothing to one that has ended
    deadline = time.monotonic() + _END
    for process in processes.values():
        try:
            process.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _watch_over(config: RunConfig, meeting: Meeting, processes: Processes) -> Round:
    """Name rounds until all ranks have ended, or one has failed without a death; gives the last round."""
    current = Round(0, tuple(processes), "")
    meeting.name(current)
    failed_at: float | None = None
    while True:
        codes = [processes[number].poll() for number in current.members]
        if None not in codes:
            return current
        died = [rank for rank, code in enumerate(codes) if code is not None and code < 0]
        if died and 0 not in codes:  # a rank ends with 0 when all is done: then nothing is left to go on with
            current = next_round(config, current, died, processes)
            if died[0] == 0 and sys.stdout.isatty():
                sys.stdout.write("\x1b[?25h\n")  # its bar hid the cursor
                sys.stdout.flush()
            meeting.name(current)
            failed_at = None
            continue
        has_ended = any(code is not None and code > 0 for code in codes)
        reports = _reports(meeting, current).values()
        if has_ended or reports:
            failed_at = failed_at or time.monotonic()
            is_told = has_ended or len(reports) == len(codes) or not all(map(only_heard, reports))
            if time.monotonic() - failed_at > (_GRACE if is_told else CAUSE):
                return current
        time.sleep(_POLL)


def next_round(config: RunConfig, last: Round, died: list[int], processes: Processes) -> Round:
    """Choose who goes on: as many of those that are left as can share a batch equally."""
    news = " and ".join(_death(rank, processes[last.members[rank]]) for rank in died)
    left = [rank for rank in range(len(last.members)) if rank not in died]
    count = len(left)
    while count and not config.fits(count):
        count -= 1
    if left[count:]:
        spare = " and ".join(f"rank {rank}" for rank in left[count:])
        news += f"; {spare} ended, as {len(left)} ranks cannot share --batch-size {config.batch_size} equally"
    return Round(last.number + 1, tuple(last.members[rank] for rank in left[:count]), news)


def _reports(meeting: Meeting, current: Round) -> dict[int, Path]:
    """Find the ranks that have raised in this round."""
    found = {rank: meeting.report(current.number, number) for rank, number in enumerate(current.members)}
    return {rank: path for rank, path in found.items() if path.exists()}


def _judge(last: Round, meeting: Meeting, processes: Processes) -> None:
    """Raise for what ended the run, unless it is done: rank 0 ends with 0 when it has shown the result."""
    codes = [processes[number].poll() for number in last.members]
    failed = {rank: meeting.failure(last.members[rank]) for rank, code in enumerate(codes) if (code or 0) > 0}
    if codes[0] == 0 and not failed:
        return
    died = [rank for rank, code in enumerate(codes) if code is not None and code < 0]
    if died and not failed:
        process = processes[last.members[died[0]]]
        line = f"rank {died[0]} was killed by {_signal_of(process)} (process {process.pid})"
        nobody = len(died) == len(codes)
        raise RankFailedError(f"no rank is left: {line}" if nobody else line, died[0])
    failures = {}
    for rank, path in (failed or _reports(meeting, last)).items():
        process = processes[last.members[rank]]
        failures[rank] = ProcessFailure(rank, process.pid, process.poll() or 1, str(path))
    raise RankFailedError(describe(failures), first_failed(failures))


def _death(rank: int, process: "subprocess.Popen[bytes]") -> str:
    return f"rank {rank} died ({_signal_of(process)}, process {process.pid})"


def _signal_of(process: "subprocess.Popen[bytes]") -> str:
    """Return the name of the signal that ended a process."""
    number = -(process.returncode or 0)
    return next((each.name for each in signal.Signals if each == number), f"signal {number}")
