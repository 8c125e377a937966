"""State dicts of the whole state: collected, checked, and loaded; with the keys of ``torch.optim``."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor

from zero_optim.comm.agreement import agree, agreeing, combine_answers, failing_together
from zero_optim.comm.collectives import RankGroup
from zero_optim.comm.encoding import map_tensors, tensors_of
from zero_optim.comm.wire import copied, copied_to_cpu
from zero_optim.dtensor.placement import is_dtensor
from zero_optim.errors import StateMismatchError
from zero_optim.plan.description import describe
from zero_optim.plan.groups import param_names, with_options
from zero_optim.plan.pieces import Piece, num_rows, piece_of, whole_piece
from zero_optim.probe.saved import BESIDE
from zero_optim.state import held
from zero_optim.state.core import Core
from zero_optim.state.moving import move, sent_by
from zero_optim.step.averages import EMA
from zero_optim.step.leaves import MASTER


def whole_state(core: Core) -> dict[Any, Any]:
    """Return the whole state by parameter, if it is here; with DTensors, see `held`, all ranks call."""
    params = core.params
    if core.inputs.held:
        return held.whole_state(core)
    if core.snapshot.untouched:
        return core.owned.local.states.initial(core.groups)
    if core.ranks.size == 1 and core.snapshot.may_be_collected and not core.ranks.is_released:
        consolidate(core, 0)  # which sends nothing
    whole = core.snapshot.get(core.ranks.rank)
    return {params[key] if isinstance(key, int) else key: value for key, value in whole.items()}


def with_beside(packed: dict[str, Any]) -> dict[str, Any]:
    """Put what a class saves beside its state where its own ``state_dict`` has it."""
    return {**packed, **packed["state"].pop(BESIDE, {})}


def consolidate(core: Core, to: int | Sequence[int] | None) -> None:
    """Bring the whole state to ranks' snapshots, in CPU memory; all ranks call."""
    group = core.group
    with group.doing("consolidate_state_dict()"):
        with agreeing(group, "the target of consolidate_state_dict") as agreed:
            core.owned.local.states.check_dicts()
            if core.inputs.held:
                raise RuntimeError(
                    "the state of a model that FSDP2 shards is not consolidated: call state_dict() on all "
                    "ranks, which gives DTensors, or torch.distributed.checkpoint.state_dict."
                    "get_optimizer_state_dict with full_state_dict=True"
                )
            part = core.indexed_state()
            sizes = [len(each["params"]) for each in core.groups]
            agreed.items += [f"to={describe(to)}", f"groups of {sizes} parameters"]
        targets = check_targets(to, group.size)
        wanted = [tuple(Piece(rank, 0, num_rows(param.shape)) for rank in targets) for param in core.params]
        whole = move(group, core.row_map(core.piece_list(), wanted), part, copy_with=copied_to_cpu)
        if group.rank in targets:
            core.snapshot.hold(whole)


def load(
    core: Core,
    state_dict: dict[str, Any] | None,
    src: int | None,
    run_hooks: Callable[[dict[str, Any]], dict[str, Any]],
) -> None:
    """Load a whole state dict, after ``run_hooks``, from every rank or from ``src`` alone; all ranks call."""
    group = core.group
    agree(group, [f"src={describe(src)}"], "the source of load_state_dict")
    params, pieces = core.params, core.piece_list()
    source = group.rank if src is None else src
    given: dict[Any, Any] = {}
    beside: dict[str, Any] = {}
    has_dtensors = False
    with failing_together(group):
        core.owned.local.states.check_dicts()
        _check_source(state_dict, src, group)
        if state_dict is not None:
            state_dict = run_hooks(dict(state_dict))
            check_fits(core, state_dict)
            keys, state = _saved_keys(state_dict), state_dict["state"]
            given = {index: state[key] for index, key in enumerate(keys) if key in state}
            has_dtensors = any(map(is_dtensor, tensors_of(given)))
            if has_dtensors and (src is not None or not core.inputs.held):
                raise StateMismatchError(
                    "the state dict has DTensors, and "
                    + (f"src={src} sends whole tensors" if core.inputs.held else "no parameter is one")
                    + ": get it with full_state_dict=True, see torch.distributed.checkpoint.state_dict"
                )
            everywhere = {key: value for key, value in state.items() if key not in set(keys)}
            if core.owned.local.states.has_own_dict:
                more = {key: state_dict[key] for key in state_dict if key not in ("state", "param_groups")}
                everywhere.update({BESIDE: more} if more else {})
            groups = state_dict["param_groups"]
            options = [{key: group[key] for key in group if key != "params"} for group in groups]
            beside = {"options": options, "everywhere": everywhere, "is_new": not (state or everywhere)}
    if src is None:  # what each rank wants comes from itself
        pieces = [tuple(filter(None, (piece_of(each, group.rank),))) for each in pieces]
    else:
        # On the CPU, as on the ranks that receive it: descriptions of options name devices.
        beside = map_tensors(sent_by(group, src, beside, "the state dict"), copied_to_cpu)
    if core.inputs.held and combine_answers(group, [not has_dtensors]) == [False]:
        owned = held.own_part(core, given)
    else:
        rows = core.row_map([whole_piece(source, param.shape) for param in params], pieces)
        copy_with = copied if src is None else copied_to_cpu
        part = move(group, rows, given, copy_with=copy_with, about="the state dict")
        owned = {params[index]: entries for index, entries in part.items()}
    with failing_together(group):
        core.check_weights()
        groups = with_options(core.groups, beside["options"])
        core.check_cuts(groups)
        described = core.owned.local.describe_options(groups)
    agree(group, described, "the options of the state dict")
    everywhere = map_tensors(beside["everywhere"], copied)
    is_new = beside["is_new"] and not core.owned.local.states.initial(core.groups)
    core.take_over({**owned, **everywhere}, groups, exact=False, everyone=core.group)()
    core.snapshot.changed(is_new=is_new)


