"""The command ``zero-optim``. Errors become one line and an exit status here, and nowhere else.

Exit status: 0 done, 1 a checkpoint is not complete, 2 bad input, 130 ended by Ctrl-C.
"""

import argparse
import json
import platform
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

import torch

from zero_optim import __version__
from zero_optim.errors import ZeroOptimError


class _Parser(argparse.ArgumentParser):
    """Prints one line for bad input, as for every other error."""

    def error(self, message: str) -> NoReturn:
        _complain(f"{message} (see {self.prog} --help)")
        raise SystemExit(2)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command with ``arguments``, by default those of this process; return the exit status."""
    parser = _parser()
    options = vars(parser.parse_args(arguments))
    if options["command"] is None:
        parser.print_help()
        return 0
    try:
        return _run(options.pop("command"), options)
    except KeyboardInterrupt:
        _complain("ended by SIGINT")
        return 130
    except (ZeroOptimError, ValueError, TypeError) as error:
        _complain(str(error))
        return 2


def _complain(line: str) -> None:
    print(f"zero-optim: {line}", file=sys.stderr)


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="zero-optim",
        description="Work with checkpoints of zero_optim: one process, no process group.",
    )
    software = f"zero-optim {__version__} (PyTorch {torch.__version__}, Python {platform.python_version()})"
    parser.add_argument("--version", action="version", version=software)
    commands = parser.add_subparsers(dest="command", metavar="COMMAND")

    def add(name: str, text: str, description: str) -> Any:  # noqa: ANN401
        return commands.add_parser(name, help=text, description=description)

    def add_out(command: Any, out: str) -> None:  # noqa: ANN401
        command.add_argument("out", metavar="OUT", type=Path, help=out)
        command.add_argument("--force", action="store_true", help="replace OUT if it exists")

    command = add(
        "inspect",
        "show what a checkpoint holds and whether it is complete",
        "Show what a checkpoint holds, who wrote it, and whether it is complete: all of it "
        "is read and compared with its checksums. The exit status is 1 if it is not complete.",
    )
    command.add_argument("source", metavar="DIR", type=Path, help="a checkpoint")
    command.add_argument("--json", action="store_true", help="print JSON")
    command = add(
        "consolidate",
        "write a checkpoint's optimizer state, or its weights, to one file",
        "Write the whole optimizer state of a checkpoint to OUT, in the format of torch.optim. "
        "With --weights, write the model's state dict instead. One tensor at a time is in memory.",
    )
    command.add_argument("source", metavar="DIR", type=Path, help="a checkpoint")
    add_out(command, "a .pt file, or .safetensors for weights")
    command.add_argument("--weights", action="store_true", help="write the model's state dict")
    command = add(
        "convert",
        "write a checkpoint of one library in the format of another",
        "Write a checkpoint of any format in another one: torch (a torch.save file, state by index), "
        "torch-names (by name), dcp (a folder of torch.distributed.checkpoint), or zero-optim.",
    )
    foreign = "a checkpoint of zero_optim, torch.distributed.checkpoint or DeepSpeed, or a torch.save file"
    command.add_argument("source", metavar="SRC", type=Path, help=foreign)
    add_out(command, "the new file or folder")
    command.add_argument(
        "--to", required=True, metavar="FORMAT", help="torch, torch-names, dcp or zero-optim"
    )
    ranks = "number of ranks whose files a zero-optim checkpoint has, 1 by default; any number loads it"
    command.add_argument("--world-size", default=1, help=ranks, type=int, metavar="N")
    names = "a line with a name for each of the optimizer's parameters, if SRC has none"
    command.add_argument("--names", type=Path, metavar="FILE", help=names)
    command = add(
        "reshard",
        "write a checkpoint anew for another number of ranks, which then load faster",
        "Write a checkpoint as N ranks without cuts would have written it: each rank then finds "
        "the parameters that it owns whole in one file; rows of a cut parameter may lie in another rank's. "
        "This is never necessary, since a checkpoint loads on any number of ranks.",
    )
    command.add_argument("source", metavar="DIR", type=Path, help="a checkpoint")
    add_out(command, "folder of the new checkpoint")
    command.add_argument("--world-size", required=True, help="number of ranks", type=int, metavar="N")
    return parser


def _run(name: str, options: dict[str, Any]) -> int:
    from zero_optim.checkpoint import offline

    if name == "inspect":
        report = offline.inspect(options["source"])
        print(json.dumps(report, indent=1) if options["json"] else _as_table(report))
        return 0 if report["complete"] else 1
    source, out, force = options["source"], options["out"], options["force"]
    if name == "consolidate":
        offline.consolidate(source, out, weights=options["weights"], force=force)
    elif name == "convert":
        ranks = options["world_size"]
        offline.convert(source, out, options["to"], _names_in(options), world_size=ranks, force=force)
    elif source.exists() and not (source / "manifest.json").exists():
        to = "zero-optim convert SRC OUT --to zero-optim"
        raise ValueError(f"{source} is no complete checkpoint of zero_optim; others: {to}")
    else:
        offline.reshard(source, out, options["world_size"], force=force)
    files = [path for path in (out.iterdir() if out.is_dir() else [out]) if path.is_file()]
    count = f" in {len(files)} files" if out.is_dir() else ""
    print(f"wrote {out}: {sum(path.stat().st_size for path in files):,} bytes{count}")
    return 0


def _names_in(options: dict[str, Any]) -> list[str] | None:
    try:
        return options["names"].read_text().splitlines() if options.get("names") else None
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
