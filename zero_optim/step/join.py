"""The status bytes that ranks exchange before a step inside ``Join`` or with scaled gradients."""

from collections.abc import Sequence
from enum import IntFlag

from torch import Tensor

from zero_optim.comm.agreement import Ballot
from zero_optim.comm.collectives import RankGroup
from zero_optim.compat.streams import HostCopy


class Status(IntFlag):
    """Flags of one rank."""

    NOTHING = 0
    JOINED = 1  # it ran out of inputs
    INFINITE = 2  # its scaler found an infinity
    DEAF = 4  # if another rank finds one, its scaler cannot be told


def exchange(
    group: RankGroup, status: Status, *, found_inf: Tensor | None = None, failure: Exception | None = None
) -> list[Status]:
    """Exchange status bytes, `Status.INFINITE` by ``found_inf``; all ranks call, and raise what any has."""

    def mine() -> bytes:
        is_infinite = found_inf is not None and group.read(HostCopy(found_inf)).item() != 0
        return bytes([status | Status.INFINITE if is_infinite else status])

    with Ballot(group, mine) as ballot:
        if failure is not None:
            raise failure
    statuses = [Status(each[0]) for each in ballot.payloads]
    infinite = ranks_that(statuses, Status.INFINITE)
    deaf = sorted({*ranks_that(statuses, Status.DEAF)} - {*infinite})
    if infinite and deaf:
        raise RuntimeError(
            f"the scalers of ranks {infinite} found an infinite gradient, those of ranks {deaf} did not, and "
            "would go on with another scale: reduce gradients before a scaler looks at them, as DDP does"
        )
    return statuses


def ranks_that(statuses: Sequence[Status], flag: Status) -> list[int]:
    """Return the ranks with a flag."""
    return [rank for rank, status in enumerate(statuses) if flag in status]
