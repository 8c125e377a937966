"""Mixed precision: narrow compute and reduction, whole parameters; against a run by hand, and PyTorch's."""

import copy
import gc
import pickle
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.join import Join
from torch.func import functional_call
from torch.nn.parallel import DistributedDataParallel as TorchDistributedDataParallel
from torch.nn.parallel.distributed import _MixedPrecision
from torch.utils.checkpoint import checkpoint

from ddp_pairs import SMALL_MB, batch, mlp, mlp_loss
from pool import Ranks
from zero_optim import RankMismatchError, ZeroRedundancyOptimizer
from zero_optim.ddp import DistributedDataParallel, Reducer, ReducerOptions
from zero_optim.hooks import allreduce_hook, zero_step

HALF = torch.float16
BF16 = torch.bfloat16
WHOLE = torch.float32
Grads = dict[str, Tensor]


def mixed(
    param: torch.dtype | None = BF16,
    reduce: torch.dtype | None = None,
    buffers: torch.dtype | None = None,
) -> _MixedPrecision:
    return _MixedPrecision(param, reduce, buffers)


def wrap(net: nn.Module, precision: _MixedPrecision | None = None, **options: Any) -> DistributedDataParallel:
    precision = mixed() if precision is None else precision
    return DistributedDataParallel(net, mixed_precision=precision, bucket_cap_mb=SMALL_MB, **options)


def narrow(net: nn.Module, dtype: torch.dtype | None) -> Grads:
    """Cast a model's floating-point parameters, by name, for a pass by hand."""
    return {
        name: param.detach().to(dtype or param.dtype).requires_grad_(param.requires_grad)
        for name, param in net.named_parameters()
        if param.is_floating_point()
    }


def by_hand(net: nn.Module, number: int, precision: _MixedPrecision, passes: int = 1) -> Grads:
    """Average over ranks what each would compute alone: the same arithmetic, one step after the other."""
    size = dist.get_world_size()
    sums: Grads = {}
    for rank in range(size):
        own: Grads = {}
        for later in range(passes):
            copies = narrow(net, precision.param_dtype)
            x = batch(number + later, 5, 8, rank=rank).to(precision.param_dtype or WHOLE)
            x = x.to(next(net.parameters()).device)
            functional_call(net, copies, (x,)).square().mean().backward()
            for name, param in copies.items():
                if param.grad is not None:
                    grad = param.grad.to(WHOLE)
                    own[name] = own[name] + grad if name in own else grad
        for name, grad in own.items():
            part = grad.to(precision.reduce_dtype or precision.param_dtype or WHOLE) * (1 / size)
            sums[name] = sums[name] + part if name in sums else part
    return {name: grad.to(WHOLE) for name, grad in sums.items()}


def assert_equal_grads(model: nn.Module, expected: Grads, where: object = "") -> None:
    found = {name: param.grad for name, param in model.named_parameters() if param.grad is not None}
    assert list(found) == list(expected), where
    for name, grad in found.items():
        assert grad.dtype == WHOLE, (where, name)
        assert torch.equal(grad, expected[name]), (where, name, (grad - expected[name]).abs().max())


def assert_whole(model: nn.Module, params: list[nn.Parameter], where: object = "") -> None:
    """Outside of forward and backward the parameters are the ones there always were, whole."""
    now = list(model.parameters())
    assert [id(param) for param in now] == [id(param) for param in params], where
    assert all(isinstance(param, nn.Parameter) and param.dtype == WHOLE for param in now), where


PRECISIONS = (
    mixed(BF16),
    mixed(HALF),
    mixed(BF16, WHOLE),
    mixed(BF16, HALF),
    mixed(WHOLE, BF16),
    mixed(None, BF16),
    mixed(None),
)


def check_by_hand(make: Callable[..., torch.optim.Optimizer], options: dict[str, Any]) -> None:
    for precision in PRECISIONS:
        net = mlp()
        twin, model = copy.deepcopy(net), wrap(net, precision, **options)
        params = list(net.parameters())
        one, other = torch.optim.AdamW(twin.parameters(), lr=0.1), make(model.parameters())
        for number in range(4):
            other.zero_grad(set_to_none=number % 3 != 2)
            loss = mlp_loss(model, number)
            assert loss.dtype == (precision.param_dtype or WHOLE)
            loss.backward()
            expected = by_hand(twin, number, precision)
            assert_equal_grads(net, expected, (precision, number))
            assert_whole(net, params, (precision, number))
            for name, param in twin.named_parameters():
                param.grad = expected[name]
            one.step()
            other.step()
            for mine, theirs in zip(net.parameters(), twin.parameters(), strict=True):
                assert torch.equal(mine, theirs), (precision, number)


