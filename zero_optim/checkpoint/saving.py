"""Saving: every rank writes what it owns, and rank 0 completes the checkpoint."""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import astuple, replace
from functools import partial
from pathlib import Path
from threading import Thread
from time import perf_counter
from typing import Any
from weakref import WeakKeyDictionary

import torch.distributed as dist
from torch import nn

from zero_optim.checkpoint import folder as folders
from zero_optim.checkpoint.content import RankContent, collect
from zero_optim.checkpoint.lock import FolderLock
from zero_optim.checkpoint.manifest import Chunk, DataFile, dtype_named
from zero_optim.checkpoint.names import Objects, check_group, group_of, mesh_of
from zero_optim.checkpoint.replicas import add_random_of_replicas, with_everyone, write_once
from zero_optim.checkpoint.safetensors import Box
from zero_optim.checkpoint.storage import complete, discard, entries_of, new_token, write_tensors
from zero_optim.comm.agreement import agree, failing_together
from zero_optim.comm.collectives import RankGroup
from zero_optim.comm.encoding import encode
from zero_optim.comm.lanes import Lease, lease
from zero_optim.comm.mesh import RankMesh
from zero_optim.comm.wire import recv_value, send_value
from zero_optim.errors import CheckpointError
from zero_optim.health.watchdog import check_patience, watching
from zero_optim.optimizer import ZeroRedundancyOptimizer


def save(  # noqa: PLR0913 - keyword-only
    path: str | os.PathLike[str],
    *,
    model: nn.Module | None = None,
    optimizer: ZeroRedundancyOptimizer | None = None,
    scheduler: Any = None,  # noqa: ANN401 - torch has no one class of them
    scaler: Any = None,  # noqa: ANN401
    extra: object = None,
    keep: int | None = None,
    process_group: dist.ProcessGroup | None = None,
    timeout: float | None = None,
) -> None:
    """Save a checkpoint; all ranks call, with the same arguments.

    Each rank writes the state and the parameters that it owns, and its random state. No rank ever holds the
    whole state. The checkpoint is complete or absent: if a save fails or is killed, ``path`` holds what it
    held before. Keys are parameter names, taken from ``model``, or from the optimizer if it was built from
    named parameters.

    Args:
        path: the checkpoint's own folder, by name, on a file system that all ranks share. An existing
        checkpoint is replaced in one step. Not "", "." or "..".
        model: with equal parameters and buffers on every rank, wrapped in DDP or not.
        optimizer: saved with master copies and averages.
        scheduler: of learning rates, or anything with a ``state_dict()``, equal on every rank.
        scaler: likewise, such as ``torch.amp.GradScaler``.
        extra: nested plain values and tensors, equal on every rank, such as the step and the position in the
        data.
        keep: number of checkpoints to keep, this one included. When this one is complete, older checkpoints
        in the same parent folder are removed if their names differ from its name only in digits ("step-5",
        "step-10"). None removes none.
        process_group: the ranks that save; None for the optimizer's, or without one the default group. If
            the optimizer has a mesh, None stands for all of its ranks: the first replica writes.
        timeout: seconds that a wait for another rank may take, as of `ZeroRedundancyOptimizer`; None for the
            process group's own. A rank also waits while others write.

    Raises:
        CheckpointError: on every rank, if any rank could not write: a full disk, a read-only folder, another
        save to the same folder. Also if an earlier `save_async`, which is waited for, has failed and nobody
        has seen its error.
        RankMismatchError: the arguments differ between ranks.
        TypeError, ValueError: on every rank, if on any rank an argument is wrong, or something to save is
        neither a tensor nor plain.
    """
    group = group_of(model, optimizer, process_group, timeout)
    mesh = mesh_of(optimizer, process_group, timeout)
    everyone = group if mesh is None else mesh.everyone
    with watching(everyone), group.doing("checkpoint.save()"):
        given = partial(Objects, model, optimizer, scheduler, scaler, mesh)
        folder, objects = _ready(group, everyone, path, given, process_group, timeout)
        part, note = _begin(group, Path(path), objects, extra, keep), _note(objects)
        note(write_once(mesh, lambda: _write(group, folder, part, keep)))


