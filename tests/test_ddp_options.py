"""Constructor arguments: the effect of each. `test_ddp_bits` and `test_parity` show which bits they give."""

import copy
import functools
import inspect
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel as TorchDistributedDataParallel

from ddp_pairs import (
    KNOWN,
    Pair,
    WithBuffers,
    assert_averaged,
    assert_same,
    averaged,
    batch,
    mlp,
    mlp_loss,
    of_batch,
)
from pool import on_ranks
from zero_optim import ZeroRedundancyOptimizer
from zero_optim.ddp import (
    DistributedDataParallel,
    FullyShardedDataParallel,
    ShardedDataParallel,
    data_parallel,
)


def sizes(model: nn.Module) -> list[int]:
    """Bytes of each bucket of ours, in the order of reduction."""
    assert isinstance(model, DistributedDataParallel)
    return [bucket.nbytes for bucket in model.reducer.own.assignment.buckets]


@on_ranks(1)
def test_the_first_bucket_is_small_by_default_once_the_order_is_known() -> None:
    net = nn.Sequential(*(nn.Linear(512, 512, bias=False) for _ in range(30)))  # 1 MiB each
    model = DistributedDataParallel(net, find_unused_parameters=True)
    assert sizes(model) == [4 * 2**20, 25 * 2**20, 2**20]
    model = DistributedDataParallel(net)
    assert sizes(model) == [30 * 2**20]
    for _ in range(2):
        model(torch.ones(1, 512)).sum().backward()
    assert sizes(model) == [2**20, 25 * 2**20, 4 * 2**20]


def gathered(tensor: Tensor) -> list[Tensor]:
    parts = [torch.empty_like(tensor) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, tensor)
    return parts


@on_ranks(2)
@pytest.mark.filterwarnings("ignore:.broadcast_buffers. is deprecated")
def test_buffers_are_sent_or_not_as_asked() -> None:
    for option in ("broadcast_buffers", "forward_sync_buffers"):
        for value in (True, False):
            if option not in KNOWN:
                continue
            pair = Pair.of(WithBuffers(), **{option: value})
            assert pair.ours.broadcast_buffers is value
            pair.train(mlp_loss, 4, (option, value))
            for ours, theirs in zip(pair.ours.buffers(), pair.theirs.buffers(), strict=True):
                assert torch.equal(ours, theirs), (option, value)
            mean = pair.ours.module.norm.running_mean  # sent before a forward pass, then it moved on
            first, second = gathered(mean)
            assert not torch.equal(first, second)
            with torch.no_grad():
                pair.ours.eval()(batch(10, 4, 8))
            first, second = gathered(mean)
            assert torch.equal(first, second) == value, (option, value)


@on_ranks(4)
def test_gradients_are_averaged_over_the_group_or_mesh_given() -> None:
    rank = dist.get_rank()
    parts = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("other", "data"))
    flat = init_device_mesh("cpu", (4,))
    own = parts[rank % 2]
    for name, options in {"group": {"process_group": own}, "mesh": {"device_mesh": flat}}.items():
        pair = Pair.of(mlp(), **options)
        assert pair.ours.process_group is pair.theirs.process_group
        pair.train(mlp_loss, 3, name)
    model = DistributedDataParallel(mlp(), process_group=own)
    mlp_loss(model, 0).backward()
    grads = gathered(next(model.parameters()).grad)  # type: ignore[arg-type]
    assert torch.equal(grads[0], grads[2])
    assert not torch.equal(grads[0], grads[1])
    with pytest.raises(RuntimeError, match="1D device mesh"):
        DistributedDataParallel(mlp(), device_mesh=mesh)
    with pytest.raises(RuntimeError, match="both process_group and device_mesh"):
        DistributedDataParallel(mlp(), process_group=own, device_mesh=flat)


@on_ranks(2)
def test_parameters_are_sent_at_construction_unless_init_sync_is_off() -> None:
    rank = dist.get_rank()
    model = DistributedDataParallel(mlp(seed=0), init_sync=True)
    with torch.no_grad():
        first, second = gathered(next(model.parameters()).detach())
    assert torch.equal(first, second)
    own = mlp(seed=rank)
    before = copy.deepcopy(own.state_dict())
    DistributedDataParallel(own, init_sync=False)
    for name, value in own.state_dict().items():
        assert torch.equal(value, before[name])
    DistributedDataParallel(own)
    assert torch.equal(next(own.parameters()), next(mlp(seed=0).parameters()))


class Outer(nn.Module):
    """Some parameters of the outermost module, some further in."""

    def __init__(self, width: int = 4) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.scale = nn.Parameter(torch.ones(8))
        self.local, self.shared, self.back = nn.Linear(8, width), nn.Linear(8, 8), nn.Linear(width, 3)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.back(self.local(self.shared(x * self.scale)))
        return out


