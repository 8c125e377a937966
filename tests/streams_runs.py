"""Small training runs, each done without the model of streams and on it, with the same bits."""

import tempfile
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack, nullcontext, suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from meshes import mesh_of
from modelled import Race, Stream, StreamsModel, modelled_streams
from zero_optim import ZeroRedundancyOptimizer
from zero_optim.checkpoint import save_async
from zero_optim.ddp import (
    DistributedDataParallel,
    FullyShardedDataParallel,
    ReduceScatterBucketer,
    ShardedDataParallel,
    unsharded,
)
from zero_optim.ddp.reducer.reduction import Hook
from zero_optim.errors import ReductionError
from zero_optim.hooks import zero_step
from zero_optim.step import clip as norms

STEPS = 3
CAP_MB = 0.001  # several buckets of several parameters, so that their order matters


class Part(nn.Sequential):
    """Layers that a rank may leave unused, though they are called."""

    is_skipped = False

    def forward(self, x: Tensor) -> Tensor:
        return x * 1 if self.is_skipped else super().forward(x)


class Net(nn.Module):
    """Layers of several sizes; the middle one may be run on a stream of its own."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.first = nn.Linear(6, 12)
        self.middle = Part(nn.Linear(12, 12), nn.Tanh(), nn.Linear(12, 12))
        self.last = nn.Linear(12, 3)
        self.beside = nn.Linear(12, 12)
        self.streams: StreamsModel | None = None
        self.side: Stream | None = None
        self.recomputes: bool | None = None  # the middle part, by checkpointing that is reentrant, or not

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(x).tanh()
        if self.recomputes is not None:
            middle: Tensor = checkpoint(self.middle, hidden, use_reentrant=self.recomputes)
            hidden = middle + self.beside(hidden)
        elif self.streams is None or self.side is None:
            hidden = self.middle(hidden) + self.beside(hidden)
        else:
            branch = self.streams.on_stream(self.middle, self.side)(hidden)
            hidden = self.streams.sum(branch, self.beside(hidden))
        return self.last(hidden)


@dataclass
class Run:
    """One training run on this rank."""

    overlap: dict[str, Any] | None = None
    hook: Hook | None = None
    options: dict[str, Any] = field(default_factory=dict)
    ddp_options: dict[str, Any] = field(default_factory=dict)
    sharded: dict[str, Any] | None = None
    fully: dict[str, Any] | None = None
    lazily: bool = False
    scales: bool = False  # with a GradScaler
    accumulates: bool = False  # another pass first, in no_sync()
    is_frozen: bool = False  # but for two layers, of which one is an adapter
    replicas: int = 1  # of a mesh
    prepare: Callable[["Run"], None] = lambda run: None
    before: Callable[["Run"], None] = lambda run: None
    between: Callable[["Run"], None] = lambda run: None
    after: Callable[["Run"], None] = lambda run: None
    streams: StreamsModel | None = None
    at_end: list[Callable[[], object]] = field(default_factory=list)

    def build(self, net: Net) -> None:
        sgd = {"optimizer_class": torch.optim.SGD, "lr": 0.1, "momentum": 0.9}
        options = {"bucket_cap_mb": CAP_MB, **(sgd if "optimizer_class" not in self.options else {})}
        mesh: dict[str, Any] = {}
        if self.replicas > 1:
            mesh = {"mesh": mesh_of(self.replicas)}
            options["process_group"] = mesh["mesh"]["shard"].get_group()
        self.net = net
        self.prepare(self)
        if self.is_frozen:
            net.first.requires_grad_(False)
            net.middle.requires_grad_(False)
        trained = [param for param in net.parameters() if param.requires_grad]
        self.optimizer = ZeroRedundancyOptimizer(trained, **{**options, **self.options})
        if self.fully is not None:
            units = [net.first, net.middle, net.last]
            self.ddp: DistributedDataParallel = FullyShardedDataParallel(
                net, self.optimizer, units=units, **mesh, **self.fully
            )
        elif self.sharded is not None:
            self.ddp = ShardedDataParallel(net, self.optimizer, **mesh, **self.sharded)
        else:
            self.ddp = DistributedDataParallel(net, bucket_cap_mb=CAP_MB, **self.ddp_options)
        if self.lazily:
            self.optimizer.gather_lazily(self.ddp)
        if self.overlap is not None:
            self.ddp.register_comm_hook(None, zero_step(self.optimizer, self.hook, **self.overlap))
        elif self.hook is not None:
            self.ddp.register_comm_hook(None, self.hook)

    def train(self, net: Net) -> list[Tensor]:
        """Train a model; gives its parameters."""
        self.build(net)
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, enabled=self.scales)
        for step in range(STEPS):
            self.before(self)
            self.optimizer.zero_grad()
            if self.accumulates:
                with self.ddp.no_sync():
                    scaler.scale(self.ddp(batch(8)).square().mean()).backward()
            loss = self.ddp(batch(step)).square().mean()
            self.between(self)
            scaler.scale(loss).backward()
            self.after(self)
            scaler.step(self.optimizer)
            scaler.update()
        self.optimizer.wait_for_gathers()
        for finish in self.at_end:
            finish()
        with nullcontext() if self.fully is None else unsharded(net, writes=False):
            return [param.detach().clone() for param in net.parameters()]


def batch(step: int) -> Tensor:
    return torch.randn(5, 6, generator=torch.Generator().manual_seed(100 * step + dist.get_rank()))


@dataclass(frozen=True)
class Found:
    """A race, as it travels between processes."""

    text: str
    first: tuple[str, ...]
    second: tuple[str, ...]

    @classmethod
    def of(cls, race: Race) -> "Found":
        sides = [(access.what, *access.stack.functions) for access in (race.first, race.second)]
        return cls(str(race), *sides)


def on_model(
    make: Callable[[], Run], planted: Callable[[], AbstractContextManager[Any]] = nullcontext, **model: Any
) -> list[Found]:
    """Do a run without the model, and on it with what is planted; gives the races found on this rank."""
    expected = make().train(Net())
    net = Net()
    with modelled_streams(checks=False, **model) as streams, planted():
        run = make()
        run.streams = streams
        got = run.train(net)
        streams.current_stream.synchronize()
        del run
        found = [Found.of(race) for race in streams.settle()]
    counts: list[dict[str, int]] = [{}] * dist.get_world_size()
    dist.all_gather_object(counts, streams.communicators.num_started)
    for group in set().union(*counts):  # its ranks have started as many collectives
        assert len({of_rank[group] for of_rank in counts if group in of_rank}) == 1, (group, counts)
    if not found:  # else the bits may be those of the race
        for one, other in zip(got, expected, strict=True):
            assert torch.equal(one, other), (one, other)
    return found


def assert_ordered(*, is_nccl: bool = True, make: Callable[[], Run] | None = None, **run: Any) -> None:
    """A run on the model of streams has no race on this rank; ``make`` builds it, in the place of `Run`."""
    found = on_model(make or partial(Run, **run), is_nccl=is_nccl)
    assert not found, "\n".join(race.text for race in found)


# ---------------------------------------------------------------------- what users do


def replace_data(run: Run) -> None:
    """Replace parameters' data, as an exchange of weights or `vector_to_parameters` does."""
    run.optimizer.wait_for_gathers()
    for param in run.net.parameters():
        param.data = param.data * 0.5


