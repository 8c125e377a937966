"""How much memory a rank takes, counted in bytes of living storages.

For gradients during the backward pass, and for parameters that are cut.
"""

import contextlib
from collections.abc import Iterable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn import Parameter
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from cuts import cutting
from pool import Pool, on_ranks
from waiting import wait_until
from zero_optim import ZeroRedundancyOptimizer
from zero_optim.ddp import ShardedDataParallel
from zero_optim.errors import ReductionError

WIDTH, NUM_LAYERS = 128, 24
LAYER_NBYTES = WIDTH * WIDTH * 4  # above what is copied in batches
BUCKET_LAYERS = 4
SLACK_NBYTES = 8 * WIDTH * 4  # gradients of activations, of one row each; the word of a failure


class LivingStorages(TorchDispatchMode):
    """Counts the bytes of what operators have made and somebody still holds; the most at any time.

    Files in memory are not counted: the rings of ranks of one host, whose size is one for all models.

    Args:
        known: these are not counted.

    Attributes:
        peak: in bytes.
    """

    def __init__(self, known: Iterable[Tensor]) -> None:
        super().__init__()
        self.peak = 0
        self._known = {tensor.untyped_storage()._cdata for tensor in known}
        self._living: dict[int, StorageWeakRef] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        for value in tree_leaves(made):
            if type(value) in (Tensor, Parameter):  # others have no memory of their own
                storage = value.untyped_storage()
                if storage._cdata not in self._known and storage.filename is None:
                    self._living[storage._cdata] = StorageWeakRef(storage)
        self.peak = max(self.peak, self.count())
        return made

    def count(self) -> int:
        """Bytes that somebody holds now, as large as storages are by now; those that share memory once."""
        self._living = {key: held for key, held in self._living.items() if not held.expired()}
        storages = [torch.UntypedStorage._new_with_weak_ptr(held.cdata) for held in self._living.values()]
        nbytes, end = 0, 0
        for start, size in sorted((each.data_ptr(), each.nbytes()) for each in storages if each is not None):
            nbytes += max(0, start + size - max(start, end))
            end = max(end, start + size)
        return nbytes


def layers() -> nn.Sequential:
    torch.manual_seed(2)
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(NUM_LAYERS)))


def peak_nbytes(num_passes: int, *, defers: bool, model: nn.Module, cap_nbytes: int) -> int:
    """Bytes that backward passes have made and hold, at most.

    With ``defers`` what ranks report is read later, as on an accelerator.
    """
    optimizer = ZeroRedundancyOptimizer(
        model.parameters(), torch.optim.SGD, lr=0.1, bucket_cap_mb=cap_nbytes / 2**20
    )
    wrapped = ShardedDataParallel(model, optimizer)
    wrapped._own().defers_reports = defers
    losses = [wrapped(torch.ones(1, WIDTH)).square().mean() for _ in range(num_passes)]
    with LivingStorages(model.parameters()) as living:
        for loss in losses:
            loss.backward()
    return living.peak


def holds_little(num_passes: int, defers: bool, whole: bool) -> None:
    """With ``whole``, a rank owns whole parameters, otherwise rows of each."""
    size = dist.get_world_size()
    with contextlib.nullcontext() if whole else cutting():
        cap = BUCKET_LAYERS * LAYER_NBYTES
        peak = peak_nbytes(num_passes, defers=defers, model=layers(), cap_nbytes=cap)
    own = NUM_LAYERS * LAYER_NBYTES / size
    if num_passes > 1:  # where reports are read at once, the sums of a pass are apart until then
        own += 2 * BUCKET_LAYERS * LAYER_NBYTES / size if defers else own
    bucket = BUCKET_LAYERS * LAYER_NBYTES
    more = (1.5 if size == 2 else 2) * bucket + LAYER_NBYTES
    assert peak <= own + more + SLACK_NBYTES, (peak, own, bucket)


@pytest.mark.parametrize(
    ("size", "num_passes", "defers", "whole"),
    [
        (4, 1, False, True),
        (4, 1, False, False),
        (2, 3, False, False),  # adding up takes a second set of its own gradients
        (2, 3, True, False),  # little more where reports are late
    ],
)
def test_a_rank_holds_its_own_gradients_two_buckets_and_one_gradient(
    pool: Pool, size: int, num_passes: int, defers: bool, whole: bool
) -> None:
    pool.run(size, holds_little, num_passes, defers, whole)


@on_ranks(2)
def test_behind_a_pass_that_failed_no_gradient_is_kept() -> None:
    model = layers()
    unused = nn.Parameter(torch.ones(3))
    model.register_parameter("unused", unused)
    wrapped = ShardedDataParallel(model, ZeroRedundancyOptimizer(model.parameters(), torch.optim.SGD, lr=0.1))
    loss = wrapped(torch.ones(1, WIDTH)).square().mean()
    with LivingStorages(model.parameters()) as living:
        with pytest.raises(ReductionError, match="no gradient for unused"):
            loss.backward()
        assert living.peak > LAYER_NBYTES
        wrapped.zero_grad()
        del loss
        assert living.count() < LAYER_NBYTES


CUT_NBYTES = (256 * 256 + 16) * 4  # of one cut parameter; its rows are not even, nor is it a power of two
NUM_CUT = 8


def cut_params(num: int = NUM_CUT) -> list[Parameter]:
    return [Parameter(torch.ones(CUT_NBYTES // 64, 16)) for _ in range(num)]


@on_ranks(2)
@pytest.mark.parametrize("view", [True, False], ids=["view", "packed"])
def test_cut_parameters_move_with_memory_for_one_bucket_more(view: bool) -> None:
    """Each parameter has a bucket of its own."""
    options: dict[str, Any] = {"lr": 0.1, "bucket_cap_mb": 1e-5, "parameters_as_bucket_view": view}
    ZeroRedundancyOptimizer(cut_params(1), torch.optim.SGD, **options)  # what trials take is no concern here
    with LivingStorages(()) as living:
        params = cut_params()
        with cutting():
            optimizer = ZeroRedundancyOptimizer(params, torch.optim.SGD, **options)
    assert all(len(optimizer.pieces()[param]) == 2 for param in params)
    bucket = optimizer.core.engine.buckets[-1].nbytes
    assert living.peak <= (NUM_CUT + 1) * bucket + 4096, living.peak / CUT_NBYTES


@on_ranks(2)
@pytest.mark.parametrize("view", [True, False], ids=["view", "packed"])
def test_after_a_step_the_optimizer_holds_no_memory_of_cut_parameters(view: bool) -> None:
    with LivingStorages(()) as living:
        params = cut_params()
        with cutting():
            optimizer = ZeroRedundancyOptimizer(
                params, torch.optim.SGD, lr=0.1, bucket_cap_mb=1e-5, parameters_as_bucket_view=view
            )
        for param in params:
            param.grad = torch.ones_like(param)
        optimizer.step()
        optimizer.zero_grad()
        most = (NUM_CUT + 1) * CUT_NBYTES
        # gloo's threads let go a moment after a broadcast has ended
        wait_until(lambda: living.count() < most)
        for param in params:
            param.data = torch.empty(0)
        # A bucket keeps its own memory, where parameters are views of it.
        assert living.count() < (most if view else 4096), living.count()
