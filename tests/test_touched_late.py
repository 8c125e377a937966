"""While parameters move into a bucket, its memory becomes resident as theirs is released."""

import gc
import mmap
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import nn

from pool import on_ranks
from process_memory import forget_peak, peak_nbytes, resident_nbytes
from zero_optim import ZeroRedundancyOptimizer
from zero_optim.ddp import FullyShardedDataParallel, unsharded

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads the peak of resident memory in /proc")

WIDTH, NUM_LAYERS = 1024, 12
LAYER_NBYTES = WIDTH * WIDTH * 4


def ones(nbytes: int) -> torch.Tensor:
    """Ones in memory that goes back to the system with their storage."""
    memory = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return torch.frombuffer(memory, dtype=torch.float32).fill_(1).view(-1, WIDTH)


def made() -> nn.Sequential:
    """A model of 48 MiB."""
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False, device="meta") for _ in range(NUM_LAYERS)))
    for layer in model:
        layer.weight = nn.Parameter(ones(LAYER_NBYTES))
    return model


@contextmanager
def resident_for_one() -> Iterator[None]:
    """At the peak of this context the process has memory for little more than one layer in addition."""
    gc.collect()
    forget_peak()
    before = resident_nbytes()
    yield
    assert peak_nbytes() - before < 3 * LAYER_NBYTES


def check_shards(model: nn.Module, *args: Any, **options: Any) -> None:
    with resident_for_one():
        wrapped = FullyShardedDataParallel(model, *args, **options)
    with unsharded(wrapped):
        assert all(bool((param == 1).all()) for param in model.parameters())


@on_ranks(2)
def test_moving_parameters_into_a_bucket_takes_memory_for_one_of_them() -> None:
    ZeroRedundancyOptimizer(nn.Linear(2, 2).parameters(), torch.optim.SGD, lr=0.1)  # loads the code
    model = made()
    with resident_for_one():
        optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.SGD, lr=0.1, bucket_cap_mb=100)
    assert len(optimizer.pieces()) == NUM_LAYERS
    assert all(bool((param == 1).all()) for param in model.parameters())


class Table(nn.Module):
    """A model whose first parameter is as large as six of the others."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding.from_pretrained(ones(6 * LAYER_NBYTES), freeze=False)
        self.blocks = made()


@on_ranks(2)
def test_a_large_parameter_is_moved_when_others_have_been_released() -> None:
    model = Table()
    check_shards(model, units=[*model.blocks])


@on_ranks(2)
def test_a_bucket_shrinks_as_its_parameters_leave_it_for_the_row_of_a_unit() -> None:
    model = made()
    options = {"lr": 0.1, "bucket_cap_mb": 100}  # one flat tensor
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.SGD, **options)
    check_shards(model, optimizer, units=[])


@on_ranks(2)
def test_a_view_that_somebody_keeps_of_a_parameter_keeps_its_values_when_the_model_is_sharded() -> None:
    model = nn.Sequential(*(nn.Linear(128, 128, bias=False) for _ in range(4)))
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.SGD, lr=0.1)
    kept = [model[0].weight.data[3:], model[1].weight.detach().numpy()]
    wanted = [kept[0].clone(), kept[1].copy()]
    FullyShardedDataParallel(model, optimizer, units=[])
    for have, want in zip(kept, wanted, strict=True):
        assert (have == want).all()
