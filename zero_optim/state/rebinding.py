"""An optimizer that outlives its process group: it lets go of one, and is bound to another.

Note [Detached]
    `detach` does not communicate, so that it works after a failure too. What is left is what this rank owns:
    parameters, their state, the options. The ranks are known by number only; what communicates raises.

Note [Rebinding is building anew]
    `rebind` goes the way of the constructor: plan for the new ranks, agree, build the classes over new
    leaves, load what this rank is to own, as from a checkpoint. So it gives the bits of a run that was saved,
    and loaded by so many ranks. The old state stays until everything has been checked: if it raises before,
    the optimizer is detached as it was.
"""

from collections.abc import Sequence
from dataclasses import replace

import torch
import torch.distributed as dist
from torch import Tensor

from zero_optim.comm.agreement import agree, check_flags, failing_together, ranks_of
from zero_optim.comm.collectives import RankGroup
from zero_optim.health.watchdog import learn_addresses, unwatch, watch
from zero_optim.plan.description import describe
from zero_optim.plan.groups import ParamGroup, param_names, params_of, short_names
from zero_optim.plan.pieces import Pieces
from zero_optim.plan.plan import Plan, describe_params
from zero_optim.probe.rows import CutRows
from zero_optim.shard.sharding import Sharding
from zero_optim.shard.storage import Bucket, ParamBucket
from zero_optim.state.given import KEPT_WHOLE
from zero_optim.state.holding import Found, HoldingOptimizer
from zero_optim.state.moving import Forms, Moved, move_state, refuse_lost
from zero_optim.state.whole import Snapshot, check_targets
from zero_optim.step.averages import EMA, WeightAverage
from zero_optim.step.leaves import MASTER, Leaves
from zero_optim.step.owned import OwnedState
from zero_optim.step.partial import PartialGradient


