"""`Reducer`: averages gradients over ranks, bucket by bucket, during the backward pass, as PyTorch's does.

A hook on the forward pass's output, or the first gradient, begins a `BackwardPass`. A full bucket is launched
after all before it, so every rank launches in one order. At the end, when the autograd engine calls, the rest
is launched, and the results become the parameters' gradients.
"""

import warnings
import weakref
from collections.abc import Callable, Collection, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor

from zero_optim.comm.collectives import RankGroup
from zero_optim.compat.autograd import in_backward, in_distributed_autograd, shadowed_pass
from zero_optim.compat.streams import is_asynchronous
from zero_optim.ddp.reducer.assignment import BucketAssignment, History, ReducedParams, ReducerOptions, assign
from zero_optim.ddp.reducer.backward_pass import BackwardPass, PassWithGraph, Phase
from zero_optim.ddp.reducer.graph import UnusedSearch, tensors_in
from zero_optim.ddp.reducer.inbox import Inbox, Ties, announce_backward, remove, weakly, when_backward_ends
from zero_optim.ddp.reducer.reduction import Hook, HookSlot, Launch
from zero_optim.ddp.reducer.report import IN_RPC_CONTEXT, WITHOUT_GRAPH, WRAPPED_ANEW, FailureReport
from zero_optim.errors import ReductionError
from zero_optim.health.watchdog import watch
from zero_optim.step.unreduced import add_reducer, remove_reducer


