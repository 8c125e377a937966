"""Data parallelism written in Python: gradients are reduced in buckets while the backward pass still runs.

The package and ``zero_optim.hooks`` meet only at PyTorch's comm-hook signature. The folder lies at the top of
the repository, but the package is ``zero_optim.ddp`` wherever it is imported.
"""

# From a bare checkout Python would also find this folder as a package `ddp`, and every class in it would then
# exist twice: isinstance checks between the two copies fail in ways that are hard to read.
if __name__ != "zero_optim.ddp":
    raise ImportError(f"import this package as 'zero_optim.ddp', not as {__name__!r}", name=__name__)

from zero_optim.ddp.bucketer import ReduceScatterBucketer
from zero_optim.ddp.data_parallel import DistributedDataParallel
from zero_optim.ddp.full.precision import PrecisionPolicy
from zero_optim.ddp.full.sharded_state import full_state_dict, unsharded
from zero_optim.ddp.fully_sharded import FullyShardedDataParallel, fully_shard, fully_sharded
from zero_optim.ddp.reducer.gradient_bucket import GradBucket
from zero_optim.ddp.sharded import ShardedDataParallel

__all__ = [
    "DistributedDataParallel",
    "FullyShardedDataParallel",
    "GradBucket",
    "PrecisionPolicy",
    "ReduceScatterBucketer",
    "ShardedDataParallel",
    "full_state_dict",
    "fully_shard",
    "fully_sharded",
    "unsharded",
]


def __dir__() -> list[str]:
    return __all__
