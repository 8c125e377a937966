"""`ZeroRedundancyOptimizer`: any ``torch.optim`` optimizer, its state sharded over ranks.

Note [Whole state]
    Before any step every rank can say what the whole state is: what the class's constructor makes,
    the same everywhere. Frameworks ask for a state dict then. After a step or a load each rank
    knows its own part; the whole is a snapshot that `consolidate_state_dict` brings to one rank,
    and it counts only until the next step, load or added group.
"""

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import deepcopy
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.algorithms.join import Join, Joinable, JoinHook
from torch.optim import Optimizer

from zero_optim.agreement import agree, failing_together
from zero_optim.ahead import Ahead
from zero_optim.amp import agree_on_infinity, tell_scaler, unscale
from zero_optim.clip import global_grad_norm
from zero_optim.collectives import RankGroup
from zero_optim.explain import Explanation, bucket_holdings, describe_traits, holdings
from zero_optim.join import ShardedJoinHook, lend_gradients
from zero_optim.lazy import LazyGather
from zero_optim.leaves import Leaves, WeightAverage
from zero_optim.local import LocalOptimizer, Recipe
from zero_optim.plan import (
    Cost,
    CostName,
    Group,
    cost_named,
    describe_options,
    param_names,
    params_of,
)
from zero_optim.sharding import Sharding
from zero_optim.share import Share
from zero_optim.state import (
    Snapshot,
    by_index,
    check_fits,
    check_source,
    check_targets,
    consolidate,
    deal_out,
    nbytes_held,
    own_part,
)

Params = Iterable[Tensor] | Iterable[dict[str, Any]] | Iterable[tuple[str, Tensor]]


