"""Communication hooks, which reduce a bucket of gradients during the backward pass.

`zero_step` also steps the sharded optimizer. Hooks have PyTorch's signature, so ours and PyTorch's run on
both ``DistributedDataParallel``. Import the package as ``zero_optim.hooks``.
"""

# A checkout also offers this folder as a package `hooks`. Imported twice, every class would exist twice, and
# isinstance checks between the copies would fail.
if __name__ != "zero_optim.hooks":
    raise ImportError(f"import this package as 'zero_optim.hooks', not as {__name__!r}", name=__name__)

from zero_optim.hooks.stepper import hook_with_zero_step, hook_with_zero_step_interleaved, zero_step

__all__ = [
    "hook_with_zero_step",
    "hook_with_zero_step_interleaved",
    "zero_step",
]


def __dir__() -> list[str]:
    return __all__
