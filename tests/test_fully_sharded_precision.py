"""Fully sharded models compute in one dtype, reduce in another, and step what owners keep, not rounded."""

import gc
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from fully import NARROW, Tower, adamw, assert_equal, batch, fully, loss_of, on_meta, state_of, train
from meshes import mesh_of
from parity_reference import summed
from pool import on_ranks
from zero_optim import ZeroRedundancyOptimizer, checkpoint
from zero_optim.ddp import FullyShardedDataParallel, PrecisionPolicy, full_state_dict, unsharded
from zero_optim.step.leaves import MASTER

BF16, FP32 = torch.bfloat16, torch.float32


def as_kept(model: Any) -> dict[str, Tensor]:
    state = state_of(model)
    assert {tensor.dtype for tensor in state.values()} == {FP32}
    return state


def nbytes_alive() -> int:
    gc.collect()
    tensors = [each for each in gc.get_objects() if type(each) in (Tensor, nn.Parameter)]
    return sum({each.untyped_storage()._cdata: each.untyped_storage().nbytes() for each in tensors}.values())


class ByHand(nn.Module):
    """The same training, written out: whole parameters in float32, rounded for each pass; it steps too."""

    def __init__(self, policy: PrecisionPolicy, width: int = 24, replicas: int = 1) -> None:
        super().__init__()
        self.masters, self.narrow = Tower(width), Tower(width).to(policy.params)
        self.reduce_dtype, self.replicas = policy.reduce_dtype or policy.params, replicas
        self.optimizer = torch.optim.AdamW(self.masters.parameters(), lr=1e-2)
        self.step, self.zero_grad = self.optimizer.step, self.optimizer.zero_grad  # type: ignore[assignment]
        self.clip_grad_norm_ = partial(nn.utils.clip_grad_norm_, [*self.masters.parameters()])
        for own, master in zip(self.narrow.parameters(), self.masters.parameters(), strict=True):
            own.register_post_accumulate_grad_hook(partial(self.reduce, master))

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            for own, master in zip(self.narrow.parameters(), self.masters.parameters(), strict=True):
                own.copy_(master)
        return self.narrow(x.to(self.narrow.last.weight.dtype)).to(FP32)

    def reduce(self, master: Tensor, own: Tensor) -> None:
        """Add the ranks' gradients up, in their order inside a replica, to what is there."""
        grads = [torch.empty_like(own) for _ in range(dist.get_world_size())]
        dist.all_gather(grads, own.grad)
        shares = [grad.to(FP32) * (1 / len(grads)) for grad in grads]
        inner = len(grads) // self.replicas
        sums = [summed(shares[first : first + inner]) for first in range(0, len(grads), inner)]
        total = summed(sums).to(self.reduce_dtype).to(FP32)  # one rounding
        master.grad = total if master.grad is None else master.grad + total
        own.grad = None


def trains_as_by_hand(
    hand: ByHand, model: Any, optimizer: Any, *, most: float = 0.5, passes: int = 1
) -> None:
    for step in range(3):
        for each, steps in ((hand, hand), (model, optimizer)):
            train(each, steps, range(step, step + 1), most=most, passes=passes)
        assert_equal(as_kept(model), hand.masters.state_dict())
    assert model.units.nbytes_live() == 0


# ---------------------------------------------------------------------- bits


@on_ranks(2)
def test_a_policy_of_the_models_own_dtype_changes_no_bit() -> None:
    policy = PrecisionPolicy(FP32, FP32, FP32, FP32, FP32, "units")
    (plain, one), (model, other) = fully(mixed_precision=None), fully(mixed_precision=policy)
    train(plain, one, range(3))
    train(model, other, range(3))
    assert_equal(as_kept(model), as_kept(plain))


@on_ranks(2)
def test_state_dicts_leave_no_memory_behind() -> None:
    model, _ = fully(mixed_precision=NARROW)
    loss_of(model, 0)
    before = nbytes_alive()
    state = model.state_dict()
    model.load_state_dict(state)
    del state
    assert nbytes_alive() <= before


@on_ranks(2, slow=4)
@pytest.mark.parametrize(
    ("policy", "how", "passes", "autocast"),
    [
        (NARROW, "not reentrant", 1, False),
        (NARROW, "", 3, False),
        (NARROW, "", 1, True),
        (PrecisionPolicy(params=BF16, outputs=FP32), "", 2, False),
    ],
)
def test_bits_are_those_of_masters(policy: PrecisionPolicy, how: str, passes: int, autocast: bool) -> None:
    hand, (model, optimizer) = ByHand(policy), fully(Tower(how=how), mixed_precision=policy)
    assert {param.dtype for param in model.parameters()} == {policy.params}
    with torch.autocast("cpu", dtype=BF16, enabled=autocast):
        trains_as_by_hand(hand, model, optimizer, passes=passes)


