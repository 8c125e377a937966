"""The global gradient norm, equal on all ranks, and clipping by it.

Note [One gather, one wait]
    Owners send an error byte, a digest of their arguments, then a byte (has a gradient) and a float64 (norm)
    for each parameter of the fullest rank; all combine them in one order. If an accelerator has a CPU backend
    too (``cpu:gloo,cuda:nccl``), that sends the bytes, norms stay on the device, and nothing waits. With NCCL
    alone the CPU waits once. Whole gradients of one dtype and device give the bits of
    ``torch.nn.utils.clip_grad_norm_``.
"""

import hashlib
import math
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from itertools import compress
from operator import is_
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from zero_optim.comm.agreement import agree, check_flags, one_error
from zero_optim.comm.collectives import RankGroup
from zero_optim.comm.frames import bytes_to_tensor, tensor_to_bytes
from zero_optim.compat import private
from zero_optim.compat.streams import HostCopy, is_asynchronous, to_device
from zero_optim.dtensor.placement import is_dtensor
from zero_optim.plan.description import describe
from zero_optim.plan.pieces import Pieces
from zero_optim.step.partial import PartialGradient, is_on_host, rows_here

_HEADING_NBYTES = 16  # a byte for failure, then the digest
_DOUBLE = struct.Struct("=d")


@dataclass(frozen=True, slots=True)
class ClipArguments:
    """Unchecked arguments of ``clip_grad_norm_``."""

    max_norm: float
    norm_type: float
    error_if_nonfinite: bool
    foreach: bool | None

    def check(self) -> float:
        """Return the order of the norm; TypeError or ValueError for a wrong argument."""
        check_flags(error_if_nonfinite=self.error_if_nonfinite)
        if self.foreach is not None:
            check_flags(foreach=self.foreach)
        _number("max_norm", self.max_norm)
        return _number("norm_type", self.norm_type)

    def __str__(self) -> str:
        return (
            f"max_norm={describe(self.max_norm)}, norm_type={describe(self.norm_type)}, "
            f"error_if_nonfinite={self.error_if_nonfinite}, foreach={self.foreach}"
        )


def _number(name: str, value: object) -> float:
    # PyTorch also takes the order as a string: "inf".
    is_right = isinstance(value, int | float | str) if name == "norm_type" else not isinstance(value, str)
    try:
        number = float(value) if is_right else None  # type: ignore[arg-type]
    except (TypeError, ValueError, RuntimeError):
        number = None
    if number is None:
        raise TypeError(f"expected {name} to be a number, got {value!r}")
    if math.isnan(number):
        raise ValueError(f"expected {name} to be a number, got {value!r}")
    return number


class NormSlots:
    """The places of norms in a gather: a slot for each parameter of a rank, as many on every rank."""

    def __init__(
        self,
        params: Sequence[Tensor],
        owners: Mapping[Tensor, Pieces],  # from which the pieces are, but for parameters that others keep
        pieces: Sequence[Pieces],
        group: RankGroup,
    ) -> None:
        self._of = owners, list(params)
        owned: list[list[int]] = [[] for _ in range(group.size)]  # by rank, parameters by index
        for index, of_param in enumerate(pieces):
            for piece in of_param:
                owned[piece.owner].append(index)
        self.num = max(map(len, owned))
        # What a rank sends, in doubles: norms, at least one filler, and what is known of the slots.
        self.width = self.num + 1 - (_HEADING_NBYTES + self.num) // -_DOUBLE.size
        # With whether this rank is the parameter's first owner.
        self.own = [(index, pieces[index][0].owner == group.rank) for index in owned[group.rank]]
        self._owned = owned
        self._known: tuple[Sequence[bytes], list[int], Tensor] | None = None

    def are_of(self, params: Sequence[Tensor], owners: Mapping[Tensor, Pieces]) -> bool:
        """Whether these are the slots of such parameters, with the same owners."""
        known, members = self._of
        return owners is known and len(params) == len(members) and all(map(is_, params, members))

    def of_present(self, present: Sequence[bytes]) -> tuple[list[int], Tensor]:
        """Return the parameters with a gradient, and for each as many places among what all ranks send.

        ``present``: of each rank and slot. A rank sends the norms of those with a gradient one behind the
        other. Places are in the order of ranks, which is that of rows, then that of a filler.
        """
        if self._known is None or self._known[0] != present:
            places: dict[int, list[int]] = {}
            for rank, indices in enumerate(self._owned):
                for place, index in enumerate(compress(indices, present[rank])):
                    places.setdefault(index, []).append(rank * self.width + place)
            most, measured = max(map(len, places.values()), default=0), sorted(places)
            table = [places[index] + [self.num] * (most - len(places[index])) for index in measured]
            self._known = present, measured, torch.tensor(table, dtype=torch.int64, device="cpu")
        return self._known[1], self._known[2]


