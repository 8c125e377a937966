"""`DistributedDataParallel`: PyTorch's own class, with our `Reducer` instead of its C++ one.

Only this file and `reducer_adapters` touch private names of that class.
"""

from collections.abc import Sequence
from functools import wraps
from operator import itemgetter
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.algorithms.join import Joinable, JoinHook
from torch.nn.parallel import DistributedDataParallel as TorchDistributedDataParallel

from zero_optim.comm.agreement import agree, failing_together
from zero_optim.comm.collectives import RankGroup, Released
from zero_optim.comm.traffic import Timeout
from zero_optim.compat import private
from zero_optim.compat.autograd import eager
from zero_optim.ddp.first_values import seen_buffers, take_values_of_first
from zero_optim.ddp.owners.sharded_module import ShardedModule
from zero_optim.ddp.reducer.assignment import ReducerOptions
from zero_optim.ddp.reducer.inbox import Ties, weakly
from zero_optim.ddp.reducer.reducer import Reducer
from zero_optim.ddp.reducer.reduction import Hook
from zero_optim.ddp.reducer.report import NO_SYNC_IN_JOIN
from zero_optim.ddp.reducer_adapters import TorchLoggerAdapter, TorchReducerAdapter, reducer_options
from zero_optim.ddp.wrapper_checks import agree_on_model, frozen_params, seen_params, torch_arguments
from zero_optim.health.watchdog import unwatch, watch
from zero_optim.iteration.joins import refuse_no_sync
from zero_optim.plan.description import describe_hook
from zero_optim.shard.engine import Engine
from zero_optim.step.unreduced import FrozenParams


