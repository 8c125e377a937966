"""Our reducer and its options, behind the names by which PyTorch's class knows its own, and its logger."""

from dataclasses import dataclass
from typing import Any, NoReturn

import torch
import torch.distributed as dist

from zero_optim.compat import private
from zero_optim.compat.autograd import eager
from zero_optim.compat.streams import HostCopy, is_asynchronous
from zero_optim.ddp.reducer.assignment import ReducerOptions
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


@dataclass(frozen=True, slots=True, eq=False)
class TorchLoggerAdapter:
    """The methods of PyTorch's logger that its class calls, which do nothing; and its figures."""

    own: Reducer

    def figures(self) -> dict[str, int | str]:
        """Return a part of what PyTorch's logger has, without times."""
        reducer = self.own
        sizes = ", ".join(str(bucket.nbytes) for bucket in reducer.assignment.buckets)
        return {
            "world_size": reducer.group.size,
            "bucket_cap_bytes": reducer.options.bucket_caps_nbytes[-1],
            "bucket_sizes": sizes,
            "has_rebuilt_buckets": int(reducer.has_rebuilt),
            "num_buckets_reduced": reducer.history.num_buckets_reduced,
            "can_set_static_graph": int(reducer.history.looks_static),
            **({"rebuilt_bucket_sizes": sizes} if reducer.has_rebuilt else {}),
            **({"comm_hook": reducer.slot.name} if reducer.slot.name else {}),
            **({"static_graph": 1} if reducer.options.static_graph else {}),
        }

    def _ignore(self, *_: object) -> None: ...

    set_runtime_stats_and_log = set_error_and_log = _set_static_graph = _set_uneven_input_join = _ignore


def reducer_options(wrapper: Any, *, static_graph: bool) -> ReducerOptions:  # noqa: ANN401 - PyTorch's attributes
    """Read the options that PyTorch's constructor has set on a wrapper; some versions lack some."""
    caps = tuple(max(1, cap) for cap in getattr(wrapper, "bucket_bytes_cap_list", ()))
    limits_first = bool(caps)
    if not caps:
        first = (private.DEFAULT_FIRST_BUCKET_BYTES,) if wrapper.bucket_bytes_cap_default else ()
        caps = (*first, max(1, wrapper.bucket_bytes_cap))
    return ReducerOptions(
        bucket_caps_nbytes=caps,
        limits_first_buckets=limits_first,
        find_unused_parameters=wrapper.find_unused_parameters,
        static_graph=static_graph,
        gradient_as_bucket_view=wrapper.gradient_as_bucket_view,
        skip_all_reduce_unused_params=getattr(wrapper, "skip_all_reduce_unused_params", False),
        batched_grad_copy=getattr(wrapper, "batched_grad_copy", False),
        timeout=wrapper._timeout,
        on_stall=wrapper._on_stall,
    )
