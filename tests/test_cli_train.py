"""``zero-optim train`` as a user runs it, in processes of its own, and however it may end."""

import json
import os
import pty
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import zero_optim
from processes import children, is_alive, listening, reachable_from_outside, stat
from zero_optim.demo.trace import spans_of

TIMEOUT = 400.0  # seconds, for whatever is waited for: starting two ranks takes some, on a busy machine
TINY = shlex.split("--layers 1 --width 16 --heads 2 --context 32 --batch-size 8 --warmup 2")
_ENDLESS = "--steps 1000000 --lr-schedule constant --save-every 40 --eval-every 0 --out run"
ENDLESS = [*TINY, *shlex.split(_ENDLESS)]
MODULE = (sys.executable, "-m", "zero_optim", "train")


class Run:
    """A command in a session of its own, whose processes can be found again."""

    def __init__(self, folder: Path, *arguments: str, command: tuple[str, ...] = MODULE) -> None:
        self.folder = folder
        self._log = folder / "output"
        package = str(Path(zero_optim.__file__).parents[1])
        path = os.pathsep.join([package, str(folder), os.environ.get("PYTHONPATH", "")])
        with self._log.open("wb") as log:
            self.process = subprocess.Popen(
                [*command, *arguments],
                cwd=folder,
                env={**os.environ, "PYTHONPATH": path, "TMPDIR": str(folder)},
                stdout=log,
                stderr=log,
                start_new_session=True,
                # As from a terminal: a shell that runs the tests in the background has SIGINT ignored.
                preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # noqa: PLW1509
            )
        self.workers: list[int] = []

    @property
    def output(self) -> str:
        return self._log.read_text(errors="replace")

    def wait(self) -> int:
        """Wait for the end; gives the exit status, and has seen that no worker is left."""
        try:
            status = self.process.wait(TIMEOUT)
        except subprocess.TimeoutExpired:
            self.fail("did not end")
        self.wait_until(lambda: not any(map(is_alive, self.workers)), f"workers {self.workers} to be gone")
        return status

    def wait_for_updates(self, count: int) -> None:
        """Wait until the ranks have trained a while, and note their processes."""
        self.wait_until(lambda: len(metrics(self.folder / "run")) > count, f"{count} updates")
        self.workers = [
            pid
            for pid in children(self.process.pid)
            if b"spawn_main" in Path(f"/proc/{pid}/cmdline").read_bytes()
        ]
        assert len(self.workers) == 2

    def wait_until(self, holds: Any, what: str) -> None:
        deadline = time.monotonic() + TIMEOUT
        while not holds():
            if time.monotonic() > deadline:
                self.fail(f"waited in vain for {what}")
            time.sleep(0.05)

    def fail(self, what: str) -> None:
        self.end()
        pytest.fail(f"{what}; the processes said:\n{self.output}")

    def end(self) -> None:
        for pid in [*children(self.process.pid), *self.workers]:
            if is_alive(pid):
                os.kill(pid, signal.SIGKILL)
        self.process.kill()
        self.process.wait()


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Any]:
    runs = []

    def start(*arguments: str, **options: Any) -> Run:
        runs.append(Run(tmp_path, *arguments, **options))
        return runs[-1]

    yield start
    for each in runs:
        each.end()


def metrics(folder: Path) -> list[dict[str, float]]:
    """The whole lines of a run's metrics, while it may be writing one."""
    path = folder / "metrics.jsonl"
    lines = path.read_text().split("\n")[:-1] if path.exists() else []
    return [json.loads(line) for line in lines]


def losses(folder: Path) -> dict[float, float | None]:
    """The loss of each update; none comes twice."""
    lines = metrics(folder)
    assert len({line["step"] for line in lines}) == len(lines)
    return {line["step"]: line.get("train_loss") for line in lines}


def started_at(pid: int) -> tuple[int, int]:
    """When a process was started, in clock ticks; process ids begin again at 1 at some time."""
    return int(stat(pid)[19]), pid


