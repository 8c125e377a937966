"""The systems: each wraps, clips, accumulates, freezes, saves and loads as its documentation says."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from importlib import import_module
from pathlib import Path
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import clip_grad_norm_
from torch.optim.lr_scheduler import ExponentialLR

from conform.loops import GAMMA, Loop
from conform.model import SIZE, Tower, batch, loss_of
from conform.trials import Trial


class System:
    """A model, its optimizer, and what a loop does with them. This one is DDP with the plain optimizer."""

    title: ClassVar[str] = "DDP"
    package: ClassVar[str] = "torch"
    dtype: ClassVar[torch.dtype] = torch.float64
    takes_closures: ClassVar[bool] = True
    lacks: ClassVar[dict[str, str]] = {}  # loops that it has no documented way for, and why

    def __init__(self, trial: Trial, loop: Loop, model: Tower) -> None:
        self.trial = trial
        self.loop = loop
        self.module = model
        self.model: Any = model
        self.optimizer: Any = None
        self.scheduler: Any = None
        self.build(trial.optimizer_class)
        if loop.two_groups and self.scheduler is None:
            self.schedule_with(self.optimizer)

    def build(self, optimizer_class: Callable[..., Any]) -> None:
        self.wrap()
        self.optimizer = optimizer_class(self.groups(), **self.trial.options)

    def schedule_with(self, optimizer: Any) -> None:
        self.scheduler = ExponentialLR(optimizer, GAMMA)

    def groups(self) -> list[Any]:
        return self.trial.groups(self.module, two=self.loop.two_groups)

    def wrap(self) -> None:
        # A frozen parameter has no gradient, which DDP has to be told.
        self.model = DistributedDataParallel(self.module, find_unused_parameters=self.loop.is_frozen_late)

    # ------------------------------------------------------------------ an update

    def gradients(self, step: int, scaler: Any = None) -> Tensor:
        """Compute the gradients of a step, and return the mean loss of all ranks."""
        total = torch.zeros((), dtype=self.dtype)
        for part in range(self.loop.passes):
            with self.part(part == self.loop.passes - 1):
                inputs, targets = batch(self.trial.feed, self.dtype, dist.get_rank(), step, part)
                loss = loss_of(self.model(inputs), targets) * self.loop.factor(dist.get_rank(), step)
                total += loss.detach() / self.loop.passes
                self.backward(loss, scaler)
        if self.trial.closure and not self.loop.missing:  # a rank without inputs would not take part
            dist.all_reduce(total)
        return total / SIZE

    def backward(self, loss: Tensor, scaler: Any) -> None:
        loss = loss / self.loop.passes
        (loss if scaler is None else scaler.scale(loss)).backward()

    def part(self, is_last: bool) -> AbstractContextManager[None]:
        """Return the context of one pass of several that accumulate."""
        context: AbstractContextManager[None] = nullcontext() if is_last else self.model.no_sync()
        return context

    def clip(self, max_norm: float) -> float:
        return float(clip_grad_norm_(self.model.parameters(), max_norm))

    def step(self, closure: Callable[[], Tensor] | None = None) -> None:
        self.optimizer.step() if closure is None else self.optimizer.step(closure)

    def zero_grad(self) -> None:
        self.optimizer.zero_grad()

    def schedule(self) -> None:
        if self.scheduler is not None:
            self.scheduler.step()

    # ------------------------------------------------------------------ around updates

    def scaler(self) -> Any:
        return torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=3)

    def joined(self) -> AbstractContextManager[None]:
        """Return the context for uneven inputs."""
        several = [self.model, self.optimizer] if hasattr(self.optimizer, "join_hook") else [self.model]
        context: AbstractContextManager[None] = Join(several)
        return context

    def trainable_changed(self) -> None:
        """Say that parameters were frozen or unfrozen."""

    def set_mode(self, name: str) -> None:
        """Call train() or eval() of the optimizer, if its class has it."""
        inner = self.trial.optimizer_class
        if isinstance(inner, type) and hasattr(inner, name):
            getattr(self.optimizer, name)()

    def save(self, folder: Path) -> None:
        if dist.get_rank() == 0:
            state = {"model": self.module.state_dict(), "optimizer": self.optimizer.state_dict()}
            torch.save(state, folder / "all.pt")
        dist.barrier()

    def load(self, folder: Path) -> None:
        state = torch.load(folder / "all.pt", weights_only=False)
        self.module.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])

    def weights(self) -> list[Tensor]:
        return [param.detach().clone() for param in self.module.parameters()]


class Reference(System):
    """One process: the mean of the gradients that the ranks would have.

    Args:
        trial, loop, model: as for every system.
        noise: relative, of each gradient; it shows how much the class makes of rounding.
        seed: of the noise.
        by_pass: whether the ranks' gradients are added up in each pass, not after the last one.
    """

    title = "unsharded"

    def __init__(
        self,
        trial: Trial,
        loop: Loop,
        model: Tower,
        *,
        noise: float = 0.0,
        seed: int = 0,
        by_pass: bool = False,
    ) -> None:
        self.noise = noise
        self.by_pass = by_pass
        self.generator = torch.Generator().manual_seed(seed)
        self.dtype = next(model.parameters()).dtype  # type: ignore[misc]
        super().__init__(trial, loop, model)

    def wrap(self) -> None:
        pass

    def gradients(self, step: int, scaler: Any = None) -> Tensor:
        params = [param for param in self.module.parameters() if param.requires_grad]
        sums: list[Tensor | None] = [None] * len(params)
        total = torch.zeros((), dtype=self.dtype)
        ranks = [rank for rank in range(SIZE) if step < self.loop.num_steps(rank)]
        passes = range(self.loop.passes)
        of_ranks = [[(rank, part) for part in passes] for rank in ranks]
        of_passes = [[(rank, part) for rank in ranks] for part in passes]
        for portion in of_passes if self.by_pass else of_ranks:
            self.zero_grad()
            for rank, part in portion:
                inputs, targets = batch(self.trial.feed, self.dtype, rank, step, part)
                loss = loss_of(self.model(inputs), targets) * self.loop.factor(rank, step)
                total += loss.detach() / self.loop.passes
                self.backward(loss, scaler)
            own = [None if param.grad is None else param.grad / SIZE for param in params]
            sums = [
                one if other is None or one is None else other + one
                for one, other in zip(own, sums, strict=True)
            ]
        for param, grad in zip(params, sums, strict=True):
            param.grad = grad if grad is None else self._with_noise(grad)
        return total / SIZE

    def _with_noise(self, grad: Tensor) -> Tensor:
        if not self.noise or grad.is_sparse:
            return grad * (1 + self.noise)
        noise = torch.randn(grad.shape, generator=self.generator, dtype=torch.float64)
        return grad * (1 + self.noise * noise).to(grad.dtype)

    def joined(self) -> AbstractContextManager[None]:
        return nullcontext()


class TorchZeRO(System):
    """DDP and torch.distributed.optim.ZeroRedundancyOptimizer."""

    title = "DDP + ZeRO"

    def build(self, optimizer_class: Any) -> None:
        from torch.distributed.optim import ZeroRedundancyOptimizer

        self.wrap()
        self.optimizer = ZeroRedundancyOptimizer(self.groups(), optimizer_class, **self.trial.options)

    def save(self, folder: Path) -> None:
        self.optimizer.consolidate_state_dict(to=0)
        super().save(folder)


class FSDP2(System):
    """fully_shard on each block and the model, and the plain optimizer."""

    title = "FSDP2"
    lacks: ClassVar[dict[str, str]] = {"uneven": "it takes no part in Join"}

    def wrap(self) -> None:
        from torch.distributed.fsdp import fully_shard

        for block in self.module.blocks:
            fully_shard(block)
        fully_shard(self.module)

    @contextmanager
    def part(self, is_last: bool) -> Iterator[None]:
        self.model.set_requires_gradient_sync(is_last)
        yield

    def clip(self, max_norm: float) -> float:
        norm: Any = clip_grad_norm_(self.model.parameters(), max_norm)
        return float(norm.full_tensor())

    def save(self, folder: Path) -> None:
        from torch.distributed.checkpoint.state_dict import get_state_dict

        dcp: Any = import_module("torch.distributed.checkpoint")
        weights, state = get_state_dict(self.model, self.optimizer)
        dcp.save({"model": weights, "optimizer": state}, checkpoint_id=folder)

    def load(self, folder: Path) -> None:
        from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

        dcp: Any = import_module("torch.distributed.checkpoint")
        weights, state = get_state_dict(self.model, self.optimizer)
        both: dict[str, Any] = {"model": weights, "optimizer": state}
        dcp.load(both, checkpoint_id=folder)
        states = {"model_state_dict": both["model"], "optim_state_dict": both["optimizer"]}
        set_state_dict(self.model, self.optimizer, **states)

    def weights(self) -> list[Tensor]:
        params: list[Any] = list(self.model.parameters())
        return [param.full_tensor().detach().clone() for param in params]


class FairScaleOSS(System):
    """DDP and FairScale's OSS."""

    title = "FairScale OSS"
    package = "fairscale"
    dtype = torch.float32  # its clipping takes no other
    lacks: ClassVar[dict[str, str]] = {"uneven": "it takes no part in Join"}

    def build(self, optimizer_class: Callable[..., Any]) -> None:
        from fairscale.optim import OSS  # type: ignore[import-not-found]

        self.optimizer = OSS(self.groups(), optim=optimizer_class, **self.trial.options)
        self.wrap()

    def clip(self, max_norm: float) -> float:
        return float(self.optimizer.clip_grad_norm(max_norm))

    def trainable_changed(self) -> None:
        self.optimizer.refresh_trainable()

    def save(self, folder: Path) -> None:
        self.optimizer.consolidate_state_dict(recipient_rank=0)
        super().save(folder)


class FairScaleSharded(FairScaleOSS):
    """FairScale's ShardedDataParallel and OSS."""

    title = "FairScale ShardedDDP"
    lacks: ClassVar[dict[str, str]] = {
        "uneven": "it takes no part in Join",
        "scaler": "its ShardedGradScaler is for CUDA",
    }

    def wrap(self) -> None:
        from fairscale.nn import ShardedDataParallel  # type: ignore[import-not-found]

        self.model = ShardedDataParallel(self.module, self.optimizer)

    def trainable_changed(self) -> None:
        pass  # it looks by itself: auto_refresh_trainable

    def zero_grad(self) -> None:
        self.model.zero_grad(set_to_none=True)
