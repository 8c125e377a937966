"""Loading: every rank reads what it owns now, from any rank's file; then parameters are broadcast."""

import os
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn

from zero_optim.checkpoint.content import (
    EVERYWHERE,
    EXTRA,
    OPTIMIZER,
    RANDOM,
    set_random_state,
)
from zero_optim.checkpoint.fitting import Content, model_parts, names_in
from zero_optim.checkpoint.folder import resolved
from zero_optim.checkpoint.manifest import blamed_on
from zero_optim.checkpoint.names import (
    Names,
    Objects,
    check_group,
    group_of,
    mesh_of,
    names_of,
    unwrapped,
)
from zero_optim.checkpoint.own_state import agreed_options, own_state, wanted_state
from zero_optim.checkpoint.reading import Read
from zero_optim.checkpoint.storage import CheckpointReader, Rows
from zero_optim.checkpoint.targets import Target, place_own, share_model, targets_in
from zero_optim.checkpoint.undo import Undo
from zero_optim.checkpoint.values import key_of, tensors_in
from zero_optim.comm.agreement import agree, failing_together
from zero_optim.comm.collectives import RankGroup
from zero_optim.comm.encoding import Nested
from zero_optim.errors import StateMismatchError, message_of
from zero_optim.health.watchdog import check_patience, watching
from zero_optim.optimizer import ZeroRedundancyOptimizer
from zero_optim.plan.pieces import piece_of


def load(
    path: str | os.PathLike[str],
    *,
    model: nn.Module | None = None,
    optimizer: ZeroRedundancyOptimizer | None = None,
    scheduler: Any = None,  # noqa: ANN401 - torch has no one class of them
    scaler: Any = None,  # noqa: ANN401
    random: bool = True,
    process_group: dist.ProcessGroup | None = None,
    timeout: float | None = None,
) -> Nested:
    """Load a checkpoint; all ranks call, with the same arguments.

    The number of ranks, the partition, the buckets, and the order and grouping of parameters may differ from
    the save. Each rank reads what it owns, and then the parameters are broadcast. Everything that is read is
    compared with its checksum. If this raises one of the errors below, nothing has changed: what cannot be
    checked before, such as whether a scheduler takes its state, is restored.

    Args:
        path: a checkpoint's folder; `latest` finds the newest.
        model: to load into; its parameters have the names that they had at the save.
        optimizer: to load into, new or not. A group with other parameters than every saved group takes the
        options on which the saved groups of its parameters agree, and keeps its own for the rest.
        scheduler: to load into.
        scaler: to load into.
        random: restore each rank's random state, if a rank of that number saved one.
        process_group: the ranks that load; None for the optimizer's, with those of all replicas if it has a
            mesh, or without one the default group.
        timeout: seconds that a wait for another rank may take, as of `ZeroRedundancyOptimizer`; None for the
            process group's own. A rank also waits while others read.

    Returns:
        What was saved as ``extra``.

    Raises:
        CheckpointError: on every rank, if the checkpoint is incomplete or damaged, with the reason.
        StateMismatchError: on every rank, naming everything in it that does not fit.
        RankMismatchError: the arguments differ between ranks.
        TypeError, ValueError: on every rank, if an argument is wrong on any rank.
    """
    group = group_of(model, optimizer, process_group, timeout)
    mesh = mesh_of(optimizer, process_group, timeout)
    everyone = group if mesh is None else mesh.everyone
    with watching(everyone), group.doing("checkpoint.load()"):
        with failing_together(everyone):
            check_patience(timeout)
            check_group(process_group)
            folder, objects = resolved(path), Objects(model, optimizer, scheduler, scaler, mesh)
        reader = open_together(group, path, folder, objects, "the checkpoint to load", random=random)
        return load_from(group, reader, objects, random=random)


def open_together(
    group: RankGroup,
    path: str | os.PathLike[str],
    folder: Path,
    objects: Objects,
    what: str,
    *,
    random: bool,
) -> CheckpointReader:
    """Open a checkpoint and check what it holds against what is asked for; all ranks call, and agree on it.

    Args:
        group: the ranks.
        path: as the caller named the folder, to be compared.
        folder: the checkpoint's.
        objects: to load into.
        what: the checkpoint is, for messages.
        random: see `load`; it is compared.

    Returns:
        A reader of the checkpoint.
    """
    everyone = objects.everyone(group)
    with failing_together(everyone):
        if objects.optimizer is not None:
            names_of(objects.optimizer, objects.model)
        with blamed_on(folder):
            reader = CheckpointReader(folder)
            content = Content(reader, objects)
    agree(everyone, [f"{path} of {reader.manifest.time_ns}", *content.asked, f"random={random}"], what)
    return reader


def load_from(
    group: RankGroup,
    reader: CheckpointReader,
    objects: Objects,
    *,
    random: bool,
    only: Collection[Tensor] | None = None,
) -> Nested:
    """Load what a checkpoint has, checked already; all ranks call.

    Args:
        group: the ranks.
        reader: of the checkpoint.
        objects: to load into.
        random: see `load`.
        only: of the optimizer's parameters and their state read these; None for all. The others are as they
            were saved.

    Returns:
        What was saved as ``extra``.
    """
    everyone = objects.everyone(group)
    with failing_together(everyone), blamed_on(reader.folder):
        found = _read_own(group, reader, objects, random=random, only=only)
    with failing_together(everyone):
        undo = Undo(objects)
    try:
        with failing_together(everyone):
            place_own(group, found.targets, found.read)
        with failing_together(everyone):  # it fails on all ranks of a replica alike
            if objects.optimizer is not None:
                objects.optimizer.load_owned_state(found.state, found.options)
        with failing_together(everyone):
            _hand_over(objects, found)
    except BaseException:
        undo()
        raise
    # Everything is checked now. Only a rank that dies can stop the load from here on.
    share_model(group, found.targets, found.read)
    if objects.optimizer is not None:
        objects.optimizer.gather_parameters()
        objects.optimizer.note_saved(reader.token, objects.optimizer.age)
    return found.extra


