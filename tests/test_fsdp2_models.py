"""Models and loops that FSDP2 users have: the bits of the unsharded class on FSDP2's own gradients."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import apply_activation_checkpointing
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from train_gpt import GPT, Block

from fsdp2 import (
    CLASSES,
    Tower,
    assert_equal,
    backward,
    batch,
    built,
    pair,
    recipes,
    shard,
    take_gradients,
    train_beside,
    whole,
)
from pool import on_ranks
from zero_optim import ZeroRedundancyOptimizer

BOTH = pytest.mark.parametrize("name", ["AdamW", "Adafactor"])


def make_gpt() -> GPT:
    """Its last layer is tied with the embeddings."""
    gpt = GPT(context=6, layers=2, width=12, heads=2)
    gpt.head.weight = gpt.embedding.weight
    return gpt


def learn(model: nn.Module, step: int) -> None:
    generator = torch.Generator().manual_seed(100 * step + dist.get_rank())
    tokens = torch.randint(0, 23, (2, 7), generator=generator)
    nn.functional.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten()).backward()


def make_recomputed() -> nn.Module:
    model = make_gpt()
    apply_activation_checkpointing(model, check_fn=lambda module: isinstance(module, Block))
    return model


def accumulate(model: Any, step: int) -> None:
    for number in range(3):
        model.set_requires_gradient_sync(number == 2)
        backward(model, 10 * step + number)


def mixed(reduced: torch.dtype) -> dict[str, Any]:
    return {"mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=reduced)}


# The model, options of `fully_shard`, and the backward passes of a step.
CASES: dict[str, tuple[Callable[[], nn.Module], dict[str, Any], Callable[[nn.Module, int], None]]] = {
    "tied embeddings": (make_gpt, {}, learn),
    "activations computed again": (make_recomputed, {}, learn),
    "gradients accumulated without sync": (Tower, {}, accumulate),
    "bf16": (Tower, mixed(torch.bfloat16), backward),
    "bf16 reduced in fp32": (Tower, mixed(torch.float32), backward),
    "offloaded": (Tower, {"offload_policy": CPUOffloadPolicy(pin_memory=False)}, backward),
    "not resharded": (Tower, {"reshard_after_forward": False}, backward),
}


@on_ranks(2, 3)
@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning", "ignore::UserWarning")
@BOTH
@pytest.mark.parametrize("case", CASES)
def test_models_loops_and_policies_of_fsdp2_train_with_the_bits_of_the_unsharded_class(
    case: str, name: str
) -> None:
    (make, sharding, run), (optimizer_class, options) = CASES[case], CLASSES[name]
    train_beside(*pair(make, optimizer_class, sharding, **options), run=run)


# torch.compile warns of its own innards here and there.
@on_ranks(2, timeout=600)
@pytest.mark.filterwarnings("ignore")
@pytest.mark.slow
@BOTH
def test_blocks_or_the_model_are_compiled(name: str) -> None:
    optimizer_class, options = CLASSES[name]
    for is_whole in (False, True):
        torch._dynamo.reset()
        torch._dynamo.utils.counters.clear()  # of other tests in these processes
        model, twin = built(make_gpt), built(make_gpt)
        for block in () if is_whole else model.blocks:
            block.compile(backend="aot_eager")
        shard(model)
        if is_whole:
            model.compile(backend="aot_eager")
        optimizer = ZeroRedundancyOptimizer(model.parameters(), optimizer_class, **options)
        train_beside(model, twin, optimizer, optimizer_class(twin.parameters(), **options), range(3), learn)
        assert torch._dynamo.utils.counters["stats"]["unique_graphs"]


@on_ranks(2)
@BOTH
def test_parameters_in_bf16_have_masters(name: str) -> None:
    """The twin is in float32, and rounded to what the model has."""
    optimizer_class, options = CLASSES[name]
    model = shard(built(Tower).to(torch.bfloat16))
    twin = built(Tower).to(torch.bfloat16).float()
    optimizer = ZeroRedundancyOptimizer(
        model.parameters(), optimizer_class, master_dtype=torch.float32, **options
    )
    plain = optimizer_class(twin.parameters(), **options)
    for step in range(3):
        model(batch(step).bfloat16()).square().mean().backward()
        take_gradients(twin, model)
        optimizer.step()
        plain.step()
        for param, other in zip(model.parameters(), twin.parameters(), strict=True):
            assert torch.equal(whole(param.detach()), other.bfloat16())


@on_ranks(4)
@BOTH
def test_replicas_of_shards_step_alike(name: str) -> None:
    optimizer_class, options = CLASSES[name]
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicas", "shards"))
    model, twin, optimizer, plain = pair(Tower, optimizer_class, {"mesh": mesh}, **options)
    assert optimizer.ranks.size == 2
    train_beside(model, twin, optimizer, plain)
    state = optimizer.state_dict()["state"][0]
    own = plain.state_dict()["state"][0]
    for entry, value in own.items():
        assert torch.equal(whole(state[entry]), value)


@on_ranks(2)
@BOTH
def test_plain_parameters_are_stepped_beside_dtensors(name: str) -> None:
    optimizer_class, options = CLASSES[name]
    model, twin = built(Tower), built(Tower)
    fully_shard(model, ignored_params={model.last.weight})
    optimizer = ZeroRedundancyOptimizer(model.named_parameters(), optimizer_class, **options)
    plain = optimizer_class(twin.named_parameters(), **options)

    def run(model: Any, step: int) -> None:
        backward(model, step)
        dist.all_reduce(model.last.weight.grad)

    train_beside(model, twin, optimizer, plain, run=run)
    state, own = optimizer.state_dict()["state"], plain.state_dict()["state"]
    for index, entries in own.items():
        for entry, value in entries.items():
            assert torch.equal(whole(state[index][entry]), value)
    again = ZeroRedundancyOptimizer(model.named_parameters(), optimizer_class, **options)
    again.load_state_dict(optimizer.state_dict())
    train_beside(model, twin, again, plain, range(4, 6), run)


@on_ranks(2)
@BOTH
def test_a_scaler_skips_a_step_on_every_rank(name: str) -> None:
    optimizer_class, options = CLASSES[name]
    model, _, optimizer, _ = pair(Tower, optimizer_class, **options)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    for step in range(3):
        before = [whole(param.detach()).clone() for param in model.parameters()]
        scaler.scale(model(batch(step)).square().mean()).backward()
        param: Any = model.layers[0].weight
        if step == 1 and dist.get_rank() == 1:
            with torch.no_grad():
                param.grad.to_local()[0] = torch.inf
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        same = [torch.equal(whole(p.detach()), v) for p, v in zip(model.parameters(), before, strict=True)]
        assert all(same) is (step == 1)
    assert scaler.get_scale() == 4.0


@on_ranks(2, 3)
@pytest.mark.parametrize("order", [2.0, 1.0, float("inf")])
def test_gradients_are_clipped_as_by_pytorch(order: float) -> None:
    model, twin, optimizer, _ = pair(Tower, torch.optim.Adafactor, lr=0.05)
    backward(model, 0)
    take_gradients(twin, model)
    expected = nn.utils.clip_grad_norm_(twin.parameters(), 0.1, order)
    torch.testing.assert_close(optimizer.clip_grad_norm_(0.1, order), expected)
    for param, other in zip(model.parameters(), twin.parameters(), strict=True):
        if other.grad is not None:
            torch.testing.assert_close(whole(param.grad), other.grad)


@on_ranks(2)
@BOTH
def test_a_closure_a_hook_and_a_scheduler_work(name: str) -> None:
    optimizer_class, options = CLASSES[name]
    model, twin, optimizer, plain = pair(Tower, optimizer_class, **options)
    seen: list[str] = []
    optimizer.register_step_post_hook(lambda *_: seen.append("stepped"))
    schedulers = [torch.optim.lr_scheduler.StepLR(each, 1, 0.5) for each in (optimizer, plain)]
    for step in range(3):

        def closure(step: int = step) -> float:
            optimizer.zero_grad()
            loss = model(batch(step)).square().mean()
            loss.backward()
            take_gradients(twin, model)
            return loss.item()

        assert optimizer.step(closure) is not None
        plain.step()
        for scheduler in schedulers:
            scheduler.step()
        assert_equal(model, twin)
    assert seen == ["stepped"] * 3
    text = str(optimizer.explain())
    assert ("where their rows lie" in text) is ("rows" in recipes(optimizer))
    assert ("whole on owners" in text) is ("whole" in recipes(optimizer))


@on_ranks(2)
@BOTH
def test_layers_are_added_and_unfrozen(name: str) -> None:
    optimizer_class, options = CLASSES[name]
    model, twin = shard(built(Tower)), built(Tower)
    first = [param for param in model.parameters() if param.requires_grad]
    optimizer = ZeroRedundancyOptimizer(first[:-2], optimizer_class, **options)
    plain = optimizer_class([p for p in twin.parameters() if p.requires_grad][:-2], **options)
    train_beside(model, twin, optimizer, plain, range(2))
    optimizer.add_param_group({"params": first[-2:]})
    plain.add_param_group({"params": [p for p in twin.parameters() if p.requires_grad][-2:]})
    train_beside(model, twin, optimizer, plain, range(2, 4))
