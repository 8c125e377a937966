"""Cases: what sharded gradients and parameters really take, against a bound from the plan, beside FSDP2."""

import gc
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.fsdp import fully_shard as fully_shard_of_torch

from fully import NARROW
from gpu.costs import MIB
from gpu.setting import Figures, Here, layers_asleep
from sync_calls import cpu_as_accelerator
from test_sharded_memory import LivingStorages
from training import LoRA
from zero_optim import ZeroRedundancyOptimizer
from zero_optim.ddp import FullyShardedDataParallel, ShardedDataParallel

STAGES = ("gradients", "parameters", "bf16", "LoRA")
STEPS = 3
BATCH = 8
MOST_RESERVED = 1.25  # times what may be allocated: gaps between blocks


@dataclass
class Sizes:
    """Of a model of ``depth`` layers of one width."""

    width: int
    depth: int

    @property
    def layer(self) -> int:
        """Bytes of a layer in float32."""
        return 4 * self.width**2

    @property
    def activations(self) -> int:
        """Bytes that the layers save and make, in float32."""
        return 4 * 4 * self.depth * BATCH * self.width

    def model(self, here: Here, stage: str) -> nn.Sequential:
        """Build the model on the device; with LoRA beside each layer, which then is frozen."""
        torch.manual_seed(0)
        with here.device:
            layers = [nn.Linear(self.width, self.width, bias=False) for _ in range(self.depth)]
            return nn.Sequential(*(map(LoRA, layers) if stage == "LoRA" else layers))


Built = tuple[nn.Module, torch.optim.Optimizer, Callable[[], int]]  # and bytes that there may be in training
Build = Callable[[Here, str, Sizes], Built]


def ours(here: Here, stage: str, sizes: Sizes) -> Built:
    """Wrap a model; the bound is that of the Notes, see `zero_optim` [Memory of sharded gradients]."""
    model = sizes.model(here, stage)
    adamw: dict[str, Any] = {"optimizer_class": torch.optim.AdamW, "lr": 1e-3, "fused": here.is_cuda}
    optimizer = ZeroRedundancyOptimizer(model.parameters(), bucket_cap_mb=sizes.layer / MIB, **adamw)
    if stage == "gradients":
        wrapped = ShardedDataParallel(model, optimizer)
    else:
        policy = {"mixed_precision": NARROW} if stage == "bf16" else {}
        wrapped = FullyShardedDataParallel(model, optimizer, units=[*model], **policy)

    def planned() -> int:
        if stage == "gradients":
            kept, whole = sum(param.nbytes for param in model.parameters()), 0
        else:
            buckets = [bucket for unit in wrapped.units.units for bucket in unit.buckets]
            kept = sum(bucket.values.row.values.nbytes for bucket in buckets)
            whole = 2 * max(sum(bucket.nbytes for bucket in unit.buckets) for unit in wrapped.units.units)
        own = optimizer.state_nbytes() // 2  # AdamW keeps two values for each that it owns
        gradient = max(param.numel() * 4 for param in model.parameters() if param.requires_grad)
        buckets_on_their_way = (4 if here.backend == "gloo" else 3) * gradient
        return kept + optimizer.state_nbytes() + own + whole + buckets_on_their_way + gradient

    return wrapped, optimizer, planned


def theirs(here: Here, stage: str, sizes: Sizes) -> Built:
    """The same with PyTorch's FSDP2, over the group there is."""
    model = sizes.model(here, stage)
    mesh = DeviceMesh.from_group(dist.group.WORLD, here.device.type)
    policy = (
        MixedPrecisionPolicy(torch.bfloat16, torch.float32) if stage == "bf16" else MixedPrecisionPolicy()
    )
    for module in (*model, model):
        fully_shard_of_torch(module, mesh=mesh, mp_policy=policy)
    trained = [param for param in model.parameters() if param.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-3, fused=here.is_cuda)
    return model, optimizer, lambda: 0


def memory(here: Here, stage: str, width: int, depth: int) -> Figures:
    """Train where layers sleep, so that the CPU is ahead; peaks in MiB, allocated and reserved."""
    sizes = Sizes(width, depth) if here.is_cuda else Sizes(width // 8, depth)
    allocated, reserved, planned = _peaks(here, ours, stage, sizes)
    most = planned + sizes.activations + sizes.layer // 2
    figures: Figures = {"planned MiB": round(most / MIB, 1), **_in_mib("ours", allocated, reserved)}
    assert allocated <= most, figures
    assert reserved <= MOST_RESERVED * most, figures
    if stage == "gradients":
        return figures
    try:
        allocated, reserved, _ = _peaks(here, theirs, stage, sizes)
    except Exception as error:  # noqa: BLE001 - whatever PyTorch says, such as over gloo on CUDA
        return {**figures, "FSDP2": f"does not run: {str(error).splitlines()[0][:80]}"}
    if not here.is_cuda:  # what is inside of its tensors is not counted
        return {**figures, "FSDP2": "runs"}
    return {**figures, **_in_mib("FSDP2", allocated, reserved)}


def _peaks(here: Here, build: Build, stage: str, sizes: Sizes) -> tuple[int, int, int]:
    """Train for some steps; gives bytes: the most allocated, the most reserved, and the planned ones.

    On the CPU what living storages take is counted, and nothing is reserved.
    """
    gc.collect()
    with ExitStack() as stack:
        if not here.is_cuda:
            stack.enter_context(cpu_as_accelerator())
            living = stack.enter_context(LivingStorages(()))
        stack.enter_context(layers_asleep(here))
        before = _used(here)
        model, optimizer, planned = build(here, stage, sizes)
        x = torch.randn(BATCH, sizes.width, device=here.device)
        _used(here)  # wrapping is another matter
        if not here.is_cuda:
            living.peak = 0
        for _ in range(STEPS):
            model(x).float().square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        here.synchronize()
    if not here.is_cuda:
        return living.peak, 0, planned()
    device = here.device
    peaks = torch.cuda.max_memory_allocated(device), torch.cuda.max_memory_reserved(device)
    return peaks[0] - before[0], peaks[1] - before[1], planned()


def _used(here: Here) -> tuple[int, int]:
    """Give back what is not in use, and begin peaks anew; gives bytes allocated and reserved."""
    if not here.is_cuda:
        return 0, 0
    for dtype in (torch.float32, torch.bfloat16):  # products have a workspace, which stays
        ones = torch.ones(64, 64, device=here.device, dtype=dtype)
        ones @ ones
    here.synchronize()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats(here.device)
    return torch.cuda.memory_allocated(here.device), torch.cuda.memory_reserved(here.device)


def _in_mib(who: str, allocated: int, reserved: int) -> Figures:
    figures: Figures = {f"{who} MiB": round(allocated / MIB, 1)}
    return {**figures, f"{who} reserved MiB": round(reserved / MIB, 1)} if reserved else figures