@on_ranks(2)
def test_parameters_to_ignore_stay_local_and_may_differ() -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    net = Outer(width=4 + rank)  # parts that are not reduced may differ
    ignored = ["local.weight", "local.bias", "back.weight", "scale"]
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(net, ignored)  # type: ignore[no-untyped-call]
    model = DistributedDataParallel(net)
    alone = copy.deepcopy(net)
    assert model.reducer.own.names == ["shared.weight", "shared.bias", "back.bias"]
    mlp_loss(model, 0).backward()
    mlp_loss(alone, 0).backward()
    for (name, param), single in zip(net.named_parameters(), alone.parameters(), strict=True):
        parts = [None] * size
        dist.all_gather_object(parts, single.grad)
        assert param.grad is not None
        if name in ignored:
            assert torch.equal(param.grad, parts[rank]), name  # type: ignore[arg-type]
        else:
            assert torch.equal(param.grad, parts[0] * 0.5 + parts[1] * 0.5), name  # type: ignore[operator]


class Sealed(Tensor):
    """Like a tensor of several ranks: whoever looks at more than whether it trains gets an error."""

    is_sealed = False

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if cls.is_sealed and func != Tensor.requires_grad.__get__:  # type: ignore[attr-defined]
            raise NotImplementedError(f"{func} of a sealed tensor")
        return super().__torch_function__(func, types, args, kwargs or {})


@on_ranks(2)
@pytest.mark.parametrize("sharded", [False, True])
def test_parameters_to_ignore_are_not_looked_at(sharded: bool) -> None:
    net = mlp()
    expected = averaged(mlp(), of_batch(0), 2)
    optimizer = ZeroRedundancyOptimizer(net.parameters(), torch.optim.SGD, lr=0.1)
    net.sealed = nn.Parameter(torch.ones(2).as_subclass(Sealed))  # type: ignore[assignment]
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(net, ["sealed"])  # type: ignore[no-untyped-call]
    with mock.patch.object(Sealed, "is_sealed", True):
        model = ShardedDataParallel(net, optimizer) if sharded else DistributedDataParallel(net)
        model.check_finished()
        if not sharded:
            model.register_comm_hook(None, default_hooks.allreduce_hook)
        model(batch(0, 5, 8)).square().mean().backward()
        for param in optimizer.owned_parameters():
            name = next(name for name, each in net.named_parameters() if each is param)
            assert_same(param.grad, expected[name], name, 1e-6)


@on_ranks(2)
@pytest.mark.parametrize("first", [True, False])
def test_uninitialized_parameters_raise_pytorchs_error_on_every_rank(first: bool) -> None:
    model = nn.Sequential(
        nn.LazyLinear(3) if first or dist.get_rank() == 1 else nn.Linear(3, 3), nn.Linear(3, 2)
    )
    with pytest.raises(RuntimeError, match=r"Modules with uninitialized parameters can't be used with `Dist"):
        DistributedDataParallel(model)


def check_detached(model: DistributedDataParallel, clean: nn.Module) -> None:
    """The module goes on alone, and the wrapper is of no use any more."""
    model.detach()
    model.detach()
    with pytest.raises(RuntimeError, match=r"the wrapper is detached: call its rebind\(\)"):
        mlp_loss(model, 0)
    with pytest.raises(RuntimeError, match="wrap the module anew"):
        model.rebind()
    model.module.zero_grad()
    mlp_loss(model.module, 0).backward()
    clean.zero_grad()
    mlp_loss(clean, 0).backward()
    trained = [param for param in model.parameters() if param.requires_grad]
    for param, other in zip(trained, clean.parameters(), strict=True):
        assert torch.equal(param.grad, other.grad)  # type: ignore[arg-type]


@on_ranks(2)
def test_delayed_parameters_are_averaged_when_the_backward_pass_is_over() -> None:
    for delayed in (["shared.weight", "shared.bias"], ["back.weight"], None):
        inner = Outer()
        net: nn.Module = inner
        if delayed is None:  # all of them; PyTorch wants one that is frozen then
            net = nn.Sequential(inner)
            net.frozen = nn.Linear(1, 1).requires_grad_(False)
            net.forward = inner.forward  # type: ignore[method-assign]
        clean = copy.deepcopy(inner)
        trainable = {name: param for name, param in net.named_parameters() if param.requires_grad}
        names = list(trainable) if delayed is None else delayed
        model = DistributedDataParallel(
            net,
            delay_all_reduce_named_params=[(name, trainable[name]) for name in names],
            param_to_hook_all_reduce=inner.scale,  # its gradient comes last
        )
        if delayed is None:
            with pytest.raises(RuntimeError, match="every parameter"):
                model.register_comm_hook(None, lambda _, bucket: bucket)  # type: ignore[arg-type, return-value]
            with pytest.raises(RuntimeError, match="every parameter"):
                model.get_ddp_logging_data()
        else:
            assert model.reducer.own.names == [name for name in trainable if name not in names]
        for number in range(3):
            model.zero_grad()
            mlp_loss(model, number).backward()
            if delayed is None:  # the sum begins before the hooked gradient itself is there
                inner.scale.grad = averaged(clean, of_batch(number), 2)["scale"]
            assert_averaged(inner, clean, of_batch(number), (delayed, number), tolerance=1e-6)
        check_detached(model, clean)


