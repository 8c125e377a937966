"""Communication hooks: they reduce a bucket of gradients between the backward pass and the optimizer.

Each file has one family of hooks: all-reduce, 16-bit compression, quantization, PowerSGD, top-k, post-local
SGD, and hooks for debugging. Every hook has PyTorch's signature, ``hook(state, bucket) -> Future[Tensor]``.
So ours run on PyTorch's ``DistributedDataParallel`` and on ``zero_optim.ddp``. `make_hook` finds them by
name.

The folder is at the top of the repository, but the package is always imported as ``zero_optim.hooks``.
"""

# From a checkout Python would also find this folder as a package `hooks`. Then every class in it would exist
# twice, and isinstance checks between the two copies would fail in ways that are hard to understand.
if __name__ != "zero_optim.hooks":
    raise ImportError(f"import this package as 'zero_optim.hooks', not as {__name__!r}", name=__name__)

from torch import Tensor

from zero_optim.compat.engine import require
from zero_optim.hooks.allreduce import allreduce_hook
from zero_optim.hooks.compress import (
    bf16_compress_hook,
    bf16_compress_wrapper,
    fp16_compress_hook,
    fp16_compress_wrapper,
)
from zero_optim.hooks.debug import BucketRecord, LoggingState, logging_hook, noop_hook
from zero_optim.hooks.local_sgd import PeriodicModelAverager, PostLocalSGDState, post_localSGD_hook
from zero_optim.hooks.overlap.to_owners import reduce_to_owners
from zero_optim.hooks.overlap.zero_step import hook_with_zero_step, hook_with_zero_step_interleaved, zero_step
from zero_optim.hooks.power_sgd import (
    CompressionStats,
    PowerSGDState,
    batched_powerSGD_hook,
    powerSGD_hook,
)
from zero_optim.hooks.quantize import quantization_perchannel_hook, quantization_pertensor_hook
from zero_optim.hooks.registry import (
    HookChoice,
    hook_names,
    hook_options,
    hook_summary,
    make_hook,
    parse_hook_options,
)
from zero_optim.hooks.top_k import TopKState, topk_hook

NEEDED = ((Tensor, "_nnz"),)  # see Note [Private names] in zero_optim.compat.engine
require(NEEDED, __name__)

__all__ = [
    "BucketRecord",
    "CompressionStats",
    "HookChoice",
    "LoggingState",
    "PeriodicModelAverager",
    "PostLocalSGDState",
    "PowerSGDState",
    "TopKState",
    "allreduce_hook",
    "batched_powerSGD_hook",
    "bf16_compress_hook",
    "bf16_compress_wrapper",
    "fp16_compress_hook",
    "fp16_compress_wrapper",
    "hook_names",
    "hook_options",
    "hook_summary",
    "hook_with_zero_step",
    "hook_with_zero_step_interleaved",
    "logging_hook",
    "make_hook",
    "noop_hook",
    "parse_hook_options",
    "post_localSGD_hook",
    "powerSGD_hook",
    "quantization_perchannel_hook",
    "quantization_pertensor_hook",
    "reduce_to_owners",
    "topk_hook",
    "zero_step",
]
