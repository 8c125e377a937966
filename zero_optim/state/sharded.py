"""A ``torch.optim.Optimizer`` whose parameters have owners: how it is built, given groups, and copied.

All its parts exist when its constructor returns. Subclasses add the state dicts and the step.
"""

import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from zero_optim.comm.agreement import failing_together, said_by_all
from zero_optim.comm.backends import held
from zero_optim.comm.collectives import RankGroup
from zero_optim.comm.mesh import RankMesh
from zero_optim.comm.traffic import PHASES
from zero_optim.comm.watchdog import learn_addresses, patient, watch
from zero_optim.explain import Explanation, explain
from zero_optim.plan.costs import cost_named
from zero_optim.plan.groups import ParamGroup, describe_options, param_names, params_of, short_names
from zero_optim.plan.memory import kept_dtype
from zero_optim.plan.pieces import Piece, Pieces, owned_by_text
from zero_optim.plan.plan import describe_params
from zero_optim.shard.claims import UnitsClaim, claim_of, first_claim
from zero_optim.shard.keeping import Keeping
from zero_optim.shard.lazy import LazyGather, check_reader
from zero_optim.shard.sharding import Sharding
from zero_optim.shard.units import UnitBucket, UnitForms
from zero_optim.state.given import (
    GroupReader,
    Params,
    ShardingOptions,
    copied_group,
    kept_whole_in,
    taken_cuts,
)
from zero_optim.state.mirror import Mirror
from zero_optim.state.whole import Snapshot, nbytes_held
from zero_optim.step.leaves import Leaves, WeightAverage
from zero_optim.step.local import LocalOptimizer, OptimizerView, why_not_cut
from zero_optim.step.owned import OwnedState
from zero_optim.step.portions import KeptState
from zero_optim.step.spec import OptimizerSpec

logger = logging.getLogger("zero_optim")


