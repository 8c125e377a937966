"""Devices that this host need not have, and what groups for them say of their backends."""

import torch

CPU = torch.device("cpu")
GPU0, GPU3, XPU1 = torch.device("cuda", 0), torch.device("cuda", 3), torch.device("xpu", 1)

# What `dist.get_backend_config` says after init_process_group() with these names.
PLAIN_ON_GPU_HOST, PLAIN_ELSEWHERE = "cuda:nccl", "cpu:gloo"
NCCL, MIXED, GLOO = "cuda:nccl", "cpu:gloo,cuda:nccl", "cpu:gloo,cuda:gloo"
