"""What a rank owns of a model on an accelerator may be on the CPU: the bits are the same.

There is no accelerator here. The model of streams takes ordinary tensors for those of a device, and pinned
memory and what the CPU makes of it for the host's. `tests/gpu/offloaded.py` does the same on a GPU.
"""

import copy
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from fully import Tower, assert_equal, batch, state_of
from modelled import StreamsModel, modelled_streams
from pool import on_ranks
from zero_optim import RankMismatchError, ZeroRedundancyOptimizer, checkpoint
from zero_optim.compat.streams import HostCopy
from zero_optim.ddp import FullyShardedDataParallel, PrecisionPolicy, unsharded

CASES: dict[str, dict[str, Any]] = {
    "two passes, scaled, clipped": {"passes": 2, "scales": True, "clips": True},
    "wrapped first, computed in bfloat16": {
        "later": True,
        "mixed_precision": PrecisionPolicy(torch.bfloat16),
    },
    "an optimizer that has stepped": {"before": 2, "of_optimizer": {"ema_decay": 0.9}},
}


def built(model: nn.Module, offload: Any, given: dict[str, Any], early: Sequence[Tensor] = ()) -> Any:
    """Wrap a model; gives wrapper and optimizer, which has taken a step with each early batch before."""
    options = {"units": [*model.blocks], "mixed_precision": given.get("mixed_precision")}  # type: ignore[misc]
    of_optimizer = {"lr": 1e-2, **given.get("of_optimizer", {})}
    if given.get("later"):
        wrapped = FullyShardedDataParallel(model, offload=offload, **options)
        return wrapped, ZeroRedundancyOptimizer(wrapped.parameters(), torch.optim.AdamW, **of_optimizer)
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, **of_optimizer)
    for x in early:
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return FullyShardedDataParallel(model, optimizer, offload=offload, **options), optimizer


