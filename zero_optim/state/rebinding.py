"""Going to another process group, or to rows alone: plan anew, and move the state to its new owners.

Note [Detached]
    `detach` does not communicate, so it works after a failure too. It leaves this rank's parameters, their
    state and the options. Ranks are known by number only; calls that communicate raise.

Note [Rebinding is building anew]
    `rebind` goes the way of the constructor: plan, agree, build, load this rank's state as from a checkpoint.
    So it gives the bits of a run that was saved, and loaded by so many ranks. If a check raises, the
    optimizer is detached as before.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from zero_optim.comm.agreement import agree, check_flags, failing_together, ranks_of
from zero_optim.comm.collectives import RankGroup
from zero_optim.plan.description import describe
from zero_optim.plan.groups import ParamGroup, options_of, param_names, short_names
from zero_optim.plan.plan import Plan, describe_params
from zero_optim.probe.cut_rows import CutRows
from zero_optim.shard.bucket import Bucket
from zero_optim.shard.sharding import Sharding
from zero_optim.shard.store import Store
from zero_optim.state.building import new_leaves, new_owned, new_sharding
from zero_optim.state.core import Core, Snapshot
from zero_optim.state.dicts import check_targets
from zero_optim.state.holders import Holders, find_holders, refuse_lost
from zero_optim.state.moving import Held, move, sent_by
from zero_optim.state.options import GroupOptions
from zero_optim.step.local import LocalOptimizer
from zero_optim.step.owned import OwnedState
from zero_optim.step.partial import PartialGradient


def detach(core: Core, *, wait: bool) -> None:
    """Release the process group and everything built on it: Note [Detached]."""
    core.mirror.let_go(waits=wait)
    core.sharding.let_go(waits=wait)
    core.owned.let_go()
    works = core.ranks.works
    works.log.cut_if_failed(works.ranks)  # see Note [Groups that end] in `zero_optim.comm.work_log`
    core.ranks, core.mesh = core.ranks.let_go(), None
    params = core.params
    if any(isinstance(param.grad, PartialGradient) for param in params):
        for param in params:
            param.grad = None  # whole ones too: the next group may have other owners


def hand_over(core: Core, staying: Sequence[int]) -> None:
    """Move the state to some ranks of the group, then detach; all ranks call."""
    group = core.group
    with group.doing("detach()"):
        agree(group, [f"staying={describe(staying)}"], "the ranks that go on")
        core.sharding.under_way.wait()
        with failing_together(group):
            targets = check_targets(staying, group.size)
            core.check_weights()
        core.mirror.drop()  # what they tell of is with other ranks now
        go_over(core, group, targets, keep_state=True)
    detach(core, wait=True)
    rank = targets.index(group.rank) if group.rank in targets else -1
    core.ranks = replace(core.ranks, rank=rank, size=len(targets))
    if rank < 0:
        core.snapshot = Snapshot(steps=core.snapshot.steps)
        core.snapshot.drop()


def new_group(core: Core, process_group: dist.ProcessGroup | None) -> RankGroup:
    """Return the ranks of a process group, with the options and counts of the former one."""
    group = ranks_of(process_group)
    return replace(RankGroup.of(group.process_group, core.params), phase=core.ranks.phase)


def rebind(core: Core, group: RankGroup, *, keep_state: bool, may_lose: bool) -> list[Tensor]:
    """Go on in another group; all its ranks call, detached. Returns the parameters whose state is lost."""
    with group.doing("rebind()"):
        with failing_together(group):
            check_flags(keep_state=keep_state)
            if not core.ranks.is_let_go:
                raise RuntimeError("expected a detached optimizer: call detach() before the group ends")
            group.check_serves(core.params)
            core.check_weights()
        lost = go_over(core, group, range(group.size), keep_state=keep_state, may_lose=may_lose)
        core.sharding.gather_all()
        core.mirror.drop()
        core.take_mirror_lanes()
        if core.snapshot.age > 0:
            core.mirror_state()
    return lost


def shard_parameters(core: Core, store: Store) -> list[Bucket]:
    """Plan anew, with empty buckets of rows for a store's parameters; all ranks call, with all values.

    If it raises, on every rank, nothing has changed. Returns the former buckets, in whose memory parameters
    lie until `RowBucket.take_in`.
    """
    group, inputs = core.group, core.inputs
    with group.doing("shard_parameters()"):
        with failing_together(group):
            if inputs.store.params:
                raise RuntimeError(
                    "the optimizer has the parameters of a fully sharded model already: put all modules "
                    "into one, or give each an optimizer"
                )
            inputs.options.check_rows()
        agree(group, [f"offload={store.rows.description}"], "where a rank keeps what it owns")
        core.sharding.under_way.wait()
        before, inputs.store, former = inputs.store, store, core.sharding.buckets
        try:
            with failing_together(group):
                core.check_weights()
            go_over(core, group, range(group.size), keep_state=True)
        except Exception:
            inputs.store = before
            raise
    return former


# ---------------------------------------------------------------------- planning and building anew


def go_over(
    core: Core, group: RankGroup, owners: Sequence[int], *, keep_state: bool, may_lose: bool = False
) -> list[Tensor]:
    """Plan anew for the ``owners``, ascending ranks of a group, and move the state to them; all ranks call.

    Without ``keep_state`` the state is new. Returns the parameters of lost state, if it ``may_lose`` some.
    """
    params, leaves, local = core.params, core.owned.leaves, core.owned.local
    own: Held | None = None
    with failing_together(group):
        if keep_state:
            local.check_dicts()
            core.follow_state()
            leaves.follow_values(leaves.masters)
            own = core.held()
        about = [*core.inputs.options.describe(), *local.describe_specs()]
        about.append(f"cuts of groups {core.inputs.may_cut(core.groups)}")
        items = [f"keep_state={keep_state}", *describe_params(core.groups), *about]
    agree(group, items, "the optimizers to be bound to one group")
    holders = None if own is None else find_holders(core, group, own, may_lose=may_lose)
    lost = [] if holders is None else [index for index, held in enumerate(holders.pieces) if not held]
    names = param_names(core.groups)
    refuse_lost([] if may_lose else [names[index] for index in lost])
    groups, everywhere = _shared_part(core, group, holders)
    sharding, plan = _planned(core, group, len(owners), groups, about)
    part = Held({}) if holders is None else _own_part(core, group, holders, owners, plan)
    if len(owners) < group.size:
        sharding.become(owners.index(group.rank) if group.rank in owners else -1)
    owned = _built(core, group, sharding, plan, groups)
    if holders is not None:
        state = {params[index]: entries for index, entries in part.state.items()}
        owned.load({**state, **everywhere}, groups, exact=True)
    # Everything is checked now. Only a rank that dies can stop it from here on.
    core.ranks, core.sharding, core.owned, core.groups = group, sharding, owned, groups
    with torch.no_grad():
        for index, value in part.values.items():
            owned.leaves.rows(params[index]).copy_(value)
    sharding.add(params, plan, short_names(groups))
    core.show_state()
    if holders is None:
        core.snapshot = Snapshot()
    elif core.snapshot.age != holders.age or holders.options is not None:
        core.snapshot = Snapshot(holders.age, holders.steps)
    else:
        core.snapshot.steps = holders.steps
    return [params[index] for index in lost]


def _shared_part(
    core: Core, group: RankGroup, holders: Holders | None
) -> tuple[list[ParamGroup], Mapping[Any, Any]]:
    """Return the groups with their new options, and global entries; all ranks call."""
    if holders is None or not holders.shares:
        return core.groups, {}
    beside, is_first = {}, group.rank == holders.first
    if is_first:
        options = holders.options or [options_of(each) for each in core.groups]
        beside = {"options": options, "everywhere": dict(next(iter(holders.held.values())).everywhere)}
    beside = sent_by(group, holders.first, beside, "the options")
    keeps_own = is_first and holders.options is None
    return core.groups if keeps_own else core.with_options(beside["options"]), beside["everywhere"]


def _own_part(core: Core, group: RankGroup, holders: Holders, owners: Sequence[int], plan: Plan) -> Held:
    """Move the state, but for global entries, to its new owners; return this rank's; all ranks call."""
    to = [tuple(piece._replace(owner=owners[piece.owner]) for piece in each) for each in plan.pieces]
    held = {holder: replace(each, everywhere={}) for holder, each in holders.held.items()}
    return move(group, core.row_map(holders.pieces, to, holders.hosts), held)


