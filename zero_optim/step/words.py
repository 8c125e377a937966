"""Status bytes that ranks exchange before a step with scaled gradients or uneven inputs."""

from collections.abc import Sequence
from enum import IntFlag

import torch
from torch import Tensor

from zero_optim.comm.agreement import failing_together
from zero_optim.comm.collectives import RankGroup, bytes_to_tensor
from zero_optim.compat.streams import HostCopy, brought_to, to_device


class Word(IntFlag):
    """Flags of one rank."""

    NOTHING = 0
    JOINED = 1  # it ran out of inputs
    INFINITE = 2  # its scaler found an infinity
    DEAF = 4  # if another rank finds one, its scaler cannot be told
    FAILED = 8  # something raised there
    CLIPS = 16  # it clips gradients, and steps later
    UNSCALES = 32  # its scaler looks for infinities, and it steps later


_BEFORE_STEP = Word.CLIPS | Word.UNSCALES | Word.JOINED


def exchange(
    group: RankGroup, word: Word, *, found_inf: Tensor | None = None, failure: Exception | None = None
) -> list[Word]:
    """Exchange status bytes; returns them by rank; all ranks call; one collective of a byte.

    The CPU waits, also for the work before ``found_inf``, which sets `Word.INFINITE` if not zero. Raises any
    rank's failure on every rank, and RuntimeError if active ranks are in different calls.
    """
    word |= Word.NOTHING if failure is None else Word.FAILED
    mine = to_device(bytes_to_tensor(bytes([word])), group.device)
    if found_inf is not None:
        is_infinite = found_inf.ne(0).to(torch.uint8).reshape(1)
        mine = mine + brought_to(is_infinite, group.device) * int(Word.INFINITE)
    words = [Word(value) for value in group.read(HostCopy(group.all_gather_rows(mine))).flatten().tolist()]
    if any(Word.FAILED in each for each in words):
        with failing_together(group):
            if failure is not None:
                raise failure
    clipping, unscaling = ranks_that(words, Word.CLIPS), ranks_that(words, Word.UNSCALES)
    stepping = [rank for rank, each in enumerate(words) if not each & _BEFORE_STEP]
    in_call = {"called clip_grad_norm_()": clipping, "unscaled gradients": unscaling, "stepped": stepping}
    told = [f"ranks {ranks} {call}" for call, ranks in in_call.items() if ranks]
    if len(told) > 1:
        raise RuntimeError(f"inside Join {', and '.join(told)}: every rank that has inputs left must do all")
    return words


def is_skipped_by_all(words: Sequence[Word]) -> bool:
    """Return whether all ranks skip the step because of an infinity; equal on every rank.

    RuntimeError on every rank if a scaler cannot be told: its scale would drift from the others'.
    """
    infinite = ranks_that(words, Word.INFINITE)
    deaf = sorted({*ranks_that(words, Word.DEAF)} - {*infinite})
    if infinite and deaf:
        raise RuntimeError(
            f"the scalers of ranks {infinite} found an infinite gradient, those of ranks {deaf} did not, and "
            "would go on with another scale: reduce gradients before a scaler looks at them, as DDP does"
        )
    return bool(infinite)


def ranks_that(words: Sequence[Word], told: Word) -> list[int]:
    """Return the ranks that have a flag."""
    return [rank for rank, word in enumerate(words) if told in word]
