"""`zero_optim.run.stacks`: who cannot answer is not waited for, and is told as what it is."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from zero_optim.run import stacks
from zero_optim.run.stacks import stacks_of

pytestmark = pytest.mark.skipif(
    not sys.platform.startswith("linux"), reason="only Linux tells the state of a process"
)

CODE = """
import pathlib, sys
from zero_optim.run.stacks import answer_with_stacks
file = answer_with_stacks(pathlib.Path(sys.argv[1])) if len(sys.argv) > 1 else None
def wait_here():
    print("ready", flush=True)
    sys.stdin.read()
wait_here()
"""


@contextmanager
def process(*args: str) -> Iterator[subprocess.Popen[str]]:
    """A process that runs until its input is closed, or it is killed; it answers with a file in ``args``."""
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen([sys.executable, "-c", CODE, *args], text=True, **pipes) as started:  # type: ignore[call-overload]
        try:
            assert started.stdout.readline() == "ready\n"
            yield started
        finally:
            started.kill()


def test_a_process_that_has_ended_or_is_stopped_is_not_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(_: float) -> None:
        raise AssertionError("it waits for a process that cannot answer")

    monkeypatch.setattr(stacks.time, "sleep", refuse)
    with process(str(tmp_path / "one")) as one, process(str(tmp_path / "other")) as other:
        one.kill()
        os.waitid(os.P_PID, one.pid, os.WEXITED | os.WNOWAIT)  # it stays a zombie, as a rank does
        other.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, other.pid, os.WSTOPPED | os.WNOWAIT)
        answers = stacks_of({3: (one.pid, tmp_path / "none"), 0: (other.pid, tmp_path / "none")})
        assert answers == {3: "no answer: the process has ended", 0: "no answer: the process is stopped"}
        one.wait()
        answers = stacks_of({3: (one.pid, tmp_path / "none")})
        assert answers == {3: "no answer: the process has ended"}  # now nothing is left of it


def test_a_process_that_does_not_catch_the_signal_is_not_ended_by_it(tmp_path: Path) -> None:
    with process() as one:
        answers = stacks_of({0: (one.pid, tmp_path / "none")})
        assert answers == {0: "no answer: the process has reset its handler of SIGUSR1"}
        assert one.poll() is None
