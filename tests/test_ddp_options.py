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
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel as TorchDistributedDataParallel

from ddp_pairs import Pair, WithBuffers, assert_averaged, batch, mlp, mlp_loss, of_batch
from pool import on_ranks
from zero_optim import ZeroRedundancyOptimizer
from zero_optim.ddp import (
    DistributedDataParallel,
    FullyShardedDataParallel,
    ShardedDataParallel,
    wrapper_checks,
)


def sizes(model: nn.Module) -> list[int]:
    """Bytes of each bucket of ours, in the order of reduction."""
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
    for value in (True, False):
        pair = Pair.of(WithBuffers(), broadcast_buffers=value)
        pair.train(mlp_loss, 4, value)
        for ours, theirs in zip(pair.ours.buffers(), pair.theirs.buffers(), strict=True):
            assert torch.equal(ours, theirs), value
        mean = pair.ours.module.norm.running_mean  # sent before a forward pass, then it moved on
        first, second = gathered(mean)
        assert not torch.equal(first, second)
        with torch.no_grad():
            pair.ours.eval()(batch(10, 4, 8))
        first, second = gathered(mean)
        assert torch.equal(first, second) == value


@on_ranks(4)
def test_gradients_are_averaged_over_the_group_or_mesh_given() -> None:
    rank = dist.get_rank()
    parts = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    flat = init_device_mesh("cpu", (4,))
    own = parts[rank % 2]
    for name, options in {"group": {"process_group": own}, "mesh": {"device_mesh": flat}}.items():
        pair = Pair.of(mlp(), **options)
        assert pair.ours.process_group is pair.theirs.process_group
        pair.train(mlp_loss, 3, name)
    with pytest.raises(RuntimeError, match="both process_group and device_mesh"):
        DistributedDataParallel(mlp(), process_group=own, device_mesh=flat)


@on_ranks(2)
def test_parameters_are_sent_at_construction_unless_init_sync_is_off() -> None:
    rank = dist.get_rank()
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
        return self.back(self.local(self.shared(x * self.scale)))


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
        if name in ignored:
            assert torch.equal(param.grad, parts[rank]), name  # type: ignore[arg-type]
        else:
            assert torch.equal(param.grad, parts[0] * 0.5 + parts[1] * 0.5), name  # type: ignore[operator]


@on_ranks(2)
def test_uninitialized_parameters_raise_pytorchs_error_on_every_rank() -> None:
    model = nn.Sequential(nn.LazyLinear(3) if dist.get_rank() == 1 else nn.Linear(3, 3), nn.Linear(3, 2))
    with pytest.raises(RuntimeError, match=r"Modules with uninitialized parameters can't be used with `Dist"):
        DistributedDataParallel(model)


@on_ranks(2)
def test_what_is_not_supported_is_refused_by_name() -> None:
    net = mlp()
    with pytest.raises(ValueError, match="device_ids"):
        DistributedDataParallel(net, device_ids=[dist.get_rank()])
    with pytest.raises(TypeError, match="takes no bucket_cap: did you mean bucket_cap_mb"):
        DistributedDataParallel(net, bucket_cap=1)
    with pytest.raises(TypeError, match="takes no delay_all_reduce_named_params: every gradient is reduced"):
        DistributedDataParallel(net, delay_all_reduce_named_params=[*net.named_parameters()][:1])


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
    signature = wrapper_checks._SIGNATURE
    named = {"lazy_bucket_allocation": False, "also_new": None}  # PyTorch 2.15 has the first
    new = {name: value for name, value in named.items() if name not in signature.parameters}
    more = [inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=new[name]) for name in new]
    newer = signature.replace(parameters=[*signature.parameters.values(), *more])
    with (
        mock.patch.object(wrapper_checks, "_SIGNATURE", newer),
        pytest.raises(TypeError, match=r"takes no lazy_bucket_allocation: leave it out, or use"),
    ):
        DistributedDataParallel(mlp(), lazy_bucket_allocation=dist.get_rank() == 1, also_new=None)
    with mock.patch.object(wrapper_checks, "_SIGNATURE", newer):
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
