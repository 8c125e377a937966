"""Ranks compare arguments before they begin, and fail together."""

import hashlib
import inspect
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import wraps
from itertools import zip_longest
from typing import Any, NoReturn, ParamSpec, TypeAlias, TypeVar

import torch
import torch.distributed as dist

from zero_optim.comm.collectives import RankGroup
from zero_optim.comm.frames import SHORT, ranks_by_value, values_text
from zero_optim.comm.hosts import find_hosts
from zero_optim.errors import (
    CheckpointError,
    NotConsolidatedError,
    RankMismatchError,
    RemoteRankError,
    StateMismatchError,
    is_remote,
    mark_remote,
    message_of,
)

P = ParamSpec("P")
T = TypeVar("T")
# Of an exception: its class, its message, and whether that names another rank, of which this one has heard.
Failure: TypeAlias = tuple[str, str, bool]
_DIGEST_NBYTES = 32  # of sha256

# Exceptions that can be made from a message alone, so that every rank raises the same class.
_KINDS = {
    kind.__name__: kind
    for kind in (
        ValueError,
        TypeError,
        RuntimeError,
        NotImplementedError,
        NotConsolidatedError,
        RankMismatchError,
        StateMismatchError,
        CheckpointError,
    )
}


class Ballot:
    """A body that all ranks run; at its end they exchange whether it raised, and a payload. It only computes.

    If it raised anywhere it does so on every rank: on a failed rank its own exception, elsewhere one of the
    same class if in `_KINDS`, else `RemoteRankError`, with the failed rank's number. One small collective,
    two more after a failure.
    """

    def __init__(self, group: RankGroup | None, payload: Callable[[], bytes] = bytes) -> None:
        self.payloads: list[bytes] = []  # at the end those of all ranks, of one length
        self._group, self._payload = group, payload

    def __enter__(self) -> "Ballot":
        return self

    def __exit__(self, _: object, error: BaseException | None, __: object) -> None:
        if self._group is None or not isinstance(error, Exception | None):
            return
        try:
            everyone = self._group.all_gather_fixed(bytes([error is not None]) + self._payload())
        except (RemoteRankError, RankMismatchError) as unanswered:
            if error is None:
                raise
            error.__cause__ = unanswered  # tells less; the error may be why: a device of no use
            return
        self.payloads = [each[1:] for each in everyone]
        if not any(each[0] for each in everyone):
            return
        told = one_error(self._group, error)
        if error is None:  # else Python raises it behind this
            raise told


def failing_together(group: RankGroup | None) -> Ballot:
    """Return a context that raises on every rank if its body does on any; all enter it. None: here alone."""
    return Ballot(group)


def one_error(group: RankGroup, error: BaseException | None) -> BaseException:
    """Return what this rank raises if any has an error, as a `Ballot`; all ranks call. Two collectives."""
    heard = hear_failure(group, None if error is None else failure_of(error))
    raised = error if heard is None else heard
    assert raised is not None  # a rank has failed
    return raised


def failure_of(error: BaseException, more: str = "") -> Failure:
    """Describe an exception for other ranks; ``more`` is added to its message."""
    message = message_of(error)
    return type(error).__name__, message + more, is_remote(error) and message.startswith("rank ")


def hear_failure(group: RankGroup, mine: Failure | None) -> Exception | None:
    """Return the exception for another rank's failure; None on a failed rank. All ranks call."""
    failed = gather_reports(group, mine)
    if mine is not None or not failed:
        return None
    rank = min(failed, key=lambda rank: failed[rank][2])
    name, message, is_repeated = failed[rank]
    whose = f"rank {rank}: " if name in _KINDS else f"rank {rank} failed with {name}: "
    return mark_remote(_KINDS.get(name, RemoteRankError)(message if is_repeated else whose + message))


def gather_reports(group: RankGroup, report: T | None) -> dict[int, T]:
    """Gather what ranks report, by their numbers; None is left out. All ranks call; two collectives."""
    everyone = zip(group.numbers, group.all_gather_json(report), strict=True)
    return {rank: each for rank, each in everyone if each is not None}


def agree(group: RankGroup, items: Sequence[str], what: str, hints: Mapping[str, str] | None = None) -> None:
    """Raise RankMismatchError on all ranks unless items are equal; ``hints`` are by an item's first word.

    The first agreement of a group also finds its hosts, see `find_hosts`.
    """
    _compare(group, items, what, hints)
    find_hosts(group)


@dataclass(slots=True)
class Agreement:
    """What ranks compare at the end of `agreeing`: items, and bytes of which it tells whether they differ."""

    items: list[str] = field(default_factory=list)
    beside: bytes = b""
    differs: bool = False


@contextmanager
def agreeing(group: RankGroup, what: str, hints: Mapping[str, str] | None = None) -> Iterator[Agreement]:
    """Run the body in a `Ballot`, then `agree` on the items that it adds, in one collective."""
    agreed = Agreement()

    def packed() -> bytes:
        size = SHORT - 1 - _DIGEST_NBYTES
        return _digest(agreed.items) + hashlib.blake2b(agreed.beside, digest_size=size).digest()

    with Ballot(group, packed) as ballot:
        yield agreed
    _compare(group, agreed.items, what, hints, [each[:_DIGEST_NBYTES] for each in ballot.payloads])
    agreed.differs = len(set(ballot.payloads)) > 1
    find_hosts(group)


