"""``zero-optim train --survive``: ranks die, and the others train on, to the bits of a resumed run."""

import signal
from pathlib import Path
from typing import Any

import pytest

from test_cli_train import ENDLESS, FAILING, TINY, Run, metrics, run
from zero_optim.checkpoint.storage import CheckpointReader
from zero_optim.demo.config import RunConfig
from zero_optim.demo.meeting import Meeting, Round
from zero_optim.demo.prepare import Started, prepare
from zero_optim.demo.survival import next_round

__all__ = ["run"]  # a fixture

# A file says which process dies, and in which update. Behind the checkpoint it waits until that is complete.
MORTAL = """
import os, signal, time, torch, torch.distributed as dist
from pathlib import Path

COMPLETE = Path("run/checkpoints/00000004/manifest.json")

class Mortal(torch.optim.AdamW):
    def step(self, closure=None):
        large = sum(p.numel() for group in self.param_groups for p in group["params"]) > 1000  # no trial
        made = [int(state["step"]) for state in self.state.values() if "step" in state]
        if large and dist.is_initialized() and dist.get_world_size() > 1:
            update = max(made, default=0) + 1
            if Path(f"kill-{os.environ['RANK']}-{update}").exists():
                while update > 4 and not COMPLETE.exists():
                    time.sleep(0.02)
                os.kill(os.getpid(), signal.SIGKILL)
        return super().step(closure)
"""
OPTIONS = (
    *TINY, "--batch-size", "12", "--optimizer", "mortal:Mortal", "--eval-every", "0", "--save-every", "4",
    "--steps", "8", "--sample-length", "0",
)  # fmt: skip


def train(run: Any, folder: Path, kills: tuple[str, ...], *arguments: str) -> Run:
    """Run to the end; ``kills`` are pairs of process and update."""
    (folder / "mortal.py").write_text(MORTAL)
    for kill in folder.glob("kill-*"):
        kill.unlink()
    for kill in kills:
        (folder / f"kill-{kill}").touch()
    done: Run = run(*OPTIONS, *arguments)
    done.status = done.wait()  # type: ignore[attr-defined]
    return done


def bits(folder: Path) -> dict[str, bytes]:
    """All tensors of a checkpoint, whoever wrote them."""
    reader = CheckpointReader(folder)
    tensors = {key: entry for key, entry in reader.manifest.entries.items() if entry.dtype is not None}
    return {key: reader.read_tensor(key).numpy().tobytes() for key in tensors if "random" not in key}


def losses(folder: Path) -> list[tuple[float, float | None, float | None]]:
    return [(line["step"], line.get("train_loss"), line.get("val_loss")) for line in metrics(folder)]


def assert_same_run(folder: Path, *others: str) -> None:
    """The last checkpoint and all losses of two run folders have the same bits."""
    first, second = (bits(folder / name / "checkpoints" / "00000008") for name in others)
    assert first == second
    assert len(first) > 10
    first_losses, second_losses = (losses(folder / name) for name in others)
    assert first_losses == second_losses
    assert [step for step, *_ in first_losses] == list(range(9))


def test_when_rank_0_is_killed_another_one_takes_its_place_and_the_run_ends_well(
    run: Any, tmp_path: Path
) -> None:
    survived = train(run, tmp_path, ("0-6",), "--survive", "--nproc", "2", "--out", "run")
    shown = survived.output
    assert survived.status == 0, shown  # type: ignore[attr-defined]
    (line,) = [line for line in shown.splitlines() if line.startswith("rank 0 died")]
    assert line.startswith("rank 0 died (SIGKILL, process ")
    assert line.endswith("); 1 rank goes on from update 4")
    assert f"survived    {line}" in shown.splitlines()
    rows = [each.split()[0] for each in shown.splitlines() if each.strip().endswith("%")]
    assert rows == ["0"]
    assert "Traceback" not in shown
    assert "stalled" not in shown
    assert [step for step, *_ in losses(tmp_path / "run")] == list(range(9))
    assert (tmp_path / "run" / "checkpoints" / "00000008" / "manifest.json").exists()


@pytest.mark.slow
@pytest.mark.parametrize(
    "modes",
    [
        ("--shard", "gradients"),
        pytest.param((), marks=pytest.mark.exhaustive),
        pytest.param(("--overlap", "owners"), marks=pytest.mark.exhaustive),
        pytest.param(("--overlap", "everywhere", "--ddp", "torch"), marks=pytest.mark.exhaustive),
        pytest.param(("--hook", "bf16"), marks=pytest.mark.exhaustive),
    ],
    ids=lambda modes: " ".join(modes) or "default",
)
def test_survivors_train_on_to_the_bits_of_a_run_that_was_resumed_at_the_checkpoint(
    run: Any, tmp_path: Path, modes: tuple[str, ...]
) -> None:
    survived = train(run, tmp_path, ("1-6",), "--survive", "--nproc", "3", *modes, "--out", "run")
    shown = survived.output  # which the next run overwrites
    assert survived.status == 0, shown  # type: ignore[attr-defined]
    assert "2 ranks go on from update 4" in shown
    assert "Traceback" not in shown
    again = ("--resume", "run/checkpoints/00000004", "--no-survive", "--nproc", "2", "--out", "again")
    resumed = train(run, tmp_path, (), *again, *modes)
    assert resumed.status == 0, resumed.output  # type: ignore[attr-defined]
    assert_same_run(tmp_path, "run", "again")


