"""Sharded gradients: which a rank has, cut parameters, uneven inputs; more bits in `test_parity`."""

import copy
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.join import Join

from overlap import Net, adamw, loss_of
from pool import on_ranks
from sharded import Setting, assert_same_gradients, assert_same_run, cut_adamw
from zero_optim import ZeroRedundancyOptimizer
from zero_optim.ddp import DistributedDataParallel, ShardedDataParallel
from zero_optim.step.partial import PartialGradient


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


@on_ranks(2)
def test_an_owner_of_rows_has_their_gradient_and_their_norms() -> None:
    (whole, one), (sharded, other) = Setting().whole(), Setting(optimizer=cut_adamw).sharded()
    for model in (whole, sharded):
        loss_of(model, 0).backward()
    assert any(len(pieces) > 1 for pieces in other.pieces().values())
    assert_same_gradients(sharded, whole)
    for param, pieces in other.pieces().items():
        is_partial = len(pieces) > 1 or pieces[0].owner != dist.get_rank()
        assert isinstance(param.grad, PartialGradient) == is_partial
    for norm_type in (float("inf"), 2.0, 1.0):  # each larger than the one before
        for max_norm in (0.01, 1.0):  # the second finds what the first has left
            want, got = (optimizer.clip_grad_norm_(max_norm, norm_type) for optimizer in (one, other))
            assert torch.allclose(got, want, rtol=1e-5, atol=0), (norm_type, max_norm)
            assert torch.equal(got, want) or norm_type != float("inf")
            norms = [torch.empty_like(got) for _ in range(dist.get_world_size())]
            dist.all_gather(norms, got)
            assert all(torch.equal(norm, got) for norm in norms)
        assert torch.allclose(got, torch.tensor(0.01), rtol=1e-3)


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


# ---------------------------------------------------------------------- uneven inputs


@on_ranks(2)
def test_join_is_refused_on_every_rank_with_what_serves_instead() -> None:
    wrapped, optimizer = Setting().sharded()
    for joinables in ([wrapped, optimizer], [optimizer, wrapped], [wrapped]):
        with pytest.raises(RuntimeError, match=r"ShardedDataParallel takes no part in Join: .* stage 1"):
            Join(joinables)
    with pytest.raises(RuntimeError, match="takes no part in Join"), wrapped.join():
        pass
    loss_of(wrapped, 0).backward()
    optimizer.step()