def save_async(  # noqa: PLR0913 - keyword-only
    path: str | os.PathLike[str],
    *,
    model: nn.Module | None = None,
    optimizer: ZeroRedundancyOptimizer | None = None,
    scheduler: Any = None,  # noqa: ANN401
    scaler: Any = None,  # noqa: ANN401
    extra: object = None,
    keep: int | None = None,
    process_group: dist.ProcessGroup | None = None,
    timeout: float | None = None,
) -> "PendingSave":
    """Save a checkpoint in the background; all ranks call, with the arguments of `save`.

    Returns when this rank's part is copied into CPU memory. The copy needs as much memory again until it is
    written, and from an accelerator some 32 MiB of pinned memory, which PyTorch keeps. A thread
    does the rest. Only one save runs at a time: the next one waits for it, and raises its error if nobody has
    waited for it.

    Returns:
        The running save. Wait for it before the process group is destroyed.

    Raises:
        RankMismatchError, TypeError, ValueError: as `save` does.
        RemoteRankError: at the first save, if a rank has ended or does not come within the group's timeout.
    """
    began = perf_counter()
    group = group_of(model, optimizer, process_group, timeout)
    mesh = mesh_of(optimizer, process_group, timeout)
    everyone = group if mesh is None else mesh.everyone
    with watching(everyone), group.doing("checkpoint.save_async()"):
        given = partial(Objects, model, optimizer, scheduler, scaler, mesh)
        folder, objects = _ready(group, everyone, path, given, process_group, timeout)
        lane = _lane(group)
        of_all = None if mesh is None else _lane(mesh.everyone)  # apart from what ranks that write send
        part = _begin(group, Path(path), objects, extra, keep)
        is_written = mesh is None or mesh.across.rank == 0
        part = part.staged() if is_written else RankContent()
        ranks = replace(lane.group, phase=group.phase)
        if of_all is not None:
            mesh = with_everyone(mesh, replace(of_all.group, phase=everyone.phase))
        lane.last = PendingSave(ranks, folder, part, keep, began, _note(objects), mesh)
    return lane.last


def _ready(
    group: RankGroup,
    everyone: RankGroup,
    path: str | os.PathLike[str],
    given: Callable[[], Objects],
    process_group: dist.ProcessGroup | None,
    timeout: float | None,
) -> tuple[Path, Objects]:
    """Check the arguments of a save, and wait for the one before; all ranks raise if one does."""
    with failing_together(everyone):
        check_patience(timeout)
        check_group(process_group)
        folder, objects = folders.own_folder(path), given()
        _wait_for_last(group)
    return folder, objects


class PendingSave:
    """A save that runs in a thread.

    Attributes:
        path: the checkpoint's folder; the checkpoint is complete when `wait` has returned.
        stall: seconds that the caller waited in `save_async`.
    """

    def __init__(
        self,
        group: RankGroup,
        path: Path,
        part: RankContent,
        keep: int | None,
        began: float,
        note: Callable[[str], None],
        mesh: RankMesh | None = None,
    ) -> None:
        self.path = path
        self._error: Exception | None = None
        self._told = False
        self._thread = Thread(target=self._run, args=(group, part, keep, note, mesh), name="zero_optim save")
        self._thread.start()
        self.stall = perf_counter() - began

    def _run(
        self,
        group: RankGroup,
        part: RankContent,
        keep: int | None,
        note: Callable[[str], None],
        mesh: RankMesh | None,
    ) -> None:
        try:
            with watching(group), group.doing("a save in the background"):
                note(write_once(mesh, lambda: _write(group, self.path, part, keep)))
        except Exception as error:  # noqa: BLE001 - kept for whoever waits
            self._error = error

    def done(self) -> bool:
        """Whether the save has ended, also with an error; does not communicate."""
        return not self._thread.is_alive()

    def wait(self) -> None:
        """Wait for the end of the save; does not communicate.

        Raises:
            CheckpointError: on every rank that waits, if the checkpoint could not be written.
        """
        self._thread.join()
        self._told = True
        if self._error is not None:
            raise self._error

    def wait_unless_told(self) -> None:
        """Wait, and raise the error unless `wait` has already raised it."""
        self._thread.join()
        if not self._told:
            self.wait()


class _Lane:
    """The process group for saves in the background, apart from the one that trains."""

    def __init__(self, held: Lease) -> None:
        self._lease = held
        self.group = held.groups[0]
        self.last: PendingSave | None = None


# One for each process group, as long as the group lives: saves of one group run one after the other.
_LANES: WeakKeyDictionary[dist.ProcessGroup, _Lane] = WeakKeyDictionary()


def _lane(group: RankGroup) -> _Lane:
    if group.process_group not in _LANES:
        _LANES[group.process_group] = _Lane(lease(group, 1, "gloo"))
    return _LANES[group.process_group]


