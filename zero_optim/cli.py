"""The command ``zero-optim``. Errors become one line and an exit status here, and nowhere else.

Exit status: 0 done, 1 a rank failed or a checkpoint is not complete, 2 bad input, 128 + n ended by signal n.
"""

import argparse
import json
import os
import shlex
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn, get_args

from zero_optim.demo import elastic, prepare, saved
from zero_optim.demo.config import CommHook, Device, Overlap, RunConfig, Schedule, Sharded, Wrapper, defaults
from zero_optim.errors import InterruptedRunError, RankFailedError, ZeroOptimError


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


def train(given: dict[str, Any]) -> int:
    """Run ``zero-optim train``: as a rank if torchrun started this process, else as the launcher.

    Args:
        given: the options on the command line, by field of `RunConfig`.
    """
    ranks = _torchrun()
    try:
        config = prepare.prepare(given, ranks)
        if ranks is None or ranks.rank == 0:
            prepare.make_folder(config)
    except ValueError as error:
        if ranks is None or ranks.local_rank == 0:  # once on each host: a file may be missing on one of them
            _complain(str(error))
        return 2
    if ranks is None:
        return _launch(config)
    from zero_optim.demo.worker import run_under_torchrun

    run_under_torchrun(config)
    return 0


def _torchrun() -> prepare.Started | None:
    """Return this process's rank if torchrun started it, else None."""
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
    if not os.environ.keys() >= set(names):
        return None
    return prepare.Started(*(int(os.environ[name]) for name in names))


def _launch(config: RunConfig) -> int:
    try:
        elastic.launch(config)
    except RankFailedError as error:
        _leave_bar()
        _complain(str(error))
        return 1
    except InterruptedRunError as error:
        _leave_bar()
        _complain(f"{error}; {_what_is_left(config)}")
        return 128 + error.signum
    return 0


def _leave_bar() -> None:
    """Start a new line and show the cursor, which a bar hides until its rank ends it."""
    if sys.stdout.isatty():
        sys.stdout.write("\x1b[?25h\n")
        sys.stdout.flush()


def _what_is_left(config: RunConfig) -> str:
    try:
        found = saved.look(saved.locate(config.out))
    except ValueError:
        return "no checkpoint was saved yet"
    command = ["zero-optim", "train", "--resume", config.out]
    if ":" in config.optimizer:  # not taken from a checkpoint
        command += ["--optimizer", config.optimizer]
    return f"update {found.step} is saved; resume with: {shlex.join(command)}"


def _complain(line: str) -> None:
    print(f"zero-optim: {line}", file=sys.stderr)


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="zero-optim",
        description="Train with optimizer state that is sharded over ranks; work with its checkpoints.",
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    command = commands.add_parser(
        "train",
        help="train a small GPT on text, with sharded optimizer state",
        description="Train a small GPT on text with DistributedDataParallel and a sharded optimizer. Under "
        "torchrun, on one host or several, each process is one rank. Otherwise it starts --nproc ranks on "
        "this host. Defaults are in parentheses.",
        argument_default=argparse.SUPPRESS,  # options not given come from the checkpoint or the defaults
    )
    command.set_defaults(command=train)
    for add in (_add_run, _add_optimization, _add_gradients, _add_model):
        add(command, defaults())
    _add_tools(commands)
    return parser


def _add_tools(commands: Any) -> None:  # noqa: ANN401 - argparse has no public name for it
    """Add the commands for checkpoints, which need one process and no process group."""
    command = commands.add_parser(
        "consolidate",
        help="write a checkpoint's optimizer state, or its weights, to one file",
        description="Write the whole optimizer state of a checkpoint to OUT, in the format of torch.optim. "
        "With --weights, write the model's state dict instead. One tensor at a time is in memory.",
    )
    command.add_argument("source", metavar="DIR", type=Path, help="a checkpoint")
    command.add_argument("out", metavar="OUT", type=Path, help="a .pt file, or .safetensors for weights")
    command.add_argument("--weights", action="store_true", help="write the model's state dict")
    command.set_defaults(command=_tool("consolidate"))
    command = commands.add_parser(
        "reshard",
        help="write a checkpoint for another number of ranks",
        description="Write a checkpoint as N ranks without cuts would have written it: each rank then finds "
        "the parameters that it owns whole in one file; rows of a cut parameter may lie in another rank's. "
        "This is never necessary, since a checkpoint loads on any number of ranks.",
    )
    command.add_argument(
        "source", metavar="DIR", type=Path, help="a checkpoint, or a torch.save file with a state dict"
    )
    command.add_argument("out", metavar="OUT", type=Path, help="folder of the new checkpoint")
    command.add_argument("--world-size", type=int, metavar="N", required=True, help="number of ranks")
    command.set_defaults(command=_tool("reshard"))
    command = commands.add_parser(
        "inspect",
        help="show what a checkpoint holds and whether it is complete",
        description="Show what a checkpoint holds, who wrote it, and whether it is complete: all of it "
        "is read and compared with its checksums. The exit status is 1 if it is not complete.",
    )
    command.add_argument("source", metavar="DIR", type=Path, help="a checkpoint")
    command.add_argument("--json", action="store_true", help="print JSON")
    command.set_defaults(command=_tool("inspect"))


