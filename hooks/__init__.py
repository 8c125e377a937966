"""Communication hooks: what is done with a bucket of gradients between the backward pass and the optimizer.

This package will hold one family of hooks a file: all-reduce, 16-bit compression, quantization, PowerSGD,
local SGD, and stepping a sharded optimizer bucket by bucket. Every hook has PyTorch's signature,
``hook(state, bucket) -> Future[Tensor]``, so ours run on PyTorch's ``DistributedDataParallel`` as well as on
``zero_optim.ddp``.

The folder lies at the top of the repository, but the package is ``zero_optim.hooks`` wherever it is imported.
"""

# From a bare checkout Python would also find this folder as a package `hooks`, and every class in it would
# then exist twice: isinstance checks between the two copies fail in ways that are hard to read.
if __name__ != "zero_optim.hooks":
    raise ImportError(f"import this package as 'zero_optim.hooks', not as {__name__!r}", name=__name__)