def _planned(
    core: Core, group: RankGroup, num_owners: int, groups: Sequence[ParamGroup], about: Sequence[str]
) -> tuple[Sharding, Plan]:
    """Plan for the new owners, as the constructor does; all ranks call."""
    inputs, owned = core.inputs, core.owned
    sharding = new_sharding(inputs, group, num_owners, core.sharding.gathers)
    may_cut, local, costs = inputs.may_cut(core.groups), owned.local, inputs.costs.__getitem__
    options = GroupOptions([costs for _ in groups], may_cut, local.specs(), local.default, inputs.options)
    why_whole = partial(options.why_whole, (), groups, owned.leaves.cut_rows)
    compared = owned.local.compared(groups)
    return sharding, sharding.plan(compared, options.costs, 0, about, why_whole if any(may_cut) else None)


def _built(
    core: Core, group: RankGroup, sharding: Sharding, plan: Plan, groups: list[ParamGroup]
) -> OwnedState:
    """Build the new owned state; all ranks call. The plan is not added yet."""
    params, (leaves, average) = core.params, new_leaves(core.inputs)
    cut = {param: each for param, each in zip(params, plan.pieces, strict=True) if len(each) > 1}

    def cuts_of(of: ParamGroup) -> list[CutRows]:
        return [leaves.cut_rows(param, cut[param]) for param in of["params"] if param in cut]

    def local_over(leaf_of: dict[Tensor, Tensor]) -> LocalOptimizer:
        local = core.owned.local.again(groups, leaf_of)
        local.check_cuts(groups, cuts_of)  # options may have changed, and other parameters are cut
        return local

    pieces = sharding.owned(params, plan)
    return new_owned(group, leaves, average, pieces, local_over)
