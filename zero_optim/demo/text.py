"""The text: bytes as tokens, the last tenth held out, and an order of samples for any number of ranks.

Note [Data order]
    Sample ``n``, counted over all ranks and updates, depends on (seed, n) only. They give the pass over the
    text, where the windows of that pass begin, and which window is the n-th. Update ``s`` takes
    ``batch_size`` samples from number ``s * batch_size`` on, and the ranks divide them among themselves. So a
    resumed run sees the same samples as one that was not interrupted, on any number of ranks.
"""

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import torch
from torch import Tensor

VOCABULARY = 256  # one token a byte
MAX_EVAL_WINDOWS = 512  # bounds the time of a validation; the default text has fewer

Windows = tuple[Tensor, Tensor]  # inputs and targets, each (samples, context) int64


@dataclass(frozen=True, slots=True, eq=False)
class Corpus:
    """A text split in two.

    Attributes:
        name: what the user is shown.
        train: (bytes,) uint8, the first nine tenths.
        held_out: (bytes,) uint8, the last tenth.
        digest: of the whole text, to notice that a resumed run reads another text.
    """

    name: str
    train: Tensor
    held_out: Tensor
    digest: str

    @property
    def numel(self) -> int:
        """Number of bytes in both parts."""
        return self.train.numel() + self.held_out.numel()


def load(paths: Sequence[str], context: int) -> Corpus:
    """Read the text. Every rank does, and before them the parent process as a check.

    Args:
        paths: files, joined by newlines; empty for the language reference that comes with Python.
        context: bytes of a sample; both parts of the text must hold one.

    Raises:
        ValueError: a path is not a readable file, or the text is too short.
    """
    content = b"\n".join(map(_read, paths)) if paths else _language_reference()
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


def _language_reference() -> bytes:
    """Return the topics of Python's own ``help()``: about 0.47 MB of English."""
    from pydoc_data.topics import topics

    return "\n".join(topics.values()).encode()


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
    """The samples of a run, in order. See Note [Data order].

    Attributes:
        tokens: (bytes,) uint8, at least ``context + 1``.
        context: bytes of a sample.
        seed: gives the order.
    """

    tokens: Tensor
    context: int
    seed: int

    def take(self, first: int, count: int) -> Windows:
        """Return ``count`` samples, from number ``first`` on."""
        num_windows = max(1, (len(self.tokens) - 1) // self.context - 1)
        slack = len(self.tokens) - 1 - num_windows * self.context
        starts = [
            _one_pass(self.seed, index // num_windows, num_windows, slack, self.context)[index % num_windows]
            for index in range(first, first + count)
        ]
        return cut(self.tokens, torch.stack(starts), self.context)


# A cache of a pure function, which is called once for each sample.
@lru_cache(maxsize=2)
def _one_pass(seed: int, number: int, num_windows: int, slack: int, context: int) -> Tensor:
    """Return the first byte of each window of one pass over the text, in shuffled order.

    Args:
        seed: of the run.
        number: of the pass.
        num_windows: number of windows, which follow each other without gaps.
        slack: largest shift of the first window in bytes, so that each pass cuts the text differently.
        context: bytes of a window.
    """
    generator = torch.Generator().manual_seed(mix(seed, number))
    shift = torch.randint(min(slack, context) + 1, (), generator=generator)
    return torch.randperm(num_windows, generator=generator) * context + shift


def held_out_windows(tokens: Tensor, context: int, rank: int, world_size: int) -> Iterator[Windows]:
    """Yield this rank's part of the validation samples, in chunks. Each sample is on one rank only.

    There are as many chunks on every rank, since ranks may have to call the model together; some are empty.

    Args:
        tokens: (bytes,) uint8, the held-out text.
        context: bytes of a sample.
        rank: this rank.
        world_size: ranks that share the work.
    """
    available = (len(tokens) - 1) // context
    count = min(available, MAX_EVAL_WINDOWS)
    starts = torch.arange(count) * available // count * context  # spread evenly if there are too many
    mine = starts[rank::world_size]
    for first in range(0, max(1, len(starts[::world_size])), 32):
        yield cut(tokens, mine[first : first + 32], context)


def cut(tokens: Tensor, starts: Tensor, context: int) -> Windows:
    """Cut samples out of a text: inputs, and as target of each byte the next one."""
    windows = tokens[starts[:, None] + torch.arange(context + 1)].long()
    return windows[:, :-1], windows[:, 1:]


def mix(*numbers: int) -> int:
    """Make one 32-bit seed from several numbers. Torch's CPU generator uses no more bits."""
    text = " ".join(map(str, numbers)).encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=4).digest(), "big")
