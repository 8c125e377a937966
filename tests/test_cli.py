"""The command line: bad input gets one line and status 2."""

from pathlib import Path

import pytest

from zero_optim import cli
from zero_optim.checkpoint import offline


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        ("", "the following arguments are required: COMMAND (see zero-optim --help)"),
        ("inspect there --frobnicate", "unrecognized arguments: --frobnicate"),
        ("convert there out --to tensors", "expected a format of "),
    ],
)
def test_bad_input_gets_one_line_and_status_2(
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    arguments: str,
    line: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    try:
        status = cli.main(arguments.split())
    except SystemExit as ended:  # argparse's way
        status = ended.code  # type: ignore[assignment]
    assert status == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("zero-optim: ")
    assert line in err
    assert err.count("\n") == 1


def test_ctrl_c_ends_a_command_with_one_line_and_status_130(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def interrupted(_folder: Path) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(offline, "inspect", interrupted)
    assert cli.main(["inspect", str(tmp_path)]) == 130
    assert capsys.readouterr() == ("", "zero-optim: ended by SIGINT\n")
