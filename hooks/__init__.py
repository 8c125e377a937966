"""Communication hooks: they reduce a bucket of gradients between the backward pass and the optimizer.

`zero_step` steps the sharded optimizer while the backward pass runs, and `reduce_to_owners` sends each
gradient to its owner alone; all-reduce and 16-bit compression are what they are combined with. Every hook has
PyTorch's signature, ``hook(state, bucket) -> Future[Tensor]``. So ours run on PyTorch's
``DistributedDataParallel`` and on ``zero_optim.ddp``, and PyTorch's run on both.

The folder is at the top of the repository, but the package is always imported as ``zero_optim.hooks``.
"""

# From a checkout Python would also find this folder as a package `hooks`. Then every class in it would exist
# twice, and isinstance checks between the two copies would fail in ways that are hard to understand.
if __name__ != "zero_optim.hooks":
    raise ImportError(f"import this package as 'zero_optim.hooks', not as {__name__!r}", name=__name__)

from zero_optim.hooks.allreduce import allreduce_hook
from zero_optim.hooks.compress import (
    bf16_compress_hook,
    bf16_compress_wrapper,
    fp16_compress_hook,
    fp16_compress_wrapper,
)
from zero_optim.hooks.overlap.to_owners import reduce_to_owners
from zero_optim.hooks.overlap.zero_step import hook_with_zero_step, hook_with_zero_step_interleaved, zero_step

__all__ = [
    "allreduce_hook",
    "bf16_compress_hook",
    "bf16_compress_wrapper",
    "fp16_compress_hook",
    "fp16_compress_wrapper",
    "hook_with_zero_step",
    "hook_with_zero_step_interleaved",
    "reduce_to_owners",
    "zero_step",
]
