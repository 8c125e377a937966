"""How DTensors lie on ranks: each rank of one group holds a chunk of one dimension. No communication."""

import sys
from collections.abc import Mapping, Sequence
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from zero_optim.comm.collectives import RankGroup
from zero_optim.plan.pieces import Piece, Pieces
from zero_optim.plan.strides import contiguous_strides
from zero_optim.shard.registration import tensors_in

if TYPE_CHECKING:  # loading it takes as long as torch
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor, Placement
    from typing_extensions import TypeIs

_RULE = (
    "expected DTensors with one Shard, as fully_shard makes them on a mesh of one dimension, or of two with "
    "replicas (HSDP)"
)


def is_dtensor(value: object) -> "TypeIs[DTensor]":
    """Return whether a value is a DTensor."""
    known = sys.modules.get("torch.distributed.tensor")
    return known is not None and isinstance(value, known.DTensor)


class Chunks(NamedTuple):
    """A DTensor's dimension that is cut in chunks, as `torch.chunk` cuts, over one dimension of its mesh."""

    mesh: "DeviceMesh"
    mesh_dim: int
    dim: int
    pieces: Pieces  # each rank's chunk, without ranks that hold nothing


def chunks_of(tensor: "DTensor", name: str) -> Chunks:
    """Return how a DTensor is cut; ValueError with its name and placements if there is no rule for it."""
    from torch.distributed.tensor import Shard

    mesh, placements = tensor.device_mesh, tensor.placements
    cut = [number for number, each in enumerate(placements) if not each.is_replicate()]
    if len(cut) != 1 or type(shard := placements[cut[0]]) is not Shard:
        raise ValueError(f"{name} has placements {placements} on {mesh}: {_RULE}. Leave it unsharded there")
    chunks = Chunks(mesh, cut[0], shard.dim, chunk_pieces(tensor.shape[shard.dim], mesh.size(cut[0])))
    expected = shape_here(tensor.shape, shard.dim, mesh.get_local_rank(cut[0]), mesh.size(cut[0]))
    if local_rows(tensor).shape != expected:
        got = tuple(local_rows(tensor).shape)
        raise ValueError(f"{name} has a local shape of {got}, expected {tuple(expected)}: {_RULE}")
    return chunks


def held_among(named: Sequence[tuple[str, Tensor]], group: RankGroup) -> dict[Tensor, Chunks]:
    """Return the DTensors among parameters; ValueError if the group's ranks are not those that hold them."""
    held: dict[Tensor, Chunks] = {p: chunks_of(p, name) for name, p in named if is_dtensor(p)}
    for name, param in named:
        if param not in held:
            continue
        mesh, mesh_dim, *_ = held[param]
        ranks = dist.get_process_group_ranks(mesh.get_group(mesh_dim))
        if tuple(ranks) != group.works.ranks or mesh.get_local_rank(mesh_dim) != group.rank:
            raise ValueError(
                f"{name} is sharded over {mesh}, here by ranks {ranks}, and the optimizer has the process "
                f"group of ranks {list(group.works.ranks)}: expected one mesh for all parameters, and no "
                "process_group, or that of the mesh"
            )
        if local_rows(param).device.type == "meta":
            raise TypeError(
                f"expected a parameter with storage, got {name} on meta: call model.to_empty() and give "
                "the model values before the optimizer is built"
            )
    return held


def group_in(params: object) -> dist.ProcessGroup | None:
    """Return the process group of the ranks that hold the first DTensor, or None; params may be invalid."""
    for tensor in filter(is_dtensor, tensors_in(params)):
        for mesh_dim, placement in enumerate(tensor.placements):
            if placement.is_shard():
                group: dist.ProcessGroup = tensor.device_mesh.get_group(mesh_dim)
                return group
    return None


def local_rows(tensor: Tensor) -> Tensor:
    """Return what this rank holds of a DTensor, or a plain tensor itself."""
    if not is_dtensor(tensor):
        return tensor.detach()
    with torch.no_grad():
        rows: Any = tensor.to_local()
    values: Tensor = rows if type(rows) is Tensor else rows.wait()  # of a redistribution
    return values


def gradient_rows(param: Tensor, name: str) -> Tensor | None:
    """Return what this rank holds of a gradient, or None; TypeError if it is placed in another way."""
    grad = param.grad
    if grad is None:
        return None
    placements: Any = grad.placements if is_dtensor(grad) else "a plain tensor"
    if not is_dtensor(param) or placements != param.placements:
        raise TypeError(f"the gradient of {name} is {placements}, expected a DTensor placed as the parameter")
    rows = local_rows(grad)
    return rows if rows.dtype == param.dtype else rows.to(param.dtype)


def as_dtensor(rows: Tensor, param: Tensor, shape: Sequence[int]) -> Tensor:
    """Make a DTensor of a shape from this rank's rows: placed as the parameter, or else by its rows."""
    from torch.distributed.tensor import DTensor

    assert is_dtensor(param)
    placements = _placements(param, shape)
    size, strides = torch.Size(shape), contiguous_strides(shape)
    return DTensor.from_local(
        rows, param.device_mesh, placements, run_check=False, shape=size, stride=strides
    )


def placed_alike(tensor: Tensor, param: Tensor) -> bool:
    """Whether a tensor is a DTensor as `as_dtensor` makes it for a parameter."""
    if not is_dtensor(tensor) or not is_dtensor(param):
        return False
    placements = _placements(param, tensor.shape)
    return tensor.device_mesh == param.device_mesh and tensor.placements == tuple(placements)


def _placements(param: "DTensor", shape: Sequence[int]) -> "list[Placement]":
    from torch.distributed.tensor import Shard

    is_alike = tuple(shape) == tuple(param.shape)
    return [each if is_alike or not isinstance(each, Shard) else Shard(0) for each in param.placements]


def spans(length: int, size: int) -> list[tuple[int, int]]:
    """Return ``(start, stop)`` of each rank's chunk of a dimension; the last ones may be empty."""
    chunk = -(-length // size)
    ends = accumulate([chunk] * size, initial=0)
    return [(min(start, length), min(stop, length)) for start, stop in pairwise(ends)]


def shape_here(shape: Sequence[int], dim: int, rank: int, size: int) -> torch.Size:
    """Return the shape of a rank's chunk."""
    start, stop = spans(shape[dim], size)[rank]
    return torch.Size((*shape[:dim], stop - start, *shape[dim + 1 :]))


def chunk_pieces(length: int, size: int) -> Pieces:
    """Return each rank's chunk of a dimension, without ranks that hold nothing."""
    chunks = [Piece(rank, *ends) for rank, ends in enumerate(spans(length, size))]
    return tuple(piece for piece in chunks if piece.stop > piece.start) or (Piece(0, 0, 0),)


def row_pieces(held: Mapping[Tensor, Chunks]) -> dict[Tensor, Pieces | None]:
    """Return the pieces of those that are cut by rows; None for others."""
    return {param: cut.pieces if cut.dim == 0 else None for param, cut in held.items()}
