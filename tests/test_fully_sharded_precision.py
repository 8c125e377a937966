"""Fully sharded models compute in one dtype, reduce in another, and step what owners keep, not rounded."""

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from fully import NARROW, Tower, adamw, assert_equal, batch, fully, state_of
from pool import on_ranks
from zero_optim import RankMismatchError, ZeroRedundancyOptimizer, checkpoint
from zero_optim.ddp import (
    DistributedDataParallel,
    FullyShardedDataParallel,
    PrecisionPolicy,
    full_state_dict,
    unsharded,
)
from zero_optim.step.leaves import MASTER

BF16, FP32 = torch.bfloat16, torch.float32
NEEDS_COMPILER = pytest.mark.skipif(
    not any(map(shutil.which, ("c++", "g++", "clang++"))), reason="inductor needs a C++ compiler"
)


def wrapped(policy: object, how: str = "", **options: Any) -> tuple[Any, ZeroRedundancyOptimizer]:
    return fully(Tower(how=how), mixed_precision=policy, **options)


def as_kept(model: Any) -> dict[str, Tensor]:
    state = state_of(model)
    assert {tensor.dtype for tensor in state.values()} == {FP32}
    return state


def steps(model: nn.Module, optimizer: Any, some: range, passes: int = 1, most: float = 0.5) -> None:
    """Train; `ByHand` reduces and clips by itself."""
    by_hand = model if isinstance(model, ByHand) else None
    for step in some:
        optimizer.zero_grad()
        for number in range(passes):
            model(batch(10 * step + number)).square().mean().backward()
            if by_hand:
                by_hand.reduce()
        if by_hand:
            nn.utils.clip_grad_norm_(by_hand.masters.parameters(), most)
        else:
            optimizer.clip_grad_norm_(most)
        optimizer.step()


class ByHand(nn.Module):
    """The same training, written out: whole parameters in float32, rounded for each pass."""

    def __init__(self, dtype: torch.dtype, reduce_dtype: torch.dtype, width: int = 24) -> None:
        super().__init__()
        self.masters, self.narrow = Tower(width), Tower(width).to(dtype)
        self.dtype, self.reduce_dtype = dtype, reduce_dtype
        self.optimizer = torch.optim.AdamW(self.masters.parameters(), lr=1e-2)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            for own, master in zip(self.narrow.parameters(), self.masters.parameters(), strict=True):
                own.copy_(master)
        return self.narrow(x.to(self.dtype)).to(FP32)

    def reduce(self) -> None:
        """Add the ranks' gradients up, in their order, to what is there."""
        for own, master in zip(self.narrow.parameters(), self.masters.parameters(), strict=True):
            grads = [torch.empty_like(own) for _ in range(dist.get_world_size())]
            dist.all_gather(grads, own.grad)
            shares = [grad.to(FP32) * (1 / len(grads)) for grad in grads]
            total = shares[0]
            for share in shares[1:]:
                total = total + share
            kept = total.to(self.reduce_dtype).to(FP32)  # one rounding
            master.grad = kept if master.grad is None else master.grad + kept
            own.grad = None


# ---------------------------------------------------------------------- bits


@on_ranks(2)
def test_a_policy_of_the_models_own_dtype_changes_no_bit() -> None:
    policy = PrecisionPolicy(FP32, FP32, FP32, FP32, FP32, "units")
    (plain, one), (model, other) = wrapped(None), wrapped(policy)
    steps(plain, one, range(3))
    steps(model, other, range(3))
    assert_equal(as_kept(model), as_kept(plain))


