"""Replicas of a mesh make sure that they take the same steps with the same options.

Note [Replicas that drift]
    Parameters of replicas stay equal as long as each takes the same steps, and nothing of them is gathered.
    So the owners of the same rows gather stamps of their last step beside each backward pass. Where these
    differ, all raise; on an accelerator in the next pass.

Note [Failures in one replica]
    A rank that raises a failure of its replica sends its next stamp at once, with the message, and waits for
    nothing: it may never begin another backward pass. On the CPU stamps are read before the pass has launched
    anything. Only failures of which all ranks of a replica hear, in gathers, are told.
"""

from collections.abc import Sequence
from typing import TypeAlias

from torch import Tensor

from zero_optim.comm.collectives import RankGroup
from zero_optim.comm.frames import bytes_to_tensor, ranks_text
from zero_optim.compat.streams import is_asynchronous, to_device
from zero_optim.ddp.reducer.inbox import weakly
from zero_optim.errors import RankMismatchError, RemoteRankError, message_of
from zero_optim.flow.pending import Pending
from zero_optim.health.stamp import STAMP_NBYTES, Arrival, Stamp, parted
from zero_optim.health.stamps import Options, options_text, shortened
from zero_optim.optimizer import ZeroRedundancyOptimizer
from zero_optim.plan.option_values import OptionValues, differing

_NBYTES = STAMP_NBYTES + 192  # of a stamp with an excerpt of the error


# The options of this rank at the start of a pass, and the stamps of all replicas.
_Gather: TypeAlias = tuple[Options, Pending[dict[int, Stamp]]]


class ReplicaCheck:
    """Compares the optimizers of the ranks that own the same rows, which make the same calls."""

    def __init__(self, across: RankGroup, optimizer: ZeroRedundancyOptimizer) -> None:
        self._across = across.during("agree")
        self._optimizer = optimizer
        self._values = OptionValues()
        self._pending: _Gather | None = None
        self._sent: list[_Gather] = []  # nobody waits for these, but they need their memory
        self._sent_after = -1  # steps
        optimizer.core.engine.join_replicas(weakly(self.tell))

    def start(self) -> None:
        """Read the last gather, and start the next, with each backward pass. Raises as `read`."""
        self.read()
        self._pending = self._start_gather(None)
        if not is_asynchronous(self._across.device):
            self._read_failures()

    def tell(self, error: BaseException) -> None:
        """Send other replicas the error that all ranks of this one raise of a step, once. No wait."""
        if self._sent_after != self._optimizer.num_steps:
            self._sent_after = self._optimizer.num_steps
            self._sent.append(self._start_gather(error))

    def _start_gather(self, error: BaseException | None) -> _Gather:
        values, num_steps, text = self._values, self._optimizer.num_steps, "step()"
        values.follow(self._optimizer.param_groups, ())
        if error is not None:
            is_remote = isinstance(error, RemoteRankError)
            name = f"rank {self._across.numbers[self._across.rank]} failed with {type(error).__name__}"
            text = message_of(error) if is_remote else f"{name}: {error}"
        stamp = Stamp(0, error is not None, num_steps % 2**32, values.digest, text.encode())
        mine = stamp.packed(_NBYTES)
        row = to_device(bytes_to_tensor(mine), self._across.device)
        group = self._across  # the function below is kept: it must not keep this object

        def stamps(gathered: list[Tensor]) -> dict[int, Stamp]:
            return Arrival(gathered[0], mine).read_stamps(group.read)

        return values.by_group, Pending([group.start_all_gather(row, "the options of replicas")], stamps)

    def _read_failures(self) -> dict[int, Stamp]:
        assert self._pending is not None  # checked by the caller
        stamps = self._pending[1].wait()
        failed = {replica: stamp for replica, stamp in stamps.items() if stamp.has_failed}
        if 0 < len(failed) < len(stamps):  # else each has raised its own
            self._pending, (replica, stamp) = None, next(iter(failed.items()))
            text = f"a step has failed in replica {replica} of the mesh: {stamp.name}"
            if len(failed) > 1:
                text = f"{len(failed)} replicas of the mesh have failed in a step; their own output has more"
            raise RemoteRankError(
                f"{text}. Parameters of replicas may differ by now: load a checkpoint on all"
            )
        return stamps

    def read(self) -> None:
        """Wait for the pending gather; RankMismatchError or RemoteRankError if replicas differ or failed."""
        if self._pending is None:
            return
        mine, stamps = self._pending[0], self._read_failures()
        self._pending, parts = None, parted(stamps, "number")
        steps = (f"{stamp.number} of {ranks_text(replicas, 'replica')}" for replicas, stamp in parts)
        wrong = [f"steps taken: {', '.join(steps)}"] if parts else []
        if len({stamp.digest for stamp in stamps.values()}) > 1:
            options = self._across.all_gather_json(mine)

            def each(replicas: Sequence[int], value: str) -> str:
                return f"{value} in {ranks_text(replicas, 'replica')}"

            wrong += options_text(options, differing(options), each, ", ")
        if wrong:
            raise RankMismatchError(
                f"the replicas of the mesh differ: {shortened(wrong)}. Parameters may differ by now: load a "
                "checkpoint on all. Take the same steps on all, and run schedulers alike"
            )
