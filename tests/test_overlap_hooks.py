"""The step during the backward pass composes with whatever reduces the gradients."""

from collections.abc import Callable
from typing import Any

from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook

from fake_streams import fake_streams
from overlap import (
    WRAPPERS,
    Net,
    Setting,
    assert_same_grads,
    assert_same_params,
    assert_same_run,
    both_wrappers,
    built,
    grads_of,
    loss_of,
    plain_step,
)
from pool import on_ranks
from test_ddp_hooks import renamed
from zero_optim.hooks import zero_step


def pytorchs_power_sgd() -> tuple[object, object]:
    state = powerSGD_hook.PowerSGDState(None, start_powerSGD_iter=2, min_compression_rate=1.0)
    return state, powerSGD_hook.powerSGD_hook


def pytorchs(hook: Any) -> Callable[[], tuple[object, object]]:
    return lambda: (None, hook)


THEIRS: dict[str, Callable[[], tuple[object, object]]] = {
    "allreduce": pytorchs(default_hooks.allreduce_hook),
    "fp16": pytorchs(default_hooks.fp16_compress_hook),
    "bf16": pytorchs(renamed(default_hooks.bf16_compress_hook)),
    "fp16 wrapper": pytorchs(default_hooks.fp16_compress_wrapper(default_hooks.allreduce_hook)),
    "power_sgd": pytorchs_power_sgd,
}


@on_ranks(2)
@both_wrappers
def test_every_hook_gives_the_same_bits(wrapper: str) -> None:
    for name, make in THEIRS.items():
        # PyTorch's PowerSGD launches collectives from callbacks, which on gloo mix those of several buckets.
        options = {"bucket_cap_mb": 25} if name == "power_sgd" else {}
        assert_same_run(Setting(wrapper, hook=make, options=options), steps=5, where=("PyTorch's", name))


@on_ranks(2)
def test_a_hook_gives_the_same_bits_without_a_thread() -> None:
    with fake_streams():
        assert_same_run(Setting("ours", hook=THEIRS["fp16"]), steps=5)


@on_ranks(2)
def test_a_wrapper_around_it_gives_the_same_bits() -> None:
    """zero_step inside a wrapper: it finds 16-bit gradients."""
    setting = Setting("ours")
    plain, one = Setting("ours", hook=THEIRS["fp16 wrapper"]).build(overlap=False)
    model = WRAPPERS["ours"](setting.model(), bucket_cap_mb=0.0004)
    other = setting.optimizer(model)
    model.register_comm_hook(None, default_hooks.fp16_compress_wrapper(zero_step(other)))
    for number in range(5):
        expected, got = plain_step(plain, one, number), plain_step(model, other, number)
        assert_same_grads(model, got, expected, number)
        assert_same_params(model, plain, number)


@on_ranks(3)
def test_without_a_hook_our_ddp_divides_with_the_same_bits_as_ever() -> None:
    """Also gradients that are views of a bucket already; ranks are no power of two."""
    options = {"gradient_as_bucket_view": True, "bucket_cap_mb": 0.0004}
    runs = [built(WRAPPERS["ours"], hook, Net, **options) for hook in (None, zero_step)]
    for number in range(4):
        grads = []
        for model, optimizer in runs:
            with model.no_sync():
                loss_of(model, 10 + number).backward()
            loss_of(model, number).backward()
            grads.append(grads_of(model))
            optimizer.step()
            optimizer.zero_grad(set_to_none=False)
        (plain, _), (model, _) = runs
        assert_same_grads(model, grads[1], grads[0], number)
        assert_same_params(model, plain, number)