def _digest(items: Sequence[str]) -> bytes:
    return hashlib.sha256("\n".join(items).encode()).digest()


def _compare(
    group: RankGroup,
    items: Sequence[str],
    what: str,
    hints: Mapping[str, str] | None = None,
    digests: Sequence[bytes] | None = None,  # if they were gathered already
) -> None:
    if len(set(digests or group.all_gather_fixed(_digest(items)))) == 1:
        return
    for each in zip_longest(*group.all_gather_json(list(items)), fillvalue="nothing more"):
        held = ranks_by_value(dict(zip(group.numbers, each, strict=True)))
        if len(held) > 1:
            words = (item.partition(" ")[0] for item in held)
            hint = next((f". {hints[word]}" for word in words if hints and word in hints), "")
            raise RankMismatchError(f"ranks disagree about {what}: {values_text(held)}{hint}")
    raise AssertionError("digests differ and items do not")


def combine_answers(group: RankGroup, answers: Sequence[bool]) -> list[bool]:
    """Return for each answer whether it is True on every rank. All ranks call; one small collective."""
    everyone = group.all_gather_fixed(bytes(answers))
    return [all(common) for common in zip(*everyone, strict=True)]


@contextmanager
def answering_together(group: RankGroup) -> Iterator[list[bool]]:
    """Run the body in a `Ballot`; then the answers that it adds are those that hold on every rank."""
    answers: list[bool] = []
    most = SHORT - 1  # in one collective
    with Ballot(group, lambda: bytes(answers[:most]).ljust(most, b"\0")) as ballot:
        yield answers
    common = [all(each) for each in zip(*ballot.payloads, strict=True)]
    answers[:] = common[: len(answers)] + combine_answers(group, answers[most:])


class SharedCall:
    """A function that every rank calls; its first call fails together, and ``then`` follows it."""

    def __init__(self, group: RankGroup, function: Callable[[], Any], then: Callable[[], None]) -> None:
        self._function, self._first = function, [(group, then)]

    def __call__(self) -> Any:  # noqa: ANN401, D102 - whatever the function returns
        if not self._first:
            return self._function()
        group, then = self._first.pop()
        with Ballot(group):
            result = self._function()
        then()
        return result

    def finish(self) -> None:
        """Take part in the other ranks' first call if there was none here."""
        if self._first:
            self._function = lambda: None
            self()


# ------------------------------------------------------------------------------------ arguments


def check_flags(**flags: object) -> None:
    """Raise TypeError for a flag that is not a bool."""
    for name, value in flags.items():
        if type(value) is not bool:
            raise TypeError(f"expected {name} to be True or False, got {value!r}")


def take_group(process_group: object, data: object = None) -> RankGroup:
    """As `RankGroup.of`, for users: another object raises TypeError on all ranks of the default group."""
    outside: object = dist.GroupMember.NON_GROUP_MEMBER  # what new_group() gives to ranks that it leaves out
    is_outside = type(process_group) is type(outside) and process_group == outside
    if process_group is None or isinstance(process_group, dist.ProcessGroup) or is_outside:
        return RankGroup.of(process_group, data)  # type: ignore[arg-type]
    hint = "of a DeviceMesh, give mesh.get_group()"
    if isinstance(process_group, int | float) and not isinstance(process_group, bool):
        hint = f"options are given by name: lr={process_group}"
    wrong = (
        "expected process_group to be a torch.distributed.ProcessGroup, or None for the default group, "
        f"got {type(process_group).__name__} ({hint})"
    )
    return raise_together(TypeError(wrong))


def share_host_memory(shares: bool = True) -> bool:
    """Say whether ranks of one host send CPU tensors through memory, or with False through gloo's sockets.

    Without a call they use memory where they can: on groups whose ranks are on one host, or as many on each
    of several, of one user, and see each other's processes, on Linux on x86-64, for the gloo backend. Bits
    are the same either way, but for sums over several hosts. Each rank takes 4 MiB, there 8, for each process
    group. Call it before building anything; it holds until the default group ends. All ranks of the default
    group call; communicates. RankMismatchError if their arguments differ.

    Returns whether the default group's ranks share memory; warns if they were told to and cannot.
    """
    world = RankGroup.of(None)
    with Ballot(world):
        check_flags(shares=shares)
    _compare(world, [f"shares={shares}"], "share_host_memory()")
    world.works.log.shares_memory = shares
    find_hosts(world)
    shared = world.shared_memory(torch.device("cpu")) is not None
    if shares and not shared and world.size > 1:
        why = world.works.why_no_memory
        warnings.warn(f"the ranks of the default group cannot share memory: {why}", stacklevel=2)
    return shared


def called_by_all(method: Callable[P, T]) -> Callable[P, T]:
    """Raise on all ranks if Python refuses the arguments of a method of an object with ``ranks``."""
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
    """Raise an error on all ranks of a group (None: the default group)."""
    if not dist.is_available() or not dist.is_initialized():
        raise error
    with Ballot(RankGroup.of(None) if group is None else group):
        raise error
