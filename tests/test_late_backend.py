"""The backend that lies in wait: it finds waits that are missing, and right code does not notice it."""

from collections.abc import Iterator
from contextlib import suppress
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

import late_backend
from forked import fork_context
from parity import trained
from pool import Pool, RankError
from zero_optim.comm.works import Work


@pytest.fixture(scope="module")
def late_pool() -> Iterator[Pool]:
    with Pool(fork_context(), 1) as pool:
        yield pool


def outputs_without_a_wait() -> list[bool]:
    rank = dist.get_rank()
    tensor = torch.full((3,), float(rank))
    received = [torch.zeros(1), torch.zeros(1)]
    with patch.object(late_backend, "DELAYS", (30.0,)):  # so that only a wait lets them run
        works = [
            dist.broadcast(tensor, 0, async_op=True),
            dist.all_gather(received, torch.ones(1), async_op=True),
        ]
    seen = [bool(tensor.isnan().all()), bool(received[1 - rank].isnan().all())]
    for work in works:
        work.wait()
    return [*seen, tensor.tolist() == [0.0] * 3, torch.cat(received).tolist() == [1.0, 1.0]]


def an_input_written_too_early() -> float:
    tensor = torch.full((1,), 5.0)
    with patch.object(late_backend, "DELAYS", (30.0,)):  # so that only a wait lets it run
        work = dist.broadcast(tensor, 0, async_op=True)
    if dist.get_rank() == 0:
        tensor.fill_(7.0)
    work.wait()
    return tensor.item()


def test_outputs_are_nan_until_somebody_waits_and_inputs_are_read_late(late_pool: Pool) -> None:
    first, second = late_pool.run(2, outputs_without_a_wait)
    assert first == [False, True, True, True]
    assert second == [True, True, True, True]
    assert late_pool.run(2, an_input_written_too_early) == [7.0, 7.0]


def trained_right(kind: str) -> bool:
    """Whether parameters are finite, and the same on both ranks."""
    params = torch.cat([param.flatten() for param in trained(kind)])
    other = params.clone()
    dist.broadcast(other, 0)
    return bool(params.isfinite().all() and torch.equal(params, other))


KINDS = ["views", "overlap", "lazy", "gradients", "fully"]


def trained_without_waits(kind: str, phase: str) -> bool:
    """Train while `Work.wait` does not wait for works of a phase."""
    right = Work.wait

    def wait(work: Work) -> Any:
        return None if work.phase.name == phase else right(work)

    # Not found only if each of many gathers were late to be read by as much.
    with patch.object(late_backend, "DELAYS", (0.05,)), patch.object(Work, "wait", wait):
        return trained_right(kind)


@pytest.mark.parametrize("kind", ["views", "lazy", "fully"])
def test_a_missing_wait_for_gathers_is_found(late_pool: Pool, kind: str) -> None:
    with suppress(RankError):  # found as well: stamps are garbage
        assert late_pool.run(2, trained_without_waits, kind, "gather") != [True, True]


@pytest.mark.parametrize("kind", KINDS)
def test_nothing_is_found_where_no_wait_is_missing(late_pool: Pool, kind: str) -> None:
    assert late_pool.run(2, trained_without_waits, kind, "no phase") == [True, True]
