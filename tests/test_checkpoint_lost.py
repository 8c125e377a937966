"""Nothing whole is lost: by odd paths, clocks set back, two jobs in a folder, or the tools' output."""

import fcntl
import os
import stat
import subprocess
import sys
import threading
import time
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn

from forked import fork_context
from pool import Ranks, on_ranks
from waiting import LIMIT
from zero_optim import CheckpointError, RankMismatchError, ZeroRedundancyOptimizer, checkpoint, cli, launch
from zero_optim.checkpoint import files, saving
from zero_optim.checkpoint import folder as folders
from zero_optim.checkpoint.files import LOCK, FolderLock, open_part

if TYPE_CHECKING:
    from multiprocessing.connection import Connection


def save(path: Path | str, extra: object = None, **options: Any) -> None:
    checkpoint.save(path, model=nn.Linear(2, 2), extra=extra, **options)


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


# ---------------------------------------------------------------------- paths


@on_ranks(1)
def test_a_path_that_names_no_folder_of_its_own_is_refused_and_nothing_is_removed(tmp_path: Path) -> None:
    run = tmp_path / "run"
    for step in range(3):
        save(run / str(step))
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(run)
        for path in ("", "..", "0/..", "/"):
            with pytest.raises(ValueError, match=r"expected path to end in the name of a folder"):
                save(path, keep=1)
    assert names(run) == ["0", "1", "2"]
    assert names(tmp_path) == ["run"]


@on_ranks(1)
def test_keep_removes_only_folders_whose_names_differ_in_the_number_at_the_end(tmp_path: Path) -> None:
    for name in ("step-1", "best", "b-1", "step-2", "step-10"):
        save(tmp_path / name)
    save(tmp_path / "step-11", keep=2)
    assert names(tmp_path) == ["b-1", "best", "step-10", "step-11"]
    save(tmp_path / "best", keep=1)
    assert names(tmp_path) == ["b-1", "best", "step-10", "step-11"]
    for name in ("model7b", "run1-step9", "model13b", "run2-step9"):
        save(tmp_path / "runs" / name, keep=1)
    assert names(tmp_path / "runs") == ["model13b", "model7b", "run1-step9", "run2-step9"]


@on_ranks(1)
def test_a_save_in_the_background_goes_where_it_was_sent_whatever_folder_is_current_then(
    tmp_path: Path,
) -> None:
    (tmp_path / "elsewhere").mkdir()
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path)
        pending = checkpoint.save_async("one", model=nn.Linear(300, 300))
        patch.chdir(tmp_path / "elsewhere")
        pending.wait()
    assert pending.path == tmp_path / "one"
    assert checkpoint.latest(tmp_path) == tmp_path / "one"
    assert names(tmp_path / "elsewhere") == []


# ---------------------------------------------------------------------- clocks


@on_ranks(1)
def test_a_clock_that_is_set_back_neither_removes_the_new_ones_nor_hides_them(tmp_path: Path) -> None:
    hour = 3600 * 10**9
    with pytest.MonkeyPatch.context() as patch:
        for step in range(9):
            now = time.time_ns() - (2 * hour if step > 3 else 0)
            patch.setattr(folders.time, "time_ns", lambda now=now: now)
            save(tmp_path / str(step), extra=step, keep=3)
            assert checkpoint.latest(tmp_path) == tmp_path / str(step)
    assert names(tmp_path) == ["6", "7", "8"]


# ---------------------------------------------------------------------- two jobs


@on_ranks(2)
def test_the_second_of_two_jobs_that_save_into_one_folder_raises_on_all_ranks(tmp_path: Path) -> None:
    path = tmp_path / "one"
    save(path, extra="before")
    dist.barrier()
    lock = FolderLock(path) if dist.get_rank() == 0 else None  # as another job would
    dist.barrier()
    for call in (checkpoint.save, lambda *args, **more: checkpoint.save_async(*args, **more).wait()):
        with pytest.raises(CheckpointError, match="another save into this folder is under way"):
            call(path, extra="late")
    assert checkpoint.load(path) == "before"
    dist.barrier()
    if lock is not None:
        (tmp_path / "two").mkdir()
        (tmp_path / "two" / LOCK).touch()  # left by a killed process: it blocks nobody
        lock.close()
    dist.barrier()
    save(path, extra="after")
    save(tmp_path / "two", extra="after")
    for name in ("one", "two"):
        assert checkpoint.load(tmp_path / name) == "after"
    dist.barrier()
    assert len(names(path)) == 1 + dist.get_world_size()


# ---------------------------------------------------------------------- outputs of the tools


@pytest.fixture
def saved(ranks1: Ranks, tmp_path: Path) -> Path:
    ranks1.run(save, tmp_path / "one")
    return tmp_path / "one"