@on_ranks(4)
@pytest.mark.parametrize("cuts", [True, False])
def test_a_model_from_the_meta_device_wrapped_first_over_a_mesh_has_the_same_bits(cuts: bool) -> None:
    """Without cuts the owners change when the optimizer is built."""
    hand = ByHand(NARROW, width=48, replicas=2)
    tower = on_meta(Tower, 48)
    model: Any = FullyShardedDataParallel(
        tower, units=[*tower.blocks], mixed_precision=NARROW, mesh=mesh_of(2)
    )
    assert_equal(as_kept(model), hand.masters.state_dict())
    optimizer = adamw(model, cuts=cuts)
    assert_equal(as_kept(model), hand.masters.state_dict())  # the values have moved, unrounded
    trains_as_by_hand(hand, model, optimizer, most=1e9)


# torch.compile warns of its own innards here and there.
@on_ranks(2, timeout=250)
@pytest.mark.filterwarnings("ignore")
@pytest.mark.slow
def test_compiled_units_have_the_bits_of_the_same_units_that_are_whole() -> None:
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()  # of other tests in these processes
    hand, model = ByHand(NARROW), Tower()
    for block in (*hand.narrow.blocks, *model.blocks):
        block.compile(backend="aot_eager")
    trains_as_by_hand(hand, *fully(model, mixed_precision=NARROW))
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"]
    assert not torch._dynamo.utils.counters["graph_break"]


@on_ranks(2)
def test_cut_parameters_keep_the_bits() -> None:
    hand, tower = ByHand(NARROW, width=96), Tower(96)
    model, optimizer = fully(tower, units=[block.up for block in tower.blocks], mixed_precision=NARROW)
    assert any(len(pieces) > 1 for pieces in optimizer.pieces().values())
    trains_as_by_hand(hand, model, optimizer, most=1e9)  # norms of cut gradients differ in the last bits
    norm = optimizer.clip_grad_norm_(1e9)
    assert norm.dtype == FP32
    assert torch.allclose(norm, hand.clip_grad_norm_(1e9), rtol=1e-5)


@on_ranks(2)
def test_a_scaler_and_half_precision_skip_on_all_ranks_and_keep_the_bits() -> None:
    policy = PrecisionPolicy(params=torch.float16, gradients=FP32, outputs=FP32)
    (model, optimizer), hand = fully(mixed_precision=policy), ByHand(policy)
    scaler, own = (torch.amp.GradScaler("cpu", init_scale=2.0**8, growth_interval=2) for _ in range(2))
    for step in range(4):
        factor = 1e30 if step == 2 and dist.get_rank() == 1 else 1.0  # an infinity on one rank
        for each, its, steps, clips in (
            (model, scaler, optimizer, optimizer),
            (hand, own, hand.optimizer, hand),
        ):
            steps.zero_grad()
            its.scale(loss_of(each, step) * factor).backward()
            its.unscale_(steps)
            clips.clip_grad_norm_(0.5)
            its.step(steps)
            its.update()
        assert scaler.get_scale() == own.get_scale(), step
        assert_equal(as_kept(model), hand.masters.state_dict())


@on_ranks(2)
def test_averages_are_those_of_what_owners_keep() -> None:
    model = Tower()
    model.blocks[0].requires_grad_(False)
    wrapper, optimizer = fully(model, adamw(model, ema_decay=0.5), mixed_precision=NARROW)
    want = as_kept(wrapper)
    assert_equal(want, Tower().state_dict())  # what is frozen is not rounded either
    for step in range(2):
        train(wrapper, optimizer, range(step, step + 1))
        for name, value in as_kept(wrapper).items():
            want[name] = want[name].lerp(value, 0.5)
    with optimizer.averaged_weights():
        assert_equal(as_kept(wrapper), want)
        assert wrapper(batch(0)).isfinite().all()


# ---------------------------------------------------------------------- what is sent, kept and shown


