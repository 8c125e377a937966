"""Where a case runs: its device and process group, and what makes a run repeatable there."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import Parameter
from torch.nn.modules import module as every_module

from on_device import on_device
from sync_calls import cpu_as_accelerator

Figures: TypeAlias = dict[str, float | str]
MOST_SECONDS = 40.0  # for one case on a GPU


class NotHere(Exception):
    """A case that cannot be tried here; raised on every rank. The message is the reason."""


@dataclass(frozen=True, slots=True)
class Setup:
    """A process group to run cases in; on the CPU gloo takes the place of NCCL."""

    name: str  # in the table
    backend: str  # "gloo" or "nccl"
    num_ranks: int
    num_cards: int = 1  # rank r uses card r modulo this

    def missing(self, device_type: str) -> str:
        """Say why it cannot be had, in words; empty if it can."""
        if device_type == "cpu":
            return "" if self.num_cards == 1 else "the CPU has no cards"
        if self.backend == "nccl" and not dist.is_nccl_available():
            return "this PyTorch has no NCCL"
        count = torch.cuda.device_count()
        return "" if count >= self.num_cards else f"needs {self.num_cards} cards, there is {count}"


@dataclass(frozen=True, slots=True)
class Here:
    """Where a case runs."""

    device: torch.device  # of this rank
    backend: str  # of the default group
    folder: Path  # of this case, empty at first, the same one for all ranks and phases
    store: Path  # not used yet, for a process group's store
    kept: Path | None = None  # where a trace is kept

    @property
    def is_cuda(self) -> bool:
        """Whether it is a GPU; else a case leaves out what only a GPU has."""
        return self.device.type == "cuda"

    def sleep(self, milliseconds: float = 2.0) -> None:
        """Keep the current stream busy: work that does not wait for it reads or writes too early."""
        if self.is_cuda:
            torch.cuda._sleep(int(milliseconds * 1.5e6))  # in cycles; the clocks have 1.4 to 2 GHz

    def moved(self, params: list[Parameter]) -> list[Parameter]:
        """Copy parameters to the device."""
        return [Parameter(p.detach().to(self.device), requires_grad=p.requires_grad) for p in params]

    def synchronize(self) -> None:
        """Wait for the device."""
        if self.is_cuda:
            torch.cuda.synchronize(self.device)


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a rank sends back; ``not_here`` says why the case could not be tried."""

    figures: Figures
    not_here: str = ""


def on_rank(
    setup: Setup,
    device_type: str,
    paths: tuple[Path, Path, Path | None],  # of `Here`
    starts_itself: bool,  # the case makes its process group, and chooses its device, itself
    function: Callable[..., Figures | None],
    args: tuple[object, ...],
) -> Outcome:
    """Run a case on this rank; called by the pool."""
    backend = setup.backend if device_type == "cuda" else "gloo"
    device = torch.device("cpu")
    if device_type == "cuda":
        device = torch.device("cuda", dist.get_rank() % setup.num_cards)
    here = Here(device, backend, *paths)
    with repeatable(here):
        try:
            if not starts_itself:
                if here.is_cuda:
                    torch.cuda.set_device(device)
                if backend != "gloo":
                    restart(here, backend)
            figures = function(here, *args)
        except NotHere as reason:
            return Outcome({}, str(reason))
        here.synchronize()  # what still runs may fail, and belongs to this case
    return Outcome({} if figures is None else figures)


def restart(here: Here, backend: str | None, **options: Any) -> None:
    """Replace the default group by another one of the same ranks; all ranks call.

    ``backend``: None to leave it out, as a script may. ``options``: of ``init_process_group``.
    """
    rank, size = dist.get_rank(), dist.get_world_size()
    dist.barrier()  # a rank that still connects to one that has closed its end fails
    dist.destroy_process_group()
    store = dist.FileStore(str(here.store), size)  # type: ignore[attr-defined]
    limit = {"store": store, "rank": rank, "world_size": size, "timeout": timedelta(minutes=3)}
    dist.init_process_group(backend, **limit, **options)


def fake_store() -> Any:
    """Leave the default group, if this process is alone in it, and return the store of a pretended one."""
    if dist.is_initialized():
        if dist.get_world_size() > 1:
            raise NotHere("a pretended group needs a process alone")
        dist.destroy_process_group()
    try:
        from torch.testing._internal.distributed.fake_pg import FakeStore
    except ImportError as error:
        raise NotHere("this PyTorch has no fake process group") from error
    return FakeStore()


@contextmanager
def repeatable(here: Here) -> Iterator[None]:
    """Choose kernels that give the same bits in each run, and that show memory which nobody has written.

    Only warnings for the rest: an operation without such a kernel is no defect. TF32 may stay what it is, as
    both runs that are compared use it. `gpu.__main__` sets ``CUBLAS_WORKSPACE_CONFIG``.
    """
    cudnn = torch.backends.cudnn
    before = cudnn.deterministic, cudnn.benchmark
    torch.use_deterministic_algorithms(True, warn_only=True)
    cudnn.deterministic, cudnn.benchmark = True, False
    try:
        yield
    finally:
        cudnn.deterministic, cudnn.benchmark = before
        torch.use_deterministic_algorithms(False)
        if here.is_cuda:
            torch.cuda.set_sync_debug_mode("default")


def futures_work(here: Here) -> bool:
    """Whether the backend gives futures of collectives on tensors of this device; all ranks call."""
    work = dist.all_reduce(torch.ones(1, device=here.device), async_op=True)
    assert isinstance(work, dist.Work)
    try:
        value = work.get_future().wait()
    except (RuntimeError, ValueError):
        return False
    finally:
        work.wait()
    return isinstance(value, list) and isinstance(value[0], Tensor)  # a pretended group's holds nothing


def need_futures(here: Here) -> None:
    """Leave a case out where `futures_work` says no: no comm hook can work there, PyTorch's neither."""
    if not futures_work(here):
        raise NotHere(f"{here.backend} gives no futures for tensors on {here.device.type}")


@contextmanager
def asleep_on_device(here: Here) -> Iterator[None]:
    """Run a test of the CPU's suite on the device, with layers that sleep."""
    likewise = nullcontext() if here.is_cuda else cpu_as_accelerator()  # the library's code for devices
    with on_device(here.device), layers_asleep(here), likewise:
        yield


@contextmanager
def layers_asleep(here: Here, milliseconds: float = 0.2) -> Iterator[None]:
    """Have each layer's forward and backward pass begin behind a kernel that sleeps."""

    def sleep(*_: object) -> None:
        here.sleep(milliseconds)

    def sleep_on_the_way_back(_: nn.Module, __: object, output: object) -> None:
        if isinstance(output, Tensor) and output.requires_grad:
            output.register_hook(sleep)  # type: ignore[no-untyped-call]

    handles = [
        every_module.register_module_forward_pre_hook(sleep),
        every_module.register_module_forward_hook(sleep_on_the_way_back),
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
