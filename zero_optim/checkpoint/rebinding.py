"""Going back to a checkpoint in another process group, after state was lost with a rank."""

import os
from dataclasses import replace
from typing import Any

import torch.distributed as dist
from torch import nn

from zero_optim.checkpoint.folder import resolved
from zero_optim.checkpoint.loading import load_from, open_together
from zero_optim.checkpoint.names import Objects
from zero_optim.checkpoint.storage import CheckpointReader
from zero_optim.comm.agreement import failing_together, ranks_of
from zero_optim.comm.collectives import RankGroup
from zero_optim.comm.encoding import Nested
from zero_optim.health.watchdog import check_patience, patient, watching
from zero_optim.optimizer import ZeroRedundancyOptimizer


def rebind(
    path: str | os.PathLike[str],
    *,
    model: nn.Module,
    optimizer: ZeroRedundancyOptimizer,
    scheduler: Any = None,  # noqa: ANN401 - torch has no one class of them
    scaler: Any = None,  # noqa: ANN401
    random: bool = True,
    process_group: dist.ProcessGroup | None = None,
    timeout: float | None = None,
) -> Nested:
    """Bind a detached optimizer to another process group, in the state of a checkpoint; all its ranks call.

    To be called by those that are left when a rank has died. The result is that of an optimizer built in the
    new group, and of `load`. If the ranks still hold what was saved, since there was no step after the save,
    they keep it, and only what is lost is read. Otherwise everything is.

    Args:
        path: a checkpoint's folder; `latest` finds the newest.
        model: to load into; its wrapper is bound afterwards.
        optimizer: to bind, and to load into; detached.
        scheduler: to load into.
        scaler: to load into.
        random: as in `load`.
        process_group: the new ranks; None for the default group.
        timeout: as in `load`.

    Returns:
        What was saved as ``extra``.

    Raises:
        Exception: on every rank, what `ZeroRedundancyOptimizer.rebind` and `load` raise. The optimizer is
            detached then, and may be bound by another call of this.
    """
    ranks = ranks_of(process_group)
    group = patient(RankGroup.of(ranks.process_group, model).during("checkpoint"), timeout)
    with watching(group), group.doing("checkpoint.rebind()"):
        with failing_together(group):
            check_patience(timeout)
            _check(model, optimizer)
            folder, objects = resolved(path), Objects(model, optimizer, scheduler, scaler)
        what = "the checkpoint to go back to"
        reader = open_together(group, path, folder, objects, what, random=random)
        return _rebind(group, reader, objects, optimizer, random=random)


def _rebind(
    group: RankGroup,
    reader: CheckpointReader,
    objects: Objects,
    optimizer: ZeroRedundancyOptimizer,
    *,
    random: bool,
) -> Nested:
    is_same = optimizer.was_saved_as(reader.token)
    words = group.all_gather_fixed(bytes([is_same, optimizer.age > 0]))
    only = None
    if all(word[0] for word in words) and any(word[1] for word in words):
        only = optimizer.rebind_held(group.process_group)
    else:
        optimizer.rebind(group.process_group, keep_state=False)
    try:
        group = replace(optimizer.ranks, phase=group.phase)
        return load_from(group, reader, objects, random=random, only=only)
    except BaseException:
        optimizer.give_up_state()
        raise


def _check(model: object, optimizer: object) -> None:
    if not isinstance(optimizer, ZeroRedundancyOptimizer) or not isinstance(model, nn.Module):
        raise TypeError("expected the model, and the ZeroRedundancyOptimizer over its parameters")
