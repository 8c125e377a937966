"""The stages, options and loops of the table of parity, and a run of them."""

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.join import Join, Joinable
from torch.nn.parallel import DistributedDataParallel as TorchDdp
from torch.optim import lr_scheduler

from cuts import cutting
from meshes import mesh_of
from on_device import current_device
from parity_models import MODELS
from parity_reference import ByHand, InRankOrder
from training import HAS_MUON
from zero_optim import ZeroRedundancyOptimizer
from zero_optim.ddp import DistributedDataParallel, FullyShardedDataParallel, ShardedDataParallel
from zero_optim.hooks import zero_step

STEPS = 4
CAP_MB = 0.002  # several buckets


@dataclass(frozen=True)
class Stage:
    """Who holds what, and when it is reduced, stepped and gathered.

    Args:
        wrapper: around the model.
        hook: makes a comm hook of the optimizer.
        packed: parameters are copied into buckets, not views of them.
        lazy: modules wait for gathers.
        plain: the optimizer is `ByHand`.
        to_owners: gradients are summed on their owners, in the order of ranks.
        inline: the CPU stands for an accelerator, so that no thread steps.
        of_wrapper: arguments of the wrapper.
        later: the optimizer is built after the wrapper.
        on_request: for rows that are named, not for those in which all pairs meet.
    """

    wrapper: Any
    hook: Callable[[ZeroRedundancyOptimizer], Any] | None = None
    packed: bool = False
    lazy: bool = False
    plain: bool = False
    to_owners: bool = False
    inline: bool = False
    of_wrapper: dict[str, Any] = field(default_factory=dict)
    later: bool = False
    on_request: bool = False

    @property
    def shards(self) -> bool:
        return issubclass(self.wrapper, (ShardedDataParallel, FullyShardedDataParallel))

    @property
    def overlaps(self) -> bool:
        return self.hook is not None


FULLY: dict[str, dict[str, Any]] = {
    "lazy": {"lazy": True},
    "units stay": {"of_wrapper": {"reshard_after_forward": False}},
    "two units stay": {"of_wrapper": {"reshard_after_forward": 2}},
    "wrapped first": {"later": True},
}
STAGES = {
    "packed": Stage(TorchDdp, packed=True),
    "views": Stage(TorchDdp),
    "lazy": Stage(DistributedDataParallel, lazy=True),
    "our DDP alone": Stage(DistributedDataParallel, plain=True),
    "overlap": Stage(DistributedDataParallel, zero_step),
    "overlap, torch's DDP": Stage(TorchDdp, zero_step, packed=True),
    "overlap at the end": Stage(
        DistributedDataParallel, lambda o: zero_step(o, interleave=False), on_request=True
    ),
    "overlap, no thread": Stage(DistributedDataParallel, zero_step, inline=True),
    "overlap, lazy": Stage(DistributedDataParallel, zero_step, lazy=True, inline=True),
    "overlap, no thread, torch's DDP": Stage(TorchDdp, zero_step, inline=True),
    "gradients": Stage(ShardedDataParallel, to_owners=True),
    "gradients, lazy": Stage(ShardedDataParallel, lazy=True, packed=True, to_owners=True),
    "fully": Stage(FullyShardedDataParallel, to_owners=True),
    **{
        f"fully, {how}": Stage(FullyShardedDataParallel, to_owners=True, on_request=True, **given)
        for how, given in FULLY.items()
    },
}


@dataclass(frozen=True)
class Option:
    """What is asked for besides.

    Args:
        of_optimizer: arguments of the optimizer, with its class.
        of_wrapper: arguments of the wrapper.
        dtype: of the model.
        size: number of ranks.
        kind: "cuts", "mesh", "hosts", "classes" or "trained alone"; what needs more than arguments.
        on_request: for rows that are named, not for those in which all pairs meet.
    """

    of_optimizer: dict[str, Any] = field(default_factory=dict)
    of_wrapper: dict[str, Any] = field(default_factory=dict)
    dtype: torch.dtype = torch.float32
    size: int = 2
    kind: str = ""
    on_request: bool = False


