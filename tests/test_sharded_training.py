"""With sharded gradients a loop trains, bit for bit, as with whole ones."""

import copy
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import lr_scheduler
from torch.utils.checkpoint import checkpoint

from overlap import Net, adamw, inputs, loss_of
from pool import Ranks, on_ranks
from sharded import Setting, assert_same_run, plain_step
from training import HAS_MUON, assert_same_state
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


def clips_alike(norm_type: float, foreach: bool | None) -> None:
    def step(model: nn.Module, optimizer: ZeroRedundancyOptimizer, number: int) -> Tensor:
        optimizer.zero_grad()
        loss_of(model, number).backward()
        norm = optimizer.clip_grad_norm_(0.01, norm_type, foreach=foreach)
        optimizer.step()
        return norm

    assert_same_run(Setting(), step)


@pytest.mark.parametrize(("norm_type", "foreach"), [(2.0, None), (2.0, False), (float("inf"), True)])
def test_clipping_gives_the_bits_of_whole_gradients(
    ranks2: Ranks, norm_type: float, foreach: bool | None
) -> None:
    ranks2.run(clips_alike, norm_type, foreach)


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


@on_ranks(2)
@pytest.mark.parametrize("unscales", [False, True])
def test_a_scaler_skips_and_scales_as_with_whole_gradients(unscales: bool) -> None:
    (whole, one), (sharded, other) = Setting().whole(), Setting().sharded()
    step, scales = Scaled(unscales), []
    for number in range(5):
        scales.append(step(whole, one, number))
        assert step(sharded, other, number) == scales[-1]
        for param, want in zip(sharded.parameters(), whole.parameters(), strict=True):
            assert torch.equal(param, want)
    assert scales == [64.0, 128.0, 64.0, 64.0, 128.0]


@on_ranks(2)
def test_schedulers_act_as_with_whole_gradients() -> None:
    schedulers: dict[ZeroRedundancyOptimizer, Any] = {}

    def step(model: nn.Module, optimizer: ZeroRedundancyOptimizer, number: int) -> list[float]:
        if optimizer not in schedulers:
            schedulers[optimizer] = lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=6)
        optimizer.zero_grad()
        loss_of(model, number).backward()
        optimizer.step()
        schedulers[optimizer].step()
        return [group["lr"] for group in optimizer.param_groups]

    assert_same_run(Setting(), step)


@on_ranks(2)
def test_closures_give_the_bits_of_whole_gradients() -> None:
    def step(model: nn.Module, optimizer: ZeroRedundancyOptimizer, number: int) -> float | None:
        def closure() -> float:
            optimizer.zero_grad()
            loss = loss_of(model, number)
            loss.backward()
            return loss.item()

        return optimizer.step(closure)

    assert_same_run(Setting(), step)
    assert_same_run(Setting(optimizer=partial(adamw, master_dtype=torch.float64)), step)


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


def leaves_unused_alone(setting: Setting) -> None:
    model = assert_same_run(setting)
    never = getattr(model.module, "never", getattr(model.module, "spare", None))
    assert never.weight.grad is None


@pytest.mark.parametrize(
    "setting",
    [
        Setting(Unused, options={"find_unused_parameters": True}),
        Setting(Same, options={"static_graph": True}),
    ],
)
def test_a_parameter_that_no_rank_used_has_no_gradient_on_any(ranks2: Ranks, setting: Setting) -> None:
    ranks2.run(leaves_unused_alone, setting)


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


def test_sparse_gradients_give_the_bits_of_whole_ones(ranks2: Ranks) -> None:
    ranks2.run(trains_alike, Setting(Words, sgd))


def two_classes(model: nn.Module) -> ZeroRedundancyOptimizer:
    matrices = [param for param in model.parameters() if param.dim() == 2]
    others = [param for param in model.parameters() if param.dim() != 2]
    for_matrices = torch.optim.Muon if HAS_MUON else torch.optim.Adafactor
    groups = [
        {"params": matrices, "optimizer_class": for_matrices, "lr": 0.02},
        {"params": others, "betas": (0.5, 0.6)},
    ]
    return ZeroRedundancyOptimizer(groups, torch.optim.AdamW, lr=0.01, bucket_cap_mb=0.001)


def test_several_groups_and_classes_give_the_bits_of_whole_gradients(ranks2: Ranks) -> None:
    ranks2.run(trains_alike, Setting(optimizer=two_classes))


class Narrow(Net):
    """In bfloat16."""

    def __init__(self) -> None:
        super().__init__()
        self.bfloat16()

    def forward(self, x: Tensor, with_spare: bool = True) -> Tensor:
        return super().forward(x.bfloat16(), with_spare).float()


