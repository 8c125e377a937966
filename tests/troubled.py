"""What the ranks of `matrix.py` do: they come to a phase, and one of them, the last, has trouble there.

Where it has trouble is a point of the program, never a time: inside of a module, of the class's own step, or
of a function of the library that is replaced on that rank alone.
"""

import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.join import Join
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from cuts import finely_cut
from stalling import about_to_stall, note, noted, stay_away
from zero_optim import ZeroRedundancyOptimizer, checkpoint
from zero_optim.ddp import DistributedDataParallel, FullyShardedDataParallel, ShardedDataParallel
from zero_optim.hooks import zero_step

TIMEOUT = 3.0  # seconds, of each wait, where one is to pass
WIDTH = 16
PLANNED = "an error of this rank alone"
_WHEN = "when the trouble began"  # in the store


@dataclass
class Trouble:
    """What befalls this rank; the others have none."""

    failure: str = "none"
    point: str = ""
    rank: int = -1

    def strike(self, point: str) -> None:
        """Have the trouble, if this is the point, and it is of the kinds that happen at one."""
        if self.point != point or self.failure not in ("killed", "stopped", "error", "slow"):
            return
        self.point = ""
        note_time()
        if self.failure == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        elif self.failure == "stopped":
            os.kill(os.getpid(), signal.SIGSTOP)
        elif self.failure == "error":
            raise ValueError(PLANNED)
        else:
            stay_away()


TROUBLE = Trouble()  # of this process, which is forked for one cell


def note_time() -> None:
    """Tell all ranks that the trouble begins now, on the clock that the processes of a machine share."""
    note(_WHEN, repr(time.monotonic()))
    about_to_stall()


def seconds_since_trouble() -> float | None:
    """Tell how long ago it began, if it did."""
    when = noted(_WHEN)
    return None if when is None else time.monotonic() - float(when)


class Troubled(torch.optim.Adam):
    """Adam, whose step may have trouble."""

    def step(self, closure: Any = None) -> Any:
        TROUBLE.strike("step")
        return super().step(closure)


class _Gate(torch.autograd.Function):
    """The identity, whose backward pass may have trouble."""

    @staticmethod
    def forward(_: Any, value: Tensor) -> Tensor:
        return value.clone()

    @staticmethod
    def backward(_: Any, grad: Tensor) -> Tensor:  # type: ignore[override]
        TROUBLE.strike("backward")
        return grad


class Gate(nn.Module):
    """The identity, whose forward pass may have trouble, or whose backward pass."""

    def forward(self, value: Tensor) -> Tensor:
        TROUBLE.strike("forward")
        return _Gate.apply(value)


