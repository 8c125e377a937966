"""What one rank's CPU does in a step of training on 8 to 16,384 ranks, beside PyTorch's ZeRO and FSDP2.

One real rank over PyTorch's fake process group, which sends nothing; bf16 Llama of 7 G parameters and GPT-2.
The models are narrower by `--divide`, and all sizes in bytes by its square: so plans have the buckets, owners
and cuts of the full model. Classes are not tried, as bf16 kernels refuse cuts on the CPU alone.

*Collectives*: of a step, by the dispatcher; *launches*: operators of a step that would start a kernel or a
copy on an accelerator; *CPU*: of forward, backward, clipping and step, on one thread; *received*: the most
bytes that a reduction receives and that live at once, in buckets of the largest size.
"""

import contextlib
import gc
import json
import subprocess
import sys
import time
from collections.abc import Callable
from statistics import median
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
import torch.distributed as dist
from fake_wire import Count, Wire
from harness import arguments, record, show
from models import Gpt2, Llama
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer as TorchZero
from torch.nn.parallel import DistributedDataParallel as TorchDdp
from torch.optim import AdamW
from torch.testing._internal.distributed.fake_pg import FakeStore

import zero_optim.ddp as ours
from zero_optim import ZeroRedundancyOptimizer
from zero_optim.comm import row_sum
from zero_optim.comm.backends import Transport
from zero_optim.hooks import zero_step
from zero_optim.plan import cuts
from zero_optim.state.options import GroupOptions

OPTIONS: dict[str, Any] = {"lr": 1e-4, "foreach": True}
CAP_NBYTES = 2**25
# Sizes in bytes or elements that are made smaller with the model.
SIZES = (
    (cuts, "MIN_ROW_NBYTES"),
    (Transport, "row_nbytes"),
    (row_sum, "_ADDED_AT_ONCE"),
)

CLIP: dict[str, Any] = {"max_norm": 1.0, "foreach": True}
MODELS: dict[str, tuple[Callable[[int], nn.Module], torch.dtype]] = {
    "7 B": (Llama, torch.bfloat16),
    "GPT-2": (Gpt2, torch.float32),
}