def clip_together(
    group: RankGroup,
    params: Sequence[Tensor],
    slots: NormSlots,
    arguments: ClipArguments,
) -> Tensor:
    """Clip by the global norm, and return it; all ranks call. One collective or two; errors on every rank."""
    rows = list(map(rows_here, params))
    norm = _global_norm(group.during("clip"), params, rows, slots, arguments)
    return _clipped(params, rows, norm, arguments)


def clip_alone(params: Sequence[Tensor], arguments: ClipArguments) -> Tensor:
    """Clip gradients that each rank has whole, and return their norm. No communication."""
    order, present = arguments.check(), [param for param in params if param.grad is not None]
    rows = list(map(rows_here, present))
    norms = _norms([each for each in rows if each is not None], order, arguments.foreach)
    places = torch.arange(len(present), device="cpu").unsqueeze(1)
    norm = _total(present, places, torch.empty(0) if norms is None else norms, order, None)
    return _clipped(present, rows, norm, arguments)


def _clipped(
    params: Sequence[Tensor], rows: Sequence[Tensor | None], norm: Tensor, arguments: ClipArguments
) -> Tensor:
    """Scale gradients, of which ``rows`` are here, by their norm, and return it."""
    if arguments.error_if_nonfinite and not bool(norm.isfinite()):
        raise RuntimeError(
            f"the norm of order {arguments.norm_type} of all gradients is {norm.item()}: they cannot be "
            "clipped. Leave out error_if_nonfinite to scale them all the same"
        )
    on_host, beside = list[Tensor](), list[Tensor]()  # of device parameters, and all others
    for param, own in zip(params, rows, strict=True):
        if own is not None:
            (on_host if is_on_host(param.grad) else beside).append(own)
    if on_host:
        on_cpu = HostCopy(norm).read()
        private.foreach_mul_(on_host, torch.clamp(arguments.max_norm / (on_cpu + 1e-6), max=1.0))
    scaled: Any = [SimpleNamespace(grad=rows) for rows in beside]
    torch.nn.utils.clip_grads_with_norm_(scaled, arguments.max_norm, norm, arguments.foreach)
    return norm


def _global_norm(
    group: RankGroup,
    params: Sequence[Tensor],
    rows: Sequence[Tensor | None],
    slots: NormSlots,
    arguments: ClipArguments,
) -> Tensor:
    """Return the norm of all gradients, 0-d in their dtype; ``rows`` are those here; all ranks call."""
    device = params[0].device
    grads = [  # those whose norm this rank takes
        rows[index] if is_first or isinstance(grad, PartialGradient) or is_dtensor(grad) else None
        for index, is_first, grad in ((each, first, params[each].grad) for each, first in slots.own)
    ]
    heading, order, norms, failure = b"\1", 0.0, None, None
    try:
        order, present = arguments.check(), [grad for grad in grads if grad is not None]
        norms = _norms(present, order, arguments.foreach)
        heading = b"\0" + hashlib.sha256(str(arguments).encode()).digest()[: _HEADING_NBYTES - 1]
    except Exception as error:  # noqa: BLE001 - told to the others, and raised on every rank below
        failure = error
    has_grad = [norms is not None and grad is not None for grad in grads]
    filler = 0.0 if order >= 0 else math.inf  # which adds nothing to the norm of a row
    known, values = _exchanged(group, heading, has_grad, norms, slots, filler, device)
    if any(each[0] for each in known):
        raise one_error(group, failure)
    if len({each[:_HEADING_NBYTES] for each in known}) > 1:
        agree(group, [str(arguments)], "the arguments of clip_grad_norm_")
    measured, places = slots.of_present([each[_HEADING_NBYTES:] for each in known])
    goes_to = None if _sends_beside(group, device) else device
    return _total([params[index] for index in measured], places, values, order, goes_to)


