"""The tool that finds synchronizing calls, and ordinary iterations in which there are none."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from sync_calls import cpu_as_accelerator, recorded, texts
from zero_optim.compat.streams import HostCopy

CALLS: dict[str, Callable[[Tensor], object]] = {
    "item": lambda tensor: tensor[0].item(),
    "tolist": lambda tensor: tensor.tolist(),
    "cpu": lambda tensor: tensor.cpu(),
    "numpy": lambda tensor: tensor.numpy(),
    "equal": lambda tensor: torch.equal(tensor, tensor),
    "__bool__": lambda tensor: bool(tensor[0] > 0),
    "__float__": lambda tensor: float(tensor[0]),
    "nonzero": lambda tensor: tensor.nonzero(),
    "aten.nonzero.default": torch.nonzero,
    "aten._local_scalar_dense.default": lambda tensor: tensor.add(1, alpha=tensor[0]),
    "aten.allclose.default": lambda tensor: torch.allclose(tensor, tensor),
    "aten.index.Tensor": lambda tensor: tensor[tensor > 0],
    "to('cpu')": lambda tensor: tensor.to("cpu"),
    "to(device) of memory that is not pinned": lambda tensor: torch.tensor([1.0]).to(tensor.device),
    "torch.tensor(..., device=)": lambda tensor: torch.tensor([1.0], device=tensor.device),
}


@pytest.mark.parametrize("name", CALLS)
def test_a_call_that_waits_is_found_once(name: str) -> None:
    tensor = torch.ones(3)
    with recorded() as calls:
        CALLS[name](tensor)
    assert [call.name for call in calls] == [name], texts(calls)
    assert "test_sync_calls.py" in calls[0].stack


def test_ordinary_work_is_not_taken_for_a_wait() -> None:
    model = torch.nn.Linear(3, 2)
    optimizer = torch.optim.Adam(model.parameters(), foreach=True)
    with recorded() as calls:
        model(torch.ones(1, 3)).sum().backward()
        optimizer.step()
        model.weight[torch.arange(1)].to(torch.float64)
        torch.tensor([1.0]).tolist()
    assert not calls, texts(calls)


def test_a_copy_for_the_host_waits_unless_a_backward_pass_has_begun_since() -> None:
    weight = torch.ones(3, requires_grad=True)
    with cpu_as_accelerator(), recorded() as calls:
        copy = HostCopy(weight)
        weight.sum().backward()
        assert copy.read().tolist() == [1.0] * 3
        assert not calls, texts(calls)
        HostCopy(weight).read()
    assert [call.name for call in calls] == ["Event.synchronize"]


def test_a_recording_leaves_nothing_behind() -> None:
    before = dict(vars(Tensor)), torch.tensor, torch.equal, torch.autograd.backward
    with cpu_as_accelerator(), recorded():
        pass
    assert (dict(vars(Tensor)), torch.tensor, torch.equal, torch.autograd.backward) == before
