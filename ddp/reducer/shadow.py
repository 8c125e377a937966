"""A backward pass of the other ranks, in which a rank that ran out of inputs takes part."""

from collections.abc import Iterator, Sequence

from zero_optim.comm.collectives import RankGroup
from zero_optim.ddp.reducer.assignment import BucketAssignment
from zero_optim.ddp.reducer.backward_pass import PassTerms
from zero_optim.ddp.reducer.reduction import BucketReductions, Launch
from zero_optim.ddp.reducer.report import FailureReport
from zero_optim.errors import ReductionError


class ShadowPass:
    """Takes part with zeros in all that the others reduce and tell each other; for ``Join``.

    Args:
        assignment: parameters and buckets. The buckets are left alone.
        terms: how the pass is to go.
        launch: starts a bucket's reduction.
    """

    def __init__(self, assignment: BucketAssignment, terms: PassTerms, launch: Launch) -> None:
        self._terms = terms
        self._num_params = len(assignment.names)
        self._buckets = [bucket.zeros_like() for bucket in assignment.buckets]
        self.reductions = BucketReductions(self._buckets, launch)

    def launch(self, last_used: Sequence[int]) -> None:
        """Launch what the others launch.

        Args:
            last_used: parameters that this rank used in its last pass: the others use the same.

        Raises:
            ReductionError: it had none, and buckets that are not used are left out.
        """
        for is_used in self._are_used(frozenset(last_used)):
            if is_used:
                self.reductions.launch_next()
            else:
                self.reductions.leave_out_next()

    def _are_used(self, used: frozenset[int]) -> Iterator[bool]:
        if self._terms.skips_unused and not used:
            raise ReductionError(
                "skip_all_reduce_unused_params=True, and this rank had no batch to learn from which "
                "parameters are used: give every rank a batch, or leave the option out inside Join"
            )
        for bucket in self._buckets:
            yield not self._terms.skips_unused or not used.isdisjoint(bucket.indices)

    def close(self, group: RankGroup) -> list[bool]:
        """Wait for what was launched; the CPU waits for what ranks tell each other.

        Returns:
            By parameter, whether any rank used it; nothing if nobody needed to know.

        Raises:
            ReductionError: on every rank, with what every rank that failed has to say.
        """
        used_here = [False] * self._num_params if self._terms.asks_for_use else []
        in_last_bucket = self._terms.failure_word_in_last_bucket
        report = FailureReport(group, None, used_here, in_last_bucket=in_last_bucket)
        results = [reduced for _, reduced in self.reductions.results()]
        if in_last_bucket:
            report.read_word(results[-1])
        report.check()
        return report.used()
