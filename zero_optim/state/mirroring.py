"""An optimizer whose state is mirrored: what is copied to the buddy, when, and what is found there again."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from copy import deepcopy
from typing import Any

from torch import Tensor

from zero_optim.comm.encoding import inner_tensors
from zero_optim.plan.groups import ParamGroup, options_of
from zero_optim.state.moving import Held
from zero_optim.state.state_dicts import ShardedStateDicts
from zero_optim.state.versions import Common
from zero_optim.state.whole import by_index


class MirroredOptimizer(ShardedStateDicts):
    """An optimizer that keeps mirrors, if its options say so. The subclass adds the step."""

    num_steps = 0  # calls of step() on this rank, of skipped steps too; after going back as many less

    def mirror_state(self) -> None:
        """Begin a version of the mirrors after a step; all ranks call. Does nothing without mirrors.

        Communicates: one small collective, and what this rank owns goes to its buddy. That is waited for by
        the next call.
        """
        if not self._is_mirrored:
            return
        self._follow_state()
        group, leaves = self._group, self._owned.leaves
        every = self.owned_state()
        of_params = {key: value for key, value in every.items() if isinstance(key, Tensor)}
        rows = {param: leaves.rows(param).detach() for param in self.owned_parameters()}
        params = self._params()
        value = {"state": by_index(of_params, params), "values": by_index(rows, params)}
        beside = {
            "options": deepcopy([options_of(each) for each in self.param_groups]),
            "everywhere": deepcopy({key: entry for key, entry in every.items() if key not in of_params}),
        }
        self._mirror.update(group, value, beside, steps=self.num_steps, age=self._snapshot.age)

    @contextmanager
    def mirrored(self) -> Iterator[None]:
        """Mirror the state when the body has ended, as `mirror_state`, also where it raises; all ranks call.

        A body that raises on one rank need not raise on the others, which wait for the collective.
        """
        try:
            yield
        except BaseException:
            with suppress(RuntimeError):  # the first error tells more
                self.mirror_state()
            raise
        self.mirror_state()

    def mirror_if_due(self) -> None:
        """Do so before a step, if no version tells of the present state; all ranks call."""
        if self._is_mirrored and self._mirror.tells_of != self._snapshot.age:
            self.mirror_state()

    def mirror_nbytes(self) -> int:
        """Return the bytes of the tensors that go to the buddy after a step; 0 without mirrors.

        Before the first step it counts the state that the class makes as far as trials of it have shown.
        """
        if not self._is_mirrored:
            return 0
        self._follow_state()
        leaves, state = self._owned.leaves, self.owned_state()
        own, total = set(self.owned_parameters()), 0
        for number, group in enumerate(self.param_groups):
            for param in own.intersection(group["params"]):
                rows, entries = leaves.rows(param), state.get(param, {})
                total += rows.nbytes + sum(tensor.nbytes for tensor in inner_tensors(entries))
                if self._snapshot.untouched:
                    planned = self.shaped_entries(param, number) - entries.keys()
                    total += len(planned) * rows.numel() * leaves.stepped_dtype(param).itemsize
        return total

    @property
    def _is_mirrored(self) -> bool:
        return self._options.mirror and self._ranks.size > 1

    def _take_over(self, owned: Mapping[Any, Any], groups: list[ParamGroup], *, exact: bool) -> None:
        super()._take_over(owned, groups, exact=exact)
        self._mirror.drop()

    def _plan_and_add(self, group: ParamGroup, before: int) -> None:
        super()._plan_and_add(group, before)
        self._mirror.drop()

    def _kept_by_former(self, common: Common, rank: int) -> tuple[dict[int, Held], Mapping[str, Any]]:
        """Give what this rank keeps of a version: by rank of the former group, and what all ranks have."""
        values, beside = self._mirror.values_of(common, rank)
        held = {former: Held(each["state"], each["values"], is_live=False) for former, each in values.items()}
        return held, beside
