"""Loading: every rank reads what it owns now, from any rank's file; then parameters are broadcast."""

import os
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
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
    tensor_pieces,
)
from zero_optim.checkpoint.fitting import Content, model_parts, names_in
from zero_optim.checkpoint.folder import resolved
from zero_optim.checkpoint.manifest import blamed_on
from zero_optim.checkpoint.names import Names, Objects, check_group, group_of, mesh_of, names_of, unwrapped
from zero_optim.checkpoint.reading import Read
from zero_optim.checkpoint.storage import CheckpointReader, Rows
from zero_optim.checkpoint.undo import Undo
from zero_optim.checkpoint.values import Json, entries_in, key_of, tensors_in
from zero_optim.comm.agreement import agree, failing_together
from zero_optim.comm.collectives import RankGroup
from zero_optim.comm.watchdog import check_patience, watching
from zero_optim.comm.wire import PIECE_NBYTES, Nested, memory_of
from zero_optim.errors import StateMismatchError
from zero_optim.optimizer import ZeroRedundancyOptimizer
from zero_optim.plan.groups import options_of
from zero_optim.plan.pieces import Pieces, is_whole, piece_of
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
            folder = resolved(path)
            objects = Objects(model, optimizer, scheduler, scaler, mesh)
        return _load(group, path, folder, objects, random=random)


def _load(
    group: RankGroup, path: str | os.PathLike[str], folder: Path, objects: Objects, *, random: bool
) -> Nested:
    everyone = objects.everyone(group)
    with failing_together(everyone):
        if objects.optimizer is not None:
            names_of(objects.optimizer, objects.model)
        with blamed_on(folder):
            reader = CheckpointReader(folder)
            content = Content(reader, objects)
    about = [f"{path} of {reader.manifest.time_ns}", *content.asked, f"random={random}"]
    agree(everyone, about, "the checkpoint to load")
    return load_from(group, reader, objects, random=random)


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
    values, folder, everyone = reader.manifest.values, reader.folder, objects.everyone(group)
    with failing_together(everyone), blamed_on(folder):
        names = names_in(objects, values)
        targets = _targets(group, objects, values)
        some = names
        if only is not None and names is not None:
            chosen, places = set(only), {param.data_ptr() for param in only}
            targets = [each for each in targets if not each.stepped or each.tensor.data_ptr() in places]
            some = replace(names, param={name: p for name, p in names.param.items() if p in chosen})
        read = Read(reader, _wanted(group, reader, objects, some, targets, random))
        alike = {name: read.value(name) for name in objects.others}
        extra = read.value(EXTRA)
        state = _own_state(group.rank, read, objects, some)
        if only is not None and objects.optimizer is not None:
            state = {**objects.optimizer.owned_state(), **state}
        options = _options(read, objects, names)
        rest = _rest(objects, read)
        key = key_of(RANDOM, str(everyone.rank))
        random_state = read.value(key) if random and key in values else None
    with failing_together(everyone):
        undo = Undo(objects)
    try:
        with failing_together(everyone):
            _place_own(group, targets, read)
        with failing_together(everyone):  # it fails on all ranks of a replica alike
            if objects.optimizer is not None:
                objects.optimizer.load_owned_state(state, options)
        with failing_together(everyone):
            _hand_over(objects, rest, alike, random_state)
    except BaseException:
        undo()
        raise
    # Everything is checked now. Only a rank that dies can stop the load from here on.
    _share_model(group, targets, read)
    if objects.optimizer is not None:
        objects.optimizer.gather_parameters()
        objects.optimizer.note_saved(reader.token, objects.optimizer.age)
    return extra


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
class _Target:
    """A tensor of the model to load into, and the ranks that read it or its rows."""

    tensor: Tensor
    key: str
    pieces: Pieces
    stepped: bool  # the optimizer steps it, and gathers it from its owners
    apart: Tensor | None  # the rows of this rank, where they are not in the tensor

    @property
    def reader(self) -> int:
        """The only rank that reads it; asked of what no optimizer steps."""
        return self.pieces[0].owner

    def rows(self, rank: int) -> Rows:
        """Return the rows that a rank which reads reads; None for all."""
        piece = piece_of(self.pieces, rank)
        if piece is None or is_whole(piece, self.tensor.shape):
            return None
        return piece.start, piece.stop


def _targets(group: RankGroup, objects: Objects, values: Mapping[str, Json]) -> list[_Target]:
    if objects.model is None:
        return []
    parts = model_parts(values)
    present: dict[str, Tensor] = {}
    places: set[tuple[object, ...]] = set()
    for name, tensor in objects.model_state().items():
        if parts[name][0] == "tensor" and isinstance(tensor, Tensor):
            place = (
                (tensor.data_ptr(), tensor.device, tensor.shape, tensor.stride())
                if tensor.numel()
                else (name,)
            )
            if place not in places:  # tied weights are loaded once
                places.add(place)
                present[name] = tensor
    pieces = tensor_pieces(present, objects.optimizer, group.size)
    stepped = {p.data_ptr() for p in objects.optimizer.owners()} if objects.optimizer is not None else set()
    with objects.left_freed() as kept:
        apart = {address: each.rows for address, each in kept.items()}
    targets = []
    for name, tensor in present.items():
        address = tensor.data_ptr()
        is_stepped = tensor.numel() > 0 and address in stepped
        targets.append(_Target(tensor, parts[name][1][0], pieces[name], is_stepped, apart.get(address)))
    return targets


