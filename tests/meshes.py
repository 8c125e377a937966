"""Meshes of the ranks that a test has."""

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh


def mesh_of(replicas: int) -> DeviceMesh:
    """A mesh of so many replicas, of as many ranks each."""
    size = dist.get_world_size()
    return init_device_mesh("cpu", (replicas, size // replicas), mesh_dim_names=("replicate", "shard"))
