"""`ShardedDataParallel`: data parallelism with sharded gradients, for a sharded optimizer."""

from collections.abc import Sequence
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from zero_optim.comm.agreement import agreeing, failing_together
from zero_optim.comm.mesh import RankMesh
from zero_optim.ddp.data_parallel import DistributedDataParallel
from zero_optim.ddp.owners.owner_reducer import OwnerReducer
from zero_optim.ddp.owners.sharded_module import NO_HOOK, Accumulate, refusing
from zero_optim.ddp.reducer.assignment import ReducerOptions
from zero_optim.ddp.reducer.inbox import Ties, weakly
from zero_optim.ddp.wrapper_checks import REFUSED, check_optimizer, check_wrapping
from zero_optim.optimizer import ZeroRedundancyOptimizer, require_ours


class ShardedDataParallel(DistributedDataParallel):
    """Reduce each gradient to its owner alone during the backward pass (ZeRO stage 2).

    Use it in place of ``DistributedDataParallel``, with the optimizer built first::

        optimizer = ZeroRedundancyOptimizer(module.parameters(), torch.optim.AdamW, lr=1e-3)
        model = ShardedDataParallel(module, optimizer)

    Clip by ``optimizer.clip_grad_norm_()`` instead of PyTorch's function; the rest of the loop stays as it
    is. After a backward pass the owner of a parameter has the averaged gradient in ``param.grad``, other
    ranks a `PartialGradient` without memory, which raises if it is read. A parameter that no rank used has
    None on every rank.

    Gradients are multiplied by one over the number of ranks and added in the order of ranks, bf16 and fp16 in
    float32 with one rounding. On two ranks these are the bits of ``DistributedDataParallel``. With a mesh,
    the sum of a replica is rounded too.

    Each bucket is sent while the next one fills, and takes half the bytes of an all-reduce. A rank holds its
    own gradients, one gradient and three buckets, two if ranks of one host share its memory: Note [Memory of
    sharded gradients] in `zero_optim.ddp.owners.owner_storage`. The first pass with ``static_graph=True``
    holds all gradients.

    All ranks of the optimizer's group construct it, with the same arguments, and run forward and backward
    passes together, as many on each rank: ``Join`` raises. Errors of a backward pass, checkpointing, and
    unused parameters are as in `DistributedDataParallel`. Sparse gradients are summed on every rank, and kept
    by their owners.

    On an accelerator call ``zero_grad()`` after a pass that raises. A hook of
    ``register_post_accumulate_grad_hook`` that is registered after wrapping may find None in ``param.grad``.

    Args:
        module: the model to train. The optimizer has all of its parameters that require a gradient.
        optimizer: steps them.
        accumulate: what several backward passes before a step do. "owner" reduces each, and owners add up: it
            sends each time, also under ``no_sync()``, and needs on the CPU the memory of its own gradients
            once more. "local" adds up whole gradients on each rank under ``no_sync()``, and the next pass
            outside of it reduces the sums. The bits differ.
        process_group: that of the optimizer; optional.
        mesh: a 2-D ``DeviceMesh``, (replicas, ranks of a replica), for several groups of ranks that each
            shard everything. Build the optimizer over one row of it, ``process_group=mesh.get_group(1)``. All
            ranks of the mesh construct, and train together; gradients are averaged over all. Replicas
            exchange rows only.
        **options: ``device_ids``, ``output_device``, ``dim``, ``broadcast_buffers``, ``init_sync``,
            ``find_unused_parameters``, ``static_graph``, ``timeout`` and ``on_stall``,
            as in `DistributedDataParallel`.

    Raises:
        TypeError: on every rank: ``optimizer`` is not sharded by this library, or an option is unknown or has
            no meaning here; says why.
        ValueError: likewise: the optimizer lacks a parameter, or has another process group, or one that is no
            row of the mesh; or a cut parameter has sparse gradients.
        RankMismatchError: on every rank: models or arguments differ; or the optimizers of two replicas.
    """

    _stage = 2
    join_hook = refusing(
        "takes no part in Join: each gradient is sent only to the rank that owns it. For uneven inputs use "
        "stage 1: ZeroRedundancyOptimizer with PyTorch's or zero_optim.ddp's DistributedDataParallel. Or "
        "give every rank as many batches"
    )
    register_comm_hook = refusing(NO_HOOK)
    _update_process_group = refusing(
        "has the process group of its optimizer: build both anew for other ranks"
    )

    def __init__(
        self,
        module: nn.Module,
        optimizer: ZeroRedundancyOptimizer,
        *,
        accumulate: Accumulate = "owner",
        process_group: dist.ProcessGroup | None = None,
        mesh: DeviceMesh | None = None,
        **options: Any,  # noqa: ANN401 - PyTorch's
    ) -> None:
        require_ours(optimizer)
        with optimizer.ranks.doing("ShardedDataParallel()"):
            vars(self).update(  # nn.Module is not set up yet
                _optimizer=optimizer, _accumulate=accumulate, _mesh=RankMesh.make(mesh, optimizer.ranks)
            )
            everyone = self._everyone
            with agreeing(everyone, "the arguments of ShardedDataParallel") as agreed:
                agreed.items.append(f"accumulate={accumulate!r}")
                check_wrapping(type(self), module, accumulate, options, REFUSED)
                check_optimizer(module, optimizer, process_group)
        base: Any = super()
        base.__init__(module, process_group=everyone.process_group, **options)
        optimizer.core.begin_training(self._mesh)

    def _make_reducer(
        self, pairs: Sequence[tuple[str, Tensor]], options: ReducerOptions, sparse: Sequence[str]
    ) -> OwnerReducer:
        ties = Ties(self._optimizer.core.engine, weakly(self._wants), self.module)
        return OwnerReducer(pairs, self._optimizer, options, ties, sparse=sparse, mesh=self._mesh)

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0, **options: Any) -> Tensor:  # noqa: ANN401 - as there
        """Call ``optimizer.clip_grad_norm_``; all ranks call."""
        return self._optimizer.clip_grad_norm_(max_norm, norm_type, **options)

    def detach(self) -> None:
        """Drop the process group, as in `DistributedDataParallel`, and gradients: owners may change."""
        super().detach()
        for param in self._module_parameters:
            param.grad = None

    def rebind(self, process_group: dist.ProcessGroup | None = None) -> None:
        """Go on with the process group of the optimizer, which is bound already; it may be left out.

        RuntimeError if the optimizer is detached, or there is a mesh; ValueError, on every rank, if the
        optimizer lacks a parameter or has another process group.
        """
        if self._mesh is not None:
            raise RuntimeError(
                "ShardedDataParallel has a mesh, whose groups are gone: wrap the module anew, with a new mesh"
            )
        ranks = self._optimizer.ranks
        with failing_together(ranks):
            check_optimizer(self.module, self._optimizer, process_group)
        super().rebind(ranks.process_group)
