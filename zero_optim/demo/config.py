"""The configuration of a run, immutable, checked, and saved as JSON."""

import json
import math
from dataclasses import dataclass, fields
from typing import Any, Literal, get_args

OptionValue = bool | int | float | str | None | tuple["OptionValue", ...]
Schedule = Literal["cosine", "linear", "constant"]
Device = Literal["auto", "cpu", "cuda"]
Wrapper = Literal["ours", "torch"]
CommHook = Literal["", "allreduce", "bf16", "fp16"]
Overlap = Literal["off", "everywhere", "owners"]
Sharded = Literal["state", "gradients", "parameters"]

_COUNTS = ("nproc", "steps", "batch_size", "accumulate", "context", "layers", "width", "heads")
_COUNTS_OR_ZERO = ("warmup", "seed", "eval_every", "save_every", "sample_length")
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
        if self.width % self.heads:
            raise ValueError(f"--width {self.width} is not divisible by --heads {self.heads}")
        if self.width // self.heads % 2:
            raise ValueError(
                f"--width {self.width} over --heads {self.heads} gives heads of {self.width // self.heads} "
                "features: rotary positions need an even number"
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
        for name in _COUNTS + _COUNTS_OR_ZERO:
            least, value = int(name in _COUNTS), getattr(self, name)
            if value < least:
                raise ValueError(f"{flag(name)} must be at least {least}, got {value}")
        if self.seed >= 2**64:
            raise ValueError(f"--seed must be below 2**64, as PyTorch's seeds are, got {self.seed}")
        if not self.out:
            raise ValueError("--out must be the name of a folder, got ''")
        if not (math.isfinite(self.clip) and self.clip >= 0):
            raise ValueError(f"--clip must be a number of at least 0, got {self.clip}")
        for name, kind in _CHOICES.items():
            if getattr(self, name) not in get_args(kind):
                raise ValueError(f"{flag(name)} must be one of {', '.join(filter(None, get_args(kind)))}")
        if self.shard != "state":
            self._check_sharded_gradients()
        if self.overlap != "off" and self.clip:
            raise ValueError(
                "--overlap steps before all gradients are known, so nothing can be clipped: give --clip 0"
            )
        if self.overlap == "owners" and self.hook:
            raise ValueError(f"--overlap owners has a reduction of its own: leave out --hook {self.hook}")
        _ = self.shape  # checks itself

    def _check_sharded_gradients(self) -> None:
        if self.ddp != "ours":
            raise ValueError(
                f"--shard {self.shard} needs zero_optim's DistributedDataParallel, not --ddp {self.ddp}: "
                "give --ddp ours"
            )
        if self.hook:
            raise ValueError(f"--shard {self.shard} has a reduction of its own: leave out --hook {self.hook}")
        if self.overlap != "off":
            raise ValueError(
                f"--shard {self.shard} steps after the backward pass, --overlap during it: "
                "give --overlap off or --shard state (--overlap owners reduces gradients to their owners "
                "too, but cannot clip)"
            )

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

    def to_dict(self) -> dict[str, Any]:
        """Return the fields by name."""
        return {field.name: getattr(self, field.name) for field in fields(self)}

    def to_json(self) -> str:
        """Return one JSON object, for `from_json`."""
        return json.dumps(self.to_dict(), indent=1)

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


def _tuples(value: Any) -> Any:  # noqa: ANN401 - whatever JSON holds
    return tuple(map(_tuples, value)) if isinstance(value, list) else value
