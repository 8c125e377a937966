"""A ``torch.optim.Optimizer`` whose parameters have owners: how it is built, given groups, and gathered.

All its parts exist when its constructor returns. Subclasses add the state dicts and the step.
"""

import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from zero_optim.comm.agreement import called_by_all, failing_together
from zero_optim.comm.backends import held
from zero_optim.comm.collectives import RankGroup
from zero_optim.health.watchdog import learn_addresses, patient, watch
from zero_optim.plan.costs import cost_named
from zero_optim.plan.groups import ParamGroup, params_of, short_names
from zero_optim.plan.pieces import Piece, Pieces
from zero_optim.shard.claims import UnitsClaim, claim_of, first_claim, reusable_buckets
from zero_optim.shard.lazy import LazyGather, check_reader
from zero_optim.shard.sharding import Sharding
from zero_optim.shard.units import UnitBucket
from zero_optim.state.given import (
    GroupOptions,
    GroupReader,
    Params,
    ShardingOptions,
    copied_group,
    kept_whole_in,
    taken_cuts,
)
from zero_optim.state.mirror import Mirror
from zero_optim.state.torch_adapters import TorchNames
from zero_optim.state.whole import Snapshot
from zero_optim.step.averages import WeightAverage
from zero_optim.step.leaves import Leaves
from zero_optim.step.local import LocalOptimizer
from zero_optim.step.owned import OwnedState
from zero_optim.step.portions import KeptState
from zero_optim.step.spec import OptimizerSpec

logger = logging.getLogger("zero_optim")


class ShardedOptimizer(TorchNames):
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
    """

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
                leaves = Leaves(options.master_dtype, self._units or (), self._unit_forms.on_host)
                average = WeightAverage(options.ema_decay, leaves)
                asked = GroupOptions.taken_from(groups, options)
                about = _about(default, asked, options, read_by)
                check_reader(read_by, params_of(groups))
            is_tried = not options.assume_separable
            why_whole = partial(asked.why_whole, default, groups, leaves.cut_rows, is_tried=is_tried)
            plan = sharding.plan(groups, asked.costs, 0, about, why_whole if any(asked.may_cut) else None)
        if claim is not None:
            claim.agree(groups, about, plan)
        every = params_of(groups)
        self._costs = dict(zip(every, plan.costs, strict=True))
        owned = sharding.owned(every, plan)
        with together():
            buckets = self._filled(
                claim, sharding.make_unit_buckets(every, plan, reusable_buckets(claim)), leaves, group
            )
            with failing_together(group):
                leaf_of = {param: leaves.add(param, piece) for param, piece in owned.items()}
                local = LocalOptimizer(default, groups, asked.specs, leaf_of, options.assume_separable)
                if options.mirror:
                    local.check_dicts()
            local.agree_on_traits(group)
            state = self._owned_state(group, leaves, average, local, groups, owned)
            state.keep()
        # Now that no leaf holds the memory that parameters leave.
        sharding.add(every, plan, short_names(groups))
        told = None if claim is None else claim.passed_on(buckets, self._unit_forms, group, every)
        self._kept_whole = kept_whole_in(groups, asked.may_cut)
        self._take_all(reader, group, options, sharding, state)
        self._begin_gathers(group, read_by)
        if told is not None:
            told(self)

    def _take_all(
        self,
        reader: GroupReader,
        group: RankGroup,
        options: ShardingOptions,
        sharding: Sharding,
        state: OwnedState,
    ) -> None:
        """Begin with all that was built."""
        # Takes the attributes of the reader, also the hooks, as an optimizer does when it is unpickled.
        Optimizer.__setstate__(self, vars(reader))
        self._group = group
        self._options = options
        self._sharding = sharding
        self._owned = state
        self._snapshot, self._mirror = Snapshot(), Mirror()
        self.defaults = state.local.defaults
        self._show_state()

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

    def _filled(
        self, claim: UnitsClaim | None, buckets: list[UnitBucket], leaves: Leaves, group: RankGroup
    ) -> list[UnitBucket]:
        """Fill the buckets of units that somebody else has kept so far; all ranks call."""
        if claim is not None and claim.is_open:
            if self.row_keeping is not None:
                with failing_together(group):
                    self.row_keeping.reserve_rows(bucket.nbytes_of_row for bucket in buckets)
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

    # ------------------------------------------------------------------ groups

    @called_by_all
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

        def why_whole(pieces: Sequence[Pieces]) -> list[str | None]:
            cuts = list(map(self._owned.leaves.cut_rows, group["params"], pieces))
            return self._owned.local.why_not_cut(group, spec, cuts)

        asked = why_whole if may_cut else None
        plan = self._sharding.plan(self.param_groups, [cost], before, about, asked)
        self._owned.add_group(group, spec, self._sharding.owned(group["params"], plan))
        self._costs.update(zip(group["params"], plan.costs, strict=True))
        names = short_names(self.param_groups)[-len(group["params"]) :]
        self._sharding.add(group["params"], plan, names)
        self._kept_whole |= kept_whole_in([group], [may_cut])

    # ------------------------------------------------------------------ the parameters' values

    @called_by_all
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

        Raises:
            TypeError: ``model`` is no module.
            ValueError: it has none of the parameters.
        """
        check_reader(model, self._params())
        return LazyGather(model, self._sharding)

    def begin_averages_anew(self) -> None:
        """Begin the averages (``ema_decay``) at the present weights. Does not communicate.

        For whoever gives the weights other values after construction, as `ShardedDataParallel` does, whose
        ranks take those of the first. Once a step was taken, or a state was loaded, it does nothing.
        """
        self._owned.average.begin_anew()

    @called_by_all
    @contextmanager
    def averaged_weights(self) -> Iterator[None]:
        """Put the averaged weights into the model for the time of a ``with``; all ranks enter and leave it.

        Needs ``ema_decay``. Communicates like a step, at the start and at the end. Inside, a step raises, and
        so does a load, or a save of model and optimizer together.
        """
        with failing_together(self._group):
            self._sharding.refresh(self.param_groups)
            self._owned.average.check_swap_in()
        try:
            self._owned.average.swap_in()  # now that no rank refuses
            self._sharding.gather_all()
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
    asked: GroupOptions,
    options: ShardingOptions,
    read_by: torch.nn.Module | None,
) -> list[str]:
    """Describe what the constructor was given beside the parameters and their options."""
    about = [f"optimizer {spec.describe()}" for spec in (default, *filter(None, asked.specs))]
    about += [*options.describe(), f"cuts of groups {asked.may_cut}"]
    return [*about, f"gather_lazily={'None' if read_by is None else 'a model'}"]
