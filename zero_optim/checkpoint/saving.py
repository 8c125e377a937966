"""Saving: every rank writes what it owns, rank 0 completes the checkpoint; of replicas the first writes.

Note [Protocol of a save]
    1. Rank 0 locks the folder. Every rank writes a data file with a name of this save, and flushes it. If a
       rank fails until then, each rank removes its own file, which no manifest can name yet.
    2. Every rank tells rank 0 what its file holds. From now on rank 0 alone removes files: a rank that hears
       of a death or a timeout cannot know whether the manifest is in place.
    3. Rank 0 checks that all files are there in full length, and renames the manifest over the old one.
    4. Rank 0 reads the checkpoint back. Then it removes the files of the checkpoint that was replaced. If it
       fails, it removes all files of the save that no manifest names; if it dies, the next save does.
"""

import atexit
import logging
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import astuple, dataclass, replace
from pathlib import Path
from threading import Thread, current_thread, main_thread
from time import perf_counter
from typing import Any
from weakref import WeakKeyDictionary

import torch.distributed as dist
from torch import nn

from zero_optim.checkpoint import folder as folders
from zero_optim.checkpoint.content import RANDOM, RankContent, collect
from zero_optim.checkpoint.data import Box, write_tensors
from zero_optim.checkpoint.files import FolderLock
from zero_optim.checkpoint.manifest import Chunk, DataFile
from zero_optim.checkpoint.objects import Members, Objects, check_group, random_state
from zero_optim.checkpoint.values import key_of
from zero_optim.comm.agreement import agree, failing_together
from zero_optim.comm.backends import ON_HOST
from zero_optim.comm.collectives import RankGroup
from zero_optim.comm.encoding import Nested, decode, encode
from zero_optim.comm.lanes import Lease, lease
from zero_optim.comm.traffic import Timeout
from zero_optim.comm.wire import recv_encoded, send_value
from zero_optim.errors import CheckpointError, message_of
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
    timeout: Timeout = None,
) -> None:
    """Save a checkpoint; all ranks call, with the same arguments.

    Each rank writes the state and the parameters that it owns, and its random state. If a save fails or is
    killed, ``path`` holds what it held before. Keys are parameter names, of ``model``, or as the optimizer
    was given them.

    Args:
        path: the checkpoint's own folder, by name, on a file system that all ranks share. An existing
            checkpoint is replaced in one step.
        model: with equal parameters and buffers on every rank, wrapped in DDP or not.
        optimizer: saved with master copies and averages.
        scheduler: of learning rates, or anything with a ``state_dict()``, equal on every rank.
        scaler: likewise, such as ``torch.amp.GradScaler``.
        extra: nested plain values and tensors, equal on every rank, such as the step.
        keep: number of checkpoints to keep, with this one: older ones in the same folder are removed if their
            names differ only in the number at their end ("step-5", "step-10"). None removes none.
        process_group: the ranks that save; None for the optimizer's, with all replicas, or the default group.
        timeout: seconds that a wait for another rank may take, as of `ZeroRedundancyOptimizer`.

    Raises:
        CheckpointError: on every rank, if any could not write (a full disk, another save to the folder), or
            an earlier `save_async` failed and nobody has seen its error.
        RankMismatchError: the arguments differ between ranks.
        TypeError, ValueError: on every rank, if an argument is wrong, or a value neither tensor nor plain.
    """
    objects = model, optimizer, scheduler, scaler
    with _agree("save()", path, objects, extra, keep, process_group, timeout) as agreed:
        agreed.write()


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
    timeout: Timeout = None,
) -> "PendingSave":
    """Save a checkpoint in the background; all ranks call, with the arguments of `save`.

    Returns when this rank's part is copied into CPU memory; from an accelerator by way of some 32 MiB of
    pinned memory, which PyTorch keeps. Only one save runs at a time: the next one waits for it, and raises
    its error if nobody has waited for it. Wait for the save before the process group is destroyed. An error
    that nobody has waited for is logged when the process ends.

    Raises:
        RankMismatchError, TypeError, ValueError: as `save` does.
        RemoteRankError: at the first save, if a rank has ended or does not come within the group's timeout.
    """
    began = perf_counter()
    objects = model, optimizer, scheduler, scaler
    with _agree("save_async()", path, objects, extra, keep, process_group, timeout) as agreed:
        group, mesh = agreed.members.group, agreed.members.mesh
        lane = _on_lane(group)
        if mesh is not None:  # apart from what ranks that write send
            mesh = replace(mesh, everyone=_on_lane(mesh.everyone))
        part = agreed.part.staged() if mesh is None or mesh.across.rank == 0 else RankContent()
        pending = PendingSave(replace(agreed, members=Members(lane, mesh), part=part), began)
        _LAST[group.process_group] = pending
    return pending