def test_a_run_shows_what_it_came_to_and_goes_on_with_another_number_of_ranks(
    run: Any, tmp_path: Path
) -> None:
    first = run(*TINY, "--steps", "12", "--eval-every", "5", "--out", "run", "--sample-length", "20")
    assert first.wait() == 0, first.output
    shown = first.output
    for word in ("GPT of", "AdamW sharded over 2 ranks (cpu, gloo)", "update 12/12", "parameters owned"):
        assert word in shown
    rows = [line.split() for line in shown.splitlines() if line.strip().endswith("%")]
    assert [row[0] for row in rows] == ["0", "1"]
    assert sum(int(row[2].replace(",", "")) for row in rows) == int(rows[0][4].replace(",", ""))
    assert "\x1b" not in shown  # no terminal, no colours
    assert "checkpoints 1 written in the background; training waited" in shown
    assert {path.name for path in (tmp_path / "run").iterdir()} == {
        "checkpoints", "config.json", "loss.png", "metrics.jsonl",
    }  # fmt: skip
    lines = metrics(tmp_path / "run")
    assert [line["step"] for line in lines] == list(range(13))
    assert [line["step"] for line in lines if "val_loss" in line] == [0, 5, 10, 12]
    assert lines[-1]["val_loss"] < lines[0]["val_loss"]

    second = run("--resume", "run", "--steps", "15", "--nproc", "1", "--sample-length", "0")
    assert second.wait() == 0, second.output
    assert "from update 12" in second.output
    assert "sharded over 1 rank (" in second.output
    assert "sample" not in second.output
    more = metrics(tmp_path / "run")
    assert more[:13] == lines
    assert [line["step"] for line in more[13:]] == [13, 14, 15]
    assert more[-1]["val_loss"] < lines[-1]["val_loss"] + 0.05


@pytest.mark.slow
@pytest.mark.parametrize(
    "reduction",
    [
        pytest.param(("--hook", "bf16", "--overlap"), id="overlap"),
        pytest.param(("--shard", "gradients"), id="gradients", marks=pytest.mark.exhaustive),
        pytest.param(("--shard", "parameters"), id="parameters"),
    ],
)
def test_a_traced_run_leaves_a_picture_with_reductions_steps_and_gathers(
    run: Any, tmp_path: Path, reduction: tuple[str, ...]
) -> None:
    options = (*reduction, "--trace", "--sample-length", "0", "--steps", "8")
    traced = run(*TINY, *options, "--out", "run")
    assert traced.wait() == 0, traced.output
    assert "of reduce, step and gather overlapped with forward and backward" in traced.output
    assert ("AdamW and gradients sharded over 2 ranks (" in traced.output) == ("gradients" in reduction)
    assert ("AdamW, gradients and parameters sharded over 2" in traced.output) == ("parameters" in reduction)
    assert ("gradients held" in traced.output) == ("--shard" in reduction)
    assert ("a rank keeps at most" in traced.output) == ("parameters" in reduction)
    assert (tmp_path / "run" / "trace.png").read_bytes().startswith(b"\x89PNG")
    spans = spans_of(tmp_path / "run" / "trace.json")
    assert {span.row for span in spans} == {"compute", "reduce", "step", "gather"}


@pytest.mark.parametrize(
    ("signum", "whole_group"),
    [
        pytest.param(signal.SIGINT, False, id="SIGINT"),
        pytest.param(
            signal.SIGINT, True, id="SIGINT to the group", marks=[pytest.mark.slow, pytest.mark.exhaustive]
        ),
        pytest.param(signal.SIGTERM, False, id="SIGTERM", marks=pytest.mark.slow),
    ],
)
def test_a_run_listens_to_its_own_machine_only_and_an_interrupted_one_leaves_a_whole_checkpoint(
    run: Any, signum: signal.Signals, whole_group: bool
) -> None:
    interrupted = run(*ENDLESS)
    interrupted.wait_for_updates(50)
    processes = [interrupted.process.pid, *interrupted.workers]
    assert all(listening(worker) for worker in interrupted.workers)
    assert {pid: reachable_from_outside(pid) for pid in processes} == {pid: [] for pid in processes}
    saved = interrupted.folder / "run" / "checkpoints"
    interrupted.wait_until(lambda: any(saved.glob("*/manifest.json")), "a checkpoint")
    (os.killpg if whole_group else os.kill)(interrupted.process.pid, signum)
    assert interrupted.wait() == 128 + signum
    last = interrupted.output.splitlines()[-1]
    assert f"ended by {signum.name}; update " in last
    assert last.endswith("resume with: zero-optim train --resume run")
    assert "Traceback" not in interrupted.output
    if signum == signal.SIGTERM:  # once is enough: updates after the checkpoint come again, bit for bit
        before = losses(interrupted.folder / "run")
        steps = max(before) + 1
        resumed = run("--resume", "run", "--steps", str(steps), "--save-every", "0", "--sample-length", "0")
        assert resumed.wait() == 0, resumed.output
        after = losses(interrupted.folder / "run")
        assert list(after) == list(range(steps + 1))
        assert {step: after[step] for step in before} == before


