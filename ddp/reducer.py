"""`Reducer`: averages gradients over ranks, bucket by bucket, while the backward pass still runs.

Note [One backward pass]
    A hook on the output of the forward pass, or the first gradient, begins an `Iteration` and asks the
    autograd engine to be called when the pass has ended. Each gradient is counted; a full bucket
    is launched if all before it were, so that every rank launches in the same order. At the end what is
    left is launched, and the results become the parameters' gradients. Ranks tell each other that something
    went wrong by an element of the last bucket, which waits for the end for that; or by a small sum of its
    own where there is a comm hook, or where parameters may be unused.

The behaviour is that of PyTorch's reducer (Li et al., "PyTorch Distributed: Experiences on Accelerating
Data Parallel Training", VLDB 2020), but for this: a pass that lacks gradients raises when it
ends, on every rank, and not in the forward pass after it.
"""

import warnings
import weakref
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.futures import Future

from zero_optim.comm.agreement import agree, failing_together
from zero_optim.comm.collectives import RankGroup
from zero_optim.compat.engine import after_backward
from zero_optim.ddp.assignment import BucketAssignment, ReducerOptions, describe, named, wire
from zero_optim.ddp.graph import UnusedSearch, accumulates, nearest, refuse_distributed_autograd, tensors_in
from zero_optim.ddp.history import History
from zero_optim.ddp.inbox import Inbox, Token, hook_up, output_hook, remove, weakly
from zero_optim.ddp.iteration import Iteration, PassTerms
from zero_optim.ddp.reduction import Hook, HookSlot, Reduction, SumReduction
from zero_optim.ddp.report import FailureReport
from zero_optim.ddp.statistics import Clock
from zero_optim.errors import ReductionError


