"""What ``get_ddp_logging_data`` tells, under PyTorch's names.

Note [Logging data]
    Nothing in PyTorch reads what its own logger tells; the documentation of ``static_graph`` shows how to
    read ``can_set_static_graph``. So this tells what was chosen, among it the comm hook, and what became of
    the buckets. PyTorch's also tells measured times, orders of gradients and variables of the environment. We
    know of nobody who reads them, and on a GPU measured times cost events in each pass.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from zero_optim.ddp.reducer.reducer import Reducer


@dataclass(slots=True)
class LoggingData:
    """The two maps that PyTorch's logger gives.

    Attributes:
        strs_map: texts.
        ints_map: numbers: counts, bytes, flags.
    """

    strs_map: dict[str, str] = field(default_factory=dict)
    ints_map: dict[str, int] = field(default_factory=dict)


@dataclass(slots=True)
class LoggingSource:
    """Collects what is told about one wrapper.

    Args:
        reducer: what reduces.
        about: what is known of the wrapper at construction.
    """

    reducer: Reducer
    about: dict[str, int | str]
    _later: dict[str, int | str] = field(default_factory=dict)

    def note(self, key: str, value: int | str) -> None:
        """Add something that was learnt after construction."""
        self._later[key] = value

    def data(self) -> LoggingData:
        """Tell everything as it is now. Does not communicate."""
        reducer, group = self.reducer, self.reducer.process_group
        told: dict[str, int | str] = {
            "world_size": dist.get_world_size(group),
            "rank": dist.get_rank(group),
            "backend_name": dist.get_backend(group),
            **_about_params(reducer),
            **_about_passes(reducer),
            **self.about,
            **self._later,
        }
        texts = {key: value for key, value in told.items() if isinstance(value, str)}
        return LoggingData(texts, {key: int(value) for key, value in told.items() if key not in texts})


def _about_params(reducer: Reducer) -> dict[str, int | str]:
    sizes = ", ".join(str(bucket.nbytes) for bucket in reducer.assignment.buckets)
    told: dict[str, int | str] = {
        "num_parameter_tensors": len(reducer.params),
        "total_parameter_size_bytes": _nbytes(reducer.params),
        "dtypes": ", ".join(sorted({str(param.dtype).removeprefix("torch.") for param in reducer.params})),
        "bucket_cap_bytes": reducer.options.bucket_caps_nbytes[-1],
        "bucket_sizes": sizes,
        "find_unused_parameters": int(reducer.options.find_unused_parameters),
        "gradient_as_bucket_view": int(reducer.options.gradient_as_bucket_view),
        "static_graph": int(reducer.options.static_graph),
    }
    if reducer.history.has_rebuilt:
        told["rebuilt_bucket_sizes"] = sizes
    return told


def _about_passes(reducer: Reducer) -> dict[str, int | str]:
    history = reducer.history
    return {
        "has_rebuilt_buckets": int(history.has_rebuilt),
        "num_buckets_reduced": history.num_buckets_reduced,
        "can_set_static_graph": int(history.looks_static),
    }


def _nbytes(params: Sequence[Tensor]) -> int:
    return sum(param.numel() * param.element_size() for param in params)


def about_wrapper(wrapper: DistributedDataParallel) -> dict[str, int | str]:
    """Tell what is known of a wrapper at construction, see `LoggingSource`."""
    has_sync_bn = any(isinstance(layer, nn.SyncBatchNorm) for layer in wrapper.module.modules())
    return {
        "module_name": type(wrapper.module).__name__,
        "device_ids": ", ".join(map(str, wrapper.device_ids or [])),
        "output_device": -1 if wrapper.output_device is None else int(wrapper.output_device),
        "broadcast_buffers": int(wrapper.broadcast_buffers),
        "has_sync_bn": int(has_sync_bn),
    }
