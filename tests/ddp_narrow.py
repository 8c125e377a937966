"""Mixed precision of our DDP: how tests ask for it, and what it computes, by hand."""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.parallel.distributed import _MixedPrecision

from ddp_pairs import SMALL_MB, batch
from zero_optim.ddp import DistributedDataParallel

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