def plain_adamw(params: Iterator[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=0.1)


def sharded_adamw(params: Iterator[nn.Parameter]) -> torch.optim.Optimizer:
    return ZeroRedundancyOptimizer(params, torch.optim.AdamW, lr=0.1)


@pytest.mark.parametrize("make", [plain_adamw, sharded_adamw])
@pytest.mark.parametrize(
    "options",
    [{}, {"gradient_as_bucket_view": True}, {"static_graph": True}, {"find_unused_parameters": True}],
    ids=["plain", "views", "static", "unused"],
)
def test_training_gives_the_bits_of_a_run_by_hand(
    ranks2: Ranks, make: Callable[..., torch.optim.Optimizer], options: dict[str, Any]
) -> None:
    ranks2.run(check_by_hand, make, options)


# ------------------------------------------------------------------ PyTorch's own


class Stream:
    """Stands for a stream or an event, of which PyTorch has none on the CPU."""

    def __enter__(self) -> None: ...
    def __exit__(self, *_: object) -> None: ...
    def record(self) -> None: ...
    def wait(self, stream: object = None) -> None: ...
    def wait_stream(self, stream: object) -> None: ...


def torch_version() -> tuple[int, ...]:
    return tuple(int(part) for part in torch.__version__.split(".")[:2])


@contextmanager
def torch_on_cpu() -> Iterator[None]:
    """Let PyTorch's mixed precision run on the CPU."""
    with (
        mock.patch.object(torch, "Stream", Stream),
        mock.patch.object(torch, "Event", Stream),
        mock.patch.object(torch.accelerator, "current_stream", Stream),
    ):
        yield


def check_like_torch() -> None:
    # Not float16: PyTorch's divides after the sum, which for its smallest numbers is not the same.
    for precision in (mixed(BF16), mixed(BF16, WHOLE)):
        net = mlp()
        with torch_on_cpu():
            theirs = TorchDistributedDataParallel(copy.deepcopy(net), mixed_precision=precision)
        ours = DistributedDataParallel(net, mixed_precision=precision)
        optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in (ours, theirs)]
        for number in range(4):
            for optimizer in optimizers:
                optimizer.zero_grad()
            mlp_loss(ours, number).backward()
            with torch_on_cpu():
                mlp_loss(theirs, number).backward()
            # PyTorch 2.13 reduces memory that was never written until it has rebuilt its buckets.
            if number == 0:
                continue
            grads = {name: param.grad for name, param in theirs.module.named_parameters()}
            assert_equal_grads(net, grads, (precision, number))  # type: ignore[arg-type]
            for optimizer in optimizers:
                optimizer.step()


@pytest.mark.skipif(
    torch_version() != (2, 13), reason="another PyTorch may use streams that cannot be stood in for"
)
def test_gradients_are_those_of_pytorchs_mixed_precision(ranks2: Ranks) -> None:
    ranks2.run(check_like_torch)