def test_an_output_inside_the_checkpoint_no_regular_file_or_without_a_name_is_refused_and_stays(
    saved: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    here, fifo = tmp_path / "here", tmp_path / "fifo"
    here.mkdir()
    monkeypatch.chdir(here)
    os.mkfifo(fifo)
    for name, target in (("door", saved), ("link.pt", saved / "manifest.json"), ("null", os.devnull)):
        (tmp_path / name).symlink_to(target)
    before = {path: path.read_bytes() for path in saved.iterdir()}
    inside = saved / "manifest.json", saved / "new.pt", tmp_path / "door/new.pt", tmp_path / "link.pt"
    for tool, more, line, outs in (
        ("consolidate", ("--weights",), "inside the source", inside),
        ("consolidate", ("--weights",), "no regular file", (fifo, tmp_path / "null", tmp_path)),
        ("consolidate", ("--weights",), "", ("",)),
        ("convert", ("--to", "zero-optim"), "source", (saved, saved / "inside", tmp_path / "door")),
        ("convert", ("--to", "zero-optim"), "", ("",)),
    ):
        for out in outs:
            assert cli.main([tool, str(saved), str(out), *more]) == 2
            assert line in capsys.readouterr().err
    assert {path: path.read_bytes() for path in saved.iterdir()} == before
    assert stat.S_ISFIFO(fifo.lstat().st_mode)
    assert (tmp_path / "null").is_symlink()
    assert names(here) == []


def test_what_users_keep_beside_an_output_stays_and_links_there_are_not_followed(
    saved: Path, tmp_path: Path
) -> None:
    mine, out, target = (tmp_path / name for name in ("out.pt.part", "out.pt", "target"))
    mine.write_text("mine")
    target.write_text("untouched")
    for link in (out, saved / "manifest.json.part"):
        link.symlink_to(target)
    (tmp_path / f"out.pt.{'0' * 16}.part").touch()  # left by a process that was killed just now
    written, file = open_part(out)  # by one that runs
    with file:
        assert cli.main(["consolidate", str(saved), str(out), "--weights", "--force"]) == 0
    assert torch.load(out, weights_only=True).keys() == {"weight", "bias"}
    assert not out.is_symlink()
    assert mine.read_text() == "mine"
    assert names(tmp_path) == sorted(["one", written.name, "out.pt", "out.pt.part", "target"])
    assert cli.main(["convert", str(saved), str(tmp_path / "two"), "--to", "zero-optim"]) == 0
    assert target.read_text() == "untouched"


@on_ranks(1)
def test_saving_follows_no_link_that_was_planted_in_the_folder(tmp_path: Path) -> None:
    path, target = tmp_path / "one", tmp_path / "target"
    target.write_text("untouched")
    path.mkdir()
    for name in ("manifest.json", "manifest.json.part"):
        (path / name).symlink_to(target)
    save(path)
    assert checkpoint.latest(path) == path
    assert not (path / "manifest.json").is_symlink()
    assert target.read_text() == "untouched"


# ---------------------------------------------------------------------- arguments of one rank


class Other(nn.Linear):
    pass


@on_ranks(2)
def test_what_one_rank_is_given_wrong_raises_on_all(tmp_path: Path) -> None:
    path = tmp_path / "one"
    model = nn.Linear(2, 2)
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.SGD, lr=0.1)
    right: dict[str, Any] = {"path": path, "model": model, "optimizer": optimizer}
    mine = dist.get_rank() == 1
    wrongs: list[tuple[dict[str, Any], type[Exception], str]] = [
        ({"path": path.with_name("two")}, RankMismatchError, "path="),
        ({"path": 3}, TypeError, "expected path"),
        ({"model": Other(2, 2), "optimizer": None}, RankMismatchError, "class Other|has"),
        ({"optimizer": torch.optim.SGD(model.parameters(), lr=0.1)}, TypeError, "expected optimizer.*SGD"),
        ({"optimizer": None}, RankMismatchError, "what to save"),
        ({"keep": 0}, ValueError, "expected keep"),
        ({"extra": 1}, RankMismatchError, "what to save"),
        ({"extra": object()}, TypeError, "extra holds a object"),
    ]
    for call in (checkpoint.save, checkpoint.save_async):
        for wrong, kind, text in wrongs:
            with pytest.raises(kind, match=text):
                call(**({**right, **wrong} if mine else right))  # type: ignore[operator]
    with pytest.raises(RankMismatchError, match=r"weight: float32 \(2, 3\)"):
        checkpoint.save(path, model=nn.Linear(3, 2) if mine else model)
    checkpoint.save(**right)
    with pytest.raises(RankMismatchError, match="the checkpoint to load"):
        checkpoint.load(path, model=model, optimizer=None if mine else optimizer)
    checkpoint.load(**right)