def _total(
    measured: Sequence[Tensor], places: Tensor, values: Tensor, order: float, goes_to: torch.device | None
) -> Tensor:
    """Combine the norms of pieces by parameter, then those of parameters."""
    if not measured:
        return torch.tensor(0.0, device="cpu")
    held = {p.grad.dtype if isinstance(p.grad, PartialGradient) else p.dtype for p in measured}
    dtypes = [dtype.to_real() if dtype.is_complex else dtype for dtype in held]
    if goes_to is None:
        places = to_device(places, values.device)
    if places.shape[1] == 1:  # none is cut
        norms = values[places[:, 0]]
    else:
        norms = torch.linalg.vector_norm(values[places], order, dim=1)
    norms = norms.to(reduce(torch.promote_types, dtypes))
    total: Tensor = torch.linalg.vector_norm(norms if goes_to is None else to_device(norms, goes_to), order)
    return total


def _exchanged(
    group: RankGroup,
    heading: bytes,
    has_grad: Sequence[bool],
    norms: Tensor | None,
    slots: NormSlots,
    filler: float,
    device: torch.device,
) -> tuple[list[bytes], Tensor]:
    """Gather each rank's heading and bytes; and what all send, as `NormSlots` places it."""
    known = heading.ljust(_HEADING_NBYTES, b"\0") + bytes(has_grad).ljust(slots.num, b"\0")
    fillers = _DOUBLE.pack(filler) * (slots.num + 1 - (0 if norms is None else norms.numel()))
    behind = known.ljust(_DOUBLE.size * (slots.width - slots.num - 1), b"\0")
    is_beside = _sends_beside(group, device)
    place = device if is_beside else group.device
    parts = [] if norms is None else [to_device(norms, place).view(torch.uint8)]
    mine = torch.cat([*parts, to_device(bytes_to_tensor(fillers + behind), place)])
    if is_beside:
        everyone = group.all_gather_fixed(known)
        rows = group.all_gather_rows(mine)
    else:
        rows = group.read(HostCopy(group.all_gather_rows(mine)))
        everyone = [tensor_to_bytes(row[-len(behind) :])[: len(known)] for row in rows]
    return everyone, rows.view(torch.float64).view(-1)


def _sends_beside(group: RankGroup, device: torch.device) -> bool:
    """Return whether norms stay on the device and bytes use the CPU; equal on every rank."""
    if group.size == 1 or not is_asynchronous(device):
        return group.size == 1
    transport = group.transport(device)
    return not is_asynchronous(group.device) and transport.name != "" and transport.late_on is not None


def _norms(grads: Sequence[Tensor], norm_type: float, foreach: bool | None) -> Tensor | None:
    """Return each gradient's norm as ``torch.nn.utils`` takes it, without a wait; 1-D float64, exact."""
    dense = [grad.to_dense() if grad.is_sparse else grad for grad in grads]
    by_kind: dict[tuple[torch.device, torch.dtype], list[int]] = {}
    for index, grad in enumerate(dense):
        by_kind.setdefault((grad.device, grad.dtype), []).append(index)
    by_index: dict[int, Tensor] = {}
    for indices in by_kind.values():
        alike = [dense[index] for index in indices]
        if foreach is False:
            norms = [torch.linalg.vector_norm(grad, norm_type) for grad in alike]
        else:
            norms = list(private.foreach_norm(alike, norm_type))
        stacked = torch.stack(norms).double()
        if len(by_kind) == 1:
            return stacked
        by_index.update(zip(indices, stacked.unbind(), strict=True))
    if not dense:
        return None
    device = next((device for device, _ in by_kind if is_asynchronous(device)), dense[0].device)
    return torch.stack([to_device(by_index[index], device) for index in range(len(dense))])
