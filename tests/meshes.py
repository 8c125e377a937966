"""Meshes of the ranks that a test has."""

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from on_device import current_device


def mesh_of(replicas: int) -> DeviceMesh:
    """A mesh of so many replicas, of as many ranks each."""
    size = dist.get_world_size()
    shape = replicas, size // replicas
    return init_device_mesh(current_device().type, shape, mesh_dim_names=("replicate", "shard"))
