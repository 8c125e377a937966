"""Master copies, averaged weights, and gradient scaling."""

import math
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from cuts import cut_over
from pool import on_ranks
from sync_calls import cpu_as_accelerator
from training import (
    MIXED,
    agreeing_scaler,
    assert_same_bits,
    assert_same_state,
    make_params,
    set_grads,
    sgd,
    train,
    whole,
)
from zero_optim import ZeroRedundancyOptimizer, checkpoint
from zero_optim.plan.pieces import rows_of
from zero_optim.step.averages import EMA
from zero_optim.step.leaves import MASTER


def low_precision(dtype: torch.dtype) -> list[nn.Parameter]:
    """Parameters of two dtypes: most narrow, one wide enough to need no master."""
    return [*make_params(MIXED, dtype), *make_params(((4, 4),), seed=9)]


@on_ranks(2)
@pytest.mark.parametrize(
    ("dtype", "view"), [(torch.bfloat16, False), (torch.float16, True)], ids=["bf16, packed", "fp16, view"]
)
def test_narrow_parameters_are_stepped_through_masters_of_their_owner(dtype: torch.dtype, view: bool) -> None:
    """Against a plain fp32 optimizer over copies, rounded after each step, gradients widened."""
    params = low_precision(dtype)
    wide = [nn.Parameter(p.detach().float()) for p in params]
    plain = torch.optim.AdamW(wide, lr=0.01)
    sharded = ZeroRedundancyOptimizer(
        params, torch.optim.AdamW, parameters_as_bucket_view=view, master_dtype=torch.float32, lr=0.01
    )
    for step in range(5):
        set_grads(params, step)
        for p, q in zip(params, wide, strict=True):
            q.grad = None if p.grad is None else p.grad.float()
        plain.step()
        sharded.step()
        assert_same_bits(params, [q.to(p.dtype) for p, q in zip(params, wide, strict=True)])
    owned = sharded.owned_parameters()
    masters = [entries[MASTER] for entries in sharded.state.values() if MASTER in entries]
    assert len(masters) == sum(p.dtype == dtype for p in owned)  # the owner alone holds one
    assert all(master.dtype == torch.float32 for master in masters)
    assert sharded.state_nbytes() >= sum(3 * 4 * p.numel() for p in owned if p.dtype == dtype)

    saved = whole(sharded)
    for index, q in enumerate(wide[:-1]):
        assert torch.equal(saved["state"][index][MASTER], q)
    assert MASTER not in saved["state"][len(wide) - 1]


@on_ranks(2)
def test_a_stale_master_does_not_undo_what_was_loaded_into_the_model() -> None:
    params = low_precision(torch.bfloat16)
    sharded = ZeroRedundancyOptimizer(params, torch.optim.SGD, master_dtype=torch.float32, lr=0.0)
    set_grads(params, 0)
    sharded.step()
    for p in params:
        p.data.fill_(3.0)  # as a checkpoint loaded into the model does
    set_grads(params, 1)
    sharded.step()
    assert all(bool((p == 3.0).all()) for p in params)


@on_ranks(1, 2)
@pytest.mark.parametrize("pretend_asynchronous", [False, True], ids=["cpu", "asynchronous"])
def test_a_row_written_after_each_step_leaves_the_other_masters_alone(pretend_asynchronous: bool) -> None:
    """A padding row that the script zeroes after each step, and a NaN; the rest follows an fp32 run."""
    param = nn.Parameter(torch.randn(64, 8).to(torch.bfloat16))  # of two ranks each owns half
    wide = nn.Parameter(param.detach().float())
    plain = torch.optim.SGD([wide], lr=2.0**-12)
    sharded = cut_over([param], torch.optim.SGD, master_dtype=torch.float32, lr=2.0**-12)
    with cpu_as_accelerator() if pretend_asynchronous else nullcontext():
        for _ in range(40):
            param.grad, wide.grad = torch.ones_like(param), torch.ones_like(wide)
            plain.step()
            sharded.step()
            with torch.no_grad():
                for p in (param, wide):
                    p[0] = 0.0
                    p[60, 0] = math.nan
    assert_same_bits([param.nan_to_num()], [wide.to(torch.bfloat16).nan_to_num()])
    piece = sharded.pieces()[param][dist.get_rank()]
    master, expected = sharded.state[param][MASTER], rows_of(wide, piece)
    assert torch.equal(master[1:28], expected[1:28])


@on_ranks(2)
def test_an_average_that_does_not_fit_on_one_rank_is_refused_on_all() -> None:
    """What does not fit is the entry of one rank's parameter alone, in a dict that all ranks give."""
    params = make_params()
    sharded = sgd(params, ema_decay=0.5, momentum=0.9)
    set_grads(params, 0)
    sharded.step()
    sharded.consolidate_state_dict(to=None)
    before = sharded.state_dict()
    index = list(sharded.owners().values()).index(1)
    bad = {**before, "state": {**before["state"], index: {**before["state"][index], EMA: torch.zeros(1)}}}
    with pytest.raises(ValueError, match=f"expected '{EMA}' of a parameter of shape"):
        sharded.load_state_dict(bad)
    sharded.consolidate_state_dict(to=None)
    assert_same_state(sharded.state_dict(), before)


