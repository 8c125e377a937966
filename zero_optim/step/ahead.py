"""Steps taken ahead of ``step()``: some parameters at a time, while the backward pass still runs.

Note [Overlap is no mode]
    Whoever has a bucket's reduced gradients, a comm hook as a rule, steps that bucket at once and launches
    its gather; ``step()`` finishes what has not been stepped. Owners never change, so it does not
    matter how often DDP makes its buckets anew, and the first step is as good as any.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from zero_optim.comm.collectives import RankGroup
from zero_optim.comm.lanes import Lease, lanes_beside
from zero_optim.plan.groups import Group, params_of
from zero_optim.plan.layout import Run
from zero_optim.shard.gathers import UnderWay, launch_part
from zero_optim.shard.sharding import Sharding
from zero_optim.shard.storage import Bucket
from zero_optim.step.owned import Share


class Steps(Protocol):
    """The optimizer whose step it is."""

    param_groups: list[Group]

    def begin_ahead(self, lane: RankGroup, joined: bool) -> bool:
        """Get ready for a step; tells whether some ranks may have joined."""
        ...

    def lend(self, params: Sequence[Tensor], *, joined: bool) -> None:
        """Give ranks that ran out of inputs the gradients of what they own."""
        ...


@dataclass(frozen=True, slots=True, eq=False)
class Part:
    """Parameters that are stepped together.

    Attributes:
        num_known: how many parameters the optimizer had.
        given: the parameters as they were given.
        params: those of them that the optimizer has, whoever owns them.
        owned: those that this rank owns, each with its place among the parameters given.
        gathers: for each bucket concerned, the bucket, the parameters by index within it, and where they lie.
    """

    num_known: int
    given: tuple[Tensor, ...]
    params: tuple[Tensor, ...]
    owned: tuple[tuple[int, Tensor], ...]
    gathers: tuple[tuple[Bucket, frozenset[int], tuple[Run, ...]], ...]


class Ahead:
    """The part of a step that is taken before ``step()`` is called.

    All ranks construct it, which takes process groups for its gathers, and call its methods in the
    same order with the same parameters. One thread at a time.

    Args:
        optimizer: whose step.
        group: the ranks.
        sharding: who owns what.
        share: what steps this rank's part.
        under_way: where gathers are kept until they are waited for.

    Attributes:
        group: the ranks.
        lends: ranks may have joined, see `step.join`: ``step()`` lends them gradients for what is left
            to it.
    """

    def __init__(
        self, optimizer: Steps, group: RankGroup, sharding: Sharding, share: Share, under_way: UnderWay
    ) -> None:
        self._optimizer = optimizer
        self.group = group
        self._lanes = lanes_beside(group)
        self._sharding = sharding
        self._share = share
        self._under_way = under_way
        self._announced: list[torch.futures.Future[Tensor]] = []
        self._is_closed_by_step = False  # whether the training loop calls step() at all
        self._is_open = False  # between a pass and step()
        self._num_passes = 0  # since the last `close`, but for those that failed
        self._has_ended = True  # the last one; it has not if it broke off
        self._seals: list[tuple[Tensor, int, int]] = []
        self._stepped: dict[Tensor, None] = {}  # since the last `begin` or `close`, whoever owns them
        self.lends = False

    @property
    def has_begun(self) -> bool:
        """Whether a step has been begun that ``step()`` has not finished."""
        return self._is_open

    def begin(self, joined: bool) -> None:
        """Begin a step; its first part comes next.

        Args:
            joined: this rank ran out of inputs.

        Raises:
            RuntimeError: the last one has not been finished by ``step()``, though the ones before were; or
                its backward pass broke off.
        """
        broke_off = not self._has_ended
        self._num_passes += not broke_off
        self._is_open, self._has_ended = True, False
        if self._is_closed_by_step:
            self._check_passes()
        if broke_off and self._under_way and not joined:
            raise RuntimeError(
                "the last backward pass broke off after part of its step had been taken, and the "
                "forward pass since may have read parameters half way: call optimizer.wait_for_gathers() "
                "before going on"
            )
        self._under_way.wait()
        self._stepped, self._seals = {}, []
        self.lends = self._optimizer.begin_ahead(self._lanes.groups[0], joined)

    def announce(self, done: torch.futures.Future[Tensor]) -> None:
        """Take note of a part that another thread will step, and of the future that it completes then."""
        self._announced.append(done)

    def wait_for_steps(self) -> None:
        """Wait until all parts announced were stepped and their gathers launched."""
        announced, self._announced = self._announced, []
        for done in announced:
            done.wait()

    def _check_passes(self) -> None:
        if self._num_passes > 1:
            raise RuntimeError(
                f"{self._num_passes} backward passes were reduced before step(), and each was stepped with "
                "the gradients added up so far. Put all but the last backward pass of a step under no_sync()"
            )

    def new_lanes(self) -> Lease:
        """Take process groups for a reduction that shares none with the gathers; all ranks call."""
        return lanes_beside(self.group)

    def abandon_lanes(self) -> None:
        """Let nobody use the process groups of the gathers after this: ranks may be out of step there."""
        self._lanes.abandon()

    def owners(self, params: Sequence[Tensor]) -> list[int]:
        """Tell who owns some parameters.

        Raises:
            ValueError: the optimizer does not have one of them.
        """
        unknown = sum(param not in self._sharding.owners for param in params)
        if unknown:
            raise ValueError(
                f"{unknown} parameters of the model are not in the optimizer, so they have no owner to "
                'reduce their gradients to: add them to it, or reduce gradients "everywhere"'
            )
        return [self._sharding.owners[param] for param in params]

    def drop_gradients(self) -> None:
        """Let go of the gradients of what other ranks own: here they were not reduced."""
        for param in self._stepped:
            if self._sharding.owners[param] != self.group.rank:
                param.grad = None

    def part(self, params: Sequence[Tensor]) -> Part:
        """Plan the step of some parameters; those that the optimizer does not have are left out."""
        known = [(place, param) for place, param in enumerate(params) if param in self._sharding.owners]
        owned = [(place, param) for place, param in known if self._sharding.owners[param] == self.group.rank]
        every = tuple(param for _, param in known)
        num_known = len(self._sharding.owners)
        return Part(num_known, tuple(params), every, tuple(owned), self._sharding.stretches(every))

    def is_current(self, part: Part, params: Sequence[Tensor]) -> bool:
        """Whether `part` would give the same for some parameters."""
        return (
            part.num_known == len(self._sharding.owners)
            and len(part.given) == len(params)
            and all(a is b for a, b in zip(part.given, params, strict=True))
        )

    def step(self, part: Part, gradients: Sequence[Tensor | None]) -> None:
        """Step a part, and launch its gather; all ranks call.

        Args:
            part: of the parameters.
            gradients: for each parameter that `part` was given, reduced; None leaves it alone.
        """
        owned = {}
        for place, param in part.owned:
            gradient = gradients[place]
            if gradient is not None:
                owned[param] = gradient
        try:
            if owned:
                self._share.step_some(self._optimizer.param_groups, owned)
        finally:  # the others wait for it, even if the class's own step fails
            self._stepped.update(dict.fromkeys(part.params))
            for bucket, chosen, runs in part.gathers:
                pending = launch_part(self._lanes.groups, bucket, chosen, runs)
                self._under_way.add([bucket.params[index] for index in chosen], pending)

    def end_backward(self, *, is_final: bool, failed: bool) -> None:
        """End a backward pass: wait for the gathers, but for those that a forward pass will wait for.

        Args:
            is_final: gradients are what ``step()`` would find; a change of them from now on comes too late.
            failed: the pass raises, here.
        """
        self._has_ended = True
        self._num_passes -= failed
        if is_final:
            self._seals = [(p, id(p.grad), p.grad._version) for p in self._stepped if p.grad is not None]
        self._sharding.end_step()

    def finish(self, late: str, *, joined: bool) -> None:
        """Finish the step, in ``step()``: step what was not stepped, such as what DDP does not hold.

        All ranks call.

        Args:
            late: what else ``step()`` was asked for, which cannot have an effect any more; empty for nothing.
            joined: this rank ran out of inputs.

        Raises:
            RuntimeError: the step taken is not the one that was asked for: there were several backward
                passes, or gradients were changed since, or something came late.
        """
        try:
            if late:
                raise RuntimeError(
                    f"the step was taken during the backward pass, too early for {late}: leave it out, or "
                    "leave out zero_step (overlap_with_ddp). bfloat16 needs no GradScaler"
                )
            if not joined:
                self._check_passes()
                self._check_gradients()
            rest = self._rest()
            if rest:
                self._optimizer.lend(rest, joined=joined)
                self.step(self.part(rest), [param.grad for param in rest])
        finally:
            self._close()
        self._sharding.end_step()

    def _check_gradients(self) -> None:
        for param, identity, version in self._seals:
            grad = param.grad
            if grad is not None and (id(grad) != identity or grad._version != version):
                raise RuntimeError(
                    "gradients were changed, clipped or unscaled perhaps, after the step had been taken with "
                    "them during the backward pass. That cannot have an effect: leave it out, or leave out "
                    "zero_step (overlap_with_ddp)"
                )

    def _rest(self) -> list[Tensor]:
        """List what ``step()`` has yet to step: what trains or has a gradient; the same on every rank."""
        left = [param for param in params_of(self._optimizer.param_groups) if param not in self._stepped]
        return [param for param in left if param.requires_grad or param.grad is not None]

    def _close(self) -> None:
        self._is_closed_by_step = True
        self._is_open, self._num_passes, self._has_ended = False, 0, True
        self._stepped, self._seals = {}, []