@on_ranks(2, slow=4)
@pytest.mark.parametrize(
    ("policy", "how", "passes", "autocast"),
    [
        (NARROW, "not reentrant", 1, False),
        pytest.param(NARROW, "reentrant", 1, False, marks=pytest.mark.exhaustive),
        (NARROW, "", 3, False),
        (NARROW, "", 1, True),
        (PrecisionPolicy(params=BF16, outputs=FP32), "", 2, False),
    ],
)
def test_bits_are_those_of_masters(policy: PrecisionPolicy, how: str, passes: int, autocast: bool) -> None:
    hand = ByHand(policy.params or FP32, policy.reduce_dtype or policy.params or FP32)
    model, optimizer = wrapped(policy, how)
    assert {param.dtype for param in model.parameters()} == {policy.params}
    for step in range(3):
        with torch.autocast("cpu", dtype=BF16, enabled=autocast):
            steps(hand, hand.optimizer, range(step, step + 1), passes)
            steps(model, optimizer, range(step, step + 1), passes)
        assert_equal(as_kept(model), hand.masters.state_dict())
    assert model.units.nbytes_live() == 0


# torch.compile warns of its own innards here and there.
@on_ranks(2, timeout=250)
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "backend", ["aot_eager", pytest.param("inductor", marks=[pytest.mark.exhaustive, NEEDS_COMPILER])]
)
@pytest.mark.slow
def test_compiled_units_have_the_bits_of_the_same_units_that_are_whole(backend: str) -> None:
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()  # of other tests in these processes
    hand, model = ByHand(BF16, FP32), Tower()
    for block in (*hand.narrow.blocks, *model.blocks):
        block.compile(backend=backend)
    sharded, optimizer = fully(model, mixed_precision=NARROW)
    for step in range(3):
        steps(hand, hand.optimizer, range(step, step + 1))
        steps(sharded, optimizer, range(step, step + 1))
        assert_equal(as_kept(sharded), hand.masters.state_dict())
    assert sharded.units.nbytes_live() == 0
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"]
    assert not torch._dynamo.utils.counters["graph_break"]


@on_ranks(2)
def test_cut_parameters_keep_the_bits() -> None:
    hand, tower = ByHand(BF16, FP32, width=96), Tower(96)
    model, optimizer = fully(tower, units=[block.up for block in tower.blocks], mixed_precision=NARROW)
    assert any(len(pieces) > 1 for pieces in optimizer.pieces().values())
    norms = []  # those of cut gradients differ in the last bits
    for step in range(2):
        steps(hand, hand.optimizer, range(step, step + 1), most=1e9)
        steps(model, optimizer, range(step, step + 1), most=1e9)
        norms.append(optimizer.clip_grad_norm_(1e9))
        assert norms[-1].dtype == FP32
        assert_equal(as_kept(model), hand.masters.state_dict())
    wanted = torch.nn.utils.clip_grad_norm_(hand.masters.parameters(), 1e9)
    assert torch.allclose(norms[-1], wanted, rtol=1e-5)


@on_ranks(2)
def test_averages_are_those_of_what_owners_keep() -> None:
    model = Tower()
    model.blocks[0].requires_grad_(False)
    wrapper, optimizer = fully(model, adamw(model, ema_decay=0.5), mixed_precision=NARROW)
    want = as_kept(wrapper)
    assert_equal(want, Tower().state_dict())  # what is frozen is not rounded either
    for step in range(2):
        steps(wrapper, optimizer, range(step, step + 1))
        for name, value in as_kept(wrapper).items():
            want[name] = want[name].lerp(value, 0.5)
    with optimizer.averaged_weights():
        assert_equal(as_kept(wrapper), want)
        assert wrapper(batch(0)).isfinite().all()


# ---------------------------------------------------------------------- what is sent, kept and shown


