"""Values of DTensors: stepped where their rows lie, or brought to owners as whole tensors, and back.

Note [Nothing whole is kept]
    Users, checkpoints and ``torch._foreach_*`` write to shards, and no version counter sees all of it. So
    owners keep no copy that could be stale: rows of parameters travel with rows of gradients, and the whole
    tensors live from then until their rows are sent back. That is half more bytes, and 1/W of the model less
    memory between steps. A master, which is wider, follows them as anywhere: `zero_optim.step.leaves`.

Note [Failures before anything is stepped]
    A rank that cannot begin sends its rows all the same, and says so in the head of the message. All ranks
    read all heads, so none steps and all raise. A class that raises is told by the stamps in what comes back.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from zero_optim.comm.agreement import agree, one_error
from zero_optim.comm.collectives import RankGroup
from zero_optim.dtensor.moves import Form, RowMoves, Whole
from zero_optim.dtensor.placement import Chunks, gradient_rows, is_dtensor, local_rows
from zero_optim.flow.pending import Pending
from zero_optim.flow.schedule import HELD_ROWS, HELD_WHOLE
from zero_optim.health.stamp import Header
from zero_optim.plan.groups import ParamGroup, params_of, short_names
from zero_optim.plan.layout import whole
from zero_optim.plan.plan import Plan
from zero_optim.shard.bucket import Bucket, Members
from zero_optim.shard.places import shown_when_freed
from zero_optim.shard.sharding import Sharding

LEAST_NBYTES = 2**20  # of a bucket that is divided, so that one half moves while the other is stepped


@dataclass(frozen=True, slots=True, eq=False)
class HeldLeaves:
    """This rank's rows or whole tensors of the DTensors that it steps, and their gradients.

    ``away``: those stepped whole that have not come; their values are none. ``names``: of the entries of each
    parameter's state, on any rank, as last collected.
    """

    values: dict[Tensor, Tensor] = field(default_factory=dict)
    away: set[Tensor] = field(default_factory=set)
    grads: dict[Tensor, Tensor] = field(default_factory=dict)
    names: dict[Tensor, list[str]] = field(default_factory=dict)

    def note_state(self, state: Mapping[Any, Any]) -> None:
        """Note the names of the entries of a whole state, by parameter."""
        self.names.clear()
        self.names.update((param, list(entries)) for param, entries in state.items() if is_dtensor(param))

    def come(self, param: Tensor, value: Tensor) -> None:
        """Take a whole tensor that has come."""
        self.values[param] = value
        self.away.discard(param)


class HeldValues:
    """Values of one dtype of which somebody else keeps the rows; ``moves`` to owners and back, if any."""

    is_in_place = False

    def __init__(
        self, members: Members, names: Sequence[str], moves: RowMoves | None, leaves: HeldLeaves
    ) -> None:
        self._members, self.params = members, members.params
        self.names, self._moves, self._leaves = names, moves, leaves
        self._coming: Pending[tuple[list[bytes], list[Whole]]] | None = None
        self._grads: list[Tensor | None] = [None] * len(members.params)
        self.nbytes_to_gather = 0 if moves is None else moves.nbytes()
        if moves is None:
            self.open()
        else:
            self.release()

    def written(self) -> list[tuple[int, int]]:
        """Return nothing: `refresh` writes nowhere."""
        return []

    def refresh(self) -> None:
        """Raise RuntimeError if a dtype, device or shape changed."""
        self._members.check()

    def open(self) -> None:
        """Look for this rank's rows and gradients; TypeError if a gradient is placed in another way."""
        self.refresh()
        self._grads = list(map(gradient_rows, self.params, self.names))
        if self._moves is None:
            for param, grad in zip(self.params, self._grads, strict=True):
                self._leaves.values[param] = local_rows(param)
                if grad is not None:
                    self._leaves.grads[param] = grad

    def fetch(self) -> None:
        """Bring values, without gradients, to owners if there are any; all ranks call; communicates."""
        if self._moves is None:
            return
        _, (values,) = self._moves.start_to_owners(b"\0", list(map(local_rows, self.params))).wait()
        for number, value in values.items():
            self._leaves.come(self.params[number], value)

    def present(self) -> list[bool]:
        """Return for each parameter whether this rank has a gradient."""
        return [grad is not None for grad in self._grads]

    def start_to_owners(self, head: bytes) -> None:
        """Start to bring rows of gradients and parameters to owners, behind the head for all ranks."""
        assert self._moves is not None
        self._coming = self._moves.start_to_owners(head, self._grads, list(map(local_rows, self.params)))

    @property
    def is_coming(self) -> bool:
        """Whether rows are on their way to owners."""
        return self._coming is not None

    def take_arrived(self) -> list[bytes]:
        """Wait for what owners step; return the heads of all ranks."""
        assert self._coming is not None
        coming, self._coming = self._coming, None
        heads, (grads, values) = coming.wait()
        present = self.present()
        for number, value in values.items():
            param = self.params[number]
            self._leaves.come(param, value)
            if present[number]:
                self._leaves.grads[param] = grads[number]
        return heads

    def gradients(self) -> dict[Tensor, Tensor | None]:
        """Return the gradients of what this rank steps of it."""
        return {param: self._leaves.grads.get(param) for param in self.params}

    def start_to_holders(self, header: Header | None) -> Pending[None]:
        """Start to send rows of the owned parameters back, with a header."""
        assert self._moves is not None
        if self.is_coming:  # a step that failed did not ask for it
            self.take_arrived()
        wholes = {number: self._leaves.values[self.params[number]] for number in self._moves.owned}
        pending = self._moves.start_to_holders(wholes, list(map(local_rows, self.params)), header)
        self.release()
        torch.autograd.graph.increment_version(self.params)
        return pending

    def release(self) -> None:
        """Drop gradients, and whole tensors."""
        members = self._members
        self._grads, self._coming = [None] * len(self.params), None
        for param in self.params:
            self._leaves.grads.pop(param, None)
        for number in () if self._moves is None else self._moves.owned:
            param = self.params[number]
            self._leaves.away.add(param)
            self._leaves.values[param] = shown_when_freed(param.shape, members.dtype, members.device)


