"""Replicas of a mesh make sure that they take the same steps with the same options.

Note [Replicas that drift]
    The gradients of replicas have equal bits, as all get those of one sum. So what a replica concludes from
    them inside of itself, such as a norm, or that a ``GradScaler`` skips a step as one rank has found an
    infinity in its rows, all conclude; and parameters stay equal as long as each replica takes the same
    steps. Inside a replica ranks hear of each other in their gathers. Across replicas nothing is gathered. A
    scheduler that goes by the loss of one replica, or a step that one replica leaves out, would let them
    drift apart without a word. So the owners of the same rows compare how many steps they have taken and a
    digest of all options, in a sum of 240 bytes that travels beside each backward pass. Their conclusion
    depends on the sum and on what a rank has added to it. So where digests differ all of them exchange more,
    and all raise. Where one rank of a replica differs from its own replica too, only its column raises here;
    the other columns miss it in their next gather.

    On an accelerator the sum is read when the next pass begins, so that the CPU does not wait for the device.
    Beside it travels the word of a failure: Note [Failures in one replica] in `replica_word`.
"""

import hashlib
import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from zero_optim.comm.collectives import RankGroup
from zero_optim.compat.streams import HostCopy, is_asynchronous, to_device
from zero_optim.ddp.owners.replica_word import WORD_LENGTH, failure_in, word_of
from zero_optim.ddp.reducer.inbox import weakly
from zero_optim.errors import RankMismatchError
from zero_optim.optimizer import ZeroRedundancyOptimizer
from zero_optim.plan.options import OptionValues, Plain, differing, held_by, text_of

if TYPE_CHECKING:
    from zero_optim.comm.traffic import Waitable

_NUM_PARTS = 4  # of the digest, 16 bits each: their sums are exact for any number of replicas
_SHOWN = 4  # options in a message


@dataclass(frozen=True, slots=True, eq=False)
class _Asked:
    """What this rank has told in one pass, and the sum that is on its way.

    Attributes:
        parts: of the digest.
        num_steps: that were taken.
        options: of each group.
        total: the sum over replicas.
        work: of the sum.
    """

    parts: list[int]
    num_steps: int
    options: list[dict[str, Plain]]
    total: Tensor
    work: "Waitable"


class ReplicaCheck:
    """Compares the optimizers of the ranks that own the same rows. All of them make the same calls.

    Args:
        across: these ranks.
        optimizer: of this rank.
    """

    def __init__(self, across: RankGroup, optimizer: ZeroRedundancyOptimizer) -> None:
        self._across = across.during("agree")
        self._optimizer = optimizer
        self._values = OptionValues()
        self._asked: _Asked | None = None
        self._told: list[_Asked] = []  # nobody waits for these, but they need their memory
        self._told_after = -1  # steps
        optimizer.steps.tell_replicas_by(weakly(self.tell))

    def start(self) -> None:
        """Read what the last call began, and begin anew; with each backward pass. Communicates.

        On the CPU it waits until all replicas have begun; see Note [Failures in one replica].

        Raises:
            RankMismatchError: see `read`.
            RemoteRankError: on every rank of the replicas that did not fail: a step has, in another one.
        """
        self.read()
        self._asked = self._begun([0] * WORD_LENGTH)
        if not is_asynchronous(self._across.device):
            self._hear()

    def tell(self, error: BaseException) -> None:
        """Tell other replicas that a step has failed in this one; all of its ranks call. Waits for nothing.

        Args:
            error: what this rank raises. What the ranks raise of the same step later is not told again.
        """
        if self._told_after != self._optimizer.num_steps:
            self._told_after = self._optimizer.num_steps
            self._told.append(self._begun(word_of(self._across.rank, error)))

    def _begun(self, word: list[int]) -> _Asked:
        values, num_steps = self._values, self._optimizer.num_steps
        values.follow(self._optimizer.param_groups, ())
        told = hashlib.blake2b(values.digest + num_steps.to_bytes(8, "little"), digest_size=2 * _NUM_PARTS)
        octets = told.digest()
        parts = [int.from_bytes(octets[2 * at : 2 * at + 2], "little") for at in range(_NUM_PARTS)]
        total = to_device(torch.tensor([*parts, *word], dtype=torch.int64), self._across.device)
        _, work = self._across.start_sum(total, "the options of replicas")
        return _Asked(parts, num_steps, values.by_group, total, work)

    def _hear(self) -> list[int]:
        """Wait for what was begun; gives the sum of the parts.

        Raises:
            RemoteRankError: see `start`.
        """
        assert self._asked is not None  # asked by the caller
        self._asked.work.wait()
        total = self._across.read(HostCopy(self._asked.total)).tolist()
        failure = failure_in(total[_NUM_PARTS:], self._across.size)
        if failure is not None:
            self._asked = None
            raise failure
        return total[:_NUM_PARTS]

    def read(self) -> None:
        """Wait for what was begun, if there is something. The CPU waits.

        Raises:
            RankMismatchError: on every rank that owns these rows: replicas have taken different numbers of
                steps, or have different options.
            RemoteRankError: see `start`.
        """
        asked = self._asked
        if asked is None:
            return
        sums, self._asked = self._hear(), None
        if sums == [self._across.size * part for part in asked.parts]:
            return
        told = json.dumps([asked.num_steps, asked.options]).encode()
        everyone: list[Any] = [json.loads(payload) for payload in self._across.all_gather_bytes(told)]
        wrong = _differences([of_rank[0] for of_rank in everyone], [of_rank[1] for of_rank in everyone])
        if wrong:
            more = f", and {len(wrong) - _SHOWN} more" if len(wrong) > _SHOWN else ""
            raise RankMismatchError(
                f"the replicas of the mesh differ: {'; '.join(wrong[:_SHOWN])}{more}. Parameters may differ "
                "by now: load a checkpoint on all. Take the same steps on all, and run schedulers alike"
            )


def _differences(num_steps: list[int], options: list[list[dict[str, Plain]]]) -> list[str]:
    wrong = []
    if len(set(num_steps)) > 1:
        taken = ", ".join(f"{number} of replica {replica}" for replica, number in enumerate(num_steps))
        wrong.append(f"steps taken: {taken}")
    for key in differing(options):
        held = [f"{text_of(value)} in {_replicas(numbers)}" for value, numbers in held_by(options, key)]
        wrong.append(f"{key[1]} of group {key[0]}: {', '.join(held)}")
    return wrong


def _replicas(numbers: list[int]) -> str:
    return f"replica{'s' * (len(numbers) > 1)} {', '.join(map(str, numbers))}"
