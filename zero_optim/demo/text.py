"""The text: bytes as tokens, a tenth held out, and an order of samples that no number of ranks changes.

Note [Data order]
    Sample ``n`` of a run, counted over all ranks and updates, is a function of (seed, n) alone:
    which pass over the text it falls in, where that pass's windows begin, and which window comes
    n-th. Update ``s`` takes samples ``s * batch_size`` onwards and the ranks split those between
    them. So a resumed run goes on with the samples it would have had, on any number of ranks.
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
        name: for people.
        train: (bytes,) uint8, the first nine tenths.
        held_out: (bytes,) uint8, the last tenth.
        digest: of the whole text, to tell whether a resumed run sees the same one.
    """

    name: str
    train: Tensor
    held_out: Tensor
    digest: str

    @property
    def numel(self) -> int:
        """Bytes in all."""
        return self.train.numel() + self.held_out.numel()


def load(paths: Sequence[str], context: int) -> Corpus:
    """Read the text; every rank calls, and the parent to see whether it can.

    Args:
        paths: files, joined by newlines; none for the reference that comes with Python.
        context: bytes of a sample; both parts of the text must hold one.

    Raises:
        ValueError: a path that is no readable file, or a text too short.
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
    """Give what Python's own ``help()`` shows on its topics: about 0.47 MB of English."""
    from pydoc_data.topics import topics

    return "\n".join(topics.values()).encode()


def _read(path: str) -> bytes:
    if not Path(path).exists():
        raise ValueError(f"no such file: {path}")
    if not Path(path).is_file():  # every rank reads it, so no pipe will do
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
        seed: of the order.
    """

    tokens: Tensor
    context: int
    seed: int

    def take(self, first: int, count: int) -> Windows:
        """Give ``count`` samples from number ``first`` on."""
        num_windows = max(1, (len(self.tokens) - 1) // self.context - 1)
        slack = len(self.tokens) - 1 - num_windows * self.context
        starts = [
            _one_pass(self.seed, index // num_windows, num_windows, slack, self.context)[index % num_windows]
            for index in range(first, first + count)
        ]
        return cut(self.tokens, torch.stack(starts), self.context)


# A cache of a pure function: a pass is asked for once for each sample drawn from it.
@lru_cache(maxsize=2)
def _one_pass(seed: int, number: int, num_windows: int, slack: int, context: int) -> Tensor:
    """Order the windows of one pass over the text: first byte of each, shuffled.

    Args:
        seed: of the run.
        number: which pass.
        num_windows: windows in it, back to back.
        slack: bytes the first window may be shifted by, so that passes cut the text differently.
        context: bytes of a window.
    """
    generator = torch.Generator().manual_seed(mix(seed, number))
    shift = torch.randint(min(slack, context) + 1, (), generator=generator)
    return torch.randperm(num_windows, generator=generator) * context + shift


def held_out_windows(tokens: Tensor, context: int, rank: int, world_size: int) -> Iterator[Windows]:
    """Give this rank's part of the validation samples, in chunks; ranks together give each once.

    Args:
        tokens: (bytes,) uint8, the held-out text.
        context: bytes of a sample.
        rank: this rank.
        world_size: ranks that share the work.
    """
    available = (len(tokens) - 1) // context
    count = min(available, MAX_EVAL_WINDOWS)
    starts = torch.arange(count) * available // count * context  # spread evenly where there are too many
    for part in torch.split(starts[rank::world_size], 32):
        yield cut(tokens, part, context)


def cut(tokens: Tensor, starts: Tensor, context: int) -> Windows:
    """Cut samples out of a text: inputs, and as targets the byte that follows each."""
    windows = tokens[starts[:, None] + torch.arange(context + 1)].long()
    return windows[:, :-1], windows[:, 1:]


def mix(*numbers: int) -> int:
    """Make one 32-bit seed of several numbers. Torch's CPU generator uses no more bits."""
    text = " ".join(map(str, numbers)).encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=4).digest(), "big")