def evaluate_beside(run: Run) -> None:
    """Evaluate on another stream, which waits for what the current one has done; `join` follows."""
    if run.streams is not None and run.net.side is None:
        run.net.side = run.streams.new_stream("the evaluation's stream")
    with ExitStack() as stack, torch.no_grad():
        if run.streams is not None and run.net.side is not None:
            run.net.side.wait_stream(run.streams.current_stream)
            stack.enter_context(run.streams.using(run.net.side))
        run.ddp.module(batch(9))


def join(run: Run) -> None:
    """Wait for the evaluation, as what comes next changes the parameters."""
    if run.streams is not None and run.net.side is not None:
        run.streams.current_stream.wait_stream(run.net.side)


def clip(run: Run) -> None:
    run.optimizer.clip_grad_norm_(0.01)


def clip_on_device(run: Run) -> None:
    """Clip as where the CPU has a backend of its own beside that of the device."""
    with mock.patch.object(norms, "_sends_beside", return_value=True):
        run.optimizer.clip_grad_norm_(0.01)


def pass_again(run: Run) -> None:
    """Add the gradients of another backward pass."""
    run.ddp(batch(7)).square().mean().backward()


def clip_after_another_pass(run: Run) -> None:
    pass_again(run)
    clip(run)


def consolidate(run: Run) -> None:
    run.optimizer.consolidate_state_dict(to=None)
    run.optimizer.state_dict()


