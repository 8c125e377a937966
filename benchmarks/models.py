"""The models that benchmarks train."""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class Workload(NamedTuple):
    """A model, its batches and its loss."""

    model: nn.Module
    batch: Callable[[torch.Generator], Tensor]
    loss: Callable[[Tensor], Tensor]


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention, self.project = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        heads = self.attention(self.norm1(x)).view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        query, key, value = heads.unbind(0)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.project(mixed.transpose(1, 2).reshape(batch, length, width))
        out: Tensor = x + self.down(F.gelu(self.up(self.norm2(x))))
        return out


class Gpt(nn.Module):
    """6 layers, width 384, vocabulary 4096, untied head: 13.8 M parameters."""

    def __init__(
        self, layers: int = 6, width: int = 384, vocab: int = 4096, context: int = 64, heads: int = 6
    ) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(vocab, width), nn.Embedding(context, width)
        self.blocks = nn.Sequential(*[Block(width, heads) for _ in range(layers)])
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocab, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens) + self.places.weight[: tokens.shape[1]]
        logits: Tensor = self.head(self.norm(self.blocks(x)))
        return F.cross_entropy(logits.flatten(0, 1), tokens.flatten())


class LlamaBlock(nn.Module):
    def __init__(self, width: int, inner: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.RMSNorm(width), nn.RMSNorm(width)
        self.query, self.key, self.value, self.out = (nn.Linear(width, width, bias=False) for _ in range(4))
        self.gate, self.up = (nn.Linear(width, inner, bias=False) for _ in range(2))
        self.down = nn.Linear(inner, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        y = self.norm1(x)
        heads = (
            m(y).view(batch, length, self.heads, -1).transpose(1, 2)
            for m in (self.query, self.key, self.value)
        )
        query, key, value = heads
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, length, width))
        y = self.norm2(x)
        result: Tensor = x + self.down(F.silu(self.gate(y)) * self.up(y))
        return result


class Llama(nn.Module):
    """The shapes of Llama 7 B, without rotary embeddings."""

    def __init__(self, divide: int) -> None:
        super().__init__()
        width, vocab = 4096 // divide, 32000 // divide
        self.tokens = nn.Embedding(vocab, width)
        self.blocks = nn.Sequential(*(LlamaBlock(width, 11008 // divide, 32 // divide) for _ in range(32)))
        self.norm, self.head = nn.RMSNorm(width), nn.Linear(width, vocab, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        logits: Tensor = self.head(self.norm(self.blocks(self.tokens(tokens))))
        return F.cross_entropy(logits.flatten(0, 1), tokens.flatten())


class Gpt2(Gpt):
    """GPT-2 of 124 M parameters, whose head is its embedding."""

    def __init__(self, divide: int) -> None:
        super().__init__(12, 768 // divide, 50257 // divide, 1024, 12 // divide)
        self.head.weight = self.tokens.weight


class Tiny(nn.Module):
    """600 parameters of at most 64 x 64."""

    def __init__(self, layers: int = 300) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(layers))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + 0.01 * layer(x)
        return x.square().mean()


class Residual(nn.Module):
    def __init__(self, inner: int, outer: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inner, outer, 3, stride, 1, bias=False)
        self.conv2 = nn.Conv2d(outer, outer, 3, 1, 1, bias=False)
        self.norm1, self.norm2 = nn.BatchNorm2d(outer), nn.BatchNorm2d(outer)
        self.skip = nn.Conv2d(inner, outer, 1, stride, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm2(self.conv2(F.relu(self.norm1(self.conv1(x)))))
        return F.relu(y + self.skip(x))


class ResNet(nn.Module):
    """Residual blocks of convolutions and batch norms, whose buffers are broadcast in every forward pass."""

    def __init__(self) -> None:
        super().__init__()
        widths = [
            (3, 32, 1),
            (32, 32, 1),
            (32, 64, 2),
            (64, 64, 1),
            (64, 128, 2),
            (128, 128, 1),
            (128, 256, 2),
        ]
        self.blocks = nn.Sequential(*[Residual(*sizes) for sizes in widths])
        self.head = nn.Linear(256, 10)

    def forward(self, x: Tensor) -> Tensor:
        scores: Tensor = self.head(self.blocks(x).mean((2, 3)))
        return scores.square().mean()


def workload(name: str) -> Workload:
    """Build "gpt" (1 x 64 tokens), "tiny" (600 parameters) or "resnet" (2 images), with fixed values."""
    torch.manual_seed(0)
    if name == "gpt":
        return Workload(Gpt(), lambda g: torch.randint(4096, (1, 64), generator=g), lambda out: out)
    if name == "tiny":
        return Workload(Tiny(), lambda g: torch.randn(8, 64, generator=g), lambda out: out)
    return Workload(ResNet(), lambda g: torch.randn(2, 3, 32, 32, generator=g), lambda out: out)
