"""The text: bytes as tokens, the last tenth held out.

Note [Data order]
    Sample ``n``, counted over ranks and updates, depends on (seed, n) only. Update ``s`` takes samples from
    ``s * batch_size`` on. So a resumed run sees the samples of an uninterrupted one, on any number of ranks.
"""

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

VOCABULARY = 256  # one token a byte
MAX_EVAL_WINDOWS = 512  # bounds the time of a validation; the default text has fewer

Windows = tuple[Tensor, Tensor]  # inputs and targets, each (samples, context) int64


@dataclass(frozen=True, slots=True, eq=False)
class Corpus:
    """A text split in two."""

    name: str  # what the user is shown
    train: Tensor  # (bytes,) uint8, the first nine tenths
    held_out: Tensor  # (bytes,) uint8, the last tenth
    digest: str  # of the whole text, to notice that a resumed run reads another text

    @property
    def numel(self) -> int:
        """Return the bytes in both parts."""
        return self.train.numel() + self.held_out.numel()


def load(paths: Sequence[str], context: int) -> Corpus:
    """Read files, joined by newlines, or without any the language reference that comes with Python."""
    if paths:
        content = b"\n".join(map(_read, paths))
    else:
        from pydoc_data.topics import topics

        content = "\n".join(topics.values()).encode()
    held_out = len(content) // 10
    if held_out < context + 1:
        raise ValueError(
            f"the text has {len(content):,} bytes, --context {context} needs {10 * (context + 1):,}: "
            "the held-out tenth has to hold a sample"
        )
    tokens = torch.frombuffer(bytearray(content), dtype=torch.uint8)
    split = len(content) - held_out
    name = ", ".join(Path(path).name for path in paths) or "the Python language reference"
    return Corpus(name, tokens[:split], tokens[split:], hashlib.sha256(content).hexdigest()[:16])


def _read(path: str) -> bytes:
    if not Path(path).exists():
        raise ValueError(f"no such file: {path}")
    if not Path(path).is_file():  # every rank reads it, so it cannot be a pipe
        raise ValueError(f"not a regular file: {path}")
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise ValueError(f"cannot read {path}: {error.strerror}") from error


@dataclass(frozen=True, slots=True, eq=False)
class Samples:
    """The samples of a run, in order. See Note [Data order]."""

    tokens: Tensor  # (bytes,) uint8, at least ``context + 1``
    context: int  # bytes of a sample
    seed: int

    def take(self, first: int, count: int) -> Windows:
        """Return ``count`` samples from number ``first`` on."""
        num_windows = max(1, (len(self.tokens) - 1) // self.context - 1)
        passes = range(first // num_windows, (first + count - 1) // num_windows + 1)
        starts = torch.cat([self._one_pass(number, num_windows) for number in passes])
        skipped = first - passes.start * num_windows
        return _cut(self.tokens, starts[skipped : skipped + count], self.context)

    def _one_pass(self, number: int, num_windows: int) -> Tensor:
        """Return the first byte of each window of one pass, shuffled; passes cut the text differently."""
        slack = len(self.tokens) - 1 - num_windows * self.context
        generator = torch.Generator().manual_seed(mix(self.seed, number))
        shift = torch.randint(min(slack, self.context) + 1, (), generator=generator)
        return torch.randperm(num_windows, generator=generator) * self.context + shift


def held_out_windows(tokens: Tensor, context: int, rank: int, world_size: int) -> Iterator[Windows]:
    """Yield this rank's validation samples, in as many chunks on every rank: they call the model together."""
    available = (len(tokens) - 1) // context
    count = min(available, MAX_EVAL_WINDOWS)
    starts = torch.arange(count) * available // count * context  # spread evenly if there are too many
    own = starts[rank::world_size]
    for first in range(0, max(1, len(starts[::world_size])), 32):
        yield _cut(tokens, own[first : first + 32], context)


def _cut(tokens: Tensor, starts: Tensor, context: int) -> Windows:
    windows = tokens[starts[:, None] + torch.arange(context + 1)].long()
    return windows[:, :-1], windows[:, 1:]


def mix(*numbers: int) -> int:
    """Return one 32-bit seed, all that torch's CPU generator uses."""
    text = " ".join(map(str, numbers)).encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=4).digest(), "big")
