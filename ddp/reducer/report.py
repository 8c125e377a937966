"""The ranks' report at the end of a backward pass: used parameters, and failures.

Note [Two ways to tell of a failure]
    A sum has no row of one rank, hence no place for its stamp. So a rank with incomplete gradients makes one
    element of the last bucket NaN before the sum. Ranks that read NaN in the sum gather the failures; there
    may be none. A comm hook may sum anything, and where parameters may be unused the ranks count their users
    anyway: there the counts have one more element.

Note [Late reports]
    To read a report the CPU waits, on a device with streams for the whole pass. So there all ranks read all
    but the last report when a forward pass begins, and with the first gradient of a backward pass. A failure
    of pass n raises in forward pass n + 2; the optimizer may use its gradients before. Passes in `Join`, and
    the first one of a static graph, are read at once.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from zero_optim.comm.agreement import gather_reports
from zero_optim.comm.collectives import RankGroup
from zero_optim.comm.frames import ranks_by_value, ranks_text
from zero_optim.compat.streams import HostCopy, is_asynchronous, to_device
from zero_optim.errors import ReductionError
from zero_optim.flow.pending import Pending
from zero_optim.plan.groups import names_text


class FailureReport:
    """The number of failed ranks, and the used parameters; all ranks make and read one."""

    def __init__(
        self, group: RankGroup, failure: str | None, used: Sequence[bool], *, in_last_bucket: bool = False
    ) -> None:
        self.in_last_bucket = in_last_bucket  # `read_word` comes before reading, in place of a small sum
        self.awaits_word = in_last_bucket
        self._group = group
        self._failure = failure
        self._used = used
        self._is_late = False
        self._read: Callable[[], HostCopy]  # of the word, or of the counts
        if in_last_bucket:
            return
        counts = to_device(
            torch.tensor([failure is not None, *used], dtype=torch.int32, device="cpu"), group.device
        )
        sums = [group.start_sum(counts)] if group.size > 1 else []
        self._read = Pending(sums, lambda _: HostCopy(counts)).wait

    def read_word(self, reduced: Tensor) -> None:
        """Copy the element of the last bucket's sum, before the user gets the gradients."""
        word = HostCopy(reduced[:1])
        self._read, self.awaits_word = lambda: word, False

    def put_off(self) -> None:
        """Start the copy to the CPU; `check` comes later: Note [Late reports]."""
        self._is_late = True
        if not self.in_last_bucket and is_asynchronous(self._group.device):
            self._read()

    def read_used(self) -> list[bool]:
        """Return by parameter whether any rank used it; the CPU waits, unless this rank used all."""
        if all(self._used):
            return list(self._used)
        _, *counts = self._group.read(self._read()).tolist()
        return [count > 0 for count in counts]

    def check(self) -> None:
        """Wait on the CPU; raises ReductionError on every rank if one failed."""
        first = self._group.read(self._read())[0].item()
        if first == (first if self.in_last_bucket else 0):  # no NaN, or no rank
            return
        failures, size = gather_reports(self._group, self._failure), self._group.size
        if failures:  # else a gradient was NaN
            each = "; ".join(
                f"{'every rank' if len(ranks) == size > 1 else ranks_text(ranks)}: {failure}"
                for failure, ranks in ranks_by_value(failures).items()
            )
            which = "an earlier" if self._is_late else "this"
            late = ". They were handed out: go back to a checkpoint" if self._is_late else ""
            raise ReductionError(f"the gradients of {which} backward pass cannot be used. {each}{late}")