class Reducer:
    """Average gradients over the ranks of a group in every backward pass.

    Usable without any wrapper: after ``reducer = Reducer(model.named_parameters())`` each
    ``loss.backward()`` leaves averaged gradients. All ranks must construct it, and must run backward passes
    together, each giving a gradient to every parameter unless the options say otherwise. Its hooks go
    when it goes, or with `close`.

    Args:
        params: (name, parameter) pairs of those that require a gradient, or parameters alone; on one device.
        process_group: ranks to average over; None for the default group.
        options: see `ReducerOptions`.
        sparse: names of the parameters whose gradients are sparse.
        wanted: asked when a backward pass begins whether it is to be reduced, and told whether the pass goes
            through an output given to `prepare`; None for always.
        checks: make sure, by a small collective, that all ranks were given the same parameters and options.

    Attributes:
        options: as given.
        names: of the parameters.
        params: the parameters.
        clock: what was measured.
        history: what the passes so far have taught.
        defers_reports: read what other ranks found wrong in a pass only before the next one: on CUDA, where
            reading makes the CPU wait for the GPU.

    Raises:
        ValueError: on every rank: no parameters, some that do not require a gradient, several devices.
        RankMismatchError: on every rank: ranks were given different things; names the first.
    """

    def __init__(
        self,
        params: Iterable[tuple[str, Tensor]] | Iterable[Tensor],
        process_group: dist.ProcessGroup | None = None,
        options: ReducerOptions | None = None,
        *,
        sparse: Collection[str] = (),
        wanted: Callable[[bool], bool] | None = None,
        checks: bool = True,
    ) -> None:
        self.options = ReducerOptions() if options is None else options
        self.use_group(process_group)
        if checks:
            with failing_together(self._group):
                pairs = named(params)
            given = [repr(self.options), f"sparse: {sorted(sparse)}", *describe(pairs)]
            agree(self._group, given, "what the reducer was given")
        else:
            pairs = named(params)
        self.names = [name for name, _ in pairs]
        self.params = [param for _, param in pairs]
        self._indices = {id(param): index for index, param in enumerate(self.params)}
        self._sparse = frozenset(sparse)
        self._wanted = wanted
        self._slot = HookSlot()
        self.clock = Clock(on_cuda=self.params[0].is_cuda)
        self._inbox = Inbox(self)
        self.reset()
        self._finalizer = weakref.finalize(self, remove, hook_up(self.params, self._inbox))

    def reset(self) -> None:
        """Begin anew: first buckets, nothing learnt. Must be called by all ranks, between iterations."""
        self._inbox.clear()
        self.history = History(len(self.params))
        self._divisor: Callable[[], float] | None = None
        self._slot.failure = None
        self._outlook = UnusedSearch()
        self._late_report: FailureReport | None = None
        self._futures: list[Future[object]] = []
        self._wire(None)

    # ------------------------------------------------------------------ buckets

    @property
    def process_group(self) -> dist.ProcessGroup:
        """The ranks averaged over."""
        return self._group.process_group

    def use_group(self, process_group: dist.ProcessGroup | None) -> None:
        """Average over other ranks from now on. All of these must call, between iterations, and `reset`."""
        self._group = RankGroup.of(process_group)
        self.defers_reports = self._group.device.type == "cuda"

    @property
    def wiring(self) -> BucketAssignment:
        """The parameters and buckets as they are now."""
        return self._wiring

    def _wire(self, order: Sequence[int] | None) -> None:
        """Make buckets. The old ones go first, but for what gradients that are views of them still use."""
        self._wiring = BucketAssignment(self.names, (), ())
        self._wiring = wire(self.names, self.params, self._sparse, self.options, order)

    def rebuild(self) -> bool:
        """Make buckets anew in the order in which gradients came on rank 0, once it is known; see `wiring`.

        All ranks call, at the same point; communicates when it is due.

        Returns:
            Whether buckets were rebuilt.
        """
        history = self.history
        if not history.rebuild_is_due or self._inbox.iteration is not None:
            return False
        history.rebuild_is_due = False
        agreed = torch.tensor(history.order(), dtype=torch.int64, device=self._group.device)
        for work in self._group.share_rows([(0, agreed)]):
            work.wait()
        self._wire(agreed.tolist())
        history.has_rebuilt = True
        return True

    # ------------------------------------------------------------------ what users set

    def register_comm_hook(self, state: object, hook: Hook) -> None:
        """Let a hook reduce the buckets, and divide by the number of ranks, in the place of all-reduce.

        Args:
            state: handed to the hook.
            hook: ``hook(state, bucket) -> Future[Tensor]``, see `GradBucket`.

        Raises:
            RuntimeError: there is one already, or a backward pass is under way.
            TypeError: it cannot be called as a hook.
            ValueError: it is annotated to take or return something else.
        """
        if self._inbox.iteration is not None:
            raise RuntimeError("a comm hook must be registered before backward() begins")
        self._slot.register(state, hook)

    def divide_by(self, divisor: Callable[[], float]) -> None:
        """Divide the gradients of the next pass by another number than that of the ranks."""
        self._divisor = divisor

    def set_static_graph(self) -> None:
        """Take every pass to be like the next one. All ranks call, before their first backward pass."""
        self.options = replace(self.options, static_graph=True)

    def wait_also(self, future: Future[object]) -> None:
        """Wait for something else of the caller's when the next backward pass ends."""
        self._futures.append(future)

    def close(self) -> None:
        """Take the hooks off the parameters; a second call does nothing."""
        self._finalizer()

    # ------------------------------------------------------------------ an iteration

    def prepare(self, outputs: object = ()) -> None:
        """Look at a forward pass's output before it goes to the user. Optional in ordinary loops.

        It makes a difference where parameters may be unused, so that buckets need not wait for the end, and
        where checkpointing is reentrant. Every rank calls it after the same forward passes. Does not
        communicate.

        Args:
            outputs: whatever the forward pass gave; tensors in containers and dataclasses are found.

        Raises:
            RuntimeError: inside a context of ``torch.distributed.autograd``.
        """
        refuse_distributed_autograd()
        tensors = [tensor for tensor in tensors_in(outputs) if tensor.requires_grad]
        if self.options.find_unused_parameters and not self.options.static_graph:
            self._outlook.look(tensors)
        for tensor in tensors:
            if tensor.grad_fn is not None:
                untyped: Any = tensor
                untyped.register_hook(output_hook(self, nearest(tensor, self._indices)))

    def output_reached(self, witness: int | None) -> None:
        """Begin an iteration, if need be, as a pass goes through an output; called by that output's hook.

        Args:
            witness: a parameter that the output depends on, None if none was found.
        """
        # torch.autograd.grad goes through outputs too, but gives no parameter its gradient.
        is_backward = witness is None or accumulates(self.params[witness])
        if is_backward and self._inbox.iteration is None and self._is_wanted(True):
            self._begin()

    def check_finished(self) -> None:
        """Raise, on every rank, if the last backward pass broke off; all ranks call. Free if all is well.

        Raises:
            ReductionError: a backward pass ended by an exception, or a comm hook failed, here or on another
                rank.
        """
        if self._slot.failure is not None:
            raise ReductionError(self._slot.failure)
        late, self._late_report = self._late_report, None
        if late is not None:
            late.wait()
        iteration, self._inbox.broken_off = self._inbox.broken_off, None
        if iteration is not None:
            iteration.fail("a backward pass ended with an exception before its gradients were reduced")
            self._finish(iteration, broke_off=True)

    def _is_wanted(self, was_prepared: bool) -> bool:
        return self._wanted is None or self._wanted(was_prepared)

    def first_arrived(self, index: int) -> None:
        """Take a gradient that came while no iteration was under way; called by its parameter's hook."""
        if self._is_wanted(False):
            self._begin().arrived(index)
        else:
            self.history.carried[index] = True

    def _begin(self) -> Iteration:
        """Begin an iteration, from a hook in a backward pass."""
        self.check_finished()
        self.rebuild()
        divisor = self._divisor() if self._divisor is not None else self._group.size
        terms = self._terms(divisor if self._slot.is_empty else 1)
        iteration = Iteration(self._wiring, terms, self.history.carried, weakly(self._launch))
        with_graph = torch.is_grad_enabled()
        if with_graph:
            iteration.arrived = torch.no_grad()(iteration.arrived)  # type: ignore[method-assign]
        token = self._inbox.begin(iteration)
        self.clock.mark("backward")

        # The engine lets go of the token when the pass ends, however it does.
        def finish(_: Token = token) -> None:
            self._finish(iteration, with_graph=with_graph)

        after_backward(finish)
        with torch.no_grad():
            iteration.presume_unused(self._surely_unused())
        return iteration

    def _terms(self, divisor: float) -> PassTerms:
        return self.history.terms(
            self.options, divisor, can_tell=self._slot.is_empty and self._wiring.buckets[-1].can_tell
        )

    def _surely_unused(self) -> list[int]:
        """Find parameters that will get no gradient in the pass that has just begun."""
        learnt = self.history.learnt
        if learnt is not None:
            return [index for index, calls in enumerate(learnt) if not calls]
        return self._outlook.pop_unused(self.params)

    def _launch(self, number: int) -> Reduction:
        self.clock.mark("reduction")
        return self._reduce(self._wiring, number)

    def _reduce(self, wiring: BucketAssignment, number: int) -> Reduction:
        bucket = wiring.buckets[number]
        if self._slot.is_empty:
            return SumReduction(self._group, bucket)
        return self._slot.launch(bucket, number, is_last=number == len(wiring.buckets) - 1)

    @torch.no_grad()
    def _finish(self, iteration: Iteration, *, broke_off: bool = False, with_graph: bool = False) -> None:
        """End an iteration: launch the rest, wait, hand the results out."""
        self._inbox.iteration = None
        if not (any(iteration.calls) or iteration.asks_for_use or broke_off):
            return  # torch.autograd.grad went through the output, and computed no parameter's gradient
        self.clock.mark("backward_end")
        self.history.carried = [False] * len(self.params)
        # In Join ranks that have joined read the report at once, and issue other things before the next pass.
        defers = self.defers_reports and self._divisor is None and not broke_off
        self._divisor = None
        iteration.launch_rest()
        self._await_hooks(iteration.drain)
        report = iteration.close(self._group)
        unused = self._read(report, iteration) if iteration.asks_for_use else self.history.unused
        self._give(iteration, unused)
        self.clock.end()
        self.history.num_buckets_reduced = iteration.num_reduced
        self.history.conclude(iteration.calls, iteration.order, unused, self.options)
        if not iteration.asks_for_use:
            if defers:
                self._late_report = report
            else:
                report.wait()
        if with_graph and any(iteration.calls):
            _warn_of_graph()

    def _read(self, report: FailureReport, iteration: Iteration) -> list[bool]:
        """Learn which parameters no rank used."""
        try:
            return [not used for used in report.wait()]
        except ReductionError:
            iteration.drain()
            raise

    def _give(self, iteration: Iteration, unused: Sequence[bool]) -> None:
        """Wait for all that is under way, and hand the results out."""
        with self._slot.minding():
            iteration.give(unused)
        futures, self._futures = self._futures, []
        for future in futures:
            future.wait()

    @torch.no_grad()
    def shadow(self) -> None:
        """Take part in the reductions of one backward pass of the others, with zeros; for ``Join``.

        This rank's gradients are left alone.
        """
        self.check_finished()
        self.rebuild()
        terms = self._terms(1)
        self._divisor = None
        twins = replace(self._wiring, buckets=[bucket.twin() for bucket in self._wiring.buckets])
        reductions = [self._reduce(twins, number) for number in self._numbers_used(terms.skips_unused)]

        def drain() -> None:
            for reduction in reductions:
                reduction.wait()

        self._await_hooks(drain)
        asks = terms.kind in ("some", "learning")
        word = twins.buckets[-1].flat[:1] if terms.tells else None
        report = FailureReport(self._group, None, [False] * len(self.params) if asks else [], word)
        drain()
        used = report.wait()
        self.history.num_buckets_reduced = len(reductions)
        # A rank that has no pass to learn from takes it that the others' is what its own would have been.
        unused = [not flag for flag in used]
        self.history.conclude([int(flag) for flag in used], self.history.last_order, unused, self.options)

    def _await_hooks(self, drain: Callable[[], None]) -> None:
        """Keep the report behind all that hooks issue; PowerSGD's does so from other threads, later."""
        if not self._slot.is_empty:
            with self._slot.minding():
                drain()

    def _numbers_used(self, skips_unused: bool) -> list[int]:
        """Number the buckets that the others reduce, if they use what this rank used while it could."""
        used = set(self.history.last_order)
        if skips_unused and not used:
            raise ReductionError(
                "skip_all_reduce_unused_params=True, and this rank had no batch to learn from which "
                "parameters are used: give every rank a batch, or leave the option out inside Join"
            )
        buckets = enumerate(self._wiring.buckets)
        return [number for number, bucket in buckets if not skips_unused or used.intersection(bucket.indices)]


def _warn_of_graph() -> None:
    warnings.warn(
        "a backward pass with create_graph=True reduces the gradients, not the graph that "
        "computes them: gradients of higher order are those of this rank alone",
        stacklevel=2,
    )