class DistributedDataParallel(ShardedModule, TorchDistributedDataParallel):
    """Average gradients over ranks during the backward pass: PyTorch's ``DistributedDataParallel``.

    Arguments, defaults, methods and attributes are those of the installed PyTorch, for one device a rank;
    ``timeout`` and ``on_stall`` are as of `ZeroRedundancyOptimizer`, by name. All ranks of the group
    construct it with the same arguments, and run forward and backward passes together. What differs:

    - A backward pass that does not give every parameter a gradient raises when it ends, on every rank, with
      the parameters' names. On a GPU `check_finished` or the second forward pass after it raises; until then
      its gradients are handed out.
    - ``no_sync`` may be around the backward pass alone.
    - Several forward passes, each backpropagated on its own, are all reduced.
    - Models that differ between ranks are refused with the name of the first parameter that does.
    - Unused parameters are found without wrapping, or copying, the outputs.
    - ``torch.distributed.autograd`` is refused: forward raises in its context.

    As in PyTorch, a forward pass writes the first rank's buffers into those of the others. Where they differ,
    a second forward pass before the backward pass overwrites what the first has saved of them.

    Raises:
        TypeError: on every rank: ``mixed_precision`` is given, for which ``torch.autocast`` serves, or
            ``delay_all_reduce_named_params``, for which PyTorch's own class does.
        RankMismatchError: on every rank: models differ.
    """

    reducer: Any
    logger: Any
    _stage = 1
    _timeout: Timeout = None
    _on_stall: str = "raise"

    @wraps(TorchDistributedDataParallel.__init__)  # type: ignore[misc]
    def __init__(
        self,
        module: nn.Module,
        *args: Any,  # noqa: ANN401 - PyTorch's
        timeout: Timeout = None,
        on_stall: str = "raise",
        **kwargs: Any,  # noqa: ANN401
    ) -> None:
        agree_on_model(torch_arguments(module, args, kwargs), self, timeout, on_stall)
        vars(self).update(_timeout=timeout, _on_stall=on_stall)  # nn.Module is not set up yet
        super().__init__(module, *args, **kwargs)

    def extra_repr(self) -> str:
        """Say which rank it is, and how much it reduces; no communication."""
        if self._stage > 1:
            return super().extra_repr()
        if self._is_detached:
            return "detached"
        nbytes = sum(param.nbytes for param in self._module_parameters)
        return (
            f"rank {self.process_group.rank()} of {self.process_group.size()}, {nbytes:,} bytes of gradients"
        )

    # ------------------------------------------------------------------ built by PyTorch's constructor

    def _ddp_init_helper(
        self,
        parameters: list[Tensor],
        expect_sparse_gradient: list[bool],
        param_to_name_mapping: dict[int, str],
        static_graph: bool,
    ) -> None:
        """Build our reducer; called by PyTorch's constructor, and when a copy or a pickle is made whole."""
        private.require("DistributedDataParallel of zero_optim")
        if getattr(self, "_use_python_reducer", False):
            raise ValueError(
                "torch._dynamo.config.optimize_ddp='python_reducer' compiles PyTorch's own reducer: set it "
                "to True or False with zero_optim.ddp"
            )
        options = reducer_options(self, static_graph=static_graph)
        names = [param_to_name_mapping[index].lstrip(".") for index in range(len(parameters))]
        sparse = [name for name, is_sparse in zip(names, expect_sparse_gradient, strict=True) if is_sparse]
        # PyTorch overlooks parameters of the outermost module among those to ignore.
        ignored = self.parameters_to_ignore
        pairs = [pair for pair in zip(names, parameters, strict=True) if pair[0] not in ignored]
        reducer = self._make_reducer(pairs, options, sparse)
        self.reducer: Any = TorchReducerAdapter(reducer)
        self.logger: Any = TorchLoggerAdapter(reducer)
        for hook, state in self.__dict__.get("_comm_hooks", ()):  # when a copy is made whole
            reducer.register_comm_hook(state, hook)
        self._passing_sync_batchnorm_handle(self.module)  # type: ignore[no-untyped-call]
        # A sharded optimizer asks for them in each step.
        self._frozen = FrozenParams(frozen_params(self.module))

    def _make_reducer(
        self, pairs: Sequence[tuple[str, Tensor]], options: ReducerOptions, sparse: Sequence[str]
    ) -> Reducer:
        ties = Ties(Engine(), weakly(self._wants), self.module)
        return Reducer(pairs, self.process_group, options, ties, sparse)

    def _wants(self, was_expected: bool) -> bool:
        if was_expected and not self.require_backward_grad_sync and self._join_config.enable:
            raise RuntimeError(NO_SYNC_IN_JOIN)
        return super()._wants(was_expected)

    def _own(self) -> Reducer:
        own: Reducer = self.reducer.own
        return own

    def _set_static_graph(self) -> None:
        reducer = getattr(self, "reducer", None)
        if reducer is not None and not self.static_graph and reducer.num_forwards:
            raise RuntimeError(
                "set_static_graph() should be called before training loop starts and after "
                f"DistributedDataParallel is constructed. It came after {reducer.num_forwards} "
                "forward passes: pass static_graph=True to the constructor"
            )
        super()._set_static_graph()  # type: ignore[no-untyped-call]
        # PyTorch's forward wraps the outputs of the first iteration unless it thinks that it has done so.
        self._static_graph_delay_allreduce_enqueued = True

    # ------------------------------------------------------------------ forward

    @eager
    def _post_forward(self, output: object) -> object:
        """Prepare for the backward pass; what PyTorch's does, without wrapping the outputs."""
        trains, syncs = torch.is_grad_enabled(), self.require_backward_grad_sync
        if self._check_sync_bufs_post_fwd():  # type: ignore[no-untyped-call]
            self._sync_buffers()  # type: ignore[no-untyped-call]
        self.require_forward_param_sync = trains and syncs
        if trains and not syncs and self._join_config.enable:
            refuse_no_sync(set(self._module_parameters))
        self._end_forward(output)
        return output

    @eager
    def _sync_module_buffers(self, authoritative_rank: int) -> None:
        """Broadcast the buffers as our work, so that errors name missing ranks."""
        with self.reducer.own.group.during("buffers").begin_work():
            super()._sync_module_buffers(authoritative_rank)  # type: ignore[no-untyped-call]

    # ------------------------------------------------------------------ hooks and refusals

    def register_comm_hook(self, state: object, hook: Hook) -> None:
        """Let a hook reduce the buckets instead of all-reduce; any hook of PyTorch's DDP runs here.

        All ranks register the same, once, before the first backward pass; communicates.

        Raises:
            RankMismatchError: on every rank, if hooks have other code, or states other options.
            RuntimeError: there is one already, or a backward pass is under way.
            TypeError: it is not ``hook(state, bucket)``.
            ValueError: its annotations take or return something else.
        """
        group = RankGroup.of(self.process_group, self._module_parameters).within(self._timeout)
        agree(group, describe_hook(hook, state), "the comm hook")
        with failing_together(group):
            self._own().register_comm_hook(state, hook)
        self._comm_hooks.append((hook, state))

    def _register_builtin_comm_hook(self, comm_hook_type: object) -> None:
        kinds = {
            dist.BuiltinCommHookType.ALLREDUCE: default_hooks.allreduce_hook,  # type: ignore[attr-defined]
            dist.BuiltinCommHookType.FP16_COMPRESS: default_hooks.fp16_compress_hook,  # type: ignore[attr-defined]
        }
        if comm_hook_type not in kinds:
            raise ValueError(f"expected one of {', '.join(map(str, kinds))}, got {comm_hook_type!r}")
        self.register_comm_hook(self.process_group, kinds[comm_hook_type])
        self._own().slot.rename(str(comm_hook_type))  # as PyTorch's statistics show it

    def _setup_in_backward_optimizers(self) -> None:
        if any(hasattr(param, "_in_backward_optimizers") for param in self._module_parameters):
            raise RuntimeError(
                "parameters that carry optimizers of their own (_apply_optimizer_in_backward) are not "
                "supported by zero_optim.ddp: use ZeroRedundancyOptimizer with zero_optim.hooks.zero_step, "
                "which steps any optimizer during the backward pass"
            )

    def join_hook(self, **kwargs: Any) -> JoinHook:  # noqa: ANN401 - PyTorch's
        """Take part in ``Join``, which calls it on every rank. First reads reports of earlier passes."""
        self.check_finished()
        hook: JoinHook = super().join_hook(**kwargs)  # type: ignore[no-untyped-call]
        return hook

    def _match_all_reduce_for_bwd_pass(self) -> None:
        self._own().shadow()

    def _match_unused_params_allreduce(self) -> None:
        """Do nothing: `Reducer.shadow` has told the others."""

    def get_ddp_logging_data(self) -> dict[str, int | str]:
        """Return a part of PyTorch's ``_get_ddp_logging_data``, without times; no communication."""
        figures: dict[str, int | str] = self.logger.figures()
        return figures

    _get_ddp_logging_data = get_ddp_logging_data

    # ------------------------------------------------------------------ process groups that end

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
        nothing: Any = Released("the wrapper is detached: call its rebind(), on all ranks of the new group")
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
            values = [*map(itemgetter(1), seen_params(self.module)), *seen_buffers(self.module)]
            take_values_of_first(group.during("agree"), values)
            parameters, sparse = self._build_params_for_reducer()  # type: ignore[no-untyped-call]
            names = self._build_debug_param_to_name_mapping(parameters)  # type: ignore[no-untyped-call]
            self._ddp_init_helper(parameters, sparse, names, self.static_graph)
        finally:
            if self._is_detached:  # as before
                unwatch(self)
        self.require_forward_param_sync = True
        if self.static_graph:
            self.reducer._set_static_graph()

    @property
    def _is_detached(self) -> bool:
        return isinstance(getattr(self, "reducer", None), Released)
