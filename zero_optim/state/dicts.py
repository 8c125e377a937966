"""State dicts of the whole state: made, and loaded.

Note [Whole state]
    Before any step, every rank knows the whole state: it is what the class's constructor makes, equal on
    every rank. Frameworks ask for a state dict at that time. After a step or a load, each rank knows only
    what it owns. Then the whole state is a snapshot, which `consolidate` brings to one or more ranks. It is
    valid until the next step, load or added group.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from zero_optim.comm.agreement import agree, failing_together
from zero_optim.plan.description import describe
from zero_optim.plan.groups import ParamGroup, describe_options, param_names
from zero_optim.state.core import Core
from zero_optim.state.whole import (
    by_index,
    check_fits,
    check_source,
    check_targets,
    consolidate,
    deal_out,
    pick_owned,
)

Checked = Callable[[dict[str, Any]], dict[str, Any]]


def whole_state(core: Core) -> dict[Any, Any]:
    """Give the whole state, by parameter; raises if it is not on this rank. Does not communicate."""
    params = core.params
    if core.snapshot.untouched:
        return core.owned.local.initial_state(core.groups)
    whole = core.snapshot.get(core.ranks.rank)
    return {params[key] if isinstance(key, int) else key: value for key, value in whole.items()}


def consolidate_to(core: Core, to: int | Sequence[int] | None) -> None:
    """Bring the whole state to some ranks, where the snapshot holds it; all ranks call."""
    core.owned.local.check_dicts()
    with core.group.doing("consolidate_state_dict()"):
        agree(core.group, [f"to={describe(to)}"], "the target of consolidate_state_dict")
        targets = check_targets(to, core.group.size)
        params = core.params
        cuts = by_index(core.cut_states(), params)
        whole = consolidate(core.group, targets, core.own_state(), params, cuts)
        if whole is not None:
            core.snapshot.hold(whole)


def load(core: Core, state_dict: dict[str, Any] | None, src: int | None, run_hooks: Checked) -> None:
    """Load a whole state dict that every rank has, or ``src`` alone; all ranks call.

    Args:
        core: of the optimizer.
        state_dict: as `ZeroRedundancyOptimizer.load_state_dict` takes it; left as it is.
        src: likewise.
        run_hooks: gives the dict to load, which hooks may have changed.
    """
    group = core.group
    agree(group, [f"src={describe(src)}"], "the source of load_state_dict")
    params, pieces = core.params, [core.sharding.pieces[param] for param in core.params]
    cuts = by_index(core.cut_states(), params)
    owned: dict[Any, Any] = {}
    saved: list[ParamGroup] = []
    with failing_together(group):
        core.owned.local.check_dicts()
        check_source(state_dict, src, group)
        if state_dict is not None:
            state_dict = run_hooks(dict(state_dict))
            shaped = [core.owned.local.of_group(number).shaped for number in range(len(core.groups))]
            check_fits(state_dict, core.groups, param_names(core.groups), shaped, cuts)
        if src is None:
            assert state_dict is not None  # check_source
            saved = state_dict["param_groups"]
            owned = pick_owned(state_dict, params, pieces, cuts, group.rank)
    if src is not None:
        owned, saved = deal_out(group, src, state_dict, params, pieces, cuts)
    with failing_together(group):
        core.check_weights()
        groups = core.with_options(saved)
        core.check_cuts(groups)
        described = describe_options(groups)
    agree(group, described, "the options of the state dict")
    core.take_over(owned, groups, exact=False)


def load_owned(core: Core, state: Mapping[Any, Any], options: Sequence[Mapping[str, Any]]) -> None:
    """Load the state that this rank owns, as `Core.own_state` gives it; all ranks call.

    Unlike `load`, which casts state to the parameters' dtype as ``torch.optim`` does, every tensor keeps its
    dtype. The tensors become the optimizer's own. If it raises, on every rank, nothing has changed.
    """
    with failing_together(core.group):
        core.check_weights()
        core.owned.local.check_dicts()
        if not isinstance(state, Mapping):
            raise TypeError(f"expected a mapping as owned_state() gives it, got {type(state).__name__}")
        groups = core.with_options(options)
        core.check_cuts(groups)
    core.take_over(state, groups, exact=True)
