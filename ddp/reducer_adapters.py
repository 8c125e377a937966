"""Our reducer behind the method names by which PyTorch's class knows its own, and its logger."""

from dataclasses import dataclass
from typing import Any, NoReturn

import torch
import torch.distributed as dist

from zero_optim.compat.autograd import eager
from zero_optim.compat.streams import HostCopy, is_asynchronous
from zero_optim.ddp.reducer.reducer import Reducer

# PyTorch's names of methods that ours have under another name.
_OWN_NAMES = {
    "_check_reducer_finalized": "check_finished",
    "_remove_autograd_hooks": "close",
    "_reset_state": "reset",
    "_set_static_graph": "set_static_graph",
    "_update_process_group": "use_group",
    "prepare_for_backward": "prepare",  # though the last forward pass was under ``no_sync``
}


@dataclass(slots=True, eq=False)
class TorchReducerAdapter:
    """Our reducer under the method names by which PyTorch's class, and Lightning, know PyTorch's."""

    own: Reducer
    num_forwards: int = 0  # whose gradients are reduced

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401 - a method
        if name in _OWN_NAMES:
            return getattr(self.own, _OWN_NAMES[name])
        raise AttributeError(
            f"PyTorch {torch.__version__} asks the reducer for {name}, which that of zero_optim.ddp does not "
            "have: leave out the option or method of DistributedDataParallel that needs it"
        )

    @eager
    def prepare_for_forward(self) -> None:
        """Begin an iteration."""
        self.num_forwards += 1
        self.own.begin_forward()

    @eager
    def _rebuild_buckets(self) -> bool:
        return self.own.rebuild()

    @eager
    def _set_forward_pass_work_handle(self, work: dist.Work, use_static_world_size: bool) -> None:
        size = dist.get_world_size(self.own.group.process_group)
        counting = self.own.group.begin_work("ranks that have not joined").take(work)

        def count() -> HostCopy:
            counting.wait()
            return HostCopy(work.get_future().wait()[0])

        # On a GPU the copy is asked for before the forward pass is: so the CPU does not wait for that.
        copied = count() if is_asynchronous(self.own.params[0].device) and not use_static_world_size else None

        def divisor() -> float:
            if use_static_world_size:
                counting.wait()
                return size
            return float((count() if copied is None else copied).read().item())

        self.own.divide_by(divisor)

    def _set_manual_finalization_required(self, required: bool) -> None:
        if required:
            self._finalize_backward_manual()

    def _finalize_backward_manual(self) -> NoReturn:
        raise RuntimeError(
            "a backward pass of zero_optim.ddp ends by itself, with all gradients reduced: leave "
            "require_manual_backward_finalization False and finalize_backward() out, or use PyTorch's "
            "DistributedDataParallel"
        )

    def _ignore(self, *_: object) -> None:
        """Do nothing: the order is agreed when buckets are rebuilt, and no statistics are sampled."""

    _push_all_rebuilt_params = _set_ddp_runtime_logging_sample_rate = _ignore


class TorchLoggerAdapter:
    """The methods of PyTorch's logger that its class calls; they do nothing."""

    def _ignore(self, *_: object) -> None: ...

    set_runtime_stats_and_log = set_error_and_log = _set_static_graph = _set_uneven_input_join = _ignore
