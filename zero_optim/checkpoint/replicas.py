"""Checkpoints of a mesh of replicas: the first replica writes, all ranks hear how it went."""

from collections.abc import Callable
from dataclasses import replace

from zero_optim.checkpoint.content import RANDOM, RankContent, random_state
from zero_optim.checkpoint.names import Objects
from zero_optim.checkpoint.values import key_of
from zero_optim.comm.agreement import Failure, failure_of, failure_of_others
from zero_optim.comm.collectives import RankGroup
from zero_optim.comm.encoding import encode
from zero_optim.comm.mesh import RankMesh
from zero_optim.comm.wire import recv_value, send_value
from zero_optim.errors import message_of


def add_random_of_replicas(part: RankContent, objects: Objects) -> None:
    """Have the first replica write the random states of all ranks; all ranks of a mesh call. Communicates.

    A rank of the first replica gets those of the ranks that own the same as it does.

    Args:
        part: what this rank writes; changed in place.
        objects: what is saved.
    """
    if objects.mesh is None:
        return
    across, where = objects.mesh.across, "the random state"
    if across.rank:
        told = [objects.mesh.everyone.rank, random_state(objects.device)]
        send_value(across, [0], *encode(told, where))
        return
    for replica in range(1, across.size):
        number, state = recv_value(across, replica)
        part.add(key_of(RANDOM, str(number)), state)


def write_once(mesh: RankMesh | None, write: Callable[[], str]) -> str:
    """Write by the first replica alone; all ranks of a mesh call. Communicates, where there is one.

    Args:
        mesh: None writes here.
        write: writes, and gives the token of the save; called by all ranks of the first replica. If it
            raises, it does so on all of them.

    Returns:
        The token.

    Raises:
        Exception: on every rank, what the first replica raised; names the rank.
    """
    if mesh is None:
        return write()
    token, failure = "", None
    if mesh.across.rank == 0:
        try:
            token = write()
        except Exception as error:  # noqa: BLE001 - told to the others, and raised again below
            failure = error
    others = failure_of_others(mesh.everyone, _own_word(failure))
    try:
        if failure is not None:
            raise failure
        if others is not None:
            raise others
    finally:
        failure = others = (
            None  # their tracebacks have this frame, see Note [Groups that end] in `comm.works`
        )
    return next(told.decode() for told in mesh.everyone.all_gather_bytes(token.encode()) if told)


def _own_word(failure: Exception | None) -> Failure | None:
    """Tell the other replicas of a failure, unless it is that of another rank, which tells of it itself."""
    return None if failure is None or message_of(failure).startswith("rank ") else failure_of(failure)


def with_everyone(mesh: RankMesh | None, everyone: RankGroup) -> RankMesh | None:
    """Give the same mesh, whose ranks communicate over another group."""
    return None if mesh is None else replace(mesh, everyone=everyone)