class RebindableOptimizer(HoldingOptimizer):
    """An optimizer that can go from one process group to another. The subclass adds the step."""

    def detach(self, *, wait: bool = True, staying: Sequence[int] | None = None) -> None:
        """Let go of the process group, and of all that was made for it; does not communicate.

        To be called before ``destroy_process_group()``, also when another rank has failed. Every rank calls
        for itself, between steps. Afterwards `state`, `param_groups` and what else this rank owns can be read
        and saved; whatever needs the group raises until `rebind`. Gradients stay, unless they are sharded. A
        second call does nothing. The wrapper's `zero_optim.ddp.DistributedDataParallel.detach` does the same
        for it; comm hooks go with it.

        Args:
            wait: wait for gathers under way. If a rank died before it sent its part, other ranks' parameters
                may have old values here; `rebind` brings the right ones. False waits for nothing: where a
                rank is stopped, not dead, the wait lasts until the timeout of the group.
            staying: the group ranks that will go on, where the next group has fewer. The others first hand
                their state over to them. Then all ranks call, with the same ranks, and it communicates. None
                hands nothing over.

        Raises:
            ValueError: on every rank: ``staying`` names no ranks of the group.
            Exception: likewise, if the state cannot be handed over. The optimizer is attached as before.
        """
        if self._ranks.is_let_go:
            return
        if self._units:
            raise RuntimeError(
                "the optimizer of a fully sharded model cannot be detached: each rank holds a part of the "
                "parameters. Save a checkpoint, build model and optimizer anew, and load it"
            )
        self._end_overlap(waits=wait)
        if staying is not None:
            self._hand_over(staying)
        else:
            self._let_go(waits=wait)

    def _end_overlap(self, *, waits: bool) -> None:
        """Let go of what steps in the backward pass, if anything does; says so if that was half way."""

    def _let_go(self, *, waits: bool) -> None:
        self._mirror.let_go(waits=waits)
        self._sharding.let_go(waits=waits)
        self._owned.let_go()
        works = self._ranks.works
        works.log.cut_if_failed(works.ranks)  # see Note [Groups that end] in `zero_optim.comm.works`
        self._ranks, self.mesh = self._ranks.let_go(), None
        unwatch(self)
        params = self._params()
        if any(isinstance(param.grad, PartialGradient) for param in params):
            for param in params:
                param.grad = None  # whole ones too: the next group may have other owners

    def _hand_over(self, staying: Sequence[int]) -> None:
        """Give the state to some ranks of the group, then let go of it; all ranks call."""
        group = self._group
        with group.doing("detach()"):
            agree(group, [f"staying={describe(staying)}"], "the ranks that go on")
            self.wait_for_gathers()
            with failing_together(group):
                targets = check_targets(staying, group.size)
                self.check_weights()
            self._mirror.drop()  # what they tell of is with other ranks now
            self._go_over(group, targets, keep_state=True)
        self._let_go(waits=True)
        rank = targets.index(group.rank) if group.rank in targets else -1
        self._ranks = replace(self._ranks, rank=rank, size=len(targets))
        if rank < 0:
            self._snapshot = Snapshot()
            self._snapshot.drop()

    def rebind(self, process_group: dist.ProcessGroup | None = None, *, keep_state: bool = True) -> int:
        """Go on in another process group, with as many ranks as it has; all its ranks call, detached.

        Owners are planned anew, and state goes from the ranks that hold it to those that own it now, in
        pieces of bounded size. Then parameters are gathered. Ranks may come new to the group: they build
        their optimizer with the same arguments as the others did, in any group of their own, and detach it;
        they are given the others' options. A lazily gathered model stays lazily gathered. Comm hooks have to
        be registered anew.

        With ``mirror=True`` ranks may have been lost, and ranks may hold state of different moments: then all
        go back to the end of the last step of which mirrors are whole among them. Parameters, state, averages
        and options are those of that moment; options that a scheduler changes have to be set again.

        Args:
            process_group: the new ranks; None for the default group.
            keep_state: False begins with new state, and with the parameters as they are. When state was lost,
                `zero_optim.checkpoint.rebind` does that and loads.

        Returns:
            How many calls of `step` the state has taken, on every rank: `num_steps`. After going back this is
            less than before, by one as a rule: from there the caller's data and schedulers go on. Calls are
            counted from the construction, also where a state was loaded.

        Raises:
            LostStateError: on every rank: nobody in the group holds the state of some parameters, which are
                named, or a step broke off half way. With mirrors: a rank and its buddy are lost, or no step
                was taken yet.
            RankMismatchError: likewise: ranks hold state of different moments, or have other parameters or
                arguments.
            RuntimeError: likewise: an optimizer is not detached on some rank.
            ValueError: likewise: options were changed to some with which the class does not bear cuts.
            Exception: likewise, what the class itself raises on any. After each of these errors the optimizer
                is detached as it was before.
        """
        self._rebind(process_group, keep_state=keep_state, may_lose=False)
        return self.num_steps

    def rebind_held(self, process_group: dist.ProcessGroup | None = None) -> list[Tensor]:
        """Go on in another process group as by `rebind`, with the state that its ranks hold; all call.

        Returns:
            The parameters of which some state is lost, the same on every rank. They have no state now, and
            perhaps wrong values: whoever calls brings both, as `zero_optim.checkpoint.rebind` does.

        Raises:
            Exception: as `rebind`, but for lost state.
        """
        return self._rebind(process_group, keep_state=True, may_lose=True)

    def _rebind(
        self, process_group: dist.ProcessGroup | None, *, keep_state: bool, may_lose: bool
    ) -> list[Tensor]:
        group = self._new_group(process_group)
        watch(self, group, self._options.on_stall)
        try:
            with group.doing("rebind()"):
                with failing_together(group):
                    check_flags(keep_state=keep_state)
                    self._check_detached()
                    group.check_serves(self._params())
                    self.check_weights()
                lost = self._go_over(group, range(group.size), keep_state=keep_state, may_lose=may_lose)
                self._bound()
        finally:
            if self._ranks.is_let_go:  # as before
                unwatch(self)
        learn_addresses(group)
        return lost

    def _keep_unit_rows(self, former: list[ParamBucket]) -> None:
        """Have the buckets of units keep this rank's rows, and free them, one former bucket after the other.

        A former bucket may be one flat tensor, which is released with the last parameter in it: until then
        the pages of those that have left it are given back.
        """
        new = self._sharding.unit_buckets()
        bucket_of = {param: bucket for bucket in new for param in bucket.params}
        while new and former:
            left = former.pop(0)
            for index, param in enumerate(left.params):
                if param in bucket_of:
                    bucket_of[param].take_in({param: param})
                    bucket_of[param].let_go({param})
                    if isinstance(left, Bucket):
                        left.give_back(index)
        self._owned.leaves.keep(new)

    def _check_detached(self) -> None:
        if not self._ranks.is_let_go:
            raise RuntimeError("expected a detached optimizer: call detach() before the group ends")

    def _bound(self) -> None:
        """Make what goes with a new group; all ranks call."""
        self._sharding.gather_all()
        self._mirror.drop()
        if self._is_mirrored:
            self._mirror.take_lanes(self._group)
        if self._snapshot.age > 0:
            self.mirror_state()

    def _go_over(
        self, group: RankGroup, owners: Sequence[int], *, keep_state: bool, may_lose: bool = False
    ) -> list[Tensor]:
        """Plan anew for some ranks of a group, and bring them the state; all ranks of the group call.

        Args:
            group: a new one, or the one before.
            owners: the ranks that are to own the state, in ascending order.
            keep_state: as in `rebind`.
            may_lose: go on where nobody holds some state.

        Returns:
            The parameters whose state is lost.
        """
        params, local = self._params(), self._owned.local
        with failing_together(group):
            if keep_state:
                local.check_dicts()
                self._follow_state()
                self._owned.leaves.follow_values(self._owned.leaves.masters)
            about = [*self._options.describe(), *local.describe_specs(), f"cuts of groups {self._may_cut()}"]
            items = [f"keep_state={keep_state}", *describe_params(self.param_groups), *about]
        agree(group, items, "the optimizers to be bound to one group")
        found = self._find(group, may_lose=may_lose) if keep_state else None
        lost = [] if found is None else [index for index, held in enumerate(found.pieces) if not held]
        names = param_names(self.param_groups)
        refuse_lost([] if may_lose else [names[index] for index in lost])
        groups, everywhere = self._told(group, found)
        sharding, plan = self._planned(group, len(owners), groups, about)
        moved = Moved({}, {})
        if found is not None:
            to = [tuple(piece._replace(owner=owners[piece.owner]) for piece in each) for each in plan.pieces]
            moved = move_state(group, found.pieces, to, self._forms(), found.hosts, found.held)
        if len(owners) < group.size:
            sharding.become(owners.index(group.rank) if group.rank in owners else -1)
        owned = self._built(group, sharding, plan, groups)
        if found is not None:
            state = {params[index]: entries for index, entries in moved.state.items()}
            owned.load({**state, **everywhere}, groups, exact=True)
        # Everything is checked now. Only a rank that dies can stop it from here on.
        former = self._sharding.buckets
        self._ranks, self._sharding, self._owned, self.param_groups = group, sharding, owned, groups
        self._settle(plan, moved, found, former)
        return [params[index] for index in lost]

    def _settle(self, plan: Plan, moved: Moved, found: Found | None, former: list[ParamBucket]) -> None:
        """Move into the new buckets, with the rows that came.

        Args:
            plan: the new one.
            moved: what came.
            found: the state, None if it is new.
            former: the buckets of before, which are taken out of the list.
        """
        params, owned = self._params(), self._owned
        self.defaults = owned.local.defaults
        with torch.no_grad():
            for index, value in moved.values.items():
                owned.leaves.rows(params[index]).copy_(value)
        self._sharding.add(params, plan, short_names(self.param_groups))
        self._keep_unit_rows(former)
        owned.keep()
        self._show_state()
        if found is None:
            self._snapshot, self.num_steps = Snapshot(), 0
            return
        self.num_steps = found.steps
        if self._snapshot.age != found.age or found.copied is not None:
            self._snapshot = Snapshot(found.age)

    def give_up_state(self) -> None:
        """Detach, and take what this rank holds for no state any more, since it is not whole."""
        self.detach()
        self._snapshot.is_torn = True

    # ------------------------------------------------------------------ before

    def _new_group(self, process_group: dist.ProcessGroup | None) -> RankGroup:
        group = ranks_of(process_group)
        return replace(RankGroup.of(group.process_group, self._params()), phase=self._ranks.phase)

    def _planned(
        self, group: RankGroup, num_owners: int, groups: Sequence[ParamGroup], about: Sequence[str]
    ) -> tuple[Sharding, Plan]:
        """Plan for the new owners, as the constructor does; all ranks call."""
        options, gathers = self._options, self._sharding.gathers
        as_views, cap_mb = options.parameters_as_bucket_view, options.bucket_cap_mb
        own = options.own_options
        units = self._units or None, self._unit_forms
        sharding = Sharding(group, as_views, cap_mb, num_owners, gathers, own, *units)
        costs = [self._costs.__getitem__ for _ in groups]

        def why_whole(pieces: Sequence[Pieces]) -> list[str | None]:
            owned, pieces_of = self._owned, iter(pieces)
            cuts = [[owned.leaves.cut_rows(p, next(pieces_of)) for p in group["params"]] for group in groups]
            reasons = zip(params_of(groups), owned.local.why_not_cut_so(cuts), strict=True)
            return [KEPT_WHOLE if param in self._kept_whole else reason for param, reason in reasons]

        return sharding, sharding.plan(groups, costs, 0, about, why_whole if any(self._may_cut()) else None)

    def _may_cut(self) -> list[bool]:
        """Tell for each group whether its parameters may be cut, as the user wants it."""
        return [not self._kept_whole.issuperset(group["params"]) for group in self.param_groups]

    def _forms(self) -> Forms:
        shaped = [
            self.shaped_entries(param, number) | {MASTER, EMA}
            for number, group in enumerate(self.param_groups)
            for param in group["params"]
        ]
        return Forms([tuple(param.shape) for param in self._params()], shaped)

    # ------------------------------------------------------------------ after

    def _built(
        self,
        group: RankGroup,
        sharding: Sharding,
        plan: Plan,
        groups: list[ParamGroup],
    ) -> OwnedState:
        """Build what steps the new owner's parameters; all ranks call.

        Args:
            group: the ranks.
            sharding: the new one, to which the plan is not added yet.
            plan: the new one.
            groups: with their options.
        """
        params = self._params()
        owned = sharding.owned(params, plan)
        cut = {param: pieces for param, pieces in zip(params, plan.pieces, strict=True) if len(pieces) > 1}

        def cuts_of(of: ParamGroup) -> list[CutRows]:
            return [leaves.cut_rows(param, cut[param]) for param in of["params"] if param in cut]

        with failing_together(group):
            leaves = Leaves(self._options.master_dtype, self._units or (), self._unit_forms.on_host)
            average = WeightAverage(self._options.ema_decay, leaves)
            leaf_of = {param: leaves.add(param, piece) for param, piece in owned.items()}
            local = self._owned.local.again(groups, leaf_of)
            local.check_cuts(groups, cuts_of)  # options may have changed, and other parameters are cut
        local.agree_on_traits(group)
        return self._owned_state(group, leaves, average, local, groups, owned)
