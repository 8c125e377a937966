"""Comm hooks written for PyTorch's wrapper run on ours unchanged, and give the same bits."""

import copy
import re
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.algorithms.ddp_comm_hooks import (
    default_hooks,
    post_localSGD_hook,
    powerSGD_hook,
    quantization_hooks,
)
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel as TorchDistributedDataParallel

from ddp_pairs import SMALL_MB, Pair, mlp, mlp_loss, settled
from pool import on_ranks
from zero_optim.ddp import DistributedDataParallel, GradBucket
from zero_optim.errors import ReductionError

Setting = tuple[Callable[[], object], Callable[..., Any]]


def renamed(hook: Callable[..., Any]) -> Callable[..., Any]:
    """PyTorch's wrapper refuses its bfloat16 hooks by name without CUDA; ours runs them."""

    def other(state: object, bucket: Any) -> Any:
        return hook(state, bucket)

    other.__annotations__.clear()
    return other


def power(**options: Any) -> powerSGD_hook.PowerSGDState:
    settings = {"start_powerSGD_iter": 2, "min_compression_rate": 0.5, **options}
    return powerSGD_hook.PowerSGDState(None, **settings)  # type: ignore[arg-type]


def local_sgd() -> post_localSGD_hook.PostLocalSGDState:
    alone = dist.new_subgroups(1)[0]
    return post_localSGD_hook.PostLocalSGDState(None, alone, start_localSGD_iter=2)  # type: ignore[no-untyped-call]


class StackedGather:
    """What NCCL's all_gather gives, one tensor in a list, made of gloo's; quantizing hooks build on it."""

    def __init__(self, parts: list[Tensor], mine: Tensor, group: Any, async_op: bool) -> None:
        assert async_op
        self._parts = parts
        self._work = dist.all_gather(parts, mine, group=group, async_op=True)

    def get_future(self) -> Future[Any]:
        return self._work.get_future().then(lambda _: [torch.stack(self._parts)])  # type: ignore[union-attr]


def nothing() -> None:
    """No state."""


SETTINGS: dict[str, Setting] = {
    "allreduce": (nothing, default_hooks.allreduce_hook),
    "fp16": (nothing, default_hooks.fp16_compress_hook),
    "bf16": (nothing, default_hooks.bf16_compress_hook),
    "bf16 wrapper": (nothing, default_hooks.bf16_compress_wrapper(default_hooks.allreduce_hook)),
    "powerSGD": (power, powerSGD_hook.powerSGD_hook),
    "quantized by tensor": (lambda: dist.group.WORLD, quantization_hooks.quantization_pertensor_hook),
    "quantized by channel": (lambda: dist.group.WORLD, quantization_hooks.quantization_perchannel_hook),
    "local SGD": (local_sgd, post_localSGD_hook.post_localSGD_hook),
}


# PyTorch's hooks use what it deprecates.
@on_ranks(2)
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning")
def test_pytorchs_hooks_give_what_they_give_on_pytorchs_wrapper() -> None:
    quantization_hooks.dist = SimpleNamespace(  # type: ignore[assignment]
        all_gather=StackedGather, group=dist.group, get_rank=dist.get_rank
    )
    try:
        for name, (make_state, hook) in SETTINGS.items():
            pair = Pair.of(mlp(), gradient_as_bucket_view=True)
            pair.ours.register_comm_hook(make_state(), hook)
            pair.theirs.register_comm_hook(make_state(), renamed(hook) if "bf16" in name else hook)
            for number in range(5):
                for model in pair:
                    model.zero_grad()
                loss = lambda model, n=number: mlp_loss(model, n)  # noqa: E731
                pair.backward(loss, (name, number))
    finally:
        quantization_hooks.dist = dist


@on_ranks(2)
def test_builtin_hooks_work() -> None:
    pair = Pair.of(mlp(), bucket_cap_mb=SMALL_MB)
    for model in pair:
        model._register_builtin_comm_hook(dist.BuiltinCommHookType.FP16_COMPRESS)  # type: ignore[attr-defined, operator]
    ours, theirs = (model._get_ddp_logging_data() for model in pair)  # type: ignore[operator]
    assert ours["comm_hook"] == theirs["comm_hook"] == "BuiltinCommHookType.FP16_COMPRESS"
    for number in range(2):
        for model in pair:
            model.zero_grad()
        # The builtin hook in C++ divides before it compresses, the hook in Python after.
        pair.backward(lambda model, n=number: mlp_loss(model, n), tolerance=1e-3)  # type: ignore[misc]