class Reducer:
    """Averages gradients over the ranks of a group in every backward pass.

    All ranks construct it, with equal arguments, and run backward passes together. Its hooks go when it goes,
    or with `close`.
    """

    checks_first = False  # a pass that is found to be bad when it ends hands out no gradients

    def __init__(
        self,
        params: Sequence[tuple[str, Tensor]],  # on one device
        process_group: dist.ProcessGroup | None,
        options: ReducerOptions,
        ties: Ties,
        sparse: Collection[str] = (),  # names of parameters with sparse gradients
    ) -> None:
        self._ties, self.options = ties, options
        self._reduced = reduced = ReducedParams.of(params, sparse)
        self.names, self.params = reduced.names, reduced.params
        self._use(RankGroup.of(process_group, self.params).within(self.options.timeout))
        self.defers_reports = is_asynchronous(self.params[0].device)  # Note [Late reports] in `report`
        self.slot = HookSlot()
        self._is_expected = self._is_replaced = False
        self._inbox = Inbox(self.params, weakly(self._first_arrived), self._ties)
        weakref.finalize(self, remove, self._inbox.handles)
        self.reset()
        add_reducer(self)

    def reset(self) -> None:
        """Begin anew: first buckets, nothing learnt. All ranks call, between iterations."""
        self._inbox.use(None)
        self.slot.forget()
        self.history, self.has_rebuilt = History(len(self.params)), False
        self.unreduced = [False] * len(self.params)  # its last gradient came in a pass that was not reduced
        self._divisor: Callable[[], float] | None = None  # of the next pass, in Join; None for `size`
        self._search = UnusedSearch()
        self._unread: list[FailureReport] = []  # of passes that have ended
        self._assign(None)

    def use_group(self, process_group: dist.ProcessGroup | None) -> None:
        """Average over other ranks from now on; all of these call, between iterations, then `reset`."""
        self._use(replace(RankGroup.of(process_group, self.params), phase=self.group.phase))

    def _use(self, group: RankGroup) -> None:
        self.group, self._summing = group, group.during("reduce")
        watch(self, group, self.options.on_stall)

    def _assign(self, order: Sequence[int] | None) -> None:
        self.assignment = BucketAssignment()
        self.assignment = self._assigned(order)

    def _assigned(self, order: Sequence[int] | None) -> BucketAssignment:
        return assign(self._reduced, self.options, order)

    @torch.no_grad()
    def rebuild(self) -> bool:
        """Rebuild buckets in rank 0's order of gradients, if due; returns whether it did. All ranks call."""
        is_due = not self.has_rebuilt and self.history.knows_order(self.options)
        if self._inbox.running is not None or not is_due:
            return False
        self._assign(self.history.order_of_first(self.group))
        self.has_rebuilt = True
        return True

    def register_comm_hook(self, state: object, hook: Hook) -> None:
        """Let ``hook(state, bucket) -> Future[Tensor]`` reduce buckets, and divide by the number of ranks."""
        if self._inbox.running is not None:
            raise RuntimeError("a comm hook must be registered before backward() begins")
        self.slot.register(state, hook)

    def divide_by(self, divisor: Callable[[], float]) -> None:
        """Divide the gradients of the next pass by the number of ranks that take part, in ``Join``."""
        self._divisor = divisor

    def set_static_graph(self) -> None:
        """Expect every pass to be like the next; all ranks call, before their first backward pass."""
        self.options = replace(self.options, static_graph=True)

    def close(self) -> None:
        """Remove the hooks; a second call does nothing."""
        remove(self._inbox.handles)
        remove_reducer(self)

    def retire(self) -> None:
        """Leave the gradients to another one: two would take them from each other."""
        self._is_replaced = True
        self.close()

    def begin_forward(self) -> None:
        """Begin a forward pass whose backward pass must be reduced; raises as `check_finished`."""
        self.group.works.log.activity.begin("forward pass")
        self.check_finished(waits=False)

    def end_forward(self, output: object, *, syncs: bool) -> None:
        """End a forward pass with gradients; if it `syncs`, its backward pass must be reduced."""
        self.group.works.log.activity.end("forward pass")
        if self._is_replaced:
            raise RuntimeError(WRAPPED_ANEW)
        self._is_expected = False
        if syncs:
            self.prepare(output)

    def prepare(self, outputs: object) -> None:
        """Expect passes from now on, and look at an output before the user gets it; ranks do so alike."""
        self._is_expected = True
        if in_distributed_autograd():
            raise RuntimeError(IN_RPC_CONTEXT)
        tensors = [tensor for tensor in tensors_in(outputs) if tensor.requires_grad]
        if self.options.find_unused_parameters and not self.options.static_graph:
            self._search.look(tensors)
        announce_backward(tensors, self._reduced.index_of, weakly(self._output_reached))

    def _output_reached(self) -> None:
        if self._inbox.running is None and self._ties.wanted(True):
            self._begin()

    def check_finished(self, *, waits: bool = True) -> None:
        """Raise ReductionError, on every rank, if a backward pass or comm hook failed on any; all ranks call.

        ``waits=False`` leaves out the last pass, which may still run on the device.
        """
        if self.slot.failure is not None:
            raise ReductionError(self.slot.failure)
        current, unread = self._inbox.current, self._unread
        if current is not None and not in_backward():
            current.break_off()  # a thread of the engine may not have let go of it yet
        if current is not None and current.phase is Phase.BROKEN_OFF:
            self._finish(current)
        while len(unread) > (0 if waits else 1):
            unread.pop(0).check()

    def _first_arrived(self, index: int) -> None:
        if self._ties.wanted(self._is_expected):
            self._begin().came(index)
        else:
            self.unreduced[index] = True

    def _begin(self) -> BackwardPass:
        self.check_finished(waits=False)
        self.rebuild()
        divisor = self.slot.divisor() or 1.0
        if self.slot.hook is None:
            divisor = self.group.size if self._divisor is None else self._divisor()
        current = self._new_pass(self.assignment, divisor, in_join=self._divisor is not None)
        self.group.works.log.activity.begin("backward pass")
        if self.options.may_be_unused and self._ties.begin is not None:
            self._ties.begin(current)
        self._inbox.use(current)
        when_backward_ends(partial(self._finish, current), current.break_off)
        learnt = self.history.learnt
        with torch.no_grad():
            if learnt is None:
                current.presume_unused(self._search.pop_unused(self.params))
            else:
                current.presume_unused([index for index, calls in enumerate(learnt) if not calls])
        return current

    def _new_pass(self, assignment: BucketAssignment, divisor: float, *, in_join: bool) -> BackwardPass:
        options = self.options
        if in_join and not self.history.num_passes:  # from it a rank without a batch learns what is used
            options = replace(options, skip_all_reduce_unused_params=False)
        return (PassWithGraph if torch.is_grad_enabled() else BackwardPass)(
            assignment,
            self.history,
            options,
            self._ties.engine,
            self._open(),
            divisor=divisor,
            can_carry_word=self.slot.hook is None and assignment.buckets[-1].storage.can_carry_failure_word,
            held_up=nullcontext() if self.defers_reports else self._summing.phase,
        )

    def _open(self) -> Launch:
        return self.slot.launching(self._summing, all_used=not self.options.may_be_unused)

    @torch.no_grad()
    def _finish(self, current: BackwardPass) -> None:
        self._inbox.use(None)
        try:
            with current.held_up:
                self._conclude(current)
        except BaseException:
            current.give_back(drops=True)
            raise
        finally:
            self.group.works.log.activity.end("backward pass")
        current.give_back(drops=False)  # torch.autograd.grad went through an output: no pass at all

    def _conclude(self, current: BackwardPass) -> None:
        broke_off = current.phase is Phase.BROKEN_OFF
        lost = self._inbox.lost(current.calls)
        for index, text in lost.items():
            current.failures.add(text, index)
        if not (any(current.calls) or current.asks_for_use or broke_off or lost):
            return  # torch.autograd.grad went through the output, and computed no parameter's gradient
        carried, self.unreduced = self.unreduced, [False] * len(self.params)
        self.group.phase.traffic.count_step()
        defers = self.defers_reports and self._divisor is None and current.kind != "learning"
        self._divisor = None
        current.complete(carried)
        self._hand_out(current, defers=defers, drops=broke_off and defers)  # nobody is told yet
        if current.keeps_graph and any(current.calls):
            warnings.warn(WITHOUT_GRAPH, stacklevel=2)

    def _hand_out(self, current: BackwardPass, *, defers: bool, drops: bool = False) -> None:
        if self.slot.hook is not None:  # on gloo PowerSGD issues some collectives late, from other threads
            with self.slot.minding():
                current.launched.drain()
        report = current.report(self.group)
        checks_first = current.is_empty or (not defers and (self.checks_first or current.asks_for_use))
        if checks_first:
            current.launched.check(report)
        used = report.read_used() if current.asks_for_use else []
        unused = [not flag for flag in used] or self.history.unused or [False] * len(self.params)
        with self.slot.minding():
            if drops:
                for bucket, _ in current.launched.results(report):
                    if bucket.storage.as_views:  # other gradients are left alone
                        bucket.storage.flat.zero_()
            else:
                current.give(unused, report)
        history, calls, order = self.history, current.calls, current.order
        if current.is_empty:  # its own pass would have been like those of the others
            calls, order = [int(flag) for flag in used], history.last_order
            if current.kind == "some" and not order:
                order = [index for index, flag in enumerate(used) if flag]
        history.conclude(calls, order, unused, len(current.launched), self.options)
        if defers:
            report.put_off()
            self._unread.append(report)
        elif not checks_first:
            report.check()

    @torch.no_grad()
    def shadow(self) -> None:
        """Join one backward pass of the others, with zeros, for ``Join``; ReductionError if a rank failed."""
        self.check_finished()
        self.rebuild()
        self._divisor = None
        index_lists = [bucket.indices for bucket in self.assignment.buckets]
        zeros = self._reduced.whole_buckets(index_lists, self.options, adopt=False)
        assignment = replace(self.assignment, buckets=zeros)
        current = self._new_pass(assignment, 1.0, in_join=True)
        with shadowed_pass():  # other ranks end theirs behind the report too
            current.launch_zeros(self.history.last_order)
            self._hand_out(current, defers=False)
        current.give_back(drops=False)