@on_ranks(2)
def test_gathers_send_half_the_bytes_and_owners_keep_one_copy() -> None:
    sent = []
    for policy in (None, NARROW):
        model, optimizer = wrapped(policy)
        optimizer.metrics()
        model.metrics()
        steps(model, optimizer, range(2))
        sent.append((optimizer.metrics()["sent_bytes/gather"], model.metrics()["sent_bytes/reduce"]))
        rows = sum(bucket.row.nbytes for unit in model.units.units for bucket in unit.buckets)
        sent[-1] = (*sent[-1], rows)
    (whole, reduced, rows), (half, same, same_rows) = sent
    assert 0.45 * whole <= half <= 0.55 * whole  # padding differs
    assert reduced * 0.9 <= same <= reduced * 1.1
    assert rows * 0.9 <= same_rows <= rows * 1.1


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
    [
        ({}, BF16, BF16),
        ({"inputs": FP32, "outputs": FP32}, FP32, FP32),
        ({"casts_inputs": "nowhere", "outputs": torch.float64}, FP32, torch.float64),
    ],
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
    model, optimizer = wrapped(NARROW)
    steps(model, optimizer, range(2))
    before = as_kept(model)
    assert not torch.equal(before["first.weight"], before["first.weight"].to(BF16).to(FP32))
    with unsharded(model):
        assert torch.equal(model.module.first.weight, before["first.weight"].to(BF16))
    assert_equal(as_kept(model), before)
    with unsharded(model), torch.no_grad():
        model.module.first.weight[0, 0] = 7
    before["first.weight"][0, 0] = 7
    assert_equal(as_kept(model), before)
    with unsharded(model), pytest.raises(RuntimeError, match="leave unsharded"):
        model.module.state_dict()
    steps(model, optimizer, range(2, 3))


# ---------------------------------------------------------------------- state


@on_ranks(2)
def test_state_dicts_have_what_owners_keep_and_load_it_exactly() -> None:
    model, optimizer = wrapped(NARROW)
    steps(model, optimizer, range(2))
    state = as_kept(model)
    other, another = wrapped(NARROW)
    steps(other, another, range(5, 6))
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
        assert whole is not None
        assert_equal(whole, {**state, **part})
    assert other.units.nbytes_live() == 0


@on_ranks(2)
def test_a_state_dict_between_forward_and_backward_changes_nothing() -> None:
    """A state dict made between a forward and its backward pass changes neither."""
    (plain, one), (model, other) = wrapped(NARROW), wrapped(NARROW)
    for wrapper, optimizer, is_read in ((plain, one, False), (model, other, True)):
        losses = []
        for number in range(2):
            losses.append(wrapper(batch(number)).square().mean())
            if is_read:
                as_kept(wrapper)
        (losses[0] + losses[1]).backward()
        optimizer.step()
    assert_equal(as_kept(model), as_kept(plain))


def built(stage: str) -> tuple[Any, ZeroRedundancyOptimizer]:
    if stage == "narrow":
        return wrapped(NARROW)
    model = Tower()
    return DistributedDataParallel(model), adamw(model)


@on_ranks(2)
@pytest.mark.parametrize(
    ("saved", "loaded"),
    [
        pytest.param("narrow", "narrow", marks=pytest.mark.exhaustive),
        ("narrow", "plain"),
        ("plain", "narrow"),
    ],
)
def test_checkpoints_have_what_owners_keep(tmp_path: Path, saved: str, loaded: str) -> None:
    model, optimizer = built(saved)
    steps(model, optimizer, range(2))
    checkpoint.save(tmp_path / "saved", model=model, optimizer=optimizer)
    want = as_kept(model)
    other, another = built(loaded)
    steps(other, another, range(5, 6))
    checkpoint.load(tmp_path / "saved", model=other, optimizer=another)
    assert_equal(as_kept(other), want)
    steps(other, another, range(2, 4))
    if saved == loaded:
        steps(model, optimizer, range(2, 4))
        assert_equal(as_kept(other), as_kept(model))


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
    other, another = wrapped(NARROW)
    checkpoint.load(tmp_path / "saved", model=other, optimizer=another)
    state = as_kept(other)
    assert own
    assert_equal({name: state[name] for name in own}, own)
    steps(other, another, range(1))


# ---------------------------------------------------------------------- GradScaler


