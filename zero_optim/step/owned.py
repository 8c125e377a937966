"""What one rank owns: the parameters, what steps them, and what is kept beside them."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from zero_optim.comm.agreement import failing_together
from zero_optim.comm.collectives import RankGroup
from zero_optim.plan.groups import ParamGroup
from zero_optim.plan.pieces import Piece
from zero_optim.step.leaves import EMA, MASTER, Leaves, OwnedStateView, WeightAverage
from zero_optim.step.local import LocalOptimizer
from zero_optim.step.spec import OptimizerSpec


class OwnedState:
    """What a rank keeps and steps. Communicates only to fail together with the other ranks.

    Args:
        group: the ranks.
        leaves: what is stepped for each owned parameter.
        average: averages kept, if any.
        local: the optimizers over the leaves.
        owned: the parameters owned here.
    """

    def __init__(
        self,
        group: RankGroup,
        leaves: Leaves,
        average: WeightAverage,
        local: LocalOptimizer,
        owned: Iterable[Tensor],
    ) -> None:
        self.local = local
        self.average = average
        self.leaves = leaves
        self._group = group
        average.add(owned)

    def let_go(self) -> None:
        """Let the process group go; does not communicate."""
        self._group = self._group.let_go()

    def shown_state(self) -> Mapping[Any, Any]:
        """Give the state for users to see: the class's own dict if that is all, else a view of it all."""
        states = self.local.states
        return states[0] if self._is_plain else OwnedStateView(states, self.leaves, self.average)

    @property
    def _is_plain(self) -> bool:
        return len(self.local.states) == 1 and not self.leaves.separate and not self.average.averages

    @property
    def takes_closures(self) -> bool:
        """Whether a closure may be left to the class's own step: masters need the gradients before it."""
        return not self.leaves.masters

    def take_over_state(self, state: Mapping[Any, Any]) -> None:
        """Go on with the state that the user put in the place of ours, as ``torch.optim`` does.

        Raises:
            TypeError: there are several states in one, which no dict can stand for.
        """
        if isinstance(state, OwnedStateView) or state is self.local.states[0]:
            return
        if not self._is_plain or not isinstance(state, dict):
            raise TypeError(
                "no dict can replace the state of several optimizers, of masters, of averages or of cut "
                "parameters"
            )
        self.local.replace_state(state)

    def run(self, work: Callable[..., Any], *args: object, **kwargs: object) -> Any:  # noqa: ANN401 - what work returns
        """Let the optimizers change the leaves, and the leaves their parameters."""
        self.leaves.take_in()
        result = work(*args, **kwargs)
        self.leaves.put_back()
        self.average.update()
        return result

    @torch.no_grad()
    def step_some(self, groups: list[ParamGroup], gradients: Mapping[Tensor, Tensor]) -> None:
        """Step some owned parameters with the gradients given; those they hold stay as they are.

        Args:
            groups: the public groups.
            gradients: what each is stepped with, in the shape of the parameter; left as they are. Only the
                rows that this rank owns are read.
        """
        spares = self.local.spares_gradients
        own = {param: self.leaves.own_rows(param, gradient) for param, gradient in gradients.items()}
        own = own if spares else {param: gradient.clone() for param, gradient in own.items()}
        separate = self.leaves.separate
        held = {param: param.grad for param in own if param not in separate}
        try:
            for param in held:
                param.grad = own[param]
            self.leaves.take_in(own)
            self.local.step_some(groups, [self.leaves.leaf(param) for param in gradients])
            self.leaves.put_back(gradients)
            self.average.update(gradients)
        finally:
            for param, grad in held.items():
                param.grad = grad

    def add_group(self, group: ParamGroup, spec: OptimizerSpec | None, owned: Mapping[Tensor, Piece]) -> None:
        """Add what this rank owns of a group, on all ranks or none; all ranks call.

        Args:
            group: the public group.
            spec: of its own optimizer, if any.
            owned: what this rank owns of it.

        Raises:
            Exception: what the class raises on any rank.
        """
        before = self.local.num_groups
        try:
            with failing_together(self._group):
                leaf_of = {param: self.leaves.add(param, piece) for param, piece in owned.items()}
                self.local.add_group(group, spec, leaf_of)
        except Exception:
            self.local.drop_groups(before)
            self.leaves.drop(owned)
            raise
        self.average.add(owned)

    def remember(self, owned: Sequence[Tensor]) -> Callable[[], None]:
        """Take note of what `load` replaces, and copy the owned parameters; gives what undoes it."""
        before = self.local.save()
        beside = [*self.leaves.masters.values(), *self.average.averages.values()]
        copies = [tensor.detach().clone() for tensor in [*map(self.leaves.rows, owned), *beside]]

        def undo() -> None:
            self.local.restore(before)
            for tensor, copy in zip([*map(self.leaves.rows, owned), *beside], copies, strict=True):
                tensor.data.copy_(copy)

        return undo

    def load(self, owned: Mapping[Any, Any], groups: list[ParamGroup], *, exact: bool) -> None:
        """Take over what this rank owns of a whole state, on all ranks or none; all ranks call.

        Args:
            owned: parameter -> entries, copied already; global entries under keys of their own.
            groups: public groups with the options to go on with.
            exact: keep the dtypes of the state, see `LocalOptimizer.load`.

        Raises:
            StateMismatchError: on every rank, masters or averages do not fit their parameters on any.
            Exception: likewise, what the class raises on any. Nothing has been changed after either.
        """
        entries = {param: value for param, value in owned.items() if isinstance(value, dict)}
        of_leaves: dict[Any, Any] = {}
        separate = self.leaves.separate
        for key, value in owned.items():
            of_leaf = value
            if key in entries:
                of_leaf = {name: entry for name, entry in value.items() if name not in (MASTER, EMA)}
            if of_leaf != {}:
                of_leaves[separate.get(key, key)] = of_leaf
        before = self.local.save()
        try:
            with failing_together(self._group):
                masters = self.leaves.taken_from(entries)
                averages = self.average.taken_from(entries)
                self.local.load(groups, of_leaves, exact=exact)
        except Exception:
            self.local.restore(before)
            raise
        self.leaves.load(masters)
        self.average.load(averages)
