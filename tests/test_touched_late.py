"""While parameters move into a bucket, its memory becomes resident as theirs is released."""

import gc
import mmap
import sys

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


def made() -> nn.Sequential:
    """A model of 48 MiB, whose parameters have memory that goes back to the system with their storages."""
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False, device="meta") for _ in range(NUM_LAYERS)))
    for layer in model:
        memory = mmap.mmap(-1, LAYER_NBYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        layer.weight = nn.Parameter(torch.frombuffer(memory, dtype=torch.float32).fill_(1).view(WIDTH, WIDTH))
    return model


def begin() -> int:
    """Count the peak of resident memory from here on; gives the bytes that are resident now."""
    gc.collect()
    forget_peak()
    return resident_nbytes()


def check_grown(before: int) -> None:
    assert peak_nbytes() - before < 3 * LAYER_NBYTES


@on_ranks(2)
def test_moving_parameters_into_a_bucket_takes_memory_for_one_of_them() -> None:
    ZeroRedundancyOptimizer(nn.Linear(2, 2).parameters(), torch.optim.SGD, lr=0.1)  # loads the code
    model = made()
    before = begin()
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.SGD, lr=0.1, bucket_cap_mb=100)
    check_grown(before)
    assert len(optimizer.pieces()) == NUM_LAYERS
    assert all(bool((param == 1).all()) for param in model.parameters())


class Table(nn.Module):
    """A model whose first parameter is as large as six of the others."""

    def __init__(self) -> None:
        super().__init__()
        memory = mmap.mmap(-1, 6 * LAYER_NBYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        values = torch.frombuffer(memory, dtype=torch.float32).fill_(1)
        self.table = nn.Embedding.from_pretrained(values.view(-1, WIDTH), freeze=False)
        self.blocks = made()


@on_ranks(2)
def test_a_large_parameter_is_moved_when_others_have_been_released() -> None:
    model = Table()
    before = begin()
    wrapped = FullyShardedDataParallel(model, units=[*model.blocks])
    check_grown(before)
    with unsharded(wrapped):
        assert all(bool((param == 1).all()) for param in model.parameters())


@on_ranks(2)
def test_a_bucket_shrinks_as_its_parameters_leave_it_for_the_row_of_a_unit() -> None:
    model = made()
    options = {"lr": 0.1, "bucket_cap_mb": 100}  # one flat tensor
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.SGD, **options)
    before = begin()
    wrapped = FullyShardedDataParallel(model, optimizer, units=[])
    check_grown(before)
    with unsharded(wrapped):
        assert all(bool((param == 1).all()) for param in model.parameters())


@on_ranks(2)
def test_a_view_that_somebody_keeps_of_a_parameter_keeps_its_values_when_the_model_is_sharded() -> None:
    model = nn.Sequential(*(nn.Linear(128, 128, bias=False) for _ in range(4)))
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.SGD, lr=0.1)
    kept = [model[0].weight.data[3:], model[1].weight.detach().numpy()]
    wanted = [kept[0].clone(), kept[1].copy()]
    FullyShardedDataParallel(model, optimizer, units=[])
    for have, want in zip(kept, wanted, strict=True):
        assert (have == want).all()
