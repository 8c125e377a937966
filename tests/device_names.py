"""Devices that this host need not have, and what groups for them say of their backends."""

from unittest import mock

import torch
from torch import Tensor

CPU, META = torch.device("cpu"), torch.device("meta")
GPU0, GPU3, XPU1 = torch.device("cuda", 0), torch.device("cuda", 3), torch.device("xpu", 1)

# What `dist.get_backend_config` says after init_process_group() with these names.
PLAIN_ON_GPU_HOST, PLAIN_ELSEWHERE = "cuda:nccl", "cpu:gloo"
NCCL, XCCL, MIXED = "cuda:nccl", "xpu:xccl", "cpu:gloo,cuda:nccl"
GLOO, MPI, CUSTOM = "cpu:gloo,cuda:gloo", "cpu:mpi,cuda:mpi", "cpu:mine,cuda:mine"


def tensor_on(device: torch.device) -> Tensor:
    return mock.Mock(spec=Tensor, device=device)
