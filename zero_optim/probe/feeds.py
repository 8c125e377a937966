"""The parameters and gradients of trials.

Note [Gradients that trigger]
    Some optimizers couple parameters only under a condition. So there are a huge constant gradient (SWATS
    switches to SGD when two estimates agree), a norm above any clipping threshold, gradients orthogonal to
    the weights (AdamP, SGDP), tiny, zero and missing ones, changing signs, zero weights (LARS does not scale
    them), and more steps than RAdam's warm-up and Ranger's look-ahead need.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

import torch
from torch import Tensor

from zero_optim.plan.plan import ALIGNMENT_NBYTES

Shape: TypeAlias = tuple[int, ...]

# (parameter, step) without a gradient: one, a whole group, and that with the huge gradient.
_GAPS = frozenset({(1, 3), (1, 5), (3, 5), (5, 5), (0, 6)})
# Some classes factor or quantize state from some size on: 128 rows, or 4096 elements that fill blocks. What
# they rounded shows from the second step on.
LARGE = (256, 176)
STEPS_OF_LARGE = 3


@dataclass(frozen=True, slots=True)
class Feed:
    """Parameters and gradients of a trial. See Note [Gradients that trigger]."""

    shapes: tuple[Shape, ...]
    gaps: bool = True  # some gradients are None on some steps
    sparse: bool = False
    num_groups: int = 2
    num_in_group: int = 2  # at least
    num_steps: int = 9
    dtype: torch.dtype = torch.float32
    second: torch.dtype | None = None  # of every other parameter of a group
    huge: float = 1e4  # above any clipping threshold or damping constant; its square is far from overflow

    def of_one(self, *shapes: Shape, num_steps: int | None = None) -> "Feed":
        """Return a feed of these shapes alone, without gaps."""
        steps = self.num_steps if num_steps is None else num_steps
        return replace(self, shapes=shapes, gaps=False, num_groups=1, num_in_group=1, num_steps=steps)

    def with_rows(self) -> "Feed":
        """Return a feed with parameters long enough for cuts between rows."""
        apart = [rows_apart(torch.empty(shape, dtype=self.dtype, device="meta")) for shape in self.shapes]
        longer = ((2 * rows + shape[0], *shape[1:]) for rows, shape in zip(apart, self.shapes, strict=True))
        return replace(self, shapes=tuple(longer))

    def shape(self, index: int) -> Shape:
        """Return a parameter's shape."""
        return self.shapes[index % len(self.shapes)]

    def dtype_of(self, index: int) -> torch.dtype:
        """Return a parameter's dtype."""
        is_second = self.second is not None and index // self.num_groups % 2
        return self.second if is_second and self.second is not None else self.dtype

    def noise(self) -> list[Tensor]:
        """Return fixed normal numbers: a row for each step of a parameter, the last for its start."""
        num_params = max(len(self.shapes), self.num_in_group * self.num_groups)
        sizes = [math.prod(self.shape(index)) for index in range(num_params)]
        generator = torch.Generator().manual_seed(20)
        rows = torch.randn((self.num_steps + 1, sum(sizes)), generator=generator, dtype=torch.float32)
        return list(torch.split(rows, sizes, dim=1))

    def starts(self, noise: Sequence[Tensor]) -> dict[int, Tensor]:
        """Return the first values of all parameters."""
        values = {}
        for index, of_param in enumerate(noise):
            row = of_param[-1]
            value = (row, row * 0, row * 1e-3, row, row.clamp(min=0), row)[index % 6]
            values[index] = value.reshape(self.shape(index)).to(self.dtype_of(index))
        return values

    def gradient(self, index: int, step: int, noise: Tensor, weights: Tensor) -> Tensor | None:
        """Return a parameter's gradient at a step, from its current value."""
        if self.gaps and (index, step) in _GAPS:
            return None
        dense = self._dense(index % 6, step, noise, weights).reshape(weights.shape).to(weights.dtype)
        if not self.sparse:
            return dense
        rows = torch.zeros_like(dense)  # one row: more rows start threads, which costs a millisecond
        rows[step % len(rows)] = dense[step % len(rows)]
        return rows.to_sparse(1)

    def _dense(self, kind: int, step: int, noise: Tensor, weights: Tensor) -> Tensor:
        row = noise[step]
        if kind == 0 and step < 5:
            return noise[0] * self.huge
        if kind == 2:
            row = row * 1e-5
        elif kind in (3, 5):
            flat = row.reshape(weights.shape) if weights.dim() > 1 else row.reshape(1, -1)
            flat = flat.flatten(1)
            along = weights.detach().to(flat.dtype).reshape(flat.shape)
            factor = (flat * along).sum(1, keepdim=True) / (along * along).sum(1, keepdim=True).clamp(1e-30)
            row = flat - factor * along  # orthogonal to the weights, or to their rows
        elif kind == 4:
            row = row.clamp(min=0) * (0 if step == 4 else 3)
        spike = self.huge**2 if step == 7 and kind > 3 else 1.0
        return row * (spike * {6: 1e-6, 7: 30.0}.get(step, 1.0))


def rows_apart(value: Tensor) -> int:
    """Return the least number of rows that end at an aligned address."""
    row_nbytes = value.element_size() * value.numel() // len(value)
    return math.lcm(row_nbytes, ALIGNMENT_NBYTES) // row_nbytes
