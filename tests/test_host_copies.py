"""Copies between the host and a device, and the streams of a device; without a GPU."""

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

from device_names import CPU, GPU3, XPU1
from zero_optim.checkpoint.content import RankContent
from zero_optim.checkpoint.objects import Objects, random_state, set_random_state
from zero_optim.comm import wire
from zero_optim.compat import streams
from zero_optim.compat.memory import pinned_in_full


class Recorder:
    """A device's module, and its contexts, that say in which order they were entered and left."""

    def __init__(self) -> None:
        self.log: list[str] = []

    @contextmanager
    def _context(self, what: str) -> Iterator[None]:
        self.log.append(f"enter {what}")
        yield
        self.log.append(f"leave {what}")

    def device(self, device: torch.device) -> Any:
        return self._context(f"device {device}")

    def stream(self, stream: Any) -> Any:
        return self._context("stream")


def test_a_stream_is_used_within_its_device_so_that_a_thread_never_returns_to_device_0() -> None:
    module = Recorder()
    accelerator = streams.Accelerator(module)
    with (
        mock.patch.object(streams, "accelerator_of", return_value=accelerator),
        streams.using_stream(GPU3, SimpleNamespace(device=GPU3)),
    ):
        pass
    assert module.log == ["enter device cuda:3", "enter stream", "leave stream", "leave device cuda:3"]


def test_a_device_whose_module_has_no_streams_is_taken_for_one_that_works_in_order(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert not streams.is_asynchronous(torch.device("mps"))
    monkeypatch.setattr(torch.mps, "Stream", object, raising=False)  # as PyTorch 2.15 has one
    assert not streams.is_asynchronous(torch.device("mps"))
    assert streams.is_asynchronous(GPU3)
    given = torch.arange(6.0).reshape(2, 3).t()
    copy = streams.HostCopy(given).read()
    assert torch.equal(copy, given)
    assert (copy.stride(), copy.device) == (given.stride(), CPU)
    assert copy.data_ptr() != given.data_ptr()


class CountingAccelerator:
    """Takes the CPU for an asynchronous device; counts copies that the CPU has waited for."""

    def __init__(self) -> None:
        self.waits = 0

    def host_tensor(self, like: Tensor) -> Tensor:
        return torch.empty_like(like, device="cpu")

    @property
    def module(self) -> Any:
        return SimpleNamespace(Event=lambda: self, current_stream=lambda device: None)

    def record(self, stream: None) -> None:
        pass

    def synchronize(self) -> None:
        self.waits += 1


@contextmanager
def counting() -> Iterator[CountingAccelerator]:
    accelerator = CountingAccelerator()
    with mock.patch.object(streams, "accelerator_of", return_value=accelerator):
        yield accelerator


def test_a_save_in_the_background_pins_one_piece_at_a_time_and_keeps_ordinary_memory() -> None:
    part, pinned = RankContent(), []
    part.add(
        "state", [torch.arange(15, dtype=torch.int16).reshape(3, 5).t(), torch.arange(7.0), torch.ones(0)]
    )
    with counting() as accelerator, mock.patch.object(wire, "PIECE_NBYTES", 16):
        make = accelerator.host_tensor
        accelerator.host_tensor = lambda like: pinned.append(make(like)) or pinned[-1]  # type: ignore[method-assign]
        staged = part.staged()
    assert [tensor.nbytes for tensor in pinned] == [16, 16, 16, 10]
    assert accelerator.waits == 4
    kept = {tensor.data_ptr() for tensor in pinned}
    for key, tensor in part.tensors.items():
        assert torch.equal(tensor, staged.tensors[key])
        assert tensor.stride() == staged.tensors[key].stride()
        assert staged.tensors[key].data_ptr() not in kept


class Runtime:
    """CUDA's runtime, which notes what memory it is told of, and what it does before it forgets that."""

    def __init__(self, failure: int = 0) -> None:
        self.failure = failure
        self.log: list[object] = []

    def cudart(self) -> "Runtime":
        return self

    def cudaHostRegister(self, address: int, nbytes: int, flags: int) -> int:
        self.log.append((address, nbytes, flags))
        return self.failure

    def cudaHostUnregister(self, address: int) -> int:
        self.log.append(address)
        return 0

    def synchronize(self, device: torch.device) -> None:
        self.log.append(device)


def test_rows_on_the_host_take_pinned_memory_of_their_own_size_and_no_power_of_two() -> None:
    runtime, like = Runtime(), torch.arange(33_001, dtype=torch.bfloat16)
    accelerator: Any = streams.Accelerator(runtime)
    with mock.patch.object(streams, "accelerator_of", return_value=accelerator):
        row = streams.host_memory(like)
    address = row.data_ptr()
    assert runtime.log == [(address, 66_002, 1)]
    assert (row.shape, row.dtype, row.untyped_storage().nbytes()) == (like.shape, like.dtype, 66_002)
    view = row.copy_(like)[5:]
    del row
    assert torch.equal(view, like[5:])
    assert runtime.log[1:] == []
    del view  # nobody may copy there any more, so the device is waited for before
    assert runtime.log[1:] == [CPU, address]


def test_memory_that_the_system_cannot_pin_is_an_error_that_says_how_much_it_was() -> None:
    runtime = Runtime(failure=2)
    with pytest.raises(RuntimeError, match=r"could not pin 16 bytes .* \(CUDA error 2\): free host memory"):
        pinned_in_full(torch.ones(4), runtime)
    assert len(runtime.log) == 1  # nothing to forget


def test_the_random_state_is_that_of_the_parameters_device_not_of_the_current_one() -> None:
    cuda = {"is_available": True, "is_initialized": True, "get_rng_state": torch.zeros(16, dtype=torch.uint8)}
    with mock.patch.multiple(
        torch.cuda, **{name: mock.Mock(return_value=value) for name, value in cuda.items()}
    ):
        for device, asked in [(GPU3, GPU3), (None, torch.device("cuda")), (XPU1, torch.device("cuda"))]:
            state = random_state(device)
            torch.cuda.get_rng_state.assert_called_with(asked)  # type: ignore[attr-defined]
            with mock.patch.object(torch.cuda, "set_rng_state") as setting:
                set_random_state(state, device)
            assert setting.call_args.args[1] == asked
    assert Objects(model=nn.Linear(2, 2)).device is None
