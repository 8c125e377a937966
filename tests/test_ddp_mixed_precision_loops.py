"""Mixed precision in loops of many kinds, with comm hooks and with steps during the backward pass."""

import copy
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils.checkpoint import checkpoint

from ddp_narrow import BF16, HALF, WHOLE, assert_equal_grads, assert_whole, by_hand, mixed, narrow, wrap
from ddp_pairs import batch, mlp, mlp_loss
from pool import on_ranks
from zero_optim.ddp import Reducer, ReducerOptions
from zero_optim.hooks import allreduce_hook

# ------------------------------------------------------------------ ways to train


@on_ranks(2)
def test_no_sync_adds_up_in_the_parameters_dtype() -> None:
    for precision in (mixed(BF16), mixed(BF16, WHOLE), mixed(None, BF16)):
        for view in (False, True):
            net = mlp()
            twin, model = copy.deepcopy(net), wrap(net, precision, gradient_as_bucket_view=view)
            for number in (0, 10):
                model.zero_grad()
                with model.no_sync():
                    mlp_loss(model, number).backward()
                    mlp_loss(model, number + 1).backward()
                mlp_loss(model, number + 2).backward()
                assert_equal_grads(net, by_hand(twin, number, precision, passes=3), (precision, view))


class Block(nn.Module):
    """Uses a parameter of its own and one of a layer that it never calls."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.randn(8))
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(nn.functional.linear(x, self.linear.weight) * self.scale + self.linear.bias)


class Checkpointed(nn.Module):
    """Blocks whose activations are computed again in the backward pass, or kept."""

    def __init__(self, reentrant: bool | None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.scale = nn.Parameter(torch.randn(8))
        self.head = nn.Linear(8, 3)
        self.reentrant = reentrant

    def _part(self, block: Block, x: Tensor) -> Tensor:
        result: Tensor = block(x) * self.scale[0] if block is self.blocks[1] else block(x)
        return result

    def forward(self, x: Tensor) -> Tensor:
        x = x.requires_grad_() if x.is_leaf else x
        for block in self.blocks:
            if self.reentrant is None:
                x = self._part(block, x)  # type: ignore[arg-type]
            else:
                x = checkpoint(self._part, block, x, use_reentrant=self.reentrant)
        result: Tensor = self.head(x)
        return result


@on_ranks(2)
def test_activations_are_computed_again_in_the_narrow_dtype() -> None:
    for options in ({}, {"static_graph": True}, {"find_unused_parameters": True}):
        models = [wrap(Checkpointed(kind), **options) for kind in (None, False, True)]  # type: ignore[arg-type]
        params = [list(model.module.parameters()) for model in models]
        for number in range(3):
            for model in models:
                model.zero_grad()
                model(batch(number, 5, 8)).square().mean().backward()
            expected = {name: param.grad for name, param in models[0].module.named_parameters()}
            for model, own in zip(models, params, strict=True):
                assert_equal_grads(model.module, expected, (options, number))  # type: ignore[arg-type]
                assert_whole(model.module, own)


@on_ranks(2)
def test_several_passes_are_kept_apart() -> None:
    precision = mixed(BF16)
    net = mlp()
    twin, model = copy.deepcopy(net), wrap(net, precision)
    params = list(net.parameters())
    losses = [mlp_loss(model, number) for number in (0, 1)]
    losses[0].backward()
    assert_equal_grads(net, by_hand(twin, 0, precision))
    model.zero_grad()
    losses[1].backward()
    assert_equal_grads(net, by_hand(twin, 1, precision))
    assert_whole(net, params)

    model.zero_grad()
    (mlp_loss(model, 2) + mlp_loss(model, 2)).backward()
    doubled = {name: 2 * grad for name, grad in by_hand(twin, 2, precision).items()}
    assert_equal_grads(net, doubled)
    assert_whole(net, params)

    model.zero_grad()
    (grad,) = torch.autograd.grad(mlp_loss(model, 2), [net[0].weight])
    assert grad.dtype == WHOLE
    assert_whole(net, params)

    loss = mlp_loss(model, 3)
    loss.backward(retain_graph=True)
    model.zero_grad()
    loss.backward()
    assert_equal_grads(net, by_hand(twin, 3, precision))


@on_ranks(2)
def test_a_second_pass_through_one_graph_computes_again_too() -> None:
    model = wrap(Checkpointed(False))
    loss = model(batch(0, 5, 8)).square().mean()
    loss.backward(retain_graph=True)
    expected = {name: param.grad.clone() for name, param in model.module.named_parameters()}
    model.zero_grad()
    loss.backward()
    assert_equal_grads(model.module, expected)


class Branches(nn.Module):
    """One branch of three on each pass; a layer that shares a weight with another; one that is frozen."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.branches = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))
        self.first, self.tied = nn.Linear(8, 8), nn.Linear(8, 8)
        self.tied.weight = self.first.weight
        self.frozen = nn.Linear(8, 8).requires_grad_(False)
        self.taken = 0

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.frozen(self.branches[self.taken](self.tied(torch.tanh(self.first(x)))))
        return result