def keeps_masters_and_averages() -> None:
    averages: dict[ZeroRedundancyOptimizer, list[Tensor]] = {}

    def step(model: nn.Module, optimizer: ZeroRedundancyOptimizer, number: int) -> None:
        plain_step(model, optimizer, number)
        with optimizer.averaged_weights():
            averages[optimizer] = [param.detach().clone() for param in model.parameters()]

    model = assert_same_run(Setting(Narrow, partial(adamw, master_dtype=torch.float32, ema_decay=0.9)), step)
    one, other = averages.values()
    assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))
    assert not all(torch.equal(a, b) for a, b in zip(one, model.parameters(), strict=True))


def test_masters_and_averages_give_the_bits_of_whole_gradients(ranks2: Ranks) -> None:
    ranks2.run(keeps_masters_and_averages)


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


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_checkpointing_gives_the_bits_of_whole_gradients(ranks2: Ranks, use_reentrant: bool) -> None:
    ranks2.run(trains_alike, Setting(partial(Checkpointed, use_reentrant)))


def freezes_alike() -> None:
    def step(model: Any, optimizer: ZeroRedundancyOptimizer, number: int) -> None:
        model.module.spare.requires_grad_(number in (0, 3))
        optimizer.zero_grad()
        loss_of(model, number).backward()
        assert (model.module.spare.weight.grad is None) == (number not in (0, 3))
        optimizer.step()

    assert_same_run(Setting(options={"find_unused_parameters": True}), step)


def test_freezing_and_thawing_gives_the_bits_of_whole_gradients(ranks2: Ranks) -> None:
    ranks2.run(freezes_alike)


@on_ranks(2)
def test_groups_can_be_added() -> None:
    extra: dict[ZeroRedundancyOptimizer, nn.Parameter] = {}

    def step(model: Any, optimizer: ZeroRedundancyOptimizer, number: int) -> Tensor | None:
        if number == 1:
            extra[optimizer] = nn.Parameter(torch.ones(5))
            optimizer.add_param_group({"params": [extra[optimizer]], "lr": 0.1})
        optimizer.zero_grad()
        loss_of(model, number).backward()
        if optimizer in extra:
            extra[optimizer].grad = torch.full((5,), 0.5)  # the wrapper does not know it
        optimizer.clip_grad_norm_(1.0)
        optimizer.step()
        return extra.get(optimizer)

    assert_same_run(Setting(), step)


@on_ranks(2)
def test_gradients_can_be_set_to_zero_and_clipped_by_value() -> None:
    def step(model: nn.Module, optimizer: ZeroRedundancyOptimizer, number: int) -> None:
        optimizer.zero_grad(set_to_none=False)
        loss_of(model, number).backward()
        torch.nn.utils.clip_grad_value_(model.parameters(), 0.003)
        optimizer.step()

    assert_same_run(Setting(), step)


@on_ranks(2)
def test_lazy_gathers_give_the_bits_of_whole_gradients() -> None:
    seen: set[int] = set()

    def step(model: Any, optimizer: ZeroRedundancyOptimizer, number: int) -> Tensor:
        if id(optimizer) not in seen:
            seen.add(id(optimizer))
            optimizer.gather_lazily(model.module)
        optimizer.zero_grad()
        loss_of(model, number).backward()
        norm = optimizer.clip_grad_norm_(0.01)
        optimizer.step()
        optimizer.wait_for_gathers()
        return norm

    assert_same_run(Setting(), step)


def narrow_precision() -> dict[str, Any]:
    precision = nn.parallel.distributed._MixedPrecision
    return {"mixed_precision": precision(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)}


def test_mixed_precision_gives_the_bits_of_whole_gradients(ranks2: Ranks) -> None:
    ranks2.run(trains_alike, Setting(options=narrow_precision()))


@on_ranks(2)
def test_state_dicts_are_those_of_a_run_with_whole_gradients() -> None:
    (whole, one), (sharded, other) = Setting().whole(), Setting().sharded()
    for number in range(2):
        for model, optimizer in ((whole, one), (sharded, other)):
            optimizer.zero_grad()
            loss_of(model, number).backward()
            optimizer.step()
    for optimizer in (one, other):
        optimizer.consolidate_state_dict(to=0)
    if dist.get_rank() == 0:
        assert_same_state(other.state_dict(), one.state_dict())
        other.load_state_dict(one.state_dict(), src=0)
    else:
        other.load_state_dict(None, src=0)
    for model, optimizer in ((whole, one), (sharded, other)):
        plain_step(model, optimizer, 2)
    assert list(sharded.state_dict()) == list(whole.state_dict())
    for name, value in whole.state_dict().items():
        assert torch.equal(sharded.state_dict()[name], value), name


@on_ranks(2)
def test_a_graph_can_be_gone_through_twice() -> None:
    def step(model: nn.Module, optimizer: ZeroRedundancyOptimizer, number: int) -> None:
        optimizer.zero_grad()
        loss = loss_of(model, number)
        loss.backward(retain_graph=True)
        optimizer.zero_grad()
        (loss * 0.5).backward()
        optimizer.step()

    assert_same_run(Setting(), step)


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
