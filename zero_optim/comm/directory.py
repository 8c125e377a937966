"""Where the watchdogs of all ranks listen, as the store of the default group has it."""

from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial

import torch.distributed as dist

from zero_optim.comm.peers import (
    ANSWER_LIMIT,
    Address,
    Message,
    Presence,
    ask,
    host_towards,
    in_threads,
)
from zero_optim.compat.engine import address_of_store, default_store

_LEFT = "left"  # in the store, in the place of an address


class Directory:
    """Addresses, by global rank. The store is asked once for each, and again if nobody is found there.

    It does not keep the store: that may have a port, which has to be free when the default group is gone.

    Args:
        is_current: whether the default group is still the one that this is for.
    """

    def __init__(self, is_current: Callable[[], bool]) -> None:
        self.rank = dist.get_rank()
        self.is_current = is_current
        self._addresses: dict[int, Address] = {}

    @staticmethod
    def can_be_kept() -> bool:
        """Whether the store takes entries; that of PyTorch's "fake" groups does not."""
        try:
            default_store().set("zero_optim/watchdog", "")
        except RuntimeError:
            return False
        return True

    @staticmethod
    def own_host() -> str:
        """Find the address at which other ranks reach this machine."""
        return host_towards(*address_of_store(default_store()))

    def publish(self, address: Address) -> None:
        """Tell the other ranks where this one listens."""
        default_store().set(_key(self.rank), address.to_text())

    def leave(self) -> None:
        """Tell them that this one listens no more, so that nobody takes it for dead."""
        with suppress(RuntimeError, ValueError):  # the store is gone, and so is whoever would ask
            store = default_store()
            if self.is_current():  # asked second: the store is not that of a default group made since
                store.set(_key(self.rank), _LEFT)

    def learn(self, ranks: Sequence[int]) -> None:
        """Read addresses before they are needed: the process that has the store may be the one to end.

        Waits until the store has something of each rank.
        """
        unknown = [rank for rank in ranks if rank not in self._addresses]
        if unknown:
            found = default_store().multi_get([_key(rank) for rank in unknown])
            for rank, entry in zip(unknown, found, strict=True):
                self._note(rank, entry.decode())

    def ask_all(self, ranks: Sequence[int], question: Message) -> dict[int, Message | Presence]:
        """Ask all ranks but this one; takes a few times `ANSWER_LIMIT` at most.

        Returns:
            By place among ``ranks``.
        """
        others = {place: rank for place, rank in enumerate(ranks) if rank != self.rank}
        calls = {place: partial(self._ask, rank, question) for place, rank in others.items()}
        found = in_threads(calls, 3 * ANSWER_LIMIT)
        return {place: found.get(place, Presence.UNKNOWN) for place in others}

    def _ask(self, rank: int, question: Message) -> Message | Presence:
        if rank not in self._addresses:
            absence = self._look_up(rank)
            if absence is not None:
                return absence
        known = self._addresses[rank]
        answer = ask(known, question)
        if answer is not Presence.ENDED:
            return answer
        with suppress(RuntimeError, ValueError):  # the store may be gone as well
            if self._look_up(rank) is Presence.LEFT:
                return Presence.LEFT
            if self._addresses[rank] != known:  # it has begun to listen again
                return ask(self._addresses[rank], question)
        return Presence.ENDED

    def _look_up(self, rank: int) -> Presence | None:
        """Read an address from the store; say why there is none."""
        store = default_store()
        if not store.check([_key(rank)]):
            return Presence.ABSENT
        return self._note(rank, store.get(_key(rank)).decode())

    def _note(self, rank: int, entry: str) -> Presence | None:
        if entry == _LEFT:
            return Presence.LEFT
        self._addresses[rank] = Address.from_text(entry)
        return None


def _key(rank: int) -> str:
    return f"zero_optim/watchdog/{rank}"
