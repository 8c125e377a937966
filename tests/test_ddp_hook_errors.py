"""Comm hooks that fail, or are none: refused at registration, named when they fail, on every rank."""

import re
from collections.abc import Callable
from typing import Any

import pytest
from torch import Tensor
from torch.futures import Future

from ddp_pairs import mlp, mlp_loss
from pool import on_ranks
from zero_optim.ddp import DistributedDataParallel
from zero_optim.errors import ReductionError


def settled(value: Any) -> Future[Any]:
    future: Future[Any] = Future()
    future.set_result(value)
    return future


def no_future(_: object, bucket: Any) -> Any:
    return bucket.buffer()


def too_short(_: object, bucket: Any) -> Any:
    return settled(bucket.buffer()[1:])


def no_tensor(_: object, bucket: Any) -> Any:
    return settled("text")


def two_tensors(_: object, bucket: Any) -> Any:
    return settled([bucket.buffer(), bucket.buffer()])


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
    (two_tensors, TypeError, "comm hook two_tensors holds list: expected one tensor"),
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


def annotated(state: object, bucket: Any) -> Tensor:
    raise NotImplementedError


def takes_number(state: object, bucket: int) -> Future[Tensor]:
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
    with pytest.raises(
        ValueError,
        match=r"return annotation should be torch.futures.Future\[torch.Tensor\]\. annotated is .*Tensor",
    ):
        model.register_comm_hook(None, annotated)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"bucket annotation should be dist.GradBucket\. takes_number .*int"):
        model.register_comm_hook(None, takes_number)
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
