"""Cases: a sharded optimizer beside the unsharded one on the same device, bit for bit."""

import math
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
    agreeing_scaler,
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
    buckets = sharded._sharding.buckets
    assert all(p.untyped_storage().nbytes() == p.nbytes for p in mine)
    return {"buckets": len(buckets), "as views": sum(getattr(b, "is_in_place", False) for b in buckets)}


def _check_devices(sharded: ZeroRedundancyOptimizer, plain: Optimizer) -> None:
    """The state loaded lies where the class itself has put it."""
    for mine, param in zip(params_of(sharded), params_of(plain), strict=True):
        for key, value in sharded.state.get(mine, {}).items():
            expected = plain.state[param][key]
            if isinstance(expected, torch.Tensor):
                assert value.device == expected.device, (key, value.device, expected.device)


def dtypes(here: Here, as_views: bool) -> None:
    """Parameters of several dtypes in one optimizer: each travels as bytes."""
    every = (torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.complex64)
    params = [param for dtype in every for param in here.moved(make_params(MATRICES, dtype))]
    plain = torch.optim.SGD(params, lr=0.1, momentum=0.9)
    sharded = ZeroRedundancyOptimizer(
        twin(params), torch.optim.SGD, parameters_as_bucket_view=as_views, lr=0.1, momentum=0.9
    )
    train_both(plain, sharded, 4)


def masters(here: Here, as_views: bool) -> None:
    """Narrow parameters stepped through masters, with averages, against both by hand."""
    params = here.moved(make_params(MIXED, torch.bfloat16))
    wide = [nn.Parameter(p.detach().float()) for p in params]
    averages = [q.detach().clone() for q in wide]
    plain = torch.optim.AdamW(wide, lr=0.01)
    sharded = ZeroRedundancyOptimizer(
        params,
        torch.optim.AdamW,
        parameters_as_bucket_view=as_views,
        master_dtype=torch.float32,
        ema_decay=0.75,
        lr=0.01,
    )
    for step in range(5):
        set_grads(params, step)
        for p, q in zip(params, wide, strict=True):
            assert p.grad is not None
            q.grad = p.grad.float()
        if step == 3:  # written from outside, as by a checkpoint: the master must follow
            with torch.no_grad():
                for p, q in zip(params, wide, strict=True):
                    p.mul_(2)
                    q.copy_(p)
        plain.step()
        sharded.step()
        torch._foreach_lerp_(averages, [q.detach() for q in wide], 0.25)
        assert_same_bits(params, [q.to(p.dtype) for p, q in zip(params, wide, strict=True)], f"at {step}")
    with sharded.averaged_weights():
        assert_same_bits(params, [a.to(p.dtype) for p, a in zip(params, averages, strict=True)], "averaged")
    assert_same_bits(params, [q.to(p.dtype) for p, q in zip(params, wide, strict=True)], "afterwards")


def clipping(here: Here, norm_type: float) -> None:
    """The norm, and the gradients and parameters after clipping, as with PyTorch's function."""
    params = here.moved(make_params())
    mine = twin(params)
    plain = torch.optim.AdamW(params, lr=0.01)
    sharded = ZeroRedundancyOptimizer(mine, torch.optim.AdamW, lr=0.01)
    for step in range(4):
        for own in (params, mine):
            set_grads(own, step, scale=2.0 if step % 2 else 0.001)
        expected = nn.utils.clip_grad_norm_(params, 1.0, norm_type)
        norm = sharded.clip_grad_norm_(1.0, norm_type)
        assert norm.device == expected.device
        assert torch.equal(norm, expected), (norm, expected)
        assert_same_bits([p.grad for p in mine], [p.grad for p in params], "of the gradients")  # type: ignore[misc]
        plain.step()
        sharded.step()
        assert_same_bits(mine, params, f"after step {step}")


def scaling(here: Here, fused: bool, unscale_first: bool) -> None:
    """A scaler; in steps 2 and 5 the last rank alone finds an infinity, and all skip."""
    params = here.moved(make_params())
    mine = twin(params)
    runs = (
        torch.optim.AdamW(params, lr=0.01, fused=fused),
        ZeroRedundancyOptimizer(mine, torch.optim.AdamW, lr=0.01, fused=fused),
    )
    kinds = (torch.amp.GradScaler, agreeing_scaler)
    scalers = [kind(here.device.type, init_scale=2.0**10, growth_interval=2) for kind in kinds]
    for step in range(8):
        for optimizer, scaler in zip(runs, scalers, strict=True):
            own = params_of(optimizer)
            set_grads(own, step)
            scale = float(scaler.scale(torch.ones((), device=here.device)))
            for p in own:
                assert p.grad is not None
                p.grad *= scale
            is_last = dist.get_rank() == dist.get_world_size() - 1
            if step in (2, 5) and (optimizer is runs[0] or is_last):
                own[3].grad.fill_(math.inf)  # type: ignore[union-attr]
            if unscale_first:
                scaler.unscale_(optimizer)
            scaler.step(optimizer)
            scaler.update()
        assert scalers[0].get_scale() == scalers[1].get_scale(), step
        assert_same_bits(mine, params, f"after step {step}")


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


def frozen_groups(here: Here) -> None:
    """Groups with options of their own, frozen parameters, one thawed and one group added on the way."""
    params = here.moved(make_params())
    mine = twin(params)
    for own in (params, mine):
        own[2].requires_grad_(False)

    def groups(p: list[nn.Parameter]) -> list[dict[str, Any]]:
        return [{"params": p[:4], "weight_decay": 0.1}, {"params": p[4:6], "lr": 0.5}]

    plain = torch.optim.AdamW(groups(params), lr=0.01)
    sharded = ZeroRedundancyOptimizer(groups(mine), torch.optim.AdamW, lr=0.01)
    train_both(plain, sharded, 3)
    for optimizer, own in ((plain, params), (sharded, mine)):
        own[2].requires_grad_(True)
        optimizer.add_param_group({"params": own[6:], "lr": 0.2})
    train_both(plain, sharded, 3, first=3)
    assert str(sharded.explain())


def sent(here: Here, as_views: bool) -> Figures:
    """Handles for another process, as ``torch.multiprocessing`` makes them; then training goes on as before.

    Whether CUDA gives a handle for a parameter in a bucket is a figure, no claim: see
    Note [A storage for each parameter] in `zero_optim.shard.places`.
    """
    params = here.moved(make_params(MATRICES))
    mine = twin(params)
    plain = torch.optim.SGD(params, lr=0.1, momentum=0.9)
    sharded = ZeroRedundancyOptimizer(
        mine, torch.optim.SGD, parameters_as_bucket_view=as_views, lr=0.1, momentum=0.9
    )
    train_both(plain, sharded, 2)
    given = "given"
    try:
        handles = [reduce_tensor(param.detach()) for param in mine]
    except RuntimeError as error:
        given = str(error).splitlines()[0]
    else:
        assert len(handles) == len(mine)
    train_both(plain, sharded, 2, first=2)
    return {"handles": given}