class PendingSave:
    """A save that runs in a thread, to the folder ``path``; the caller waited for ``stall`` seconds."""

    def __init__(self, save: "_Save", began: float) -> None:
        self.path = save.folder
        self._error: Exception | None = None
        self._thread = Thread(target=self._run, args=(save,), name="zero_optim save")
        self._thread.start()
        self.stall = perf_counter() - began

    def _run(self, save: "_Save") -> None:
        group = save.members.group
        try:
            with watching(group), group.doing("a save in the background"):
                save.write()
        except Exception as error:  # noqa: BLE001 - kept for whoever waits
            self._error = error
        except BaseException as error:  # noqa: BLE001 - such as SystemExit
            self._error = _ended_by(error, self.path)
        if self._error is not None:  # without its traceback, which has much else
            _UNSEEN[self._thread] = f"{self.path} was not saved: {message_of(self._error)}"

    def done(self) -> bool:
        """Whether the save has ended, also with an error."""
        return not self._thread.is_alive()

    def wait(self) -> None:
        """Wait until the checkpoint is complete; CheckpointError if it could not be written."""
        self._thread.join()
        _UNSEEN.pop(self._thread, None)
        if self._error is not None:
            for group, last in list(_LAST.items()):
                if last is self:  # its traceback will have the caller's frames, and with them the group
                    del _LAST[group]
            raise self._error


_UNSEEN: dict[Thread, str] = {}  # errors of saves for which nobody has waited


@atexit.register  # Python waits for the threads before
def _tell_unseen() -> None:
    for text in _UNSEEN.values():
        logging.getLogger("zero_optim").error("%s. Nobody has called wait() of this save_async()", text)


def _ended_by(error: BaseException, folder: Path) -> CheckpointError:
    return CheckpointError(f"the save of {folder} in the background was ended by {type(error).__name__}")


# For each process group, as long as it lives, the lane of saves in the background, and the last save, unless
# that has raised its error.
_LANES: WeakKeyDictionary[dist.ProcessGroup, Lease] = WeakKeyDictionary()
_LAST: WeakKeyDictionary[dist.ProcessGroup, PendingSave] = WeakKeyDictionary()


def _on_lane(group: RankGroup) -> RankGroup:
    """Return the same ranks with the process group for saves in the background."""
    if group.process_group not in _LANES:
        _LANES[group.process_group] = lease(group, 1, ON_HOST)
    return replace(_LANES[group.process_group].groups[0], phase=group.phase)


