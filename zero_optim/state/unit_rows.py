"""An optimizer whose parameters become those of the units of a fully sharded model."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from torch import Tensor

from zero_optim.comm.agreement import agree, failing_together
from zero_optim.shard.unit_forms import KeptRows, UnitForms
from zero_optim.shard.units import UnitBucket
from zero_optim.state.rebinding import RebindableOptimizer


class UnitRowsOptimizer(RebindableOptimizer):
    """An optimizer that can keep the rows of units, planned anew as for another process group.

    The subclass adds the step.
    """

    def shard_parameters(self, units: Mapping[Tensor, int], forms: UnitForms) -> list[UnitBucket]:
        """Keep the parameters of units on their owners alone, and plan who owns what anew; all ranks call.

        Every parameter has its value on every rank when this is called.

        Memory is released bucket by bucket of before: beside the rows that are kept there is no copy.

        Args:
            units: the parameters concerned, each with the number of its unit; equal on every rank.
            forms: how they are kept; in the same way on all ranks.

        Returns:
            The buckets of the units; they are freed.

        Raises:
            RuntimeError: on every rank: there are units already.
            ValueError: likewise: the optimizer has mirrors, which go with `rebind` alone.
            Exception: likewise, as `rebind`. Nothing has changed after either.
        """
        group = self._group
        with group.doing("shard_parameters()"):
            with failing_together(group):
                if self._units:
                    raise RuntimeError(
                        "the optimizer has the parameters of a fully sharded model already: put all modules "
                        "into one, or give each an optimizer"
                    )
                self._options.check_units()
            agree(group, [f"offload={forms.describe()}"], "where a rank keeps what it owns")
            self.wait_for_gathers()
            before = self._units, self._unit_forms
            self._units, self._unit_forms = units, forms
            try:
                with failing_together(group):
                    self.check_weights()
                self._go_over(group, range(group.size), keep_state=True)
            except Exception:
                self._units, self._unit_forms = before
                raise
        return self._sharding.unit_buckets()

    @contextmanager
    def leaving_freed(self) -> Iterator[dict[Tensor, KeptRows]]:
        """Have state dicts of the model show parameters of units as they are; does not communicate.

        Yields:
            The parameters of units, each with what this rank keeps of it.
        """
        buckets = self._sharding.unit_buckets()
        for bucket in buckets:
            bucket.is_left = True
        try:
            yield {param: kept for bucket in buckets for param, kept in bucket.all_kept()}
        finally:
            for bucket in buckets:
                bucket.is_left = False

    def keep_unit_rows(self) -> None:
        """Step the rows that the buckets of units keep, once these are filled; does not communicate.

        For whoever builds an optimizer over parameters that have no values yet.
        """
        self._owned.leaves.keep(self._sharding.unit_buckets())
