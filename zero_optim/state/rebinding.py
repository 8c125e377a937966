"""Going to another process group, or to rows alone: plan anew, and move the state to its new owners.

Note [Detached]
    `Core.release` does not communicate, so it works after a failure too. It leaves this rank's parameters,
    their state and the options. Ranks are known by number only; calls that communicate raise.

Note [Rebinding is building anew]
    `rebind` plans, agrees, builds, and loads this rank's state as from a checkpoint. If a check raises, the
    optimizer is detached as before. The state of a rank that was never stepped or loaded does not count. All
    others hold state of one age, and every row once.
"""

from collections.abc import Mapping
from dataclasses import replace
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from zero_optim.comm.agreement import agree, check_flags, failing_together, take_group
from zero_optim.comm.collectives import RankGroup
from zero_optim.comm.frames import ranks_by_value, ranks_text
from zero_optim.errors import LostStateError, RankMismatchError
from zero_optim.plan.groups import ParamGroup, names_text, options_of, param_names, with_options
from zero_optim.plan.pieces import Piece, Pieces, num_rows
from zero_optim.plan.plan import describe_params
from zero_optim.shard.bucket import Bucket
from zero_optim.shard.store import Store
from zero_optim.state.building import new_parts, planned
from zero_optim.state.core import Core
from zero_optim.state.moving import RowMap, move, sent_by
from zero_optim.state.options import GroupOptions, PlanInputs
from zero_optim.step.local import LocalOptimizer
from zero_optim.step.owned import OwnedState

_GO_BACK = (
    "Go back to a checkpoint, on all ranks: rebind(keep_state=False), then zero_optim.checkpoint.load()"
)
_VALUES = "values"  # of a parameter, moved as an entry of state


def new_group(core: Core, process_group: dist.ProcessGroup | None) -> RankGroup:
    """Return the ranks of a process group, with the options and counts of the former one."""
    group = take_group(process_group)
    return replace(RankGroup.of(group.process_group, core.params), phase=core.ranks.phase)


def rebind(core: Core, group: RankGroup, *, keep_state: bool) -> None:
    """Go on in another group; all its ranks call, detached."""
    with group.doing("rebind()"):
        with failing_together(group):
            check_flags(keep_state=keep_state)
            if not core.ranks.is_released:
                raise RuntimeError("expected a detached optimizer: call detach() before the group ends")
            group.check_serves(core.params)
            core.check_weights()
        _go_over(core, group, core.inputs, keep_state=keep_state)
        core.gather_all()


def shard_parameters(core: Core, store: Store) -> list[Bucket[Any]]:
    """Plan anew, with empty row buckets for a store's parameters; all ranks call. Returns the old ones."""
    group, inputs = core.group, core.inputs
    with group.doing("shard_parameters()"):
        with failing_together(group):
            if inputs.store.params:
                raise RuntimeError(
                    "the optimizer has the parameters of a fully sharded model already: put all modules "
                    "into one, or give each an optimizer"
                )
            inputs.options.check_rows()
            core.check_weights()
        agree(group, [f"offload={store.rows.description}"], "where a rank keeps what it owns")
        core.engine.under_way.wait()
        former = core.engine.buckets
        _go_over(core, group, replace(inputs, store=store), keep_state=True)
    return former


def _find_holders(core: Core, group: RankGroup, everywhere: object) -> tuple[dict[int, Any], list[Pieces]]:
    """Find who holds the state, by reports, and which pieces of each parameter; nothing if all ranks are new.

    Raises on every rank unless it is one state.
    """
    pieces, snapshot = [core.sharding.piece_here(param) for param in core.params], core.snapshot
    rows = [[index, piece.start, piece.stop] for index, piece in enumerate(pieces) if piece is not None]
    mine = {"age": snapshot.age, "is_torn": snapshot.is_torn, "steps": snapshot.steps, "rows": rows}
    mine |= {"options": core.owned.local.describe_options(core.groups), "has_everywhere": bool(everywhere)}
    everyone = group.all_gather_json(mine)
    torn = [rank for rank, each in enumerate(everyone) if each["is_torn"]]
    if torn:
        raise LostStateError(
            f"a step broke off on {ranks_text(torn)}: some parameters there have taken it, others have not. "
            f"{_GO_BACK}"
        )
    holders = {rank: each for rank, each in enumerate(everyone) if each["age"] > 0}
    if not holders:
        return {}, []
    ages = ranks_by_value({rank: each["age"] for rank, each in holders.items()})
    if len(ages) > 1:
        moments = "; ".join(f"{ranks_text(ranks)} after {age} steps or loads" for age, ranks in ages.items())
        raise RankMismatchError(f"ranks hold state of different moments: {moments}. {_GO_BACK}")
    first = min(holders)
    for rank, each in holders.items():
        for one, other in zip(holders[first]["options"], each["options"], strict=True):
            if one != other:
                raise RankMismatchError(
                    f"ranks disagree about the options of the optimizer: rank {first} has {one}; "
                    f"rank {rank} has {other}"
                )
    return holders, _pieces_of(core, holders)


