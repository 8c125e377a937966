"""What ranks tell each other before a step that they cannot take without it: one word of each, a byte.

An ordinary step has no such collective. Where gradients are scaled, or ranks may run out of inputs, it
has one.
"""

from collections.abc import Sequence
from enum import IntFlag

import torch
from torch import Tensor

from zero_optim.comm.agreement import failing_together
from zero_optim.comm.collectives import RankGroup, bytes_to_tensor
from zero_optim.compat.streams import HostCopy, brought_to, to_device


class Word(IntFlag):
    """What one rank tells; several may be true."""

    NOTHING = 0
    JOINED = 1  # it ran out of inputs
    INFINITE = 2  # its scaler found an infinity
    DEAF = 4  # if another rank finds one, its scaler cannot be told
    FAILED = 8  # something raised there
    CLIPS = 16  # it clips gradients, and steps later


def exchange(
    group: RankGroup, word: Word, *, found_inf: Tensor | None = None, failure: Exception | None = None
) -> list[Word]:
    """Tell every rank this one's word; all ranks call; one collective of a byte, and more if a rank failed.

    The CPU waits once. Where ``found_inf`` lies on an accelerator, or the group sends from one, that includes
    the work that comes before it there, such as the backward pass.

    Args:
        group: the ranks.
        word: what is known here without looking at a tensor.
        found_inf: 0-d; `Word.INFINITE` is added to the word if it is not zero.
        failure: raised here already.

    Returns:
        The words by rank.

    Raises:
        Exception: on every rank, the failure of any, see `failing_together`.
        RuntimeError: likewise, some active ranks clip and others step.
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
    clipping = ranks_that(words, Word.CLIPS)
    stepping = [rank for rank, each in enumerate(words) if not each & (Word.CLIPS | Word.JOINED)]
    if clipping and stepping:
        raise RuntimeError(
            f"inside Join ranks {clipping} called clip_grad_norm_(), and ranks {stepping} stepped: every "
            "rank that has inputs left must clip"
        )
    return words


def is_skipped_by_all(words: Sequence[Word]) -> bool:
    """Tell whether the ranks skip a step, as one found an infinity; the same on every rank, joined or active.

    Raises:
        RuntimeError: on every rank, a scaler cannot be told: its scale would drift from the others'.
    """
    infinite = ranks_that(words, Word.INFINITE)
    if infinite and set(ranks_that(words, Word.DEAF)) - set(infinite):
        raise RuntimeError(
            "a rank found an infinite gradient, and on another one the scaler to tell is not a "
            "torch.amp.GradScaler"
        )
    return bool(infinite)


def ranks_that(words: Sequence[Word], told: Word) -> list[int]:
    """List the ranks that told something."""
    return [rank for rank, word in enumerate(words) if told in word]