@dataclass
class Scene:
    """A rank of a run: what it has built, and where it is."""

    folder: Path
    kind: str
    timeout: float
    width: int = WIDTH
    times: int = 1
    steps: int = 0
    built: tuple[nn.Module, nn.Module, ZeroRedundancyOptimizer] = field(init=False)
    loaded: dict[str, Any] = field(default_factory=dict)
    mesh: DeviceMesh | None = None

    @property
    def model(self) -> nn.Module:
        return self.built[0]

    @property
    def wrapper(self) -> nn.Module:
        return self.built[1]

    @property
    def optimizer(self) -> ZeroRedundancyOptimizer:
        return self.built[2]

    def build(self) -> None:
        """Build all; this communicates. Each parameter has a bucket of its own, and matrices are cut."""
        model = make_model(self.width)
        if self.kind == "mesh" and self.mesh is None:
            self.mesh = init_device_mesh("cpu", (2, dist.get_world_size() // 2))
        optimizer = self.optimizer_of(model, None if self.mesh is None else self.mesh.get_group(1))
        if self.kind in ("units", "mesh"):
            wrapper: nn.Module = self.fully_sharded(model, optimizer, mesh=self.mesh)
        elif self.kind == "sharded":
            wrapper = ShardedDataParallel(model, optimizer, timeout=self.timeout)
        else:
            wrapper = DistributedDataParallel(model, timeout=self.timeout, bucket_cap_mb=1e-5)
            if self.kind == "overlapped":
                wrapper.register_comm_hook(None, zero_step(optimizer))
        self.built = model, wrapper, optimizer

    def optimizer_of(
        self, model: nn.Module, group: dist.ProcessGroup | None = None
    ) -> ZeroRedundancyOptimizer:
        """Build an optimizer with the options of this run; this communicates."""
        with finely_cut():
            return ZeroRedundancyOptimizer(
                model.named_parameters(),
                Troubled,
                lr=0.1,
                timeout=self.timeout,
                bucket_cap_mb=1e-5,
                process_group=group,
            )

    def fully_sharded(
        self, model: nn.Sequential, optimizer: ZeroRedundancyOptimizer | None, **options: Any
    ) -> nn.Module:
        """Wrap a model, each of whose layers is a unit; this communicates."""
        units = [model[0], model[2], model[3]]
        return FullyShardedDataParallel(model, optimizer, units=units, timeout=self.timeout, **options)

    def build_optimizer(self) -> None:
        """Build another model and its optimizer, without a wrapper; this communicates."""
        model = make_model(self.width)
        self.built = model, model, self.optimizer_of(model)

    def wrap(self) -> None:
        """Make the model fully sharded; this communicates."""
        self.built = self.model, self.fully_sharded(self.model, self.optimizer), self.optimizer

    def build_wrapper(self) -> None:
        """Build another model, fully sharded, that has no optimizer; this communicates."""
        model = make_model(self.width)
        self.built = model, self.fully_sharded(model, None), self.optimizer

    def build_later_optimizer(self) -> None:
        """Build the optimizer of a model that is fully sharded; this communicates."""
        self.built = self.model, self.wrapper, self.optimizer_of(self.model)

    def forward(self) -> Tensor:
        self.steps += 1
        return self.wrapper(torch.full((2, 4), float(self.steps + dist.get_rank()))).square().mean()

    def backward(self) -> None:
        self.forward().backward()

    def train(self) -> None:
        """Make one iteration."""
        self.optimizer.zero_grad()
        self.backward()
        for _ in range(self.times):
            self.optimizer.step()
        self.times = 1

    def save(self, name: str) -> None:
        checkpoint.save(self.folder / name, model=self.model, optimizer=self.optimizer, timeout=self.timeout)

    def save_async(self, name: str) -> checkpoint.PendingSave:
        return checkpoint.save_async(
            self.folder / name, model=self.model, optimizer=self.optimizer, timeout=self.timeout
        )

    def load(self, name: str) -> None:
        checkpoint.load(self.folder / name, model=self.model, optimizer=self.optimizer, timeout=self.timeout)

    def change_shape(self) -> None:
        """Give a parameter of this rank another shape, as a script may do that prunes."""
        with torch.no_grad():
            weight = self.model[0].weight
            weight.data = torch.ones(weight.shape[0] + 1, weight.shape[1])


def make_model(width: int = WIDTH) -> nn.Sequential:
    """A model of three layers, the same on every rank but for its width."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, width), Gate(), nn.Linear(width, 4), nn.Linear(4, 2))


# ---------------------------------------------------------------------- phases


@dataclass(frozen=True)
class Phase:
    """Where the trouble is: a row of the matrix."""

    call: Callable[[Scene], object]
    point: str
    kind: str = "averaged"
    before: Callable[[Scene], object] = lambda _: None
    reshape: Callable[[Scene], object] = Scene.change_shape
    after: Callable[[Scene], object] = Scene.train
    raises_alone: bool = False
    repeats_step: bool = False


def _begin_step(scene: Scene) -> None:
    scene.optimizer.zero_grad()
    scene.backward()


def _step(scene: Scene) -> None:
    scene.optimizer.step()


def _clip(scene: Scene) -> None:
    scene.optimizer.clip_grad_norm_(1.0)


def _consolidate(scene: Scene) -> None:
    scene.optimizer.consolidate_state_dict()


def _reshape_state(scene: Scene) -> None:
    param = scene.model[0].weight
    scene.optimizer.state[param]["exp_avg"] = torch.zeros(3, 3)


def _consolidate_for_all(scene: Scene) -> None:
    scene.optimizer.consolidate_state_dict(to=None)
    scene.loaded = scene.optimizer.state_dict()


def _load_state(scene: Scene) -> None:
    scene.optimizer.load_state_dict(scene.loaded)


def _reshape_loaded(scene: Scene) -> None:
    scene.loaded["state"][0]["exp_avg"] = torch.zeros(3, 3)


def _widen(scene: Scene) -> None:
    scene.width += 1


def _join(scene: Scene) -> None:
    """Every rank but the first, or but the last if the first has trouble, trains on; that one takes part."""
    ends_early = dist.get_world_size() - 1 if TROUBLE.rank == 0 else 0
    with Join([scene.wrapper, scene.optimizer]):
        for _ in range(1 if dist.get_rank() == ends_early else 3):
            scene.train()


PHASES = {
    "construction": Phase(Scene.build, "zero_optim.state.building.check_reader", reshape=_widen),
    "forward": Phase(Scene.train, "forward", raises_alone=True),
    "backward reduction": Phase(_begin_step, "backward", after=_step, raises_alone=True),
    "backward to owners": Phase(_begin_step, "backward", kind="sharded", after=_step, raises_alone=True),
    "overlap": Phase(_begin_step, "step", kind="overlapped", after=_step, raises_alone=True),
    "plain step": Phase(_step, "step", before=_begin_step, raises_alone=True),
    "clip": Phase(
        _clip, "zero_optim.step.clip._exchanged", before=_begin_step, after=_step, raises_alone=True
    ),
    "consolidate": Phase(_consolidate, "zero_optim.state.moving.CutState", reshape=_reshape_state),
    "load": Phase(lambda scene: scene.load("before"), "zero_optim.step.leaves.entries_named"),
    "load_state_dict": Phase(
        _load_state, "zero_optim.state.dicts.check_fits", before=_consolidate_for_all, reshape=_reshape_loaded
    ),
    "save": Phase(lambda scene: scene.save("during"), "zero_optim.checkpoint.saving.write_tensors"),
    "save_async": Phase(lambda scene: scene.save_async("during"), "zero_optim.checkpoint.saving.collect"),
    "background": Phase(
        lambda scene: scene.save_async("during").wait(), "zero_optim.checkpoint.saving.write_tensors"
    ),
    "Join": Phase(_join, "step", repeats_step=True, raises_alone=True),
    "fully sharded: wrapping": Phase(
        Scene.wrap, "zero_optim.ddp.full.construction.choose_units", before=Scene.build_optimizer
    ),
    "fully sharded: later optimizer": Phase(
        Scene.build_later_optimizer, "zero_optim.state.building.check_reader", before=Scene.build_wrapper
    ),
    "fully sharded: step": Phase(_step, "step", kind="units", before=_begin_step, raises_alone=True),
    "mesh: construction": Phase(Scene.build, "zero_optim.comm.mesh._table", kind="mesh", reshape=_widen),
    "mesh: step": Phase(_step, "step", kind="mesh", before=_begin_step, raises_alone=True),
}


def play(failure: str, bad: int, phase_name: str, folder: Path, timeout: float) -> None:
    """What each rank does: train, save, come to the phase; then one has its trouble."""
    phase = PHASES[phase_name]
    is_bad = dist.get_rank() == bad
    TROUBLE.rank = bad
    scene = Scene(folder, phase.kind, timeout)
    scene.build()
    scene.train()
    scene.train()
    scene.save("before")
    phase.before(scene)
    dist.barrier()
    if not is_bad:
        phase.call(scene)
    else:
        TROUBLE.failure, TROUBLE.point = failure, phase.point
        _call_with_trouble(failure, phase, scene)
    phase.after(scene)
    scene.train()
    scene.optimizer.consolidate_state_dict()


def _call_with_trouble(failure: str, phase: Phase, scene: Scene) -> None:
    times = {"skipped": 0, "extra": 2}.get(failure, 1)
    if failure in ("skipped", "extra", "shape"):
        note_time()
    if failure == "shape":
        phase.reshape(scene)
    if phase.repeats_step:
        scene.times, times = times, 1
    with _striking_in(phase.point) if "." in phase.point else nullcontext():
        for _ in range(times):
            phase.call(scene)


@contextmanager
def _striking_in(name: str) -> Iterator[None]:
    """Have trouble where a function of the library is called; named with its module."""
    module, _, function = name.rpartition(".")
    target = import_module(module)
    real = getattr(target, function)

    def replaced(*args: Any, **kwargs: Any) -> Any:
        TROUBLE.strike(name)
        return real(*args, **kwargs)

    with patch.object(target, function, replaced):
        yield
