"""One backward pass: which gradients have come, which buckets are on their way, what went wrong.

Made when the first sign of a backward pass is seen, dropped at its end. Nothing about a pass is
remembered anywhere else.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from zero_optim.comm.collectives import RankGroup
from zero_optim.ddp import report
from zero_optim.ddp.assignment import BucketAssignment
from zero_optim.ddp.bucket import ReducerBucket
from zero_optim.ddp.reduction import Reduction
from zero_optim.ddp.report import FailureReport

if TYPE_CHECKING:
    from torch import Tensor

# every: each parameter must get one gradient. some: it may get none. learning: nothing is known yet, so
# nothing is reduced before the end. learnt: each must get as many as in the pass that was there to learn.
Kind = Literal["every", "some", "learning", "learnt"]


@dataclass(frozen=True, slots=True)
class PassTerms:
    """How a backward pass is to go.

    Attributes:
        kind: which gradients are waited for.
        expected: how many gradients each parameter gets; none while that is being learnt, so that whatever
            comes is unusual.
        skips_unused: buckets that this rank did not use are not reduced.
        tells: the last bucket waits for the end of the pass, and tells whether something went wrong; see
            Note [Word of a failure] in `report`.
        divisor: of the gradients; 1 where a comm hook divides.
        undefined: parameters of a static graph that took part in the pass that was there to learn, without
            anybody having a gradient for them, as where an ``autograd.Function`` gives None.
    """

    kind: Kind
    expected: Sequence[int]
    skips_unused: bool
    tells: bool
    divisor: float
    undefined: Sequence[int] = ()


class Iteration:
    """Counts gradients down and launches buckets in order, each as soon as it and all before it are full.

    Args:
        wiring: parameters and buckets.
        terms: how the pass is to go.
        carried: parameters with gradients from passes that were not reduced (``no_sync``).
        launch: starts the reduction of the bucket with a number.

    Attributes:
        calls: how many gradients each parameter got.
        order: parameters in the order in which their gradients came.
    """

    def __init__(
        self,
        wiring: BucketAssignment,
        terms: PassTerms,
        carried: Sequence[bool],
        launch: Callable[[int], Reduction],
    ) -> None:
        self.calls = [0] * len(wiring.names)
        self.order: list[int] = []
        self._wiring = wiring
        self._terms = terms
        self._expected = list(terms.expected)
        self._places = wiring.places
        self._buckets = wiring.buckets
        self._divisor = terms.divisor
        self._learns = terms.kind == "learning"
        self._carried = carried
        self._launch = launch
        self._num_early = len(wiring.buckets) - terms.tells  # buckets that go as soon as they are full
        self._waiting = [len(bucket.indices) for bucket in wiring.buckets]
        self._reductions: list[Reduction | None] = []
        self._presumed: set[int] = set()  # unused
        self._kept: dict[int, Tensor] = {}
        self._word: Tensor | None = None  # an element of the last bucket's sum
        self._failures: list[str] = []
        self._troubles: dict[
            Callable[[Sequence[str]], str], list[str]
        ] = {}  # what to say of which parameters

    @property
    def asks_for_use(self) -> bool:
        """Whether ranks tell each other which parameters were used."""
        return self._terms.kind in ("some", "learning")

    @property
    def num_launched(self) -> int:
        """How many buckets were launched, or passed over."""
        return len(self._reductions)

    @property
    def num_reduced(self) -> int:
        """How many buckets were launched."""
        return sum(reduction is not None for reduction in self._reductions)

    def fail(self, message: str) -> None:
        """Note something that makes the gradients useless; raised on every rank at the end."""
        self._failures.append(message)

    def _note(self, explain: Callable[[Sequence[str]], str], index: int) -> None:
        """Note something wrong with a parameter's gradient; parameters are told of together."""
        names = self._troubles.setdefault(explain, [])
        if self._wiring.names[index] not in names:
            names.append(self._wiring.names[index])

    def arrived(self, index: int) -> None:
        """Take note of a parameter's gradient; called by its hook, hence quick."""
        calls = self.calls
        calls[index] += 1
        if calls[index] != self._expected[index]:
            self._unusual(index)
            return
        self.order.append(index)
        number, slot = self._places[index]
        bucket, waiting = self._buckets[number], self._waiting
        if slot in bucket.large:
            bucket.take_one(slot, self._divisor)
        else:
            run = bucket.run
            run.append(slot)
            if len(run) >= bucket.run_length:
                bucket.take_run(self._divisor)
        waiting[number] -= 1
        if not waiting[number]:
            self._launch_full()

    def _unusual(self, index: int) -> None:
        """Sort out a gradient that is not the one that was waited for."""
        if self._learns:
            if self.calls[index] == 1:
                self.order.append(index)
        elif self._terms.kind == "learnt":
            if self.calls[index] > self._expected[index]:
                self._note(report.more, index)
        elif index not in self._presumed:
            self._note(report.twice, index)
        else:
            self._presumed.discard(index)
            number, slot = self._wiring.places[index]
            if number < self.num_launched:
                self._note(report.late_gradient, index)
            else:
                self._buckets[number].run.append(slot)

    def presume_unused(self, indices: Iterable[int]) -> None:
        """Do not wait for some parameters' gradients; to be called before any has come."""
        for index in indices:
            self._presumed.add(index)
            self._expected[index] = 0  # whatever comes is unusual
            self._waiting[self._wiring.places[index][0]] -= 1
        self._launch_full()

    def _launch_full(self) -> None:
        """Launch, in order, what is full and has nothing before it that is not."""
        while self.num_launched < self._num_early and not self._waiting[self.num_launched]:
            self._launch_next()

    def _launch_next(self) -> None:
        number = self.num_launched
        bucket = self._wiring.buckets[number]
        used = [self.calls[index] > 0 for index in bucket.indices]
        if self._terms.skips_unused and not any(used):
            self._reductions.append(None)
            return
        if bucket.is_sparse:
            bucket.take_sparse(self._divisor)
        else:
            self._take_rest(bucket, used)
        for slot in bucket.pop_misfits():
            self._note(report.dense if bucket.is_sparse else report.sparse, bucket.indices[slot])
        if number == self._num_early and (self._failures or self._troubles):
            bucket.spoil()  # the last, at the end: nothing more can go wrong
        self._reductions.append(self._launch(number))

    def _take_rest(self, bucket: ReducerBucket, used: Sequence[bool]) -> None:
        """Copy what has not been copied yet: all of it, or the gradients that did not come."""
        rest = [slot for slot, was_used in enumerate(used) if self._learns or not was_used]
        for slot in rest:
            if not used[slot] and bucket.is_inside(slot):
                self._kept[bucket.indices[slot]] = bucket.views[slot].clone()  # in case nobody used it
        bucket.take_run(self._divisor)
        if rest:
            bucket.take(rest, self._divisor)

    # ------------------------------------------------------------------ the end

    def launch_rest(self) -> None:
        """Launch every bucket that has not been, with what gradients there are."""
        self._check_complete()
        while self.num_launched < len(self._waiting):
            self._launch_next()

    def _check_complete(self) -> None:
        if self._terms.kind not in ("every", "learnt"):
            return
        for index, (calls, expected) in enumerate(zip(self.calls, self._expected, strict=True)):
            if calls < expected and not self._carried[index]:
                self._note(report.fewer if self._terms.kind == "learnt" else report.no_gradient, index)
        for index in self._terms.undefined:  # would be handed out as it came, not reduced
            if self._has_gradient(index):
                self._note(report.more, index)

    def _has_gradient(self, index: int) -> bool:
        """Whether a parameter has one; its hook is called for an undefined one too."""
        number, slot = self._places[index]
        return self._buckets[number].params[slot].grad is not None

    def close(self, group: RankGroup) -> FailureReport:
        """Have ranks tell each other what was used and what went wrong, after the last bucket; all call."""
        used: list[bool] = []
        if self.asks_for_use:
            used = [
                self._carried[index] or (calls > 0 and self._has_gradient(index))
                for index, calls in enumerate(self.calls)
            ]
        troubles = [explain(names) for explain, names in self._troubles.items()]
        if self._terms.tells:
            self._word = self._buckets[-1].flat.new_empty(1)
        return FailureReport(group, "; ".join(self._failures + troubles) or None, used, self._word)

    def give(self, unused: Sequence[bool]) -> None:
        """Wait for every bucket in order, and make the reduced gradients the parameters' own.

        Args:
            unused: by parameter, whether no rank used it; its gradient is left as it was.
        """
        for bucket, reduction in zip(self._wiring.buckets, self._reductions, strict=True):
            if reduction is None:
                continue
            reduced = reduction.wait()
            if self._word is not None and bucket is self._buckets[-1]:
                self._word.copy_(reduced[:1])  # the gradients are the user's from here on
            bucket.give(reduced, unused)
            for slot, index in enumerate(bucket.indices):
                if unused[index] and index in self._kept:
                    bucket.views[slot].copy_(self._kept[index])

    def drain(self) -> None:
        """Wait for every bucket, and drop what came."""
        for reduction in self._reductions:
            if reduction is not None:
                reduction.wait()
