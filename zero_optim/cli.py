"""The command ``zero-optim``. Errors become one line and an exit status here, and nowhere else.

Exit status: 0 done, 1 a rank failed or a checkpoint is not complete, 2 bad input, 128 + n ended by signal n.
"""

import argparse
import json
import os
import platform
import shlex
import signal
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

import torch

from zero_optim import __version__
from zero_optim.demo import prepare
from zero_optim.demo.config import RunConfig, add_options
from zero_optim.errors import InterruptedRunError, RankFailedError, ZeroOptimError
from zero_optim.run.launch import launch

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)


class _Parser(argparse.ArgumentParser):
    """Prints one line for bad input, as for every other error."""

    def error(self, message: str) -> NoReturn:
        _complain(f"{message} (see {self.prog} --help)")
        raise SystemExit(2)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command and return the exit status.

    Args:
        arguments: of the command line, without the program's name; None for those of this process.
    """
    options = vars(_parser().parse_args(arguments))
    command = options.pop("command")
    try:
        return int(command(options))
    except KeyboardInterrupt:  # before the launcher handles signals
        _complain("ended by SIGINT")
        return 130


def run_train(options: dict[str, Any]) -> int:
    """Run ``zero-optim train``: as a rank if torchrun started this process, else as the launcher."""
    started = prepare.Started.here()
    try:
        config = prepare.prepare(options, started)
        if started is None or started.rank == 0:
            prepare.make_folder(config)
    except ValueError as error:
        if started is None or started.local_rank == 0:  # on each host: a file may be missing on one of them
            _complain(str(error))
        return 2
    if started is None:
        return _launch(config)
    from zero_optim.demo.train import train_under_torchrun

    train_under_torchrun(config, started)
    return 0


def _launch(config: RunConfig) -> int:
    """Run ``config.nproc`` ranks to their end. None still runs when this returns."""
    from zero_optim.demo.train import train

    backend = "nccl" if prepare.choose_device(config.device, config.nproc) == "cuda" else "gloo"
    threads = int(os.environ.get("OMP_NUM_THREADS", "0")) or None
    try:
        with _as_launcher():
            launch(train, config.nproc, config, backend=backend, threads=threads)
    except RankFailedError as error:
        _leave_bar()
        _complain(str(error))
        return 1
    except InterruptedRunError as error:
        _leave_bar()
        _complain(f"{error}; {_what_is_left(config)}")
        return 128 + error.signum
    return 0


@contextmanager
def _as_launcher() -> Iterator[None]:
    """Raise InterruptedRunError for signals, but for those that the caller ignores, as nohup and shells do.

    New processes import nothing from the current folder, where a run or a checkpoint may have left modules.
    """

    def interrupt(signum: int, _: object) -> None:
        raise InterruptedRunError(signum)

    signals = [signum for signum in _SIGNALS if signal.getsignal(signum) is not signal.SIG_IGN]
    before = {signum: signal.signal(signum, interrupt) for signum in signals}
    safe_path = os.environ.get("PYTHONSAFEPATH")
    os.environ["PYTHONSAFEPATH"] = "1"  # Python 3.11 or newer
    try:
        yield
    finally:
        del os.environ["PYTHONSAFEPATH"]
        if safe_path is not None:
            os.environ["PYTHONSAFEPATH"] = safe_path
        for signum, handler in before.items():
            signal.signal(signum, handler)


def _leave_bar() -> None:
    """Start a new line and show the cursor, which a bar hides until its rank ends it."""
    if sys.stdout.isatty():
        sys.stdout.write("\x1b[?25h\n")
        sys.stdout.flush()


def _what_is_left(config: RunConfig) -> str:
    try:
        source = prepare.look(prepare.locate(config.out))
    except ValueError:
        return "no checkpoint was saved yet"
    command = ["zero-optim", "train", "--resume", config.out]
    if ":" in config.optimizer:  # not taken from a checkpoint
        command += ["--optimizer", config.optimizer]
    return f"update {source.step} is saved; resume with: {shlex.join(command)}"


def _complain(line: str) -> None:
    print(f"zero-optim: {line}", file=sys.stderr)


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="zero-optim",
        description="Train with optimizer state that is sharded over ranks; work with its checkpoints.",
    )
    software = f"zero-optim {__version__} (PyTorch {torch.__version__}, Python {platform.python_version()})"
    parser.add_argument("--version", action="version", version=software)
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    command = commands.add_parser(
        "train",
        help="train a small GPT on text, with sharded optimizer state",
        description="Train a small GPT on text with DistributedDataParallel and a sharded optimizer. Under "
        "torchrun, on one host or several, each process is one rank. Otherwise it starts --nproc ranks on "
        "this host. Defaults are in parentheses.",
        argument_default=argparse.SUPPRESS,  # options not given come from the checkpoint or the defaults
    )
    command.set_defaults(command=run_train)
    add_options(command)
    _add_tools(commands)
    return parser


def _add_tools(commands: Any) -> None:  # noqa: ANN401 - argparse has no public name for it
    """Add the commands for checkpoints, which need one process and no process group."""

    def add(name: str, text: str, description: str, out: str = "", foreign: bool = False) -> Any:  # noqa: ANN401
        command = commands.add_parser(name, help=text, description=description)
        source = "a checkpoint"
        if foreign:
            source += ", a folder of torch.distributed.checkpoint or DeepSpeed, or a torch.save file"
            names = "a line with a name for each of the optimizer's parameters, if SRC has none"
            command.add_argument("--names", type=Path, metavar="FILE", help=names)
        command.add_argument("source", metavar="SRC" if foreign else "DIR", type=Path, help=source)
        if out:
            command.add_argument("out", metavar="OUT", type=Path, help=out)
        command.set_defaults(command=partial(_run_tool, name))
        return command

    command = add(
        "consolidate",
        "write a checkpoint's optimizer state, or its weights, to one file",
        "Write the whole optimizer state of a checkpoint to OUT, in the format of torch.optim. "
        "With --weights, write the model's state dict instead. One tensor at a time is in memory.",
        "a .pt file, or .safetensors for weights",
    )
    command.add_argument("--weights", action="store_true", help="write the model's state dict")
    command = add(
        "reshard",
        "write a checkpoint for another number of ranks",
        "Write a checkpoint as N ranks without cuts would have written it: each rank then finds "
        "the parameters that it owns whole in one file; rows of a cut parameter may lie in another rank's. "
        "This is never necessary, since a checkpoint loads on any number of ranks.",
        "folder of the new checkpoint",
        foreign=True,
    )
    command.add_argument("--world-size", required=True, help="number of ranks", type=int, metavar="N")
    command = add(
        "convert",
        "write a checkpoint in the format of another library",
        "Write a checkpoint of any format that reshard reads as torch.save or torch.distributed.checkpoint "
        "would have written it. Nothing that exists is overwritten.",
        "the new file or folder",
        foreign=True,
    )
    command.add_argument("--to", required=True, metavar="FORMAT", help="torch, torch-names, or dcp")
    command = add(
        "inspect",
        "show what a checkpoint holds and whether it is complete",
        "Show what a checkpoint holds, who wrote it, and whether it is complete: all of it "
        "is read and compared with its checksums. The exit status is 1 if it is not complete.",
    )
    command.add_argument("--json", action="store_true", help="print JSON")


def _run_tool(name: str, options: dict[str, Any]) -> int:
    """Run a tool; an error prints one line and gives exit status 2."""
    from zero_optim.checkpoint import offline

    try:
        if name == "consolidate":
            offline.consolidate(options["source"], options["out"], weights=options["weights"])
        elif name == "reshard":
            offline.reshard(options["source"], options["out"], options["world_size"], _names_in(options))
        elif name == "convert":
            offline.convert(options["source"], options["out"], options["to"], _names_in(options))
        else:
            report = offline.inspect(options["source"])
            print(json.dumps(report, indent=1) if options["json"] else _as_table(report))
            return 0 if report["complete"] else 1
    except (ZeroOptimError, ValueError, TypeError) as error:
        _complain(str(error))
        return 2
    return 0


def _names_in(options: dict[str, Any]) -> list[str] | None:
    try:
        return None if options["names"] is None else options["names"].read_text().splitlines()
    except OSError as error:
        raise ValueError(f"cannot read {error.filename}: {error.strerror}") from error


def _as_table(report: Mapping[str, Any]) -> str:
    """Write what `offline.inspect` returns as a table."""
    reason = report["reason"]
    head = [("checkpoint", report["path"]), ("complete", f"no: {reason}" if reason else "yes")]
    if report["saved"]:
        by = ", ".join(f"{name} {version}" for name, version in report["software"].items())
        ranks = f"{report['world_size']} rank{'s' if report['world_size'] > 1 else ''}"
        head += [("saved", f"{report['saved']} by {ranks}, {by}"), ("format", f"version {report['version']}")]
    lines = [f"{name:<12}{value}" for name, value in head]
    if report["sections"]:
        rows = [list(section.values()) for section in report["sections"]]
        lines += ["", *_table(("section", "tensors", "bytes", "values"), rows)]
    if report["files"]:
        rows = [[name, str(rank), nbytes] for name, rank, nbytes in report["files"]]
        lines += ["", *_table(("file", "rank", "bytes"), rows)]
    return "\n".join(lines)


def _table(head: Sequence[str], rows: Sequence[Sequence[Any]]) -> list[str]:
    """Align rows in columns: the first to the left, the others to the right."""
    text = [head, *([f"{cell:,}" if isinstance(cell, int) else cell for cell in row] for row in rows)]
    widths = [max(map(len, column)) for column in zip(*text, strict=True)]
    return [
        "  ".join([row[0].ljust(widths[0]), *(c.rjust(w) for c, w in zip(row[1:], widths[1:], strict=True))])
        for row in text
    ]