@pytest.mark.slow
@pytest.mark.exhaustive
def test_deaths_one_after_the_other_leave_one_rank_which_trains_to_the_end(run: Any, tmp_path: Path) -> None:
    survived = train(run, tmp_path, ("1-6", "2-7"), "--survive", "--nproc", "3", "--out", "run")
    assert survived.status == 0, survived.output  # type: ignore[attr-defined]
    assert "2 ranks go on from update 4" in survived.output
    assert "1 rank goes on from update 4" in survived.output
    assert survived.output.count("survived ") == 2
    again = ("--resume", "run/checkpoints/00000004", "--no-survive", "--nproc", "1", "--out", "again")
    resumed = train(run, tmp_path, (), *again)
    assert resumed.status == 0, resumed.output  # type: ignore[attr-defined]
    assert_same_run(tmp_path, "run", "again")


@pytest.mark.slow
@pytest.mark.exhaustive
def test_a_death_before_the_first_checkpoint_starts_the_run_anew(run: Any, tmp_path: Path) -> None:
    survived = train(run, tmp_path, ("0-3",), "--survive", "--nproc", "3", "--out", "run")
    assert survived.status == 0, survived.output  # type: ignore[attr-defined]
    line = "2 ranks go on from the start, as no checkpoint was complete yet"
    assert survived.output.count(line) == 2  # when it happened, in one line, and at the end
    fresh = train(run, tmp_path, (), "--nproc", "2", "--out", "again")
    assert fresh.status == 0, fresh.output  # type: ignore[attr-defined]
    assert_same_run(tmp_path, "run", "again")


@pytest.mark.slow
@pytest.mark.exhaustive
def test_when_all_ranks_die_the_run_fails_and_its_checkpoint_is_whole(run: Any, tmp_path: Path) -> None:
    killed = train(run, tmp_path, ("0-6", "1-6"), "--survive", "--out", "run")
    assert killed.status == 1  # type: ignore[attr-defined]
    last = killed.output.splitlines()[-1]
    assert last.startswith("zero-optim: no rank is left: rank ")
    assert "was killed by SIGKILL (process " in last
    assert CheckpointReader(tmp_path / "run" / "checkpoints" / "00000004").manifest.entries


@pytest.mark.slow
def test_an_exception_of_one_rank_ends_the_run_with_its_traceback(run: Any, tmp_path: Path) -> None:
    (tmp_path / "failing.py").write_text(FAILING)
    failed = run(*TINY, "--optimizer", "failing:Failing", "--survive", "--out", "run")
    assert failed.wait() == 1
    _, _, shown = failed.output.partition("zero-optim: rank 1 failed:\nTraceback")
    assert shown.splitlines()[-1] == "failing.Slow: the second rank does not like this"
    assert failed.output.count("Traceback") == 1


@pytest.mark.slow
def test_an_interrupted_run_ends_all_ranks(run: Any) -> None:
    interrupted = run(*ENDLESS, "--survive", "--out", "run")
    interrupted.wait_for_updates(50)
    interrupted.wait_for_a_checkpoint()
    interrupted.process.send_signal(signal.SIGINT)
    assert interrupted.wait() == 130
    assert "ended by SIGINT; update " in interrupted.output.splitlines()[-1]


# ---------------------------------------------------------------------- parts


class Ended:
    """A process that was killed."""

    pid, returncode = 7, -signal.SIGKILL


def test_as_many_ranks_go_on_as_can_share_a_batch() -> None:
    config = RunConfig(out="there", nproc=4, batch_size=16)
    processes: Any = dict.fromkeys(range(4), Ended())
    found = next_round(config, Round(0, (0, 1, 2, 3), ""), [1], processes)
    assert found == Round(
        1,
        (0, 2),
        "rank 1 died (SIGKILL, process 7); rank 3 ended, as 3 ranks cannot share --batch-size 16 equally",
    )
    found = next_round(config, found, [0], processes)
    assert found == Round(2, (2,), "rank 0 died (SIGKILL, process 7)")
    assert next_round(config, found, [0], processes).members == ()


def test_a_process_leaves_for_a_newer_round_while_it_waits_for_the_dead(tmp_path: Path) -> None:
    meeting = Meeting(tmp_path)
    meeting.name(Round(0, (0, 1), ""))
    (first,) = meeting.rounds_after(-1)
    meeting.name(Round(1, (0,), "rank 1 died"))
    assert not meeting.come(first, 0)
    (second,) = meeting.rounds_after(0)
    assert second == Round(1, (0,), "rank 1 died")
    assert meeting.come(second, 0)
    assert [each.number for each in meeting.rounds_after(-1)] == [0, 1]


def test_survive_is_refused_where_it_cannot_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    given = {"survive": True, "out": str(tmp_path / "run")}
    with pytest.raises(ValueError, match="--survive needs zero-optim's own launcher, not torchrun"):
        prepare(given, Started(0, 2, 0, 2))
    monkeypatch.setattr("zero_optim.demo.ranks.choose_device", lambda *_: "cuda")
    with pytest.raises(ValueError, match="--survive works on the CPU only"):
        prepare(given, None)