def _wanted(
    group: RankGroup,
    reader: CheckpointReader,
    objects: Objects,
    names: Names | None,
    targets: Iterable[_Target],
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
        of_state = _wanted_state(group.rank, reader, objects.optimizer, names)
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


def _wanted_state(
    rank: int, reader: CheckpointReader, optimizer: ZeroRedundancyOptimizer, names: Names
) -> dict[str, Rows]:
    """List the tensors of the state that this rank will own, with the rows of each."""
    owned, cuts = set(optimizer.owned_parameters()), optimizer.cut_states()
    wanted: dict[str, Rows] = {}
    for name, param in names.param.items():
        packed = reader.manifest.values.get(f"{STATE}/{key_of(name)}")
        if packed is None or param not in owned:
            continue
        wanted.update(dict.fromkeys(tensors_in(packed)))
        if param in cuts:
            piece = cuts[param].piece_of(rank)
            for entry, key in entries_in(packed).items():
                if cuts[param].is_cut(entry, reader.manifest.entries[key].shape):
                    wanted[key] = piece.start, piece.stop
    return wanted


def _own_state(rank: int, read: Read, objects: Objects, names: Names | None) -> dict[Any, Any]:
    if objects.optimizer is None or names is None:
        return {}
    owned, cuts = set(objects.optimizer.owned_parameters()), objects.optimizer.cut_states()
    keys = {f"{STATE}/{key_of(name)}": param for name, param in names.param.items() if param in owned}
    state = {param: read.value(key) for key, param in keys.items() if key in read.values}
    everywhere = read.value(EVERYWHERE) if EVERYWHERE in read.values else {}
    for number, members in enumerate(names.groups):
        for name in members:
            param = names.param.get(name)
            if param is None:
                continue
            must = {MASTER, EMA, *objects.optimizer.shaped_entries(param, number)}
            cut = cuts.get(param) if param in owned else None
            shape = tuple(param.shape) if cut is None else cut.shape_of(cut.piece_of(rank))
            for entry, value in state.get(param, {}).items():
                if entry in must and isinstance(value, Tensor) and value.shape != shape:
                    raise ValueError(f"{name}: '{entry}' has shape {tuple(value.shape)}, not {shape}")
    return {**state, **everywhere}


def _options(read: Read, objects: Objects, names: Names | None) -> list[dict[str, Any]]:
    """Find the options to load, for each group of the optimizer."""
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
    """Return the options on which the saved groups of a group's parameters agree."""
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
    """Copy what this rank has read to the parameters that it owns, or to its rows of them."""
    for target in targets:
        if target.stepped and piece_of(target.pieces, group.rank):
            place, rows = target.apart, target.rows(group.rank)
            if place is None:
                place = target.tensor if rows is None else target.tensor[slice(*rows)]
            place.copy_(read[target.key])


@torch.no_grad()
def _share_model(group: RankGroup, targets: Sequence[_Target], read: Read) -> None:
    """Load tensors of the model that no optimizer gathers, on all ranks; all ranks call."""
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
        saved = read[target.key] if target.reader == group.rank else read.blank(target.key)
        rows.append(saved.to(group.device))
    live = [(t.reader, memory_of(row)) for t, row in zip(batch, rows, strict=True) if row.numel()]
    for work in group.broadcast_rows(live):
        work.wait()
    for target, row in zip(batch, rows, strict=True):
        target.tensor.copy_(row)


# ---------------------------------------------------------------------- other values


def _rest(objects: Objects, read: Read) -> dict[str, Nested]:
    """Read what is not a tensor of the model: extra state of its modules."""
    parts = model_parts(read.values) if objects.model is not None else {}
    return {name: read.packed(part) for name, part in parts.items() if part[0] != "tensor"}


def _hand_over(
    objects: Objects, rest: dict[str, Nested], alike: Mapping[str, Nested], random_state: Nested
) -> None:
    """Load the state of model, scheduler and scaler, and the random state."""
    if objects.model is not None and rest:
        with _fits("the model's extra state"), objects.left_freed():
            unwrapped(objects.model).load_state_dict(rest, strict=False)
    for name, value in objects.others.items():
        with _fits(f"the {name}"):
            value.load_state_dict(alike[name])
    if random_state is not None:
        with _fits("the random state"):
            set_random_state(random_state, objects.device)


@contextmanager
def _fits(what: str) -> Iterator[None]:
    """Say in an error which object refused its state."""
    try:
        yield
    except Exception as error:
        raise StateMismatchError(
            f"{what} of the checkpoint does not fit: {type(error).__name__}: {error}. Nothing was changed"
        ) from error