class Looks(nn.Module):
    """Notes the dtypes that it meets."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)
        self.frozen = nn.Linear(4, 4).requires_grad_(False)
        self.register_buffer("scale", torch.ones(4))
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))
        self.seen: dict[str, torch.dtype] = {}

    def forward(self, x: Tensor, *, more: dict[str, Any]) -> dict[str, Any]:
        self.seen = {"x": x.dtype, "more": more["float"].dtype, "int": more["int"].dtype}
        hidden = self.frozen(x.to(BF16))
        return {"y": [self.inner(hidden) * self.scale], "n": more["int"]}


@on_ranks(2)
@pytest.mark.parametrize(
    ("options", "seen", "given"),
    [({}, BF16, BF16), ({"casts_inputs": "nowhere", "outputs": torch.float64}, FP32, torch.float64)],
)
def test_inputs_outputs_and_buffers_are_cast(options: Any, seen: torch.dtype, given: torch.dtype) -> None:
    policy = PrecisionPolicy(params=BF16, buffers=BF16, **options)
    model = Looks()
    optimizer = ZeroRedundancyOptimizer(model.inner.parameters(), torch.optim.SGD, lr=0.1)
    wrapper = FullyShardedDataParallel(model, optimizer, units=[model.inner], mixed_precision=policy)
    out = wrapper(torch.ones(2, 4), more={"float": torch.ones(2), "int": torch.ones(2).long()})
    assert model.seen == {"x": seen, "more": seen, "int": torch.int64}
    assert (out["y"][0].dtype, out["n"].dtype) == (given, torch.int64)
    assert (model.scale.dtype, model.count.dtype) == (BF16, torch.int64)
    assert model.frozen.weight.dtype == model.inner.weight.dtype == BF16
    out["y"][0].float().sum().backward()
    optimizer.step()


class Wide(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.first(x).float())


@on_ranks(2)
def test_inputs_of_units_are_cast_where_that_is_asked_for() -> None:
    model, policy = Wide(), PrecisionPolicy(params=BF16, casts_inputs="units")
    wrapper, _ = fully(model, units=[model.first, model.last], mixed_precision=policy)
    assert wrapper(torch.ones(2, 4)).dtype == BF16


@on_ranks(2)
def test_what_is_not_written_to_is_not_rounded() -> None:
    model, optimizer = fully(mixed_precision=NARROW)
    train(model, optimizer, range(2))
    before = as_kept(model)
    assert not torch.equal(before["first.weight"], before["first.weight"].to(BF16).to(FP32))
    with unsharded(model):
        assert torch.equal(model.module.first.weight, before["first.weight"].to(BF16))
    assert_equal(as_kept(model), before)
    with unsharded(model), torch.no_grad():
        model.module.first.weight[0, 0] = 7
    before["first.weight"][0, 0] = 7
    assert_equal(as_kept(model), before)


# ---------------------------------------------------------------------- state


@on_ranks(2)
def test_state_dicts_have_what_owners_keep_and_load_it_exactly() -> None:
    model, optimizer = fully(mixed_precision=NARROW)
    train(model, optimizer, range(2))
    state = as_kept(model)
    other, another = fully(mixed_precision=NARROW)
    train(other, another, range(5, 6))
    loss = other(batch(0)).sum()
    other.module.load_state_dict(state)
    assert_equal(as_kept(other), state)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()
    part = {"first.bias": torch.full((24,), 1 + 2**-20)}
    assert other.module.load_state_dict(part, strict=False).missing_keys
    assert_equal(as_kept(other), {**state, **part})
    whole = full_state_dict(other, ranks=[1])
    if dist.get_rank() == 1:
        assert_equal(whole, {**state, **part})
    assert other.units.nbytes_live() == 0


@on_ranks(2)
def test_a_state_dict_between_forward_and_backward_changes_nothing() -> None:
    (plain, one), (model, other) = fully(mixed_precision=NARROW), fully(mixed_precision=NARROW)
    for wrapper, optimizer, is_read in ((plain, one, False), (model, other, True)):
        losses = []
        for number in range(2):
            losses.append(wrapper(batch(number)).square().mean())
            if is_read:
                as_kept(wrapper)
        (losses[0] + losses[1]).backward()
        optimizer.step()
    assert_equal(as_kept(model), as_kept(plain))


@on_ranks(2)
@pytest.mark.parametrize(("saved", "loaded"), [(NARROW, None), (None, NARROW)])
def test_checkpoints_have_what_owners_keep(tmp_path: Path, saved: Any, loaded: Any) -> None:
    (model, optimizer), (other, another) = fully(mixed_precision=saved), fully(mixed_precision=loaded)
    train(model, optimizer, 2)
    checkpoint.save(tmp_path / "saved", model=model, optimizer=optimizer)
    want = as_kept(model)
    train(other, another, range(5, 6))
    checkpoint.load(tmp_path / "saved", model=other, optimizer=another)
    assert_equal(as_kept(other), want)
    train(other, another, range(2, 4))


@on_ranks(2)
def test_masters_of_a_checkpoint_become_what_owners_keep(tmp_path: Path) -> None:
    model = Tower()
    for param in model.parameters():
        param.data = param.data.to(BF16)
    optimizer = adamw(model, master_dtype=FP32)
    for step in range(2):
        optimizer.zero_grad()
        model(batch(step).to(BF16)).float().square().mean().backward()
        for param in model.parameters():
            dist.all_reduce(param.grad)
        optimizer.step()
    checkpoint.save(tmp_path / "saved", model=model, optimizer=optimizer)
    names = {param: name for name, param in model.named_parameters()}
    own = {names[param]: entries[MASTER] for param, entries in optimizer.owned_state().items()}
    other, another = fully(mixed_precision=NARROW)
    checkpoint.load(tmp_path / "saved", model=other, optimizer=another)
    state = as_kept(other)
    assert own
    assert_equal({name: state[name] for name in own}, own)
    train(other, another, range(1))
