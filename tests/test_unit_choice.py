"""Which modules of a model are units, when nobody says."""

import pytest
import torch
from torch import nn

from zero_optim.ddp.full.choice import choose_units


class Stack(nn.Module):
    """Equal layers between an embedding and a head."""

    def __init__(self, layers: nn.Module) -> None:
        super().__init__()
        self.tokens, self.layers, self.norm = nn.Embedding(8, 64), layers, nn.LayerNorm(64)


def layer() -> nn.Module:
    return nn.Sequential(nn.Linear(64, 64), nn.LayerNorm(64), nn.Linear(64, 64))


@pytest.mark.parametrize("kind", [nn.ModuleList, nn.Sequential])
@pytest.mark.parametrize("depth", [4, 64])
def test_no_unit_has_most_of_a_model_of_equal_layers(kind: type[nn.Module], depth: int) -> None:
    with torch.device("meta"):
        layers = [layer() for _ in range(depth)]
        model = Stack(kind(layers) if kind is nn.ModuleList else kind(*layers))
    choice = choose_units(model, "auto")
    nbytes = [0] * len(choice.names)
    for param, number in choice.unit_of.items():
        nbytes[number] += param.nbytes
    assert max(nbytes) <= sum(nbytes) / 7
    if depth == 64:
        assert choice.names[1:] == tuple(f"layers.{number}" for number in range(64))
