"""A ``torch.optim.Optimizer`` whose parameters have owners: its parts, and what can be asked about it.

`state.sharded` makes the parts.
"""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from zero_optim.comm.agreement import called_by_all, check_flags, failing_together
from zero_optim.comm.collectives import RankGroup
from zero_optim.comm.mesh import RankMesh
from zero_optim.comm.traffic import PHASES
from zero_optim.explain import Explanation, explain
from zero_optim.health.watchdog import watch
from zero_optim.plan.groups import describe_options, param_names, params_of
from zero_optim.plan.memory import kept_dtype
from zero_optim.plan.pieces import Pieces, owned_by_text
from zero_optim.plan.plan import describe_params
from zero_optim.shard.keeping import Keeping, RowKeeping
from zero_optim.shard.sharding import Sharding
from zero_optim.shard.unit_forms import UnitForms
from zero_optim.state.given import KEPT_WHOLE, ShardingOptions
from zero_optim.state.mirror import Mirror
from zero_optim.state.whole import Snapshot, nbytes_held
from zero_optim.step.owned import OwnedState


class OwningOptimizer(Optimizer):
    """An optimizer whose parameters are owned by the ranks of a group. The subclass builds it.

    Attributes:
        mesh: of the replicas that hold what this rank's group holds, where a wrapper has a mesh; else None,
            and in a copy. Checkpoints ask for it.
    """

    mesh: RankMesh | None = None
    _units: Mapping[Tensor, int] = MappingProxyType({})
    _unit_forms = UnitForms()
    _ranks: RankGroup
    _options: ShardingOptions
    _costs: dict[Tensor, float]
    _sharding: Sharding
    _owned: OwnedState
    _snapshot: Snapshot
    _mirror: Mirror
    _kept_whole: set[Tensor]

    # ------------------------------------------------------------------ its parts

    def __getstate__(self) -> dict[str, Any]:
        """Copy and pickle everything but the hooks, as ``torch.optim`` does; does not communicate."""
        self.wait_for_gathers()
        names = (
            "_ranks",
            "_options",
            "_costs",
            "_sharding",
            "_owned",
            "_snapshot",
            "_mirror",
            "_kept_whole",
        )
        return {**super().__getstate__(), **{name: self.__dict__[name] for name in names}}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Take over a copied or unpickled state; what it shows of it waits for the gathers of the copy."""
        super().__setstate__(state)
        self._owned.leaves.let_go()
        if self.state is self._owned.shown:
            self._show_state()
        if not self._ranks.is_let_go:
            watch(self, self._ranks, self._options.on_stall)

    @property
    def _group(self) -> RankGroup:
        """The ranks, for what communicates.

        Raises:
            RuntimeError: the optimizer is detached.
        """
        self.check_attached()
        return self._ranks

    @_group.setter
    def _group(self, group: RankGroup) -> None:
        self._ranks = group

    def check_attached(self) -> None:
        """Raise if the optimizer is detached; does not communicate.

        Raises:
            RuntimeError: it is; says what to do.
        """
        if self._ranks.is_let_go:
            raise RuntimeError("the optimizer is detached: call rebind(), on all ranks of the new group")

    def _show_state(self) -> None:
        self.state = self._owned.show(self._sharding.under_way.wait)  # type: ignore[assignment]

    def _follow_state(self) -> None:
        """Go on with what the user or the class put in the place of the state; does not communicate."""
        if self._owned.take_over_state(self.state):
            self._show_state()

    def wait_for_gathers(self) -> None:
        """Wait until every parameter has its new value on this rank; returns at once if no gather runs.

        On CUDA with NCCL the current stream waits, not the CPU.
        """
        self._sharding.under_way.wait()

    # ------------------------------------------------------------------ who owns what

    def _params(self) -> list[Tensor]:
        return params_of(self.param_groups)

    @property
    def ranks(self) -> RankGroup:
        """The ranks that share the state."""
        return self._group

    def owned_parameters(self) -> list[Tensor]:
        """List the parameters of which this rank owns all rows, or some; in order."""
        return [param for param in self._params() if self._sharding.piece_here(param) is not None]

    def owners(self) -> dict[Tensor, int]:
        """List for each parameter the group rank that keeps its state; equal on every rank.

        Of a parameter that is cut it is the rank that keeps the state of the first rows; see `pieces`.
        """
        return {param: self._sharding.first_owner(param) for param in self._params()}

    def pieces(self) -> dict[Tensor, Pieces]:
        """List for each parameter its pieces; equal on every rank.

        Each is (owner, start, stop): the group rank that keeps the state of rows ``[start, stop)`` of
        dimension 0. A parameter that is not cut has one.
        """
        return {param: self._sharding.pieces[param] for param in self._params()}

    def describe(self) -> list[str]:
        """Describe all that optimizers of one model in several replicas must have in common.

        That is parameters, options, and who owns what; does not communicate.
        """
        groups, options = self.param_groups, self._options.describe()
        pieces = zip(param_names(groups), self.pieces().values(), strict=True)
        owners = [f"parameter {name} {owned_by_text(each)}" for name, each in pieces]
        members = [
            f"buckets of {self.bucket_cap_nbytes} bytes",
            *self._owned.local.describe_specs(),
            *options,
        ]
        return [*describe_params(groups), *describe_options(groups), *members, *owners]

    def kept_dtype(self, param: Tensor) -> torch.dtype:
        """Tell the dtype in which the owners of a parameter keep it; equal on every rank.

        It is the parameter's, unless a fully sharded model computes in another one.
        """
        return kept_dtype(param)

    @property
    def keeping(self) -> Keeping | None:
        """Keeps what this rank owns in files; None if nothing does."""
        return self._unit_forms.files

    @property
    def row_keeping(self) -> RowKeeping | None:
        """Keeps the rows that this rank owns elsewhere than the parameters; None if nothing does."""
        return self._unit_forms.keeping

    def bucket_members(self) -> list[list[Tensor]]:
        """List the parameters of each bucket; equal on every rank."""
        return [list(bucket.params) for bucket in self._sharding.buckets]

    @property
    def num_buckets(self) -> int:
        """How many buckets there are; parameters that are added have buckets of their own."""
        return len(self._sharding.buckets)

    @property
    def bucket_cap_nbytes(self) -> int:
        """Capacity of a bucket in bytes; ``sys.maxsize`` for no limit."""
        return self._sharding.cap_nbytes

    @property
    def overlaps_with_ddp(self) -> bool:
        """Whether the step is only ever taken during the backward pass."""
        return self._options.overlap_with_ddp

    def state_nbytes(self) -> int:
        """Return the bytes of the optimizer state that this rank holds now, each storage counted once."""
        return nbytes_held(self.state)

    def mirror_nbytes(self) -> int:
        """Return the bytes of the tensors that go to the buddy after a step; 0 without mirrors."""
        return 0

    def metrics(self, *, reset: bool = True) -> dict[str, float]:
        """Tell what this rank communicated since the last call, for any logger. Does not communicate.

        The first call counts from the construction. A copy of the optimizer counts from zero.

        - ``exposed_seconds/PHASE``: how long communication held callers up: they waited, also for ranks that
          came late, or on the CPU packed, added up and handed out what is sent. What a thread does beside
          them is left out. On an accelerator these are waits of the CPU alone: with NCCL it does not wait,
          and the figure says nothing of the device. See Note [Exposed seconds] in `zero_optim.comm.traffic`.
        - ``sent_bytes/PHASE``: what this rank's network interface sends, see Note [Bytes sent] in
          `zero_optim.comm.traffic`.
        - ``collectives/PHASE``: how many were started.
        - ``steps``: how many were taken, to divide by.

        The phases:

        - ``gather``: owners send parameters.
        - ``reduce``: gradients go to their owners, or are averaged by `zero_optim.hooks.zero_step` itself.
          Other reductions are DDP's. Ours has ``metrics()`` too, where its wait for a comm hook is counted.
        - ``clip``: `clip_grad_norm_`.
        - ``agree``: what ranks tell each other at construction, for a closure or ``Join``, and what the
          scalers of sharded gradients tell each other.
        - ``state``: consolidated states, and state dicts that one rank deals out. Not checkpoints.
        - ``mirror``: what goes to the buddy, with ``mirror=True``.
        - ``total``: all of them.

        Args:
            reset: count from zero again; False leaves the counts alone, for a second reader.
        """
        return self._ranks.phase.traffic.figures(PHASES, "steps", reset=reset)

    @called_by_all
    def explain(self, *, quiet: bool = False) -> Explanation:
        """Print on rank 0 what each rank really holds: parameters, state, balance, buckets; all ranks call.

        Args:
            quiet: print nothing.

        Returns:
            The same as data, on every rank.

        Raises:
            TypeError: on every rank, if an argument is wrong on any.
        """
        with self._group.doing("explain()"):
            with failing_together(self._group):
                check_flags(quiet=quiet)
            explanation = self._explained()
        if self._group.rank == 0 and not quiet:
            print(explanation)  # noqa: T201 - what it is for
        return explanation

    def _explained(self) -> Explanation:
        local, groups, nbytes = self._owned.local, self.param_groups, self.state_nbytes()
        reasons = self._sharding.whole_because | dict.fromkeys(self._kept_whole, KEPT_WHOLE)
        mirrored = self.mirror_nbytes()
        return explain(self._group, self._sharding, local, groups, reasons, nbytes, mirrored)