@on_ranks(2)
@pytest.mark.parametrize("master_dtype", [None, torch.float32], ids=["fp32", "bf16 with masters"])
def test_averages_are_held_by_owners_shown_while_frozen_and_not_trained_on(
    master_dtype: torch.dtype | None,
) -> None:
    params = make_params(dtype=torch.float32 if master_dtype is None else torch.bfloat16)
    options: dict[str, Any] = {"ema_decay": 0.9, "master_dtype": master_dtype, "lr": 0.1}
    sharded = ZeroRedundancyOptimizer(params, torch.optim.SGD, **options)
    train(sharded, 0, 4)
    with sharded.averaged_weights():
        averages = [p.detach().clone() for p in params]
        load = partial(sharded.load_owned_state, sharded.owned_state(), sharded.param_groups)
        for call in (sharded.step, load):
            with pytest.raises(RuntimeError, match="leave averaged_weights"):
                call()
    params[0].requires_grad_(False)
    with sharded.averaged_weights():
        assert_same_bits(params, averages, "averaged while frozen")
    held = [entries[EMA] for entries in sharded.state.values()]
    assert sum(e.numel() for e in held) == sum(p.numel() for p in sharded.owned_parameters())


@on_ranks(2)
def test_options_that_make_no_sense_are_refused() -> None:
    params = make_params()
    with pytest.raises(RuntimeError, match="ema_decay"), sgd(params).averaged_weights():
        pass
    for options in ({"ema_decay": 1.0}, {"ema_decay": -0.1}, {"master_dtype": torch.int8}):
        with pytest.raises(ValueError, match=r"expected (ema_decay|master_dtype)"):
            sgd(params, **options)


@on_ranks(2)
def test_a_gradient_scaler_takes_its_factor_out_of_sparse_gradients() -> None:
    """Indices repeat, so the gradient is not coalesced; step 1 has an infinity on one rank."""
    moved = []
    for sharded in (False, True):
        torch.manual_seed(0)
        words = nn.Embedding(10, 3, sparse=True)
        optimizer: Any = (sgd if sharded else torch.optim.SGD)([*words.parameters()], lr=1.0)
        scaler = (agreeing_scaler if sharded else torch.amp.GradScaler)("cpu", init_scale=2.0**10)
        for step in range(3):
            optimizer.zero_grad()
            loss = words(torch.tensor([1, 1, 2, step])).sum()
            factor = math.inf if step == 1 and (not sharded or dist.get_rank() == 1) else 1.0
            scaler.scale(loss * factor).backward()
            assert not words.weight.grad.is_coalesced()
            scaler.step(optimizer)
            scaler.update()
        moved.append(words.weight.detach())
    assert_same_bits(moved[1:], moved[:1])


@on_ranks(2)
def test_a_class_that_joins_parameters_of_several_dtypes_is_refused_in_one_group() -> None:
    def params() -> list[nn.Parameter]:
        return low_precision(torch.bfloat16)

    with pytest.raises(ValueError, match="expected parameters of one dtype in each group, as Adafactor"):
        ZeroRedundancyOptimizer(params(), torch.optim.Adafactor)
    sharded, plain = params(), params()
    of_dtypes = [[{"params": each[:-1]}, {"params": each[-1:]}] for each in (sharded, plain)]
    ours, theirs = (
        ZeroRedundancyOptimizer(of_dtypes[0], torch.optim.Adafactor),
        torch.optim.Adafactor(of_dtypes[1]),
    )
    for step in range(3):
        for each in (sharded, plain):
            set_grads(each, step, 1e-6)
        ours.step()
        theirs.step()
        assert_same_bits(sharded, plain, step)


@on_ranks(2)
@pytest.mark.parametrize("kind", ["SGD", "RMSprop", "AdamW"])
def test_a_checkpoint_of_another_dtype_or_of_masters_is_cast_as_load_state_dict_does(
    tmp_path: Path, kind: str
) -> None:
    momentum, wide, narrow = {"momentum": 0.9} if kind == "SGD" else {}, torch.float32, torch.bfloat16

    def build(dtype: torch.dtype, master: torch.dtype | None) -> tuple[nn.Module, ZeroRedundancyOptimizer]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False)).to(dtype)
        options = {**momentum, "lr": 0.1, "master_dtype": master}
        optimizer_class = getattr(torch.optim, kind)
        return model, ZeroRedundancyOptimizer(model.named_parameters(), optimizer_class, **options)

    def step(model: nn.Module, optimizer: ZeroRedundancyOptimizer) -> dict[str, Any]:
        set_grads(list(model.parameters()), 1)
        optimizer.step()
        optimizer.consolidate_state_dict(to=None)
        return optimizer.state_dict()

    for number, (saved, here) in enumerate(
        [
            ((wide, None), (narrow, None)),
            ((narrow, None), (wide, None)),
            ((narrow, wide), (narrow, None)),
            ((narrow, None), (narrow, wide)),
        ]
    ):
        model, optimizer = build(*saved)
        whole = step(model, optimizer)
        checkpoint.save(tmp_path / str(number), model=model, optimizer=optimizer)
        loaded, expected = build(*here), build(*here)
        checkpoint.load(tmp_path / str(number), model=loaded[0], optimizer=loaded[1])
        expected[0].load_state_dict(model.state_dict())
        expected[1].load_state_dict(whole)
        assert_same_state(step(*loaded), step(*expected))
        assert_same_bits(list(loaded[0].parameters()), list(expected[0].parameters()))
