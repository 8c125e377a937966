"""Loading: every rank reads what it owns by now, whoever wrote it, and the parameters are dealt out."""

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from zero_optim.checkpoint.content import (
    EVERYWHERE,
    EXTRA,
    OPTIMIZER,
    RANDOM,
    STATE,
    set_random_state,
    tensor_owners,
)
from zero_optim.checkpoint.fitting import Content, model_parts, names_in
from zero_optim.checkpoint.folder import resolved
from zero_optim.checkpoint.manifest import blamed_on
from zero_optim.checkpoint.names import Names, Objects, check_group, group_of, names_of, unwrapped
from zero_optim.checkpoint.reading import Read
from zero_optim.checkpoint.storage import CheckpointReader
from zero_optim.checkpoint.undo import Undo
from zero_optim.checkpoint.values import Json, key_of, tensors_in
from zero_optim.comm.agreement import agree, failing_together
from zero_optim.comm.collectives import RankGroup
from zero_optim.comm.wire import PIECE_NBYTES, Nested, memory_of
from zero_optim.errors import StateMismatchError
from zero_optim.optimizer import ZeroRedundancyOptimizer
from zero_optim.plan.groups import options_of
from zero_optim.step.leaves import EMA, MASTER


def load(
    path: str | os.PathLike[str],
    *,
    model: nn.Module | None = None,
    optimizer: ZeroRedundancyOptimizer | None = None,
    scheduler: Any = None,  # noqa: ANN401 - torch has no one class of them
    scaler: Any = None,  # noqa: ANN401
    random: bool = True,
    process_group: dist.ProcessGroup | None = None,
) -> Nested:
    """Go on from a checkpoint; all ranks call, with the same arguments.

    The number of ranks, the partition and the buckets may be others than when it was saved, and so may the
    order and the grouping of parameters. Each rank reads what it owns, and the parameters are then
    broadcast; everything read is compared with its checksum. Nothing has been changed if this raises one
    of the errors below: what cannot be checked before, such as whether a scheduler takes its state, is put
    back.

    Args:
        path: a checkpoint's folder; `latest` finds the newest.
        model: to load into; with the parameters' names of when it was saved.
        optimizer: to load into, fresh or not. A group made of other parameters than any saved group takes
            over the options on which their saved groups agree, and keeps its own for the rest.
        scheduler: to load into.
        scaler: to load into.
        random: restore each rank's random state, where a rank of that number was there to save it.
        process_group: the ranks that load; None for the optimizer's, or without one the default group.

    Returns:
        What was saved as ``extra``.

    Raises:
        CheckpointError: on every rank, when the checkpoint is incomplete or damaged, with the reason.
        StateMismatchError: on every rank, naming everything in it that does not fit.
        RankMismatchError: ranks were given different things.
        TypeError, ValueError: on every rank, when on any an argument is wrong.
    """
    group = group_of(model, optimizer, process_group)
    with failing_together(group):
        check_group(process_group)
        folder = resolved(path)
        objects = Objects(model, optimizer, scheduler, scaler)
        if objects.optimizer is not None:
            names_of(objects.optimizer, objects.model)
        with blamed_on(folder):
            reader = CheckpointReader(folder)
            content = Content(reader, objects)
    values = reader.manifest.values
    about = [f"{path} of {reader.manifest.time_ns}", *content.asked, f"random={random}"]
    agree(group, about, "the checkpoint to load")
    with failing_together(group), blamed_on(folder):
        names = names_in(objects, values)
        targets = _targets(group, objects, values)
        read = Read(reader, _wanted(group, values, objects, names, targets, random))
        alike = {name: read.value(name) for name in objects.others}
        extra = read.value(EXTRA)
        state = _own_state(read, objects, names)
        options = _options(read, objects, names)
        rest = _rest(objects, read)
        key = key_of(RANDOM, str(group.rank))
        random_state = read.value(key) if random and key in values else None
    with failing_together(group):
        undo = Undo(objects)
    try:
        with failing_together(group):
            _place_own(group, targets, read)
        if objects.optimizer is not None:
            objects.optimizer.load_owned_state(state, options)
        with failing_together(group):
            _hand_over(objects, rest, alike, random_state)
    except BaseException:
        undo()
        raise
    # From here on everything has been checked: only ranks that die can keep it from ending.
    _share_model(group, targets, read)
    if objects.optimizer is not None:
        objects.optimizer.gather_parameters()
    return extra


