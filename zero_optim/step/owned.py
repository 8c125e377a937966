"""The parameters that one rank owns, their optimizers, masters and averages."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any, TypeAlias, TypeVar

import torch
from torch import Tensor

from zero_optim.comm.agreement import answering_together, failing_together
from zero_optim.comm.collectives import RankGroup
from zero_optim.plan.groups import ParamGroup
from zero_optim.plan.pieces import Piece, Pieces
from zero_optim.step.averages import EMA, WeightAverage
from zero_optim.step.leaves import MASTER, Leaves
from zero_optim.step.local import LocalOptimizer
from zero_optim.step.partial import OwnedGradient, make_plain
from zero_optim.step.spec import Closure, GroupSpec
from zero_optim.step.state_view import OwnedStateView

T = TypeVar("T")
LocalOver: TypeAlias = Callable[[dict[Tensor, Tensor]], LocalOptimizer]  # over leaves, by parameter
Gradients: TypeAlias = Mapping[Tensor, Tensor | None]  # whole ones; None leaves a parameter alone


class OwnedState:
    """The state that a rank owns and steps. Communicates only to fail together."""

    def __init__(
        self,
        ranks: RankGroup,
        leaves: Leaves,
        average: WeightAverage,
        owned: Mapping[Tensor, Piece],
        local_over: LocalOver,  # all ranks call
    ) -> None:
        self.average = average
        self.leaves = leaves
        self.shown: OwnedStateView  # what users see as the state, by `show`
        self._build(ranks, owned, local_over)

    def _build(self, ranks: RankGroup, owned: Mapping[Tensor, Piece], local_over: LocalOver) -> None:
        with answering_together(ranks) as answers:
            self.local = local_over({param: self.leaves.add(param, piece) for param, piece in owned.items()})
            answers.extend(self.local.answers())
        self.local.combine(answers)
        self.average.add(owned)
        self.leaves.release()

    def show(self, wait: Callable[[], None], pieces: Mapping[Tensor, Pieces]) -> OwnedStateView:
        """Return a view of the state; ``wait`` runs before a write to it."""
        states = self.local.states
        self.shown = OwnedStateView(states.all, states, self.leaves, self.average, wait, pieces)
        return self.shown

    @property
    def takes_closures(self) -> bool:
        """Whether the class may call a closure: masters, rows apart and several classes need it earlier."""
        return not self.leaves.masters and not self.leaves.apart and len(self.local.states.all) == 1

    def take_over_state(self, state: object, states: Sequence[dict[Any, Any]]) -> bool:
        """Adopt the mapping that replaces ``state``, or raise; return whether to `show` again.

        ``states``: those of the local optimizers.
        """
        if isinstance(state, OwnedStateView) and state.shows(states):
            return state is not self.shown
        if state is not self.shown:
            if not isinstance(state, Mapping):
                raise TypeError(f"expected optimizer.state to be a dict, got {type(state).__name__}")
            self.local.states.replace(self.shown.over_new_states(state))
        return True

    def run(self, work: Callable[[], T], gradients: Gradients | None = None) -> T:
        """Run ``work`` on the leaves, or those with ``gradients``; write them back, even if it raises."""
        own = None if gradients is None else self._own(gradients)
        if OwnedGradient.has_any:
            make_plain(self.leaves.owned if own is None else own)
        with self.leaves.in_use(own) if self.leaves.separate or own is not None else nullcontext():
            result = work()
        if self.average.averages:
            self.average.update(gradients)  # also of parameters without a gradient
        return result

    def step(
        self, groups: list[ParamGroup], closure: Closure, gradients: Gradients | None, /, **kwargs: object
    ) -> float | None:
        """Step everything, or owned parameters that have one of the gradients; returns the class's result."""
        if "grad_scaler" in kwargs:
            raise TypeError("step() takes no grad_scaler: call torch.amp.GradScaler.step(optimizer)")
        chosen = None
        if gradients is not None:
            gradients = {param: grad for param, grad in gradients.items() if param in self.leaves.owned}
            if not gradients:
                return None
            chosen = {self.leaves.leaf(param) for param, grad in gradients.items() if grad is not None}
        arguments = (chosen,) if closure is None else (chosen, closure)
        work: Callable[[], float | None] = partial(self.local.call, groups, None, *arguments, **kwargs)
        return self.run(work, gradients)

    @torch.no_grad()
    def _own(self, gradients: Gradients) -> dict[Tensor, Tensor]:
        pairs = gradients.items()
        own = {param: self.leaves.own_rows(param, grad) for param, grad in pairs if grad is not None}
        return own if self.local.spares_gradients else {param: rows.clone() for param, rows in own.items()}

    def shaped_entries(
        self, groups: Sequence[ParamGroup], params: Iterable[Tensor]
    ) -> dict[Tensor, frozenset[str]]:
        """Name the state entries that must have their parameter's shape; may try a class, in some ms."""
        members, numbered = set(params), enumerate(groups)
        every = [(p, self.local.of_group(number)) for number, group in numbered for p in group["params"]]
        known = [(param, built.state_entries(param.dim())) for param, built in every if param in members]
        return {param: frozenset({MASTER, EMA, *filter(shaped.get, shaped)}) for param, shaped in known}

    def add_group(
        self, ranks: RankGroup, group: ParamGroup, given: GroupSpec, owned: Mapping[Tensor, Piece]
    ) -> None:
        """Add the owned part of a group on all ranks, or none; raises any rank's error; all ranks call."""
        before = self.local.num_groups

        def local_over(leaf_of: dict[Tensor, Tensor]) -> LocalOptimizer:
            self.local.add_group(group, given, leaf_of)
            return self.local

        try:
            self._build(ranks, owned, local_over)
        except Exception:
            self.local.drop_groups(before)
            self.leaves.drop(owned)
            raise

    def load(
        self, owned: Mapping[Any, Any], groups: list[ParamGroup], *, exact: bool, everyone: RankGroup
    ) -> Callable[[], None]:
        """Replace the state by the owned part of a whole one, on all ranks or none; all ranks call.

        ``everyone`` fails together. Returns what loads masters and averages, which
        cannot fail any more: the caller may set the parameters before.
        """
        params = {param for group in groups for param in group["params"]}
        entries = {param: own for param, own in owned.items() if isinstance(own, dict) and param in params}
        of_leaves: dict[Any, Any] = {}
        separate = self.leaves.separate
        for key, value in owned.items():
            of_leaf = value
            if key in entries:
                of_leaf = {name: entry for name, entry in entries[key].items() if name not in (MASTER, EMA)}
            if of_leaf != {}:
                of_leaves[separate.get(key, key)] = of_leaf
        undo = self.local.states.remember()
        self.leaves.follow()  # the class's own load may read them
        try:
            with failing_together(everyone):
                masters = self.leaves.taken_from(entries)
                averages = self.average.taken_from(entries)
                self.local.states.load(groups, of_leaves, exact=exact)
        except BaseException:
            undo()
            raise
        finally:
            self.leaves.release()

        def finish() -> None:
            self.leaves.load(masters)
            self.average.load(averages)

        return finish
