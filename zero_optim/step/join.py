"""What ranks tell each other before a step inside ``Join`` or with scaled gradients."""

from collections.abc import Sequence
from enum import IntFlag
from hashlib import blake2b

from torch import Tensor

from zero_optim.comm.agreement import Ballot, gather_reports
from zero_optim.comm.collectives import RankGroup
from zero_optim.comm.frames import ranks_by_value, values_text
from zero_optim.compat.streams import HostCopy
from zero_optim.errors import RankMismatchError

_DIGEST_NBYTES = 8


class Status(IntFlag):
    """Flags of one rank."""

    NOTHING = 0
    JOINED = 1  # it ran out of inputs
    INFINITE = 2  # its scaler found an infinity
    DEAF = 4  # if another rank finds one, its scaler cannot be told
    CLIPPED = 8  # it has clipped its gradients


def exchange(
    group: RankGroup,
    status: Status,
    *,
    found_inf: Tensor | None = None,
    failure: Exception | None = None,
    clips: str = "",
) -> list[Status]:
    """Exchange statuses, `Status.INFINITE` by ``found_inf``; all ranks call, and raise what any has.

    ``clips``: how this rank has clipped inside ``Join``; those that have inputs left must have done alike.
    """

    def mine() -> bytes:
        is_infinite = found_inf is not None and group.read(HostCopy(found_inf)).item() != 0
        flags = status | Status.INFINITE * is_infinite | Status.CLIPPED * bool(clips)
        return bytes([flags]) + blake2b(clips.encode(), digest_size=_DIGEST_NBYTES).digest()

    with Ballot(group, mine) as ballot:
        if failure is not None:
            raise failure
    statuses = [Status(each[0]) for each in ballot.payloads]
    digests = {
        told[1:] for told, each in zip(ballot.payloads, statuses, strict=True) if Status.JOINED not in each
    }
    if len(digests) > 1:
        _raise_clips(group, statuses, clips)
    infinite = ranks_that(statuses, Status.INFINITE)
    deaf = sorted({*ranks_that(statuses, Status.DEAF)} - {*infinite})
    if infinite and deaf:
        raise RuntimeError(
            f"the scalers of ranks {infinite} found an infinite gradient, those of ranks {deaf} did not, and "
            "would go on with another scale: reduce gradients before a scaler looks at them, as DDP does"
        )
    return statuses


def _raise_clips(group: RankGroup, statuses: Sequence[Status], clips: str) -> None:
    """Raise that active ranks have not clipped alike; all ranks call."""
    clipping = ranks_that(statuses, Status.CLIPPED)
    stepping = [rank for rank, each in enumerate(statuses) if not each & (Status.CLIPPED | Status.JOINED)]
    if stepping:
        raise RuntimeError(
            f"inside Join ranks {clipping} called clip_grad_norm_(), and ranks {stepping} stepped: every "
            "rank that has inputs left must do all"
        )
    told = ranks_by_value(gather_reports(group, clips or None))
    raise RankMismatchError(f"ranks disagree about the arguments of clip_grad_norm_: {values_text(told)}")


def ranks_that(statuses: Sequence[Status], flag: Status) -> list[int]:
    """Return the ranks with a flag."""
    return [rank for rank, status in enumerate(statuses) if flag in status]