OPTIONS = {
    "plain": Option(),
    "one rank": Option(size=1),
    "four ranks": Option(size=4),
    "mesh": Option(size=4, kind="mesh"),
    "cuts": Option(kind="cuts"),
    "cuts, four ranks": Option(size=4, kind="cuts", on_request=True),
    "masters": Option({"master_dtype": torch.float32}, dtype=torch.bfloat16),
    "cuts, masters, averages": Option(
        {"master_dtype": torch.float32, "ema_decay": 0.5}, dtype=torch.bfloat16, kind="cuts"
    ),
    "gradients as views": Option(of_wrapper={"gradient_as_bucket_view": True}),
    "static graph": Option(of_wrapper={"static_graph": True}),
    "hosts": Option(size=4, kind="hosts", on_request=True),
    "two classes": Option(kind="classes"),
    "fused, one bucket": Option({"fused": True, "bucket_cap_mb": 25.0}, {"bucket_cap_mb": 25.0}),
    "momentum, averages": Option(
        {
            "optimizer_class": torch.optim.SGD,
            "momentum": 0.9,
            "nesterov": True,
            "weight_decay": 0.01,
            "ema_decay": 0.9,
        }
    ),
    "optimizer without the base": Option(kind="trained alone", on_request=True),
    "foreach": Option({"foreach": True, "amsgrad": True}, on_request=True),
    "capturable": Option({"capturable": True}, on_request=True),
    "Adafactor": Option({"optimizer_class": torch.optim.Adafactor}, on_request=True),
    "Adagrad": Option({"optimizer_class": torch.optim.Adagrad}, on_request=True),
}


def groups_of(net: nn.Module, option: Option) -> Any:
    if option.kind != "classes":
        return [p for p in net.parameters() if p.requires_grad or option.kind != "trained alone"]
    for_matrices = torch.optim.Muon if HAS_MUON else torch.optim.Adafactor
    is_matrix = {p: p.dim() == 2 and not p.is_complex() for p in net.parameters()}
    matrices = [p for p in is_matrix if is_matrix[p]]
    others = [p for p in is_matrix if not is_matrix[p]]
    groups = [
        {"params": matrices, "optimizer_class": for_matrices, "lr": 0.02},
        {"params": others, "betas": (0.5, 0.6)},
    ]
    return [group for group in groups if group["params"]]


class Row(NamedTuple):
    """One run, by the names in the four tables."""

    stage: str
    model: str
    loop: str
    option: str

    def __str__(self) -> str:
        return " | ".join(self)