class ZeroRedundancyOptimizer(Optimizer, Joinable):
    """Shard the state of an optimizer over the ranks of a process group (ZeRO stage 1).

    Use it where ``optimizer_class(params, **defaults)`` stood. Every rank holds all parameters, and
    all gradients before `step`, which is DDP's way; each parameter's state lives on one rank, its
    owner, which steps it and broadcasts the result. The parameters after each step are, bit for
    bit, those of the unsharded optimizer, for every class whose step treats parameters one by one.

    Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models",
    SC 2020. All ranks of the group must construct it, with the same arguments, and must call
    together: `step`, `add_param_group`, `consolidate_state_dict`, `load_state_dict`.

    Args:
        params: parameters, dicts of groups, or (name, parameter) pairs, as ``torch.optim`` takes
            them; the same on every rank. Any dtypes and shapes; dense.
        optimizer_class: the class to shard, or a callable that builds one from groups.
        process_group: ranks to shard over; None for the default group.
        parameters_as_bucket_view: True moves the parameters into flat tensors, so that gathers land
            in place; False leaves ``param.data`` alone and copies at each step.
        overlap_with_ddp: the step is taken during the backward pass, by a comm hook that `zero_optim.hooks`
            makes (``hook_with_zero_step``, ``zero_step``): the class is checked for that now, and `step`
            raises if no hook has run.
        bucket_cap_mb: capacity of a bucket in MiB, above 0. A step issues one broadcast for each bucket and
            owner; building needs one bucket of extra memory, and without views so does each gather.
        cost: what owning a parameter costs, so that ranks are given equal work: "numel" for steps
            that go element by element, "matmul" for those that orthogonalize matrices (Muon), or a
            function of the parameter. A group may name its own under the key "cost".
        master_dtype: step parameters of narrower floating-point dtypes through copies in this dtype,
            held by the owner alone: torch.float32 for bf16 and fp16 parameters.
        ema_decay: keep an exponential moving average of the weights, each rank of what it owns, for
            `averaged_weights`; the factor by which it keeps its past at a step, below 1.
        assume_separable: take the class without trying it. Otherwise it is run on small tensors, whole and
            in parts, for some 10 to 60 ms the first time, and refused if the results differ.
        **defaults: keyword arguments of ``optimizer_class``.

    A group may name its own ``optimizer_class``; its other options are then that class's arguments,
    and ``defaults`` do not apply to it: Muon for matrices and AdamW for the rest is one optimizer.

    Attributes:
        param_groups: all parameters with their options, the one truth for options.
        state: state of the parameters this rank owns, and of no others.
        defaults: as the class itself sets them.

    Raises:
        ValueError: on every rank, when arguments are wrong on any rank: no parameters, parameters
            that share memory, options the class refuses, a class whose step couples parameters.
        TypeError: likewise, for parameters or a class of the wrong kind.
        RankMismatchError: on every rank, when ranks were given different parameters or options.
        RuntimeError: torch.distributed is not initialised.
    """

    # What torch.amp.GradScaler asks for; it sets grad_scale and found_inf around a step. See zero_optim.amp.
    _step_supports_amp_scaling = True

    def __init__(  # noqa: PLR0913 - PyTorch's signature, and our options, which are keyword-only
        self,
        params: Params,
        optimizer_class: Callable[..., Optimizer],
        process_group: dist.ProcessGroup | None = None,
        parameters_as_bucket_view: bool = True,
        overlap_with_ddp: bool = False,
        *,
        bucket_cap_mb: float = 32.0,
        cost: CostName | Cost = "numel",
        master_dtype: torch.dtype | None = None,
        ema_decay: float | None = None,
        assume_separable: bool = False,
        **defaults: object,
    ) -> None:
        """Plan, agree on the plan with the other ranks, and build."""
        Joinable.__init__(self)
        self._group = RankGroup.of(process_group)
        self._share: Share | None = None
        self._ahead: Ahead | None = None
        self._overlaps = overlap_with_ddp
        self._snapshot = Snapshot()
        self._cost = cost
        default = Recipe(optimizer_class, defaults)
        with failing_together(self._group):
            self._sharding = Sharding(self._group, parameters_as_bucket_view, bucket_cap_mb)
            leaves = Leaves(master_dtype)
            average = WeightAverage(ema_decay, leaves)
            if isinstance(params, set | frozenset):
                raise TypeError("expected ordered parameters, got a set, whose order differs between ranks")
            # No defaults yet: the class fills in its own, so that groups read as they do without sharding.
            Optimizer.__init__(self, params, {})
            costs = [cost_named(group.pop("cost", cost)) for group in self.param_groups]
            recipes = [Recipe.taken_from(group) for group in self.param_groups]
        about = [f"optimizer {recipe.describe()}" for recipe in (default, *filter(None, recipes))]
        about.append(f"master_dtype={master_dtype}, ema_decay={ema_decay}")
        plan = self._sharding.plan(self.param_groups, costs, 0, about)
        owned = self._sharding.owned(self._params(), plan)
        with failing_together(self._group):
            leaf_of = {param: leaves.leaf(param) for param in owned}
            local = LocalOptimizer(default, self.param_groups, recipes, leaf_of, assume_separable)
        self._sharding.add(self._params(), plan)
        self._share = Share(self._group, leaves, average, local, owned)
        self.defaults = local.defaults
        self._show_state()
        if overlap_with_ddp:
            self.ahead()

    def __getstate__(self) -> dict[str, Any]:
        """Copy and pickle all but the hooks, as ``torch.optim`` does; does not communicate."""
        self.wait_for_gathers()
        parts = ("_group", "_sharding", "_share", "_snapshot", "_cost", "_join_config", "_overlaps")
        # What steps ahead has process groups of its own; a copy makes others when it is registered as a hook.
        return {**super().__getstate__(), **{name: self.__dict__[name] for name in parts}, "_ahead": None}

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401 - whatever the class has
        """Reach what the user's class adds, such as ``train()`` and ``eval()`` of schedule-free ones.

        All ranks call such a method; the parameters are gathered after it.
        """
        share = self.__dict__.get("_share")
        found = share.local.find(name) if share is not None and not name.startswith("_") else []
        if not found:
            raise AttributeError(f"'{type(self).__name__}' object has no attribute '{name}'")
        if not inspect.ismethod(found[0]):
            return found[0]
        return partial(self._run, self._own.local.call, self.param_groups, found)

    @property
    def _own(self) -> Share:
        assert self._share is not None  # None only while the constructor runs
        return self._share

    def _params(self) -> list[Tensor]:
        return params_of(self.param_groups)

    # ------------------------------------------------------------------ groups

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group; all ranks call, with the same group. No parameter changes its owner.

        Raises:
            ValueError: on every rank, and nothing is added, when the group is wrong on any.
            RankMismatchError: likewise, when ranks were given different groups.
        """
        if isinstance(param_group, dict):  # keys of ours are taken out of it, not out of the caller's
            param_group = dict(param_group)
        if self._share is None:  # torch's own constructor is handing over the groups one by one
            super().add_param_group(param_group)
            return
        before = len(self.param_groups)
        try:
            self._plan_and_add(param_group, before)
        except Exception:
            del self.param_groups[before:]
            raise
        self._show_state()
        if not self._snapshot.untouched:  # before any step the whole state is known, with the new group too
            self._snapshot.changed()

    def _plan_and_add(self, group: Group, before: int) -> None:
        defaults, self.defaults = self.defaults, {}  # those of another class are not for this group
        try:
            with failing_together(self._group):
                super().add_param_group(group)
                cost = cost_named(group.pop("cost", self._cost))
                recipe = Recipe.taken_from(group)
        finally:
            self.defaults = defaults
        about = [f"optimizer {recipe.describe()}"] if recipe is not None else []
        plan = self._sharding.plan(self.param_groups, [cost], before, about)
        self._own.add_group(group, recipe, self._sharding.owned(group["params"], plan))
        self._sharding.add(group["params"], plan)

    # ------------------------------------------------------------------ stepping

    def step(self, closure: Callable[[], float] | None = None, **kwargs: object) -> float | None:  # type: ignore[override]
        """Step what this rank owns, then bring every parameter up to date; all ranks call.

        Communicates: one broadcast for each bucket and owner. Every rank has its new parameters when
        the call returns (on CUDA, when the current stream gets there). A rank on which the class's
        own step raises takes part in that all the same, so that the others do not wait for it.

        Args:
            closure: evaluates the model and returns the loss, as in ``torch.optim``.
            **kwargs: handed on to the class's own ``step``.

        Returns:
            The loss that ``closure`` gave, None without one.
        """
        Join.notify_join_context(self)
        loss: float | None = None
        if closure is not None and not self._leaves_closure:
            with torch.enable_grad():  # the gradients are needed before the class's own step begins
                loss, closure = closure(), None
        if self._ahead is not None and self._finish_ahead(self._ahead, kwargs):
            return loss
        found_inf = self.__dict__.get("found_inf")
        if found_inf is not None and self._skips_together(found_inf):
            return loss
        if self._join_config.enable:
            self._lend(self._params(), joined=False)
        stepped: float | None = self._run(self._own.local.step, self.param_groups, closure, **kwargs)
        return loss if stepped is None else stepped

    @property
    def _leaves_closure(self) -> bool:
        """Whether a closure may be left to the class's own step."""
        return self._ahead is None and not self._join_config.enable and self._own.takes_closures

    def _finish_ahead(self, ahead: Ahead, kwargs: dict[str, Any]) -> bool:
        """Finish a step that was begun during the backward pass; False if none was."""
        if not ahead.has_begun:
            if self._overlaps:
                raise RuntimeError(
                    "overlap_with_ddp=True, but no step was taken during the backward pass: register the "
                    "hook, ddp.register_comm_hook(None, hook_with_zero_step(allreduce_hook, ddp, "
                    "optimizer)), and run backward() outside no_sync() before step()"
                )
            return False
        try:
            if "found_inf" in self.__dict__ or kwargs:
                what = ", ".join(kwargs) or "GradScaler, whose factor was not taken out of the gradients"
                for name in ("found_inf", "grad_scale"):  # the scaler does not if step() raises
                    self.__dict__.pop(name, None)
                raise RuntimeError(
                    f"the step was taken during the backward pass, too early for {what}: leave it out, or "
                    "leave out zero_step (overlap_with_ddp). bfloat16 needs no GradScaler"
                )
            ahead.check()
            self._step_rest(ahead, joined=False)
        finally:
            ahead.close()
        self._sharding.end_step()
        return True

    def _step_rest(self, ahead: Ahead, *, joined: bool) -> None:
        """Step what was not stepped during the backward pass, such as what DDP does not hold."""
        rest = ahead.rest(self._params())
        if rest:
            if self._join_config.enable:
                self._lend(rest, joined=joined)
            ahead.step(ahead.part(rest), [param.grad for param in rest])

    def _run(self, work: Callable[..., Any], *args: object, **kwargs: object) -> Any:  # noqa: ANN401
        """Let the local optimizer change this rank's parameters, then gather."""
        try:
            self.begin_step()
            result = self._own.run(work, *args, **kwargs)
        finally:
            self._sharding.gather(self.param_groups)
        return result

    def begin_step(self) -> None:
        """Get ready for a step: look at the parameters, and at what was changed from outside."""
        self._own.average.check_out()
        self._snapshot.changed()
        self._sharding.refresh(self.param_groups)
        self._own.take_over_state(self.state)

    def begin_ahead(self, lane: RankGroup, joined: bool) -> bool:
        """Get ready for a step during the backward pass; `Ahead` calls it on all ranks.

        Args:
            lane: nobody else communicates there.
            joined: this rank ran out of inputs: it is lent the options of the others.

        Returns:
            Whether some ranks may have joined.
        """
        self._opt_called = True  # for schedulers, which warn if it is step() that never was
        lends: bool = self._join_config.enable
        try:
            self.begin_step()
        finally:
            if lends:
                lend_gradients(lane, joined, [], [], self.param_groups)
        return lends

    def ahead(self) -> Ahead:
        """Give what steps some parameters during the backward pass; a hook of `zero_optim.hooks` calls it.

        All ranks call; the first call makes process groups.

        Raises:
            ValueError: on every rank, when a class cannot be stepped in parts.
        """
        if self._ahead is None:
            with failing_together(self._group):
                self._own.local.check_parts()
            self._ahead = Ahead(self, self._group, self._sharding, self._own, self._sharding.under_way)
        return self._ahead

    def gather_lazily(self, model: torch.nn.Module) -> LazyGather:
        """Leave gathers running after `step`: forward passes of ``model`` wait for what they need.

        Each rank calls, before a step. Does not communicate. What reads parameters through this optimizer or
        through ``model.state_dict()`` waits too. What reads them in another way (``param.norm()``, a
        copy of the weights) calls `wait_for_gathers` first.

        Args:
            model: holds the parameters; a wrapper such as DDP may be given too.

        Returns:
            Its ``remove()`` ends it.
        """
        return LazyGather(model, self._sharding)

    def wait_for_gathers(self) -> None:
        """Wait until every parameter has its new value on this rank; free if nothing is under way.

        To be called when ``backward()`` has raised and training goes on all the same: part of the
        step may have been taken.
        """
        if self._ahead is not None:
            self._ahead.wait_for_steps()
        self._sharding.under_way.wait()

    def _skips_together(self, found_inf: Tensor) -> bool:
        """Decide with the other ranks whether a scaled step is skipped; unscale if it is not."""
        if agree_on_infinity(self._group, found_inf):
            if not found_inf.item():
                tell_scaler(self)
            return True
        scale = self.__dict__.get("grad_scale")
        if scale is not None:
            unscale(self._params(), scale)
        return False

    def clip_grad_norm_(
        self,
        max_norm: float,
        norm_type: float = 2.0,
        error_if_nonfinite: bool = False,
        foreach: bool | None = None,
    ) -> Tensor:
        """Scale all gradients down so that their global norm is at most ``max_norm``; all ranks call.

        ``torch.nn.utils.clip_grad_norm_`` with the owners' gradients: the norm is the same on every
        rank. One collective of 16 bytes a parameter; the norms are computed once, not on every rank.

        Args:
            max_norm: the norm wanted at most.
            norm_type: order of the norm, ``inf`` included.
            error_if_nonfinite: raise, on every rank, if the norm is not finite.
            foreach: as in ``torch.nn.utils.clip_grad_norm_``.

        Returns:
            The norm before clipping, 0-d.

        Raises:
            RuntimeError: the norm is not finite and ``error_if_nonfinite``; nothing is scaled then.
        """
        if self._ahead is not None and self._ahead.has_begun:
            raise RuntimeError(
                "the step was taken during the backward pass, too early to clip: leave out "
                "clip_grad_norm_(), or zero_step (overlap_with_ddp)"
            )
        params = self._params()
        owners = [self._sharding.owners[param] for param in params]
        norm = global_grad_norm(self._group, params, owners, float(norm_type), foreach)
        if error_if_nonfinite and not bool(norm.isfinite()):
            raise RuntimeError(
                f"the norm of order {norm_type} of all gradients is {norm.item()}: they cannot be clipped. "
                "Leave out error_if_nonfinite to scale them all the same"
            )
        torch.nn.utils.clip_grads_with_norm_(params, max_norm, norm, foreach)
        return norm

    @contextmanager
    def averaged_weights(self) -> Iterator[None]:
        """Hold the averaged weights in the model for the time of a ``with``; all ranks enter and leave.

        Needs ``ema_decay``. Communicates like a step, on entering and on leaving. Stepping inside
        raises.
        """
        with failing_together(self._group):
            self._sharding.refresh(self.param_groups)
            self._own.average.swap_in()
        self._sharding.gather_all()
        try:
            yield
        finally:
            self._own.average.swap_out()
            self._sharding.gather_all()

    # ------------------------------------------------------------------ state

    def _show_state(self) -> None:
        self.state = self._own.shown_state()  # type: ignore[assignment]

    def consolidate_state_dict(self, to: int | Sequence[int] | None = 0) -> None:
        """Bring the whole optimizer state to some ranks, for `state_dict` there; all ranks call.

        Owners send straight to the targets; other ranks receive nothing. The state received is a copy
        in CPU memory that later steps do not change. What other ranks hold already stays valid.

        Args:
            to: group rank that receives, or several, or None for all.

        Raises:
            ValueError: on every rank, if ``to`` names what is no rank of the group.
            RankMismatchError: ranks named different targets.
            TypeError: state cannot be sent without running code of its own, or the class keeps some
                outside its ``state``.
        """
        self._own.local.check_dicts()
        agree(self._group, [f"to={to!r}"], "the target of consolidate_state_dict")
        targets = check_targets(to, self._group.size)
        whole = consolidate(self._group, targets, self.owned_state(), self._params())
        if whole is not None:
            self._snapshot.hold(whole)

    def owned_state(self) -> dict[Any, Any]:
        """Give this rank's part of the state, by parameter, and global entries; does not communicate."""
        # Whoever looked at opt.state[p] has left an empty entry there, also for what others own.
        others = set(self._params()).difference(self.owned_parameters())
        return {key: value for key, value in self.state.items() if key not in others}

    def state_dict(self) -> dict[str, Any]:
        """Give the whole state in the format of ``torch.optim``; does not communicate.

        Before any step it answers on every rank; after one, on the ranks to which
        `consolidate_state_dict` brought the state, until the next step. Options are those of the
        moment. Loads into the plain optimizer and into this one at any world size. Two calls share
        tensors, which nothing here ever writes to.

        Raises:
            NotConsolidatedError: the state is not on this rank, or a step has been made since.
        """
        params = self._params()
        if self._snapshot.untouched:
            whole = by_index(self._own.local.initial_state(self.param_groups), params)
        else:
            whole = self._snapshot.get(self._group.rank)
        held = self.state
        # torch's own method packs the indices and runs the hooks; for the call it sees the whole.
        self.state = {params[key] if isinstance(key, int) else key: value for key, value in whole.items()}  # type: ignore[assignment]
        try:
            return super().state_dict()
        finally:
            self.state = held

    def load_state_dict(self, state_dict: dict[str, Any] | None, src: int | None = None) -> None:
        """Take over a whole state; all ranks call.

        Takes dicts of ``torch.optim``, of PyTorch's ``ZeroRedundancyOptimizer`` and of this class.
        Each rank copies the part it owns; the caller's dict and its tensors are left as they are.

        Args:
            state_dict: the same dict on every rank; with ``src`` on that rank, and None on the others.
            src: the group rank that alone has the dict, for instance has read it from a file. It sends
                each rank what that one owns; nobody else ever holds the whole.

        Raises:
            StateMismatchError: on every rank, naming each parameter whose state does not fit.
            RankMismatchError: ranks were given dicts with different options, or different ``src``.
            ValueError: a rank gives a dict that ``src`` has to give, or none where it has to.
            Exception: on every rank, what the class itself raises on any. Nothing has been changed
                after any of these.
        """
        agree(self._group, [f"src={src!r}"], "the source of load_state_dict")
        with failing_together(self._group):
            self._own.local.check_dicts()
            check_source(state_dict, src, self._group)
            if state_dict is not None:
                state_dict = self._checked(state_dict)
        if src is None:
            assert state_dict is not None  # check_source
            saved = state_dict["param_groups"]
            part = own_part(state_dict, self._params(), self.owned_parameters())
        else:
            owners = [self._sharding.owners[param] for param in self._params()]
            part, saved = deal_out(self._group, src, state_dict, self._params(), owners)
        groups = [
            _with_options(group, options) for group, options in zip(self.param_groups, saved, strict=True)
        ]
        agree(self._group, describe_options(groups), "the options of the state dict")
        self._take_over(part, groups, exact=False)
        for done_hook in self._optimizer_load_state_dict_post_hooks.values():
            done_hook(self)

    def _checked(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        """Run the hooks that may change a state dict before it is loaded, then see whether it fits."""
        state_dict = dict(state_dict)
        for load_hook in self._optimizer_load_state_dict_pre_hooks.values():
            changed = load_hook(self, state_dict)
            state_dict = state_dict if changed is None else changed
        check_fits(state_dict, self.param_groups, param_names(self.param_groups), self._own.local.shaped_keys)
        return state_dict

    def load_owned_state(self, state: Mapping[Any, Any], options: Sequence[Mapping[str, Any]]) -> None:
        """Take over this rank's part of a state, as `owned_state` gave it; all ranks call.

        Unlike `load_state_dict`, which casts state to the parameters' dtype as ``torch.optim`` does,
        every tensor keeps its dtype.

        Args:
            state: parameter -> entries for what this rank owns, and global entries. The tensors become
                the optimizer's own.
            options: for each group its options, the same on every rank.

        Raises:
            Exception: on every rank, what the class itself raises on any; nothing has been changed then.
        """
        self._own.local.check_dicts()
        groups = [
            _with_options(group, saved) for group, saved in zip(self.param_groups, options, strict=True)
        ]
        self._take_over(state, groups, exact=True)

    def _take_over(self, part: Mapping[Any, Any], groups: list[Group], *, exact: bool) -> None:
        self.wait_for_gathers()  # they read the parameters, which masters are written to
        self._own.load(part, groups, exact=exact)
        self.param_groups = groups
        self._show_state()
        self._snapshot.changed()

    def gather_parameters(self) -> None:
        """Bring every parameter to what its owner holds; all ranks call. Communicates like a step."""
        with failing_together(self._group):
            self._sharding.refresh(self.param_groups)
        self._sharding.gather_all()

    def owned_parameters(self) -> list[Tensor]:
        """List the parameters whose state this rank keeps, in order."""
        return [param for param in self._params() if self._sharding.owners[param] == self._group.rank]

    def owners(self) -> dict[Tensor, int]:
        """Tell for each parameter the group rank that keeps its state, the same on every rank."""
        return {param: self._sharding.owners[param] for param in self._params()}

    @property
    def ranks(self) -> RankGroup:
        """The ranks that share the state."""
        return self._group

    def shaped_entries(self, param: Tensor, group: int) -> frozenset[str]:
        """Name the state entries that must have the shape of a parameter of the group with this index."""
        return self._own.local.shaped_keys(group).of(param.dim())

    def state_nbytes(self) -> int:
        """Measure the optimizer state held on this rank now, in bytes of distinct storage."""
        return nbytes_held(self.state)

    def explain(self, *, quiet: bool = False) -> Explanation:
        """Print, on rank 0, what is really held: parameters, state, balance, buckets; all ranks call.

        Args:
            quiet: print nothing.

        Returns:
            The same as data, on every rank.
        """
        own = self.owned_parameters()
        cost = self._sharding.loads[self._group.rank]
        ranks = holdings(self._group, own, self.state_nbytes(), cost)
        buckets = bucket_holdings(self._sharding.buckets, self._sharding.active())
        explanation = Explanation(ranks, buckets, tuple(map(describe_traits, self._own.local.traits())))
        if self._group.rank == 0 and not quiet:
            print(explanation)  # noqa: T201 - what it is for
        return explanation

    # ------------------------------------------------------------------ uneven inputs

    def join_hook(self, **kwargs: object) -> JoinHook:
        """Give ``torch.distributed.algorithms.Join`` what shadows this optimizer's steps.

        Works beside DDP: ``with Join([ddp_model, optimizer]):``. Ranks still active must step once
        in each iteration. Takes no options of its own.
        """
        return ShardedJoinHook(self)

    @property
    def join_device(self) -> torch.device:
        """Where ``Join`` places its own small tensors."""
        return self._group.device

    @property
    def join_process_group(self) -> dist.ProcessGroup:
        """The group over which ``Join`` counts active ranks."""
        return self._group.process_group

    def shadow_step(self) -> None:
        """Take part in a step of the active ranks, after this one ran out of inputs."""
        if (
            self._ahead is not None and self._ahead.has_begun
        ):  # by the comm hook, which runs on joined ranks too
            try:
                self._step_rest(self._ahead, joined=True)
            finally:
                self._ahead.close()
            self._sharding.end_step()
            return
        self._lend(self._params(), joined=True)
        self._run(self._own.local.step, self.param_groups, None)

    def _lend(self, params: Sequence[Tensor], *, joined: bool) -> None:
        owners = [self._sharding.owners[param] for param in params]
        lend_gradients(self._group, joined, params, owners, self.param_groups)


def _with_options(group: Mapping[str, Any], saved: Mapping[str, Any]) -> Group:
    """Combine a group's own parameters with the options (and names, if any) of a saved group."""
    names = {key: group[key] for key in ("param_names",) if key in group}
    options = {key: deepcopy(value) for key, value in saved.items() if key != "params"}
    return {"params": group["params"], **names, **options}