@contextmanager
def _agree(
    call: str,
    path: str | os.PathLike[str],
    parts: tuple[Any, Any, Any, Any],
    extra: object,
    keep: int | None,
    process_group: dist.ProcessGroup | None,
    timeout: Timeout,
) -> Iterator["_Save"]:
    """List what this rank will write, once all ranks agree; the arguments are those of `save`."""
    model, optimizer, *_ = parts
    members = Members.of(model, optimizer, process_group, timeout)
    with watching(members.everyone), members.group.doing(f"checkpoint.{call}"):
        with failing_together(members.everyone):
            check_patience(timeout)
            check_group(process_group)
            folder, objects = folders.own_folder(path), Objects(*parts)
            if members.group.process_group in _LAST:
                _LAST[members.group.process_group].wait()
        with failing_together(members.everyone):
            if keep is not None and (type(keep) is not int or keep < 1):
                raise ValueError(f"expected keep to be a number of checkpoints from 1, or None, got {keep!r}")
            part, alike = collect(members, objects, extra)
        items = [f"path={Path(path)}", f"keep={keep}", f"model={model is not None}", *alike]
        agree(members.everyone, items, "what to save (all ranks give the same path and arguments)")
        if members.mesh is not None:  # the first replica writes the random states of all ranks
            own = [members.everyone.rank, random_state(objects.device)]
            for number, state in _collect(members.mesh.across, own, "the random state"):
                part.add(key_of(RANDOM, str(number)), state)
        yield _Save(members, folder, part, keep)


def _collect(group: RankGroup, value: Nested, about: str) -> Iterator[Any]:
    """Send a value to rank 0, which yields those of all others; all ranks call."""
    if group.rank:
        send_value(group, [0], *encode(value, about))
        return
    for rank in range(1, group.size):
        yield decode(*recv_encoded(group, rank))


@dataclass(frozen=True, slots=True, eq=False)
class _Save:
    members: Members
    folder: Path
    part: RankContent
    keep: int | None

    def write(self) -> None:
        """Write by the first replica alone; all ranks call, and raise what it raised, naming the rank."""
        mesh = self.members.mesh
        with failing_together(None if mesh is None else mesh.everyone):
            if mesh is None or mesh.across.rank == 0:
                self._write()

    def _write(self) -> None:
        """Write this rank's file; then rank 0 completes the checkpoint: Note [Protocol of a save]."""
        group, folder = self.members.group, self.folder
        lock: FolderLock | None = None
        try:
            with self._together():
                lock = FolderLock(folder) if group.rank == 0 else None
            token = group.all_gather_fixed(folders.new_token().encode())[0].decode()
            removes: Iterable[int] = [group.rank]  # the files of these ranks, after an error
            try:
                with self._together():
                    boxes = self.part.all_boxes()
                    files, written = write_tensors(folder, token, group.rank, boxes, self.part.bytes_of)
                removes = () if group.rank else range(group.size)
                mine = [
                    [[name, *astuple(file)] for name, file in files.items()],
                    [[astuple(box), astuple(chunk)] for box, chunk in written],
                    self.part.values,
                ]
                values = dict(self.part.values)
                for numbers, chunks, more in _collect(group, mine, "the checkpoint's manifest"):
                    files.update({name: DataFile(*each) for name, *each in numbers})
                    written += [(Box(*box), Chunk(*chunk)) for box, chunk in chunks]
                    values.update(more)
                with self._together():
                    if lock is not None:
                        alone = lock.keeps_out
                        folders.complete(folder, group.size, (files, written), values, alone=alone)
            except Exception:
                folders.discard(folder, token, *removes)
                raise
            with self._together():
                if self.keep is not None and group.rank == 0:
                    folders.prune(folder, self.keep)
        finally:
            if lock is not None:
                with suppress(OSError):
                    lock.close()
                    folder.rmdir()  # succeeds only if nothing was written

    @contextmanager
    def _together(self) -> Iterator[None]:
        """Fail on all ranks that write, with a `CheckpointError` for an error of the file system."""
        with failing_together(self.members.group):
            try:
                yield
            except OSError as error:
                where = f" ({error.filename})" if error.filename else ""
                raise CheckpointError(
                    f"cannot write the checkpoint {self.folder}: {error.strerror or error}{where}. "
                    "Checkpoints that were whole before still are"
                ) from error
            except (SystemExit, KeyboardInterrupt) as error:
                if current_thread() is main_thread():
                    raise
                raise _ended_by(error, self.folder) from error  # the other ranks hear of it
