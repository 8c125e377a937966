"""The models of the table of parity: each takes a batch of 4 rows of 8 numbers."""

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint


class Tower(nn.Module):
    """Blocks between a first and a last layer; a block may keep something of another dtype."""

    def __init__(self, depth: int = 3, width: int = 16) -> None:
        super().__init__()
        self.first = nn.Linear(8, width)
        self.blocks = nn.ModuleList(
            nn.Sequential(
                nn.LayerNorm(width), nn.Linear(width, 2 * width), nn.Tanh(), nn.Linear(2 * width, width)
            )
            for _ in range(depth)
        )
        self.last = nn.Linear(width, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for number in range(len(self.blocks)):
            x = self.add(x, number)
        return self.last(x)

    def add(self, x: Tensor, number: int) -> Tensor:
        return x + self.blocks[number](x)


class Gpt(nn.Module):
    """Attention, a checkpointed block, and a head tied to the embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(11, 8)
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
        self.norm = nn.LayerNorm(8)
        self.inner = nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 8))
        self.head = nn.Linear(8, 11, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.tokens((x.float().abs() * 5).long() % 11)
        hidden = self.norm(hidden + self.attention(hidden, hidden, hidden, need_weights=False)[0])
        hidden = hidden + checkpoint(self.inner, hidden, use_reentrant=False)
        return self.head(hidden)


class Recomputed(Tower):
    """Reentrant checkpointing."""

    def add(self, x: Tensor, number: int) -> Tensor:
        block = self.blocks[number]
        return x + (checkpoint(block, x, use_reentrant=True) if torch.is_grad_enabled() else block(x))


class Tiny(nn.Module):
    """Many small parameters, used in another order than that of registration."""

    def __init__(self) -> None:
        super().__init__()
        self.scales = nn.ParameterList(
            torch.randn(shape) for shape in [(), (1,), (8,), (3, 8), (2, 2, 8)] * 8
        )

    def forward(self, x: Tensor) -> Tensor:
        scales = [*self.scales]  # a slice of a ParameterList would make parameters of what DDP has cast
        terms = [(scale * x[0]).sin().sum() for scale in [*scales[::2], *scales[1::2]]]
        return torch.stack(terms)


class Tied(Tower):
    """Blocks share a layer's weight, and one is called twice."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks[1][1].weight = self.blocks[0][1].weight
        self.blocks[2] = self.blocks[0]


class Adapted(Tower):
    """LoRA: frozen layers, and small ones beside them that train."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks.requires_grad_(False)
        self.down = nn.ModuleList(nn.Linear(16, 2, bias=False) for _ in self.blocks)
        self.up = nn.ModuleList(nn.Linear(2, 16, bias=False) for _ in self.blocks)

    def add(self, x: Tensor, number: int) -> Tensor:
        return self.blocks[number](x) + self.up[number](self.down[number](x))


class Convolved(nn.Module):
    """Kernels in channels-last order, and norms: of groups, and of batches, which have buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.convs = nn.Sequential(
            nn.Conv2d(2, 6, 3, padding=1),
            nn.GroupNorm(2, 6),
            nn.ReLU(),
            nn.Conv2d(6, 4, 2),
            nn.BatchNorm2d(4),
        )
        self.head = nn.Linear(4, 3)
        self.to(memory_format=torch.channels_last)
        self.head.weight.data = self.head.weight.data.t().contiguous().t()

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.convs(x.reshape(-1, 2, 2, 2))
        return self.head(hidden.flatten(1))


class Unused(Tower):
    """A layer that nobody uses, and one that rank 0 uses now and then."""

    def __init__(self) -> None:
        super().__init__()
        self.never, self.odd, self.count = nn.Linear(16, 3), nn.Linear(3, 3), 0

    def forward(self, x: Tensor) -> Tensor:
        self.count += 1
        out = super().forward(x)
        return out + self.odd(out) if self.count % 2 == 0 and dist.get_rank() == 0 else out


class Dtypes(nn.Module):
    """Layers of three dtypes."""

    def __init__(self) -> None:
        super().__init__()
        kinds = (torch.float32, torch.bfloat16, torch.float64, torch.float32)
        self.layers = nn.ModuleList(nn.Linear(8, 8, dtype=dtype) for dtype in kinds)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x.to(layer.weight.dtype)).tanh()
        return x


class Complex(nn.Module):
    """Complex parameters, one in an order of its own, beside real ones."""

    def __init__(self) -> None:
        super().__init__()
        self.turn = nn.Parameter(torch.randn(8, 8, dtype=torch.complex64).t())
        self.wave = nn.Linear(8, 8, dtype=torch.complex64)
        self.head = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        turned = x.to(torch.complex64) @ self.turn * (1 + 2j)
        return self.head(self.wave(turned).abs())


class Words(nn.Module):
    """A sparse table between dense layers."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(20, 6, sparse=True)
        self.first, self.second = nn.Linear(6, 6), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        words = self.table((x.abs() * 10).long()[:, :4] % 20).sum(1)
        return self.second(self.first(words).tanh())


MODELS: dict[str, type[nn.Module]] = {
    "tower": Tower,
    "gpt": Gpt,
    "reentrant checkpoints": Recomputed,
    "many tiny": Tiny,
    "tied": Tied,
    "adapters of a frozen base": Adapted,
    "convolutions": Convolved,
    "unused": Unused,
    "dtypes": Dtypes,
    "complex": Complex,
    "sparse": Words,
}
