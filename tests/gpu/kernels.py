"""Cases: what the library assumes of a device's kernels and of its memory."""

from typing import Any

import torch
from torch import nn
from torch.multiprocessing.reductions import reduce_tensor

from gpu.setting import Figures, Here, NotHere
from training import MATRICES, assert_same_bits, make_params, set_grads, train_both, twin
from zero_optim import ZeroRedundancyOptimizer
from zero_optim.comm import row_sum

# `eps` is no zero in float16, and so no step is NaN.
CUT: dict[str, tuple[Any, dict[str, Any]]] = {
    "AdamW": (torch.optim.AdamW, {"lr": 0.01, "eps": 1e-4}),
    "AdamW foreach": (torch.optim.AdamW, {"lr": 0.01, "eps": 1e-4, "foreach": True, "amsgrad": True}),
    "AdamW fused": (torch.optim.AdamW, {"lr": 0.01, "eps": 1e-4, "fused": True}),
    "SGD": (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "nesterov": True}),
    "Adagrad": (torch.optim.Adagrad, {"lr": 0.1, "eps": 1e-4}),
}


def cut_by_rows(here: Here, name: str, dtype: torch.dtype) -> Figures:
    """Rows stepped as parameters of their own, beside the whole: what the library assumes of kernels here.

    Lengths are odd, so that pieces end in other places of a vector than the whole does, and some pieces are
    shorter than one. Pieces begin at multiples of 512 bytes, as plans cut.
    """
    if not here.is_cuda and dtype.itemsize < 4:
        raise NotHere("nothing narrower than float32 is cut on the CPU")
    optimizer_class, given = CUT[name]
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
            grads = param.grad.split([first, len(param) - first])
            for part, grad in zip(parts, grads, strict=True):
                part.grad = grad.clone()
        plain.step()
        cut.step()
        assert_same_bits([torch.cat(parts) for parts in pieces], whole, f"after step {step}")
    return {"elements": sum(param.numel() for param in whole)}


def added_at_once(here: Here, dtype: torch.dtype) -> Figures:
    """Rows of many ranks added in one launch: in the order of ranks, see `zero_optim.comm.row_sum`."""
    shapes = ((3, 40_000), (8, 2**18), (64, 20_001), (1024, 48))
    for shape in shapes:
        rows = (
            torch.randn(shape, generator=torch.Generator().manual_seed(0)).mul_(100).to(dtype).to(here.device)
        )
        expected = torch.empty_like(rows[0])
        came = torch.cat([rows.view(-1), rows.new_zeros(row_sum._WIDTH)])
        total = row_sum._add_at_once(came, len(rows))
        row_sum._add(list(rows.clone()), 0, expected)
        assert_same_bits([total], [expected], f"{shape}")
    return {"ranks": max(ranks for ranks, _ in shapes)}


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
    assert all(param.untyped_storage().nbytes() == param.nbytes for param in mine)
    return {"handles": given}