@dataclass
class Run:
    """A wrapped model in training, and what it answered."""

    model: Any
    net: Any
    optimizer: Any
    dtype: torch.dtype
    answers: list[Any] = field(default_factory=list)

    @classmethod
    def of(cls, row: Row, stage: Stage) -> "Run":
        option = OPTIONS[row.option]
        torch.manual_seed(0)
        net = MODELS[row.model]()
        if option.dtype != torch.float32:
            net.to(option.dtype)
        of_optimizer = {"lr": 0.01, "optimizer_class": torch.optim.AdamW, **option.of_optimizer}
        if row.model == "sparse":
            of_optimizer["optimizer_class"] = torch.optim.SGD
        mesh = mesh_of(2) if option.kind == "mesh" else None
        model = cls.wrapped(row, stage, net, None, mesh) if stage.later else None
        groups = groups_of(net, option)
        if stage.plain:
            of_optimizer.pop("bucket_cap_mb", None)
            optimizer = ByHand(groups, **of_optimizer)
        else:
            of_optimizer = {
                "bucket_cap_mb": CAP_MB,
                "parameters_as_bucket_view": not stage.packed,
                **of_optimizer,
            }
            group = mesh["shard"].get_group() if mesh and not stage.later else None
            with cutting() if option.kind == "cuts" else nullcontext():
                optimizer = ZeroRedundancyOptimizer(groups, process_group=group, **of_optimizer)
        model = model or cls.wrapped(row, stage, net, optimizer, mesh)
        if stage.hook is not None:
            hook = stage.hook(optimizer)
            model.register_comm_hook(None, hook)
        if stage.lazy:
            optimizer.gather_lazily(net)
        return cls(model, net, optimizer, option.dtype)

    @staticmethod
    def wrapped(row: Row, stage: Stage, net: Any, optimizer: Any, mesh: Any) -> Any:
        option, loop = OPTIONS[row.option], LOOPS[row.loop]
        options = {"bucket_cap_mb": CAP_MB, **option.of_wrapper, **stage.of_wrapper}
        if row.model == "unused" or loop.leaves_out:
            options["find_unused_parameters"] = True
        if row.model == "complex":
            options["init_sync"] = False  # PyTorch 2.8 cannot broadcast them on gloo
        if stage.wrapper is InRankOrder:
            return InRankOrder(net, 2 if option.kind in ("mesh", "hosts") else 1, loop.adds_on_owners)
        if not stage.shards:
            return stage.wrapper(net, **options)
        options["accumulate"] = "local" if loop.skips_syncs else "owner"
        options["mesh"] = mesh
        options.pop("bucket_cap_mb")
        if stage.wrapper is FullyShardedDataParallel:
            options["units"] = [*net.blocks] if hasattr(net, "blocks") else "auto"
        return stage.wrapper(net, optimizer, **options)

    def batch(self, step: int) -> Tensor:
        generator = torch.Generator().manual_seed(1000 * step + dist.get_rank())
        return torch.randn(4, 8, generator=generator).to(self.dtype)

    def loss(self, step: int) -> Tensor:
        loss: Tensor = self.model(self.batch(step)).float().square().mean()
        self.answers.append(loss.item())
        return loss

    def clip(self, norm: float, norm_type: float = 2.0) -> None:
        if isinstance(self.optimizer, ByHand):
            params = [p for group in self.optimizer.param_groups for p in group["params"]]
            found = nn.utils.clip_grad_norm_(params, norm, norm_type)
        else:
            clips = self.model if hasattr(self.model, "clip_grad_norm_") else self.optimizer
            found = clips.clip_grad_norm_(norm, norm_type)
        self.answers.append(found.item())


def ordinary(run: Run) -> None:
    """Gradients are set to None or to zero; there is an evaluation in the middle."""
    for step in range(STEPS):
        run.optimizer.zero_grad(set_to_none=step % 3 != 2)
        loss = run.loss(step)
        if step == 2:
            run.net.eval()
            with torch.no_grad():
                run.loss(99)
            run.net.train()
        loss.backward()
        run.optimizer.step()


def clipped(run: Run) -> None:
    for step, norm_type in enumerate((2.0, float("inf"), 1.0, 2.0)):
        run.optimizer.zero_grad()
        run.loss(step).backward()
        run.clip(0.01, norm_type)
        run.optimizer.step()


def clipped_by_value(run: Run) -> None:
    for step in range(STEPS):
        run.optimizer.zero_grad(set_to_none=False)
        run.loss(step).backward()
        nn.utils.clip_grad_value_(run.model.parameters(), 0.003)
        run.optimizer.step()


def with_no_sync(run: Run) -> None:
    """Gradients are set to None before the forward pass, or between it and the backward pass."""
    for step in range(3):
        if step % 2 == 0:
            run.optimizer.zero_grad()
        with run.model.no_sync():
            loss = run.loss(3 * step)
            if step % 2:
                run.optimizer.zero_grad()
            loss.backward()
            run.loss(3 * step + 1).backward()
        run.loss(3 * step + 2).backward()
        run.optimizer.step()


def adding(run: Run) -> None:
    """Gradients stay, and later ones are added to them."""
    for step in range(STEPS):
        if step % 2:
            run.optimizer.zero_grad(set_to_none=step == 1)
        run.loss(step).backward()
        run.optimizer.step()


def scaled(run: Run) -> None:
    """In the third step one rank has an infinity, and all skip it."""
    scaler = torch.amp.GradScaler(current_device().type, init_scale=64.0, growth_interval=2)
    for step in range(STEPS + 1):
        run.optimizer.zero_grad()
        loss = run.loss(step)
        if step == 2 and dist.get_rank() == 1:
            loss = loss * float("inf")
        scaler.scale(loss).backward()
        if step % 2:
            scaler.unscale_(run.optimizer)
            run.clip(0.05)
        scaler.step(run.optimizer)
        scaler.update()
        run.answers.append(scaler.get_scale())


