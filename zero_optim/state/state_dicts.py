"""State dicts of a sharded optimizer: of the whole state, or of what one rank owns.

Note [Whole state]
    Before any step, every rank knows the whole state: it is what the class's constructor makes, equal on
    every rank. Frameworks ask for a state dict at that time. After a step or a load, each rank knows only
    what it owns. Then the whole state is a snapshot, which `consolidate_state_dict` brings to one or more
    ranks. It is valid until the next step, load or added group.
"""

import inspect
from collections.abc import Callable, Mapping, Sequence
from copy import copy, deepcopy
from typing import Any

import torch
from torch import Tensor

from zero_optim.comm.agreement import agree, called_by_all, failing_together
from zero_optim.plan.description import describe
from zero_optim.plan.groups import ParamGroup, describe_options, param_names
from zero_optim.probe.rows import CutRows
from zero_optim.state.cut_state import CutState
from zero_optim.state.sharded import ShardedOptimizer
from zero_optim.state.whole import (
    by_index,
    check_fits,
    check_source,
    check_targets,
    consolidate,
    deal_out,
    pick_owned,
)
from zero_optim.step.averages import EMA
from zero_optim.step.leaves import MASTER
from zero_optim.step.state_view import OwnedEntries


class ShardedStateDicts(ShardedOptimizer):
    """An optimizer that saves and loads its state as dicts. The subclass adds the step."""

    # ------------------------------------------------------------------ the whole

    @called_by_all
    def consolidate_state_dict(self, to: int | Sequence[int] | None = 0) -> None:
        """Bring the whole optimizer state to some ranks, for `state_dict` there; all ranks call.

        Owners send directly to the targets; other ranks receive nothing. The received state is a copy in CPU
        memory that later steps do not change. What other ranks already hold stays valid.

        Args:
            to: group rank that receives, or several, or None for all.

        Raises:
            ValueError: on every rank, if ``to`` names a rank that is not in the group.
            RankMismatchError: ``to`` differs between ranks.
            TypeError: sending some state would run its own code, or the class keeps state outside of
            ``state``.
        """
        self._owned.local.check_dicts()
        with self._group.doing("consolidate_state_dict()"):
            self._consolidate(to)

    def _consolidate(self, to: int | Sequence[int] | None) -> None:
        agree(self._group, [f"to={describe(to)}"], "the target of consolidate_state_dict")
        targets = check_targets(to, self._group.size)
        params = self._params()
        cuts = by_index(self.cut_states(), params)
        whole = consolidate(self._group, targets, self.owned_state(), params, cuts)
        if whole is not None:
            self._snapshot.hold(whole)

    def _whole_state_dict(self) -> dict[str, Any]:
        params = self._params()
        if self._snapshot.untouched:
            whole = by_index(self._owned.local.initial_state(self.param_groups), params)
        else:
            whole = self._snapshot.get(self._ranks.rank)
        held = self.state
        # torch's own method packs the indices and runs the hooks. During the call it sees the whole state.
        self.state = {params[key] if isinstance(key, int) else key: value for key, value in whole.items()}  # type: ignore[assignment]
        try:
            return super().state_dict()
        finally:
            self.state = held

    def leaves_out_step(self) -> bool:
        """Whether a step is not one of training, and must not run; does not communicate.

        ``torch.distributed.checkpoint.state_dict`` steps an optimizer whose ``state`` is empty, to fill it.
        On a rank that owns nothing the ``state`` is empty. That rank would step alone, and wait for the
        others for ever.
        """
        if torch.compiler.is_compiling() or any(self._owned.local.states) or not _called_by_dcp():
            return False
        if self._snapshot.untouched and not self._owned.local.initial_state(self.param_groups):
            self._snapshot.drop()  # so that state_dict() raises and returns no empty state
        return True

    @called_by_all
    def load_state_dict(self, state_dict: dict[str, Any] | None, src: int | None = None) -> None:
        """Load a whole state; all ranks call.

        Takes dicts of ``torch.optim``, of PyTorch's ``ZeroRedundancyOptimizer`` and of this class.
        Each rank copies what it owns. The caller's dict and its tensors do not change.

        Args:
            state_dict: the same dict on every rank. With ``src``, the dict on that rank and None on the
            others.
            src: the only group rank that has the dict, for example from a file. It sends each rank what that
            rank owns; no other rank ever holds the whole state.

        Raises:
            StateMismatchError: on every rank, naming each parameter whose state does not fit.
            RankMismatchError: the options in the dicts, or ``src``, differ between ranks.
            ValueError: a rank gives a dict although only ``src`` may, or a rank that must give one does not.
                Also if parameters are cut, and the class does not bear that with the options in the dict.
            Exception: on every rank, what the class itself raises on any rank. After any of these errors
            nothing has changed. What a hook of `register_load_state_dict_post_hook` raises comes after the
            load.
        """
        with self._group.doing("load_state_dict()"):
            self._load(state_dict, src)

    def _load(self, state_dict: dict[str, Any] | None, src: int | None) -> None:
        agree(self._group, [f"src={describe(src)}"], "the source of load_state_dict")
        params, pieces = self._params(), list(self.pieces().values())
        cuts = by_index(self.cut_states(), params)
        owned: dict[Any, Any] = {}
        saved: list[ParamGroup] = []
        with failing_together(self._group):
            self._owned.local.check_dicts()
            check_source(state_dict, src, self._group)
            if state_dict is not None:
                state_dict = self._checked(state_dict, cuts)
            if src is None:
                assert state_dict is not None  # check_source
                saved = state_dict["param_groups"]
                owned = pick_owned(state_dict, params, pieces, cuts, self._group.rank)
        if src is not None:
            owned, saved = deal_out(self._group, src, state_dict, params, pieces, cuts)
        with failing_together(self._group):
            self.check_weights()
            groups = self._with_options(saved)
            self.check_cuts(groups)
            described = describe_options(groups)
        agree(self._group, described, "the options of the state dict")
        self._take_over(owned, groups, exact=False)
        with failing_together(self._group):
            for done_hook in self._optimizer_load_state_dict_post_hooks.values():
                done_hook(self)

    def _checked(self, state_dict: dict[str, Any], cuts: Mapping[int, CutState]) -> dict[str, Any]:
        """Run the hooks that may change a state dict before it is loaded, then check that it fits."""
        state_dict = dict(state_dict)
        for load_hook in self._optimizer_load_state_dict_pre_hooks.values():
            changed = load_hook(self, state_dict)
            state_dict = state_dict if changed is None else changed
        names, shaped = param_names(self.param_groups), self._owned.local.shaped_keys
        check_fits(state_dict, self.param_groups, names, shaped, cuts)
        return state_dict

    # ------------------------------------------------------------------ what a rank owns

    def owned_state(self) -> dict[Any, Any]:
        """Return the state that this rank owns, by parameter, and global entries; does not communicate.

        Of a cut parameter it is the state of this rank's piece: tensors have the shape of the piece where the
        class's own would have that of the parameter.
        """
        # Reading opt.state[p] leaves an empty entry there, also for parameters of other owners.
        others = set(self._params()).difference(self.owned_parameters())
        found = {key: value for key, value in self.state.items() if key not in others}
        return {
            key: dict(value) if isinstance(value, OwnedEntries) else value for key, value in found.items()
        }

    @called_by_all
    def load_owned_state(self, state: Mapping[Any, Any], options: Sequence[Mapping[str, Any]]) -> None:
        """Load the state that this rank owns, as `owned_state` returned it; all ranks call.

        Unlike `load_state_dict`, which casts state to the parameters' dtype as ``torch.optim`` does,
        every tensor keeps its dtype.

        Args:
            state: parameter -> entries for what this rank owns, and global entries. The tensors become
                the optimizer's own.
            options: for each group its options, equal on every rank.

        Raises:
            TypeError: on every rank, ``state`` is no mapping on any.
            ValueError: on every rank, parameters are cut, and the class does not bear that with the options.
            Exception: on every rank, what the class itself raises on any rank. After either nothing has
            changed.
        """
        with failing_together(self._group):
            self.check_weights()
            self._owned.local.check_dicts()
            if not isinstance(state, Mapping):
                raise TypeError(f"expected a mapping as owned_state() gives it, got {type(state).__name__}")
            groups = self._with_options(options)
            self.check_cuts(groups)
        self._take_over(state, groups, exact=True)

    def check_cuts(self, groups: list[ParamGroup]) -> None:
        """Refuse options with which a class does not bear that parameters are cut; does not communicate.

        An ordinary step compares the identities of options. A class is tried only if an option of a group
        with cut parameters has changed in kind since the last step, and once for each kind.

        Args:
            groups: the public groups to go on with.

        Raises:
            ValueError: there are such options. If options and processors are the same on every rank, so is
            this.
        """
        if self._sharding.has_cuts:
            self._owned.local.check_cuts(groups, self._cuts_of)

    def _cuts_of(self, group: ParamGroup) -> list[CutRows]:
        cut = filter(self._sharding.is_cut, group["params"])
        return [self._owned.leaves.cut_rows(param, self._sharding.pieces[param]) for param in cut]

    def _take_over(self, owned: Mapping[Any, Any], groups: list[ParamGroup], *, exact: bool) -> None:
        self.wait_for_gathers()  # they read the parameters, which masters are written to
        self._owned.load(owned, groups, exact=exact)
        self.param_groups = groups
        self._show_state()
        self._snapshot.changed()

    def _with_options(self, saved: Sequence[Mapping[str, Any]]) -> list[ParamGroup]:
        """Combine the groups' own parameters with options of saved groups."""
        return [
            _with_options(group, options) for group, options in zip(self.param_groups, saved, strict=True)
        ]

    def remember(self) -> Callable[[], None]:
        """Copy this rank's state, options and owned parameters, for a load that may fail later.

        Copies what it owns of parameters, master copies and averages; does not communicate.

        Returns:
            A function that restores all of it on this rank; all ranks call it, or none.
        """
        self.wait_for_gathers()
        put_back = self._owned.remember(self.owned_parameters())
        groups = [(group, dict(group), list(group["params"])) for group in self.param_groups]
        state, snapshot = self.state, copy(self._snapshot)

        def undo() -> None:
            put_back()
            for group, options, params in groups:
                group.clear()
                group.update(options, params=params)
            self.param_groups = [group for group, _, _ in groups]
            self.state, self._snapshot = state, snapshot

        return undo

    def cut_states(self) -> dict[Tensor, CutState]:
        """List for each cut parameter how its state lies on its owners; does not communicate."""
        return {
            param: CutState(
                tuple(param.shape),
                self._sharding.pieces[param],
                self.shaped_entries(param, number) | {MASTER, EMA},
            )
            for number, group in enumerate(self.param_groups)
            for param in group["params"]
            if self._sharding.is_cut(param)
        }

    def shaped_entries(self, param: Tensor, group: int) -> frozenset[str]:
        """Name the state entries that must have the shape of a parameter of the group with this index."""
        return self._owned.local.shaped_keys(group).of(param.dim())


def _called_by_dcp() -> bool:
    """Whether the function of DCP that makes initial state is in the call stack."""
    frame = inspect.currentframe()
    while frame is not None:
        if frame.f_code.co_name == "_init_optim_state":
            return bool(frame.f_globals.get("__name__") == "torch.distributed.checkpoint.state_dict")
        frame = frame.f_back
    return False


def _with_options(group: Mapping[str, Any], saved: Mapping[str, Any]) -> ParamGroup:
    """Combine a group's own parameters with the options (and names, if any) of a saved group."""
    names = {key: group[key] for key in ("param_names",) if key in group}
    options = {key: deepcopy(value) for key, value in saved.items() if key != "params"}
    return {"params": group["params"], **names, **options}
