"""Tensors that have a parameter's memory keep following it, or are refused."""

import pytest
import torch
from torch import Tensor, nn

from pool import on_ranks
from zero_optim import ZeroRedundancyOptimizer
from zero_optim.ddp import DistributedDataParallel, FullyShardedDataParallel, ShardedDataParallel


class Tied(nn.Module):
    """A frozen head and a buffer over the memory of the trained weight."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.tokens = nn.Embedding(11, 6)
        self.head = nn.Linear(6, 11, bias=False)
        self.head.weight.requires_grad_(False)
        self.head.weight.data = self.tokens.weight.data
        self.register_buffer("seen", self.tokens.weight.data.view(-1))
        self.others = nn.Linear(6, 6)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.others(self.tokens(tokens)))


def optimizer_of(model: nn.Module) -> ZeroRedundancyOptimizer:
    params = [param for param in model.parameters() if param.requires_grad]
    return ZeroRedundancyOptimizer(params, torch.optim.SGD, lr=0.1)


@on_ranks(2)
@pytest.mark.parametrize("stage", [1, 2])
def test_a_frozen_weight_and_a_buffer_follow_the_parameter_whose_memory_they_have(stage: int) -> None:
    model, alone = Tied(), Tied()
    optimizer = optimizer_of(model)
    wrapped = DistributedDataParallel(model) if stage == 1 else ShardedDataParallel(model, optimizer)
    plain = torch.optim.SGD([param for param in alone.parameters() if param.requires_grad], lr=0.1)
    for _ in range(2):
        for it, steps in ((wrapped, optimizer), (alone, plain)):
            it(torch.arange(11)).square().mean().backward()
            steps.step()
            steps.zero_grad()
    assert model.others.weight.untyped_storage().nbytes() == model.others.weight.nbytes  # in its bucket
    assert all(map(torch.equal, model.state_dict().values(), alone.state_dict().values()))


@on_ranks(2)
def test_a_vector_of_the_user_follows_the_parameters_in_it() -> None:
    vector = torch.linspace(0, 1, 12)
    weights = [nn.Parameter(vector[:8].view(2, 4)), nn.Parameter(vector[8:])]
    optimizer = ZeroRedundancyOptimizer(weights, torch.optim.SGD, lr=0.1)
    for weight in weights:
        weight.grad = torch.ones_like(weight)
    optimizer.step()
    assert torch.equal(vector, torch.cat([weight.detach().view(-1) for weight in weights]))
    assert torch.equal(vector, torch.linspace(0, 1, 12) - 0.1)


@on_ranks(2)
def test_memory_that_is_shared_with_a_parameter_to_be_freed_is_refused() -> None:
    model = Tied()
    with pytest.raises(ValueError, match=r"^head\.weight has the memory of the parameter tokens\.weight"):
        FullyShardedDataParallel(model, optimizer_of(model))