def train(
    wrapped: Any, optimizer: ZeroRedundancyOptimizer, inputs: list[Tensor], given: dict[str, Any]
) -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0, enabled=given.get("scales", False))
    passes = given.get("passes", 1)
    for step in range(len(inputs) // passes):
        optimizer.zero_grad()
        for x in inputs[step * passes : (step + 1) * passes]:
            scaler.scale(wrapped(x).square().mean()).backward()
        scaler.unscale_(optimizer)
        if given.get("clips"):
            optimizer.clip_grad_norm_(0.01)
        scaler.step(optimizer)
        scaler.update()


@contextmanager
def loading_beside_leaves() -> Iterator[None]:
    """Have PyTorch bring loaded state to the host, where the leaves of the optimizer are.

    It goes by the name of a leaf's device, which the model's host has in common with its accelerator.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            torch.optim.Optimizer, "_process_value_according_to_param_policy", staticmethod(brought)
        )
        yield


def brought(param: Tensor, value: Tensor, *_: object, **__: object) -> Tensor:
    return HostCopy(value).read() if value.dim() else value


def assert_on_host(streams: StreamsModel, optimizer: ZeroRedundancyOptimizer) -> None:
    """Rows, gradients, state, masters and averages are not on the device."""
    rows = [bucket.values.row.values for bucket in optimizer.core.sharding.row_buckets]
    grads = [getattr(param.grad, "piece", param.grad) for param in optimizer.owned_parameters()]
    beside = [value for entries in optimizer.state.values() for value in entries.values() if value.dim()]
    kinds = {streams.kind_of(each) for each in (*rows, *grads) if each is not None and each.numel()}
    assert kinds == {"pinned"}, kinds
    assert beside
    assert "device" not in map(streams.kind_of, beside)


def assert_ordered(streams: StreamsModel) -> None:
    streams.current_stream.synchronize()
    races = streams.settle()
    # Norms, state that moves and values that are compared are brought to the group's device, and from it, by
    # its name: the model's host has the same one.
    named = ("exchanged", "move", "_packed")
    mixed = [each for each in streams.mixed() if not any(name in each for name in named)]
    assert not races, str(races[0])
    assert not mixed, mixed[0]


def run(given: dict[str, Any], offload: Any) -> dict[str, Tensor]:
    """Train, write and train on; gives the state dict."""
    model, inputs = Tower(), [batch(step) for step in range(6)]
    early = [torch.full((4, 8), 0.5 + step) for step in range(given.get("before", 0))]  # of all ranks
    with modelled_streams(checks=False) if offload else nullcontext() as streams:
        with loading_beside_leaves() if offload else nullcontext():
            wrapped, optimizer = built(model, offload, given, early)
        train(wrapped, optimizer, inputs[:4], given)
        with torch.no_grad(), unsharded(wrapped.module):
            wrapped.module.first.weight.mul_(2)
        train(wrapped, optimizer, inputs[4:], given)
        if streams is not None:
            assert_on_host(streams, optimizer)
            assert wrapped.units.nbytes_live() == 0
        state = state_of(wrapped)
        if given.get("of_optimizer", {}).get("ema_decay"):
            with optimizer.averaged_weights():
                state.update({f"average {name}": value for name, value in state_of(wrapped).items()})
        if streams is not None:
            assert_ordered(streams)
    return state


@on_ranks(2)
@pytest.mark.parametrize("name", CASES)
def test_training_has_the_bits_of_rows_on_the_device(name: str) -> None:
    assert_equal(run(CASES[name], "cpu"), run(CASES[name], None))


@on_ranks(2)
def test_checkpoints_and_state_dicts_are_those_of_rows_on_the_device(tmp_path: Path) -> None:
    model, inputs = Tower(), [batch(step) for step in range(6)]
    plain, one = built(copy.deepcopy(model), None, {})
    train(plain, one, inputs[:2], {})
    checkpoint.save(tmp_path / "plain", model=plain, optimizer=one)
    state = plain.state_dict()
    train(plain, one, inputs[2:4], {})
    want = plain.state_dict()
    with modelled_streams(checks=False) as streams, loading_beside_leaves():
        kept, other = built(copy.deepcopy(model), "cpu", {})
        kept.load_state_dict(state)
        checkpoint.load(tmp_path / "plain", model=kept, optimizer=other)
        train(kept, other, inputs[2:4], {})
        assert_on_host(streams, other)
        assert_equal(kept.state_dict(), want)
        checkpoint.save(tmp_path / "kept", model=kept, optimizer=other)
        own = copy.deepcopy(kept.local_state_dict())
        train(kept, other, inputs[4:], {})
        last = kept.state_dict()
        kept.load_local_state_dict(own)
        assert_equal(kept.state_dict(), want)
        streams.current_stream.synchronize()
        races = streams.settle()
        assert not races, str(races[0])
    checkpoint.load(tmp_path / "kept", model=plain, optimizer=one)
    assert_equal(plain.state_dict(), want)
    train(plain, one, inputs[4:], {})
    assert_equal(plain.state_dict(), last)


@on_ranks(2)
def test_ranks_that_keep_things_in_different_places_are_told() -> None:
    model = Tower()
    with modelled_streams(checks=False):
        offload = "cpu" if dist.get_rank() == 0 else None
        with pytest.raises(RankMismatchError, match="arguments of FullyShardedDataParallel"):
            built(model, offload, {})
        with pytest.raises(RankMismatchError, match="arguments of FullyShardedDataParallel"):
            built(model, offload, {"later": True})


@on_ranks(2)
def test_nothing_but_cpu_is_taken_and_it_is_for_an_accelerator(tmp_path: Path) -> None:
    model = Tower()
    before = state_of(model)
    for wrong in (tmp_path, str(tmp_path), "disk", True, 1):
        with pytest.raises(ValueError, match=r'expected offload to be "cpu", .* or None, got '):
            built(model, wrong, {})
    for given in ({}, {"later": True}):
        with pytest.raises(ValueError, match=r"is for a model on an accelerator, .* cpu: leave it out"):
            built(model, "cpu", given)
    assert_equal(state_of(model), before)
