"""The configuration of a run, immutable, checked, and saved as JSON."""

import json
import math
from dataclasses import asdict, dataclass, fields
from typing import Any, Literal, get_args

OptionValue = bool | int | float | str | None | tuple["OptionValue", ...]
Schedule = Literal["cosine", "linear", "constant"]
Device = Literal["auto", "cpu", "cuda"]
Wrapper = Literal["ours", "torch"]
CommHook = Literal["", "allreduce", "bf16", "fp16"]
Overlap = Literal["off", "everywhere", "owners"]
Sharded = Literal["state", "gradients", "parameters"]

_COUNTS = ("nproc", "steps", "batch_size", "accumulate", "context", "layers", "width", "heads")
_LEAST = dict.fromkeys(_COUNTS, 1) | dict.fromkeys(
    ("warmup", "seed", "eval_every", "save_every", "sample_length"), 0
)
_CHOICES = {
    "schedule": Schedule,
    "device": Device,
    "ddp": Wrapper,
    "hook": CommHook,
    "overlap": Overlap,
    "shard": Sharded,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """The sizes that a checkpoint's tensors depend on.

    ``context``: bytes that the model sees at once. ``width``: features of a position. ``heads``: attention
    heads of ``width / heads`` features, an even number.
    """

    context: int
    layers: int
    width: int
    heads: int

    def __post_init__(self) -> None:
        if self.width % (2 * self.heads):
            raise ValueError(
                f"--width {self.width} is not divisible by --heads {self.heads} into heads of an even number "
                "of features, as rotary positions need"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class RunConfig:
    """The options of ``zero-optim train``, whose help describes them."""

    out: str
    text: tuple[str, ...] = ()
    nproc: int = 2
    optimizer: str = "AdamW"
    options: tuple[tuple[str, OptionValue], ...] = ()
    steps: int = 400
    batch_size: int = 16
    accumulate: int = 1
    schedule: Schedule = "cosine"
    warmup: int = 20
    clip: float = 1.0
    bf16: bool = False
    seed: int = 0
    resume: str | None = None
    eval_every: int = 50
    save_every: int = 100
    sample_length: int = 400
    device: Device = "auto"
    ddp: Wrapper = "ours"
    hook: CommHook = ""
    overlap: Overlap = "off"
    shard: Sharded = "state"
    trace: bool = False
    context: int = 128
    layers: int = 4
    width: int = 128
    heads: int = 4

    def __post_init__(self) -> None:
        for name, least in _LEAST.items():
            if getattr(self, name) < least:
                raise ValueError(f"{flag(name)} must be at least {least}, got {getattr(self, name)}")
        for name, kind in _CHOICES.items():
            if getattr(self, name) not in get_args(kind):
                raise ValueError(f"{flag(name)} must be one of {', '.join(filter(None, get_args(kind)))}")
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
        if self.batch_size % (world_size * self.accumulate):
            raise ValueError(
                f"--batch-size {self.batch_size} cannot be shared equally by {world_size} ranks"
                + (f" x {self.accumulate} accumulated micro-batches" if self.accumulate > 1 else "")
                + f": give a multiple of {world_size * self.accumulate}"
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


def defaults() -> dict[str, Any]:
    """Return the fields' defaults."""
    return {field.name: field.default for field in fields(RunConfig) if field.name != "out"}


def flag(name: str) -> str:
    """Return a field's command-line option."""
    return "--lr-schedule" if name == "schedule" else "--" + name.replace("_", "-")


def _refuse(is_wrong: object, message: str) -> None:
    if is_wrong:
        raise ValueError(message)


def _tuples(value: Any) -> Any:  # noqa: ANN401 - whatever JSON holds
    return tuple(map(_tuples, value)) if isinstance(value, list) else value
