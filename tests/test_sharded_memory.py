"""How much memory gradients take on a rank during the backward pass, counted in bytes of living storages."""

from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from pool import Ranks
from zero_optim import ZeroRedundancyOptimizer
from zero_optim.ddp import DistributedDataParallel, ShardedDataParallel
from zero_optim.step.partial import PartialGradient

WIDTH, NUM_LAYERS = 128, 24
LAYER_NBYTES = WIDTH * WIDTH * 4  # above what is copied in batches
BUCKET_LAYERS = 4
# Activations and their gradients, for one row of input; the word of a failure.
SLACK_NBYTES = NUM_LAYERS * WIDTH * 4 * 8


class LivingStorages(TorchDispatchMode):
    """Counts the bytes of what operators have made and somebody still holds; the most at any time.

    Args:
        known: these are not counted.

    Attributes:
        peak: in bytes.
    """

    def __init__(self, known: Iterable[Tensor]) -> None:
        super().__init__()
        self.peak = 0
        self._known = {tensor.untyped_storage()._cdata for tensor in known}
        self._living: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        for value in tree_leaves(made):
            if isinstance(value, Tensor) and not isinstance(value, PartialGradient):
                storage = value.untyped_storage()
                if storage._cdata not in self._known:
                    self._living[storage._cdata] = StorageWeakRef(storage), storage.nbytes()
        self._living = {key: held for key, held in self._living.items() if not held[0].expired()}
        self.peak = max(self.peak, sum(nbytes for _, nbytes in self._living.values()))
        return made


def layers() -> nn.Sequential:
    torch.manual_seed(2)
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(NUM_LAYERS)))


def peak_nbytes(sharded: bool, num_passes: int = 1, *, defers: bool = False) -> int:
    """Bytes that backward passes have made and hold, at most.

    With ``defers`` what ranks report is read later, as on an accelerator.
    """
    model = layers()
    cap_mb = BUCKET_LAYERS * LAYER_NBYTES / 2**20
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.SGD, lr=0.1, bucket_cap_mb=cap_mb)
    wrapped = (
        ShardedDataParallel(model, optimizer)
        if sharded
        else DistributedDataParallel(model, bucket_cap_mb=cap_mb, gradient_as_bucket_view=True)
    )
    wrapped._own().defers_reports = defers
    losses = [wrapped(torch.ones(1, WIDTH)).square().mean() for _ in range(num_passes)]
    with LivingStorages(model.parameters()) as living:
        for loss in losses:
            loss.backward()
    return living.peak


def holds_little(num_passes: int, defers: bool = False) -> int:
    size = dist.get_world_size()
    peak = peak_nbytes(True, num_passes, defers=defers)
    own = NUM_LAYERS * LAYER_NBYTES / size
    if num_passes > 1:  # where reports are read at once, the sums of a pass are apart until then
        own += 2 * BUCKET_LAYERS * LAYER_NBYTES / size if defers else own
    buckets = 3 * (size - 1) / size * BUCKET_LAYERS * LAYER_NBYTES
    assert peak <= own + buckets + LAYER_NBYTES + SLACK_NBYTES, (peak, own, buckets)
    return peak


def test_a_rank_holds_its_own_gradients_and_less_than_two_buckets(ranks2: Ranks) -> None:
    for peak in ranks2.run(holds_little, 1):
        assert peak < NUM_LAYERS * LAYER_NBYTES / 2 + 2 * BUCKET_LAYERS * LAYER_NBYTES


def test_a_rank_of_four_holds_its_own_gradients_and_less_than_three_buckets(ranks4: Ranks) -> None:
    ranks4.run(holds_little, 1)


def test_adding_up_takes_a_second_set_of_own_gradients(ranks2: Ranks) -> None:
    ranks2.run(holds_little, 3)


def test_adding_up_takes_little_more_memory_where_reports_are_late(ranks2: Ranks) -> None:
    ranks2.run(holds_little, 3, True)