@dataclass(frozen=True, slots=True, eq=False)
class Peek:
    """What can be known of a checkpoint without loading it.

    Attributes:
        extra: what was saved under that name.
        shapes: of the model's tensors, by name.
    """

    extra: Nested
    shapes: dict[str, tuple[int, ...]]


def peek(path: str | os.PathLike[str]) -> Peek:
    """Look at a checkpoint, in one process; does not communicate, and reads little.

    Raises:
        CheckpointError: it is incomplete or damaged, with the reason.
        StateMismatchError: `save` has not written it.
    """
    with blamed_on(Path(path)):
        reader = CheckpointReader(path)
        Content(reader, Objects())
        read = Read(reader, tensors_in(reader.manifest.values[EXTRA]))
        parts = model_parts(reader.manifest.values)
        entries = reader.manifest.entries
        shapes = {name: entries[part[1][0]].shape for name, part in parts.items() if part[0] == "tensor"}
        return Peek(read.value(EXTRA), shapes)


# ---------------------------------------------------------------------- reading


@dataclass(frozen=True, slots=True, eq=False)
class _Target:
    """A tensor of the model to load into, and the rank that reads it."""

    tensor: Tensor
    key: str
    owner: int
    stepped: bool  # its owner is its optimizer's, which gathers it


def _targets(group: RankGroup, objects: Objects, values: Mapping[str, Json]) -> list[_Target]:
    if objects.model is None:
        return []
    parts = model_parts(values)
    present: dict[str, Tensor] = {}
    places: set[tuple[object, ...]] = set()
    for name, tensor in unwrapped(objects.model).state_dict().items():
        if parts[name][0] == "tensor" and isinstance(tensor, Tensor):
            place = (
                (tensor.data_ptr(), tensor.device, tensor.shape, tensor.stride())
                if tensor.numel()
                else (name,)
            )
            if place not in places:  # tied weights are loaded once
                places.add(place)
                present[name] = tensor
    owners = tensor_owners(present, objects.optimizer, group.size)
    stepped = {p.data_ptr() for p in objects.optimizer.owners()} if objects.optimizer is not None else set()
    return [
        _Target(tensor, parts[name][1][0], owners[name], tensor.numel() > 0 and tensor.data_ptr() in stepped)
        for name, tensor in present.items()
    ]


def _wanted(
    group: RankGroup,
    values: Mapping[str, Json],
    objects: Objects,
    names: Names | None,
    targets: Iterable[_Target],
    random: bool,
) -> list[str]:
    """List the tensors that this rank has to read."""
    packed = [values[name] for name in (*objects.others, EXTRA)]
    if random:
        packed += [value for key, value in values.items() if key == key_of(RANDOM, str(group.rank))]
    if objects.optimizer is not None and names is not None:
        owned = set(objects.optimizer.owned_parameters())
        mine = [f"{STATE}/{key_of(name)}" for name, param in names.param.items() if param in owned]
        packed += [values[key] for key in (*mine, EVERYWHERE) if key in values]
        packed += [saved["options"] for saved in values[OPTIMIZER]["groups"]]
    if objects.model is not None:
        packed += [part for part in model_parts(values).values() if part[0] != "tensor"]
    keys = [key for value in packed for key in tensors_in(value)]
    return keys + [target.key for target in targets if target.owner == group.rank]


def _own_state(read: Read, objects: Objects, names: Names | None) -> dict[Any, Any]:
    if objects.optimizer is None or names is None:
        return {}
    owned = set(objects.optimizer.owned_parameters())
    keys = {f"{STATE}/{key_of(name)}": param for name, param in names.param.items() if param in owned}
    state = {param: read.value(key) for key, param in keys.items() if key in read.values}
    everywhere = read.value(EVERYWHERE) if EVERYWHERE in read.values else {}
    for number, members in enumerate(names.groups):
        for name in members:
            param = names.param[name]
            must = {MASTER, EMA, *objects.optimizer.shaped_entries(param, number)}
            for entry, value in state.get(param, {}).items():
                if entry in must and isinstance(value, Tensor) and value.shape != param.shape:
                    got = tuple(value.shape)
                    raise ValueError(f"{name}: '{entry}' has shape {got}, not {tuple(param.shape)}")
    return {**state, **everywhere}