def _tool(name: str) -> Callable[[dict[str, Any]], int]:
    """Make the command for a tool; an error prints one line and gives exit status 2."""

    def run(given: dict[str, Any]) -> int:
        from zero_optim.checkpoint import inspection, offline

        try:
            if name == "consolidate":
                offline.consolidate(given["source"], given["out"], weights=given["weights"])
            elif name == "reshard":
                offline.reshard(given["source"], given["out"], given["world_size"])
            else:
                found = inspection.inspect(given["source"])
                print(json.dumps(found.to_dict(), indent=1) if given["json"] else found)
                return 0 if found.complete else 1
        except (ZeroOptimError, ValueError, TypeError) as error:
            _complain(str(error))
            return 2
        return 0

    return run


def _add_run(command: argparse.ArgumentParser, default: dict[str, Any]) -> None:
    group = command.add_argument_group("the run")
    group.add_argument(
        "--text", nargs="+", metavar="FILE", help="files to train on (the Python language reference)"
    )
    group.add_argument("--nproc", type=int, metavar="N", help=f"ranks on this host ({default['nproc']})")
    group.add_argument(
        "--device",
        choices=get_args(Device),
        help="auto: GPUs if there is one for each rank, else the CPU (auto)",
    )
    group.add_argument("--out", metavar="DIR", help="run folder (runs/OPTIMIZER-TIME)")
    group.add_argument(
        "--resume",
        nargs="?",
        const="",
        metavar="DIR",
        help="continue from the newest checkpoint of the run folder DIR, or of the newest run in runs/; "
        "options that are not given stay those of the run, but --optimizer package.module:Class must be "
        "given again",
    )
    for name, text in (
        ("seed", "seed of the initial weights and the order of the text"),
        ("eval-every", "updates between validations; 0: only first and last"),
        ("save-every", "updates between checkpoints; 0: only the last"),
        ("sample-length", "bytes of text generated at the end; 0: none"),
    ):
        _add_number(group, name, text, default)


def _add_optimization(command: argparse.ArgumentParser, default: dict[str, Any]) -> None:
    group = command.add_argument_group("optimization")
    group.add_argument(
        "--optimizer",
        metavar="CLASS",
        help=f"class of torch.optim or torch_optimizer, or package.module:Class ({default['optimizer']})",
    )
    group.add_argument(
        "--opt",
        dest="options",
        action="append",
        metavar="KEY=VALUE",
        help="argument of the class, such as lr=3e-4; may be repeated",
    )
    group.add_argument(
        "--lr-schedule",
        dest="schedule",
        choices=get_args(Schedule),
        help=f"how the learning rate falls to a tenth ({default['schedule']})",
    )
    group.add_argument(
        "--clip", type=float, metavar="NORM", help=f"largest gradient norm; 0: no limit ({default['clip']})"
    )
    group.add_argument(
        "--bf16", action=argparse.BooleanOptionalAction, help="run the forward pass under bfloat16 autocast"
    )
    for name, text in (
        ("steps", "updates in the whole run"),
        ("batch-size", "sequences in an update, over all ranks"),
        ("accumulate", "micro-batches in each rank's part of an update"),
        ("warmup", "updates over which the learning rate rises"),
    ):
        _add_number(group, name, text, default)


def _add_gradients(command: argparse.ArgumentParser, default: dict[str, Any]) -> None:
    group = command.add_argument_group("gradients")
    group.add_argument(
        "--ddp",
        choices=get_args(Wrapper),
        help=f"DistributedDataParallel of zero_optim or of PyTorch ({default['ddp']})",
    )
    group.add_argument(
        "--hook",
        choices=[name for name in get_args(CommHook) if name],
        help="comm hook that reduces the gradients: all of each, or in 16 bits",
    )
    group.add_argument(
        "--overlap",
        nargs="?",
        const="everywhere",
        choices=get_args(Overlap),
        help="step during the backward pass, with gradients reduced everywhere (if no value is given) or "
        "only to their owners; excludes --clip",
    )
    group.add_argument(
        "--shard",
        choices=get_args(Sharded),
        help="what each rank keeps only a part of: the optimizer state, or the gradients too, which are then "
        "reduced to their owners, or also the parameters, of which a block is gathered while it is used; the "
        f"last two exclude --overlap, --hook and --ddp torch ({default['shard']})",
    )
    group.add_argument(
        "--trace",
        action=argparse.BooleanOptionalAction,
        help="profile and draw one update: trace.json and trace.png in the run folder",
    )


def _add_model(command: argparse.ArgumentParser, default: dict[str, Any]) -> None:
    group = command.add_argument_group("the model")
    for name, text in (
        ("context", "bytes that the model sees at once"),
        ("layers", "transformer blocks"),
        ("width", "features of a position"),
        ("heads", "attention heads"),
    ):
        _add_number(group, name, text, default)


def _add_number(group: argparse._ArgumentGroup, name: str, text: str, default: dict[str, Any]) -> None:
    group.add_argument(f"--{name}", type=int, metavar="N", help=f"{text} ({default[name.replace('-', '_')]})")
