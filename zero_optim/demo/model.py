"""A small GPT over bytes whose parameters are all matrices, so that Muon can train it too."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from zero_optim.demo.config import ModelShape
from zero_optim.demo.text import VOCABULARY


class Block(nn.Module):
    """Attention, then a two-layer network, each with a residual connection."""

    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        width = shape.width
        self.heads = shape.heads
        self.qkv = _matrix(width, 3 * width)
        self.mix = _matrix(width, width, zero=True)
        self.up = _matrix(width, 4 * width)
        self.down = _matrix(4 * width, width, zero=True)

    def forward(
        self,
        x: Tensor,  # (samples, positions, width)
        turns: Tensor,  # (2, positions, width / heads / 2)
    ) -> Tensor:
        """Map features to features of the same shape."""
        x = x + self.mix(self._attend(_norm(x), turns))
        added: Tensor = self.down(F.relu(self.up(_norm(x))).square())
        return x + added

    def _attend(self, x: Tensor, turns: Tensor) -> Tensor:
        samples, positions, width = x.shape
        heads = self.qkv(x).view(samples, positions, 3, self.heads, width // self.heads)
        query, key, value = heads.permute(2, 0, 3, 1, 4)  # each (samples, heads, positions, features)
        mixed = F.scaled_dot_product_attention(
            _rotate(query, turns), _rotate(key, turns), value, is_causal=True
        )
        return mixed.transpose(1, 2).reshape(samples, positions, width)


class GPT(nn.Module):
    """A pre-norm transformer with rotary positions."""

    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        self.context = shape.context
        self.head_width = shape.width // shape.heads
        self.embedding = nn.Embedding(VOCABULARY, shape.width)
        nn.init.normal_(self.embedding.weight, std=0.02)
        self.blocks = nn.ModuleList(Block(shape) for _ in range(shape.layers))
        self.head = _matrix(shape.width, VOCABULARY)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return logits (samples, positions, 256) for tokens (samples, positions), positions <= context."""
        x = self.embedding(tokens)
        # Computed again each time, which is cheap. If it were a buffer, DDP would send it before every pass.
        turns = _turns(tokens.shape[1], self.head_width, x.device)
        for block in self.blocks:
            x = block(x, turns)
        logits: Tensor = self.head(_norm(x))
        return logits


@torch.no_grad()
def generate(
    model: GPT,
    prompt: Tensor,  # (bytes,) uint8, at least one
    length: int,  # bytes to add
    seed: int,
) -> bytes:
    """Return bytes that continue a prompt, sampled at temperature 0.8, on the CPU."""
    device = model.embedding.weight.device
    generator = torch.Generator().manual_seed(seed)
    tokens = prompt.long().to(device)
    for _ in range(length):
        logits = model(tokens[None, -model.context :])[0, -1].float().cpu()
        odds = torch.softmax(logits / 0.8, dim=-1)
        tokens = torch.cat((tokens, torch.multinomial(odds, 1, generator=generator).to(device)))
    return bytes(tokens[len(prompt) :].tolist())


def _matrix(inputs: int, outputs: int, *, zero: bool = False) -> nn.Linear:
    """Return a linear layer; a branch's last starts at zero, so a new block is the identity."""
    matrix = nn.Linear(inputs, outputs, bias=False)
    nn.init.normal_(matrix.weight, std=0.0 if zero else 0.5 * inputs**-0.5)
    return matrix


def _norm(x: Tensor) -> Tensor:
    return F.layer_norm(x, x.shape[-1:])


def _turns(positions: int, features: int, device: torch.device) -> Tensor:
    """Return cosines and sines of every position's angles (Su et al., "RoFormer", 2021)."""
    speeds = 10_000.0 ** (-torch.arange(0, features, 2, device=device) / features)
    angles = torch.outer(torch.arange(positions, device=device), speeds)
    return torch.stack((angles.cos(), angles.sin()))


def _rotate(x: Tensor, turns: Tensor) -> Tensor:
    """Rotate pairs of features by their position's angles: dot products then depend on distance."""
    cos, sin = turns
    left, right = x.chunk(2, dim=-1)
    return torch.cat((left * cos - right * sin, right * cos + left * sin), dim=-1).type_as(x)
