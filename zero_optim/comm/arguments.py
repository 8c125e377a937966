"""Checks of arguments that several rooms take. `raise_together` and methods `called_by_all` communicate."""

import inspect
from collections.abc import Callable
from functools import wraps
from typing import Any, NoReturn, ParamSpec, TypeVar

import torch.distributed as dist

from zero_optim.comm.agreement import failing_together
from zero_optim.comm.collectives import RankGroup

P = ParamSpec("P")
T = TypeVar("T")

_OF_A_MESH = "of a DeviceMesh, give mesh.get_group()"


def check_flags(**flags: object) -> None:
    """Refuse flags that are not True or False: another value was most likely meant for another argument.

    Raises:
        TypeError: names the first such flag.
    """
    for name, value in flags.items():
        if type(value) is not bool:
            raise TypeError(f"expected {name} to be True or False, got {value!r}")


def ranks_of(process_group: object) -> RankGroup:
    """Check a process group that a user gave, None for the default one; see `RankGroup.of`.

    Does not communicate, unless the value is not a process group. Then this rank tells all ranks of the
    default group, and all raise if the others use that group.

    Raises:
        TypeError: it is not a process group.
        RuntimeError: torch.distributed is not initialised.
        ValueError: this process is not a member.
    """
    outside: object = dist.GroupMember.NON_GROUP_MEMBER  # what new_group() gives to ranks that it leaves out
    is_outside = type(process_group) is type(outside) and process_group == outside
    if process_group is None or isinstance(process_group, dist.ProcessGroup) or is_outside:
        return RankGroup.of(process_group)  # type: ignore[arg-type]
    is_option = isinstance(process_group, int | float) and not isinstance(process_group, bool)
    wrong = (
        "expected process_group to be a torch.distributed.ProcessGroup, or None for the default group, "
        f"got {type(process_group).__name__} "
        f"({f'options are given by name: lr={process_group}' if is_option else _OF_A_MESH})"
    )
    return raise_together(TypeError(wrong))


def called_by_all(method: Callable[P, T]) -> Callable[P, T]:
    """Have a method tell the other ranks of arguments that Python refuses, before it calls the method.

    For methods of objects with ``ranks``, which all ranks call, and which begin with a short agreement.
    """
    signature = inspect.signature(method)

    @wraps(method)
    def call(*args: P.args, **kwargs: P.kwargs) -> T:
        try:
            signature.bind(*args, **kwargs)
        except TypeError as error:
            caller: Any = args[0]
            raise_together(TypeError(f"{method.__name__}(): {error}"), caller.ranks)
        return method(*args, **kwargs)

    return call


def raise_together(error: Exception, group: RankGroup | None = None) -> NoReturn:
    """Raise an error on all ranks of a group.

    Args:
        error: the error.
        group: None for the default group, where it is not known which ranks wait for this one.

    Raises:
        Exception: the error given.
    """
    if not dist.is_available() or not dist.is_initialized():
        raise error
    with failing_together(RankGroup.of(None) if group is None else group):
        raise error
    raise AssertionError("it raises on this rank, hence on all")
