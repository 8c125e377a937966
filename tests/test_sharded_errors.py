"""What sharded gradients refuse, and what ranks see when something goes wrong."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook

from breaking import Stops, in_backward_of
from overlap import Net, adamw, inputs, loss_of
from parity_reference import InRankOrder
from pool import on_ranks
from sharded import Setting, assert_same_gradients
from zero_optim import ZeroRedundancyOptimizer
from zero_optim.ddp import ShardedDataParallel
from zero_optim.errors import ReductionError
from zero_optim.step.partial import PartialGradient


@on_ranks(2)
def test_a_module_that_is_wrapped_anew_trains_with_the_last_wrapper_and_the_first_says_so() -> None:
    torch.manual_seed(0)
    model = nn.Linear(4, 4)
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.SGD, lr=0.1)
    alone = nn.Linear(4, 4)
    alone.load_state_dict(model.state_dict())
    plain = torch.optim.SGD(alone.parameters(), lr=0.1)
    first, last = (ShardedDataParallel(model, optimizer, accumulate="local") for _ in range(2))
    for net, each in ((last, optimizer), (alone, plain)):
        for _ in range(2):
            net(torch.ones(2, 4)).square().sum().backward()
            each.step()
            each.zero_grad()
    assert torch.equal(model.weight, alone.weight)
    with pytest.raises(RuntimeError, match=r"wrapped anew.*by the wrapper that was made last"):
        first(torch.ones(2, 4))
    with first.no_sync(), pytest.raises(RuntimeError, match="wrapped anew"):
        first(torch.ones(2, 4))


@on_ranks(2)
def test_options_without_a_meaning_and_optimizers_that_own_no_gradients_are_refused() -> None:
    model = Net()
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    others = ZeroRedundancyOptimizer([*model.parameters()], torch.optim.SGD, lr=0.1)
    group = dist.new_group([*range(dist.get_world_size())])
    for options, error, words in (
        ({"bucket_cap_mb": 1}, TypeError, "ShardedDataParallel takes no bucket_cap_mb: buckets are"),
        ({"colour": "red"}, TypeError, "expected options among"),
        ({"accumulate": 3}, ValueError, 'expected accumulate to be "owner" or "local", got 3'),
        ({"optimizer": sgd}, TypeError, r"expected a zero_optim\.ZeroRedundancyOptimizer, got SGD"),
        ({"optimizer": others}, ValueError, r"^the optimizer does not have conv\.weight, conv\.bias"),
        ({"process_group": group}, ValueError, "process_group is another group than that of the optimizer"),
    ):
        with pytest.raises(error, match=words):
            ShardedDataParallel(other := Net(), **{"optimizer": adamw(other), **options})
    with pytest.raises(RuntimeError, match="takes no comm hook"):
        Setting().sharded()[0].register_comm_hook(None, allreduce_hook)


@on_ranks(2)
def test_the_norm_of_pytorch_is_refused_on_partial_gradients() -> None:
    wrapped, optimizer = Setting().sharded()
    loss_of(wrapped, 0).backward()
    with pytest.raises(RuntimeError, match=r"optimizer\.clip_grad_norm_\(\), in the place of torch"):
        nn.utils.clip_grad_norm_(wrapped.parameters(), 1.0)
    before = [param.detach().clone() for param in wrapped.parameters()]
    optimizer.step()
    assert all(not torch.equal(a, b) for a, b in zip(wrapped.parameters(), before, strict=True))


@dataclass
class Hidden:
    """An output that shows no tensor."""

    make: Callable[[], Tensor]


class Hiding(Net):
    """Its loss does not go through its output."""

    def forward(self, x: Tensor, with_spare: bool = True) -> Any:
        out = super().forward(x, with_spare)
        return Hidden(lambda: out)


@on_ranks(2)
def test_a_pass_that_no_output_shows_gives_the_bits_of_whole_gradients() -> None:
    (whole, one), (wrapped, optimizer) = Setting(Hiding).whole(), Setting(Hiding).sharded()
    for number in range(2):
        for model, stepped in ((whole, one), (wrapped, optimizer)):
            stepped.zero_grad()
            model(inputs(number)).make().square().mean().backward()
            stepped.step()
    assert_same_gradients(wrapped, whole)
    for a, b in zip(whole.parameters(), wrapped.parameters(), strict=True):
        assert torch.equal(a, b)


class LossWeight(Net):
    """One parameter is used by the loss alone, before autograd has come to any output."""

    def __init__(self) -> None:
        super().__init__()
        self.log_var = nn.Parameter(torch.zeros(3))

    def loss(self, out: Tensor) -> Tensor:
        return out.square().mean() * torch.exp(-self.log_var).sum() + self.log_var.square().sum()


@on_ranks(2)
@pytest.mark.parametrize(
    ("through", "create_graph"), [("wrapper", False), ("module", False), ("module", True)]
)
@pytest.mark.filterwarnings("ignore:.*create_graph=True")
def test_passes_that_begin_at_a_parameter_add_up(through: str, create_graph: bool) -> None:
    """The second of two passes adds to what the first has left at the owners."""
    (wrapped, optimizer), whole = Setting(LossWeight).sharded(), InRankOrder(LossWeight(), by_pass=True)
    for number in range(2):
        whole.module.loss(whole(inputs(number))).backward()
    wrapped.module.loss(wrapped(inputs(0))).backward()
    called = wrapped.module if through == "module" else wrapped
    wrapped.module.loss(called(inputs(1))).backward(create_graph=create_graph)
    if create_graph:  # other operators compute the gradients
        owned = {*optimizer.owned_parameters()}
        assert owned
        for param, want in zip(wrapped.parameters(), whole.parameters(), strict=True):
            assert param not in owned or torch.allclose(param.grad, want.grad)  # type: ignore[arg-type]
    else:
        assert_same_gradients(wrapped, whole)
    optimizer.step()


def own_copies(model: nn.Module) -> dict[str, Tensor]:
    return {
        name: param.grad.clone()
        for name, param in model.named_parameters()
        if param.grad is not None and not isinstance(param.grad, PartialGradient)
    }


@on_ranks(2)
def test_a_pass_that_lacks_a_gradient_raises_on_every_rank_and_leaves_what_was_added_up_before() -> None:
    wrapped, optimizer = Setting().sharded()
    loss_of(wrapped, 0).backward()
    before = own_copies(wrapped)
    loss = wrapped(inputs(1), dist.get_rank() == 0).square().mean()
    with pytest.raises(ReductionError, match=r"rank 1: no gradient for spare\.weight, spare\.bias"):
        loss.backward()
    after = own_copies(wrapped)
    assert before
    assert before.keys() == after.keys()
    assert all(torch.equal(after[name], grad) for name, grad in before.items())
    assert all(param.grad is not None for param in wrapped.parameters())
    optimizer.zero_grad()
    loss_of(wrapped, 1).backward()
    optimizer.step()


@on_ranks(2)
@pytest.mark.parametrize("zeroes", [False, True])
def test_a_pass_that_breaks_off_leaves_what_was_added_up_to_the_user(zeroes: bool) -> None:
    wrapped, optimizer = Setting().sharded()
    loss_of(wrapped, 0).backward()
    before = own_copies(wrapped)
    broken = in_backward_of("input", inputs(1).requires_grad_())
    Stops.place = "input"
    with pytest.raises(ArithmeticError, match="on purpose"):
        wrapped(broken).square().mean().backward()
    Stops.place = ""
    if zeroes:
        optimizer.zero_grad()
    with pytest.raises(ReductionError, match="every rank: a backward pass ended with an exception"):
        wrapped(inputs(2))
    after = own_copies(wrapped)
    assert after.keys() == ({} if zeroes else before).keys()
    assert all(torch.equal(grad, before[name]) for name, grad in after.items())
    assert all((param.grad is None) == zeroes for param in wrapped.parameters())
    loss_of(wrapped, 2).backward()
    optimizer.step()