def save(run: Run) -> None:
    """Save while training goes on."""
    folder: list[object] = [None]
    if dist.get_rank() == 0:
        made = tempfile.TemporaryDirectory()
        folder = [made.name]
        run.at_end.append(made.cleanup)
    dist.broadcast_object_list(folder)
    saving = save_async(f"{folder[0]}/checkpoint", model=run.net, optimizer=run.optimizer)
    run.at_end[:0] = [saving.wait, dist.barrier]


def reduce_scatters(run: Run) -> None:
    """Send what two streams have made, together and alone, and receive it on either."""
    if run.streams is not None and run.net.side is None:
        run.net.side = run.streams.new_stream("the second stream")
    for cap_mb in (0.0, 1.0):
        bucketer, got = ReduceScatterBucketer(cap_mb), list[Tensor]()
        for number in range(3):
            with _beside(run) if number == 1 else nullcontext():
                bucketer.reduce_scatter_async(_chunks(number, dist.get_rank()), None, got.append)
        with _beside(run):
            bucketer.flush()
            for number, total in enumerate(got):
                of_ranks = [_chunks(number, rank)[dist.get_rank()] for rank in range(dist.get_world_size())]
                assert torch.equal(total, sum(of_ranks[1:], of_ranks[0]))
        join(run)  # before the sums are dropped, some of which were made on the first stream


def _beside(run: Run) -> AbstractContextManager[None]:
    """Use the second stream, which does not wait for the first one."""
    return nullcontext() if run.streams is None or run.net.side is None else run.streams.using(run.net.side)


def _chunks(number: int, rank: int) -> list[Tensor]:
    """Make a chunk for each rank, on the current stream."""
    made = torch.arange(5.0, device=torch.device("cpu")).add(10 * number + rank)
    return [made * (1 + receiver) for receiver in range(dist.get_world_size())]


def leave_middle_out(run: Run) -> None:
    """Leave the middle part unused on one rank."""
    run.net.middle.is_skipped = dist.get_rank() == 1


def recompute(reentrant: bool, run: Run) -> None:
    """Recompute the middle part in the backward pass."""
    run.net.recomputes = reentrant


class Breaks(torch.autograd.Function):
    """Passes a value on; its backward pass raises."""

    @staticmethod
    def forward(ctx: Any, value: Tensor) -> Tensor:
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # type: ignore[override]
        raise ArithmeticError("on purpose")


def break_a_pass(run: Run) -> None:
    """Have a backward pass raise on every rank when half of it is over, and go on with the next batch.

    On an accelerator ranks hear of it a forward pass later than on the CPU. Without `check_finished` other
    batches are left out there, and the bits differ.
    """
    run.optimizer.zero_grad()
    middle = run.net.middle
    handle = middle.register_forward_pre_hook(lambda _, given: (Breaks.apply(given[0]),))
    loss = run.ddp(batch(6)).square().mean()
    handle.remove()
    with suppress(ArithmeticError):
        loss.backward()
    with suppress(ReductionError):
        run.ddp.check_finished()
    run.optimizer.wait_for_gathers()


def middle_beside(run: Run) -> None:
    """Run the model's middle part on a stream of its own, in both passes."""
    if run.streams is not None and run.net.side is None:
        run.net.streams, run.net.side = run.streams, run.streams.new_stream("the middle part's stream")
