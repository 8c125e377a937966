"""The options of ``zero-optim train``: parsed, checked, and saved as JSON."""

import argparse
import json
import math
from dataclasses import MISSING, asdict, dataclass, field, fields
from typing import Any

OptionValue = bool | int | float | str | None | tuple["OptionValue", ...]
SHARDED = ("state", "gradients", "parameters")

_RESUME = (
    "continue from the newest checkpoint of the run folder DIR, or of the newest run in runs/; options that "
    "are not given stay those of the run, but --optimizer package.module:Class must be given again"
)
_OVERLAP = (
    "step during the backward pass, with gradients reduced everywhere (if no value is given) or only to "
    "their owners; excludes --clip"
)
_SHARD = (
    "what each rank keeps only a part of: the optimizer state, or the gradients too, which are then reduced "
    "to their owners, or also the parameters, of which a block is gathered while it is used; the last two "
    "exclude --overlap, --hook and --ddp torch"
)


def _option(default: Any, text: str, **about: Any) -> Any:  # noqa: ANN401 - any field's
    return field(default=default, metadata={"help": text, **about})


def _number(default: int, text: str, least: int = 1, group: str | None = None) -> int:
    number: int = _option(default, text, type=int, metavar="N", least=least, group=group)
    return number


def _switch(text: str) -> bool:
    switch: bool = _option(False, text, action=argparse.BooleanOptionalAction)
    return switch


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """The sizes of the model."""

    context: int  # bytes that it sees at once
    layers: int
    width: int  # features of a position
    heads: int  # of ``width / heads`` features, an even number

    def __post_init__(self) -> None:
        if self.width % (2 * self.heads):
            raise ValueError(
                f"--width {self.width} is not divisible by --heads {self.heads} into heads of an even number "
                "of features, as rotary positions need"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class RunConfig:
    """The options of a run."""

    text: tuple[str, ...] = _option(
        (), "files to train on (the Python language reference)", nargs="+", metavar="FILE", group="the run"
    )
    nproc: int = _number(2, "ranks on this host")
    device: str = _option(
        "auto", "auto: GPUs if there is one for each rank, else the CPU", choices=("auto", "cpu", "cuda")
    )
    out: str = _option(MISSING, "run folder (runs/OPTIMIZER-TIME)", metavar="DIR")
    resume: str | None = _option(None, _RESUME, nargs="?", const="", metavar="DIR")
    seed: int = _number(0, "seed of the initial weights and the order of the text", 0)
    eval_every: int = _number(50, "updates between validations; 0: only first and last", 0)
    save_every: int = _number(100, "updates between checkpoints; 0: only the last", 0)
    sample_length: int = _number(400, "bytes of text generated at the end; 0: none", 0)

    optimizer: str = _option(
        "AdamW",
        "class of torch.optim or torch_optimizer, or package.module:Class",
        metavar="CLASS",
        group="optimization",
    )
    options: tuple[tuple[str, OptionValue], ...] = _option(
        (),
        "argument of the class, such as lr=3e-4; may be repeated",
        flag="--opt",
        action="append",
        metavar="KEY=VALUE",
    )
    schedule: str = _option(
        "cosine",
        "how the learning rate falls to a tenth",
        flag="--lr-schedule",
        choices=("cosine", "linear", "constant"),
    )
    clip: float = _option(1.0, "largest gradient norm; 0: no limit", type=float, metavar="NORM")
    bf16: bool = _switch("run the forward pass under bfloat16 autocast")
    steps: int = _number(400, "updates in the whole run")
    batch_size: int = _number(16, "sequences in an update, over all ranks")
    accumulate: int = _number(1, "micro-batches in each rank's part of an update")
    warmup: int = _number(20, "updates over which the learning rate rises", 0)

    ddp: str = _option(
        "ours",
        "DistributedDataParallel of zero_optim or of PyTorch",
        choices=("ours", "torch"),
        group="gradients",
    )
    hook: str = _option(
        "",
        "comm hook that reduces the gradients: all of each, or in 16 bits",
        choices=("allreduce", "bf16", "fp16"),
    )
    overlap: str = _option(
        "off", _OVERLAP, choices=("off", "everywhere", "owners"), nargs="?", const="everywhere"
    )
    shard: str = _option("state", _SHARD, choices=SHARDED)
    trace: bool = _switch("profile and draw one update: trace.json and trace.png in the run folder")

    context: int = _number(128, "bytes that the model sees at once", group="the model")
    layers: int = _number(4, "transformer blocks")
    width: int = _number(128, "features of a position")
    heads: int = _number(4, "attention heads")

    def __post_init__(self) -> None:
        for each in fields(self):
            value, about = getattr(self, each.name), each.metadata
            if "least" in about and value < about["least"]:
                raise ValueError(f"{flag(each.name)} must be at least {about['least']}, got {value}")
            if "choices" in about and value not in (each.default, *about["choices"]):
                raise ValueError(f"{flag(each.name)} must be one of {', '.join(about['choices'])}")
        _refuse(self.seed >= 2**64, f"--seed must be below 2**64, as PyTorch's seeds are, got {self.seed}")
        _refuse(not self.out, "--out must be the name of a folder, got ''")
        _refuse(not 0 <= self.clip < math.inf, f"--clip must be a number of at least 0, got {self.clip}")
        shard = self.shard != "state" and f"--shard {self.shard}"
        _refuse(
            shard and self.ddp != "ours",
            f"{shard} needs zero_optim's DistributedDataParallel, not --ddp {self.ddp}: give --ddp ours",
        )
        for own in (shard, self.overlap == "owners" and "--overlap owners"):
            _refuse(own and self.hook, f"{own} has a reduction of its own: leave out --hook {self.hook}")
        overlaps = self.overlap != "off"
        _refuse(
            shard and overlaps,
            f"{shard} steps after the backward pass, --overlap during it: give --overlap off or "
            "--shard state (--overlap owners reduces gradients to their owners too, but cannot clip)",
        )
        _refuse(
            overlaps and self.clip,
            "--overlap steps before all gradients are known, so nothing can be clipped: give --clip 0",
        )
        _ = self.shape  # checks itself

    @property
    def shape(self) -> ModelShape:
        """The model's sizes."""
        return ModelShape(context=self.context, layers=self.layers, width=self.width, heads=self.heads)

    def check_ranks(self, world_size: int) -> None:
        """Raise ValueError if ``world_size`` ranks cannot share a batch equally."""
        parts = world_size * self.accumulate
        passes = f" x {self.accumulate} accumulated micro-batches" if self.accumulate > 1 else ""
        _refuse(
            self.batch_size % parts,
            f"--batch-size {self.batch_size} cannot be shared equally by {world_size} ranks{passes}: "
            f"give a multiple of {parts}",
        )

    def to_json(self) -> str:
        """Return one JSON object, for `from_json`."""
        return json.dumps(asdict(self), indent=1)

    @staticmethod
    def from_json(text: str) -> "RunConfig":
        """Parse what `to_json` wrote; ValueError or TypeError for anything else."""
        values = {name: _tuples(value) for name, value in json.loads(text).items()}
        for gone in ("survive", "hook_options"):  # in configs of earlier versions
            values.pop(gone, None)
        return RunConfig(**values)


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add an argument for each field of `RunConfig`, in groups."""
    group: Any = parser
    for each in fields(RunConfig):
        about = dict(each.metadata)
        if title := about.pop("group", None):
            group = parser.add_argument_group(title)
        if each.default not in (MISSING, (), None, 0, "", "off"):
            about["help"] += f" ({each.default})"
        arguments = {name: value for name, value in about.items() if name not in ("least", "flag")}
        group.add_argument(flag(each.name), dest=each.name, **arguments)


def defaults() -> dict[str, Any]:
    """Return the fields' defaults."""
    return {each.name: each.default for each in fields(RunConfig) if each.default is not MISSING}


def flag(name: str) -> str:
    """Return a field's command-line option."""
    about = next(each.metadata for each in fields(RunConfig) if each.name == name)
    return str(about.get("flag", "--" + name.replace("_", "-")))


def _refuse(is_wrong: object, message: str) -> None:
    if is_wrong:
        raise ValueError(message)


def _tuples(value: Any) -> Any:  # noqa: ANN401 - whatever JSON holds
    return tuple(map(_tuples, value)) if isinstance(value, list) else value
