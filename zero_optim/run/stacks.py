"""Stacks of running ranks, and tracebacks without the launcher's frames."""

import faulthandler
import os
import signal
import time
import traceback
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import TextIO

_DEAF = ": the process has reset its handler of SIGUSR1"


def answer_with_stacks(path: Path) -> TextIO:
    """Write this process's stacks to a file when `stacks_of` asks, even from C++; returns the open file."""
    file = path.open("w")
    faulthandler.register(signal.SIGUSR1, file)
    return file


def stacks_of(processes: Mapping[int, tuple[int, Path]]) -> dict[int, str]:
    """Return each process's stacks, or why it did not answer, from its id and `answer_with_stacks` file."""
    for pid, _ in processes.values():
        with suppress(ProcessLookupError):
            if _why_silent(pid) != _DEAF:  # as Lightning's Trainer makes it: the signal would end it
                os.kill(pid, signal.SIGUSR1)
    texts = dict.fromkeys(processes, "")
    silent = dict.fromkeys(processes, "")
    for _ in range(600):  # half a minute, far more than a process needs to write its stacks
        # In this order: a process that has ended has written all that it will write.
        silent = {rank: _why_silent(pid) for rank, (pid, _) in processes.items()}
        before, texts = texts, {rank: _read(path) for rank, (_, path) in processes.items()}
        if before == texts and all(texts[rank] or silent[rank] for rank in processes):
            break
        time.sleep(0.05)
    return {
        rank: f"most recent call first:\n{text}" if text else f"no answer{silent[rank]}"
        for rank, text in texts.items()
    }


def _why_silent(pid: int) -> str:
    """Return why a process cannot answer; "" if it can."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text(errors="replace").splitlines()
    except (FileNotFoundError, ProcessLookupError):  # the latter of a file that was open as the process went
        return ": the process has ended"
    status = dict(line.partition(":")[::2] for line in lines)
    state = status["State"].split()[0]
    if state in "ZX":
        return ": the process has ended"
    if not int(status["SigCgt"], 16) >> (signal.SIGUSR1 - 1) & 1:
        return _DEAF
    return ": the process is stopped" if state in "Tt" else ""


def _read(path: Path) -> str:
    return path.read_text(errors="replace").rstrip() if path.exists() else ""


def traceback_text(error: BaseException, caller: str) -> str:
    """Return a traceback without its first frames of the file ``caller``."""
    frames = error.__traceback__
    while frames is not None and frames.tb_frame.f_code.co_filename == caller and frames.tb_next is not None:
        frames = frames.tb_next
    return "".join(traceback.format_exception(type(error), error, frames)).rstrip()
