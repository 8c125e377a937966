"""Ordinary gathers use the group that was given, beside the lanes of an overlapped step."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from overlap import Setting, plain_step
from pool import on_ranks

pytestmark = pytest.mark.on_sockets("through memory nothing is broadcast")


@contextmanager
def broadcasts() -> Iterator[list[str]]:
    """Give the names of groups on which the body broadcasts."""
    sent: list[str] = []
    real = dist.broadcast

    def noted(tensor: torch.Tensor, group: Any, async_op: bool, group_src: int) -> Any:
        sent.append(group.group_name)
        return real(tensor, group=group, async_op=async_op, group_src=group_src)

    with mock.patch.object(dist, "broadcast", noted):
        yield sent


@on_ranks(2)
def test_gathers_beside_an_overlapped_step_do_not_use_its_lanes() -> None:
    """An overlapped step gathers on its lanes, from a thread; other gathers do not go there."""
    model, optimizer = Setting("ours").build(overlap=True)
    with broadcasts() as overlapped:
        plain_step(model, optimizer, 0)
    with broadcasts() as ordinary:
        optimizer.gather_parameters()
    lanes = {lane.process_group.group_name for lane in optimizer.iteration.overlap().lanes.groups}
    world = dist.group.WORLD
    assert world is not None
    assert lanes <= set(overlapped)
    assert set(ordinary) == {world.group_name}
    assert world.group_name not in lanes
