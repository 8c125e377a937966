"""The parts of an optimizer: owners, this rank's state, and the user's view of it.

Note [Whole state]
    Before any step every rank knows the whole state, as the class's constructor makes it; frameworks ask
    then. After a step or a load each rank knows its own part, and `consolidate` brings a snapshot of the
    whole to some ranks, valid until the next step, load or added group.
"""

from collections.abc import Callable, Iterable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from torch import Tensor

from zero_optim.comm.collectives import RankGroup
from zero_optim.comm.encoding import inner_tensors
from zero_optim.comm.mesh import RankMesh
from zero_optim.dtensor.held_values import HeldValues
from zero_optim.health.stamps import Call
from zero_optim.plan.groups import ParamGroup, have_members, names_text, param_names, params_of, short_names
from zero_optim.plan.pieces import Pieces, is_whole, owned_by_text, piece_of
from zero_optim.plan.plan import Plan, describe_params
from zero_optim.shard.bucket import Bucket
from zero_optim.shard.engine import Engine
from zero_optim.shard.sharding import Sharding
from zero_optim.shard.store import Store
from zero_optim.state.moving import CutState, RowMap
from zero_optim.state.options import PlanInputs
from zero_optim.state.snapshot import Snapshot
from zero_optim.step.owned import OwnedState
from zero_optim.step.partial import PartialGradient
from zero_optim.step.state_view import OwnedEntries
from zero_optim.step.unreduced import GradientSamples, UnreducedParams, compare_unreduced