class ShardedOptimizer(Optimizer):
    """An optimizer whose parameters are owned by the ranks of a group; all ranks construct it.

    Args:
        params: as `ZeroRedundancyOptimizer` takes them.
        default: builds the optimizer of groups that name no class of their own.
        group: the ranks.
        options: the other arguments of the constructor.
        read_by: the model whose forward passes wait for gathers; None if steps wait. It is not kept: a copy
            of this object has no model.

    Raises:
        Exception: on every rank, see `ZeroRedundancyOptimizer`.

    Attributes:
        mesh: of the replicas that hold what this rank's group holds, where a wrapper has a mesh; else None,
            and in a copy. Checkpoints ask for it.
    """

    mesh: RankMesh | None = None
    _units: Mapping[Tensor, int] = MappingProxyType({})
    _unit_forms = UnitForms()

    def __init__(
        self,
        params: Params,
        default: OptimizerSpec,
        group: RankGroup,
        options: ShardingOptions,
        read_by: torch.nn.Module | None = None,
    ) -> None:
        """Plan, agree on the plan with the other ranks, and build."""
        params = held(params)
        group = patient(RankGroup.of(group.process_group, params), options.timeout)
        watch(self, group, options.on_stall)
        with group.doing(f"{type(self).__name__}()"):
            self._build(params, default, group, options, read_by)
        learn_addresses(group)

    def _build(
        self,
        params: Params,
        default: OptimizerSpec,
        group: RankGroup,
        options: ShardingOptions,
        read_by: torch.nn.Module | None,
    ) -> None:
        first = first_claim(params)
        together = nullcontext if first is None else first.failing_together
        with together():
            with failing_together(group):
                group.check_serves(params)
                options.check_flags()
                reader = GroupReader(params)
                groups = reader.param_groups
                claim = self._claim_on(params_of(groups), group, options)
                sharding = self._sharding_for(group, options)
                leaves = Leaves(options.master_dtype, self._units or ())
                average = WeightAverage(options.ema_decay, leaves)
                costs = [cost_named(each.pop("cost", options.cost)) for each in groups]
                may_cut = [taken_cuts(each, options.cuts) for each in groups]
                specs = [OptimizerSpec.taken_from(each) for each in groups]
                about = _about(default, specs, options, may_cut, read_by)
                check_reader(read_by, params_of(groups))
            every = params_of(groups)

            def bear_cuts() -> list[bool]:
                is_tried = not options.assume_separable
                reasons = why_not_cut(default, groups, specs, leaves.tried_dtype, is_tried=is_tried)
                allowed = [may for may, each in zip(may_cut, groups, strict=True) for _ in each["params"]]
                return [reason is None and may for reason, may in zip(reasons, allowed, strict=True)]

            plan = sharding.plan(groups, costs, 0, about, bear_cuts if any(may_cut) else None)
        if claim is not None:
            claim.agree(groups, about, plan)
        self._costs = dict(zip(every, plan.costs, strict=True))
        owned = sharding.owned(every, plan)
        with together():
            buckets = self._taken_over(claim, sharding.make_unit_buckets(every, plan), leaves, group)
            with failing_together(group):
                leaf_of = {param: leaves.add(param, piece) for param, piece in owned.items()}
                local = LocalOptimizer(default, groups, specs, leaf_of, options.assume_separable)
                if options.mirror:
                    local.check_dicts()
            state = self._owned_state(group, leaves, average, local, groups, owned)
            state.keep()
        # Now that no leaf holds the memory that parameters leave.
        sharding.add(every, plan, short_names(groups))
        told = None if claim is None else claim.passed_on(buckets, self._unit_forms, group, every)
        # Takes the attributes of the reader, also the hooks, as an optimizer does when it is unpickled.
        Optimizer.__setstate__(self, vars(reader))
        self._group = group
        self._options = options
        self._sharding = sharding
        self._owned = state
        self._snapshot, self._mirror = Snapshot(), Mirror()
        self._kept_whole = kept_whole_in(groups, may_cut)
        self.defaults = local.defaults
        self._show_state()
        self._begin_gathers(group, read_by)
        if told is not None:
            told(self)

    def _sharding_for(self, group: RankGroup, options: ShardingOptions) -> Sharding:
        return Sharding(
            group,
            options.parameters_as_bucket_view,
            options.bucket_cap_mb,
            own_options=options.own_options,
            units=self._units or None,
            forms=self._unit_forms,
        )

    def _begin_gathers(self, group: RankGroup, read_by: torch.nn.Module | None) -> None:
        if read_by is not None:
            LazyGather(read_by, self._sharding)
        if self._options.mirror and group.size > 1:
            self._mirror.take_lanes(group)
        elif self._options.mirror:
            logger.warning("mirror=True mirrors nothing in a group of one rank, which has no other")

    def _taken_over(
        self, claim: UnitsClaim | None, buckets: list[UnitBucket], leaves: Leaves, group: RankGroup
    ) -> list[UnitBucket]:
        """Fill the buckets of units that somebody else has kept so far; all ranks call."""
        if claim is not None and claim.is_open:
            if self.keeping is not None:
                with failing_together(group):
                    self.keeping.reserve_rows(bucket.nbytes_of_row for bucket in buckets)
            claim.fill(buckets)
            leaves.keep(buckets)
        return buckets

    def _owned_state(
        self,
        group: RankGroup,
        leaves: Leaves,
        average: WeightAverage,
        local: LocalOptimizer,
        groups: Sequence[ParamGroup],
        owned: Mapping[Tensor, Piece],
    ) -> OwnedState:
        """Put together what this rank owns, with files for it if it is kept in files; all ranks call."""
        kept = None if self.keeping is None else KeptState(self.keeping, leaves, average, local)
        state = OwnedState(group, leaves, average, local, owned, kept)
        if kept is not None:
            with failing_together(group):
                kept.reserve(groups, owned)
        return state

    def _claim_on(
        self, params: Sequence[Tensor], group: RankGroup, options: ShardingOptions
    ) -> UnitsClaim | None:
        """Find out whether the parameters are those of a fully sharded model; does not communicate.

        Raises:
            Exception: they are, and cannot be taken over, see `UnitsClaim.check`.
        """
        claim = claim_of(params)
        if claim is not None:
            options.check_units()
            claim.check(params, group)
            self._units = claim.units
            self._unit_forms = claim.forms.anew() if claim.is_open else claim.forms
        return claim

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

    # ------------------------------------------------------------------ groups

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group; all ranks call, with the same group. No parameter changes its owner.

        Raises:
            ValueError: on every rank, if the group is wrong on any rank. Nothing is added then.
            RankMismatchError: likewise, if the groups differ between ranks.
        """
        self.check_attached()
        before = len(self.param_groups)
        try:
            self._plan_and_add(copied_group(param_group), before)
        except Exception:
            del self.param_groups[before:]
            raise
        self._show_state()
        if not self._snapshot.untouched:  # before any step the whole state is known, also with the new group
            self._snapshot.drop()

    def _plan_and_add(self, group: ParamGroup, before: int) -> None:
        defaults, self.defaults = self.defaults, {}  # defaults of another class are not for this group
        try:
            with failing_together(self._group):
                self._follow_state()
                super().add_param_group(group)
                self._group.check_serves(group)
                cost = cost_named(group.pop("cost", self._options.cost))
                may_cut = taken_cuts(group, self._options.cuts)
                spec = OptimizerSpec.taken_from(group)
                about = [f"cuts of the group {may_cut}"]
                about += [f"optimizer {spec.describe()}"] if spec is not None else []
        finally:
            self.defaults = defaults

        def bear_cuts() -> list[bool]:
            dtypes = list(map(self._owned.leaves.tried_dtype, group["params"]))
            return [reason is None for reason in self._owned.local.why_not_cut(group, spec, dtypes)]

        asked = bear_cuts if may_cut else None
        plan = self._sharding.plan(self.param_groups, [cost], before, about, asked)
        self._owned.add_group(group, spec, self._sharding.owned(group["params"], plan))
        self._costs.update(zip(group["params"], plan.costs, strict=True))
        names = short_names(self.param_groups)[-len(group["params"]) :]
        self._sharding.add(group["params"], plan, names)
        self._kept_whole |= kept_whole_in([group], [may_cut])

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
        """Keeps what this rank owns elsewhere than in ordinary memory; None if nothing does."""
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

    def begin_averages_anew(self) -> None:
        """Begin the averages (``ema_decay``) at the present weights. Does not communicate.

        For whoever gives the weights other values after construction, as `ShardedDataParallel` does, whose
        ranks take those of the first. Once a step was taken, or a state was loaded, it does nothing.
        """
        self._owned.average.begin_anew()

    @property
    def overlaps_with_ddp(self) -> bool:
        """Whether the step is only ever taken during the backward pass."""
        return self._options.overlap_with_ddp

    @property
    def optim(self) -> Optimizer | OptimizerView:
        """The local optimizer of this rank, or with several classes a view of all local optimizers.

        PyTorch's class has it too. Its ``state`` and ``param_groups`` are those of what this rank owns, or of
        the master copies. Only read it. Does not communicate. The rows that it steps of a cut parameter have
        values until the next step; after that, ask again.
        """
        self._owned.leaves.follow()
        return self._owned.local.shown()

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
        - ``agree``: what ranks tell each other at construction, for a ``GradScaler``, a closure or ``Join``.
        - ``state``: consolidated states, and state dicts that one rank deals out. Not checkpoints.
        - ``mirror``: what goes to the buddy, with ``mirror=True``.
        - ``total``: all of them.

        Args:
            reset: count from zero again; False leaves the counts alone, for a second reader.
        """
        return self._ranks.phase.traffic.figures(PHASES, "steps", reset=reset)

    def explain(self, *, quiet: bool = False) -> Explanation:
        """Print on rank 0 what each rank really holds: parameters, state, balance, buckets; all ranks call.

        Args:
            quiet: print nothing.

        Returns:
            The same as data, on every rank.
        """
        local, groups, nbytes = self._owned.local, self.param_groups, self.state_nbytes()
        reasons = dict.fromkeys(self._kept_whole, "cuts=False")
        params = self._params()
        if len(reasons) < len(params):
            reasons = local.whole_because(groups, self._owned.leaves.tried_dtype) | reasons
            everywhere = said_by_all(self._group, [param not in reasons for param in params])
            for param, is_borne in zip(params, everywhere, strict=True):
                if not is_borne:
                    reasons.setdefault(param, "another rank, with another processor, found a difference")
        mirrored = self.mirror_nbytes()
        explanation = explain(self._group, self._sharding, local, groups, reasons, nbytes, mirrored)
        if self._group.rank == 0 and not quiet:
            print(explanation)  # noqa: T201 - what it is for
        return explanation

    # ------------------------------------------------------------------ the parameters' values

    def gather_parameters(self) -> None:
        """Give every parameter its owner's value, on every rank; all ranks call. Communicates like a step."""
        with failing_together(self._group):
            self._sharding.refresh(self.param_groups)
        self._sharding.gather_all()

    def gather_lazily(self, model: torch.nn.Module) -> LazyGather:
        """Let gathers run on after `step`: forward passes of ``model`` wait for the parameters they need.

        The constructor's ``gather_lazily=model`` does the same. All ranks call, before a step. Does not
        communicate. Reading parameters through this optimizer or through ``model.state_dict()`` also waits.
        Code that reads them in another way must call `wait_for_gathers` first: ``param.norm()``,
        ``copy.deepcopy(model)``, a ``forward`` that reads the weight of a module before it calls that
        module. Call this before ``torch.compile``, not after.

        Args:
            model: the model with the parameters, or a wrapper such as DDP.

        Returns:
            A handle; its ``remove()`` makes `step` wait again.
        """
        return LazyGather(model, self._sharding)

    def wait_for_gathers(self) -> None:
        """Wait until every parameter has its new value on this rank; returns at once if no gather runs.

        On CUDA with NCCL the current stream waits, not the CPU.
        """
        self._sharding.under_way.wait()

    @contextmanager
    def averaged_weights(self) -> Iterator[None]:
        """Put the averaged weights into the model for the time of a ``with``; all ranks enter and leave it.

        Needs ``ema_decay``. Communicates like a step, at the start and at the end. Inside, a step raises, and
        so does a load, or a save of model and optimizer together.
        """
        with failing_together(self._group):
            self._sharding.refresh(self.param_groups)
            self._owned.average.swap_in()
        self._sharding.gather_all()
        try:
            yield
        finally:
            self._owned.average.swap_out()
            self._sharding.gather_all()

    def check_weights(self) -> None:
        """Raise if the model holds averaged weights, or whole ones of units; does not communicate.

        Raises:
            RuntimeError: it does.
        """
        self._owned.average.check_out()
        self._sharding.check_unpinned()


def _about(
    default: OptimizerSpec,
    specs: Sequence[OptimizerSpec | None],
    options: ShardingOptions,
    may_cut: Sequence[bool],
    read_by: torch.nn.Module | None,
) -> list[str]:
    """Describe what the constructor was given beside the parameters and their options."""
    about = [f"optimizer {spec.describe()}" for spec in (default, *filter(None, specs))]
    about += [*options.describe(), f"cuts of groups {may_cut}"]
    return [*about, f"gather_lazily={'None' if read_by is None else 'a model'}"]