class Trained(NamedTuple):
    """A model in training."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    clip: Callable[[], object] | None


def plain(model: nn.Module, _: float) -> Trained:
    optimizer = AdamW(model.parameters(), **OPTIONS)
    return Trained(model, optimizer, lambda: nn.utils.clip_grad_norm_(model.parameters(), **CLIP))


def hook(_: object, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:  # type: ignore[name-defined]
    """Do what DDP does; on a fake group its own reduction has no result."""
    total = bucket.buffer().div_(dist.get_world_size())
    future: torch.futures.Future[Tensor] = dist.all_reduce(total, async_op=True).get_future().then(_first)
    return future


def _first(future: torch.futures.Future[list[Tensor]]) -> Tensor:
    return future.value()[0]


def torch_zero(model: nn.Module, cap_mb: float) -> Trained:
    wrapped = TorchDdp(model, gradient_as_bucket_view=True, bucket_cap_mb=cap_mb)
    wrapped.register_comm_hook(None, hook)
    optimizer = TorchZero(model.parameters(), AdamW, parameters_as_bucket_view=True, **OPTIONS)
    return Trained(wrapped, optimizer, lambda: nn.utils.clip_grad_norm_(model.parameters(), **CLIP))


def fsdp2(model: Any, _: float) -> Trained:  # noqa: ANN401
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return plain(model, 0.0)


def stage1(model: nn.Module, cap_mb: float, *, lazily: bool = False, overlaps: bool = False) -> Trained:
    wrapped = ours.DistributedDataParallel(model, gradient_as_bucket_view=True, bucket_cap_mb=cap_mb)
    optimizer = ZeroRedundancyOptimizer(model.parameters(), AdamW, bucket_cap_mb=cap_mb, **OPTIONS)
    if overlaps:  # steps before all gradients are there, so it cannot clip
        wrapped.register_comm_hook(None, zero_step(optimizer))
        return Trained(wrapped, optimizer, None)
    if lazily:
        optimizer.gather_lazily(wrapped)
    return Trained(wrapped, optimizer, lambda: optimizer.clip_grad_norm_(**CLIP))


def stage2(model: nn.Module, cap_mb: float) -> Trained:
    optimizer = ZeroRedundancyOptimizer(model.parameters(), AdamW, bucket_cap_mb=cap_mb, **OPTIONS)
    wrapped = ours.ShardedDataParallel(model, optimizer)
    return Trained(wrapped, optimizer, lambda: optimizer.clip_grad_norm_(**CLIP))


def stage3(model: Any, cap_mb: float) -> Trained:  # noqa: ANN401
    wrapped = ours.FullyShardedDataParallel(model, units=[*model.blocks])
    optimizer = ZeroRedundancyOptimizer(wrapped.parameters(), AdamW, bucket_cap_mb=cap_mb, **OPTIONS)
    return Trained(wrapped, optimizer, lambda: optimizer.clip_grad_norm_(**CLIP))


CONTENDERS: dict[str, Callable[..., Trained]] = {
    "plain": plain,
    "torch ZeRO": torch_zero,
    "FSDP2": fsdp2,
    "stage 1": stage1,
    "gather_lazily": lambda model, cap_mb: stage1(model, cap_mb, lazily=True),
    "zero_step": lambda model, cap_mb: stage1(model, cap_mb, overlaps=True),
    "stage 2": stage2,
    "stage 3": stage3,
}


# ---------------------------------------------------------------------- counting


def step_of(trained: Trained, vocab: int) -> Callable[[], None]:
    tokens = torch.randint(vocab, (1, 8))

    def step() -> None:
        trained.model(tokens).backward()
        if trained.clip is not None:
            trained.clip()
        trained.optimizer.step()
        trained.optimizer.zero_grad()

    return step


def measure(name: str, model: str, wire: Wire, divide: int, steps: int) -> dict[str, Any]:
    """Build one contender, count one step and time others."""
    make, dtype = MODELS[model]
    torch.manual_seed(0)
    module: Any = make(divide).to(dtype)
    wall, cpu = time.perf_counter(), time.process_time()
    trained = CONTENDERS[name](module, CAP_NBYTES / divide**2 / 2**20)
    built = {"construction_s": time.perf_counter() - wall, "construction_cpu_s": time.process_time() - cpu}
    step = step_of(trained, module.tokens.num_embeddings)
    step()
    step()
    wire.collectives.clear()
    wire.received = 0
    with Count() as count:
        step()
    by_kind = count.collectives + wire.collectives
    result: dict[str, Any] = {"collectives": by_kind.total(), "by_kind": by_kind}
    result |= built | {"launches": count.launches, "received_nbytes": wire.received}
    if isinstance(trained.optimizer, ZeroRedundancyOptimizer):
        buckets = trained.optimizer.core.engine.buckets
        result |= {"buckets": len(buckets), "largest_nbytes": max(bucket.nbytes for bucket in buckets)}
        result["rows"] = sum(len(bucket.layout.rows) for bucket in buckets)
    gc.collect()
    gc.disable()
    times = []
    for _ in range(steps):
        start = time.thread_time()
        step()
        times.append(time.thread_time() - start)
    gc.enable()
    return result | {"cpu_ms": 1e3 * median(times)}


def measure_all(model: str, world_size: int, divide: int, steps: int, names: list[str]) -> dict[str, Any]:
    """Measure contenders, on one rank of a fake group."""
    torch.set_num_threads(1)
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=world_size)
    with contextlib.ExitStack() as patches:
        for owner, size in SIZES:
            patches.enter_context(patch.object(owner, size, max(1, getattr(owner, size) // divide**2)))
        never = patch.object(GroupOptions, "why_whole", lambda *args: [None] * len(args[-1]))
        patches.enter_context(never)
        wire = Wire()
        patches.enter_context(wire.instead())
        results = {}
        for name in names:
            results[name] = measure(name, model, wire, divide, steps)
            gc.collect()
    return results


# ---------------------------------------------------------------------- the table


def lines(model: str, runs: dict[str, dict[str, Any]]) -> list[list[str]]:
    """Make a row of the table for each number of ranks and contender."""
    table = []
    for world_size, results in runs.items():
        for name, of in results.items():
            launches = of["launches"] / results["plain"]["launches"] if "plain" in results else float("nan")
            received = (
                of["received_nbytes"] / of["largest_nbytes"] if "largest_nbytes" in of else float("nan")
            )
            cells = [
                f"{of['collectives']:,}",
                f"{of['launches']:,}",
                f"{launches:.2f}",
                f"{of['cpu_ms']:.0f}",
            ]
            cells += [f"{of['construction_s']:.2f}", f"{received:.1f}", str(of.get("buckets", ""))]
            table.append([f"{model}, W={world_size}, {name}", *cells])
    return table


def main() -> None:
    """Measure each model and number of ranks in a process, show and record."""
    parser = arguments(__doc__)
    parser.add_argument("--ranks", type=int, nargs="+", default=[8, 64, 1024, 16384])
    parser.add_argument("--models", nargs="+", default=[*MODELS], choices=[*MODELS])
    parser.add_argument("--contenders", nargs="+", default=[*CONTENDERS], choices=[*CONTENDERS])
    parser.add_argument("--divide", type=int, help="of each dimension; 8 for 7 B, 4 for GPT-2")
    parser.add_argument("--steps", type=int, default=5, help="to time; the median counts")
    parser.add_argument("--one", action="store_true", help="measure in this process, and print JSON")
    options = parser.parse_args()
    if options.one:
        (model,), (world_size,) = options.models, options.ranks
        print(json.dumps(measure_all(model, world_size, options.divide, options.steps, options.contenders)))
        return
    results: dict[str, Any] = {}
    for model in options.models:
        divide = options.divide or {"7 B": 8, "GPT-2": 4}[model]
        runs: dict[str, Any] = {}
        for world_size in options.ranks:
            command = [
                sys.executable,
                "-W",
                "ignore",
                __file__,
                "--one",
                "--models",
                model,
                "--ranks",
                str(world_size),
            ]
            command += [
                "--divide",
                str(divide),
                "--steps",
                str(options.steps),
                "--contenders",
                *options.contenders,
            ]
            output = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
            runs[str(world_size)] = json.loads(output.splitlines()[-1])
        results[model] = {"divide": divide, "ranks": runs}
        columns = ["collectives", "launches", "/ plain", "CPU, ms", "construction, s", "received", "buckets"]
        show("One rank's step", ["", *columns], lines(model, runs))
    record("scale", results, dry=options.dry, backend="fake: one process, one thread")


if __name__ == "__main__":
    main()