class Watched(nn.Module):
    """Looks at dtypes in its forward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(1, 5)
        self.register_buffer("scale", torch.randn(1, 5))
        self.register_buffer("count", torch.zeros(1, dtype=torch.int64))
        self.frozen = nn.Parameter(torch.randn(10, 5), requires_grad=False)
        self.expects = WHOLE

    def forward(self, x: Tensor) -> Tensor:
        assert x.dtype == self.expects
        assert {param.dtype for param in self.parameters()} == {self.expects}
        assert {param.requires_grad for param in self.linear.parameters()} == {torch.is_grad_enabled()}
        assert self.scale.dtype == self.expects
        assert self.count.dtype == torch.int64
        return self.linear(x) * self.scale + self.frozen


def check_dtypes() -> None:
    for view in (False, True):
        for set_to_none in (False, True):
            net = Watched()
            params = list(net.parameters())
            model = wrap(net, mixed(HALF, HALF, HALF), gradient_as_bucket_view=view)
            net.expects = HALF
            assert net.scale.dtype == HALF
            for param in model.parameters():
                assert (param._mp_param.dtype, param._fp_param.dtype) == (HALF, WHOLE)  # type: ignore[attr-defined]
            for number in range(6):
                out = model(batch(number, 10, 1))
                assert out.dtype == HALF
                out.sum().backward()
                assert_whole(net, params)
                assert net.frozen.grad is None
                for param in net.linear.parameters():
                    assert param.grad is not None
                    assert param.grad.dtype == WHOLE
                    others = [torch.empty_like(param.grad) for _ in range(dist.get_world_size())]
                    dist.all_gather(others, param.grad)
                    assert all(torch.equal(param.grad, other) for other in others)
                model.zero_grad(set_to_none=set_to_none)


def test_the_forward_pass_sees_narrow_parameters_inputs_and_buffers(ranks2: Ranks) -> None:
    ranks2.run(check_dtypes)


def check_ignored() -> None:
    net = mlp()
    net.register_buffer("kept", torch.ones(5))
    names = ["0.weight", "kept"]
    TorchDistributedDataParallel._set_params_and_buffers_to_ignore_for_model(net, names)
    seen: list[torch.dtype] = []
    first = net[0]
    first.register_forward_pre_hook(lambda *_: seen.extend(p.dtype for p in first.parameters()))
    model = wrap(net, mixed(BF16, buffers=BF16))
    for name, param in net.named_parameters():
        assert hasattr(param, "_mp_param") == (name not in names)
    assert net.kept.dtype == WHOLE
    with pytest.raises(RuntimeError, match="dtype"):  # narrow inputs against a weight that is not
        model(batch(0, 5, 8))
    assert seen == [WHOLE, BF16]


def test_ignored_parameters_and_buffers_are_left_alone(ranks2: Ranks) -> None:
    ranks2.run(check_ignored)


# ------------------------------------------------------------------ ways to train


def check_no_sync() -> None:
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


def test_no_sync_adds_up_in_the_parameters_dtype(ranks2: Ranks) -> None:
    ranks2.run(check_no_sync)


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


def check_checkpointing() -> None:
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


def test_activations_are_computed_again_in_the_narrow_dtype(ranks2: Ranks) -> None:
    ranks2.run(check_checkpointing)


def check_passes() -> None:
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


def test_several_passes_are_kept_apart(ranks2: Ranks) -> None:
    ranks2.run(check_passes)


def check_retained() -> None:
    model = wrap(Checkpointed(False))
    loss = model(batch(0, 5, 8)).square().mean()
    loss.backward(retain_graph=True)
    expected = {name: param.grad.clone() for name, param in model.module.named_parameters()}
    model.zero_grad()
    loss.backward()
    assert_equal_grads(model.module, expected)


def test_a_second_pass_through_one_graph_computes_again_too(ranks2: Ranks) -> None:
    ranks2.run(check_retained)


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


def check_unused() -> None:
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


def test_shared_frozen_and_unused_parameters_are_what_they_are_without(ranks2: Ranks) -> None:
    ranks2.run(check_unused)


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


def check_kinds() -> None:
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


def test_parameters_and_gradients_of_other_kinds_train_as_well(ranks2: Ranks) -> None:
    ranks2.run(check_kinds)


# ------------------------------------------------------------------ the model outside of passes


class Failing(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        raise ZeroDivisionError("in backward")


class Moody(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 3)
        self.mood = ""

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        if self.mood == "forward":
            raise ZeroDivisionError("in forward")
        if self.mood == "backward":
            x = Failing.apply(x)
        result: Tensor = self.second(x)
        return result


def check_broken_off() -> None:
    net = Moody()
    twin, model = copy.deepcopy(net), wrap(net)
    params = list(net.parameters())
    for mood in ("", "forward", "", "backward"):
        net.mood = mood
        model.zero_grad()
        if mood:
            with pytest.raises(ZeroDivisionError):
                mlp_loss(model, 0).backward()
        else:
            mlp_loss(model, 0).backward()
            assert_equal_grads(net, by_hand(twin, 0, mixed(BF16)))
        assert_whole(net, params, mood)


def test_a_pass_that_raises_leaves_whole_parameters(ranks2: Ranks) -> None:
    ranks2.run(check_broken_off)


def check_evaluation() -> None:
    net = mlp()
    model = wrap(net)
    params = list(net.parameters())
    x = batch(0, 5, 8)
    expected = functional_call(net, narrow(net, BF16), (x.to(BF16),))
    for mode in (torch.no_grad, torch.inference_mode, torch.enable_grad):
        with mode():
            assert torch.equal(model(x), expected)
            assert_whole(net, params, mode)
            assert net(x).dtype == WHOLE  # the model itself is what it was


def test_evaluation_computes_in_the_narrow_dtype_and_leaves_whole_parameters(ranks2: Ranks) -> None:
    ranks2.run(check_evaluation)


def check_copies() -> None:
    net = mlp()
    model = wrap(net, mixed(BF16, WHOLE))
    before = {name: param.clone() for name, param in net.state_dict().items()}
    mlp_loss(model, 0).backward()
    after = net.state_dict()
    assert all(after[name].dtype == WHOLE and torch.equal(after[name], before[name]) for name in before)
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert isinstance(twin, DistributedDataParallel)
        for wrapper in (model, twin):
            wrapper.zero_grad()
            loss = mlp_loss(wrapper, 1)
            assert loss.dtype == BF16
            loss.backward()
        expected = {name: param.grad for name, param in net.named_parameters()}
        assert_equal_grads(twin.module, expected)  # type: ignore[arg-type]


def test_state_dicts_are_whole_and_copies_go_on_alike(ranks2: Ranks) -> None:
    ranks2.run(check_copies)


def check_memory() -> None:
    net = mlp()
    model = wrap(net)
    seen: list[weakref.ref[Tensor]] = []
    net[0].register_forward_pre_hook(lambda layer, _: seen.append(weakref.ref(layer.weight)))
    outputs = []
    for number in range(3):
        outputs.append(model(batch(number, 5, 8)))
        outputs[-1].sum().backward()
        assert seen[-1]() is None, "a cast outlives its backward pass"
    gone = weakref.ref(model)
    del model, outputs
    gc.collect()
    assert gone() is None


def test_casts_go_when_the_backward_pass_ends(ranks2: Ranks) -> None:
    ranks2.run(check_memory)


# ------------------------------------------------------------------ hooks, optimizers that step early


def check_hooks() -> None:
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


def test_comm_hooks_find_buckets_of_the_reduced_dtype(ranks2: Ranks) -> None:
    ranks2.run(check_hooks)


def check_zero_step(gradients: Any, lazily: bool) -> None:
    for precision in (mixed(BF16), mixed(BF16, WHOLE)):
        net = mlp()
        twin, model = copy.deepcopy(net), wrap(net, precision)
        optimizer = ZeroRedundancyOptimizer(net.parameters(), torch.optim.AdamW, lr=0.1)
        one = torch.optim.AdamW(twin.parameters(), lr=0.1)
        model.register_comm_hook(None, zero_step(optimizer, gradients=gradients))
        if lazily:
            optimizer.gather_lazily(model)
        for number in range(5):
            expected = by_hand(twin, number, precision)
            for name, param in twin.named_parameters():
                param.grad = expected[name]
            optimizer.zero_grad()
            mlp_loss(model, number).backward()
            optimizer.step()
            one.step()
        optimizer.wait_for_gathers()
        for mine, theirs in zip(net.parameters(), twin.parameters(), strict=True):
            assert torch.equal(mine, theirs), precision


@pytest.mark.parametrize("lazily", [False, True], ids=["", "lazily"])
@pytest.mark.parametrize("gradients", ["everywhere", "owners"])
def test_stepping_during_backward_gives_the_bits_of_a_run_by_hand(
    ranks2: Ranks, gradients: str, lazily: bool
) -> None:
    ranks2.run(check_zero_step, gradients, lazily)


def check_casts_wait() -> None:
    net = mlp()
    model = wrap(net)
    optimizer = ZeroRedundancyOptimizer(net.parameters(), torch.optim.SGD, lr=0.1)
    optimizer.gather_lazily(net[2:])  # hooks on some layers, below the model that is called
    waited: list[bool] = []
    for number in range(3):
        mlp_loss(model, number).backward()
        optimizer.step()
        net[0].register_forward_pre_hook(lambda *_: waited.append(not optimizer._sharding.under_way))
        model(batch(number, 5, 8))
    assert waited
    assert all(waited), "parameters were cast while they were being gathered"


def test_parameters_that_are_being_gathered_are_waited_for_before_they_are_cast(ranks2: Ranks) -> None:
    ranks2.run(check_casts_wait)


def check_sparse_zero_step() -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Embedding(9, 8, sparse=True), nn.Linear(8, 3))
    twin = copy.deepcopy(net)
    indices = torch.tensor([1, 2, 3])
    optimizers = []
    for inner, overlap in ((net, True), (twin, False)):
        model = wrap(inner)
        optimizer = ZeroRedundancyOptimizer(inner.parameters(), torch.optim.SGD, lr=0.1)
        if overlap:
            model.register_comm_hook(None, zero_step(optimizer))
        optimizers.append((model, optimizer))
    for _ in range(3):
        for model, optimizer in optimizers:
            optimizer.zero_grad()
            model(indices).square().mean().backward()
            optimizer.step()
    for mine, theirs in zip(net.parameters(), twin.parameters(), strict=True):
        assert torch.equal(mine, theirs)


def test_sparse_gradients_are_stepped_during_backward(ranks2: Ranks) -> None:
    ranks2.run(check_sparse_zero_step)


def check_join() -> None:
    net = mlp()
    model = wrap(net)
    with Join([model]):
        for number in range(2 + dist.get_rank()):
            model.zero_grad()
            mlp_loss(model, number).backward()
    assert all(param.dtype == WHOLE for param in net.parameters())


def test_uneven_inputs_are_joined(ranks2: Ranks) -> None:
    ranks2.run(check_join)


def check_reducer() -> None:
    net = mlp()
    twin = copy.deepcopy(net)
    options = ReducerOptions(bucket_caps_nbytes=(200,), reduce_dtype=BF16, gradient_as_bucket_view=True)
    reducer = Reducer(net.named_parameters(), options=options)
    for number in range(3):
        net.zero_grad()
        mlp_loss(net, number).backward()
        assert_equal_grads(net, by_hand(twin, number, mixed(None, BF16)), number)
    reducer.close()


def test_a_reducer_alone_reduces_in_another_dtype(ranks2: Ranks) -> None:
    ranks2.run(check_reducer)


# ------------------------------------------------------------------ compiled, refused


def check_compiled(backend: str) -> None:
    net = mlp()
    options = {"mixed_precision": mixed()}  # buckets smaller than PyTorch's first one stop its compiler
    compiled: Any = torch.compile(copy.deepcopy(net), backend=backend)
    inner = DistributedDataParallel(compiled, **options)
    outer: Any = torch.compile(DistributedDataParallel(copy.deepcopy(net), **options), backend=backend)
    plain = DistributedDataParallel(net, **options)
    for number in range(4):
        for model in (inner, outer, plain):
            model.zero_grad()
            mlp_loss(model, number).backward()
        expected = [param.grad for param in net.parameters()]
        for model in (inner, outer):
            for param, grad in zip(model.parameters(), expected, strict=True):
                assert torch.equal(param.grad, grad), number
            assert all(param.dtype == WHOLE for param in model.parameters())


@pytest.mark.filterwarnings("ignore:")  # torch.compile warns of its own innards here and there
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_the_wrapper_or_what_it_wraps_may_be_compiled(ranks2: Ranks, backend: str) -> None:
    ranks2.run(check_compiled, backend, timeout=240)


def check_refused() -> None:
    net = mlp()
    rank = dist.get_rank()
    for given in (object(), BF16, {"param_dtype": BF16}):
        with pytest.raises(TypeError, match="expected mixed_precision to be a torch"):
            DistributedDataParallel(net, mixed_precision=given)  # type: ignore[arg-type]
    for wrong in (_MixedPrecision(BF16, torch.int8), _MixedPrecision("bf16")):  # type: ignore[arg-type]
        with pytest.raises(ValueError, match="dtype to be None or one of"):
            wrap(net, wrong)
    with pytest.raises(Exception, match="expected mixed_precision to be") as caught:  # on one rank alone
        DistributedDataParallel(net, mixed_precision=object() if rank else mixed())  # type: ignore[arg-type]
    assert rank == 1 or "rank 1" in str(caught.value)
    for other in (mixed(HALF), None):
        with pytest.raises(RankMismatchError, match="the model to wrap"):
            DistributedDataParallel(net, mixed_precision=mixed(BF16) if rank else other)
    delayed: dict[str, Any] = {
        "delay_all_reduce_named_params": [("0.bias", net[0].bias)],
        "param_to_hook_all_reduce": net[0].weight,
    }
    for init_sync in (True, False):
        with pytest.raises(ValueError, match="does not go with delay_all_reduce_named_params"):
            wrap(net, init_sync=init_sync, **delayed)


def test_what_cannot_be_done_is_refused_on_every_rank(ranks2: Ranks) -> None:
    ranks2.run(check_refused)
