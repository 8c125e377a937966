"""A check, by distinct initial values, that ranks have unnamed parameters of equal shape in one order."""

import hashlib
from collections import Counter, defaultdict
from collections.abc import Collection, Hashable, Sequence
from itertools import accumulate, groupby, islice, pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from zero_optim.comm.collectives import RankGroup
from zero_optim.comm.wire import memory_of, pack
from zero_optim.errors import RankMismatchError
from zero_optim.plan.groups import ParamGroup, param_names, params_of
from zero_optim.plan.strides import dense_strides

_NUM_READ = 64  # elements of a parameter, at equal distances
_NBYTES = 8  # of a digest


class Alike(NamedTuple):
    """Unnamed parameters that only values distinguish: indices by kind, and some values of each."""

    kinds: list[list[int]]
    sizes: list[int]
    values: bytes

    @classmethod
    def among(cls, groups: Sequence[ParamGroup], apart: Collection[Tensor]) -> "Alike":
        """Find them and read 64 elements of each not in ``apart``; the CPU waits."""
        params = params_of(groups)
        unnamed = [param for group in groups if "param_names" not in group for param in group["params"]]
        is_read = set(unnamed).difference(apart)
        members: dict[Hashable, list[int]] = defaultdict(list)
        for index, param in enumerate(params):
            if param in is_read and param.numel():
                members[param.shape, param.dtype, dense_strides(param), param.requires_grad].append(index)
        kinds = [indices for indices in members.values() if len(indices) > 1]
        parts = [_some_elements(params[index]) for indices in kinds for index in indices]
        sizes = [part.numel() * part.element_size() for part in parts]
        alike = groupby(parts, key=lambda part: (part.dtype, part.device))  # few copies for many parameters
        values = _packed([torch.cat(list(members)) for _, members in alike], sum(sizes))
        return cls(kinds, sizes, values)

    def check_order(self, group: RankGroup, groups: Sequence[ParamGroup]) -> None:
        """Raise if ranks have the same values in another order; all ranks call; communicates."""
        mine = b"".join(_digests(self.values, self.sizes))
        names = param_names(groups)
        first: dict[Hashable, tuple[int, list[bytes]]] = {}
        for rank, payload in zip(group.numbers, group.all_gather_bytes(mine), strict=True):
            left = (payload[at : at + _NBYTES] for at in range(0, len(payload), _NBYTES))
            for number, indices in enumerate(self.kinds):
                own = list(islice(left, len(indices)))
                other, values = first.setdefault((number, frozenset(Counter(own).items())), (rank, own))
                if values != own:
                    place = next(at for at, value in enumerate(own) if value != values[at])
                    here, there = names[indices[place]], names[indices[values.index(own[place])]]
                    raise RankMismatchError(
                        f"ranks have parameters in another order: what rank {rank} has as {here}, rank "
                        f"{other} has as {there}. Give them in one order on every rank, or with their names: "
                        "model.named_parameters()"
                    )


def _some_elements(param: Tensor) -> Tensor:
    is_plain = param.is_contiguous() and not param.is_conj() and not param.is_neg()
    elements = param.detach().view(-1) if is_plain else memory_of(param).view(param.dtype)
    return elements[:: -(-len(elements) // _NUM_READ)]


def digests(memories: Sequence[Tensor]) -> list[bytes]:
    """Return digests of 8 bytes of 1-D bytes on any devices; the CPU waits."""
    sizes = [memory.numel() for memory in memories]
    return _digests(_packed(memories, sum(sizes)), sizes)


def _packed(tensors: Sequence[Tensor], nbytes: int) -> bytes:
    packed = torch.empty(nbytes, dtype=torch.uint8, device="cpu")
    pack(tensors, packed)
    return packed.numpy().tobytes()


def _digests(octets: bytes, sizes: Sequence[int]) -> list[bytes]:
    ends = accumulate(sizes, initial=0)
    return [hashlib.blake2b(octets[a:b], digest_size=_NBYTES).digest() for a, b in pairwise(ends)]
