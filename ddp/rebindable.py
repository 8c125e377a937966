"""A wrapper that outlives its process group: it can be detached from one and bound to another."""

from typing import Any, NoReturn

import torch.distributed as dist
from torch.distributed.algorithms.join import Joinable
from torch.nn.parallel import DistributedDataParallel as TorchDistributedDataParallel

from zero_optim.comm.agreement import failing_together
from zero_optim.comm.collectives import RankGroup
from zero_optim.comm.traffic import Timeout
from zero_optim.compat import private
from zero_optim.compat.autograd import eager
from zero_optim.ddp.wrapper_checks import agree_on_model
from zero_optim.health.watchdog import unwatch, watch


class _Detached:
    def __getattr__(self, name: str) -> NoReturn:
        if name.startswith("__"):  # Python asks for these itself
            raise AttributeError(name)
        raise RuntimeError("the wrapper is detached: call its rebind(), on all ranks of the new group")


class RebindableWrapper(TorchDistributedDataParallel):
    """PyTorch's class, which can go to another process group. Subclasses give it our reducer."""

    reducer: Any
    logger: Any
    _SHOWN = frozenset({"device", "module", "process_group", "require_backward_grad_sync", "training"})
    _timeout: Timeout = None
    _on_stall: str = "raise"

    def __dir__(self) -> list[str]:  # without what PyTorch's constructor sets
        names: list[str] = super().__dir__()  # type: ignore[no-untyped-call]
        return [name for name in names if name in self._SHOWN or name not in vars(self)]

    def extra_repr(self) -> str:
        """Say which rank it is, and how much it reduces; no communication."""
        if self._is_detached:
            return "detached"
        nbytes = sum(param.nbytes for param in self._module_parameters)
        return (
            f"rank {self.process_group.rank()} of {self.process_group.size()}, {nbytes:,} bytes of gradients"
        )

    def detach(self) -> None:
        """Drop the process group, the reducer and comm hooks; no communication.

        Every rank calls it before ``destroy_process_group()``, beside the optimizer's `detach`. If a wait on
        these ranks has failed, their connections are broken. Until `rebind`, a forward pass whose gradients
        must be reduced raises; ``module`` runs without the wrapper. Gradients stay.
        """
        if self._is_detached:
            return
        self._remove_autograd_hooks()  # type: ignore[no-untyped-call]
        works = self.reducer.own.group.works
        works.log.cut_if_failed(works.ranks)  # see Note [Groups that end] in `zero_optim.comm.work_log`
        unwatch(self.reducer.own)
        unwatch(self)
        self._comm_hooks = []
        self.require_forward_param_sync = False
        Joinable.__init__(self)  # PyTorch leaves what the last Join set
        nothing: Any = _Detached()
        self.reducer = self.logger = self.process_group = nothing

    def rebind(self, process_group: dist.ProcessGroup | None = None) -> None:
        """Average over the ranks of another process group (None: the default); all of them call, detached.

        Bind a sharded optimizer first. Models are compared, then parameters and buffers are broadcast from
        the group's first rank. Comm hooks must be registered anew; buckets begin anew.

        Raises:
            RuntimeError: on every rank, the wrapper is not detached on some.
            RankMismatchError: on every rank, models differ; names the first difference.
        """
        private.require("rebind() of a wrapper")
        group = RankGroup.of(process_group, self._module_parameters).within(self._timeout)
        watch(self, group, self._on_stall)
        try:
            with failing_together(group):
                if not self._is_detached:
                    raise RuntimeError("expected a detached wrapper: call detach() before the group ends")
            options = ("find_unused_parameters", "gradient_as_bucket_view", "static_graph")
            arguments = {name: getattr(self, name) for name in options}
            arguments |= {"module": self.module, "process_group": group.process_group}
            agree_on_model(arguments, self, self._timeout, self._on_stall)
            self.process_group = group.process_group
            private.sync_module_states(
                module=self.module,
                process_group=self.process_group,
                broadcast_bucket_size=self.broadcast_bucket_size,
                src=0,
                params_and_buffers_to_ignore=self.parameters_to_ignore,
            )
            parameters, sparse = self._build_params_for_reducer()  # type: ignore[no-untyped-call]
            names = self._build_debug_param_to_name_mapping(parameters)  # type: ignore[no-untyped-call]
            self._ddp_init_helper(parameters, sparse, names, self.static_graph)  # type: ignore[no-untyped-call]
        finally:
            if self._is_detached:  # as before
                unwatch(self)
        self.require_forward_param_sync = True
        if self.static_graph:
            self.reducer._set_static_graph()

    @eager
    def _sync_module_buffers(self, authoritative_rank: int) -> None:
        """Broadcast the buffers as our work, so that errors name missing ranks."""
        runs_hook = hasattr(self, "buffer_hook")  # one of the user's, for buffers
        with self.reducer.own.group.during("buffers").begin_work(runs_hook=runs_hook).waiting():
            super()._sync_module_buffers(authoritative_rank)  # type: ignore[no-untyped-call]

    @property
    def _is_detached(self) -> bool:
        return isinstance(getattr(self, "reducer", None), _Detached)