@pytest.mark.slow
def test_a_killed_rank_is_named_and_the_others_end(run: Any) -> None:
    killed = run(*ENDLESS)
    killed.wait_for_updates(1)
    second = max(killed.workers, key=started_at)  # rank 1
    os.kill(second, signal.SIGKILL)
    assert killed.wait() == 1
    assert "zero-optim: rank 1 of 2 was killed by SIGKILL\n" in killed.output + "\n"
    assert "Traceback" not in killed.output


FAILING = """
import time, torch, torch.distributed as dist

class Slow(OSError):  # the other rank hears of it, and raises, before this one has told why it failed
    def __str__(self):
        time.sleep(1)
        return super().__str__()

class Failing(torch.optim.SGD):
    def step(self, closure=None):
        large = sum(p.numel() for group in self.param_groups for p in group["params"]) > 1000  # no trial
        if large and dist.is_initialized() and dist.get_rank() == 1:
            raise Slow("the second rank does not like this")
        return super().step(closure)
"""


def test_an_exception_shows_its_own_traceback_once(run: Any, tmp_path: Path) -> None:
    (tmp_path / "failing.py").write_text(FAILING)
    failed = run(*TINY, "--optimizer", "failing:Failing", "--out", "run")
    assert failed.wait() == 1
    _, _, shown = failed.output.partition("zero-optim: rank 1 of 2 failed:\n\nTraceback")
    assert "\nfailing.Slow: the second rank does not like this" in shown, failed.output
    assert failed.output.count("Traceback") == 1


@pytest.mark.slow
def test_it_runs_under_torchrun(run: Any, tmp_path: Path) -> None:
    torchrun = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    command = (*torchrun, "-m", "zero_optim", "train")
    done = run(*TINY, "--steps", "2", "--out", "run", "--sample-length", "0", command=command)
    assert done.wait() == 0, done.output
    assert done.output.count("update 2/2") == 1
    assert (tmp_path / "run" / "checkpoints" / "00000002" / "manifest.json").exists()


@pytest.mark.slow
@pytest.mark.exhaustive
def test_on_a_terminal_there_is_a_bar(tmp_path: Path) -> None:
    ours, theirs = pty.openpty()
    package = str(Path(zero_optim.__file__).parents[1])
    environment = {**os.environ, "PYTHONPATH": package, "TERM": "xterm-256color"}
    arguments = [*MODULE, *TINY, "--steps", "30", "--sample-length", "0", "--nproc", "1", "--out", "run"]
    process = subprocess.Popen(
        arguments, cwd=tmp_path, env=environment, stdout=theirs, stderr=theirs, start_new_session=True
    )
    os.close(theirs)
    shown = b""
    try:
        while chunk := os.read(ours, 4096):
            shown += chunk
    except OSError:  # Linux's way to say that the other end is closed
        pass
    finally:
        os.close(ours)
        process.kill() if process.poll() is None and process.wait(TIMEOUT) is None else None
    assert process.returncode == 0
    text = shown.decode()
    assert "30/30" in text
    assert "100%" in text
    assert "━" in text
    assert text.rindex("\x1b[?25h") > text.rindex("\x1b[?25l")  # the cursor is back
