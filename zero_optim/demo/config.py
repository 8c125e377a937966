"""The configuration of a run: one immutable object that checks itself and is saved as JSON."""

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

    Attributes:
        context: bytes that the model sees at once.
        layers: transformer blocks.
        width: features of a position.
        heads: attention heads. Each gets ``width / heads`` features, which must be an even number.
    """

    context: int
    layers: int
    width: int
    heads: int

    def __post_init__(self) -> None:
        """Check that each head gets an even number of features."""
        if self.width % self.heads:
            raise ValueError(f"--width {self.width} is not divisible by --heads {self.heads}")
        if self.width // self.heads % 2:
            raise ValueError(
                f"--width {self.width} over --heads {self.heads} gives heads of {self.width // self.heads} "
                "features: rotary positions need an even number"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class RunConfig:
    """Everything that a run depends on. Fields have the names of the options of ``zero-optim train``.

    Attributes:
        text: files to train on; empty for the Python language reference.
        nproc: ranks on this host.
        optimizer: a class, as `optimizers.find` understands it.
        options: its keyword arguments, as sorted pairs.
        steps: updates in the whole run.
        batch_size: sequences in an update, over all ranks.
        accumulate: micro-batches in each rank's part of an update.
        schedule: how the learning rate falls after the warm-up.
        warmup: updates over which the learning rate rises.
        clip: largest norm of all gradients together; 0: no limit.
        bf16: whether the forward pass runs under bfloat16 autocast.
        seed: of the initial weights, the order of the text, and the sample text at the end; below 2**64.
        out: the run folder.
        resume: the checkpoint to continue from, or None.
        eval_every: updates between validations; 0: only the first and the last.
        save_every: updates between checkpoints; 0: only the last.
        sample_length: bytes of text generated at the end.
        device: where to train; "auto" takes GPUs if there is one for each rank of this host.
        ddp: whose DistributedDataParallel averages the gradients.
        hook: what reduces gradients, in the place of the wrapper's own all-reduce; "" for that one.
        overlap: whether the optimizer steps during the backward pass, and whether gradients are then reduced
            everywhere or only to their owners.
        shard: what each rank keeps only a part of: the optimizer state, or the gradients too, or also the
            parameters. With ``accumulate``, gradients are whole on each rank until the last micro-batch.
        trace: whether one update is profiled and drawn.
        context, layers, width, heads: see `ModelShape`.
    """

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
        """Check every field, and which fields go together."""
        for name in _COUNTS:
            _check(name, getattr(self, name), least=1)
        for name in _COUNTS_OR_ZERO:
            _check(name, getattr(self, name), least=0)
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
        """Check that ``world_size`` ranks can share a batch equally.

        Raises:
            ValueError: they cannot.
        """
        if not self.fits(world_size):
            raise ValueError(
                f"--batch-size {self.batch_size} cannot be shared equally by {world_size} ranks"
                + (f" x {self.accumulate} accumulated micro-batches" if self.accumulate > 1 else "")
                + f": give a multiple of {world_size * self.accumulate}"
            )

    def fits(self, world_size: int) -> bool:
        """Whether ``world_size`` ranks can share a batch equally."""
        return self.batch_size % (world_size * self.accumulate) == 0

    def to_dict(self) -> dict[str, Any]:
        """Return the fields by name."""
        return {field.name: getattr(self, field.name) for field in fields(self)}

    def to_json(self) -> str:
        """Write as one JSON object, which `from_json` reads."""
        return json.dumps(self.to_dict(), indent=1)

    @staticmethod
    def from_json(text: str) -> "RunConfig":
        """Read what `to_json` wrote.

        Raises:
            ValueError: not JSON, or a value is refused.
            TypeError: the fields are not those of this version.
        """
        given = {name: _tuples(value) for name, value in json.loads(text).items()}
        for gone in ("survive", "hook_options"):  # in configs of earlier versions
            given.pop(gone, None)
        return RunConfig(**given)


def defaults() -> dict[str, Any]:
    """Return the default of every field that has one."""
    return {field.name: field.default for field in fields(RunConfig) if field.name != "out"}


def flag(name: str) -> str:
    """Return the option of the command line for a field."""
    return "--lr-schedule" if name == "schedule" else "--" + name.replace("_", "-")


def _check(name: str, value: int, *, least: int) -> None:
    if value < least:
        raise ValueError(f"{flag(name)} must be at least {least}, got {value}")


def _tuples(value: Any) -> Any:  # noqa: ANN401 - whatever JSON holds
    """Turn JSON's lists back into tuples."""
    return tuple(map(_tuples, value)) if isinstance(value, list) else value