@dataclass(frozen=True, slots=True, eq=False)
class Peek:
    """What `peek` reads of a checkpoint.

    Attributes:
        extra: what was saved under that name.
        shapes: of the model's tensors, by name.
    """

    extra: Nested
    shapes: dict[str, tuple[int, ...]]


def peek(path: str | os.PathLike[str]) -> Peek:
    """Read ``extra`` and the model's shapes, in one process. Does not communicate, and reads little.

    Raises:
        CheckpointError: it is incomplete or damaged, with the reason.
        StateMismatchError: it was not written by `save`.
    """
    with blamed_on(Path(path)):
        reader = CheckpointReader(path)
        Content(reader, Objects())
        read = Read(reader, dict.fromkeys(tensors_in(reader.manifest.values[EXTRA])))
        parts = model_parts(reader.manifest.values)
        entries = reader.manifest.entries
        shapes = {name: entries[part[1][0]].shape for name, part in parts.items() if part[0] == "tensor"}
        return Peek(read.value(EXTRA), shapes)


# ---------------------------------------------------------------------- reading


@dataclass(frozen=True, slots=True, eq=False)
class _Found:
    """What this rank has read.

    Attributes:
        read: the tensors.
        targets: tensors of the model to load into.
        state: of the optimizer, by parameter, and its global entries.
        options: of its groups.
        others: the state of scheduler and scaler, by name.
        rest: of the model: extra state of its modules.
        random_state: of this rank; None to leave it.
        extra: what was saved under that name.
    """

    read: Read
    targets: list[Target]
    state: dict[Any, Any]
    options: list[dict[str, Any]]
    others: dict[str, Nested]
    rest: dict[str, Nested]
    random_state: Nested
    extra: Nested


def _read_own(
    group: RankGroup,
    reader: CheckpointReader,
    objects: Objects,
    *,
    random: bool,
    only: Collection[Tensor] | None,
) -> _Found:
    """Read what this rank needs; the arguments are those of `load_from`."""
    values = reader.manifest.values
    names = names_in(objects, values)
    targets = targets_in(group, objects, values)
    some = names
    if only is not None and names is not None:
        chosen, places = set(only), {param.data_ptr() for param in only}
        targets = [each for each in targets if not each.stepped or each.tensor.data_ptr() in places]
        some = replace(names, param={name: p for name, p in names.param.items() if p in chosen})
    read = Read(reader, _wanted(group, reader, objects, some, targets, random))
    state = own_state(group.rank, read, objects, some)
    if only is not None and objects.optimizer is not None:
        state = {**objects.optimizer.owned_state(), **state}
    key = key_of(RANDOM, str(objects.everyone(group).rank))
    return _Found(
        read,
        targets,
        state,
        agreed_options(read, objects, names),
        {name: read.value(name) for name in objects.others},
        _rest(objects, read),
        read.value(key) if random and key in values else None,
        read.value(EXTRA),
    )


def _wanted(
    group: RankGroup,
    reader: CheckpointReader,
    objects: Objects,
    names: Names | None,
    targets: Iterable[Target],
    random: bool,
) -> dict[str, Rows]:
    """List the tensors that this rank has to read, with the rows of each."""
    values = reader.manifest.values
    packed = [values[name] for name in (*objects.others, EXTRA)]
    own = key_of(RANDOM, str(objects.everyone(group).rank))
    if random:
        packed += [value for key, value in values.items() if key == own]
    of_state: dict[str, Rows] = {}
    if objects.optimizer is not None and names is not None:
        of_state = wanted_state(group.rank, reader, objects.optimizer, names)
        packed += [values[EVERYWHERE]] if EVERYWHERE in values else []
        packed += [saved["options"] for saved in values[OPTIMIZER]["groups"]]
    if objects.model is not None:
        packed += [part for part in model_parts(values).values() if part[0] != "tensor"]
    mine = [target for target in targets if piece_of(target.pieces, group.rank)]
    return {
        **{key: None for value in packed for key in tensors_in(value)},
        **of_state,
        **{target.key: target.rows(group.rank) for target in mine},
    }


# ---------------------------------------------------------------------- other values


def _rest(objects: Objects, read: Read) -> dict[str, Nested]:
    """Read what is not a tensor of the model: extra state of its modules."""
    parts = model_parts(read.values) if objects.model is not None else {}
    return {name: read.packed(part) for name, part in parts.items() if part[0] != "tensor"}


def _hand_over(objects: Objects, found: _Found) -> None:
    """Load the state of model, scheduler and scaler, and the random state."""
    if objects.model is not None and found.rest:
        with _fits("the model's extra state"), objects.left_freed():
            unwrapped(objects.model).load_state_dict(found.rest, strict=False)
    for name, value in objects.others.items():
        with _fits(f"the {name}"):
            value.load_state_dict(found.others[name])
    if found.random_state is not None:
        with _fits("the random state"):
            set_random_state(found.random_state, objects.device)


@contextmanager
def _fits(what: str) -> Iterator[None]:
    """Say in an error which object refused its state."""
    try:
        yield
    except Exception as error:
        raise StateMismatchError(
            f"{what} of the checkpoint does not fit: {type(error).__name__}: {message_of(error)}. Nothing "
            "was changed"
        ) from error
