"""PowerSGD for one bucket in one iteration; `zero_optim.hooks.power_sgd` has the algorithm, and calls."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor

from zero_optim.compat.streams import record_use
from zero_optim.hooks.bucket import TensorFuture
from zero_optim.hooks.exchange import start_average
from zero_optim.hooks.memory import forget_non_finite, working_dtype
from zero_optim.hooks.order import LaterStage


@dataclass(frozen=True, slots=True)
class Block:
    """A matrix in a bucket that is compressed.

    Args:
        key: the numbers of its parameters; its Q is remembered under this key.
        offset: its first element in the bucket.
        rows: of the matrix, and of P.
        columns: of the matrix; rows of Q.
        rank: columns of P and Q.
    """

    key: tuple[int, ...]
    offset: int
    rows: int
    columns: int
    rank: int

    @property
    def numel_sent(self) -> int:
        """Elements of P and Q together."""
        return (self.rows + self.columns) * self.rank

    def of(self, flat: Tensor) -> Tensor:
        """View this matrix in a flat tensor."""
        return flat.narrow(0, self.offset, self.rows * self.columns).view(self.rows, self.columns)


@dataclass(frozen=True, slots=True)
class Split:
    """Which parts of a bucket are compressed, and which are not.

    Args:
        blocks: the matrices to compress, in families of one shape. The Ps of a family are orthonormalized
            together, and so are its Qs.
        rest: offset and length of each part that is sent uncompressed.
        numel: length of the flat tensor that they are parts of, at least that of the bucket.
    """

    blocks: list[list[Block]]
    rest: list[tuple[int, int]]
    numel: int

    @property
    def numel_rest(self) -> int:
        """Elements sent uncompressed."""
        return sum(numel for _, numel in self.rest)

    @property
    def numel_p(self) -> int:
        """Elements of all Ps."""
        return sum(block.rows * block.rank for family in self.blocks for block in family)

    @property
    def numel_q(self) -> int:
        """Elements of all Qs."""
        return sum(block.columns * block.rank for family in self.blocks for block in family)

    @property
    def numel_sent(self) -> int:
        """Elements sent in all."""
        return self.numel_rest + self.numel_p + self.numel_q


@dataclass(slots=True, eq=False)
class Round:
    """Compresses, averages and restores one bucket once.

    What lives longer than a callback is allocated in `run`: on CUDA each callback has its own stream, and
    what is allocated there belongs to that stream.

    Args:
        buffer: the bucket, 1-D; receives the result.
        split: what to compress.
        errors: of the bucket, ``split.numel`` elements; None without error feedback.
        queries: the Qs to start from, by key. New Qs replace them when the bucket is done. None starts from
            random Qs.
        seed: for random Qs; the same on all ranks, another one in every iteration.
        epsilon: see `orthonormal`.
    """

    buffer: Tensor
    split: Split
    errors: Tensor | None
    queries: dict[tuple[int, ...], Tensor] | None
    seed: int
    epsilon: float
    flat: Tensor = field(init=False)  # (split.numel,) M, then the error if there is feedback
    sent_p: Tensor = field(init=False)  # (numel_rest + numel_p,) in the bucket's dtype
    sent_q: Tensor = field(init=False)  # (numel_q,) in the bucket's dtype
    ps: list[Tensor] = field(default_factory=list, init=False)  # (family, rows, rank) each

    def run(self, group: dist.ProcessGroup, later: LaterStage) -> torch.futures.Future[torch.Tensor]:
        """Start the first all-reduce; callbacks do the rest. All ranks of the group call.

        This object keeps neither argument, see Note [Callbacks own no process group].

        Args:
            group: for the first all-reduce.
            later: for the second all-reduce.
        """
        self.flat = self._gradient()
        self.sent_p = self.buffer.new_empty(self.split.numel_rest + self.split.numel_p)
        self.sent_q = self.buffer.new_empty(self.split.numel_q)
        self._copy_rest_in()
        for family, p in zip(self.split.blocks, self._families(self._p_area()), strict=True):
            q = orthonormal(self._starting_q(family), self.epsilon)
            for block, block_p, block_q in zip(family, p, q, strict=True):
                block_p.copy_(block.of(self.flat) @ block_q)
        first = start_average(group, self.sent_p)
        if not self.split.blocks:
            return first.then(self._copy_rest_out)
        device = self.buffer.device
        return later.follow(first, device, self._compute_q, self._start_q, self._restore)

    def _gradient(self) -> Tensor:
        """Return M: the gradient plus the errors, in the dtype to compute in."""
        numel = self.buffer.numel()
        if self.errors is not None:
            self.errors[:numel].add_(self.buffer)
            return self.errors
        if numel == self.split.numel:
            return self.buffer.to(working_dtype(self.buffer.dtype))
        flat = self.buffer.new_zeros(self.split.numel, dtype=working_dtype(self.buffer.dtype))
        flat[:numel].copy_(self.buffer)
        return flat

    def _starting_q(self, family: Sequence[Block]) -> Tensor:  # (family, columns, rank)
        known = self.queries or {}
        return torch.stack(
            [
                forget_non_finite(known[block.key].to(self.flat))
                if block.key in known
                else self._random(block)
                for block in family
            ]
        )

    def _random(self, block: Block) -> Tensor:
        generator = torch.Generator(self.flat.device).manual_seed((self.seed + block.key[0]) % 2**63)
        return torch.randn(
            block.columns, block.rank, generator=generator, device=self.flat.device, dtype=self.flat.dtype
        )

    def _copy_rest_in(self) -> None:
        if self.split.rest:
            parts = [self.flat.narrow(0, offset, numel) for offset, numel in self.split.rest]
            torch.cat(parts, out=self.sent_p[: self.split.numel_rest])

    def _copy_rest_out(self, first: TensorFuture) -> Tensor:
        """Copy the averages of the uncompressed parts back to their places. They have no errors."""
        first.value()  # raises what the collective raised
        record_use(self.buffer, self.flat, self.sent_p, self.sent_q)
        start = 0
        for offset, numel in self.split.rest:
            self.buffer.narrow(0, offset, numel).copy_(self.sent_p.narrow(0, start, numel))
            if self.errors is not None:
                self.errors.narrow(0, offset, numel).zero_()
            start += numel
        return self.buffer

    def _compute_q(self, first: TensorFuture) -> None:
        """Compute the Qs of this rank, which are then averaged, and the errors that they leave."""
        self._copy_rest_out(first)
        for p in self._families(self._p_area()):
            self.ps.append(orthonormal(p.to(self.flat.dtype), self.epsilon))
        for block, block_p, block_q in self._products():
            matrix = block.of(self.flat)
            block_q.copy_(matrix.t() @ block_p)
            if self.errors is not None:
                matrix.addmm_(block_p, block_q.to(self.flat.dtype).t(), alpha=-1)
        if self.errors is not None:
            forget_non_finite(self.errors)
            self.errors[self.buffer.numel() :].zero_()  # padding has no gradient to correct

    def _start_q(self, group: dist.ProcessGroup) -> TensorFuture:
        return start_average(group, self.sent_q)

    def _restore(self, second: TensorFuture) -> Tensor:
        """Write the products of Ps and Qs to the bucket, and remember the Qs."""
        second.value()  # raises what the collective raised
        record_use(self.buffer, self.flat, self.sent_q, *self.ps)
        for block, block_p, block_q in self._products():
            product = (block_p @ block_q.to(self.flat.dtype).t()).view(-1)
            target = self.buffer[block.offset : block.offset + len(product)]  # without the square's padding
            target.copy_(product[: len(target)])
            if self.queries is not None:
                self.queries[block.key] = block_q
        return self.buffer

    def _products(self) -> Iterator[tuple[Block, Tensor, Tensor]]:
        """Yield each block with its P and its Q."""
        qs = self._families(self.sent_q, of_q=True)
        for family, p, q in zip(self.split.blocks, self.ps, qs, strict=True):
            yield from zip(family, p, q, strict=True)

    def _p_area(self) -> Tensor:
        return self.sent_p[self.split.numel_rest :]

    def _families(self, sent: Tensor, of_q: bool = False) -> Iterator[Tensor]:
        """View the Ps or Qs that are sent, one family after the other."""
        start = 0
        for family in self.split.blocks:
            rows, rank = family[0].columns if of_q else family[0].rows, family[0].rank
            numel = len(family) * rows * rank
            yield sent[start : start + numel].view(len(family), rows, rank)
            start += numel


def orthonormal(
    matrices: Tensor,  # (family, rows, rank), rank <= rows
    epsilon: float,
) -> Tensor:  # (family, rows, rank)
    """Orthonormalize the columns of each matrix.

    It uses Householder's QR, not Gram-Schmidt as in the paper. If a gradient has a lower rank than P, the
    last columns hold only rounding noise. Gram-Schmidt scales them to unit vectors that are not orthogonal to
    the first columns.

    Args:
        matrices: float32 or float64. Columns of zeros become some unit vectors.
        epsilon: column i is scaled by ``r / (r + epsilon)``, where r is the length of its part that is
            orthogonal to the columns before.
    """
    basis, triangle = torch.linalg.qr(matrices)
    basis = basis.contiguous()  # LAPACK's is column-major; the matrices multiplied with it are row-major
    if epsilon > 0:
        lengths = triangle.diagonal(dim1=-2, dim2=-1).abs()
        basis = basis * (lengths / (lengths + epsilon)).unsqueeze(-2)
    assert isinstance(basis, Tensor)  # linalg.qr says nothing of its types
    return basis
