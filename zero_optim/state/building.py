"""Build an optimizer's parts and add groups: plan, agree, build; all ranks call."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from zero_optim.comm.agreement import failing_together
from zero_optim.comm.collectives import RankGroup
from zero_optim.comm.mesh import agree_between_replicas
from zero_optim.dtensor.held_values import make_held_buckets
from zero_optim.dtensor.placement import held_among, row_pieces
from zero_optim.plan.groups import ParamGroup, describe_options, params_of, short_names
from zero_optim.plan.plan import Plan, describe_owners, describe_params
from zero_optim.shard.engine import Engine
from zero_optim.shard.lazy import LazyGather, check_reader
from zero_optim.shard.registration import registration_in, registration_of
from zero_optim.shard.rows.row_storage import HostStorage
from zero_optim.shard.sharding import Sharding
from zero_optim.state.core import Core
from zero_optim.state.options import GroupOptions, GroupReader, Params, PlanInputs, ShardingOptions
from zero_optim.step.averages import WeightAverage
from zero_optim.step.leaves import Leaves
from zero_optim.step.owned import OwnedState
from zero_optim.step.spec import GroupSpec, OptimizerSpec

Callback = Callable[[Any], None]


def build(
    params: Params,
    default: OptimizerSpec,
    group: RankGroup,
    options: ShardingOptions,
    read_by: torch.nn.Module | None,
) -> tuple[Core, Callback | None]:
    """Plan, agree on the plan, and build; all ranks call. Returns the parts, and a callback or None."""
    everyone = registration_in(params).everyone
    with failing_together(everyone):
        with failing_together(group):
            options.check_flags()
            options.check_arguments(default)
            groups = GroupReader(params).param_groups
            every = params_of(groups)
            held = held_among(list(zip(short_names(groups), every, strict=True)), group)
            group.check_serves([param for param in every if param not in held])
            registration = registration_of(every)
            if registration.params:
                options.check_rows()
            registration.check(every, group)
            inputs = PlanInputs(options, registration.store, held)
            if held:
                options.check_held(read_by)
            sharding, leaves, average = new_parts(inputs, group)
            own = GroupOptions.taken_from(groups, default, options)
            about = [f"optimizer {default.describe()}", *options.describe(), *own.describe()]
            about.append(f"gather_lazily={'None' if read_by is None else 'a model'}")
            own.check_dtypes(groups, leaves.stepped_dtype)
            check_reader(read_by, every)
        plan = planned(sharding, own, groups, leaves, about)
    if registration.everyone is not None:  # replicas of a mesh have equal optimizers
        described = [*describe_params(groups), *describe_options(groups), *about]
        agree_between_replicas(registration.everyone, [*described, *describe_owners(groups, plan)])
    with failing_together(everyone):
        former = registration.all_buckets if registration.is_open else []
        buckets = sharding.maker.make_rows(group, every, plan, former)
        if registration.is_open:
            registration.fill(buckets)
            leaves.keep(buckets)
        held_buckets = make_held_buckets(groups, plan, held, leaves.held, sharding)
    for bucket in held_buckets:
        bucket.values.fetch()
    with failing_together(everyone):
        local_over = partial(own.local_over, groups)
        owned = OwnedState(group, leaves, average, sharding.owned(every, plan), local_over)
    engine = Engine()
    engine.bind(group, options.own_options)
    core = Core(inputs, group, engine, sharding, owned, groups)
    core.add(every, plan, held_buckets)  # now that no leaf holds the memory that parameters leave
    callback = registration.hand_over(buckets, group, every)
    core.show_state()
    if read_by is not None:
        LazyGather(read_by, engine)
    return core, callback


def new_parts(inputs: PlanInputs, group: RankGroup) -> tuple[Sharding, Leaves, WeightAverage]:
    """Make the owners, leaves and averages, still none."""
    of, store = inputs.options, inputs.store
    sharding = Sharding(group, of.parameters_as_bucket_view, of.bucket_cap_mb, store=store)
    sharding.hold(row_pieces(inputs.held))
    home = store.rows if isinstance(store.rows, HostStorage) else None  # of an accelerator's model
    leaves = Leaves(of.master_dtype, store.params, home)
    return sharding, leaves, WeightAverage(of.ema_decay, leaves)


def planned(
    sharding: Sharding,
    own: GroupOptions,  # of the new groups, which are the last ones
    groups: Sequence[ParamGroup],
    leaves: Leaves,
    about: Sequence[str],
    earlier: Sequence[GroupSpec] = (),  # of the other groups
) -> Plan:
    """Return the plan of new groups, on which all ranks agree; all call."""
    before = len(groups) - len(own.specs)
    why_whole = partial(own.why_whole, earlier, groups[before:], leaves.cut_rows)
    may_cut = any(each.may_cut for each in own.specs)
    return sharding.plan(groups, own.costs, before, about, why_whole if may_cut else None)


def add_group(core: Core, group: dict[str, Any]) -> None:
    """Add a group; all ranks call, with the same group. If any raises, all do, and nothing is added."""
    core.check_attached()
    before, inputs, sharding, owned = len(core.groups), core.inputs, core.sharding, core.owned
    try:
        with failing_together(core.group):
            core.follow_state()
            GroupReader.behind(core.groups).add_param_group(group)
            new = core.groups[before:]
            (group,) = new
            names = short_names(core.groups)[len(params_of(core.groups[:before])) :]
            held = held_among(list(zip(names, group["params"], strict=True)), core.group)
            inputs.held.update(held)
            sharding.hold(row_pieces(held))
            core.group.check_serves([param for param in group["params"] if param not in held])
            own = GroupOptions.taken_from(new, owned.local.default, inputs.options)
            own.check_dtypes(new, owned.leaves.stepped_dtype)
        plan = planned(sharding, own, core.groups, owned.leaves, own.describe(), owned.local.specs)
        with failing_together(core.group):
            buckets = make_held_buckets(core.groups, plan, held, owned.leaves.held, sharding)
        for bucket in buckets:
            bucket.values.fetch()
        owned.add_group(core.group, group, own.specs[0], sharding.owned(group["params"], plan))
        core.add(group["params"], plan, buckets)
    except Exception:
        for param in [param for each in core.groups[before:] for param in each["params"]]:
            inputs.held.pop(param, None)
        del core.groups[before:]
        raise
    core.show_state()
    if not core.snapshot.untouched:  # before any step the whole state is known, also with the new group
        core.snapshot.drop()