def _options(read: Read, objects: Objects, names: Names | None) -> list[dict[str, Any]]:
    """Find the options to go on with, for each group of the optimizer."""
    if objects.optimizer is None or names is None:
        return []
    saved = [
        (set(group["names"]), read.packed(group["options"])) for group in read.values[OPTIMIZER]["groups"]
    ]
    pairs = zip(objects.optimizer.param_groups, names.groups, strict=True)
    return [_agreed(options_of(group), set(members), saved) for group, members in pairs]


def _agreed(
    own: dict[str, Any], members: set[str], saved: list[tuple[set[str], dict[str, Any]]]
) -> dict[str, Any]:
    """Take over the options on which the saved groups of a group's members agree."""
    sources = [options for names, options in saved if names & members] or [
        options for names, options in saved if not names and not members
    ][:1]
    first = sources[0] if sources else {}
    agreed = (
        k for k in first if all(k in options and _same(options[k], first[k]) for options in sources[1:])
    )
    return {**own, **{key: first[key] for key in agreed}}


def _same(one: object, other: object) -> bool:
    if isinstance(one, Tensor) or isinstance(other, Tensor):
        return isinstance(one, Tensor) and isinstance(other, Tensor) and torch.equal(one, other)
    return one == other


# ---------------------------------------------------------------------- the model


@torch.no_grad()
def _place_own(group: RankGroup, targets: Sequence[_Target], read: Read) -> None:
    """Put what this rank has read into the parameters that it owns."""
    for target in targets:
        if target.stepped and target.owner == group.rank:
            target.tensor.copy_(read[target.key])


@torch.no_grad()
def _share_model(group: RankGroup, targets: Sequence[_Target], read: Read) -> None:
    """Put into the model, on all ranks, what no optimizer gathers; all ranks call."""
    batch: list[_Target] = []
    for target in [target for target in targets if not target.stepped]:
        batch.append(target)
        if sum(entry.tensor.nbytes for entry in batch) >= PIECE_NBYTES:
            _share(group, batch, read)
            batch = []
    _share(group, batch, read)


def _share(group: RankGroup, batch: Sequence[_Target], read: Read) -> None:
    """Broadcast some tensors from the ranks that read them."""
    rows = []
    for target in batch:
        saved = read[target.key] if target.owner == group.rank else read.blank(target.key)
        rows.append(saved.to(group.device))
    live = [(t.owner, memory_of(row)) for t, row in zip(batch, rows, strict=True) if row.numel()]
    for work in group.broadcast_rows(live):
        work.wait()
    for target, row in zip(batch, rows, strict=True):
        target.tensor.copy_(row)


# ---------------------------------------------------------------------- what is no tensor


def _rest(objects: Objects, read: Read) -> dict[str, Nested]:
    """Read what is no tensor of the model: extra state of its modules."""
    parts = model_parts(read.values) if objects.model is not None else {}
    return {name: read.packed(part) for name, part in parts.items() if part[0] != "tensor"}


def _hand_over(
    objects: Objects, rest: dict[str, Nested], alike: Mapping[str, Nested], random_state: Nested
) -> None:
    """Let model, scheduler and scaler take over what is theirs, and go on from a random state."""
    if objects.model is not None and rest:
        with _fits("the model's extra state"):
            unwrapped(objects.model).load_state_dict(rest, strict=False)
    for name, value in objects.others.items():
        with _fits(f"the {name}"):
            value.load_state_dict(alike[name])
    if random_state is not None:
        with _fits("the random state"):
            set_random_state(random_state, objects.device)


@contextmanager
def _fits(what: str) -> Iterator[None]:
    """Say what it was that was not taken over."""
    try:
        yield
    except Exception as error:
        raise StateMismatchError(
            f"{what} of the checkpoint does not fit: {type(error).__name__}: {error}. Nothing was changed"
        ) from error