@on_ranks(2)
@pytest.mark.parametrize("unscales", [False, True])
def test_a_scaler_and_half_precision_skip_on_all_ranks_and_keep_the_bits(unscales: bool) -> None:
    policy = PrecisionPolicy(params=torch.float16, gradients=FP32, outputs=FP32)
    model, optimizer = wrapped(policy)
    hand = ByHand(torch.float16, FP32)
    scaler, own = (torch.amp.GradScaler("cpu", init_scale=2.0**8, growth_interval=2) for _ in range(2))
    for step in range(4):
        factor = 1e30 if step == 2 and dist.get_rank() == 1 else 1.0  # an infinity on one rank
        for each, its, optimizers in ((model, scaler, optimizer), (hand, own, hand.optimizer)):
            optimizers.zero_grad()
            its.scale(each(batch(step)).square().mean() * factor).backward()
            if each is hand:
                hand.reduce()
            if unscales:
                its.unscale_(optimizers)
                if each is hand:
                    torch.nn.utils.clip_grad_norm_(hand.masters.parameters(), 0.5)
                else:
                    optimizer.clip_grad_norm_(0.5)
            its.step(optimizers)
            its.update()
        assert scaler.get_scale() == own.get_scale(), step
        assert_equal(as_kept(model), hand.masters.state_dict())


# ---------------------------------------------------------------------- refusals


class FSDP1:
    param_dtype, reduce_dtype, buffer_dtype = BF16, FP32, None
    keep_low_precision_grads = False
    cast_forward_inputs, cast_root_forward_inputs = False, True
    _module_classes_to_ignore = (nn.LayerNorm,)


class KeepsLow(FSDP1):
    keep_low_precision_grads = True


def halved() -> nn.Module:
    return Tower().to(torch.float16)


def sparse() -> nn.Module:
    return nn.Embedding(4, 4, sparse=True)


@on_ranks(2)
@pytest.mark.parametrize(
    ("policy", "error", "message", "how"),
    [
        ("bfloat16", TypeError, "to be a zero_optim.ddp.PrecisionPolicy or", {}),
        (FSDP1(), ValueError, "leaves out modules of some classes, as blocks.0.norm", {}),
        (KeepsLow(), ValueError, "keep_low_precision_grads=True is not possible", {}),
        (NARROW, ValueError, "cannot hold what owners keep of first.weight", {"model": halved}),
        (NARROW, ValueError, "does not go with sparse gradients", {"model": sparse}),
        (
            NARROW,
            ValueError,
            "adds up the gradients of several passes in torch.bfloat16",
            {"accumulate": "local"},
        ),
        (
            NARROW,
            RankMismatchError,
            "the arguments of FullyShardedDataParallel: rank 0 has mixed_precision: ",
            {"on_one": True},
        ),
    ],
)
def test_what_makes_no_sense_is_refused_on_every_rank(
    policy: object, error: type[Exception], message: str, how: dict[str, Any]
) -> None:
    model = how.pop("model", Tower)()
    optimizer = adamw(model)
    if how.pop("on_one", False) and dist.get_rank() == 0:
        policy = None
    with pytest.raises(error, match=message):
        FullyShardedDataParallel(model, optimizer, mixed_precision=policy, **how)


@pytest.mark.parametrize(
    ("error", "message", "options"),
    [
        (TypeError, "expected params to be a torch.dtype or None", {"params": "bf16"}),
        (ValueError, "expected gradients to be None or one of", {"gradients": torch.int32}),
        (ValueError, "expected casts_inputs to be one of", {"casts_inputs": "here"}),
        (ValueError, "has no effect with", {"inputs": BF16, "casts_inputs": "nowhere"}),
    ],
)
def test_a_policy_checks_itself(error: type[Exception], message: str, options: dict[str, Any]) -> None:
    with pytest.raises(error, match=message):
        PrecisionPolicy(**options)


def test_pytorchs_policies_are_read() -> None:
    fsdp: Any = torch.distributed.fsdp
    model = nn.Linear(2, 2)
    two = fsdp.MixedPrecisionPolicy(param_dtype=BF16, reduce_dtype=FP32, output_dtype=FP32)
    assert PrecisionPolicy.of(two, model) == PrecisionPolicy(BF16, FP32, outputs=FP32, casts_inputs="units")
    one = fsdp.MixedPrecision(param_dtype=BF16, buffer_dtype=BF16)
    assert PrecisionPolicy.of(one, model) == PrecisionPolicy(BF16, buffers=BF16)
    plain: Any = torch.nn.parallel.distributed._MixedPrecision
    assert PrecisionPolicy.of(plain(BF16, FP32), model) == PrecisionPolicy(BF16, FP32)
