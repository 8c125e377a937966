"""What ``get_ddp_logging_data`` tells, under PyTorch's names."""

import os
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch.distributed as dist
from torch import Tensor, nn

from zero_optim.compat.engine import num_gloo_threads
from zero_optim.ddp.reducer import Reducer

_ENVIRONMENT = {
    "master_addr": "MASTER_ADDR",
    "master_port": "MASTER_PORT",
    "torch_distributed_debug": "TORCH_DISTRIBUTED_DEBUG",
    "cuda_visible_devices": "CUDA_VISIBLE_DEVICES",
    "gloo_socket_ifname": "GLOO_SOCKET_IFNAME",
    "gloo_device_transport": "GLOO_DEVICE_TRANSPORT",
    "nccl_socket_ifname": "NCCL_SOCKET_IFNAME",
    "nccl_debug": "NCCL_DEBUG",
}


@dataclass(slots=True)
class LoggingData:
    """The two maps that PyTorch's logger gives.

    Attributes:
        strs_map: texts.
        ints_map: numbers: counts, bytes, flags, times in ns.
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
            "gloo_num_threads": num_gloo_threads(group),
            **{name: os.environ.get(variable, "N/A") for name, variable in _ENVIRONMENT.items()},
            **_about_params(reducer),
            **_about_passes(reducer),
            **self.about,
            **self._later,
            **reducer.clock.figures(),
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
        "is_multi_device_module": 0,
    }
    if reducer.history.has_rebuilt:
        told["rebuilt_bucket_sizes"] = sizes
        told["rebuilt_per_bucket_param_indices"] = "; ".join(
            " ".join(map(str, bucket.indices)) for bucket in reducer.assignment.buckets
        )
    return told


def _about_passes(reducer: Reducer) -> dict[str, int | str]:
    history = reducer.history
    unused = [param for index, param in enumerate(reducer.params) if index not in set(history.last_order)]
    return {
        "iteration": max(0, reducer.clock.num_iterations - 1),  # before the one under way, or done last
        "has_rebuilt_buckets": int(history.has_rebuilt),
        "num_buckets_reduced": history.num_buckets_reduced,
        "prev_iteration_grad_ready_order_indices": ", ".join(map(str, history.last_order)),
        "unused_parameter_size": _nbytes(unused) if history.num_passes else 0,
        "can_set_static_graph": int(history.looks_static),
    }


def _nbytes(params: Sequence[Tensor]) -> int:
    return sum(param.numel() * param.element_size() for param in params)


def has_sync_batch_norm(module: nn.Module) -> bool:
    """Whether a module holds a ``SyncBatchNorm``."""
    return any(isinstance(layer, nn.SyncBatchNorm) for layer in module.modules())