def head_of(buckets: Sequence[Bucket[HeldValues]], failure: BaseException | None) -> bytes:
    """Make the head of messages: whether this rank cannot begin, and which gradients it has."""
    return bytes([failure is not None, *(each for bucket in buckets for each in bucket.values.present())])


def check_heads(
    group: RankGroup,
    buckets: Sequence[Bucket[HeldValues]],
    heads: Sequence[bytes],
    failure: BaseException | None,
) -> None:
    """Raise on every rank if one could not begin, or lacks gradients that others have; all ranks call."""
    if any(head[0] for head in heads):
        raise one_error(group, failure)
    if len(set(heads)) > 1:
        names = [name for bucket in buckets for name in bucket.values.names]
        has = [
            f"{'a' if has else 'no'} gradient of {name}"
            for has, name in zip(heads[group.rank][1:], names, strict=True)
        ]
        agree(group, has, "which parameters have gradients, so nothing was stepped")


def make_held_buckets(
    groups: Sequence[ParamGroup],
    plan: Plan,
    held: Mapping[Tensor, Chunks],
    leaves: HeldLeaves,
    sharding: Sharding,
) -> list[Bucket[HeldValues]]:
    """Make buckets of a plan's DTensors, of the last of groups; owners still have to `HeldValues.fetch`."""
    params, names = params_of(groups), short_names(groups)
    before = len(params) - len(plan.pieces)
    params, names = params[before:], names[before:]
    owners = [pieces[0].owner for pieces in plan.pieces]
    in_place: dict[object, list[int]] = {}
    moved: dict[object, list[int]] = {}
    for index, param in enumerate(params):
        if param in held:
            of_kind = in_place if sharding.held[param] == plan.pieces[index] else moved
            of_kind.setdefault((param.dtype, param.device.type, param.requires_grad), []).append(index)
    chosen = [(members, False) for members in in_place.values()]
    for members in moved.values():
        nbytes = sum(params[index].numel() * params[index].itemsize for index in members)
        size = sharding.cap_nbytes * sharding.group.size
        count = max(2, math.ceil(nbytes / size)) if nbytes >= LEAST_NBYTES else 1
        chosen += [(part, True) for part in _divided(members, count, owners, plan.costs)]
    buckets = []
    for numbers, moves in chosen:
        chunks = [held[params[index]] for index in numbers]
        to = [owners[index] if moves else 0 for index in numbers]
        layout = whole([params[index].numel() for index in numbers], to)
        together = Members([params[index] for index in numbers], layout, sharding.group.rank)
        row_moves = _moves(together, chunks, to, sharding.group) if moves else None
        values = HeldValues(together, [names[index] for index in numbers], row_moves, leaves)
        buckets.append(Bucket(together, values, HELD_WHOLE if moves else HELD_ROWS))
    return buckets


def _moves(members: Members, chunks: Sequence[Chunks], owners: Sequence[int], group: RankGroup) -> RowMoves:
    each = zip(members.params, chunks, owners, strict=True)
    forms = [Form(tuple(param.shape), cut.dim, owner) for param, cut, owner in each]
    return RowMoves(group, forms, members.dtype, members.device)


def _divided(
    members: Sequence[int], count: int, owners: Sequence[int], costs: Sequence[float]
) -> list[list[int]]:
    """Divide parameters into parts with a share of every owner's each: all step one as the next moves."""
    parts: list[list[int]] = [[] for _ in range(count)]
    for rank in sorted({owners[index] for index in members}):
        own = sorted((index for index in members if owners[index] == rank), key=lambda index: -costs[index])
        for place, index in enumerate(own):
            parts[place * count // len(own)].append(index)
    return [sorted(part) for part in parts if part]