class FailureNotes:
    """What went wrong with the gradients of one pass on this rank: texts below, each with its parameters."""

    def __init__(self, names: Sequence[str]) -> None:
        self._names = names  # of all parameters
        self._noted: dict[str, dict[str, None]] = {}  # names of parameters, by text

    def __bool__(self) -> bool:
        return bool(self._noted)

    def add(self, text: str, *indices: int) -> None:
        """Note an error about the gradients of some parameters."""
        self._noted.setdefault(text, {}).update((self._names[index], None) for index in indices)

    def has(self, index: int) -> bool:
        """Whether an error was noted about a parameter's gradient."""
        return any(self._names[index] in noted for noted in self._noted.values())

    def text(self) -> str | None:
        """Return all errors as one text, each with its parameters, or None."""
        if not self._noted:
            return None
        texts = sorted(self._noted, key=lambda text: text != BROKE_OFF)  # that comes first
        return "; ".join(text.format(names_text([*self._noted[text]])) for text in texts)


WRAPPED_ANEW = (
    "the module, or a part of it, has been wrapped anew, and its gradients are reduced by the wrapper that "
    "was made last: call that one, and drop this one"
)
IN_RPC_CONTEXT = (
    "zero_optim.ddp does not work with torch.distributed.autograd: gradients go to its context, "
    "and would not be reduced. Use torch.nn.parallel.DistributedDataParallel in a "
    "torch.distributed.autograd.context(), or leave the context out if nothing is computed by RPC"
)
WITHOUT_GRAPH = (
    "a backward pass with create_graph=True reduces the gradients, not the graph that computes them: "
    "gradients of higher order are those of this rank alone"
)
NO_SYNC_IN_JOIN = (
    "no_sync() around backward() alone cannot be used inside Join: ranks that ran out of "
    "inputs were told in forward() that this pass would be reduced. Put forward() under "
    "no_sync() too"
)
# Each text below names parameters.
BROKE_OFF = "a backward pass ended with an exception before its gradients were reduced"
NO_GRADIENT = (
    "no gradient for {}. Every parameter that requires a gradient must take part in "
    "computing the loss. If they are unused, pass find_unused_parameters=True, or static_graph=True where "
    "the same ones are unused each time; or set requires_grad=False on them before wrapping. If several "
    "losses of one forward pass are backpropagated one by one, put all but the last backward() under "
    'no_sync(), which takes accumulate="local" where gradients are sharded'
)
REPLACED = (
    "replaced after wrapping, as by an assignment or by .to('meta'): {}. Nobody reduces or steps what came "
    "in their place: change the model first, then build the optimizer and the wrapper"
)
SWAPPED = (
    "{} became another tensor after the model was wrapped, so its gradient was not reduced. "
    "torch.utils.swap_tensors does that, as do conversions and moves of a module with "
    "torch.__future__.set_swap_module_params_on_conversion(True): do them before wrapping"
)
TWICE = (
    "Expected to mark a variable ready only once. A second gradient came in one backward pass, after the "
    "first was handed to be reduced, for {}. "
    "Likely causes: reentrant activation checkpointing (use_reentrant=True) of parts that share the "
    "parameter, or that run twice; loss.backward() called inside another backward pass. Use "
    "use_reentrant=False, or static_graph=True if each iteration does the same"
)
_NOT_STATIC = (
    "this is not compatible with static_graph set to True. There were {how} gradients than in the first "
    "iteration for {{}}. Leave static_graph out, or keep the graph the same in every iteration"
)
MORE = (
    "Your training graph has changed in this iteration, e.g., one parameter is unused in first "
    "iteration, but then got used in the second iteration. " + _NOT_STATIC.format(how="more")
)
FEWER = (
    "This error indicates that your training graph has changed in this iteration, e.g., one parameter is "
    "used in first iteration, but then got unused in the second iteration. " + _NOT_STATIC.format(how="fewer")
)
LATE_GRADIENT = (
    "a gradient came for {} after that was taken for unused and reduced. The loss "
    "depends on it in a way that the output of forward() does not show: return every tensor that the "
    "loss is computed from"
)
_ON_SPARSE = (
    "Sparse gradients are known by their module, nn.Embedding or nn.EmbeddingBag with sparse=True: use one "
    "of these, and do not change its sparse"
)
SPARSE = "a sparse gradient where a dense one was expected, for {}. " + _ON_SPARSE
DENSE = "a dense gradient where a sparse one was expected, for {}. " + _ON_SPARSE
