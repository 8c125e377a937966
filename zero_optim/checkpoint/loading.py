"""Loading: every rank reads what it owns now, from any rank's file; then parameters are broadcast."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from zero_optim.checkpoint.content import EXTRA, RANDOM, model_parts
from zero_optim.checkpoint.data import CheckpointReader, with_strides
from zero_optim.checkpoint.fitting import RankInput, check_fit
from zero_optim.checkpoint.folder import resolved
from zero_optim.checkpoint.manifest import blamed_on
from zero_optim.checkpoint.objects import Members, Objects, check_group, names_of, set_random_state, undo_of
from zero_optim.checkpoint.values import unpack
from zero_optim.comm.agreement import agree, failing_together
from zero_optim.comm.collectives import RankGroup
from zero_optim.comm.encoding import Nested
from zero_optim.comm.traffic import Timeout
from zero_optim.comm.wire import PIECE_NBYTES, memory_of
from zero_optim.errors import StateMismatchError, message_of
from zero_optim.health.watchdog import check_patience, watching
from zero_optim.optimizer import ZeroRedundancyOptimizer
from zero_optim.state.dicts import load_owned


def load(
    path: str | os.PathLike[str],
    *,
    model: nn.Module | None = None,
    optimizer: ZeroRedundancyOptimizer | None = None,
    scheduler: Any = None,  # noqa: ANN401 - torch has no one class of them
    scaler: Any = None,  # noqa: ANN401
    random: bool = True,
    process_group: dist.ProcessGroup | None = None,
    timeout: Timeout = None,
) -> Nested:
    """Load a checkpoint; all ranks call, with the same arguments. After an error below nothing has changed.

    The number of ranks, owners, buckets, and the order and grouping of parameters may differ from the save.

    Args:
        path: a checkpoint's folder; `latest` finds the newest.
        model: to load into; its parameters have the names that they had at the save.
        optimizer: to load into, new or not. A group takes the options on which its saved groups agree.
        scheduler: to load into.
        scaler: to load into.
        random: restore each rank's random state, if a rank of that number saved one.
        process_group: the ranks that load; None for the optimizer's, with all replicas, or the default group.
        timeout: seconds that a wait for another rank may take, as of `ZeroRedundancyOptimizer`.

    Returns:
        What was saved as ``extra``.

    Raises:
        CheckpointError: on every rank, if the checkpoint is incomplete or damaged, with the reason.
        StateMismatchError: on every rank, naming everything in it that does not fit.
        RankMismatchError: the arguments differ between ranks.
        TypeError, ValueError: on every rank, if an argument is wrong on any rank.
    """
    members = Members.of(model, optimizer, process_group, timeout)
    with watching(members.everyone), members.group.doing("checkpoint.load()"):
        with failing_together(members.everyone):
            check_patience(timeout)
            check_group(process_group)
            folder, objects = resolved(path), Objects(model, optimizer, scheduler, scaler)
        with failing_together(members.everyone):
            if optimizer is not None:
                names_of(optimizer, model)
            with blamed_on(folder):
                reader = CheckpointReader(folder)
                sections = check_fit(reader, objects)
        items = [f"{path} of {reader.manifest.time_ns}", *sections, f"random={random}"]
        agree(members.everyone, items, "the checkpoint to load")
        return _load_from(members, reader, objects, random)


@dataclass(frozen=True, slots=True, eq=False)
class Peek:
    """What `peek` reads of a checkpoint: ``extra`` as it was saved, ``shapes`` of the model's tensors."""

    extra: Nested
    shapes: dict[str, tuple[int, ...]]


def peek(path: str | os.PathLike[str]) -> Peek:
    """Read ``extra`` and the model's shapes of a checkpoint of `save`, in one process; reads little.

    CheckpointError if it is incomplete or damaged, StateMismatchError if it was not written by `save`.
    """
    with blamed_on(Path(path)):
        reader = CheckpointReader(Path(path).absolute())
        check_fit(reader, Objects())
        values, entries = reader.manifest.values, reader.manifest.entries
        read = cache(reader.read_tensor)  # tensors that are in several places stay shared
        extra = unpack(values[EXTRA], lambda key, strides: with_strides(read(key), strides))
        parts = model_parts(values).items()
        return Peek(extra, {name: entries[part[1][0]].shape for name, part in parts if part[0] == "tensor"})


def _load_from(members: Members, reader: CheckpointReader, objects: Objects, random: bool) -> Nested:
    optimizer = objects.optimizer
    with failing_together(members.everyone), blamed_on(reader.folder):
        part = RankInput(reader, objects, members, random)
    with failing_together(members.everyone):
        undo = undo_of(objects)
    try:
        with failing_together(members.everyone):
            with _fits("the model's extra state"):
                objects.load_extra_state(part.rest)
            for name, value in objects.others.items():
                with _fits(f"the {name}"):
                    value.load_state_dict(part.sections[name])
            if RANDOM in part.sections:
                with _fits("the random state"):
                    set_random_state(part.sections[RANDOM], objects.device)
        finish = None
        if optimizer is not None:
            finish = load_owned(optimizer.core, part.state, part.options, members.everyone)
    except BaseException:
        undo.close()
        raise
    # Everything is checked now. Only a rank that dies can stop the load from here on.
    with failing_together(members.everyone), torch.no_grad():
        for place in part.places:  # what this rank has read goes to the rows that it owns
            if place.stepped and place.memory is not None:
                place.memory.copy_(part.tensor(place.key))
    if finish is not None:
        finish()
    _share_model(members.group, part)
    if optimizer is not None:
        optimizer.gather_parameters()
    return part.sections[EXTRA]


@contextmanager
def _fits(what: str) -> Iterator[None]:
    try:
        yield
    except Exception as error:
        raise StateMismatchError(
            f"{what} of the checkpoint does not fit: {type(error).__name__}: {message_of(error)}. Nothing "
            "was changed"
        ) from error


@torch.no_grad()
def _share_model(group: RankGroup, part: RankInput) -> None:
    """Broadcast tensors that no optimizer gathers from the ranks that read them; all ranks call."""
    places = [place for place in part.places if not place.stepped]
    while places:
        batch = [places.pop(0)]
        while places and sum(each.tensor.nbytes for each in batch) < PIECE_NBYTES:
            batch.append(places.pop(0))
        read = (part.tensor(place.key, is_read=place.first == group.rank) for place in batch)
        rows = [row.to(group.device) for row in read]
        live = [(place.first, memory_of(row)) for place, row in zip(batch, rows, strict=True) if row.numel()]
        for work in group.broadcast_rows(live):
            work.wait()
        for place, row in zip(batch, rows, strict=True):
            place.tensor.copy_(row)