def _pieces_of(core: Core, holders: Mapping[int, Any]) -> list[Pieces]:
    """List each parameter's pieces; raises unless each row has one holder."""
    of_param: list[list[Piece]] = [[] for _ in core.params]
    for rank, each in holders.items():
        for index, *rows in each["rows"]:
            of_param[index].append(Piece(rank, *rows))
    lost = []
    for name, param, some in zip(param_names(core.groups), core.params, of_param, strict=True):
        some.sort(key=lambda piece: piece[1:])
        for piece, following in pairwise(some):
            if following.start < piece.stop or following[1:] == piece[1:]:
                raise RankMismatchError(
                    f"ranks {piece.owner} and {following.owner} both hold {name}: they come from two runs. "
                    "Rebind ranks of one former group, and new ones, whose optimizer was neither stepped nor "
                    "loaded"
                )
        if not some or sum(piece.stop - piece.start for piece in some) < num_rows(param.shape):
            lost.append(name)
    if lost:
        raise LostStateError(
            f"no rank of the new group has the state of {names_text(lost, most=5)}: the rank that "
            f"owned it is not a member. {_GO_BACK}"
        )
    return list(map(tuple, of_param))


def _go_over(core: Core, group: RankGroup, inputs: PlanInputs, *, keep_state: bool) -> None:
    """Plan anew for a group, and move the state to its owners, or begin with new state; all ranks call."""
    params, leaves, local = core.params, core.owned.leaves, core.owned.local
    own, everywhere = dict[Any, Any](), dict[Any, Any]()
    costs = [inputs.costs.__getitem__] * local.num_groups
    again = GroupOptions(costs, local.specs, local.default, inputs.options)
    with failing_together(group):
        if keep_state:
            local.states.check_dicts()
            core.follow_state()
            leaves.follow_values(leaves.masters)
            own = core.indexed_state()
            everywhere = {key: own.pop(key) for key in list(own) if not isinstance(key, int)}
        about = [*inputs.options.describe(), *local.describe_specs(), again.describe_cuts()]
        items = [f"keep_state={keep_state}", *describe_params(core.groups), *about]
    agree(group, items, "the optimizers to be bound to one group")
    holders, held = _find_holders(core, group, everywhere) if keep_state else ({}, [])
    groups, everywhere = _shared(core, group, holders, everywhere)
    sharding, new, average = new_parts(inputs, group)
    plan = planned(sharding, again, local.compared(groups), leaves, about)
    rows = core.row_map(held, plan.pieces) if holders else None
    state, values = ({}, {}) if rows is None else _moved(core, group, rows, own)

    def local_over(leaf_of: dict[Tensor, Tensor]) -> LocalOptimizer:
        pairs = zip(groups, again.specs, strict=True)
        # The original options; `groups` stay unchanged.
        built = again.local_over([{"params": g["params"], **of.options} for g, of in pairs], leaf_of)
        built.take_attributes(local)
        pieces = dict(zip(params, plan.pieces, strict=True))
        built.check_cuts(groups, new.cut_rows, pieces)  # options may have changed, and what is cut
        return built

    owned = OwnedState(group, new, average, sharding.owned(params, plan), local_over)
    if holders:
        of_params = {params[index]: entries for index, entries in state.items()}
        owned.load({**of_params, **everywhere}, groups, exact=True, everyone=group)()
    # Everything is checked now. Only a rank that dies can stop it from here on.
    age, steps = (max((each[key] for each in holders.values()), default=0) for key in ("age", "steps"))
    there = replace(core, ranks=group, inputs=inputs, sharding=sharding, owned=owned, groups=groups)
    core.become(replace(there, snapshot=core.snapshot.at(age, steps)))
    with torch.no_grad():
        for index, entries in values.items():
            owned.leaves.rows(params[index]).copy_(entries[_VALUES])
    core.engine.bind(group, inputs.options.own_options)
    core.add(params, plan)


def _shared(
    core: Core, group: RankGroup, holders: Mapping[int, Any], everywhere: dict[Any, Any]
) -> tuple[list[ParamGroup], dict[Any, Any]]:
    """Return groups and global entries, those of the first holder if some rank may have none or others."""
    are_alike = all(rank in holders and not holders[rank]["has_everywhere"] for rank in range(group.size))
    if are_alike or not holders:
        return core.groups, everywhere
    first, shared = min(holders), dict[str, Any]()
    if group.rank == first:
        shared = {"options": list(map(options_of, core.groups)), "everywhere": everywhere}
    shared = sent_by(group, first, shared, "the options")
    groups = core.groups if group.rank == first else with_options(core.groups, shared["options"])
    return groups, shared["everywhere"]


def _moved(
    core: Core, group: RankGroup, rows: RowMap, own: dict[Any, Any]
) -> tuple[dict[int, Any], dict[int, Any]]:
    """Bring the state and the values of rows to their new owners; all ranks call."""
    values = {
        index: {_VALUES: core.owned.leaves.rows(param).detach()}
        for index, param in enumerate(core.params)
        if core.sharding.piece_here(param) is not None
    }
    shaped = dict.fromkeys(rows.shaped, frozenset({_VALUES}))
    return move(group, rows, own), move(group, replace(rows, shaped=shaped), values)
