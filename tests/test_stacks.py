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

ANSWERING = """
    import pathlib, sys
    from zero_optim.run.stacks import answer_with_stacks
    file = answer_with_stacks(pathlib.Path(sys.argv[1]))
    def wait_here():
        print("ready", flush=True)
        sys.stdin.read()
    wait_here()
"""


@contextmanager
def process(code: str, *args: str) -> Iterator[subprocess.Popen[str]]:
    """A process that runs until its input is closed, or it is killed."""
    text = "\n".join(line[4:] for line in code.splitlines())
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen([sys.executable, "-c", text, *args], text=True, **pipes) as started:  # type: ignore[call-overload]
        try:
            assert started.stdout.readline() == "ready\n"
            yield started
        finally:
            started.kill()


WAITING = """
    import sys
    print("ready", flush=True)
    sys.stdin.read()
"""


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Waiting is an error."""

    def refuse(_: float) -> None:
        raise AssertionError("it waits for a process that cannot answer")

    monkeypatch.setattr(stacks.time, "sleep", refuse)


@pytest.mark.usefixtures("impatient")
def test_a_process_that_has_ended_is_not_waited_for(tmp_path: Path) -> None:
    with process(WAITING) as one:
        one.kill()
        os.waitid(os.P_PID, one.pid, os.WEXITED | os.WNOWAIT)  # it stays a zombie, as a rank does
        found = stacks_of({3: (one.pid, tmp_path / "none")})
        assert found == {3: "no answer: the process has ended"}
        one.wait()
        assert stacks_of({3: (one.pid, tmp_path / "none")}) == found  # now nothing is left of it


@pytest.mark.usefixtures("impatient")
def test_a_process_that_is_stopped_is_not_waited_for(tmp_path: Path) -> None:
    with process(WAITING) as one:
        one.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, one.pid, os.WSTOPPED | os.WNOWAIT)
        assert stacks_of({0: (one.pid, tmp_path / "none")}) == {0: "no answer: the process is stopped"}


def test_those_that_can_answer_are_waited_for_beside_one_that_cannot(tmp_path: Path) -> None:
    with process(ANSWERING, str(tmp_path / "one")) as one, process(WAITING) as other:
        other.kill()
        os.waitid(os.P_PID, other.pid, os.WEXITED | os.WNOWAIT)
        found = stacks_of({0: (one.pid, tmp_path / "one"), 1: (other.pid, tmp_path / "other")})
    assert found[0].startswith("most recent call first:\n")
    assert " in wait_here" in found[0]
    assert found[1] == "no answer: the process has ended"
