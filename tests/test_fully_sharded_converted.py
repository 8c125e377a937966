"""A fully sharded model cannot be converted or moved any more; what changes nothing passes."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from pool import on_ranks
from test_fully_sharded import Tower, batch
from test_fully_sharded_models import train
from zero_optim import ZeroRedundancyOptimizer
from zero_optim.ddp import FullyShardedDataParallel, PrecisionPolicy, fully_shard


def loss_of(model: nn.Module, step: int) -> Tensor:
    return model(batch(step)).square().mean()


CONVERSIONS: dict[str, Callable[[Any], object]] = {
    "to another dtype": lambda model: model.to(torch.bfloat16),
    "half": nn.Module.half,
    "a part": lambda model: model.blocks[1].norm.double(),
    "to the meta device": lambda model: model.to("meta"),
    "to other memory": lambda model: model.to_empty(device="cpu"),
    "to other values": lambda model: model._apply(lambda tensor: tensor * 2),
}


@on_ranks(2)
@pytest.mark.parametrize("how", CONVERSIONS)
@pytest.mark.parametrize("in_place", [False, True])
def test_a_conversion_raises_before_anything_was_converted(how: str, in_place: bool) -> None:
    model = Tower()
    model.register_buffer("shift", torch.zeros(2))
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, lr=1e-2)
    sharded = fully_shard if in_place else FullyShardedDataParallel
    wrapped: Any = sharded(model, optimizer, units=[*model.blocks])
    for of in (wrapped, model) if how != "a part" else (model,):
        with pytest.raises(RuntimeError, match=r"cannot be converted or moved.*before it is wrapped"):
            CONVERSIONS[how](of)
    assert model.shift.dtype == torch.float32
    train(wrapped, optimizer, loss_of)


@on_ranks(1)
def test_a_memory_format_is_a_conversion() -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Linear(4, 4))
    FullyShardedDataParallel(model, units=[model[1]])
    with pytest.raises(RuntimeError, match="cannot be converted or moved"):
        model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]


@on_ranks(2)
def test_what_changes_no_parameter_of_a_unit_passes_and_converts_the_rest() -> None:
    model = Tower()
    model.register_buffer("shift", torch.zeros(2, dtype=torch.float64))
    model.first.requires_grad_(False)
    params = [param for param in model.parameters() if param.requires_grad]
    optimizer = ZeroRedundancyOptimizer(params, torch.optim.AdamW, lr=1e-2)
    wrapped = FullyShardedDataParallel(model, optimizer, units=[*model.blocks])
    assert wrapped.to("cpu").float() is wrapped
    assert model.shift.dtype == torch.float32
    assert model.first.double().weight.dtype == torch.float64  # the optimizer does not have it
    model.first.float()
    train(wrapped, optimizer, loss_of)


@on_ranks(2)
def test_a_policy_keeps_the_dtype_of_before() -> None:
    model = Tower()
    policy = PrecisionPolicy(params=torch.bfloat16)
    wrapped = FullyShardedDataParallel(model, units=[*model.blocks], mixed_precision=policy)
    wrapped.float()
    with pytest.raises(RuntimeError, match=r"is torch\.float32 on cpu there, and was to become torch\.bf"):
        wrapped.bfloat16()


@on_ranks(1)
def test_conversions_that_put_others_in_the_place_of_parameters_are_refused() -> None:
    model = Tower()
    FullyShardedDataParallel(model, units=[*model.blocks])
    torch.__future__.set_overwrite_module_params_on_conversion(True)
    try:
        with pytest.raises(RuntimeError, match="puts others in their place"):
            model.double()
    finally:
        torch.__future__.set_overwrite_module_params_on_conversion(False)
