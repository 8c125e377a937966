"""What one rank owns: the parameters, what steps them, and what is kept beside them."""

from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor

from zero_optim.comm.agreement import failing_together
from zero_optim.comm.collectives import RankGroup
from zero_optim.plan.groups import ParamGroup
from zero_optim.plan.pieces import Piece
from zero_optim.step.averages import EMA, OLD_EMA, WeightAverage
from zero_optim.step.leaves import MASTER, OLD_MASTER, Leaves
from zero_optim.step.local import LocalOptimizer
from zero_optim.step.partial import make_plain
from zero_optim.step.portions import KeptState
from zero_optim.step.spec import OptimizerSpec
from zero_optim.step.state_view import OwnedStateView

T = TypeVar("T")


class OwnedState:
    """What a rank keeps and steps. Communicates only to fail together with the other ranks.

    Args:
        group: the ranks.
        leaves: what is stepped for each owned parameter.
        average: averages kept, if any.
        local: the optimizers over the leaves.
        owned: the parameters owned here.
        kept: keeps it elsewhere than in ordinary memory; None keeps it there.
    """

    def __init__(
        self,
        group: RankGroup,
        leaves: Leaves,
        average: WeightAverage,
        local: LocalOptimizer,
        owned: Iterable[Tensor],
        kept: KeptState | None = None,
    ) -> None:
        self.local = local
        self.average = average
        self.leaves = leaves
        self._group = group
        self._kept = kept
        average.add(owned)
        leaves.let_go(owned)
        self.shown: Mapping[Any, Any] = {}  # what users see as the state, by `show`

    def let_go(self) -> None:
        """Let the process group go; does not communicate."""
        self._group = self._group.let_go()

    def show(self, wait: Callable[[], None]) -> MutableMapping[Any, Any]:
        """Give the state for users to see: the class's own dict if that is all, else a view of it all.

        Args:
            wait: waits until no gather reads the parameters, which a write to a master writes to.
        """
        states = self.local.states
        shown: MutableMapping[Any, Any] = states[0]
        if not self._is_plain:
            shown = OwnedStateView(states, self.local, self.leaves, self.average, wait)
        self.shown = shown
        return shown

    @property
    def _is_plain(self) -> bool:
        return len(self.local.states) == 1 and not self.leaves.separate and not self.average.averages

    @property
    def takes_closures(self) -> bool:
        """Whether a closure may be left to the class's own step: leaves apart need gradients before it."""
        return not self.leaves.masters and not self.leaves.has_apart

    def take_over_state(self, state: object) -> bool:
        """Go on with the state that the user put in the place of ours, as ``torch.optim`` does.

        Args:
            state: what stands in the place of what was shown last, or that itself.

        Returns:
            Whether the state is to be shown anew: the user replaced it, or the class did.

        Raises:
            TypeError: it is no dict, nor another mapping where a mapping can be translated.
            StateMismatchError: a master or an average in it does not fit its parameter.
        """
        states, shown = self.local.states, self.shown
        if state is shown:
            return not (shown.shows(states) if isinstance(shown, OwnedStateView) else shown is states[0])
        if isinstance(state, OwnedStateView) and state.shows(states):
            return True
        if isinstance(shown, OwnedStateView) and isinstance(state, Mapping):
            self.local.replace_states(shown.over_new_states(state))
        elif not isinstance(state, dict):
            raise TypeError(f"expected optimizer.state to be a dict, got {type(state).__name__}")
        elif state is not states[0]:
            self.local.replace_states([state])
        return True

    def run(self, work: Callable[[], T]) -> T:
        """Let the optimizers change the leaves, and the leaves their parameters, even if the work raises."""
        make_plain(self.leaves.owned)
        with self._stepping():
            result = work()
        self.average.update()
        self.keep()
        return result

    def step(
        self, groups: list[ParamGroup], closure: Callable[[], float] | None, **kwargs: object
    ) -> float | None:
        """Step everything; gives what the class's own step returns."""
        if self._kept is None:
            return self.run(partial(self.local.step, groups, closure, **kwargs))
        assert closure is None  # see `takes_closures`
        make_plain(self.leaves.owned)
        self._step_in_portions(self._kept, groups, kwargs)
        return None

    def _step_in_portions(
        self, kept: KeptState, groups: list[ParamGroup], kwargs: Mapping[str, object]
    ) -> None:
        """Step everything; see Note [Steps in portions] in `step.portions`."""
        for gradients in kept.portions():
            try:
                with self._stepping(gradients):
                    self.local.step_some(groups, [self.leaves.leaf(param) for param in gradients], **kwargs)
                self.average.update(gradients)
            finally:
                kept.take_back(gradients)

    def keep(self) -> None:
        """Have everything where it is kept for good, after something has used or replaced it."""
        if self._kept is not None:
            self._kept.keep()

    @contextmanager
    def _stepping(self, gradients: Mapping[Tensor, Tensor | None] | None = None) -> Iterator[None]:
        """Have leaves ready to be stepped; what was stepped reaches the parameters, also after an error.

        Args:
            gradients: as `Leaves.take_in` takes them.
        """
        try:
            self.leaves.take_in(gradients)
            try:
                yield
            finally:  # a step that broke off has changed parameters too, as in torch.optim
                self.leaves.put_back(gradients)
        finally:
            self.leaves.let_go(gradients)

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
            with self._stepping(own):
                self.local.step_some(groups, [self.leaves.leaf(param) for param in gradients])
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
            self.local.agree_on_traits(self._group)
        except Exception:
            self.local.drop_groups(before)
            self.leaves.drop(owned)
            raise
        self.leaves.let_go(owned)
        self.average.add(owned)
        if self._kept is not None:
            self._kept.add(before, group, owned)

    def remember(self, owned: Sequence[Tensor]) -> Callable[[], None]:
        """Take note of what `load` replaces, and copy the owned parameters; gives what undoes it."""
        before = self.local.save()
        beside = [*self.leaves.masters.values(), *self.average.averages.values()]
        copies = list(self._copies([*map(self.leaves.rows, owned), *beside]))

        def undo() -> None:
            self.local.restore(before)
            for tensor, copy in zip([*map(self.leaves.rows, owned), *beside], copies, strict=True):
                tensor.data.copy_(copy)
            self.keep()

        return undo

    def _copies(self, tensors: Iterable[Tensor]) -> Iterable[Tensor]:
        if self._kept is not None:
            return self._kept.keeping.copies(tensors)
        return (tensor.detach().clone() for tensor in tensors)

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
        number_of = {param: number for number, group in enumerate(groups) for param in group["params"]}
        entries = {
            param: self._with_our_names(param, number_of[param], value)
            for param, value in owned.items()
            if isinstance(value, dict) and param in number_of
        }
        of_leaves: dict[Any, Any] = {}
        separate = self.leaves.separate
        for key, value in owned.items():
            of_leaf = value
            if key in entries:
                of_leaf = {name: entry for name, entry in entries[key].items() if name not in (MASTER, EMA)}
            if of_leaf != {}:
                of_leaves[separate.get(key, key)] = of_leaf
        before = self.local.save()
        self.leaves.follow()  # the class's own load may read them
        try:
            with failing_together(self._group):
                masters = self.leaves.taken_from(entries)
                averages = self.average.taken_from(entries)
                self.local.load(groups, of_leaves, exact=exact)
        except Exception:
            self.local.restore(before)
            raise
        finally:
            self.leaves.let_go()
        self.leaves.load(masters)
        self.average.load(averages)
        self.keep()

    def _with_our_names(self, param: Tensor, number: int, entries: dict[str, Any]) -> dict[str, Any]:
        """Rename masters and averages of older files, where the class has no entry of the old name itself."""
        held = (MASTER, OLD_MASTER, self.leaves.masters), (EMA, OLD_EMA, self.average.averages)
        for name, old, kept in held:
            if old in entries and name not in entries and param in kept:
                built = self.local.of_group(number)
                present = built.optimizer.state.get(self.leaves.leaf(param), {})
                if old not in present and old not in built.shaped.entries(max(1, param.dim())):
                    entries = {name if key == old else key: entry for key, entry in entries.items()}
        return entries
