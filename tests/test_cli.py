"""The command line: bad input gets one line and status 2."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from test_checkpoint_files import KEPT
from zero_optim import cli
from zero_optim.checkpoint import offline

BAD = {
    "convert there out": "the following arguments are required: --to (see zero-optim convert",
    "inspect there --frobnicate": "unrecognized arguments: --frobnicate",
    "convert there out --to tensors": "expected a format of ",
    "consolidate nowhere out": "there is no such folder",
    "consolidate empty out": "it has no manifest, so it was never completed",
    "convert text.pt out --to zero-optim": "is no file of torch.save",
    "convert other.pt out --to zero-optim": "neither an optimizer's state",
    "inspect nowhere": "there is no such folder",
    "estimate test_estimate:nobody": "cannot import test_estimate:nobody (expected MODULE:NAME): module",
    "estimate test_estimate:lines_of": "missing 1 required positional argument: 'capsys'",
    "estimate builtins:dict": "expected builtins:dict to build a torch.nn.Module, got dict",
    "estimate test_estimate:Layers --units Block": "has no module of class Block, but of Layers, Linear",
}


@pytest.mark.parametrize("arguments", BAD)
def test_bad_input_gets_one_line_and_status_2(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, arguments: str
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("empty").mkdir()
    Path("text.pt").write_text("hello")
    torch.save({"a": 1}, "other.pt")
    try:
        status = cli.main(arguments.split())
    except SystemExit as ended:  # argparse's way
        status = ended.code  # type: ignore[assignment]
    assert status == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("zero-optim: ")
    assert BAD[arguments] in err
    assert err.count("\n") == 1
    assert not Path("out").exists()


def test_ctrl_c_ends_a_command_with_one_line_and_status_130(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def interrupted(_folder: Path) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(offline, "inspect", interrupted)
    assert cli.main(["inspect", str(tmp_path)]) == 130
    assert capsys.readouterr() == ("", "zero-optim: ended by SIGINT\n")


def test_without_a_command_the_help_is_shown_also_by_python_m(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([]) == 0
    shown = capsys.readouterr().out
    assert shown.startswith("usage: zero-optim [-h] [--version] COMMAND ...")
    command = [sys.executable, "-m", "zero_optim"]
    assert subprocess.run(command, capture_output=True, text=True, check=True, timeout=400).stdout == shown


@pytest.mark.parametrize(
    ("command", "made"),
    [
        ("consolidate {} out", "out"),
        ("convert {} out --to torch", "out"),
        ("convert {} out --to zero-optim", "out/manifest.json"),
    ],
)
def test_nothing_is_overwritten_without_force(
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    command: str,
    made: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    arguments = command.format(KEPT).split()
    assert cli.main(arguments) == 0
    assert "wrote out: " in capsys.readouterr().out
    before = Path(made).stat()
    assert cli.main(arguments) == 2
    line = "zero-optim: out exists: name another place, or pass --force (force=True) to replace it\n"
    assert capsys.readouterr() == ("", line)
    assert Path(made).stat() == before
    assert cli.main([*arguments, "--force"]) == 0
    assert Path(made).stat().st_ino != before.st_ino


def test_a_folder_is_not_replaced_by_a_file_even_with_force(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    mine = tmp_path / "out" / "mine"
    mine.parent.mkdir()
    mine.touch()
    assert cli.main(["convert", str(KEPT), str(mine.parent), "--to", "torch", "--force"]) == 2
    assert "only a file is replaced by a file: remove it first" in capsys.readouterr().err
    assert mine.exists()