@dataclass(eq=False)
class Core:
    """The parts of an optimizer; ``mesh``, for checkpoints, is that of a wrapper with replicas."""

    inputs: PlanInputs
    ranks: RankGroup
    engine: Engine
    sharding: Sharding
    owned: OwnedState
    groups: list[ParamGroup]
    held_buckets: list[Bucket[HeldValues]] = field(default_factory=list)  # whose rows somebody else keeps
    snapshot: Snapshot = field(default_factory=Snapshot)
    unreduced: UnreducedParams = field(default_factory=UnreducedParams)
    samples: GradientSamples = field(default_factory=GradientSamples)
    state: MutableMapping[Any, Any] = field(default_factory=dict)
    mesh: RankMesh | None = None
    _state_sizes: list[int] = field(default_factory=list)

    def __getstate__(self) -> dict[str, Any]:
        """Copy and pickle all but the parts of a model."""
        anew = {"unreduced": UnreducedParams(), "samples": GradientSamples(), "mesh": None}
        return {**vars(self), **anew, "inputs": replace(self.inputs, store=Store())}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Restore a copy, whose view of the state waits for its own gathers."""
        vars(self).update(state)
        self.owned.leaves.release()
        if self.state is self.owned.shown:
            self.show_state()

    @property
    def group(self) -> RankGroup:
        """The ranks, to communicate; RuntimeError if the optimizer is detached."""
        self.check_attached()
        return self.ranks

    def check_attached(self) -> None:
        """Raise RuntimeError if the optimizer is detached."""
        if self.ranks.is_released:
            raise RuntimeError("the optimizer is detached: call rebind(), on all ranks of the new group")

    def release(self, *, waits: bool) -> None:
        """Release the process group and everything built on it: Note [Detached] in `rebinding`."""
        self.engine.release(waits=waits)
        self.sharding.release()
        works = self.ranks.works
        works.log.cut_if_failed(works.ranks)  # see Note [Groups that end] in `zero_optim.comm.work_log`
        self.ranks, self.mesh = self.ranks.release(), None
        if any(isinstance(param.grad, PartialGradient) for param in self.params):
            for param in self.params:
                param.grad = None  # whole ones too: the next group may have other owners

    def become(self, other: "Core") -> None:
        """Go on with the parts of another one."""
        vars(self).update(vars(other))
        self.show_state()

    def begin_training(self, mesh: RankMesh | None) -> None:
        """Train with ranks that have equal weights by now; averages start there. ``mesh``: of replicas."""
        self.mesh = mesh
        self.owned.average.begin_anew()

    def check_weights(self) -> None:
        """Raise if the model holds averaged weights, or somebody needs rows whole."""
        self.owned.average.check_out()
        for bucket in self.sharding.row_buckets:
            bucket.values.check_unpinned()

    def prepare(self) -> None:
        """Check the parameters before a step, and apply the user's changes; waits for gathers."""
        self.owned.average.check_out()
        self.snapshot.changed()
        self.refresh()
        self.check_cuts(self.groups)
        self.follow_state()

    def add(self, params: Sequence[Tensor], plan: Plan, held: Sequence[Bucket[HeldValues]] = ()) -> None:
        """Put the last parameters, which this rank steps by now, into the buckets of their plan."""
        for bucket in held:
            bucket.values.release()
        self.inputs.costs.update(zip(params, plan.costs, strict=True))
        names = short_names(self.groups)[len(self.params) - len(params) :]
        self.engine.add([*self.sharding.add(params, plan, names), *held])
        self.held_buckets.extend(held)

    def gather_all(self) -> None:
        """Gather all parameters, frozen ones too, and wait; those of units are freed. All ranks call."""
        self.engine.gather_all(self.sharding.free_units)

    def call(self, name: str, failure: BaseException | None = None) -> Call:
        """Describe a call for stamps, with its exception on this rank."""
        return Call(name, self.owned.local.origins, failure, self.engine.report_to_replicas)

    def refresh(self) -> None:
        """Take over what the user changed in parameters and groups, as `Engine.refresh`."""
        self.engine.refresh()
        self.follow_members()

    def follow_members(self) -> None:
        """Give the local groups the members of the public ones; ValueError for a parameter without owner."""
        if not have_members(self.groups, self.owned.local.members):
            self.sharding.check_owned(self.groups)
            self.owned.local.follow_members(self.groups)

    def check_cuts(self, groups: list[ParamGroup]) -> None:
        """Refuse group options with which a class cannot step cut parameters; may try the class."""
        if self.sharding.cut_params:
            self.owned.local.check_cuts(groups, self.owned.leaves.cut_rows, self.sharding.pieces)

    def check_sparse(self, params: Iterable[Tensor]) -> None:
        """Raise ValueError if parameters with sparse gradients are cut."""
        cut = {param for param in params if len(self.sharding.pieces.get(param, ())) > 1}
        for name, param in zip(param_names(self.groups), self.params, strict=True) if cut else ():
            if param in cut:
                raise ValueError(
                    f"the gradient of {name} is sparse, and the parameter is cut: several ranks own rows of "
                    "it. Build the optimizer with cuts=False, or keep this group whole: "
                    '{"params": [...], "cuts": False}'
                )

    def check_gradients(self, params: Iterable[Tensor] | None = None) -> None:
        """Raise ValueError if cut parameters, by default all, have sparse gradients."""
        if self.sharding.cut_params:
            params = self.sharding.cut_params if params is None else params
            self.check_sparse(param for param in params if param.grad is not None and param.grad.is_sparse)

    def compare_unreduced(self, *, in_join: bool) -> None:
        """Refuse to step with unequal unreduced gradients; communicates only if there may be some."""
        unreduced = self.unreduced.among(self.sharding.pieces) if self.ranks.size > 1 else {}
        if unreduced:
            names = dict(zip(self.params, short_names(self.groups), strict=True))
            compare_unreduced(self.group, unreduced, names, in_join=in_join)

    def sample_gradients(self) -> None:
        """Let ranks compare elements of gradients in the next call, if no reducer knows the parameters."""
        stamps = self.engine.stamps
        if stamps is not None and stamps.samples and not self.unreduced.are_known:
            num_params = len(self.sharding.pieces)
            stamps.send_sample(self.samples.take(self.groups, num_params, self.group.read))

    @property
    def params(self) -> list[Tensor]:
        """All parameters, in the order of the groups."""
        return params_of(self.groups)

    def show_state(self) -> None:
        """Point ``state`` to the present state."""
        self.state = self.owned.show(self.engine.under_way.wait, self.sharding.pieces)

    def follow_state(self) -> None:
        """Take over a mapping that the user or the class assigned to ``state``; raises as `own_state`."""
        states = self.owned.local.states.all
        if self.owned.take_over_state(self.state, states):
            self.show_state()
            states = self.owned.local.states.all
        sizes = list(map(len, states))
        if sizes != self._state_sizes:  # so that most steps look no further
            self._check_state()
            self._state_sizes = sizes

    def _check_state(self) -> None:
        """Raise RuntimeError for entries of a parameter that this rank does not own."""
        pieces = self.sharding.pieces
        for state in self.owned.local.states.all:
            for key, entries in state.items():
                of_param = pieces.get(key) if isinstance(key, Tensor) else None
                if entries and of_param is not None and piece_of(of_param, self.ranks.rank) is None:
                    name = dict(zip(self.params, short_names(self.groups), strict=True))[key]
                    raise RuntimeError(
                        f"optimizer.state has {names_text(list(entries))} of {name}, which is "
                        f"{owned_by_text(of_param)}: a rank saves the state of what it owns, and these "
                        "entries would be lost. A wrapper such as Lookahead keeps its tensors in a dict of "
                        "its own; or shard it, as the class that is given to ZeroRedundancyOptimizer"
                    )

    def describe(self) -> list[str]:
        """Describe everything that replicas of one model must have in common."""
        names = param_names(self.groups)
        pieces = zip(names, map(self.sharding.pieces.__getitem__, self.params), strict=True)
        return [
            *describe_params(self.groups),
            *self.owned.local.describe_options(self.groups),
            f"buckets of {self.sharding.cap_nbytes} bytes",
            *self.owned.local.describe_specs(),
            *self.inputs.options.describe(),
            *(f"parameter {name.removeprefix('parameter ')} {owned_by_text(each)}" for name, each in pieces),
        ]

    def own_params(self) -> list[Tensor]:
        """List the parameters of which this rank owns rows, in order."""
        return [param for param in self.params if self.sharding.piece_here(param) is not None]

    def own_state(self) -> dict[Any, Any]:
        """Return this rank's state by parameter, and global entries; raises for those of other owners."""
        self._check_state()
        # Reading opt.state[p] leaves an empty entry there, also for parameters of other owners.
        params = set(self.params)
        others = params.difference(self.own_params())
        own = {key: value for key, value in self.state.items() if key not in others}
        removed = [key for key in own if isinstance(key, Tensor) and key not in params and own[key]]
        if removed:
            shapes = ", ".join(str(tuple(param.shape)) for param in removed)
            raise ValueError(
                f"param_groups do not list all parameters that have state (shapes {shapes}): put them back, "
                "or drop their state too, on all ranks, with optimizer.state.pop(param, None)"
            )
        own.update(self.owned.local.states.beside())
        return {key: dict(value) if isinstance(value, OwnedEntries) else value for key, value in own.items()}

    def indexed_state(self) -> dict[Any, Any]:
        """Return this rank's state as `own_state`, by parameter index."""
        index_of: dict[Any, Any] = {param: index for index, param in enumerate(self.params)}
        known = {k: v for k, v in self.own_state().items() if k in index_of or not isinstance(k, Tensor)}
        return {index_of.get(key, key): entries for key, entries in known.items()}

    def state_nbytes(self) -> int:
        """Return the bytes of this rank's state, each storage counted once."""
        storages = [tensor.untyped_storage() for tensor in inner_tensors(self.state)]
        return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())

    def piece_list(self) -> list[Pieces]:
        """List each parameter's pieces, in order."""
        return [self.sharding.pieces[param] for param in self.params]

    def row_map(self, held: Sequence[Pieces], wanted: Sequence[Pieces]) -> RowMap:
        """Make the map of a move."""
        shapes = [tuple(param.shape) for param in self.params]
        cut = {
            param: index
            for index, (param, *ends) in enumerate(zip(self.params, held, wanted, strict=True))
            if not all(is_whole(piece, param.shape) for pieces in ends for piece in pieces)
        }
        shaped = {cut[param]: names for param, names in self.owned.shaped_entries(self.groups, cut).items()}
        return RowMap(shapes, shaped, held, wanted)

    def cut_states(self) -> dict[Tensor, CutState]:
        """Map each cut parameter to the layout of its state."""
        pieces = self.sharding.pieces
        cut = [param for param in self.params if len(pieces[param]) > 1]
        shaped = self.owned.shaped_entries(self.groups, cut)
        return {param: CutState(tuple(param.shape), pieces[param], names) for param, names in shaped.items()}

    def take_over(
        self, owned: Mapping[Any, Any], groups: list[ParamGroup], *, exact: bool, everyone: RankGroup
    ) -> Callable[[], None]:
        """Replace this rank's state and options, and return what is left to do, as `OwnedState.load`."""
        self.engine.under_way.wait()  # gathers read the parameters, which masters are written to
        finish = self.owned.load(owned, groups, exact=exact, everyone=everyone)
        self.groups = groups
        self.show_state()
        return finish
