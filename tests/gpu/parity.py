"""Cases: a sharded optimizer beside the unsharded one on the same device, bit for bit."""

from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.multiprocessing.reductions import reduce_tensor
from torch.optim import Optimizer

from gpu.setting import Figures, Here, NotHere, on_cpu
from training import (
    HAS_MUON,
    MATRICES,
    MIXED,
    assert_same_bits,
    assert_same_state,
    make_params,
    params_of,
    set_grads,
    train_both,
    twin,
)
from zero_optim import ZeroRedundancyOptimizer

OPTIMIZERS: dict[str, tuple[Any, dict[str, Any]]] = {
    "AdamW": (torch.optim.AdamW, {"lr": 0.01}),
    "AdamW foreach": (torch.optim.AdamW, {"lr": 0.01, "foreach": True, "amsgrad": True}),
    "AdamW fused": (torch.optim.AdamW, {"lr": 0.01, "fused": True}),
    "AdamW capturable": (torch.optim.AdamW, {"lr": 0.01, "capturable": True}),
    "SGD": (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "nesterov": True}),
    "Muon": (getattr(torch.optim, "Muon", None), {"lr": 0.05}),
    "Adafactor": (torch.optim.Adafactor, {"lr": 0.05}),
    "Adagrad": (torch.optim.Adagrad, {"lr": 0.1}),
}


def steps(here: Here, name: str, as_views: bool) -> Figures:
    """Parameters after each step; the state consolidated, loaded, and where it lies."""
    optimizer_class, given = OPTIMIZERS[name]
    if name == "Muon" and not HAS_MUON:
        raise NotHere("this PyTorch does not have torch.optim.Muon")
    options = {key: value for key, value in given.items() if key != "capturable" or here.is_cuda}
    params = here.moved(make_params(MATRICES if name == "Muon" else MIXED))
    mine = twin(params)
    plain = optimizer_class(params, **options)
    build = {"parameters_as_bucket_view": as_views, "bucket_cap_mb": 0.0005, **options}
    sharded = ZeroRedundancyOptimizer(mine, optimizer_class, **build)
    train_both(plain, sharded, 6)

    sharded.consolidate_state_dict(to=0)
    if dist.get_rank() == 0:
        assert_same_state(on_cpu(sharded.state_dict()), on_cpu(plain.state_dict()))
    again = ZeroRedundancyOptimizer(twin(mine), optimizer_class, **build)
    again.load_state_dict(on_cpu(plain.state_dict()))
    _check_devices(again, plain)
    train_both(plain, again, 4, first=6)
    buckets = sharded.core.sharding.buckets
    assert all(p.untyped_storage().nbytes() == p.nbytes for p in mine)
    return {"buckets": len(buckets), "as views": sum(getattr(b, "is_in_place", False) for b in buckets)}


def _check_devices(sharded: ZeroRedundancyOptimizer, plain: Optimizer) -> None:
    """The state loaded lies where the class itself has put it."""
    for mine, param in zip(params_of(sharded), params_of(plain), strict=True):
        for key, value in sharded.state.get(mine, {}).items():
            expected = plain.state[param][key]
            if isinstance(expected, torch.Tensor):
                assert value.device == expected.device, (key, value.device, expected.device)


def cut_by_rows(here: Here, name: str, dtype: torch.dtype) -> Figures:
    """Rows stepped as parameters of their own, beside the whole: what the library assumes of kernels here.

    Lengths are odd, so that pieces end in other places of a vector than the whole does, and some pieces are
    shorter than one. Pieces begin at multiples of 512 bytes, as plans cut.
    """
    if not here.is_cuda and dtype.itemsize < 4:
        raise NotHere("nothing narrower than float32 is cut on the CPU")
    optimizer_class, given = OPTIMIZERS[name]
    options = {**given, "weight_decay": 0.01}
    apart = 512 // dtype.itemsize
    whole = here.moved(make_params(((apart * 4099 + 1,), (4 * apart + 3, 129), (apart + 1,)), dtype))
    rows = [apart * 1025, 3 * apart, apart]
    pieces = [
        [nn.Parameter(part.detach().clone()) for part in param.split([first, len(param) - first])]
        for param, first in zip(whole, rows, strict=True)
    ]
    plain = optimizer_class(whole, **options)
    cut = optimizer_class([part for parts in pieces for part in parts], **options)
    for step in range(6):
        set_grads(whole, step)
        for param, parts, first in zip(whole, pieces, rows, strict=True):
            assert param.grad is not None
            grads = param.grad.split([first, len(param) - first])
            for part, grad in zip(parts, grads, strict=True):
                part.grad = grad.clone()
        plain.step()
        cut.step()
        assert_same_bits([torch.cat(parts) for parts in pieces], whole, f"after step {step}")
    return {"elements": sum(param.numel() for param in whole)}


def sent(here: Here, as_views: bool) -> Figures:
    """Handles for another process, as ``torch.multiprocessing`` makes them; then training goes on as before.

    Whether CUDA gives a handle for a parameter in a bucket is a figure, no claim: see
    Note [A storage for each parameter] in `zero_optim.shard.places`.
    """
    params = here.moved(make_params(MATRICES))
    mine = twin(params)
    options = {"lr": 0.1, "momentum": 0.9}
    plain = torch.optim.SGD(params, **options)
    sharded = ZeroRedundancyOptimizer(mine, torch.optim.SGD, parameters_as_bucket_view=as_views, **options)
    train_both(plain, sharded, 2)
    given = "given"
    try:
        assert len([reduce_tensor(param.detach()) for param in mine]) == len(mine)
    except RuntimeError as error:
        given = str(error).splitlines()[0]
    train_both(plain, sharded, 2, first=2)
    return {"handles": given}