def _wait_for_last(group: RankGroup) -> None:
    """Wait for the save in the background, if there is one; raises its error unless `wait` has raised it."""
    lane = _LANES.get(group.process_group)
    if lane is not None and lane.last is not None:
        lane.last.wait_unless_told()


def _begin(group: RankGroup, path: Path, objects: Objects, extra: object, keep: int | None) -> RankContent:
    """List what this rank will write, and agree that all ranks write the same checkpoint."""
    everyone = objects.everyone(group)
    with failing_together(everyone):
        if keep is not None and (type(keep) is not int or keep < 1):
            raise ValueError(f"expected keep to be a number of checkpoints from 1, or None, got {keep!r}")
        part, alike = collect(group, objects, extra)
    items = [f"path={path}", f"keep={keep}", f"model={objects.model is not None}", *alike]
    agree(everyone, items, "what to save")
    add_random_of_replicas(part, objects)
    return part


def _note(objects: Objects) -> Callable[[str], None]:
    """Make what tells the optimizer, once a save is complete, which state of its was saved."""
    optimizer = objects.optimizer
    if optimizer is None:
        return lambda _: None
    age = optimizer.age
    return lambda token: optimizer.note_saved(token, age)


def _write(group: RankGroup, folder: Path, part: RankContent, keep: int | None) -> str:
    """Write this rank's file; then rank 0 completes the checkpoint. Gives the token of the save."""
    lock: FolderLock | None = None
    try:
        with failing_together(group), _clear(folder):
            lock = FolderLock(folder) if group.rank == 0 else None
        alone = lock is not None and lock.keeps_out
        token = _write_locked(group, folder, part, alone=alone)
        with failing_together(group), _clear(folder):
            if keep is not None and group.rank == 0:
                folders.prune(folder, keep)
    finally:
        if lock is not None:
            with suppress(OSError):
                lock.release()
                folder.rmdir()  # succeeds only if nothing was written
    return token


def _write_locked(group: RankGroup, folder: Path, part: RankContent, *, alone: bool) -> str:
    token = group.all_gather_fixed(new_token().encode())[0].decode()
    try:
        with failing_together(group), _clear(folder):
            boxes, tensor_of = part.all_boxes(), part.tensors.__getitem__
            files, written = write_tensors(folder, token, group.rank, boxes, tensor_of)
        parts = _gather_parts(group, files, written, part)
        with failing_together(group), _clear(folder):
            if parts:
                files, written, values = parts
                complete(folder, group.size, files, entries_of(written), values, {}, alone=alone)
    except Exception:
        discard(folder, token, group.rank)
        raise
    return token


@contextmanager
def _clear(folder: Path) -> Iterator[None]:
    """Raise a `CheckpointError` that explains an error of the file system."""
    try:
        yield
    except OSError as error:
        where = f" ({error.filename})" if error.filename else ""
        raise CheckpointError(
            f"cannot write the checkpoint {folder}: {error.strerror or error}{where}. Checkpoints that were "
            "whole before still are"
        ) from error


_Written = list[tuple[Box, Chunk]]
_Parts = tuple[dict[str, DataFile], _Written, dict[str, Any]]


def _gather_parts(
    group: RankGroup, files: dict[str, DataFile], written: _Written, part: RankContent
) -> _Parts | None:
    """Send lists of what the ranks have written to rank 0; all ranks call."""
    if group.rank != 0:
        rows = [[f, *astuple(d)] for f, d in files.items()]
        told = [rows, [_row(box, chunk) for box, chunk in written], part.values]
        send_value(group, [0], *encode(told, "the checkpoint's manifest"))
        return None
    values, every = dict(part.values), list(written)
    for rank in range(1, group.size):
        rows, more, packed = recv_value(group, rank)
        files.update({name: DataFile(*numbers) for name, *numbers in rows})
        every += [_written(*row) for row in more]
        values.update(packed)
    return files, every, values


def _row(box: Box, chunk: Chunk) -> list[Any]:
    place = [chunk.offsets, chunk.sizes, chunk.file, chunk.start, chunk.nbytes, chunk.crc32]
    return [box.key, str(box.dtype).removeprefix("torch."), box.shape, place]


def _written(key: str, dtype: str, shape: tuple[int, ...], place: list[Any]) -> tuple[Box, Chunk]:
    chunk = Chunk(*place)
    return Box(key, dtype_named(dtype), shape, chunk.offsets, chunk.sizes), chunk
