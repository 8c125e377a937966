"""Mixed precision: narrow compute and reduction, whole parameters; against a run by hand, and PyTorch's."""

import copy
import gc
import pickle
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.parallel import DistributedDataParallel as TorchDistributedDataParallel
from torch.nn.parallel.distributed import _MixedPrecision

from ddp_narrow import BF16, HALF, WHOLE, assert_equal_grads, assert_whole, by_hand, mixed, narrow, wrap
from ddp_pairs import batch, mlp, mlp_loss
from pool import on_ranks
from zero_optim import RankMismatchError
from zero_optim.ddp import DistributedDataParallel

PRECISIONS = (
    mixed(BF16),
    mixed(HALF),
    mixed(BF16, WHOLE),
    mixed(BF16, HALF),
    mixed(WHOLE, BF16),
    mixed(None, BF16),
    mixed(None),
)


@on_ranks(2)
@pytest.mark.parametrize(
    "options",
    [{}, {"gradient_as_bucket_view": True}, {"static_graph": True}, {"find_unused_parameters": True}],
    ids=["plain", "views", "static", "unused"],
)
def test_training_gives_the_bits_of_a_run_by_hand(options: dict[str, Any]) -> None:
    for precision in PRECISIONS:
        net = mlp()
        twin, model = copy.deepcopy(net), wrap(net, precision, **options)
        params = list(net.parameters())
        one, other = (torch.optim.AdamW(each.parameters(), lr=0.1) for each in (twin, model))
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


@on_ranks(2)
@pytest.mark.skipif(
    torch_version() != (2, 13), reason="another PyTorch may use streams that cannot be stood in for"
)
def test_gradients_are_those_of_pytorchs_mixed_precision() -> None:
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


@on_ranks(2)
def test_the_forward_pass_sees_narrow_parameters_inputs_and_buffers() -> None:
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


@on_ranks(2)
def test_ignored_parameters_and_buffers_are_left_alone() -> None:
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


@on_ranks(2)
def test_a_pass_that_raises_leaves_whole_parameters() -> None:
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


@on_ranks(2)
def test_evaluation_computes_in_the_narrow_dtype_and_leaves_whole_parameters() -> None:
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


@on_ranks(2)
def test_state_dicts_are_whole_and_copies_go_on_alike() -> None:
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


@on_ranks(2)
def test_casts_go_when_the_backward_pass_ends() -> None:
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


# ------------------------------------------------------------------ compiled, refused


@on_ranks(2, timeout=240)
@pytest.mark.filterwarnings("ignore:")  # torch.compile warns of its own innards here and there
def test_the_wrapper_or_what_it_wraps_may_be_compiled() -> None:
    net = mlp()
    options = {"mixed_precision": mixed()}  # buckets smaller than PyTorch's first one stop its compiler
    compiled: Any = torch.compile(copy.deepcopy(net), backend="aot_eager")
    inner = DistributedDataParallel(compiled, **options)
    outer: Any = torch.compile(DistributedDataParallel(copy.deepcopy(net), **options), backend="aot_eager")
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


@on_ranks(2)
def test_what_cannot_be_done_is_refused_on_every_rank() -> None:
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