def with_closures(run: Run) -> None:
    for step in range(STEPS):

        def closure(step: int = step) -> float:
            assert torch.is_grad_enabled()
            run.optimizer.zero_grad()
            loss = run.loss(step)
            loss.backward()
            return loss.item()

        with torch.no_grad():
            run.answers.append(run.optimizer.step(closure))


def scheduled(run: Run) -> None:
    """A schedule moves rates; what is saved is loaded again."""
    rates = [0.1, 0.2][: len(run.optimizer.param_groups)]
    schedule = lr_scheduler.OneCycleLR(run.optimizer, rates, total_steps=6, cycle_momentum=False)
    for step in range(STEPS):
        run.optimizer.zero_grad()
        run.loss(step).backward()
        run.optimizer.step()
        schedule.step()
        run.answers.append([group["lr"] for group in run.optimizer.param_groups])
        if step == 1 and not isinstance(run.optimizer, ByHand):
            run.optimizer.consolidate_state_dict(to=None)
            run.optimizer.load_state_dict(run.optimizer.state_dict())


def freezing(run: Run) -> None:
    """Some of what trained is frozen for two steps; a group is added whose gradients no wrapper knows."""
    params = [p for p in run.net.parameters() if p.requires_grad][2::3]
    extra = nn.Parameter(torch.ones(5))
    for step in range(STEPS):
        if step == 1:
            run.optimizer.add_param_group({"params": [extra], "lr": 0.1})
        for p in params:
            p.requires_grad_(step in (0, 3))
        run.optimizer.zero_grad()
        run.loss(step).backward()
        extra.grad = torch.full((5,), 0.5)
        run.optimizer.step()
    run.answers.append(extra.tolist())


def joined(run: Run) -> None:
    """Rank 1 has more inputs than the others, in each of two epochs; in the second there is a closure.

    Gradients of the last step are zeros, which a rank that has joined cannot see. A schedule runs on the
    active ranks.
    """
    schedule = lr_scheduler.ExponentialLR(run.optimizer, 0.8)
    for epoch in range(2):
        with Join([part for part in (run.model, run.optimizer) if isinstance(part, Joinable)]):
            for step in range(3 if dist.get_rank() == 1 else 1):

                def compute(step: int = 10 * epoch + step) -> Tensor:
                    run.optimizer.zero_grad()
                    loss = run.loss(step) * float(step % 10 < 2)
                    loss.backward()
                    return loss

                if epoch:
                    assert run.optimizer.step(compute) is not None
                    schedule.step()
                else:
                    compute()
                    run.optimizer.step()


def through_twice(run: Run) -> None:
    """Two backward passes go through one graph."""
    for step in range(STEPS):
        run.optimizer.zero_grad()
        loss = run.loss(step)
        loss.backward(retain_graph=True)
        run.optimizer.zero_grad()
        (loss * 0.5).backward()
        run.optimizer.step()


@dataclass(frozen=True)
class Loop:
    """A kind of loop.

    Args:
        train: it.
        leaves_out: some parameters have no gradient in some passes.
        skips_syncs: passes are added up on each rank before they are reduced.
        adds_on_owners: with sharded gradients, each pass is reduced and then added.
        clips: it reads or changes gradients between the backward pass and the step.
    """

    train: Callable[[Run], None]
    leaves_out: bool = False
    skips_syncs: bool = False
    adds_on_owners: bool = False
    clips: bool = False


LOOPS = {
    "ordinary": Loop(ordinary),
    "clipped": Loop(clipped, clips=True),
    "clipped by value": Loop(clipped_by_value, clips=True),
    "no_sync": Loop(with_no_sync, skips_syncs=True),
    "adding": Loop(adding, adds_on_owners=True),
    "GradScaler": Loop(scaled, clips=True),
    "closure": Loop(with_closures),
    "scheduled": Loop(scheduled),
    "freezing": Loop(freezing, leaves_out=True),
    "Join": Loop(joined),
    "graph gone through twice": Loop(through_twice),
}