@on_ranks(2)
def test_shared_frozen_and_unused_parameters_are_what_they_are_without() -> None:
    precision = mixed(BF16)
    net = Branches()
    twin, model = copy.deepcopy(net), wrap(net, precision, find_unused_parameters=True)
    for number in range(3):
        net.taken = twin.taken = number
        model.zero_grad()
        mlp_loss(model, number).backward()
        # A parameter that is shared is cast once, as by hand.
        assert_equal_grads(net, by_hand(twin, number, precision), number)
        assert net.branches[(number + 1) % 3].weight.grad is None


class Kinds(nn.Module):
    """Parameters that are not cast, sparse gradients, weights that are kept in a list as well."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table = nn.Embedding(9, 8, sparse=True)
        self.rnn = nn.LSTM(8, 4)
        self.list = nn.ParameterList([nn.Parameter(torch.ones(4)), nn.Parameter(torch.ones(4))])
        self.turn = nn.Parameter(torch.ones(4, dtype=torch.complex64))
        self.steps = nn.Parameter(torch.ones(1, dtype=torch.int64), requires_grad=False)

    def forward(self, indices: Tensor) -> Tensor:
        found, _ = self.rnn(self.table(indices))
        turned = (found * self.list[0] * self.list[1]).float() * self.turn * self.steps
        return turned.abs().square().mean()


@on_ranks(2)
def test_parameters_and_gradients_of_other_kinds_train_as_well() -> None:
    net = Kinds()
    # PyTorch 2.8 cannot broadcast complex parameters on gloo, and ranks have the same anyway.
    single, model = copy.deepcopy(net), wrap(net, init_sync=False)
    indices = torch.tensor([[1, 2], [3, 1], [2, 2]])
    names = [name for name, param in net.named_parameters() if param.requires_grad]
    for number in range(3):
        model.zero_grad()
        loss = model(indices)
        loss.backward()
        copies = narrow(single, BF16)
        single.zero_grad()
        functional_call(single, {**copies, "turn": single.turn, "steps": single.steps}, (indices,)).backward()
        for name in names:
            grad, other = net.get_parameter(name).grad, (copies.get(name, single.turn)).grad
            assert grad is not None
            assert other is not None
            assert grad.dtype == net.get_parameter(name).dtype
            assert grad.is_sparse == (name == "table.weight")
            if grad.is_sparse:
                grad, other = grad.to_dense(), other.to_dense()
            assert torch.equal(grad, other.to(grad.dtype)), (name, number)
        copy.deepcopy(net)  # a recurrent module's list of weights holds the parameters again
        assert all(
            weight is net.rnn._parameters[name]
            for weight, name in zip(net.rnn._flat_weights, net.rnn._flat_weights_names, strict=True)
        )


# ------------------------------------------------------------------ hooks, optimizers that step early


@on_ranks(2)
def test_comm_hooks_find_buckets_of_the_reduced_dtype() -> None:
    seen = set()

    def hook(state: object, bucket: Any) -> torch.futures.Future[Tensor]:
        seen.add(bucket.buffer().dtype)
        seen.update(gradient.dtype for gradient in bucket.gradients())
        return allreduce_hook(None, bucket)

    for precision in (mixed(BF16), mixed(BF16, HALF)):
        net = mlp()
        twin, model = copy.deepcopy(net), wrap(net, precision)
        model.register_comm_hook(None, hook)
        for number in range(3):
            model.zero_grad()
            mlp_loss(model, number).backward()
            assert_equal_grads(net, by_hand(twin, number, precision), number)
    assert seen == {BF16, HALF}


@on_ranks(2)
def test_a_reducer_alone_reduces_in_another_dtype() -> None:
    net = mlp()
    twin = copy.deepcopy(net)
    options = ReducerOptions(bucket_caps_nbytes=(200,), reduce_dtype=BF16, gradient_as_bucket_view=True)
    reducer = Reducer(net.named_parameters(), options=options)
    for number in range(3):
        net.zero_grad()
        mlp_loss(net, number).backward()
        assert_equal_grads(net, by_hand(twin, number, mixed(None, BF16)), number)
    reducer.close()