# ---------------------------------------------------------------------- nobody waits


def save_and_leave(path: Path) -> None:
    checkpoint.save_async(path, model=nn.Linear(300, 300), extra="left")


UNSEEN = """
import sys, torch, torch.distributed as dist
from unittest import mock
from zero_optim import checkpoint
from zero_optim.checkpoint import saving
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
mock.patch.object(saving, "write_tensors", side_effect=OSError("planted")).start()
checkpoint.save_async(sys.argv[1], model=torch.nn.Linear(2, 2))
"""


AT_EXIT = """
import sys, threading, torch, torch.distributed as dist
from zero_optim import checkpoint
from zero_optim.checkpoint import saving
from zero_optim.run.rank import use_loopback
use_loopback()
path, rank = sys.argv[1:]
dist.init_process_group("gloo", store=dist.FileStore(path + ".store", 2), rank=int(rank), world_size=2)
write = saving.write_tensors
def start_none(thread):
    raise RuntimeError("can't create new thread at interpreter shutdown")
def write_at_exit(*args):
    threading.main_thread().join()
    threading.Thread.start = start_none  # as Python 3.12 has it
    return write(*args)
saving.write_tensors = write_at_exit
torch.manual_seed(0)
checkpoint.save_async(path, model=torch.nn.Linear(300, 300), extra="left")
"""


@on_ranks(1)
def test_a_save_for_which_nobody_waits_is_whole_when_the_process_has_ended(tmp_path: Path) -> None:
    path = tmp_path / "one"
    scripts = [
        subprocess.Popen([sys.executable, "-c", AT_EXIT, str(path), str(rank)], stderr=subprocess.PIPE)
        for rank in range(2)
    ]
    for script in scripts:
        _, told = script.communicate(timeout=LIMIT)
        assert (script.returncode, told) == (0, b"")
    torch.manual_seed(0)
    expected, model = nn.Linear(300, 300), nn.Linear(300, 300)
    assert checkpoint.load(path, model=model) == "left"
    assert torch.equal(model.weight, expected.weight)


def save_and_destroy(path: Path) -> None:
    destroyed, real = threading.Event(), saving.write_tensors

    def write(*args: Any) -> Any:
        destroyed.wait()
        return real(*args)

    with mock.patch.object(saving, "write_tensors", write):
        checkpoint.save_async(path, model=nn.Linear(300, 300), extra="left")
        dist.destroy_process_group()
        destroyed.set()


@pytest.mark.slow
def test_a_save_in_the_background_completes_though_the_group_is_destroyed(tmp_path: Path) -> None:
    launch(save_and_destroy, 2, tmp_path / "one")
    assert checkpoint.peek(tmp_path / "one").extra == "left"


@pytest.mark.slow
def test_a_save_for_which_nobody_waits_ends_before_the_group_of_launch_or_its_error_is_told(
    tmp_path: Path,
) -> None:
    launch(save_and_leave, 2, tmp_path / "one")
    assert checkpoint.peek(tmp_path / "one").extra == "left"
    script = [sys.executable, "-c", UNSEEN, str(tmp_path / "two")]
    told = subprocess.run(script, capture_output=True, text=True, check=True).stderr
    assert f"{tmp_path / 'two'} was not saved: cannot write" in told
    assert "planted" in told


def hold(path: Path, began_ns: int, pipe: "Connection[Any, Any]") -> None:
    """Hold the lock of a folder, as a process that began then, until a word comes."""
    files._BEGAN_NS = began_ns
    lock = FolderLock(path)
    pipe.send("held")
    pipe.recv()
    lock.close()


def wait_for(pipe: "Connection[Any, Any]", flock: Any, descriptor: int, kind: int) -> None:
    """Lock a file as ``flock``; if that is to wait, the other process releases it first."""
    if not kind & fcntl.LOCK_NB:
        pipe.send("release")
    flock(descriptor, kind)


def test_of_two_jobs_in_a_folder_the_one_that_began_later_refuses_and_names_the_other(tmp_path: Path) -> None:
    context = fork_context()
    for began_ns in (1, 2**62):
        ours, theirs = context.Pipe()
        other = context.Process(target=hold, args=(tmp_path / "one", began_ns, theirs))
        other.start()
        assert ours.recv() == "held"
        if began_ns == 1:
            with pytest.raises(
                CheckpointError, match=rf"of process {other.pid} on .*End the older job first"
            ):
                FolderLock(tmp_path / "one")
            ours.send("release")
        else:
            with mock.patch.object(fcntl, "flock", partial(wait_for, ours, fcntl.flock)):
                FolderLock(tmp_path / "one").close()
        other.join(LIMIT)
        assert other.exitcode == 0
