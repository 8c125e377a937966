"""The tool that finds synchronizing calls."""

from collections.abc import Callable

import torch
from torch import Tensor

from sync_calls import cpu_as_accelerator, recorded, texts
from zero_optim.compat.streams import HostCopy

CALLS: dict[str, Callable[[Tensor], object]] = {
    "item": lambda tensor: tensor[0].item(),
    "cpu": lambda tensor: tensor.cpu(),
    "nonzero": lambda tensor: tensor.nonzero(),
    "aten.nonzero.default": torch.nonzero,
    "aten._local_scalar_dense.default": lambda tensor: tensor.add(1, alpha=tensor[0]),
    "to(device) of memory that is not pinned": lambda tensor: torch.tensor([1.0]).to(tensor.device),
    "torch.tensor(..., device=)": lambda tensor: torch.tensor([1.0], device=tensor.device),
}


def test_a_call_that_waits_is_found_once() -> None:
    for name, wait in CALLS.items():
        with recorded() as calls:
            wait(torch.ones(3))
        assert [call.name for call in calls] == [name], texts(calls)


def test_a_copy_for_the_host_waits_unless_a_backward_pass_has_begun_since() -> None:
    weight = torch.ones(3, requires_grad=True)
    with cpu_as_accelerator(), recorded() as calls:
        copy = HostCopy(weight)
        weight.sum().backward()
        assert copy.read().tolist() == [1.0] * 3
        assert not calls, texts(calls)
        HostCopy(weight).read()
    assert [call.name for call in calls] == ["Event.synchronize"]
