"""The addresses of all watchdogs, and questions to many of them.

Note [A store with a past]
    torchrun of PyTorch 2.13 starts processes again on the store of the former ones, with their addresses,
    ours and gloo's. A rank whose address does not answer may then be one that has built nothing yet.
"""

import json
import logging
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from functools import partial

import torch.distributed as dist

from zero_optim.compat import private
from zero_optim.health.peers import ANSWER_LIMIT, Address, Presence, ask, in_threads, longest_answer
from zero_optim.health.tree import FAN, Message, cut, from_runs, to_runs

_WITH_A_PAST = (
    "the store of the process group has addresses of processes that have ended: this job was started again "
    "on the same store. gloo may connect to them, and then fails, or waits until its timeout: set "
    "TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 for torchrun"
)

logger = logging.getLogger("zero_optim")


class Directory:
    """The addresses of all watchdogs by global rank, from the store, to which it keeps no reference."""

    def __init__(self, is_current: Callable[[], bool]) -> None:
        self.rank = dist.get_rank()
        self.is_current = is_current
        self._addresses: dict[int, Address] = {}
        self._unsure: set[int] = set()  # ranks of which the store may have a former process's address

    @staticmethod
    def can_be_kept() -> bool:
        """Return whether the store takes entries, unlike a "fake" group's."""
        try:
            private.get_default_store().set("zero_optim/watchdog", "kept")
            return bool(private.get_default_store().get("zero_optim/watchdog") == b"kept")
        except RuntimeError:
            return False

    def publish(self, address: Address, *, is_first: bool) -> None:
        """Write this rank's address to the store; ``is_first``: this process has written none."""
        store, key = private.get_default_store(), _key(self.rank)
        if is_first and store.check([key]):  # Note [A store with a past]
            logger.warning(_WITH_A_PAST)
            self._unsure.update(range(dist.get_world_size()))
        self._addresses[self.rank] = address
        store.set(key, json.dumps(address))

    def learn(self, ranks: Sequence[int]) -> None:
        """Read the ranks' addresses early: the store may end first. Waits for all ranks."""
        unknown = [rank for rank in ranks if rank not in self._addresses or rank in self._unsure]
        self._unsure.difference_update(ranks)
        if unknown:
            entries = private.get_default_store().multi_get([_key(rank) for rank in unknown])
            for rank, entry in zip(unknown, entries, strict=True):
                self._addresses[rank] = Address(*json.loads(entry))

    def ask_all(
        self, ranks: Sequence[int], question: Message, stop: int | None = None
    ) -> dict[int, Message | Presence]:
        """Ask all other ranks, or those from here up to the place ``stop``, in a tree; answers by places."""
        me = ranks.index(self.rank)
        others = len(ranks) - 1
        ranges = cut(me + 1, stop) if stop else cut(0, me, others) + cut(me + 1, len(ranks), others)
        answers: dict[int, Message | Presence] = {}
        while ranges:
            several = [each for each in ranges if each[1] - each[0] > 1]
            answers |= self.ask_places(ranks, [first for first, _ in ranges], question, dict(several))
            ranges = []
            for first, end in several:
                answer = answers[first]
                groups = answer.pop("answers", None) if isinstance(answer, dict) else None
                if groups is None:
                    ranges += cut(first + 1, end)
                for runs, said in groups or ():
                    answer = Presence[said] if isinstance(said, str) else said
                    answers.update(dict.fromkeys(from_runs(runs), answer))
        failed = [
            place for place, answer in answers.items() if answer in (Presence.UNCONNECTED, Presence.UNKNOWN)
        ]
        if len(ranks) > FAN and stop is None and len(failed) <= FAN:  # a rank that asked it may be to blame
            answers |= self.ask_places(ranks, failed, question)
        return answers

    def ask_places(
        self,
        ranks: Sequence[int],
        places: Iterable[int],
        question: Message,
        stops: dict[int, int] | None = None,
    ) -> dict[int, Message | Presence]:
        """Ask some ranks of a group, `FAN` at a time; those with ``stops`` answer for a range."""
        of_group = question if "ranks" in question else {"ranks": to_runs(ranks), **question}
        questions = {place: dict(of_group) for place in places}
        for place, stop in (stops or {}).items():
            questions[place]["stop"] = stop
        calls = {place: partial(self._ask, ranks[place], each) for place, each in questions.items()}
        answers = in_threads(calls, longest_answer(questions.values()) * -(-len(calls) // FAN))
        return {place: answers.get(place, Presence.UNKNOWN) for place in calls}

    def catch_up(self) -> None:
        """Wait until this rank's watchdog has answered earlier questions, which may bring a verdict."""
        if self.rank in self._addresses:
            ask(self._addresses[self.rank], {"ranks": []}, 5 * ANSWER_LIMIT)

    def _ask(self, rank: int, question: Message) -> Message | Presence:
        """Ask a rank; it is absent if the process that has ended may be a former one."""
        if rank not in self._addresses and not self._look_up(rank):
            return Presence.ABSENT
        address = self._addresses[rank]
        answer = ask(address, question)
        if answer is Presence.ENDED and "verdict" not in question:  # then not why: the store may be stopped
            with suppress(RuntimeError, ValueError):  # the store may be gone as well
                if self._look_up(rank) and self._addresses[rank] != address:  # it has begun to listen again
                    answer = ask(self._addresses[rank], question)
        return Presence.ABSENT if answer is Presence.ENDED and rank in self._unsure else answer

    def _look_up(self, rank: int) -> bool:
        """Read an address from the store; returns whether there is one."""
        store = private.get_default_store()
        if not store.check([_key(rank)]):
            return False
        self._addresses[rank] = Address(*json.loads(store.get(_key(rank))))
        return True


def _key(rank: int) -> str:
    return f"zero_optim/watchdog/{rank}"