def load_owned(
    core: Core,
    state: Mapping[Any, Any],
    options: Sequence[Mapping[str, Any]],
    everyone: RankGroup | None = None,
) -> Callable[[], None]:
    """Load this rank's state, as `Core.own_state` returns it; all ranks call. Tensors keep their dtypes.

    Returns what loads masters and averages, and cannot fail: the caller may set the parameters before.
    """
    everyone = core.group if everyone is None else everyone
    with failing_together(everyone):
        core.check_weights()
        core.owned.local.states.check_dicts()
        if not isinstance(state, Mapping):
            raise TypeError(f"expected a mapping as owned_state() gives it, got {type(state).__name__}")
        groups = with_options(core.groups, options)
        core.check_cuts(groups)
    finish = core.take_over(state, groups, exact=True, everyone=everyone)
    core.snapshot.changed()
    return finish


def check_targets(to: object, num_ranks: int) -> list[int]:
    """Return the group ranks of ``to``: one, several, or None for all; ValueError for others."""
    if to is None:
        return list(range(num_ranks))
    ranks: list[Any] = list(to) if isinstance(to, list | tuple | set | frozenset | range) else [to]
    wrong = [rank for rank in ranks if type(rank) is not int or rank not in range(num_ranks)]
    if wrong or not ranks:
        raise ValueError(
            f"expected to be a group rank from 0 to {num_ranks - 1} (or a list of them, or None for all), "
            f"got {to!r}"
        )
    return sorted(set(ranks))


def _check_source(state_dict: object, src: int | None, group: RankGroup) -> None:
    if src is not None and (type(src) is not int or src not in range(group.size)):
        raise ValueError(f"expected src to be a group rank from 0 to {group.size - 1}, or None, got {src!r}")
    if src not in (None, group.rank) and state_dict is not None:
        raise ValueError(f"with src={src} only rank {src} gives a state dict, the others give None")
    if src in (None, group.rank) and state_dict is None:
        raise ValueError("expected a state dict, got None: if only one rank has it, pass src=RANK on all")


def _saved_keys(state_dict: Mapping[str, Any]) -> list[Any]:
    return [key for group in state_dict["param_groups"] for key in group["params"]]


def check_fits(core: Core, state_dict: Mapping[str, Any]) -> None:
    """Raise StateMismatchError with every mismatch of a whole state dict, one a line."""
    missing = [key for key in ("state", "param_groups") if key not in state_dict]
    if missing:
        raise StateMismatchError(
            f"expected a state dict with 'state' and 'param_groups', got keys {sorted(state_dict)}"
        )
    saved = [len(group["params"]) for group in state_dict["param_groups"]]
    present = [len(group["params"]) for group in core.groups]
    if saved != present:
        raise StateMismatchError(
            f"the state dict has groups of {saved} parameters, this optimizer has {present}"
        )
    wrong, shaped = [], core.owned.shaped_entries(core.groups, core.params)
    empty = [type(key) is str and entry == {} for key, entry in state_dict["state"].items()]
    if empty and all(empty) and any(names - {MASTER, EMA} for names in shaped.values()):
        raise StateMismatchError(
            "the state dict has an entry for each parameter, and nothing in it, as from PyTorch's "
            "set_optimizer_state_dict with flatten_optimizer_state_dict=True and a new optimizer: get and "
            "set the state without this option"
        )
    for name, param, key in zip(param_names(core.groups), core.params, _saved_keys(state_dict), strict=True):
        entry = state_dict["state"].get(key, {})
        if not isinstance(entry, dict):
            continue
        must = shaped[param] if core.sharding.is_cut(param) else shaped[param] - {MASTER, EMA}
        for entry_name in sorted(must & entry.keys()):
            value = entry[entry_name]
            if isinstance(value, Tensor) and value.shape != param.shape:
                wrong.append(f"{name}: '{entry_name}' has shape {tuple(value.shape)}")
    if wrong:
        raise StateMismatchError("state that does not fit its parameter:\n  " + "\n  ".join(wrong))