@on_ranks(2)
def test_a_bucket_keeps_pytorchs_contract() -> None:
    seen: list[tuple[int, bool, list[tuple[int, ...]]]] = []
    net = mlp()
    model = DistributedDataParallel(net, bucket_cap_mb=SMALL_MB, gradient_as_bucket_view=True)

    def hook(state: object, bucket: GradBucket) -> Future[Tensor]:
        assert state == "state"
        params, grads, flat = bucket.parameters(), bucket.gradients(), bucket.buffer()
        seen.append((bucket.index(), bucket.is_last(), [tuple(param.shape) for param in params]))
        assert [grad.shape for grad in grads] == [param.shape for param in params]
        assert flat.dim() == 1
        assert flat.numel() == sum(param.numel() for param in params)
        for grad in grads:
            assert grad.untyped_storage().data_ptr() == flat.untyped_storage().data_ptr()
        grads[0].fill_(3.0)
        assert (flat[: grads[0].numel()] == 3.0).all()
        bucket.set_buffer(flat.double() + 1)
        assert bucket.buffer().dtype == torch.float64
        assert (bucket.gradients()[0] == 4.0).all()
        return dist.all_reduce(flat, async_op=True).get_future().then(lambda done: done.value()[0])  # type: ignore[union-attr]

    model.register_comm_hook("state", hook)
    for number in range(3):
        seen.clear()
        mlp_loss(model, number).backward()
        count = len(model.reducer.own.assignment.buckets)
        assert (count > 2) == (number > 0)
        assert [index for index, _, _ in seen] == list(range(count))
        assert [is_last for _, is_last, _ in seen] == [False] * (count - 1) + [True]
        assert sum(len(shapes) for _, _, shapes in seen) == len(list(net.parameters()))
        for bucket in model.reducer.own.assignment.buckets:
            assert (bucket.storage.views[0] == 6.0).all()  # two ranks, and a hook that does not divide


@on_ranks(2)
def test_a_copy_of_the_wrapper_keeps_its_hook() -> None:
    model = DistributedDataParallel(mlp())
    state = {"calls": 0}

    def hook(state: dict[str, int], bucket: GradBucket) -> Future[Tensor]:
        state["calls"] += 1
        return settled(bucket.buffer() * 0)

    model.register_comm_hook(state, hook)
    twin = copy.deepcopy(model)
    for number in range(2):
        mlp_loss(twin, number).backward()
    assert state["calls"] == 0
    assert twin._comm_hooks[0][1] == {"calls": 2}
    assert all(param.grad is not None and not param.grad.any() for param in twin.parameters())
    assert isinstance(twin, TorchDistributedDataParallel)


# ---------------------- hooks that fail, or are none


def no_future(_: object, bucket: Any) -> Any:
    return bucket.buffer()


def too_short(_: object, bucket: Any) -> Any:
    return settled(bucket.buffer()[1:])


def no_tensor(_: object, bucket: Any) -> Any:
    return settled("text")


def raises(_: object, bucket: Any) -> Any:
    raise ArithmeticError("from a hook")


def raises_later(_: object, bucket: Any) -> Any:
    def then(_: Future[Any]) -> Any:
        raise ArithmeticError("from a future")

    return settled(None).then(then)


HOOKS: tuple[tuple[Callable[..., Any], type[Exception], str], ...] = (
    (
        no_future,
        RuntimeError,
        "DDP communication hook's callback must return a torch.futures.Future object, but got Tensor",
    ),
    (too_short, ValueError, "too_short returned 314 elements for a bucket of 315"),
    (no_tensor, TypeError, "comm hook no_tensor holds str: expected one tensor"),
    (raises, ArithmeticError, "from a hook"),
    (raises_later, RuntimeError, "from a future"),
)


@on_ranks(2)
def test_a_hook_that_fails_is_named_and_not_called_again() -> None:
    for hook, kind, message in HOOKS:
        model = DistributedDataParallel(mlp(), bucket_cap_mb=25)
        model.register_comm_hook(None, hook)
        with pytest.raises(kind, match=re.escape(message)):
            mlp_loss(model, 0).backward()
        for _ in range(2):
            with pytest.raises(
                ReductionError, match="a comm hook failed in an earlier backward pass"
            ) as caught:
                mlp_loss(model, 0)
            assert message in str(caught.value)


def one_argument(state: object) -> Future[Tensor]:
    raise NotImplementedError


def right(state: object, bucket: Any) -> Future[Tensor]:
    return settled(bucket.buffer())


@on_ranks(1)
def test_a_hook_is_checked_when_it_is_registered() -> None:
    model = DistributedDataParallel(mlp())
    with pytest.raises(TypeError, match=r"must be callable\. Expected .*hook\(state, bucket\), got int"):
        model.register_comm_hook(None, 3)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"got one_argument\(state"):
        model.register_comm_hook(None, one_argument)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"expected one of .*ALLREDUCE"):
        model._register_builtin_comm_hook("allreduce")
    model.register_comm_hook(None, right)
    with pytest.raises(
        RuntimeError,
        match=r"register_comm_hook or register_builtin_comm_hook can only be called once\. "
        r"right is registered already.*instead of no_future",
    ):
        model.register_comm_hook(None, no_future)
    late = DistributedDataParallel(mlp())
    late.module[0].weight.register_hook(lambda _: late.register_comm_hook(None, right))
    with pytest.raises(RuntimeError, match="before backward"):
        mlp_loss(late, 0).backward()