@on_ranks(2)
def test_what_is_not_supported_is_refused_by_name() -> None:
    net = mlp()
    for wrapper in (DistributedDataParallel, TorchDistributedDataParallel):
        with pytest.raises(ValueError, match="need to be set at the same time"):
            wrapper(net, param_to_hook_all_reduce=net[0].weight)
        with pytest.raises(ValueError, match="device_ids"):
            wrapper(net, device_ids=[dist.get_rank()])
        with pytest.warns(FutureWarning, match="check_reduction"):
            wrapper(net, check_reduction=True)
    with (
        torch._dynamo.config.patch(optimize_ddp="python_reducer"),
        pytest.raises(ValueError, match="True or False"),
    ):
        DistributedDataParallel(net)
    with pytest.raises(TypeError, match="unexpected keyword argument 'bucket_cap'"):
        DistributedDataParallel(net, bucket_cap=1)


@on_ranks(2)
def test_a_wrapped_constructor_of_pytorch_is_the_same_constructor() -> None:
    plain = TorchDistributedDataParallel.__init__

    @functools.wraps(plain)
    def traced(*args: Any, **options: Any) -> None:
        plain(*args, **options)

    with mock.patch.object(TorchDistributedDataParallel, "__init__", traced):
        model = DistributedDataParallel(mlp(), gradient_as_bucket_view=True)
    mlp_loss(model, 0).backward()
    assert_averaged(model.module, mlp(), of_batch(0), "wrapped")


@on_ranks(2)
def test_options_and_calls_of_a_newer_pytorch_are_refused_by_name() -> None:
    signature = data_parallel._SIGNATURE
    named = {"lazy_bucket_allocation": False, "also_new": None}  # PyTorch 2.15 has the first
    new = {name: value for name, value in named.items() if name not in signature.parameters}
    more = [inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=new[name]) for name in new]
    newer = signature.replace(parameters=[*signature.parameters.values(), *more])
    with (
        mock.patch.object(data_parallel, "_SIGNATURE", newer),
        mock.patch.dict(data_parallel._DEFAULTS, new),
        pytest.raises(TypeError, match="takes no lazy_bucket_allocation, which is new in PyTorch"),
    ):
        DistributedDataParallel(mlp(), lazy_bucket_allocation=dist.get_rank() == 1, also_new=None)
    with (
        mock.patch.object(data_parallel, "_SIGNATURE", newer),
        mock.patch.dict(data_parallel._DEFAULTS, new),
    ):
        model = DistributedDataParallel(mlp(), **{name: named[name] for name in named.keys() - new.keys()})
    with pytest.raises(AttributeError, match="_something_new, which that of zero_optim"):
        model.reducer._something_new()


@on_ranks(2)
def test_ending_a_pass_by_hand_is_refused_by_name() -> None:
    model: Any = DistributedDataParallel(mlp())
    if not hasattr(TorchDistributedDataParallel, "finalize_backward"):  # it is new in PyTorch 2.15
        calls = [lambda: model.reducer._set_manual_finalization_required(True)]
    else:
        model.require_manual_backward_finalization = False
        assert not model.should_finalize_after_backward
        calls = [lambda: setattr(model, "require_manual_backward_finalization", True)]
        calls += [model.finalize_backward]
    model.reducer._set_manual_finalization_required(False)
    for call in calls:
        with pytest.raises(RuntimeError, match="leave require_manual_backward_finalization False"):
            call()
    mlp_loss(model, 0).backward()
    assert_averaged(model.module, mlp(), of_batch(0), "as ever")


@on_ranks(2)
@pytest.mark.skipif(not hasattr(torch.Tensor, "grad_dtype"), reason="PyTorch has no grad_dtype")
def test_parameters_that_ask_for_gradients_of_another_dtype_are_refused() -> None:
    for wrap in (
        lambda net, _: DistributedDataParallel(net),
        ShardedDataParallel,
        lambda net, optimizer: FullyShardedDataParallel(net, optimizer, units=[net[0]]),
    ):
        net = mlp().bfloat16()
        optimizer: Any = ZeroRedundancyOptimizer(net.parameters(), torch.optim.SGD, lr=0.1)
        net[2].weight.grad_dtype = torch.float32
        with pytest.raises(
            ValueError, match=r"2\.weight is torch.bfloat16 and asks for gradients in torch.float32"
        ):
            wrap(net, optimizer)  # type: ignore[no-untyped-call]
