"""Replicas of a mesh make sure that they take the same steps with the same options.

Note [Replicas that drift]
    The gradients of replicas have equal bits, so parameters stay equal as long as each replica takes the same
    steps. Inside a replica ranks hear of each other in their gathers; across replicas nothing is gathered. So
    the owners of the same rows gather their stamps, with the number of steps and a digest of all options,
    beside each backward pass. Where these differ, they exchange more, and all raise. On an accelerator the
    stamps are read when the next pass begins, so that the CPU does not wait for the device.

Note [Failures in one replica]
    A rank that raises a failure of its replica sends its next stamp at once, with an excerpt of the error,
    and waits for nothing: it may never begin another backward pass. If it does, that begins a new gather, as
    on a rank that has read the failure and raised. On the CPU the stamps are read before the pass has
    launched anything, as an error in the middle would leave reductions that nobody meets. All ranks of the
    replica tell, each across its own column, so only failures of which all of them hear are told: those that
    were sent in gathers.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import Tensor

from zero_optim.comm.collectives import RankGroup, bytes_to_tensor, tensor_to_bytes
from zero_optim.compat.streams import HostCopy, is_asynchronous, to_device
from zero_optim.ddp.reducer.inbox import weakly
from zero_optim.errors import RankMismatchError, RemoteRankError, message_of
from zero_optim.health.stamp import STAMP_NBYTES, Stamp, failed_ranks
from zero_optim.health.stamps import shortened
from zero_optim.optimizer import ZeroRedundancyOptimizer
from zero_optim.plan.option_values import OptionValues, Plain, differing, held_by, text_of

if TYPE_CHECKING:
    from zero_optim.comm.traffic import Waitable

_EXCERPT = 192  # bytes of the message of an error
_DRIFTED = "Parameters of replicas may differ by now: load a checkpoint on all"


@dataclass(frozen=True, slots=True, eq=False)
class _StampGather:
    """This rank's stamp of one pass, and the pending gather of those of all replicas."""

    num_steps: int
    options: list[dict[str, Plain]]
    stamps: Tensor  # (replicas, STAMP_NBYTES + _EXCERPT), uint8
    work: "Waitable"


class ReplicaCheck:
    """Compares the optimizers of the ranks that own the same rows, which make the same calls."""

    def __init__(self, across: RankGroup, optimizer: ZeroRedundancyOptimizer) -> None:
        self._across = across.during("agree")
        self._optimizer = optimizer
        self._values = OptionValues()
        self._pending: _StampGather | None = None
        self._sent: list[_StampGather] = []  # nobody waits for these, but they need their memory
        self._sent_after = -1  # steps
        optimizer.iteration.calls.tell_replicas_by(weakly(self.tell))

    def start(self) -> None:
        """Read the last gather, and start the next, with each backward pass. Raises as `read`."""
        self.read()
        self._pending = self._start_gather(None)
        if not is_asynchronous(self._across.device):
            self._stamps()

    def tell(self, error: BaseException) -> None:
        """Send other replicas the error that all ranks of this one raise of a step, once. No wait."""
        if self._sent_after != self._optimizer.num_steps:
            self._sent_after = self._optimizer.num_steps
            self._sent.append(self._start_gather(error))

    def _start_gather(self, error: BaseException | None) -> _StampGather:
        values, num_steps = self._values, self._optimizer.num_steps
        values.follow(self._optimizer.param_groups, ())
        failed = None if error is None else type(error).__name__
        text = message_of(error) if isinstance(error, RemoteRankError) else f"{failed}: {error}"
        excerpt = b"" if error is None else text.encode()[:_EXCERPT]
        stamp = Stamp.of(num_steps, values.digest, "step()", failed).packed() + excerpt.ljust(_EXCERPT, b"\0")
        mine = to_device(bytes_to_tensor(stamp), self._across.device)
        stamps, work = self._across.start_all_gather(mine, "the options of replicas")
        return _StampGather(num_steps, values.by_group, stamps, work)

    def _stamps(self) -> dict[int, Stamp]:
        """Wait for the stamps; RemoteRankError if a step has failed in another replica."""
        assert self._pending is not None  # asked by the caller
        self._pending.work.wait()
        rows = [tensor_to_bytes(row) for row in self._across.read(HostCopy(self._pending.stamps))]
        stamps = {replica: Stamp.read(row[:STAMP_NBYTES]) for replica, row in enumerate(rows)}
        failed = failed_ranks(stamps)
        if not failed or len(failed) == len(stamps):  # each has raised
            return stamps
        self._pending = None
        excerpt = rows[failed[0]][STAMP_NBYTES:].rstrip(b"\0").decode(errors="ignore")
        text = f"a step has failed in replica {failed[0]} of the mesh: {excerpt}"
        if len(failed) > 1:
            text = f"{len(failed)} replicas of the mesh have failed in a step; their own output has more"
        raise RemoteRankError(f"{text}. {_DRIFTED}")

    def read(self) -> None:
        """Wait for the pending gather, if any. The CPU waits.

        RankMismatchError if replicas took different steps or have different options; RemoteRankError if a
        step has failed in another one.
        """
        gather = self._pending
        if gather is None:
            return
        stamps, self._pending = self._stamps(), None
        if len({(stamp.number, stamp.digest) for stamp in stamps.values()}) == 1:
            return
        everyone = self._across.all_gather_json([gather.num_steps, gather.options])
        counts, options = ([of_rank[at] for of_rank in everyone] for at in range(2))
        wrong = []
        if len(set(counts)) > 1:
            taken = (f"{number} of replica {replica}" for replica, number in enumerate(counts))
            wrong.append(f"steps taken: {', '.join(taken)}")
        for key in differing(options):
            parts = [
                f"{text_of(value)} in replica{'s' * (len(numbers) > 1)} {', '.join(map(str, numbers))}"
                for value, numbers in held_by(options, key)
            ]
            wrong.append(f"{key[1]} of group {key[0]}: {', '.join(parts)}")
        if wrong:
            raise RankMismatchError(
                f"the replicas of the mesh differ: {shortened(wrong)}. Parameters may differ by now: load a "
                "checkpoint on all. Take the same steps on all, and run schedulers alike"
            )
