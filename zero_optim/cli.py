"""The command ``zero-optim``. Errors become one line and an exit status here, and nowhere else.

Exit status: 0 done, 1 a checkpoint is not complete, 2 bad input, 130 ended by Ctrl-C.
"""

import argparse
import json
import platform
import sys
from collections.abc import Callable, Mapping, Sequence
from itertools import product
from pathlib import Path
from pkgutil import resolve_name
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
    parser = _Parser(
        prog="zero-optim",
        description="Work with checkpoints, and estimate memory: in one process, without a process group.",
    )
    software = f"zero-optim {__version__} (PyTorch {torch.__version__}, Python {platform.python_version()})"
    parser.add_argument("--version", action="version", version=software)
    commands = parser.add_subparsers(dest="command", metavar="COMMAND")

    def add(name: str, text: str, more: str) -> Any:  # noqa: ANN401
        about = f"{text[0].upper()}{text[1:]}. {more}"
        return commands.add_parser(name, help=text, description=about).add_argument

    _add_tools(add)
    _add_estimate(add)
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


def _add_tools(add: Callable[..., Any]) -> None:
    def add_files(arg: Any, out: str, metavar: str = "DIR", source: str = "a checkpoint") -> None:  # noqa: ANN401
        arg("source", metavar=metavar, type=Path, help=source)
        arg("out", metavar="OUT", type=Path, help=out)
        arg("--force", action="store_true", help="replace OUT if it exists")

    arg = add(
        "inspect",
        "show what a checkpoint holds, who wrote it, and whether it is complete",
        "All of it is read and compared with its checksums. The exit status is 1 if it is not complete.",
    )
    arg("source", metavar="DIR", type=Path, help="a checkpoint")
    arg("--json", action="store_true", help="print JSON")
    arg = add(
        "consolidate",
        "write a checkpoint's optimizer state, or its weights, to one file",
        "The state has the format of torch.optim. One tensor at a time is in memory.",
    )
    add_files(arg, "a .pt file, or .safetensors for weights")
    arg("--weights", action="store_true", help="write the model's state dict")
    arg = add(
        "convert",
        "write a checkpoint of one library in the format of another",
        "The formats: torch (a torch.save file, state by index), torch-names (by name), zero-optim.",
    )
    foreign = "a checkpoint of zero_optim, torch.distributed.checkpoint or DeepSpeed, or a torch.save file"
    add_files(arg, "the new file or folder", "SRC", foreign)
    arg("--to", required=True, metavar="FORMAT", help="torch, torch-names or zero-optim")


def _add_estimate(add: Callable[..., Any]) -> None:
    arg = add(
        "estimate",
        "compute the memory of a rank, for each stage and number of ranks",
        "It is that of the rank that needs most, at rest and at the peak of a step, without activations and "
        "buffers. Stage 0 is DDP with an optimizer that is not sharded. The class is tried; nothing is "
        "launched, and the model takes no memory.",
    )
    arg("model", help="MODULE:FUNCTION that builds it, or a config.json of Hugging Face (with transformers)")
    arg("--optimizer", default="torch.optim:AdamW", metavar="MODULE:CLASS", help="torch.optim:AdamW")
    arg("--options", default={}, type=json.loads, metavar="JSON", help="the optimizer's arguments")
    arg("--ranks", type=int, nargs="+", default=[8], metavar="N", help="8 by default")
    arg("--stages", type=int, nargs="+", default=[0, 1, 2, 3], metavar="N", help="all by default")
    arg("--units", nargs="+", metavar="CLASS", help="names of the classes of stage 3's units")
    arg("--device", choices=("cpu", "cuda"), default="cuda", help="cuda by default")
    arg("--masters", action="store_true", help="the optimizer has master_dtype=torch.float32")
    arg("--bucket-view", action="store_true", help="DDP has gradient_as_bucket_view=True")
    arg("--json", action="store_true", help="print JSON")


def _run(name: str, options: dict[str, Any]) -> int:
    if name == "estimate":
        return _estimate(options)
    from zero_optim.checkpoint import offline

    if name == "inspect":
        report = offline.inspect(options["source"])
        print(json.dumps(report, indent=1) if options["json"] else _as_table(report))
        return 0 if report["complete"] else 1
    source, out, force = options["source"], options["out"], options["force"]
    if name == "consolidate":
        offline.consolidate(source, out, weights=options["weights"], force=force)
    else:
        offline.convert(source, out, options["to"], force=force)
    files = [path for path in (out.iterdir() if out.is_dir() else [out]) if path.is_file()]
    count = f" in {len(files)} files" if out.is_dir() else ""
    print(f"wrote {out}: {sum(path.stat().st_size for path in files):,} bytes{count}")
    return 0


_BYTES = ("parameters", "state", "ddp_buckets", "gradients", "rest", "peak")


def _estimate(options: dict[str, Any]) -> int:
    from zero_optim.estimate import estimate

    source = options["model"]
    with torch.device("meta"):
        if Path(source).is_file():
            config = _named("transformers:AutoConfig").from_pretrained(source)
            model = _named("transformers:AutoModelForCausalLM").from_config(config)
        else:
            model = _named(source)()
    if not isinstance(model, torch.nn.Module):
        raise TypeError(f"expected {source} to build a torch.nn.Module, got {type(model).__name__}")
    optimizer_class = _named(options["optimizer"])
    kinds, rows = {type(module).__name__: type(module) for module in model.modules()}, []
    for name in options["units"] or ():
        if name not in kinds:
            raise ValueError(f"the model has no module of class {name}, but of {', '.join(sorted(kinds))}")
    known = {
        "units": [kinds[name] for name in options["units"] or ()] or "auto",
        "device": options["device"],
        "master_dtype": torch.float32 if options["masters"] else None,
        "gradient_as_bucket_view": options["bucket_view"],
        **options["options"],
    }
    for stage, ranks in product(options["stages"], options["ranks"]):
        fullest = max(estimate(model, optimizer_class, ranks, stage, **known), key=lambda rank: rank.peak)
        rows.append({"stage": stage, "ranks": ranks, **{name: getattr(fullest, name) for name in _BYTES}})
    if options["json"]:
        print(json.dumps(rows, indent=1))
    else:
        numel = sum(param.numel() for param in model.parameters())
        print(f"{numel:,} parameters, {optimizer_class.__name__}: GiB a rank, without activations")
        cells = [[f"{v / 2**30:,.2f}" if k in _BYTES else str(v) for k, v in row.items()] for row in rows]
        print("\n".join(_table([name.replace("_", " ") for name in rows[0]], cells)))
    return 0


def _named(path: str) -> Any:  # noqa: ANN401 - whatever has the name
    sys.path[:0] = [""] * ("" not in sys.path)  # as python -m does
    try:
        return resolve_name(path)
    except (ImportError, AttributeError, ValueError) as error:
        raise ValueError(f"cannot import {path} (expected MODULE:NAME): {error}") from error


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
