"""What has been settled for the next backward pass, before it begins."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from zero_optim.ddp.reducer.graph import UnusedSearch
from zero_optim.ddp.reducer.report import FailureReport

if TYPE_CHECKING:
    from torch import Tensor
    from torch.futures import Future


@dataclass(slots=True, eq=False)
class UpcomingPass:
    """Collects, from one backward pass to the next, what the next one needs; a pass takes each thing once.

    Attributes:
        wanted: asked whether a pass that begins is to be reduced, see `Reducer`.
        is_expected: the last forward pass was one whose backward pass is to be reduced.
        divisor: gives what gradients are divided by; None for the number of ranks.
        search: for parameters that the pass will not reach.
        unread: reports of passes that have ended, the last ones; see Note [Late reports] in `report`.
        futures: things that are waited for when the pass ends.
    """

    wanted: Callable[[bool], bool] | None
    is_expected: bool = False
    divisor: Callable[[], float] | None = None
    search: UnusedSearch = field(default_factory=UnusedSearch)
    unread: list[FailureReport] = field(default_factory=list)
    futures: list["Future[object]"] = field(default_factory=list)

    def is_reduced(self, *, was_prepared: bool) -> bool:
        """Decide, when a pass begins, whether it is to be reduced.

        Args:
            was_prepared: the pass goes through an output that `Reducer.prepare` was given.
        """
        return self.wanted is None or self.wanted(was_prepared or self.is_expected)

    @property
    def in_join(self) -> bool:
        """Whether the last forward pass was inside ``Join``."""
        return self.divisor is not None

    def divisor_among(self, size: int) -> float:
        """Tell what the gradients of the pass that begins are divided by, of so many ranks."""
        return size if self.divisor is None else self.divisor()

    def pop_unused(self, learnt: Sequence[int] | None, params: Sequence["Tensor"]) -> list[int]:
        """Find parameters that will get no gradient in the pass that has just begun.

        Args:
            learnt: how many gradients each gets in a static graph, None if that is not known.
            params: the parameters.
        """
        if learnt is not None:
            return [index for index, calls in enumerate(learnt) if not calls]
        return self.search.pop_unused(params)

    def put_off(self, report: FailureReport) -> None:
        """Read a report of the pass that has ended later."""
        report.put_off()
        self.unread.append(report)

    def read_reports(self, *, but: int) -> None:
        """Read the reports that were not read, all but the last few; all ranks call.

        Args:
            but: how many are left for later.

        Raises:
            ReductionError: on every rank, if one of them had something to say.
        """
        while len(self.unread) > but:
            self.unread.pop(0).check()

    def wait_for_futures(self) -> None:
        """Wait for what was to be waited for, and forget it."""
        futures, self.futures = self.futures, []
        for future in futures:
            future.wait()
