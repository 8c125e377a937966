"""The model that every cell trains, and the inputs of each rank and step."""

from itertools import pairwise

import torch
from torch import Tensor, nn

STEPS = 8
SIZE = 2  # ranks
WIDTHS = (6, 8, 10, 4)  # as in most models, rows divide evenly by the ranks
ROWS = 10  # of an embedding
SPARSE = ("sparse", "added")


class Block(nn.Module):
    """A linear layer, a norm and tanh; without bias and norm where a class takes matrices alone."""

    def __init__(self, inputs: int, outputs: int, *, has_vectors: bool) -> None:
        super().__init__()
        self.linear = nn.Linear(inputs, outputs, bias=has_vectors)
        self.norm = nn.LayerNorm(outputs) if has_vectors else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = torch.tanh(self.norm(self.linear(x)))
        return out


class Tower(nn.Module):
    """Three blocks, equal on every rank.

    Args:
        feed: "mixed" (matrices and vectors), "matrices", "sparse" (embeddings with sparse gradients), or
            "added" (the same, added up, so that autograd gives all of them the same gradient tensor).
        dtype: of the parameters.
    """

    def __init__(self, feed: str, dtype: torch.dtype) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.feed = feed
        self.blocks = nn.ModuleList(
            nn.Embedding(ROWS, WIDTHS[-1], sparse=True)
            if feed in SPARSE
            else Block(inputs, outputs, has_vectors=feed == "mixed")
            for inputs, outputs in pairwise(WIDTHS)
        )
        self.to(dtype)
        with torch.no_grad():
            for param in self.parameters():
                if param.dim() == 1:
                    param.add_(torch.randn(param.shape, dtype=torch.float64).mul(0.1).to(dtype))

    def forward(self, x: Tensor) -> Tensor:
        if self.feed in SPARSE:
            factors = (1.0, 1.0, 1.0) if self.feed == "added" else (1.0, 0.5, 2.0)
            first, second, third = (
                factor * block(x) if factor != 1.0 else block(x)
                for factor, block in zip(factors, self.blocks, strict=True)
            )
            return torch.tanh(first + second + third)
        for block in self.blocks:
            x = block(x)
        return x


def batch(feed: str, dtype: torch.dtype, *place: int) -> tuple[Tensor, Tensor]:
    """Return inputs and targets of a rank, step and pass."""
    rank, step, part = place
    generator = torch.Generator().manual_seed(1 + rank + 10 * step + 1000 * part)
    targets = torch.rand(4, WIDTHS[-1], generator=generator, dtype=torch.float64).mul(2).sub(1)
    if feed in SPARSE:
        return torch.randint(ROWS, (4,), generator=generator), targets.to(dtype)
    inputs = torch.randn(4, WIDTHS[0], generator=generator, dtype=torch.float64)
    return inputs.to(dtype), targets.to(dtype)


def loss_of(outputs: Tensor, targets: Tensor) -> Tensor:
    return (outputs - targets).square().mean()
