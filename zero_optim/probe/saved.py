"""Whether an optimizer class's state can be saved and resumed, by trial. No communication.

Note [Beside the state]
    A class with a ``state_dict`` of its own may add entries beside ``state`` and ``param_groups``. They
    travel as a global entry of the state, `BESIDE`. An optimizer built anew, which loads them, must go on
    with equal bits, and they must not depend on the parameters that a rank owns.
"""

from collections.abc import Mapping
from typing import Any

from torch.optim import Optimizer

from zero_optim.comm.encoding import allow_objects, decode, encode
from zero_optim.errors import message_of
from zero_optim.plan.groups import ParamGroup, options_of, params_of
from zero_optim.probe.comparison import same
from zero_optim.probe.feeds import LARGE
from zero_optim.probe.trials import TrialRecord, TrialRun, Variant, first_line_of, recorded, start

BESIDE = "beside the state"
_SAVED = ("state", "param_groups", "defaults")
NEVER = "its own state_dict() fails with this PyTorch"


def has_own_dict(optimizer: Optimizer) -> bool:
    """Whether the class changes what ``state_dict`` returns, by a method or a hook of its constructor."""
    hooks = getattr(optimizer, "_optimizer_state_dict_post_hooks", None)  # wrappers may not have it
    return type(optimizer).state_dict is not Optimizer.state_dict or bool(hooks)


def beside_of(optimizer: Optimizer) -> dict[str, Any]:
    """Return the entries that a class saves beside its state and groups."""
    own = optimizer.state_dict() if has_own_dict(optimizer) else {}
    return {key: value for key, value in own.items() if key not in ("state", "param_groups")}


def load_packed(
    optimizer: Optimizer, state: Mapping[Any, Any], groups: list[ParamGroup], beside: Mapping[str, Any]
) -> None:
    """Load state by leaf, and the groups' options, through the class's ``load_state_dict``."""
    place = {leaf: index for index, leaf in enumerate(params_of(optimizer.param_groups))}
    packed_groups = [
        {"params": [place[leaf] for leaf in own["params"]], **options_of(group)}
        for own, group in zip(optimizer.param_groups, groups, strict=True)
    ]
    packed = {place.get(key, key): value for key, value in state.items()}
    optimizer.load_state_dict({"state": packed, "param_groups": packed_groups, **beside})


def why_not_saved(trial: TrialRecord) -> str | None:
    """Return why a class's state cannot be saved and resumed, or None; tries what is not plain state."""
    optimizer = trial.run.optimizer
    try:
        has_objects = _check_plain(optimizer)
        large = recorded(trial.subject, trial.feed.of_one(LARGE, num_steps=2)) if has_objects else None
        if large is not None:  # an object may hold others from some size on
            _check_plain(large.run.optimizer)
    except (TypeError, RecursionError) as error:
        return message_of(error)
    except Exception:  # noqa: BLE001 - the user's class may raise anything
        return NEVER
    is_plain = not (has_own_dict(optimizer) or has_objects or trial.idle | trial.retyped)
    if is_plain:  # unless steps change attributes of the optimizer, in which it may keep state
        held = [vars(run.optimizer) for run in (trial.begin(), trial.run)]
        if same(*({key: each[key] for key in each if key not in _SAVED} for each in held)):
            return None
    try:
        return _why_not_resumed(trial)
    except Exception as error:  # noqa: BLE001
        return f"loaded into a new one, it raises {first_line_of(error)}"


def _check_plain(optimizer: Optimizer) -> bool:
    """Raise TypeError for what cannot be sent; allow objects, and return whether there are some."""
    groups = [options_of(group) for group in optimizer.param_groups]
    parts = [list(optimizer.state.values()), groups, beside_of(optimizer)]
    holds_objects = allow_objects(parts)
    encode(parts, "its state")
    return holds_objects


def _why_not_resumed(trial: TrialRecord) -> str | None:
    """Load what ranks with one parameter each save into one optimizer, and what it saves into theirs."""
    alone = {index: trial.begin(Variant("alone", only=(index,))) for index in trial.starts}
    for number, gradients in enumerate(trial.gradients):
        for index, run in alone.items():
            run.step(number, {index: gradients[index]})
    if not same(beside_of(trial.run.optimizer), beside_of(alone[0].optimizer)):
        return "what it saves beside its state depends on the parameters it has"
    before = trial.repeated().run
    values = {index: leaf.detach() for index, (leaf,) in before.leaves.items()}
    parts = {index: run.state_of(index)[0] for index, run in alone.items()}
    after = [start(trial.subject, trial.feed, values)]
    _load(after[0], alone[0], {**alone[0].global_state(), **parts})
    for index in values:
        after.append(start(trial.subject, trial.feed, values, alone[index].variant))
        _load(after[-1], before, {**before.global_state(), index: before.state_of(index)[0]})
    for number, gradients in enumerate(trial.gradients):
        for run in (before, *after):
            run.step(number, {index: gradients[index] for index in run.leaves})
            if any(before.bits(index) != run.bits(index) for index in run.leaves):
                return "what a new one loads is not all that it needs to go on equally"
    return None


def _load(run: TrialRun, saved: TrialRun, state: Mapping[Any, Any]) -> None:
    """Load state by parameter and global entries, and what else a run saves, as they are sent."""
    groups = [options_of(group) for group in saved.optimizer.param_groups]
    skeleton, tensors = encode([dict(state), groups, beside_of(saved.optimizer)], "its state")
    state, groups, beside = decode(skeleton, iter([tensor.clone() for tensor in tensors]))
    place = {index: leaf for index, (leaf,) in run.leaves.items()}
    of_leaves = {place.get(key, key): entries for key, entries in state.items() if entries != {}}
    load_packed(run.optimizer, of_leaves, groups, beside)
