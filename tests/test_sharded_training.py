"""Which gradients a rank has where they are sharded, and what else `test_parity` does not show of them."""

import copy
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from overlap import Net, adamw, inputs, loss_of
from pool import Ranks, on_ranks
from sharded import Setting, assert_same_run
from zero_optim import ZeroRedundancyOptimizer
from zero_optim.ddp import DistributedDataParallel, ShardedDataParallel
from zero_optim.step.partial import PartialGradient


def trains_alike(setting: Setting) -> None:
    assert_same_run(setting)


def test_training_gives_the_bits_of_whole_gradients(ranks2: Ranks) -> None:
    ranks2.run(trains_alike, Setting())


@on_ranks(2)
def test_a_rank_has_the_gradients_of_what_it_owns_alone() -> None:
    model = Net()
    optimizer = adamw(model)
    wrapped = ShardedDataParallel(model, optimizer)
    loss_of(wrapped, 0).backward()
    owned = set(optimizer.owned_parameters())
    assert 0 < len(owned) < len(list(model.parameters()))
    for param in model.parameters():
        assert param.grad is not None
        assert isinstance(param.grad, PartialGradient) == (param not in owned)
        assert (param.grad.data_ptr() == 0) == (param not in owned)
    optimizer.step()
    optimizer.zero_grad()
    assert all(param.grad is None for param in model.parameters())


def summed_in_rank_order() -> None:
    size, model = dist.get_world_size(), Net()
    optimizer = adamw(model)
    wrapped = ShardedDataParallel(model, optimizer)
    loss_of(wrapped, 0).backward()
    alone = Net()
    expected: list[Tensor] = []
    for rank in range(size):
        alone.zero_grad()
        alone(inputs(0, rank)).square().mean().backward()
        grads = [param.grad * (1 / size) for param in alone.parameters() if param.grad is not None]
        expected = [total + grad for total, grad in zip(expected, grads, strict=True)] if rank else grads
    for param, want in zip(model.parameters(), expected, strict=True):
        if not isinstance(param.grad, PartialGradient):
            assert param.grad is not None
            assert torch.equal(param.grad, want)


def test_gradients_are_those_of_one_process_that_sums_in_the_order_of_ranks(ranks_2_and_4: Ranks) -> None:
    ranks_2_and_4.run(summed_in_rank_order)


class Scaled:
    """A step with a scaler; one rank finds an infinity in one step."""

    def __init__(self, unscales: bool) -> None:
        self.unscales = unscales
        self.scalers: dict[ZeroRedundancyOptimizer, torch.amp.GradScaler] = {}

    def __call__(self, model: nn.Module, optimizer: ZeroRedundancyOptimizer, number: int) -> float:
        if optimizer not in self.scalers:
            self.scalers[optimizer] = torch.amp.GradScaler("cpu", init_scale=64.0, growth_interval=2)
        scaler = self.scalers[optimizer]
        optimizer.zero_grad()
        loss = loss_of(model, number)
        if number == 2 and dist.get_rank() == 1:
            loss = loss * float("inf")
        scaler.scale(loss).backward()
        if self.unscales:
            scaler.unscale_(optimizer)
            optimizer.clip_grad_norm_(0.01)
        scaler.step(optimizer)
        scaler.update()
        return scaler.get_scale()


class Unused(Net):
    """One layer is used by some ranks in some steps, another by nobody."""

    def __init__(self) -> None:
        super().__init__()
        self.never = nn.Linear(12, 3)
        self.count = 0

    def forward(self, x: Tensor, with_spare: bool = True) -> Tensor:
        self.count += 1
        return super().forward(x, with_spare=self.count % 2 == 0 and dist.get_rank() == 0)


class Same(Net):
    """One layer is used by nobody, in any step."""

    def forward(self, x: Tensor, with_spare: bool = True) -> Tensor:
        return super().forward(x, with_spare=False)


class Words(nn.Module):
    """A sparse embedding, registered first, and a dense layer."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.table = nn.Embedding(20, 6, sparse=True)
        self.head = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        index = (x.abs() * 10).long().flatten(1)[:, :4] % 20
        out: Tensor = self.head(self.table(index).sum(1))
        return out


def sgd(model: nn.Module) -> ZeroRedundancyOptimizer:
    return ZeroRedundancyOptimizer(model.parameters(), torch.optim.SGD, lr=0.1, bucket_cap_mb=0.0005)


class Checkpointed(Net):
    """Computes some activations twice."""

    def __init__(self, use_reentrant: bool) -> None:
        super().__init__()
        self.use_reentrant = use_reentrant

    def forward(self, x: Tensor, with_spare: bool = True) -> Tensor:
        hidden = self.norm(self.conv(x)).relu().flatten(1)
        hidden = checkpoint(self.layers, hidden, use_reentrant=self.use_reentrant)
        hidden = checkpoint(self.spare, hidden, use_reentrant=self.use_reentrant)
        out: Tensor = self.head(hidden)
        return out


@on_ranks(1)
def test_one_rank_has_all_gradients() -> None:
    sharded = assert_same_run(Setting(options={}))
    assert all(not isinstance(param.grad, PartialGradient) for param in sharded.parameters())
    assert all(param.grad is not None for param in sharded.parameters())


@on_ranks(2)
def test_a_copy_has_an_optimizer_of_its_own_and_trains() -> None:
    wrapped, optimizer = Setting().sharded()
    loss_of(wrapped, 0).backward()
    optimizer.step()
    other = copy.deepcopy(wrapped)
    for model, stepped in ((wrapped, optimizer), (other, other._optimizer)):
        stepped.zero_grad()
        loss_of(model, 1).backward()
        stepped.step()
    for a, b in zip(wrapped.parameters(), other.parameters(), strict=True):
        assert a is not b
        assert torch.equal(a, b)


@on_ranks(2)
@pytest.mark.parametrize("master_dtype", [None, torch.float32])
def test_averages_begin_at_the_weights_that_ranks_agree_on(master_dtype: torch.dtype | None) -> None:
    """Ranks begin with other weights, and take those of the first by wrapping."""
    found = []
    for is_sharded in (False, True):
        torch.manual_seed(dist.get_rank())
        model = nn.Sequential(nn.Linear(18, 8), nn.Linear(8, 4)).bfloat16()
        build = partial(adamw, model, master_dtype=master_dtype, ema_decay=0.5)
        if is_sharded:
            optimizer = build()
            ShardedDataParallel(model, optimizer)
        else:
            DistributedDataParallel(model)
            optimizer = build()
        with optimizer.averaged_weights():
            found.append([param.detach().clone() for param in model.parameters()])
            assert all(torch.equal(a, b) for a, b in zip(found[0], model.parameters(), strict=True))
    # Once a step was taken averages stay what they are.
    for param in model.parameters():
        param.grad = torch.ones_like(param)
    optimizer.step()
    optimizer.begin_averages_anew()
    with optimizer.averaged_weights():
        averages = [param.detach().clone() for param in model.parameters()]
    assert not all(torch.equal(a, b) for a, b in zip(averages, model.parameters(), strict=True))


@on_ranks(2)
def test_the_cap_of_buckets_that_is_told_is_that_of_the_optimizer() -> None:
    wrapped, optimizer = Setting(optimizer=sgd).sharded()
    assert wrapped.get_ddp_logging_data()["bucket_cap_bytes"] == int(0.0005 * 2**20)
    assert optimizer.core.sharding.cap_nbytes == int(0.0005 * 2**20)
