"""The word that a step has failed in one replica of a mesh; it travels across replicas.

Note [Failures in one replica]
    Ranks of a replica hear of each other in their gathers; the other replicas do not take part in those. What
    travels across next is the sum of `zero_optim.ddp.owners.replica_check`, which begins a backward
    pass. So it has room for a word: how many replicas have failed, which one, and what it says. A rank that
    raises such an error begins this sum at once, with the word, and does not wait for it. It may never begin
    another
    one. When it does go on, its next backward pass begins a new sum, as that of a rank does that has heard
    the word and raised. So sums meet as before.

    Where the CPU may wait for a sum, it does so before the pass has launched anything: an error in the
    middle would leave reductions that nobody meets. On an accelerator it would wait for the device, so the
    word is read when the next pass begins, if a failed replica goes on so far. If not, the sums of gradients
    stall, and the watchdog tells.

    All ranks of the replica tell, each across its own column. That needs that all of them hear of the
    failure, so only what was sent in gathers is told. In a fully sharded model, a rank hears in its next
    forward pass; its column waits for that. So it does where buffers are sent in the forward pass.
"""

import struct
from collections.abc import Sequence

from zero_optim.errors import RemoteRankError, message_of

_TEXT = struct.Struct("<24q")
WORD_LENGTH = 2 + 24  # int64: how many failed, the replica's number, the text


def word_of(replica: int, error: BaseException) -> list[int]:
    """Write the word of one replica.

    Args:
        replica: its number.
        error: what was raised there.
    """
    text = message_of(error)
    text = text if isinstance(error, RemoteRankError) else f"{type(error).__name__}: {text}"
    octets = text.encode()[: _TEXT.size].ljust(_TEXT.size, b"\0")
    return [1, replica, *_TEXT.unpack(octets)]


def failure_in(total: Sequence[int], num_replicas: int) -> RemoteRankError | None:
    """Read the sum of the words of all replicas; None if none has failed, or each has, and has raised.

    Args:
        total: as long as a word.
        num_replicas: of the mesh.
    """
    count, replica, *text = total
    if count in (0, num_replicas):
        return None
    if count > 1:  # their texts are added up
        told = f"{count} replicas of the mesh have failed in a step; their own output has more"
    else:
        said = _TEXT.pack(*text).rstrip(b"\0").decode(errors="ignore")
        told = f"a step has failed in replica {replica} of the mesh: {said}"
    return RemoteRankError(f"{told}. Parameters of replicas may differ by now: load a checkpoint on all")
