"""Cases that come first: versions, private names of PyTorch, raw collectives, and a trace."""

import gzip
import shutil
import subprocess
from collections import Counter
from inspect import getattr_static
from pkgutil import resolve_name
from time import perf_counter
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from gpu.loopback import looped
from gpu.recipes import build
from gpu.setting import Figures, Here, NotHere
from zero_optim.compat import private

_RAW_NUMEL = 2**18
# Their names since PyTorch 2.13, and before.
_all_gather_single: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter_single: Any = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def versions(here: Here) -> Figures:
    """Return the versions that count."""
    figures: Figures = {"torch": torch.__version__, "gloo": str(dist.is_gloo_available())}
    if here.is_cuda:
        nccl = torch.cuda.nccl.version()  # type: ignore[no-untyped-call]
        figures |= {"cuda": str(torch.version.cuda), "nccl": ".".join(map(str, nccl))}
        figures["capability"] = ".".join(map(str, torch.cuda.get_device_capability(here.device)))
        if shutil.which("nvidia-smi"):
            command = ["nvidia-smi", "--query-gpu=driver_version,clocks.max.sm", "--format=csv,noheader"]
            done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=False)
            figures["driver, clock"] = done.stdout.strip().splitlines()[0] if done.stdout.strip() else "?"
    return figures


def private_names(here: Here) -> Figures:
    """Every private name that the library uses is there; the optional ones are counted."""
    del here
    listed = [name for names in (*private.NAMES.values(), *private.INHERITED.values()) for name in names]
    missing = [name for name in listed if not _exists(name)]
    optional = [name for name in private.OPTIONAL if not _exists(name)]
    assert not missing, missing
    return {"names": len(listed), "optional ones missing": ", ".join(optional) or "none"}


def _exists(name: str) -> bool:
    try:
        resolve_name(name)
    except (ImportError, AttributeError):
        owner, _, attribute = name.rpartition(".")
        try:  # some are made by `__init__`, and annotated or listed in the class
            holder: Any = resolve_name(owner)
        except (ImportError, AttributeError):
            return False
        return getattr_static(holder, attribute, None) is not None or isinstance(holder, type)
    return True


def raw(here: Here) -> Figures:
    """Call each collective that the library uses, as PyTorch has it; returns microseconds on the host."""
    size, rank = dist.get_world_size(), dist.get_rank()
    calls = {
        "broadcast": _broadcast,
        "all_reduce": _all_reduce,
        "all_gather": _all_gather,
        "all_gather_single": _all_gather_into_tensor,
        "all_to_all_single": _all_to_all_single,
        "reduce_scatter_single": _reduce_scatter_tensor,
    }
    figures: Figures = {}
    for name, call in calls.items():
        for dtype in (torch.float32, torch.bfloat16, torch.uint8):
            mine = torch.arange(size * _RAW_NUMEL, device=here.device).remainder(5).to(dtype) + rank
            try:
                call(mine.clone())
                here.synchronize()
                begin = perf_counter()
                result, expected = call(mine)
                microseconds = 1e6 * (perf_counter() - begin)
            except (RuntimeError, ValueError, NotImplementedError) as error:
                figures[f"{name}, {dtype}"] = f"does not run: {str(error).splitlines()[0][:60]}"
                continue
            here.synchronize()
            assert torch.equal(result.cpu(), expected.cpu()), (name, dtype)
            if dtype == torch.float32:
                figures[f"{name} us"] = round(microseconds, 1)
    return figures


def _broadcast(mine: Tensor) -> tuple[Tensor, Tensor]:
    expected = mine - dist.get_rank()
    dist.broadcast(mine, 0)
    return mine, expected


def _all_reduce(mine: Tensor) -> tuple[Tensor, Tensor]:
    size, rank = dist.get_world_size(), dist.get_rank()
    expected = (mine - rank) * size + sum(range(size))
    dist.all_reduce(mine)
    return mine, expected


def _gathered(mine: Tensor) -> Tensor:
    return torch.cat([mine - dist.get_rank() + rank for rank in range(dist.get_world_size())])


def _all_gather(mine: Tensor) -> tuple[Tensor, Tensor]:
    rows = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(rows, mine)
    return torch.cat(rows), _gathered(mine)


def _all_gather_into_tensor(mine: Tensor) -> tuple[Tensor, Tensor]:
    result = mine.new_empty(dist.get_world_size() * mine.numel())
    _all_gather_single(result, mine)
    return result, _gathered(mine)


def _all_to_all_single(mine: Tensor) -> tuple[Tensor, Tensor]:
    rank = dist.get_rank()
    result = torch.empty_like(mine)
    dist.all_to_all_single(result, mine)
    return result, _gathered(mine.view(-1, _RAW_NUMEL)[rank])


def _reduce_scatter_tensor(mine: Tensor) -> tuple[Tensor, Tensor]:
    size, rank = dist.get_world_size(), dist.get_rank()
    result = mine.new_empty(_RAW_NUMEL)
    row = mine.view(-1, _RAW_NUMEL)[rank]
    _reduce_scatter_single(result, mine)
    return result, (row - rank) * size + sum(range(size))


def traced(here: Here, recipe: str) -> Figures:
    """Profile an iteration over late collectives; keeps the trace, and counts the library's labels."""
    activities = [torch.profiler.ProfilerActivity.CPU]
    if here.is_cuda:
        activities.append(torch.profiler.ProfilerActivity.CUDA)
    width, depth = (1024, 8) if here.is_cuda else (32, 4)
    with looped(here, 8, "late"):
        iterate = build(here, recipe, width, depth)
        for _ in range(3):
            iterate()
        here.synchronize()
        with torch.profiler.profile(activities=activities) as profile:
            iterate()
            here.synchronize()
    if here.kept is not None:
        plain = here.folder / "trace.json"
        profile.export_chrome_trace(str(plain))
        here.kept.mkdir(parents=True, exist_ok=True)
        target = here.kept / f"trace-{recipe.lower().replace(' ', '-').replace(',', '')}.json.gz"
        target.write_bytes(gzip.compress(plain.read_bytes()))
    labels = Counter(
        event.name.split()[0] for event in profile.events() if event.name.startswith("zero_optim.")
    )
    if not labels:
        raise NotHere("the profiler saw no labels of the library")
    return dict(sorted(labels.items()))
